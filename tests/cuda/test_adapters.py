"""Adapters on the emulated GPU: answers are those of PEFT's model, with the same bits alone and in any batch."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replaced

from enginewright.adapter_file import AdapterFile, ReplacedRows
from enginewright.builder import build
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.commands import prepare_adapter
from enginewright.builder.gate import GateConfig
from enginewright.engine_file import EngineFile
from enginewright.errors import UnsupportedModelError, UsageError
from enginewright.runtime.commands.score import forced
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core import engine_core as core
from enginewright.runtime.device.adapters import adapter_bytes, bytes_in_slot, check_slot, served_sites, slot_bytes
from enginewright.runtime.device.cuda.device import CudaDevice
from enginewright.runtime.device.cuda.executor import CudaExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from tests.cuda.test_engine import LIMITS, Deltas, built
from tests.emulator.device import EmulatedDevice, device_for
from tests.emulator.kernels import EmulatedKernels, Kernels
from tests.helpers.adapters import logits, prepared, trained
from tests.helpers.engines import folder_of_engines
from tests.helpers.graphs import checkpoint_of, random_tokens
from tests.helpers.tiny import ALL_EXPERTS, HYBRIDS, tiny_config, tiny_model
from tests.tolerances import ADAPTED_LOGPROBS

LINEARS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
LORA = replace(LIMITS, enable_lora=True, max_loras=3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, ignore_eos=True)
CASES: Sequence[tuple[str, str, dict[str, Any]]] = [
    ("llama", "bf16", {"target_modules": LINEARS, "use_dora": True}),
    ("gpt2", "fp8", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
]


@pytest.mark.parametrize(("family", "quant", "lora"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_logits_are_those_of_peft(family: str, quant: str, lora: dict[str, Any], tmp_path: Path) -> None:
    check_logits(family, quant, lora, tmp_path)


def check_logits(family: str, quant: str, lora: dict[str, Any], folder: Path) -> None:
    """All log-probabilities of a text that is read in two steps."""
    path, _, kernels = built(family, quant, "bf16", family in HYBRIDS)
    model = tiny_model(tiny_config(family, **ALL_EXPERTS.get(family, {})))
    tokens = random_tokens(39, seed=1).tolist()
    adapted = trained(model, folder / "adapter", **lora)
    file = prepared(path, folder / "adapter")
    with EngineFile.open(path) as engine, AdapterFile.open(file) as adapter:
        limits = replace(LORA, max_num_batched_tokens=21)
        executor = CudaExecutor(Engine(engine, "cuda"), device_for(kernels), limits)
        own, base = (
            torch.from_numpy(np.concatenate([rows.copy() for _, _, rows in forced(executor, [tokens], adapter=one)]))
            for one in (adapter, None)
        )
    bound = ADAPTED_LOGPROBS[quant]
    for found, reference in (own, adapted), (base, model):
        rows, right = (torch.log_softmax(one, -1) for one in (found, logits(reference, torch.tensor([tokens]))[0]))
        picked = torch.tensor(tokens[1:])[:, None]
        assert float((rows[:-1].gather(1, picked) - right[:-1].gather(1, picked)).abs().max()) < bound
    assert float((own - base).abs().max()) > 2 * bound, "it is another model"


@cache
def adapters() -> list[Path | None]:
    """Adapters of the small llama with different ranks and layers; the base first."""
    path, _, _ = built("llama", "bf16")
    folder, model = folder_of_engines(), tiny_model(tiny_config("llama"))
    choices: list[dict[str, Any]] = [{"r": 3}, {"r": 33, "target_modules": ["q_proj"]}, {"use_dora": True}]
    found: list[Path | None] = [None]
    for number, choice in enumerate(choices):
        trained(model, folder / f"gpu-{number}", seed=number, **{"target_modules": LINEARS, **choice})
        found.append(prepared(path, folder / f"gpu-{number}"))
    return found


Asked = tuple[list[int], Path | None]  # prompt and adapter


def answers(
    monkeypatch: pytest.MonkeyPatch, batches: Sequence[Sequence[Asked]], limits: RuntimeConfig
) -> tuple[list[list[Any]], EmulatedDevice | CudaDevice]:
    """Completions of requests with all that they show, batch after batch on one engine, and the device."""
    path, _, kernels = built("llama", "bf16")
    device, found = device_for(kernels), list[list[Any]]()
    monkeypatch.setattr(core, "open_executor", lambda engine, config: CudaExecutor(engine, device, config))
    with EngineFile.open(path) as file:
        running = core.EngineCore(Engine(file, "cuda"), limits)
        for batch in batches:
            readers = [Deltas() for _ in batch]
            for (prompt, adapter), reader in zip(batch, readers, strict=True):
                opened = None if adapter is None else running.open_adapter(adapter)
                running.add(running.request(prompt, GREEDY, reader.put, adapter=opened))
            while running.has_work:
                for request, delta in running.step():
                    request.sink(delta)
            found += [[one for delta in reader.whole for one in delta.tokens] for reader in readers]
    return found, device


def test_answers_have_the_same_bits_alone_and_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of three adapters and the base, with fewer slots than adapters, in graphs and out of them."""
    prompts = [random_tokens(count, seed=count).tolist() for count in (9, 20)]
    asked = [(prompt, adapter) for adapter in adapters() for prompt in prompts]
    alone, _ = answers(monkeypatch, [[one] for one in asked], LORA)
    assert all(len(tokens) == 4 for tokens in alone)
    assert len({str(tokens) for tokens in alone}) == len(alone), "each adapter has answers of its own"
    plain, _ = answers(monkeypatch, [[one] for one in asked if one[1] is None], LIMITS)
    assert plain == alone[:2], "they are those of an engine without adapters"
    for slots, cut in (3, 64), (1, 13):
        limits = replace(LORA, max_loras=slots, max_num_batched_tokens=cut)
        together, device = answers(monkeypatch, [asked], limits)
        assert together == alone
        assert device.replays > 5 if isinstance(device, EmulatedDevice) else device.name


