"""Adapters prepared for an engine: read in numpy from their files, they are what merged weights are."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from enginewright.adapter_file import ADAPTER, AdapterFile, Factor, SiteAdapter
from enginewright.adapter_sites import ADAPTER_SITES, AdapterSites, Site
from enginewright.builder.adapters import Adapter, MergedCheckpoint
from enginewright.builder.adapters.prepare import prepare
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.engine_file import EngineFile, EngineWriter
from enginewright.errors import CorruptEngineError, EngineError, UnsupportedModelError, UsageError
from enginewright.manifest import About
from enginewright.passes.quant import quant_config
from enginewright.runtime.core.adapters import check_sites
from enginewright.runtime.engine import Engine
from tests.adapters.test_merge import EXPERTS, LINEARS, Q_A, Q_B, WEIGHTS, edited, trained
from tests.build.test_method_engines import CALIBRATION
from tests.engine_file.test_weights import Reader, matrix
from tests.helpers.adapter_sites import mapped, mapped_bias, row_sources
from tests.helpers.adapters import trained_experts
from tests.helpers.command import run_engine
from tests.helpers.engines import copied
from tests.helpers.quantized import GPTQ, gptq, tiny_quantized
from tests.helpers.tiny import MemoryCheckpoint, saved, tiny_checkpoint, tiny_config, tiny_model

Array = npt.NDArray[Any]
TIED, UNTIED = ({"tie_word_embeddings": is_tied} for is_tied in (True, False))
BIASES = {"attention_bias": True, "mlp_bias": True}
EVERY = ["q_proj", "k_proj", *LINEARS[1:], "up_proj"]
PATTERNS = {"rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.down_proj": 40}, "alpha_pattern": {"down_proj": 1.5}}


def built(checkpoint: MemoryCheckpoint, folder: Path, quant: str | None = None) -> Path:
    method = quant_config(quant) if quant else None
    (folder / "data.txt").write_text(CALIBRATION)
    data = str(folder / "data.txt") if method and method.calibrated else None
    build_engine(checkpoint, BuildConfig(quant=method, gate=None, calib_data=data), folder / "base.engine")
    return folder / "base.engine"


def prepared(folder: Path, engine: Path, name: str = "x.lora") -> Path:
    with Engine.open(engine) as opened:
        prepare(Adapter(folder), opened, folder / name)
    return folder / name


@dataclass
class Base:
    """An engine, read in numpy by what docs/engine-file.md says."""

    sites: tuple[Site, ...]
    vectors: Mapping[str, bytes]
    reader: Reader

    @staticmethod
    def of(path: Path) -> "Base":
        with EngineFile.open(path) as file:
            vectors = {name: file.read_section(name) for name in file.sections if name.startswith(ADAPTER_SITES)}
            sites = AdapterSites.from_json(vectors[ADAPTER_SITES], file.sections).sites
        return Base(sites, vectors, Reader(path))

    def weight(self, site: Site) -> Array:
        return self.reader.restored(site.weight).astype(np.float64)

    def bias(self, site: Site) -> Array:
        found = None if site.bias is None else self.reader.tensor(site.bias)
        return np.zeros(site.matrices * max(site.rows, site.columns)) if found is None else found.astype(np.float64)

    @property
    def tables(self) -> Mapping[str, str]:
        """Name of a table in the plan → its module."""
        return {site.weight: site.runs[0].module for site in self.sites if site.kind == "table"}

    def module_of(self, site: Site, module: str) -> str:
        """The module with the weight of a layer in the checkpoint: a tied head has that of the table."""
        return self.tables.get(site.weight, module)

    def as_checkpoint(self, like: MemoryCheckpoint, stored: Callable[[Array], Array]) -> MemoryCheckpoint:
        """The checkpoint of which the engine has exactly the weights, as it multiplies them.

        Args:
            stored: [out, in] → as the checkpoint stores it.
        """
        sites = [site for site in self.sites if site.kind == "table" or site.weight not in self.tables]
        ones = {module: 1.0 for site in sites for module, _ in row_sources(site, self.vectors)}
        layers: dict[str, dict[int, Array]] = {module: {} for module in ones}
        biases: dict[str, dict[int, float]] = {module: {} for module in ones}
        vocabulary = {site.runs[0].module for site in sites if site.kind != "linear"}  # they are never transposed
        for site in sites:
            factors = mapped(
                site,
                self.vectors,
                lambda module, wide=site.rows if site.transposed else site.columns: np.ones((10_000, wide)),
            )  # type: ignore[misc]
            rows, bias = self.weight(site) / factors, self.bias(site)
            if site.transposed:
                by_head = rows.reshape(site.heads, site.rows, site.columns)
                rows = by_head.transpose(0, 2, 1).reshape(-1, site.rows)
            if site.column_order is not None:
                rows = rows[:, np.argsort(np.frombuffer(self.vectors[site.column_order], "<i4"))]
            if site.bias is not None:
                bias = bias / mapped_bias(site, self.vectors, lambda module: np.ones(10_000))
            for number, (module, row) in enumerate(row_sources(site, self.vectors)):
                layers[module][row] = rows[number]
                biases[module][row] = bias[number]
        tensors = dict(like.stored)
        parameters: dict[str, list[torch.Tensor]] = {}  # those with matrices of all experts
        for module in layers:
            rows = np.stack([layers[module][row] for row in range(len(layers[module]))])
            weight = torch.from_numpy(rows if module in vocabulary else stored(rows))
            if module.endswith("]"):
                parameters.setdefault(module.partition("[")[0], []).append(weight.float())
            else:
                tensors[f"{module}.weight"] = weight.float()
            if f"{module}.bias" in tensors:
                vector = np.array([biases[module][row] for row in range(len(biases[module]))])
                tensors[f"{module}.bias"] = torch.from_numpy(vector).float()
        turned = like.config["model_type"] == "gpt_oss"
        tensors |= {
            name: torch.stack([one.T if turned else one for one in matrices]) for name, matrices in parameters.items()
        }
        config = {key: value for key, value in like.config.items() if key != "quantization_config"}
        return MemoryCheckpoint(config, tensors)


def products(adapter: SiteAdapter, matrices: int) -> tuple[Array, Array]:
    """Σ B A and a bound of its error, [N, K]; in a layer of several matrices of all of them, one after another."""
    count = len(adapter.matrices) or 1
    parts = [_products(adapter, index, count) for index in range(count)]
    of_all = np.zeros((2, matrices, adapter.rows, adapter.columns))
    for number, part in zip(adapter.matrices or (0,), parts, strict=True):
        of_all[:, number] = part
    total, bound = of_all.reshape(2, -1, adapter.columns)
    return total, bound


def _products(adapter: SiteAdapter, index: int, count: int) -> tuple[Array, Array]:
    """The same of one of `count` matrices."""
    outputs, inputs = (adapter.columns, adapter.rows) if adapter.table else (adapter.rows, adapter.columns)
    total, bound = np.zeros((2, outputs, inputs))
    if adapter.rank:
        of_a = adapter.a if adapter.shared == "a" else part_of(adapter.a, index, count)
        a, a_error = numbers(of_a, adapter.rank, inputs)
        for piece in adapter.pieces:
            of_b = piece.b if adapter.shared == "b" else part_of(piece.b, index, count)
            b, b_error = numbers(of_b, piece.count, piece.rank)
            own = slice(piece.first_rank, piece.first_rank + piece.rank)
            total[piece.begin : piece.begin + piece.count] = b @ a[own]
            of_piece = np.abs(b) @ a_error[own] + b_error @ (np.abs(a[own]) + a_error[own])
            bound[piece.begin : piece.begin + piece.count] = of_piece
    return (total.T, bound.T) if adapter.table else (total, bound)


def part_of(factor: Factor, index: int, count: int) -> Factor:
    """One of `count` matrices that follow each other."""

    def cut(view: memoryview) -> memoryview:
        size = len(data := view.cast("B")) // count
        return data[index * size : (index + 1) * size]

    return Factor(cut(factor.data), None if factor.scale is None else cut(factor.scale))


def numbers(factor: Factor, rows: int, columns: int) -> tuple[Array, Array]:
    """A factor and a bound of the error of each number, [rows, columns]."""
    if factor.scale is None:
        values = matrix(bytes(factor.data), "bf16", rows, columns, "r16_columns").astype(np.float64)
        return values, np.abs(values) * 2.0**-8
    scale = np.frombuffer(factor.scale, "<f4").astype(np.float64)[:, None]
    values = matrix(bytes(factor.data), "i8", rows, columns, "r16_columns").astype(np.float64) * scale
    assert np.abs(values).max(axis=1) == pytest.approx(127 * scale[:, 0])
    return values, np.broadcast_to(0.501 * scale, values.shape)


def vector(view: memoryview | None, otherwise: Array) -> Array:
    return otherwise if view is None else np.frombuffer(view, "<f4").astype(np.float64)


def check(engine: Path, lora: Path, checkpoint: MemoryCheckpoint, adapter: Adapter) -> int:
    """Compares all sites that an adapter changes with merged weights; returns their number."""
    base, is_transposed = Base.of(engine), checkpoint.config["model_type"] == "gpt2"

    def turned(weight: Array) -> Array:
        return weight.T.copy() if is_transposed else weight

    merged = MergedCheckpoint(base.as_checkpoint(checkpoint, turned), [adapter])

    def read(kind: str, site: Site) -> Callable[[str], Array]:
        def of_module(module: str) -> Array:
            if f"{module}.{kind}" not in merged.tensors:
                module = base.module_of(site, module)
            parameter, _, expert = module.removesuffix("]").partition("[")
            values = merged.read(parameter)[int(expert)] if expert else merged.read(f"{module}.{kind}")
            is_turned = expert and checkpoint.config["model_type"] == "gpt_oss"
            found: Array = (values.T if is_turned else values).double().numpy()
            return turned(found) if kind == "weight" and site.kind == "linear" else found

        return of_module

    with EngineFile.open(engine) as file, AdapterFile.open(lora) as opened:
        opened.check_fits(file.manifest)
        for site in base.sites:
            expected = mapped(site, base.vectors, read("weight", site))
            if (changed := opened.sites.get(site.key)) is None:
                weight = base.weight(site)
                np.testing.assert_allclose(expected, weight, rtol=1e-5, atol=1e-6 * np.abs(weight).max())
                continue
            added, rounding = products(changed, site.matrices)
            weight = base.weight(site)
            weight = vector(changed.gain, np.ones(len(weight)))[:, None] * weight
            if changed.replaced is not None:
                ids = np.frombuffer(changed.replaced.ids, "<i4")
                assert changed.table or not weight[ids].any(), "the product with the engine's row is dropped"
                weight[ids] = 0
                added[ids], rounding[ids] = numbers(changed.replaced.rows, len(ids), changed.columns)
            error, bound = np.abs(weight + added - expected), rounding + 1e-5 * np.abs(weight) + 1e-7
            assert (error <= bound).all(), (site.weight, (error - bound).max())
            assert added.any() or changed.bias is not None
            if site.bias is not None:
                bias = base.bias(site) + vector(changed.bias, np.zeros(site.rows))
                wanted = mapped_bias(site, base.vectors, read("bias", site))
                np.testing.assert_allclose(bias, wanted, rtol=1e-5, atol=1e-6, err_msg=str(site.bias))
        ranks = [piece.rank for site in opened.sites.values() for piece in site.pieces]
        assert opened.max_rank == max(ranks, default=0)
        return len(opened.sites)


SOME: dict[str, Any] = {"target_modules": ["q_proj", "o_proj"]}
CASES: list[tuple[str, dict[str, Any], str | None, dict[str, Any]]] = [
    ("llama", {}, None, {"target_modules": LINEARS}),
    ("llama", {}, "int8-sq", {"target_modules": EVERY, **PATTERNS}),
    ("llama", BIASES, "int8-sq", {"target_modules": LINEARS, "lora_bias": True, "r": 1}),
    ("llama", BIASES, "int8-sq", {"target_modules": ["q_proj"], "bias": "all"}),
    ("llama", {}, "int8-sq", {"target_modules": LINEARS, "use_dora": True}),
    ("qwen3", {}, "int4-awq", {"target_modules": EVERY, "use_dora": True, "use_rslora": True, "r": 64}),
    ("phi3", {}, "int8-sq", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    ("gpt2", {}, "int8-sq", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "use_dora": True}),
    ("gemma2", {}, "mxfp4", {"target_modules": LINEARS, "use_dora": True}),
    ("falcon_h1", {}, "fp8", {"target_modules": ["in_proj", "q_proj", "gate_proj", "o_proj"], "use_dora": True}),
    ("qwen3_next", {}, None, {"target_modules": ["q_proj", "in_proj_qkvz", "out_proj"]}),
    ("qwen3_moe", {}, "int8-sq", {**EXPERTS, "rank_pattern": {"gate_up_proj": 2}, "alpha_pattern": {"down_proj": 9}}),
    ("mixtral", {}, "int4-awq", {**EXPERTS, "r": 1}),
    ("gpt_oss", {}, None, EXPERTS),
    ("deepseek_v3", {}, "int8-wo", {"target_modules": ["kv_b_proj", "kv_a_proj_with_mqa"]}),
    ("llama", UNTIED, None, {"target_modules": ["lm_head", "q_proj", "o_proj"]}),
    ("llama", TIED, "int8-wo", {"target_modules": ["lm_head", "embed_tokens", "down_proj"], "r": 11}),
    ("llama", UNTIED, "int8-sq", {"target_modules": ["lm_head", "q_proj", "o_proj"], "use_dora": True}),
    ("gemma3_text", {}, "int4-rtn", {"target_modules": ["embed_tokens", "o_proj", "q_proj"]}),
    ("llama", TIED, "fp8", {"target_modules": ["q_proj", "o_proj"], "trainable_token_indices": [306, 0, 5]}),
    ("llama", UNTIED, None, {**SOME, "trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [9, 3, 306]}}),
    ("llama", TIED, "int8-wo", {**SOME, "modules_to_save": ["embed_tokens", "lm_head"]}),
]


@pytest.mark.parametrize(
    ("family", "overrides", "quant", "lora"), CASES, ids=[f"{f}-{q}-{'-'.join(c)}" for f, _, q, c in CASES]
)
def test_a_prepared_adapter_is_the_merged_weights(
    tmp_path: Path, family: str, overrides: dict[str, Any], quant: str | None, lora: dict[str, Any]
) -> None:
    model = tiny_model(config := tiny_config(family, **overrides))
    trained(model, tmp_path, **lora)
    without_base(tmp_path)
    checkpoint = MemoryCheckpoint.of(model, config)
    engine = built(checkpoint, tmp_path, quant)
    file = prepared(tmp_path, engine)
    assert check(engine, file, checkpoint, Adapter(tmp_path)) >= config.get("num_hidden_layers", config.get("n_layer"))
    assert file.read_bytes() == prepared(tmp_path, engine, "again.lora").read_bytes()


def without_base(folder: Path) -> None:
    """Takes the model's own weights, which PEFT saves with factors of heads and embeddings, out of an adapter."""
    stored = load_file(folder / WEIGHTS)
    edited(folder, tensors={name: None for name in stored if name.endswith(".base_layer.weight")})


