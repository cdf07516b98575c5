"""An engine with a second model, in the role `draft`."""

import ctypes
import hashlib
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from enginewright import LLM
from enginewright.builder.assembly import assemble
from enginewright.builder.build import BuildConfig, BuildReport, build_engine
from enginewright.builder.checkpoint.base import TokenizerFiles
from enginewright.builder.draft import Automatic, Draft, FirstLayers, add_draft, open_draft, with_draft
from enginewright.builder.pooling import Pooling
from enginewright.builder.progress import Silent
from enginewright.cli import main
from enginewright.engine_file import EngineFile
from enginewright.errors import UsageError
from enginewright.manifest import Manifest
from enginewright.passes.quant import W8A8, Int4Awq, Int4Rtn, QuantConfig
from enginewright.plugins.target import targets_of
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.commands import doctor
from enginewright.runtime.commands.diff import compare
from enginewright.runtime.commands.doctor import examine
from enginewright.runtime.commands.inspect import describe, summarize
from enginewright.runtime.commands.score import score
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.device.cuda.upload import upload_weights
from enginewright.runtime.device.devices import open_executor
from enginewright.runtime.engine import Engine
from enginewright.runtime.speculation.draft import DraftModel
from tests.emulator.device import EmulatedDevice
from tests.helpers.tiny import MemoryCheckpoint, tiny_checkpoint, tiny_config, tiny_model

CONFIG = BuildConfig(gate=None)
INT4_DRAFT = replace(CONFIG, draft_quant=Int4Rtn())
EMBEDDING = "model.embed_tokens.weight"
PROMPTS = [[5, 9, 200, 17, 33, 4, 99], [301]]


def tiny(name: str, **changes: Any) -> MemoryCheckpoint:
    return replace(MemoryCheckpoint.tiny("llama", tie_word_embeddings=False, **changes), name=name)


@dataclass
class OtherTokenizer(MemoryCheckpoint):
    """A checkpoint whose tokenizer has an added token less."""

    @property
    def tokenizer(self) -> TokenizerFiles:
        files = super().tokenizer
        content = msgspec.json.decode(files.tokenizer_json)
        return replace(files, tokenizer_json=msgspec.json.encode({**content, "added_tokens": []}))


@pytest.fixture(scope="module")
def models() -> tuple[MemoryCheckpoint, MemoryCheckpoint]:
    """A model, and a draft that shares its embedding and no other weight."""
    target, draft = tiny("target"), tiny("draft", num_hidden_layers=1, intermediate_size=72)
    changed = {name: value if name == EMBEDDING else value * -0.5 for name, value in draft.stored.items()}
    return target, replace(draft, stored={**changed, EMBEDDING: target.stored[EMBEDDING]})


