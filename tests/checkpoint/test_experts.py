"""Weights of experts on their way into an engine: what is read at once, and what calibration makes of each of them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.models import build_graph
from enginewright.errors import EngineError
from enginewright.passes.fusion.gate_up import FuseGateUp
from enginewright.passes.fusion.qkv import FuseQkv
from enginewright.passes.graph import LinearLayer, linears_of, nodes_of
from enginewright.passes.pass_manager import run_passes
from enginewright.passes.pipeline import run_pipeline
from enginewright.passes.quant import W8A8, Int4Awq, Int4Gptq, Int8Sq, QuantConfig
from enginewright.passes.quant.auto import Auto
from enginewright.passes.quant.choose import UNSEEN
from enginewright.passes.quant.method import Calibration, stored
from enginewright.passes.quant.smooth import UNSEEN as UNSEEN_BY_SMOOTHING
from enginewright.passes.quant.smoothing_sites import sites
from enginewright.passes.streaming import stream
from enginewright.passes.weights import RowReader, open_rows, read, scale, shape_of
from enginewright.plugins import DOMAIN
from enginewright.plugins.experts.route import ROUTE
from enginewright.plugins.plugin import operand
from enginewright.runtime.engine import Engine
from tests import tolerances
from tests.helpers.graphs import DenseRun, random_tokens, relative_error
from tests.helpers.tiny import MemoryCheckpoint, tiny_checkpoint, tiny_config, tiny_model

TEXTS = [random_tokens(length, seed).tolist() for seed, length in enumerate((9, 1, 5))]
EXPERTS, TOP, LAYERS = 11, 2, 3


@pytest.fixture(scope="module")
def checkpoint() -> MemoryCheckpoint:
    return MemoryCheckpoint.tiny("qwen3_moe", num_experts=EXPERTS, num_experts_per_tok=TOP)


def test_each_layer_is_seen_with_the_rows_of_each_expert(checkpoint: MemoryCheckpoint) -> None:
    model, seen = build_graph(checkpoint), 0

    def visit(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> None:
        nonlocal seen
        if linear.experts == 1:
            assert not linear.starts
            return
        seen += 1
        for text, x, starts in zip(TEXTS, inputs, linear.starts, strict=True):
            assert len(x) == len(text) * TOP == starts[-1] and len(starts) == EXPERTS + 1
        own = [linear.rows_of(expert, inputs) for expert in range(EXPERTS)]
        assert [torch.cat(parts).equal(x) for parts, x in zip(zip(*own, strict=True), inputs, strict=True)] == [
            True
        ] * 3

    stream(model, TEXTS, visit)
    assert seen == 2 * LAYERS


CALIBRATED = [Int4Gptq(), Int8Sq(activation_scheme="static"), Int4Awq(), Auto()]


@pytest.mark.parametrize("quant", CALIBRATED[:2], ids=lambda quant: quant.name)  # tests/long has the others
def test_calibrated_mixtures_stay_near(checkpoint: MemoryCheckpoint, quant: QuantConfig) -> None:
    model, kept = build_graph(checkpoint), list[ir.Model]()
    expected = DenseRun(model).step(TEXTS[0])
    _, results = run_pipeline(model, quant, calibration=Calibration(TEXTS, threads=2), keep=kept.append)
    actual = stream(kept[0], TEXTS[:1]).logits(0, 0, len(TEXTS[0])).numpy()
    assert 1e-8 < relative_error(actual, expected) < tolerances.ENGINE_LOGITS["int4-rtn"]
    formats = [stored(linear.weight) for linear in linears_of(kept[0]) if linear.experts > 1]
    assert len(formats) == 2 * LAYERS and all(formats)
    for name, text, of_layer in (("smooth", UNSEEN_BY_SMOOTHING, 1), ("choose_codes", UNSEEN, 2)):
        if name in results:
            notes = results[name].notes
            assert set(notes) == {text} and 0 < len(notes) < of_layer * LAYERS * EXPERTS


def test_an_expert_that_no_text_came_to_is_given_its_neighbours_rows(checkpoint: MemoryCheckpoint) -> None:
    """Its codes are those that its own weight has with the neighbour's activations."""
    model, seen = build_graph(checkpoint), dict[str, list[tuple[int, ...]]]()

    def visit(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> None:
        if linear.experts > 1:
            seen[str(linear.weight.name)] = list(linear.starts)

    stream(model, TEXTS[1:2], visit)  # one token: all experts but two are unseen
    kept = list[ir.Model]()
    run_pipeline(model, Int4Awq(), calibration=Calibration(TEXTS[1:2]), keep=kept.append)
    first = next(linear for linear in linears_of(kept[0]) if linear.experts > 1)
    already = stored(first.weight)
    assert already is not None and already.source is not None
    (starts,) = seen[str(first.weight.name)]
    chosen = [expert for expert in range(EXPERTS) if starts[expert] < starts[expert + 1]]
    assert len(chosen) == TOP
    restored, rows = read(first.weight), first.weight.shape[0] // EXPERTS
    source = ir.Value(name="source", const_value=already.source)
    for expert in range(EXPERTS):
        own = slice(expert * rows, (expert + 1) * rows)
        error = (restored[own] - read(source)[own]).norm() / read(source)[own].norm()
        assert 0 < error < 0.15, expert


SMOOTHED = {
    # Sites; those of experts' own factors, of routers, and of squares; and which sentences say why others are none.
    "qwen3_moe": ((12, 3, 3, 0), set()),
    "gpt_oss": ((9, 0, 3, 0), {"its product is clamped."}),
    "qwen3_next": (
        (11, 2, 2, 0),
        {"no weight that is free to change writes it."},
    ),  # with shared experts that have a gate
    "nemotron_h": ((9, 1, 1, 3), {"no weight that is free to change writes it."}),
    "nemotron_h, latent": ((10, 1, 1, 3), {"no weight that is free to change writes it."}),
}


@pytest.mark.parametrize("case", SMOOTHED)
def test_scaling_what_experts_read_changes_no_result(case: str) -> None:
    family, _, latent = case.partition(", ")
    model = build_graph(MemoryCheckpoint.tiny(family, **({"moe_latent_size": 25} if latent else {})))
    FuseGateUp()(model)
    FuseQkv()(model)
    expected = stream(model, TEXTS[:1]).logits(0, 0, len(TEXTS[0]))
    found, refusals = sites(model)
    counts = (
        len(found),
        sum(site.experts > 1 for site in found),
        sum(bool(site.routers) for site in found),
        sum(site.power == 2 for site in found),
    )
    assert (counts, {refusal.partition(": ")[2] for refusal in refusals}) == SMOOTHED[case]
    before = {linear.weight: read(linear.weight) for linear in linears_of(model)}
    random = torch.Generator().manual_seed(1)
    for site in found:
        site.apply(torch.exp2(6 * torch.rand(site.experts, site.channels, generator=random) - 3))
    assert all(not read(linear.weight).equal(before[linear.weight]) for site in found for linear in site.linears)
    logits = stream(model, TEXTS[:1]).logits(0, 0, len(TEXTS[0]))
    assert float((logits - expected).abs().max()) < tolerances.DENSE_LOGITS


def outliers(checkpoint: MemoryCheckpoint, norm: float = 1, up: float = 1) -> ir.Model:
    """A model with one channel of the experts' input `norm` times as large, and one in the last expert `up` times."""
    model = build_graph(checkpoint)
    for site in sites(model)[0]:
        if site.routers or site.experts > 1:
            for weight in site.before:  # alone: what reads it is not scaled back
                rows = torch.ones(site.experts, shape_of(weight)[0] // site.experts)
                rows[-1, site.first + 7] = norm if site.routers else up
                scale(weight, rows=rows.flatten())
    return model


def layer_errors(model: ir.Model, quant: QuantConfig) -> dict[str, float]:
    """Relative errors of the experts' products, means over experts: {"gate_up": …, "down": …}."""
    run_passes(model, quant.prepare(Calibration(TEXTS)))
    errors: dict[str, list[float]] = {"gate_up": [], "down": []}

    def visit(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> None:
        if not linear.grouped:
            return
        rows, weights = shape_of(linear.weight)[0] // linear.experts, read(linear.weight)
        for expert, weight in enumerate(weights.split(rows)):
            x = torch.cat(linear.rows_of(expert, inputs))
            if len(x):
                y, kept = x @ weight.t(), quant.restore(*quant.quantize(weight, "weight"))
                error = (quant.round_activations(x) @ kept.t() - y).norm() / y.norm()
                errors["down" if "down" in str(linear.weight.name) else "gate_up"].append(float(error))

    stream(model, TEXTS, visit)
    return {name: float(np.mean(each)) for name, each in errors.items()}


def test_smoothing_helps_where_channels_of_experts_stick_out(checkpoint: MemoryCheckpoint) -> None:
    for sizes, name in (({"norm": 100}, "gate_up"), ({"up": 100}, "down")):
        plain, smoothed = (layer_errors(outliers(checkpoint, **sizes), quant) for quant in (W8A8(0), Int8Sq(0)))
        assert smoothed[name] < 0.7 * plain[name]


def test_smoothing_leaves_the_numbers_of_routers_what_they_are(checkpoint: MemoryCheckpoint) -> None:
    """Times powers of two: what BFLOAT16 holds, it holds still."""
    model = outliers(checkpoint, norm=100)
    weights = [operand(node, 1) for node in nodes_of(model, ROUTE.name, domain=DOMAIN)]
    before = [read(weight) for weight in weights]
    run_passes(model, Int8Sq(0).prepare(Calibration(TEXTS)))
    for weight, exact in zip(weights, before, strict=True):
        ratio = (read(weight) / exact).log2()
        assert ratio.equal(ratio[:1].round().expand_as(ratio)) and ratio.max() > ratio.min()


def test_smoothing_says_which_experts_no_text_came_to(checkpoint: MemoryCheckpoint) -> None:
    model = build_graph(checkpoint)
    results = run_passes(model, Int8Sq().prepare(Calibration(TEXTS[1:2])))
    assert results["smooth"].notes == (UNSEEN_BY_SMOOTHING,) * (LAYERS * (EXPERTS - TOP))


def test_packing_reads_one_expert_at_a_time(checkpoint: MemoryCheckpoint) -> None:
    """Weights that are stored one by one are read one by one, and only the last few stay open."""
    names = {f"model.layers.0.mlp.experts.{e}.{p}_proj.weight" for e in range(EXPERTS) for p in ("gate", "up", "down")}
    parts = {}
    for name, value in checkpoint.stored.items():
        prefix, _, kind = name.partition(".experts.")
        if kind == "gate_up_proj":
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                parts[f"{prefix}.experts.{expert}.gate_proj.weight"] = gate
                parts[f"{prefix}.experts.{expert}.up_proj.weight"] = up
        elif kind:
            parts |= {f"{prefix}.experts.{expert}.down_proj.weight": own for expert, own in enumerate(value)}
        else:
            parts[name] = value
    apart = MemoryCheckpoint(checkpoint.config, parts)
    together, model = build_graph(checkpoint), build_graph(apart)
    assert DenseRun(model).step(TEXTS[0]).tolist() == DenseRun(together).step(TEXTS[0]).tolist()
    apart.reads.clear()
    weight = next(linear.weight for linear in linears_of(model) if linear.experts > 1)
    rows = weight.shape[0] // EXPERTS
    reader: RowReader = open_rows(weight)
    for expert in range(EXPERTS):
        before = len(apart.reads)
        reader(expert * rows, expert * rows + rows // 2)
        reader(expert * rows + rows // 2, (expert + 1) * rows)
        assert len(apart.reads) - before == 2  # its gate and its up
    assert set(apart.reads) <= names and len(apart.reads) == len(set(apart.reads)) == 2 * EXPERTS


@pytest.mark.parametrize("family", ["mixtral", "minimax_m2", "gpt_oss"])
def test_what_transformers_saves_is_read(family: str, tmp_path: Path) -> None:
    """Under the names of published checkpoints, one tensor for each expert."""
    folder = tiny_checkpoint(tmp_path, family)
    graph = build_graph(open_checkpoint(str(folder)))
    in_memory = MemoryCheckpoint.of(tiny_model(tiny_config(family)), tiny_config(family))
    same = DenseRun(build_graph(in_memory)).step(TEXTS[0])
    np.testing.assert_array_equal(DenseRun(graph).step(TEXTS[0]), same)


def test_weights_of_experts_are_one_section_of_several_matrices(checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    build_engine(checkpoint, BuildConfig(gate=None), tmp_path / "tiny.engine")
    with Engine.open(tmp_path / "tiny.engine") as engine:
        forms = [form for name, form in engine.file.sections.items() if "experts" in name]
    assert len(forms) == 2 * LAYERS
    expected = {((EXPERTS, 42, 48), "r16_pairs"), ((EXPERTS, 48, 21), "r16")}
    assert {(form.shape, form.layout) for form in forms} == expected


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"num_experts_per_tok": 8}, "num_experts_per_tok is 8, but there are 7 experts"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers is \[3\], but there are 3 layers"),
        ({"num_experts": 9}, "wrong shape"),
    ],
)
def test_configs_that_do_not_fit_are_refused(changed: dict[str, object], why: str) -> None:
    model = tiny_model(tiny_config("qwen3_moe"))
    with pytest.raises(EngineError, match=why):
        build_graph(MemoryCheckpoint.of(model, tiny_config("qwen3_moe", **changed)))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"n_group": 5}, "12 experts cannot be cut into n_group = 5 groups"),
        ({"topk_group": 5}, "topk_group is 5, but there are 4 groups"),
        ({"topk_group": 1, "num_experts_per_tok": 4}, "num_experts_per_tok is 4, more than 1 groups have"),
    ],
)
def test_groups_that_do_not_fit_are_refused(changed: dict[str, object], why: str) -> None:
    model = tiny_model(tiny_config("glm4_moe"))
    with pytest.raises(EngineError, match=why):
        build_graph(MemoryCheckpoint.of(model, tiny_config("glm4_moe", **changed)))