@pytest.mark.parametrize("quant", [None, "int8-wo", "int4-rtn"])
@pytest.mark.parametrize("kind", ["factors", "whole matrices"])
def test_rows_that_the_engine_has_are_not_in_the_file(tmp_path: Path, quant: str | None, kind: str) -> None:
    """PEFT saves whole matrices, in which some rows may be the model's, here in fp32, which the builder rounds."""
    model = tiny_model(config := tiny_config("llama", **TIED))
    model.model.embed_tokens.weight.data *= 1 + 2**-10
    both = ["embed_tokens", "lm_head"]
    choices = {"target_modules": both} if kind == "factors" else {**SOME, "modules_to_save": both}
    trained(model, tmp_path, **choices)
    engine = built(MemoryCheckpoint.of(model, config), tmp_path, quant)
    own = model.model.embed_tokens.weight.detach()
    name = "{}.base_layer.weight" if kind == "factors" else "{}.weight"
    head, table = (f"base_model.model.{name.format(module)}" for module in ("lm_head", "model.embed_tokens"))
    changed = own.clone()
    changed[[3, 306]] += 0.1
    edited(tmp_path, tensors={head: own.clone(), table: changed})
    with AdapterFile.open(prepared(tmp_path, engine)) as adapter:
        tables = adapter.sites["model.embed_tokens.weight.table"]
        assert tables.replaced is not None and list(np.frombuffer(tables.replaced.ids, "<i4")) == [3, 306]
        rows, _ = numbers(tables.replaced.rows, 2, 48)
        added = _products(tables, 0, 1)[0][[3, 306]] if kind == "factors" else 0
        np.testing.assert_allclose(rows, changed[[3, 306]].double().numpy() + added, atol=0.06, rtol=0)
        if kind == "factors":
            assert adapter.sites["model.embed_tokens.weight"].replaced is None
        else:
            assert adapter.sites["model.embed_tokens.weight"].replaced is None
            assert tables.rank == 0