@pytest.fixture(scope="module")
def built(
    models: tuple[MemoryCheckpoint, MemoryCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, BuildReport]:
    target, draft = models
    folder = tmp_path_factory.mktemp("draft")
    return {
        "both": build_engine(target, CONFIG, folder / "both.engine", draft=draft),
        "again": build_engine(target, CONFIG, folder / "again.engine", draft=draft),
        "target": build_engine(target, CONFIG, folder / "target.engine"),
        "draft": build_engine(draft, CONFIG, folder / "draft.engine"),
        "int4 too": build_engine(target, INT4_DRAFT, folder / "int4-too.engine", draft=draft),
        "int4 draft": build_engine(draft, INT4_DRAFT.for_draft, folder / "int4.engine"),
    }


def logits_of(engine: Engine) -> list[np.ndarray[Any, Any]]:
    executor = open_executor(engine, runtime_config(max_num_seqs=2, max_num_batched_tokens=8, kv_cache_memory="4m"))
    try:
        return list(score(executor, PROMPTS))
    finally:
        executor.close()


@pytest.mark.parametrize(("name", "draft"), [("both", "draft"), ("int4 too", "int4 draft")])
def test_both_models_compute_what_they_do_alone(built: dict[str, BuildReport], name: str, draft: str) -> None:
    with Engine.open(built[name].path, verify=True) as both:
        own, its = logits_of(both), logits_of(both.for_role("draft"))
    for name, logits in ("target", own), (draft, its):
        with Engine.open(built[name].path) as alone:
            for mine, other in zip(logits, logits_of(alone), strict=True):
                assert np.array_equal(mine.view(np.uint32), other.view(np.uint32))
    assert not np.array_equal(own[0], its[0])


def test_same_inputs_give_the_same_bytes(built: dict[str, BuildReport]) -> None:
    assert built["both"].path.read_bytes() == built["again"].path.read_bytes()
    differing = compare(built["both"].path, built["target"].path)
    assert differing["about"] == {"roles": [("draft",), ()]} and "draft.name" in differing["recipe"]
    mixed = compare(built["both"].path, built["int4 too"].path)
    assert mixed["recipe"] == {"draft.quant": [None, "int4-rtn"]}


def test_equal_weights_are_stored_once(built: dict[str, BuildReport]) -> None:
    weights = {name: report.weight_bytes for name, report in built.items()}
    with Engine.open(built["both"].path) as both:
        shared = set(both.plan.weight_names()) & set(both.for_role("draft").plan.weight_names())
        shared_bytes = [both.weight(name)[1].nbytes for name in shared]
        assert shared == {EMBEDDING, "rope.inv_freq"}
        assert both.weight_bytes == weights["both"] == weights["target"] + weights["draft"] - sum(shared_bytes)


def test_inspect_shows_roles(built: dict[str, BuildReport]) -> None:
    summary = summarize(built["both"].path)
    assert summary["roles"]["draft"]["weight_bytes"] == built["draft"].weight_bytes
    assert summary["roles"]["draft"]["kv_bytes_per_token"] == built["draft"].kv_bytes_per_token
    assert summary["memory"]["weight_bytes"] == built["both"].weight_bytes
    assert "\n  draft " in describe(summary)
    alone = summarize(built["target"].path)
    assert alone["roles"] == {} and "\n  draft " not in describe(alone)


def test_an_engine_without_the_role(built: dict[str, BuildReport]) -> None:
    with (
        Engine.open(built["target"].path) as engine,
        pytest.raises(UsageError, match=r"has no draft model.*only one model"),
    ):
        engine.for_role("draft")


@pytest.mark.parametrize(
    ("draft", "quant", "why"),
    [
        (None, Int4Rtn(), "--draft-quant means nothing here: there is no draft"),
        (FirstLayers(1), Int4Rtn(), "--draft-quant means nothing here: first layers read the model's own weights"),
        (Automatic(), Int4Rtn(), "--draft-quant means nothing here: target has no MTP layer"),
        (tiny("draft"), Int4Awq(), "--draft-quant int4-awq is not possible: it has to be calibrated"),
    ],
)
def test_methods_that_a_draft_cannot_have(draft: Draft | None, quant: QuantConfig, why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=why):
        build_engine(tiny("target"), replace(CONFIG, draft_quant=quant), tmp_path / "x", draft=draft)


def test_drafts_of_other_tokens_are_refused(models: tuple[MemoryCheckpoint, MemoryCheckpoint], tmp_path: Path) -> None:
    target, draft = models
    other = OtherTokenizer(draft.config, draft.stored, "other")
    with pytest.raises(UsageError, match=r"other cannot be a draft of target.*differs in added_tokens"):
        build_engine(target, CONFIG, tmp_path / "x", draft=other)
    with pytest.raises(UsageError, match=r"wide cannot be a draft of target.*has 309 tokens, and the model 307"):
        build_engine(target, CONFIG, tmp_path / "x", draft=tiny("wide", vocab_size=309))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("family", "count"), [("llama", 2), ("gemma3_text", 1), ("qwen3_moe", 1)])
def test_first_layers_are_a_model_of_its_own(family: str, count: int) -> None:
    """The plan is that of a checkpoint which ends there, and there are no weights but the model's."""
    wanted = replace(CONFIG, targets=("cpu", "cuda:sm_90a"), kv_cache_dtype="int8", quant=W8A8())
    config = tiny_config(family)
    whole = MemoryCheckpoint.of(tiny_model(config), config)
    target = assemble(whole, wanted, Silent())
    both = add_draft(target, FirstLayers(count), Silent())
    assert both.weights == target.weights and both.about({}).roles == ("skip",)
    short = {**config, "num_hidden_layers": count}
    if "layer_types" in config:
        short["layer_types"] = config["layer_types"][:count]
    alone = assemble(MemoryCheckpoint.of(tiny_model(short), short), wanted, Silent())
    for platform in "cpu", "cuda":
        assert both.files[f"plan/skip/{platform}"] == alone.files[f"plan/{platform}"]
    assert alone.kernels.keys() <= both.kernels.keys()


