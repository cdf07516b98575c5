"""`engine adapter --model`: an engine with an adapter is compared with the merged model, and refused if too far."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from enginewright.adapter_file import AdapterFile
from enginewright.builder.adapters import Adapter, MergedCheckpoint
from enginewright.builder.adapters.peft_config import ADAPTER_CONFIG
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.gate import GateConfig, measure_adapter
from enginewright.builder.models import build_graph
from enginewright.builder.progress import Silent
from enginewright.errors import QualityGateError, UsageError
from enginewright.runtime.commands.score import forced
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from tests.helpers.adapters import logits, trained
from tests.helpers.command import run_engine
from tests.helpers.tiny import tiny_checkpoint, tiny_config, tiny_model

TEXTS = [
    "The sea is wide, and the sky above it is as wide again.",
    "A hill, a river, a road: nothing else was on the map.",
]


@dataclass
class Case:
    """A checkpoint, its int8 engine, and an adapter as PEFT has saved it."""

    checkpoint: Path
    engine: Path
    adapter: Path
    texts: Path


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("gate-of-adapters")
    checkpoint, engine = tiny_checkpoint(folder, "llama"), folder / "tiny.engine"
    build_engine(open_checkpoint(str(checkpoint)), BuildConfig(quant=quant_config("int8-wo"), gate=None), engine)
    trained(tiny_model(tiny_config("llama")), folder / "poet", target_modules=["q_proj", "o_proj", "down_proj"])
    texts = folder / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return Case(checkpoint, engine, folder / "poet", texts)


def prepare(case: Case, output: Path, *options: object) -> dict[str, object]:
    result = run_engine(
        "adapter", case.adapter, "--engine", case.engine, "-o", output, "--model", case.checkpoint, "--json", *options
    )
    assert result.exit_code == 0, result.output
    report: dict[str, object] = json.loads(result.stdout)
    return report


def test_the_distance_is_that_of_peft(case: Case, tmp_path: Path) -> None:
    report = prepare(case, tmp_path / "poet.lora", "--calib-data", case.texts)
    measured = report["quality"]["measured"]  # type: ignore[index]
    base = tiny_model(tiny_config("llama")).bfloat16().float()  # as the checkpoint stores it
    adapted = trained(base, tmp_path / "again", target_modules=["q_proj", "o_proj", "down_proj"])
    kl: list[torch.Tensor] = []
    with Engine.open(case.engine) as engine, AdapterFile.open(tmp_path / "poet.lora") as adapter:
        executor = CpuExecutor(engine, RuntimeConfig(200, 1, threads=1, enable_lora=True, max_lora_rank=7))
        tokens = [engine.tokenizer.encode(text) for text in TEXTS]
        for text, begin, rows in forced(executor, tokens, adapter=adapter):
            expected = logits(adapted, torch.tensor([tokens[text]]))[0][begin : begin + len(rows)]
            p, q = (torch.log_softmax(values.double(), 1) for values in (expected, torch.from_numpy(rows.copy())))
            kl += (p.exp() * (p - q)).sum(1)
    assert measured["whole"]["positions"] == len(kl) == sum(map(len, tokens))
    assert measured["whole"]["kl"] == pytest.approx(float(torch.stack(kl).mean()), rel=0.01)
    shown = json.loads(run_engine("inspect", tmp_path / "poet.lora", "--json").stdout)
    assert shown["quality"]["measured"] == measured


def test_an_adapter_that_is_too_far_is_not_written(case: Case, tmp_path: Path) -> None:
    output = tmp_path / "poet.lora"
    wanted = ("adapter", case.adapter, "--engine", case.engine, "-o", output)
    result = run_engine(*wanted, "--model", case.checkpoint, "--gate", "kl=0.00000001")
    assert result.exit_code == QualityGateError.exit_code and "kl is" in result.output and not output.exists()
    prepare(case, output)
    config = json.loads((case.adapter / ADAPTER_CONFIG).read_text())
    stronger = tmp_path / "stronger"
    stronger.mkdir()
    for file in case.adapter.iterdir():
        (stronger / file.name).write_bytes(file.read_bytes())
    (stronger / ADAPTER_CONFIG).write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))
    with Engine.open(case.engine) as engine, AdapterFile.open(output) as adapter:
        judge = partial(measure_adapter, GateConfig(), engine)
        for folder, is_refused in (case.adapter, False), (stronger, True):
            merged = build_graph(MergedCheckpoint(open_checkpoint(str(case.checkpoint)), [Adapter(folder)]))
            if not is_refused:
                judge(merged, None, Silent(), adapter)
                continue
            with pytest.raises(QualityGateError, match="is too far from the model with it"):
                judge(merged, None, Silent(), adapter)


def test_what_cannot_be_measured_is_refused(case: Case, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path, "llama", hidden_act="gelu")
    cases: list[tuple[tuple[object, ...], str]] = [
        (("--model", other), "is not what the engine was built from"),
        (("--gate", "quick"), "--gate goes with --model"),
        (("--calib-data", case.texts), "--calib-data goes with --model"),
        (("--model", case.checkpoint, "--gate", "full"), "--gate full is for engines"),
    ]
    for options, text in cases:
        output = tmp_path / "x.lora"
        result = run_engine("adapter", case.adapter, "--engine", case.engine, "-o", output, *options)
        assert result.exit_code == UsageError.exit_code and text in result.output, result.output
        assert not output.exists()