def experts_apart(model: PreTrainedModel, folder: Path) -> MemoryCheckpoint:
    """The checkpoint that transformers saves, which has each expert's layers by themselves."""
    saved(copy.deepcopy(model).to(torch.bfloat16), folder)
    opened = open_checkpoint(str(folder))
    return MemoryCheckpoint(dict(opened.config), {name: opened.read(name) for name in opened.tensors})


@pytest.mark.parametrize("kind", ["single layers", "parameters"])
def test_an_adapter_of_experts_that_are_stored_one_by_one(tmp_path: Path, kind: str) -> None:
    model = tiny_model(tiny_config("qwen3_moe"))
    if kind == "single layers":
        trained_experts(model, tmp_path)
    else:
        trained(model, tmp_path, **EXPERTS)
    checkpoint = experts_apart(model, tmp_path / "base")
    engine = built(checkpoint, tmp_path, "int8-sq")
    file = prepared(tmp_path, engine)
    layers = model.config.num_hidden_layers * (2 if kind == "single layers" else 3)
    assert check(engine, file, checkpoint, Adapter(tmp_path)) == layers
    with AdapterFile.open(file) as adapter:
        site = adapter.sites["model.layers.0.mlp.experts.gate_up_proj.weight"]
        if kind == "single layers":
            assert site.matrices == (1, 2, 3, 5, 6) and [piece.rank for piece in site.pieces] == [11, 7]
        else:
            assert site.rank == 16 and [piece.first_rank for piece in site.pieces] == [0, 0], "gate and up share A"