@pytest.mark.skipif(Kernels is not EmulatedKernels, reason="it is the emulated GPU that counts launches")
def test_steps_without_adapters_have_the_launches_of_an_engine_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [(random_tokens(20, seed=1).tolist(), adapter) for adapter in adapters()[:2]]
    (_, plain), (_, base), (_, own) = (
        answers(monkeypatch, [[one]], limits)
        for one, limits in ((asked[0], LIMITS), (asked[0], LORA), (asked[1], LORA))
    )
    assert isinstance(plain, EmulatedDevice) and isinstance(base, EmulatedDevice) and isinstance(own, EmulatedDevice)
    assert plain.launches == base.launches < own.launches
    assert not any(kernel.startswith("adapter_") for kernel in base._launched)


def test_slots_hold_what_is_loaded() -> None:
    path, _, _ = built("llama", "bf16")
    with Engine.open(path, "cuda") as engine:
        sites = served_sites(engine)
        assert adapter_bytes(engine, LORA) == 3 * slot_bytes(sites, LORA.max_lora_rank)
        assert adapter_bytes(engine, LIMITS) == 0
        for file in adapters()[1:]:
            assert file is not None
            with AdapterFile.open(file) as adapter:
                assert bytes_in_slot(adapter, len(sites)) <= slot_bytes(sites, adapter.max_rank)
                check_slot(adapter, engine, LORA)
        with AdapterFile.open(adapters()[2]) as adapter, pytest.raises(UsageError, match="48 rows of A there"):
            check_slot(adapter, engine, replace(LORA, max_lora_rank=5))


VOCABULARY: Sequence[dict[str, Any]] = [
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["embed_tokens"]},
    {"target_modules": ["q_proj"], "trainable_token_indices": [5, 9]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
]


def test_heads_and_embeddings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine for both has sites on the CPU alone, and one for GPUs has none."""
    monkeypatch.setattr(build, "code_sections", lambda kernels, targets: {})
    for name, targets in ("both", ("cpu", "cuda:sm_80")), ("gpu", ("cuda:sm_80",)):
        config = BuildConfig(quant=quant_config("bf16"), targets=targets, gate=None)
        build_engine(checkpoint_of("llama"), config, tmp_path / f"{name}.engine")
    for number, choices in enumerate(VOCABULARY):
        folder = tmp_path / str(number)
        trained(tiny_model(tiny_config("llama")), folder, **choices)
        with pytest.raises(UnsupportedModelError, match=r"output head and embeddings .* code for a CPU"):
            prepare_adapter(str(folder), tmp_path / "gpu.engine", tmp_path / "x.lora")
        lora = prepared(tmp_path / "both.engine", folder)
        with EngineFile.open(tmp_path / "both.engine") as file, AdapterFile.open(lora) as adapter:
            check_slot(adapter, Engine(file, "cpu"), LORA)
            engine = Engine(file, "cuda")
            assert all(site.kind == "linear" for site in served_sites(engine))
            with pytest.raises(UsageError, match=r"on a GPU.*the output head and embeddings .* CPUs alone"):
                check_slot(adapter, engine, LORA)
            if number == 0:  # a file may also say that it replaces rows of a layer which adapters can change
                (own,) = (
                    site for key, site in adapter.sites.items() if key.endswith("layers.0.self_attn.qkv_proj.weight")
                )
                rows = ReplacedRows(1, memoryview(np.zeros(1, "<i4")), own.a)
                adapter.sites = {"model.layers.0.self_attn.qkv_proj.weight": replace(own, replaced=rows)}
                with pytest.raises(UsageError, match=r"on a GPU.*it changes model.layers.0.self_attn.qkv_proj"):
                    check_slot(adapter, engine, LORA)


def test_engines_of_older_releases_are_refused() -> None:
    path, _, kernels = built("llama", "bf16")
    with EngineFile.open(path) as file:
        engine = Engine(file, "cuda")
        engine.plan = replaced(engine.plan, adapting=None)
        with pytest.raises(UsageError, match="an older release built it"):
            CudaExecutor(engine, device_for(kernels), LORA)


def test_an_adapter_is_prepared_for_an_engine_of_gpus_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "code_sections", lambda kernels, targets: {})
    config = BuildConfig(quant=quant_config("bf16"), targets=("cuda:sm_80",), gate=None)
    build_engine(checkpoint_of("llama"), config, tmp_path / "gpu.engine")
    trained(tiny_model(tiny_config("llama")), tmp_path / "own", seed=0, r=3, target_modules=LINEARS)
    report = prepare_adapter(str(tmp_path / "own"), tmp_path / "gpu.engine", tmp_path / "own.lora")
    both = adapters()[1]
    assert both is not None
    with AdapterFile.open(report.path) as own, AdapterFile.open(both) as other:
        assert own.sites.keys() == other.sites.keys()
        for weight, site in own.sites.items():
            assert site.a.data == other.sites[weight].a.data
    with pytest.raises(UsageError, match="an adapter is measured on a CPU"):
        prepare_adapter(
            str(tmp_path / "own"),
            tmp_path / "gpu.engine",
            tmp_path / "own.lora",
            model="anything",
            gate=GateConfig(),
        )