def test_weights_of_first_layers_are_in_memory_once(tmp_path: Path) -> None:
    """Shared weights are read from the file once too, and nothing of them is read again."""
    path = tmp_path / "skip.engine"
    report = build_engine(tiny("target"), CONFIG, path, draft=FirstLayers(1))
    with Engine.open(path, verify=True) as engine:
        assert engine.weight_bytes == report.weight_bytes == engine.plan_weight_bytes()
        limits = runtime_config(mmap=False, max_num_seqs=2, max_num_batched_tokens=8, kv_cache_memory="4m")
        skip = engine.for_role("skip")
        executor = open_executor(engine, limits)
        sharing = open_executor(skip, limits, executor.weights)
        assert set(skip.plan.weight_names()) < set(engine.plan.weight_names())
        assert all(sharing.weights[name] is executor.weights[name] for name in skip.plan.weight_names())
        for mine, own in zip(score(sharing, PROMPTS), logits_of(skip), strict=True):
            assert np.array_equal(mine, own)
        with pytest.raises(UsageError, match=r"has no draft model.*it has skip"):
            engine.for_role("draft")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("skip", "--draft skip names no number of layers"),
        ("skip:0", "--draft skip:0 names no number.*at least 1"),
        ("skip:-1", "--draft skip:-1 names no number"),
        ("skip:half", "--draft skip:half names no number.*skip:8"),
        ("skip:3", "has 3 layers, and its first 3 cannot be its draft.*Take 1 to 2"),
        ("skip:4k", "has 3 layers, and its first 4096"),
    ],
)
def test_layers_that_the_model_does_not_have(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"(?s){message}"):
        build_engine(tiny("target"), CONFIG, tmp_path / "x", draft=open_draft(text))
    assert not list(tmp_path.iterdir())


def test_weights_of_first_layers_are_on_a_gpu_once(tmp_path: Path) -> None:
    path, device = tmp_path / "skip.engine", EmulatedDevice({})
    build_engine(tiny("target"), CONFIG, path, draft=FirstLayers(1))
    with Engine.open(path) as engine:
        skip = engine.for_role("skip")
        there = upload_weights(engine, device, 256, {})
        assert upload_weights(skip, device, 256, there) == there
        missing = skip.plan.weight_names()[2]
        addresses = upload_weights(skip, device, 256, {name: there[name] for name in there if name != missing})
        assert {name for name in there if addresses[name] != there[name]} == {missing}
        for name, address in addresses.items():
            assert ctypes.string_at(address, engine.weight(name)[1].nbytes) == bytes(engine.weight(name)[0])


def test_the_builder_names_what_draft_tokens(tmp_path: Path) -> None:
    """The engine uses the draft method that the builder named by default, and none where speculation is off."""
    path = tmp_path / "auto.engine"
    build_engine(tiny("target"), CONFIG, path, draft=open_draft("auto"))
    build_engine(tiny("target"), CONFIG, tmp_path / "none.engine")
    assert compare(path, tmp_path / "none.engine")["about"] == {"speculate": ["ngram", None]}
    summary = summarize(path)
    assert (summary["speculate"], summary["roles"]) == ("ngram", {}) and "speculate  ngram" in describe(summary)
    limits: dict[str, Any] = {"threads": 1, "max_num_seqs": 2, "max_num_batched_tokens": 8, "kv_cache_memory": "4m"}
    for asked, draft_tokens in (None, True), ("off", False), ("ngram", True):
        with LLM(path, **limits, speculate=asked) as llm:
            assert (llm.stats().speculation is not None) == draft_tokens
    facts = examine(path, runtime_config(**limits))["engine"]
    assert facts["arena_bytes"] > examine(path, runtime_config(**limits, speculate="off"))["engine"]["arena_bytes"]


def test_doctor_counts_the_draft_that_draft_tokens(built: dict[str, BuildReport]) -> None:
    """Its figures for both models are those of a running engine."""
    limits: dict[str, Any] = {"threads": 1, "max_num_seqs": 2, "max_num_batched_tokens": 8, "kv_cache_memory": "1m"}
    with_draft, without = (
        examine(built["both"].path, runtime_config(**limits, speculate=asked)) for asked in ("draft", "off")
    )
    with (
        Engine.open(built["both"].path) as engine,
        closing(EngineCore(engine, runtime_config(**limits, speculate="draft"))) as core,
    ):
        assert core._speculator is not None
        draft = core._speculator.proposer
        assert isinstance(draft, DraftModel)
        own, its = core.executor.memory_plan, draft.runner.executor.memory_plan
    facts = with_draft["engine"]
    assert (facts["arena_bytes"], facts["kv_cache_bytes"]) == (own.arena_bytes, own.kv_bytes)
    assert facts["draft"] == {"arena_bytes": its.arena_bytes, "kv_cache_bytes": its.kv_bytes}
    assert "KV cache for the draft model (draft)" in doctor.describe(with_draft)
    assert without["engine"]["draft"] is None and without["engine"]["kv_cache_bytes"] > own.kv_bytes
    assert "draft_tokens" not in doctor.describe(without)
    (problem,) = examine(built["target"].path, runtime_config(**limits, speculate="draft"))["problems"]
    assert "has no draft model" in problem