@pytest.mark.parametrize("order", ["shared", "each"])
def test_an_adapter_of_an_engine_in_act_order(tmp_path: Path, order: str) -> None:
    tiny = tiny_quantized(gptq(order=order), {**GPTQ, "desc_act": True}, mlp_bias=True)
    trained(tiny.model, tmp_path, target_modules=EVERY, use_dora=True)
    engine = built(tiny.checkpoint, tmp_path)
    layers = check(engine, prepared(tmp_path, engine), tiny.checkpoint, Adapter(tmp_path))
    assert layers == 4 * tiny.checkpoint.config["num_hidden_layers"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of the tiny llama, whose layers have biases."""
    return built(MemoryCheckpoint.tiny("llama", **BIASES), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def lora(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of all kinds of sections for `base`."""
    folder = tmp_path_factory.mktemp("lora")
    trained(tiny_model(tiny_config("llama", **BIASES)), folder, target_modules=LINEARS, use_dora=True, bias="all")
    stored = load_file(folder / WEIGHTS)
    edited(folder, tensors={name: None for name in stored if "norm" in name and name.endswith(".bias")})
    return prepared(folder, base)


NAN = torch.full((7, 48), float("nan"))
EMBEDDING = "model.embed_tokens.weight"
HEAD = "base_model.model.lm_head.weight"
ROWS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
EMBED_A, EMBED_B = (f"base_model.model.model.embed_tokens.lora_embedding_{part}" for part in "AB")
IDS: dict[str, Any] = {"trainable_token_indices": [0, 5]}
EMBED: dict[str, Any] = {"target_modules": ["embed_tokens"]}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], type[EngineError], str]] = [
    ({}, {}, {Q_A: NAN}, EngineError, "not finite"),
    ({}, {}, {Q_A: torch.full((7, 48), 3.4e38)}, EngineError, "not finite"),
    ({}, {}, {Q_A: torch.zeros(7, 47)}, EngineError, r"lora_A.weight has shape \[7, 47\], .* \[7, 48\]"),
    ({}, {}, {Q_B: torch.zeros(49, 7)}, EngineError, r"lora_B.weight has shape \[49, 7\], .* \[48, 7\]"),
    ({"r": 321}, {}, {}, UnsupportedModelError, "rank 321.*at most 320.*\n.*engine build --merge"),
    ({"modules_to_save": ["input_layernorm"]}, {}, {}, UnsupportedModelError, "input_layernorm.*norms.*are no"),
    ({"modules_to_save": ["o_proj"]}, {}, {}, UnsupportedModelError, "o_proj.*replaces the whole layer"),
    ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, {}, {}, UnsupportedModelError, "layers.1.* model"),
    ({**IDS}, {}, {ROWS: torch.full((2, 48), float("inf"))}, EngineError, "not finite"),
    ({**IDS}, {}, {ROWS: torch.full((2, 48), 3.4e38)}, EngineError, "not finite"),
    ({**IDS}, {}, {ROWS: torch.zeros(2, 47)}, EngineError, r"rows of shape|has shape \[2, 47\], .* \[2, 48\]"),
    ({**IDS}, {}, {ROWS: torch.zeros(3, 48)}, EngineError, r"rows of shape \[3, 48\] for 2 tokens"),
    ({**IDS}, {"trainable_token_indices": [5, 5]}, {}, EngineError, "embed_tokens has a token twice"),
    ({**IDS}, {"trainable_token_indices": [-1, 5]}, {}, EngineError, "or one below 0"),
    (
        {**IDS},
        {"trainable_token_indices": [5, 307]},
        {},
        UnsupportedModelError,
        r"adds tokens .* token 307, .*\n.*tokenizer",
    ),
    ({**IDS}, {"alora_invocation_tokens": [5]}, {}, UnsupportedModelError, "embed_tokens.*tokens before them"),
    (
        {**IDS},
        {},
        {EMBED_A: torch.zeros(7, 307), EMBED_B: torch.zeros(48, 7)},
        UnsupportedModelError,
        "other changes of",
    ),
    ({**EMBED}, {}, {EMBED_A: torch.zeros(7, 306)}, EngineError, r"\[7, 306\], .* \[7, 307\]"),
    ({**EMBED}, {}, {EMBED_B: torch.zeros(49, 7)}, EngineError, r"\[49, 7\], .* \[48, 7\]"),
    (
        {**EMBED},
        {},
        {EMBED_A: torch.zeros(7, 309)},
        UnsupportedModelError,
        r"adds tokens .* 309 tokens.* 307.*\n.*tokenizer",
    ),
    ({**EMBED}, {}, {EMBED_A: torch.full((7, 307), float("nan"))}, EngineError, "not finite"),
    ({**EMBED, "r": 321}, {}, {}, UnsupportedModelError, "embed_tokens .*rank 321.*at most 320"),
    ({**EMBED}, {"alora_invocation_tokens": [5]}, {}, UnsupportedModelError, "embed_tokens.*tokens before them"),
    (
        {"modules_to_save": ["lm_head"]},
        {},
        {HEAD: torch.zeros(309, 48)},
        UnsupportedModelError,
        "adds tokens to lm_head",
    ),
    ({"modules_to_save": ["lm_head"]}, {}, {HEAD: torch.zeros(305, 48)}, EngineError, r"\[305, 48\], .* \[307, 48\]"),
    ({"modules_to_save": ["lm_head"]}, {}, {HEAD: torch.full((307, 48), float("nan"))}, EngineError, "not finite"),
    (
        {"modules_to_save": ["lm_head"]},
        {"alora_invocation_tokens": [5]},
        {},
        UnsupportedModelError,
        "rows of its own in lm_h",
    ),
]


@pytest.mark.parametrize(("choices", "config", "tensors", "error", "text"), REFUSED, ids=[one[-1] for one in REFUSED])
def test_adapters_that_are_refused(
    base: Path,
    tmp_path: Path,
    choices: dict[str, Any],
    config: dict[str, Any],
    tensors: dict[str, Any],
    error: type[EngineError],
    text: str,
) -> None:
    values = tiny_config("llama", **BIASES)
    trained(tiny_model(values), tmp_path, **{"target_modules": ["q_proj"], **choices})
    edited(tmp_path, config, tensors)
    engine = base
    if "layers_to_transform" in choices:  # an adapter of a deeper model
        engine = built(MemoryCheckpoint.tiny("llama", num_hidden_layers=1), tmp_path)
    with pytest.raises(error, match=text):
        prepared(tmp_path, engine)
    assert not (tmp_path / "x.lora").exists()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of the tiny qwen3_moe."""
    return built(MemoryCheckpoint.tiny("qwen3_moe"), tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def mixed(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of experts for `mixture`."""
    folder = tmp_path_factory.mktemp("mixed")
    trained(tiny_model(tiny_config("qwen3_moe")), folder, **EXPERTS)
    return prepared(folder, mixture)


def test_what_experts_do_not_have_is_refused(mixture: Path, tmp_path: Path) -> None:
    trained(tiny_model(tiny_config("qwen3_moe")), tmp_path, **EXPERTS, r=321)
    with pytest.raises(UnsupportedModelError, match=r"mlp.experts.* rank 321: at most 320.*\n.*--merge"):
        prepared(tmp_path, mixture)
    trained(tiny_model(tiny_config("qwen3_moe")), tmp_path, target_modules=["q_proj"])
    router = "base_model.model.model.layers.0.mlp.gate"
    edited(tmp_path, tensors={f"{router}.lora_{part}.weight": torch.ones(7, n) for part, n in (("A", 48), ("B", 7))})
    with pytest.raises(UnsupportedModelError, match=r"layers.0.mlp.gate, which it cannot.* routers.*\n.*--merge"):
        prepared(tmp_path, mixture)