def test_first_layers_of_what_writes_no_text(tmp_path: Path) -> None:
    model = MemoryCheckpoint.of(tiny_model(config := tiny_config("llama")), config)
    model = replace(model, pooling=Pooling("mean"))
    with pytest.raises(UsageError, match=r"--draft skip:1 is not possible.*writes no text"):
        build_engine(model, CONFIG, tmp_path / "x", draft=FirstLayers(1))
    assert add_draft(assemble(model, CONFIG, Silent()), Automatic(), Silent()).about({}).speculate is None
    with pytest.raises(UsageError, match=r"--draft-quant means nothing here.*writes no text"):
        add_draft(assemble(model, INT4_DRAFT, Silent()), Automatic(), Silent())


def changed(path: Path, change: Any) -> bytes:
    """A manifest that matches its content hash, though no builder would write it."""
    with EngineFile.open(path) as file:
        content = msgspec.json.decode(file.manifest.to_json())
    change(content)
    hashed = {name: value for name, value in content.items() if name != "content_hash"}
    hashed["sections"] = {name: form for name, form in hashed["sections"].items() if not form.get("evidence")}
    text = msgspec.json.encode(hashed, order="sorted")
    return msgspec.json.encode({**content, "content_hash": hashlib.sha256(text).hexdigest()}, order="sorted")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(roles=["speaker"]), "the role 'speaker' is not known"),
        (lambda content: content.update(roles=["draft", "draft"]), "is there twice"),
        (lambda content: content["sections"].pop("plan/draft/cpu"), "no section 'plan/draft/cpu'"),
        (lambda content: content.pop("roles"), "'plan/draft/cpu' is of a role"),
        (lambda content: content.update(roles=[]), "'plan/draft/cpu' is of a role|canonical"),
        (lambda content: content.update(speculate="skip"), "'skip' is the default speculation, but no role"),
    ],
)
def test_roles_and_plans_belong_together(built: dict[str, BuildReport], change: Any, message: str) -> None:
    path = built["both"].path
    assert Manifest.from_json(changed(path, lambda content: None)).roles == ("draft",)
    with pytest.raises(ValueError, match=message):
        Manifest.from_json(changed(path, change))


def test_gpus_have_a_plan_of_the_draft_too(
    models: tuple[MemoryCheckpoint, MemoryCheckpoint],
) -> None:
    config = replace(CONFIG, targets=("cpu", "cuda:sm_90a"))
    target, draft = (assemble(model, config, Silent()) for model in models)
    both = with_draft(target, draft)
    assert {f"plan/draft/{one.name}" for one in targets_of(config.targets)} <= set(both.files)
    assert set(both.kernels) == {*target.kernels, *draft.kernels}


def test_a_draft_by_the_commands(tmp_path: Path) -> None:
    """A draft model is built into its model's engine, and then used for speculation."""
    model, draft = (str(tiny_checkpoint(tmp_path / name, "llama")) for name in ("model", "draft"))
    path, runner = tmp_path / "both.engine", CliRunner()
    options = ["build", model, "--draft", draft, "--gate", "off", "-o", str(path)]
    planned = runner.invoke(main, [*options, "--dry-run", "--json"])
    assert planned.exit_code == 0 and msgspec.json.decode(planned.stdout)["recipe"]["draft"]["model_type"] == "llama"
    assert runner.invoke(main, options).exit_code == 0
    asked = ["generate", str(path), "-p", "a", "--max-tokens", "20", "--ignore-eos", "--json", "--seed", "5"]
    plain, drafted = (
        msgspec.json.decode(runner.invoke(main, [*asked, "--kv-cache-memory", "4m", *more]).stdout)
        for more in ([], ["--speculate", "draft", "--speculate-tokens", "3"])
    )
    assert drafted["token_ids"] == plain["token_ids"] and drafted["num_accepted_tokens"] > 0
    options[2:4] = ["--draft", "skip:1"]
    assert runner.invoke(main, options).exit_code == 0
    skipped = runner.invoke(main, [*asked, "--kv-cache-memory", "4m", "--speculate", "skip"])
    assert msgspec.json.decode(skipped.stdout)["token_ids"] == plain["token_ids"]
    refused = runner.invoke(main, [*asked, "--speculate", "draft"])
    assert refused.exit_code == UsageError.exit_code and "has no draft model" in refused.output