def test_experts_of_another_model_and_missing_biases_are_refused(mixture: Path, tmp_path: Path) -> None:
    trained(tiny_model(tiny_config("qwen3_moe", num_experts=9)), tmp_path, **EXPERTS)
    with pytest.raises(UnsupportedModelError, match=r"experts.*\[63, 48\] and \[42, 63\] fit no experts.*\n.*--merge"):
        prepared(tmp_path, mixture)
    trained(tiny_model(tiny_config("llama")), tmp_path / "bias", target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(UnsupportedModelError, match=r"the bias of .*q_proj"):
        prepared(tmp_path / "bias", built(MemoryCheckpoint.tiny("llama"), tmp_path))


def test_lengths_of_single_experts_and_two_updates_are_refused(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("qwen3_moe"))
    engine = built(experts_apart(model, tmp_path / "base"), tmp_path)
    trained_experts(model, tmp_path)
    module = "base_model.model.model.layers.0.mlp.experts.1.up_proj"
    lengths = {
        name.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(48 if "down" in name else 21)
        for name in load_file(tmp_path / WEIGHTS)
        if "lora_A" in name
    }
    edited(tmp_path, {"use_dora": True}, lengths)
    with pytest.raises(UnsupportedModelError, match=r"experts.1.*DoRA.*\n.*--merge"):
        prepared(tmp_path, engine)
    trained_experts(model, tmp_path)
    edited(tmp_path, tensors={f"{module}.lora_A.weight": torch.zeros(7, 47)})
    with pytest.raises(EngineError, match=r"experts.1.up_proj.lora_A.weight has shape \[7, 47\], .* \[7, 48\]"):
        prepared(tmp_path, engine)
    trained_experts(model, tmp_path)
    whole = "base_model.model.model.layers.0.mlp.experts"
    factors = {f"{whole}.lora_A.weight": torch.ones(7 * 7, 48), f"{whole}.lora_B.weight": torch.ones(42, 7 * 7)}
    edited(tmp_path, {"target_parameters": ["mlp.experts.gate_up_proj"]}, factors)
    with pytest.raises(EngineError, match=r"two of its updates change .*experts\.gate_up_proj"):
        prepared(tmp_path, engine)


def test_sites_of_another_engine_are_refused(mixture: Path, mixed: Path) -> None:
    with EngineFile.open(mixture) as file, AdapterFile.open(mixed) as adapter:
        sites = AdapterSites.from_json(file.read_section(ADAPTER_SITES), file.sections).sites
        check_sites(adapter, sites)
        for change in {"experts": 0}, {"experts": 6}, {"experts": 0, "heads": 7}, {"rows": 41}, {"weight": "other"}:
            wrong = [msgspec.structs.replace(site, **change) if site.experts else site for site in sites]
            with pytest.raises(CorruptEngineError, match=r"has no adapter site .*experts"):
                check_sites(adapter, wrong)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of the tiny deepseek_v3."""
    return built(MemoryCheckpoint.tiny("deepseek_v3"), tmp_path_factory.mktemp("latent"))


@pytest.mark.parametrize(
    ("choices", "text"), [({"use_dora": True}, "DoRA"), ({"alora_invocation_tokens": [7]}, "tokens before them")]
)
def test_what_heads_do_not_have_is_refused(latent: Path, tmp_path: Path, choices: dict[str, Any], text: str) -> None:
    trained(tiny_model(tiny_config("deepseek_v3")), tmp_path, target_modules=["kv_b_proj"], **choices)
    with pytest.raises(UnsupportedModelError, match=rf"kv_b_proj.*{text}.*\n.*--merge"):
        prepared(tmp_path, latent)


HEADS_LIES: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("is not there as", lambda site: site.update(heads=site["heads"] + 1)),
    ("is not there as", lambda site: site.update(shared="b" if site["shared"] == "a" else "a")),
    ("heads", lambda site: site.update(shared="")),
    ("heads", lambda site: site.update(experts=[0])),
    ("heads", lambda site: site.update(heads=-1)),
    ("heads", lambda site: site.update(rank=0, pieces=[], heads=2**53)),
    ("Invalid enum", lambda site: site.update(shared="c")),
]


@pytest.mark.parametrize(("text", "lie"), HEADS_LIES)
def test_wrong_heads_are_refused(latent: Path, tmp_path: Path, text: str, lie: Callable[[dict[str, Any]], Any]) -> None:
    trained(tiny_model(tiny_config("deepseek_v3")), tmp_path, target_modules=["kv_b_proj"])
    with EngineFile.open(prepared(tmp_path, latent), adapters=True) as file:
        entries = json.loads(file.read_section(ADAPTER))
        lie(entries["sites"][0])
        with EngineWriter(tmp_path / "wrong.lora", 300) as writer:
            for name, form in file.sections.items():
                content = msgspec.json.encode(entries) if name == ADAPTER else file.read_section(name)
                writer.add(name, content, dtype=form.dtype, shape=form.shape, layout=form.layout)
            writer.commit(About(**{field: getattr(file.manifest, field) for field in About.__struct_fields__}))
    with pytest.raises(CorruptEngineError, match=text):
        AdapterFile.open(tmp_path / "wrong.lora")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of the tiny llama, whose head has the weight of the embedding."""
    return built(MemoryCheckpoint.tiny("llama", **TIED), tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def vocabulary(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with rows of tokens and factors of the head, for `tied`."""
    folder = tmp_path_factory.mktemp("vocabulary")
    choices = {"target_modules": ["lm_head"], "trainable_token_indices": [5, 306, 9]}
    trained(tiny_model(tiny_config("llama", **TIED)), folder, **choices)
    return prepared(folder, tied)


# Lies about the site of the table, then about that of the head.
VOCABULARY_LIES: list[tuple[str, int, Callable[[dict[str, Any]], Any]]] = [
    ("one weight", 0, lambda site: site.update(table=False)),
    ("is no table, or", 0, lambda site: site.update(experts=[0])),
    ("is no table, or", 0, lambda site: site.update(bias=True)),
    ("is not there as", 0, lambda site: site.update(replaced=2)),
    ("308 rows that are replaced", 0, lambda site: site.update(replaced=308)),
    ("-1 rows that are replaced", 0, lambda site: site.update(replaced=-1)),
    ("is not there as", 0, lambda site: site.update(columns=47)),
    ("without a gain", 1, lambda site: site.update(gain=False)),
    ("leaves its rows", 1, lambda site: site["pieces"][0].update(count=308)),
    ("one weight", 1, lambda site: site.update(table=True, gain=False)),
]


@pytest.mark.parametrize(("text", "number", "lie"), VOCABULARY_LIES)
def test_wrong_tables_and_rows_are_refused(
    vocabulary: Path, tmp_path: Path, text: str, number: int, lie: Callable[[dict[str, Any]], Any]
) -> None:
    with EngineFile.open(vocabulary, adapters=True) as file:
        entries = json.loads(file.read_section(ADAPTER))
    assert [site.get("table", False) for site in entries["sites"]] == [True, False]
    lie(entries["sites"][number])
    changed = with_sections(vocabulary, tmp_path / "wrong.lora", {ADAPTER: msgspec.json.encode(entries)})
    with pytest.raises(CorruptEngineError, match=text):
        AdapterFile.open(changed)


def with_sections(lora: Path, path: Path, contents: Mapping[str, bytes]) -> Path:
    """An adapter's file with other contents of some sections, and hashes that fit."""
    with EngineFile.open(lora, adapters=True) as file, EngineWriter(path, 300) as writer:
        for name, form in file.sections.items():
            content = contents.get(name, file.read_section(name))
            writer.add(name, content, dtype=form.dtype, shape=form.shape, layout=form.layout)
        writer.commit(About(**{field: getattr(file.manifest, field) for field in About.__struct_fields__}))
    return path


@pytest.mark.parametrize("ids", [[9, 5, 306], [5, 5, 306], [-1, 5, 306], [5, 9, 307]])
@pytest.mark.parametrize("end", [".table", ""])
def test_wrong_numbers_of_rows_are_refused(vocabulary: Path, tmp_path: Path, ids: list[int], end: str) -> None:
    section = f"weights/{EMBEDDING}{end}.ids"
    changed = with_sections(vocabulary, tmp_path / "wrong.lora", {section: np.array(ids, "<i4").tobytes()})
    with pytest.raises(CorruptEngineError, match="not in order, or not there"):
        AdapterFile.open(changed)


def test_a_gain_of_replaced_rows_is_refused(vocabulary: Path, tmp_path: Path) -> None:
    section = f"weights/{EMBEDDING}.gain"
    changed = with_sections(vocabulary, tmp_path / "wrong.lora", {section: np.ones(307, "<f4").tobytes()})
    with pytest.raises(CorruptEngineError, match="rows whose gain is not 0"):
        AdapterFile.open(changed)


def test_rows_of_tokens_with_lengths_of_a_tied_head_are_refused(tied: Path, tmp_path: Path) -> None:
    choices = {"target_modules": ["lm_head"], "use_dora": True, "trainable_token_indices": [5, 9]}
    trained(tiny_model(tiny_config("llama", **TIED)), tmp_path, **choices)
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens and lm_head, which share a weight"):
        prepared(tmp_path, tied)


def test_tables_of_other_engines_are_refused(tied: Path, vocabulary: Path) -> None:
    with EngineFile.open(tied) as file, AdapterFile.open(vocabulary) as adapter:
        adapter.check_fits(file.manifest)
        sites = AdapterSites.from_json(file.read_section(ADAPTER_SITES), file.sections).sites
        check_sites(adapter, sites)
        of_table = next(site for site in sites if site.kind == "table")
        others = [site for site in sites if site is not of_table]
        disguised = msgspec.structs.replace(of_table, kind="linear", weight=of_table.key)
        for wrong in others, [*others, disguised], [*others, msgspec.structs.replace(of_table, rows=306)]:
            with pytest.raises(CorruptEngineError, match=r"has no adapter site .*\.table of its form"):
                check_sites(adapter, wrong)


def test_engines_without_sites_and_other_engines_are_refused(base: Path, lora: Path, tmp_path: Path) -> None:
    with EngineFile.open(base) as file, EngineWriter(tmp_path / "old.engine", 300) as writer:
        for name, form in file.sections.items():
            if not name.startswith(ADAPTER_SITES):
                tensor = {"dtype": form.dtype, "shape": form.shape, "layout": form.layout}
                writer.add(name, file.read_section(name), evidence=form.evidence, **tensor)
        fields = {field: getattr(file.manifest, field) for field in About.__struct_fields__}
        old = writer.commit(About(**fields))
        with AdapterFile.open(lora) as adapter:
            adapter.check_fits(file.manifest)
            with pytest.raises(UsageError, match=r"adapter lora.* does not belong to the engine tiny"):
                adapter.check_fits(old)
    trained(tiny_model(tiny_config("llama", **BIASES)), tmp_path, target_modules=["q_proj"])
    with pytest.raises(UsageError, match=r"(?s)cannot be used with adapters.*Build it again"):
        prepared(tmp_path, tmp_path / "old.engine")
    with pytest.raises(UsageError, match="it is the engine"), Engine.open(base) as engine:
        prepare(Adapter(tmp_path), engine, base)


def test_adapters_and_engines_are_told_apart(base: Path, lora: Path) -> None:
    with pytest.raises(UsageError, match="is an adapter, not an engine"):
        Engine.open(lora)
    with pytest.raises(UsageError, match="is an engine, not an adapter"):
        AdapterFile.open(base)
    assert "is an adapter, not an engine" in run_engine("generate", str(lora), "-p", "x").output


def test_damaged_adapters_are_refused(lora: Path, tmp_path: Path) -> None:
    data, path = lora.read_bytes(), tmp_path / "cut.lora"
    for length in (0, 7, 1000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptEngineError):
            AdapterFile.open(path)
    with EngineFile.open(lora, adapters=True) as file:
        entries = json.loads(file.read_section(ADAPTER))
        start, size = file.offsets[ADAPTER], file.sections[ADAPTER].nbytes
    path.write_bytes(
        data[:start] + data[start : start + size].replace(b'"begin":0', b'"begin":1') + data[start + size :]
    )
    with pytest.raises(CorruptEngineError, match=r"section adapter\.json"):
        AdapterFile.open(path)
    assert len(entries["sites"]) == 4 * 3


LIES: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("leaves its rows", lambda site: site["pieces"][0].update(begin=-1)),
    ("leaves its rows", lambda site: site["pieces"][-1].update(begin=site["rows"])),
    ("leaves its rows", lambda site: site["pieces"][-1].update(count=2**53)),
    ("leaves its rows, or", lambda site: site["pieces"].reverse()),
    ("leaves A", lambda site: site["pieces"][0].update(first_rank=site["rank"])),
    ("leaves A", lambda site: site["pieces"][0].update(first_rank=-1)),
    ("rank 321", lambda site: site["pieces"][0].update(rank=321)),
    ("rank 0", lambda site: site["pieces"][0].update(rank=0)),
    ("has rank 0 and", lambda site: site.update(rank=0)),
    ("has rank 17 and", lambda site: site.update(rank=17)),
    ("is not there as", lambda site: site.update(rank=site["rank"] + 16)),
    ("is not there as", lambda site: site.update(columns=site["columns"] + 1)),
    ("impossible shape", lambda site: site.update(columns=0)),
    ("is not there as", lambda site: site.update(rows=site["rows"] + 1)),
    ("is not there as", lambda site: site.update(weight="other")),
    ("is not there as", lambda site: site["pieces"].insert(1, dict(site["pieces"][0], begin=48, count=1))),
    ("unknown field", lambda site: site.update(more=1)),
    ("Expected `int`", lambda site: site.update(rank="16")),
]


@pytest.mark.parametrize(("text", "lie"), LIES)
def test_wrong_bounds_are_refused(lora: Path, tmp_path: Path, text: str, lie: Callable[[dict[str, Any]], Any]) -> None:
    with EngineFile.open(lora, adapters=True) as file:
        entries = json.loads(file.read_section(ADAPTER))
        with EngineWriter(tmp_path / "x.lora", 300) as writer:
            lie(entries["sites"][0])
            for name, form in file.sections.items():
                content = msgspec.json.encode(entries) if name == ADAPTER else file.read_section(name)
                writer.add(name, content, dtype=form.dtype, shape=form.shape, layout=form.layout)
            writer.commit(About(**{field: getattr(file.manifest, field) for field in About.__struct_fields__}))
    with pytest.raises(CorruptEngineError, match=text):
        AdapterFile.open(tmp_path / "x.lora")


EXPERTS_LIES: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("experts in order", lambda site: site["experts"].reverse()),
    ("experts in order", lambda site: site["experts"].insert(1, 0)),
    ("experts in order", lambda site: site.update(experts=[-1, *site["experts"][1:]])),
    ("is not there as", lambda site: site["experts"].pop()),
    ("is not there as", lambda site: site.pop("experts")),
    ("a bias or a gain", lambda site: site.update(bias=True)),
    ("has no expert", lambda site: site.update(experts=[*site["experts"][:-1], 7])),
    ("the engine has no", lambda site: site.update(weight="model.layers.0.self_attn.o_proj.weight")),
    ("the engine has no", lambda site: site.update(weight="model.norm.weight")),
]


@pytest.mark.parametrize(("text", "lie"), EXPERTS_LIES)
def test_wrong_experts_are_refused(
    mixture: Path, mixed: Path, tmp_path: Path, text: str, lie: Callable[[dict[str, Any]], Any]
) -> None:
    with EngineFile.open(mixed, adapters=True) as file:
        entries = json.loads(file.read_section(ADAPTER))
        with EngineWriter(tmp_path / "x.lora", 300) as writer:
            site = next(one for one in entries["sites"] if "gate_up" in one["weight"])
            before = site["weight"]
            lie(site)
            for name, form in file.sections.items():
                content = msgspec.json.encode(entries) if name == ADAPTER else file.read_section(name)
                renamed = name.replace(before, site["weight"])
                writer.add(renamed, content, dtype=form.dtype, shape=form.shape, layout=form.layout)
            writer.commit(About(**{field: getattr(file.manifest, field) for field in About.__struct_fields__}))
    with (
        EngineFile.open(mixture) as engine,
        pytest.raises(CorruptEngineError, match=text),
        AdapterFile.open(tmp_path / "x.lora") as adapter,
    ):
        adapter.check_fits(engine.manifest)


SITE_LIES: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("no such weight", lambda site: site.update(rows=site["rows"] - 1)),
    ("no such weight", lambda site: site.update(weight="other")),
    ("impossible rows", lambda site: site["runs"][0].update(first=-1)),
    ("impossible rows", lambda site: site["runs"][0].update(count=0)),
    ("other rows than", lambda site: site["runs"].pop()),
    ("no bias of", lambda site: site.update(bias=site["weight"])),
    ("no vector", lambda site: site.update(row_factors="chat_template")),
    ("no vector", lambda site: site.update(column_order="nothing")),
    ("unknown field", lambda site: site.update(more=1)),
    ("Invalid enum", lambda site: site.update(kind="other")),
    ("head or a table of several", lambda site: site.update(kind="table", runs=[*site["runs"], site["runs"][0]])),
    ("head or a table of several", lambda site: site.update(kind="output_head", runs=[*site["runs"], site["runs"][0]])),
    ("head or a table of several", lambda site: site.update(kind="table", runs=site["runs"][:1])),
]


@pytest.mark.parametrize(("text", "lie"), SITE_LIES)
def test_wrong_sites_are_refused(base: Path, tmp_path: Path, text: str, lie: Callable[[dict[str, Any]], Any]) -> None:
    with EngineFile.open(base) as file:
        sites = json.loads(file.read_section(ADAPTER_SITES))
    lie(next(site for site in sites["sites"] if "kind" not in site))
    changed = copied(base, tmp_path / "x.engine", {ADAPTER_SITES: msgspec.json.encode(sites)})
    trained(tiny_model(tiny_config("llama", **BIASES)), tmp_path, target_modules=["q_proj"])
    with pytest.raises(CorruptEngineError, match=text):
        prepared(tmp_path, changed)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tiny_checkpoint(tmp_path, "llama")
    choices = {"target_modules": LINEARS, "trainable_token_indices": [5, 9]}
    trained(tiny_model(tiny_config("llama")), tmp_path / "poet", **choices)
    made = run_engine("build", str(folder), "--quant", "int8-wo", "--gate", "off", "-o", "base.engine")
    assert made.exit_code == 0, made.output
    made = run_engine("adapter", "poet", "--engine", "base.engine")
    assert made.exit_code == 0 and "16 layers of the checkpoint, in 13 of the engine" in made.output, made.output
    again = run_engine("adapter", "poet", "--engine", "base.engine", "-o", "again.lora", "--json")
    assert json.loads(again.stdout)["max_rank"] == 7
    assert Path("poet.lora").read_bytes() == Path("again.lora").read_bytes()
    shown = json.loads(run_engine("inspect", "poet.lora", "--json").output)
    assert shown["engine"] == json.loads(run_engine("inspect", "base.engine", "--json").output)["content_hash"]
    assert (shown["name"], shown["layers"], shown["max_rank"], shown["rows"]) == ("poet", 13, 7, 2)
    listed = run_engine("inspect", "poet.lora", "--sections").output
    assert "the adapter poet (llama)" in listed and ", and 2 rows of its own" in listed
    assert "weights/model.embed_tokens.weight.table.ids" in listed
    checked = run_engine("verify", "poet.lora")
    assert checked.exit_code == 0 and "goldens" in checked.output, checked.output
    assert run_engine("diff", "poet.lora", "again.lora").exit_code == 0
    damaged = bytearray(Path("again.lora").read_bytes())
    damaged[-100] ^= 1
    Path("again.lora").write_bytes(damaged)
    assert run_engine("verify", "again.lora").exit_code == 5
