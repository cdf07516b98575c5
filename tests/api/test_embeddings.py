"""Engines of embedding models: what transformers computes, in any batch; and what they refuse."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForSequenceClassification

from enginewright import LLM, _cpu
from enginewright.builder.assembly import BuildConfig, assemble
from enginewright.builder.build import build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.checkpoint.base import TokenizerFiles
from enginewright.builder.console import describe
from enginewright.builder.gate import GateConfig
from enginewright.builder.pooling import Dense, Pooling
from enginewright.builder.progress import Silent
from enginewright.cli import main
from enginewright.embedding import EmbeddingConfig
from enginewright.errors import EngineError, UnsupportedModelError, UsageError
from enginewright.passes.quant import W8A8, Bf16, QuantConfig
from enginewright.runtime.api.embeddings import TextReader, check_dimensions
from enginewright.runtime.commands.score import score
from enginewright.runtime.commands.verify import verify
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from tests import tolerances
from tests.helpers.engines import built_tiny, folder_of_engines
from tests.helpers.graphs import relative_error
from tests.helpers.tiny import ENCODERS, MemoryCheckpoint, tiny_checkpoint, tiny_config, tiny_model

LENGTHS = (1, 2, 33, 61, 290)  # longer than a KV block, and a split of attention
SETTINGS = EmbeddingConfig(
    normalize=True, dimensions=(8, 20), prompts={"query": "Find: ", "other": "Show "}, default_prompt="other"
)
POOLED = {"first": lambda x: x[0], "last": lambda x: x[-1], "mean": lambda x: x.mean(0)}
CASES = [
    *(("bert", "mean", quant) for quant in (Bf16(), W8A8())),
    ("bert", "first", Bf16()),
    ("qwen3", "last", Bf16()),
    ("qwen3", "mean", Bf16()),
    ("gemma3_text", "mean", Bf16()),
    ("modernbert", "first", Bf16()),
]
OVERRIDES: dict[str, dict[str, Any]] = {"gemma3_text": {"use_bidirectional_attention": True, "sliding_window": 16}}


@cache
def checkpoint(family: str, kind: str) -> MemoryCheckpoint:
    """A checkpoint of a model without a head; for pooling `first`, with a dense layer after it."""
    config = tiny_config(family, **OVERRIDES.get(family, {}))
    model = tiny_model(config, kind=AutoModel)
    stored = dict(MemoryCheckpoint.of(model, config).stored)
    dense: tuple[Dense, ...] = ()
    if kind == "first":
        dense = (Dense("2_Dense.linear", 23, True, "tanh"),)
        generator = torch.Generator().manual_seed(3)
        stored["2_Dense.linear.weight"] = torch.randn(23, config["hidden_size"], generator=generator).bfloat16() / 8
        stored["2_Dense.linear.bias"] = torch.randn(23, generator=generator).bfloat16()
    return MemoryCheckpoint(config, stored, pooling=Pooling(kind, SETTINGS, dense, max_tokens=300))


class PairCheckpoint(MemoryCheckpoint):
    """A checkpoint whose tokenizer marks the tokens of the second text."""

    @property
    def tokenizer(self) -> TokenizerFiles:
        files = super().tokenizer
        whole = json.loads(files.tokenizer_json)
        whole["post_processor"]["pair"][-1]["Sequence"]["type_id"] = 1
        return replace(files, tokenizer_json=json.dumps(whole).encode())


@cache
def pair_checkpoint() -> MemoryCheckpoint:
    config = tiny_config("bert", id2label={0: "LABEL_0"}, label2id={"LABEL_0": 0})
    model = tiny_model(config, kind=AutoModelForSequenceClassification)
    return PairCheckpoint(config, MemoryCheckpoint.of(model, config).stored)


@cache
def engine_of(family: str, kind: str, quant: QuantConfig) -> Path:
    path = folder_of_engines() / f"{family}-{kind}-{quant.name}.engine"
    source = checkpoint(family, kind) if kind != "pair" else pair_checkpoint()
    build_engine(source, BuildConfig(quant=quant, gate=GateConfig() if kind == "mean" else None), path)
    return path


def texts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 307, (length,), generator=generator).tolist() for length in lengths]


def expected_rows(family: str, kind: str) -> list[np.ndarray]:
    source, rows = checkpoint(family, kind), []
    model = tiny_model(source.config, kind=AutoModel)
    for text in texts():
        with torch.inference_mode():
            row = POOLED[kind](model(torch.tensor([text])).last_hidden_state[0])
            for dense in source.pooling.dense if source.pooling else ():
                weight, bias = (source.stored[f"{dense.tensor}.{part}"].float() for part in ("weight", "bias"))
                row = torch.tanh(torch.nn.functional.linear(row, weight, bias))
        rows.append(row.numpy())
    return rows


@pytest.mark.parametrize(
    ("family", "kind", "quant"), CASES, ids=[f"{family}-{kind}-{quant.name}" for family, kind, quant in CASES]
)
def test_an_engine_embeds_as_transformers_does(family: str, kind: str, quant: QuantConfig) -> None:
    """Vectors are right on every instruction set, with the same bits alone, and in chunks where attention is causal."""
    path, reference = engine_of(family, kind, quant), expected_rows(family, kind)
    with Engine.open(path) as engine:
        assert engine.plan.whole_texts == (family in ENCODERS or kind == "mean")
        for isa in _cpu.isa_names() if quant == Bf16() else _cpu.isa_names()[:1]:
            config = partial(RuntimeConfig, isa=isa, threads=2, max_num_seqs=8)
            alone = [score(CpuExecutor(engine, config()), [text], last_only=True)[0] for text in texts()]
            for tokens in (17, 512):
                executor = CpuExecutor(engine, config(max_num_batched_tokens=tokens))
                together = score(executor, texts(), last_only=True)
                assert all(np.array_equal(*pair) for pair in zip(alone, together, strict=True))
            error = relative_error(np.stack(alone)[:, 0], np.stack(reference))
            assert error < tolerances.EMBEDDINGS[quant.name], isa


def test_vectors() -> None:
    """Prompts, lengths, and what is cut, alone and with others."""
    with LLM(engine_of("bert", "mean", Bf16()), threads=1) as llm:
        words = ["fox", "The capital of France is Paris.", "fox jumps " * 20]
        outputs = llm.embed(words)
        vectors = np.array([output.outputs.embedding for output in outputs])
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
        assert [llm.embed(word)[0].outputs.embedding for word in words] == vectors.tolist()
        tokenizer = llm.get_tokenizer()
        assert outputs[0].prompt_token_ids == tokenizer.encode("Show fox")
        asked = llm.embed("fox", prompt_name="query")[0]
        assert asked.prompt_token_ids == tokenizer.encode("Find: fox")
        by_tokens = llm.embed([{"prompt_token_ids": tokenizer.encode("Find: fox")}])[0]
        assert by_tokens.outputs == asked.outputs
        (short,) = llm.embed("fox", dimensions=8)
        np.testing.assert_allclose(short.outputs.embedding, vectors[0, :8] / np.linalg.norm(vectors[0, :8]), rtol=1e-5)
        (cut,) = llm.embed(words[2], truncate_prompt_tokens=9)
        assert cut.prompt_token_ids == outputs[2].prompt_token_ids[:9]
        similar = [output.outputs.score for output in llm.score(words[0], words)]
        np.testing.assert_allclose(similar, vectors @ vectors[0], atol=1e-6)
        assert llm.max_model_len == 300  # the pooling's, not the model's 512
        assert len(llm.embed([texts([300])[0]])[0].prompt_token_ids) == 300


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda llm: llm.embed("fox " * 900), "this model's maximum context length is 300 tokens"),
        (lambda llm: llm.embed([[5] * 301]), "the prompt has 301 tokens"),
        (lambda llm: llm.embed([[]]), "the prompt is empty"),
        (lambda llm: llm.embed([[307]]), "token ids are 0 to 306"),
        (lambda llm: llm.embed("fox", dimensions=9), "vectors of this model may have 8, 20 numbers"),
        (lambda llm: llm.embed("fox", dimensions=61), "it must be from 1 to 60"),
        (lambda llm: llm.embed("fox", prompt_name="none"), "there are other, query"),
        (lambda llm: llm.embed("fox", truncate_prompt_tokens=0), "it must be at least 1"),
        (lambda llm: llm.embed("fox", truncate_prompt_tokens=301), "maximum context length is 300"),
        (lambda llm: llm.embed("fox", lora=1), "there is no argument called lora"),
        (lambda llm: llm.score(["a", "b"], ["a", "b", "c"]), "text_1 has 2 texts, and text_2 3"),
        (lambda llm: llm.score("a", 5), "text_2 is 5"),
        (lambda llm: llm.generate("fox"), "writes no text: it is a model that gives a vector for a text"),
        (lambda llm: llm.chat([{"role": "user", "content": "fox"}]), "writes no text"),
        (lambda llm: llm.stream("fox"), "writes no text"),
    ],
)
def test_what_an_embedding_engine_refuses(ask: Any, message: str) -> None:
    with LLM(engine_of("bert", "mean", Bf16()), threads=1) as llm, pytest.raises(UsageError, match=message):
        ask(llm)


def test_an_engine_that_writes_refuses_texts() -> None:
    with LLM(built_tiny("llama"), threads=1, max_model_len=64) as llm:
        for ask in (lambda: llm.embed("fox"), lambda: llm.score("fox", "dog")):
            with pytest.raises(UsageError, match="it writes text"):
                ask()


def test_a_cross_encoder_scores_as_transformers_does() -> None:
    source, pairs = pair_checkpoint(), [("fox", "dog"), ("fox", "What is the capital of France?"), ("Paris " * 30, "x")]
    model = tiny_model(source.config, kind=AutoModelForSequenceClassification)
    with LLM(engine_of("bert", "pair", Bf16()), threads=1) as llm:
        found = llm.score(*zip(*pairs, strict=True))
        alone = [llm.score(*pair)[0].outputs.score for pair in pairs]
        assert [one.outputs.score for one in found] == alone
        by_types = []
        for pair, output in zip(pairs, found, strict=True):
            ids, begin, second_from = llm.get_tokenizer().encode_pair(*pair)
            assert 0 < begin == second_from < len(ids)
            types = (torch.arange(len(ids)) >= second_from).long()
            with torch.inference_mode():
                logit = model(torch.tensor([ids]), token_type_ids=types[None]).logits[0, 0]
                alike = model(torch.tensor([ids])).logits[0, 0]  # of one text: types count
            assert output.outputs.score == pytest.approx(float(torch.sigmoid(logit)), abs=tolerances.SCORES)
            by_types.append(abs(float(torch.sigmoid(logit) - torch.sigmoid(alike))))
            assert output.prompt_token_ids == ids
        assert max(by_types) > 2 * tolerances.SCORES
        (cut,) = llm.score("fox", "dog " * 400, truncate_prompt_tokens=-1)
        assert len(cut.prompt_token_ids) == llm.max_model_len == 512
        with pytest.raises(UsageError, match="maximum context length is 512"):
            llm.score("fox", "dog " * 400)
        with pytest.raises(UsageError, match="it gives scores to pairs of texts"):
            llm.embed("fox")


def test_goldens_are_of_vectors() -> None:
    for kind in ("mean", "first"):
        assert verify(engine_of("bert", kind, Bf16()), goldens=True, threads=1)["deviation"] == 0


def test_a_vector_may_be_cut_anywhere() -> None:
    source = checkpoint("qwen3", "last")
    config = {**source.config, "is_matryoshka": True}
    made = assemble(MemoryCheckpoint(config, source.stored, pooling=Pooling("last")), BuildConfig(gate=None), Silent())
    assert json.loads(made.files["embedding.json"])["any_dimensions"]
    with Engine.open(engine_of("qwen3", "last", Bf16())) as engine:
        check_dimensions(engine, 20)
        with pytest.raises(UsageError, match="truncate_prompt_tokens is 'all'"):
            TextReader(engine, 300, "all")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"targets": ("cuda:sm_80",)}, "embedding models have no code for cuda:sm_80"),
        ({"gate": GateConfig(full=True)}, "--gate full is not possible"),
        ({"gate": GateConfig(limits={"kl": 0.1})}, "--gate kl=… is not possible"),
        ({"report": Path("page.html")}, "Name a .json file"),
    ],
)
def test_what_a_build_refuses(config: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        assemble(checkpoint("bert", "mean"), BuildConfig(**config), Silent())


def test_an_encoder_without_pooling_is_refused() -> None:
    source = checkpoint("bert", "mean")
    with pytest.raises(UnsupportedModelError, match="the checkpoint has no pooling"):
        assemble(MemoryCheckpoint(source.config, source.stored), BuildConfig(), Silent())


def folder(tmp_path: Path, **changed: Any) -> Path:
    """A checkpoint of sentence-transformers, some of whose files are changed; None leaves a file out."""
    path = tiny_checkpoint(tmp_path, "llama")
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"), ("Normalize", "3_Normalize")]
    files = {
        "modules": [{"type": f"sentence_transformers.models.{kind}", "path": where} for kind, where in modules],
        "pooling": {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True},
        "dense": {
            "in_features": 48,
            "out_features": 11,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        },
        "prompts": {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": None},
        "limits": {"max_seq_length": 100, "do_lower_case": False},
        **changed,
    }
    places = {
        "modules": "modules.json",
        "pooling": "1_Pooling/config.json",
        "dense": "2_Dense/config.json",
        "prompts": "config_sentence_transformers.json",
        "limits": "sentence_bert_config.json",
    }
    for name, content in files.items():
        (path / places[name]).parent.mkdir(exist_ok=True)
        (path / places[name]).write_text(json.dumps(content))
    save_file({"linear.weight": torch.ones(11, 48)}, path / "2_Dense/model.safetensors")
    return path


def test_the_files_of_sentence_transformers(tmp_path: Path) -> None:
    opened = open_checkpoint(str(folder(tmp_path)))
    embedding = EmbeddingConfig(normalize=True, prompts={"query": "Q: "})
    assert opened.pooling == Pooling("last", embedding, (Dense("2_Dense.linear", 11, False, "identity"),), 100)
    assert torch.equal(opened.read("2_Dense.linear.weight"), torch.ones(11, 48))
    assert {"modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"} <= opened.source_hashes().keys()
    made = assemble(opened, BuildConfig(), Silent())
    (plan,) = made.plans.values()
    assert (plan.max_seq_len, plan.vocab_size, plan.buffers[plan.result].columns) == (100, 307, 11)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"modules": {}}, "it is not a list of modules"),
        ({"modules": [{"type": 5}]}, "a module is"),
        ({"modules": [{"type": "a.Transformer", "path": ""}, {"type": "a.LSTM", "path": ""}]}, "Transformer, LSTM"),
        ({"pooling": {"pooling_mode_max_tokens": True}}, "pooling_mode_max_tokens"),
        ({"pooling": {}}, "no pooling at all"),
        ({"pooling": {"pooling_mode_lasttoken": True, "include_prompt": False}}, "include_prompt = False"),
        ({"pooling": {"pooling_mode_lasttoken": True, "pooling_mode_new": True}}, "pooling_mode_new"),
        ({"dense": {"out_features": 11, "activation_function": "torch.nn.ReLU"}}, "activation_function"),
        ({"prompts": {"default_prompt_name": "query"}}, "not among its prompts"),
        ({"prompts": {"prompts": {"query": 5}}}, "not texts by their names"),
        ({"limits": {"do_lower_case": True}}, "do_lower_case = True"),
        ({"limits": {"max_length": 3}}, "max_length = 3"),
    ],
)
def test_files_that_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=message):
        open_checkpoint(str(folder(tmp_path, **changed)))


@pytest.mark.parametrize(
    ("kind", "command"), [("mean", 'embed {path} "What is the capital of France?"'), ("pair", "run {path}")]
)
def test_a_build_says_what_to_do_next(kind: str, command: str, tmp_path: Path) -> None:
    path = tmp_path / "x.engine"
    source = checkpoint("bert", kind) if kind == "mean" else pair_checkpoint()
    report = build_engine(source, BuildConfig(gate=None), path)
    assert describe(report).endswith(f"\nnext     engine {command.format(path=path)}")


def test_the_command_prints_vectors(tmp_path: Path) -> None:
    path, lines = engine_of("bert", "mean", Bf16()), tmp_path / "texts.txt"
    lines.write_bytes(b"\xef\xbb\xbfdog\r\nThe capital of France\n")
    run = CliRunner().invoke(main, ["embed", str(path), "fox", "--input", str(lines), "--dimensions", "8"])
    assert run.exit_code == 0, run.output
    printed = [json.loads(line) for line in run.output.splitlines()]
    assert [entry["text"] for entry in printed] == ["fox", "dog", "The capital of France"]
    with LLM(path, threads=1) as llm:
        outputs = llm.embed(["fox", "dog", "The capital of France"], dimensions=8)
    assert [entry["embedding"] for entry in printed] == [output.outputs.embedding for output in outputs]
    refused = CliRunner().invoke(main, ["embed", str(path)])
    assert refused.exit_code == 2 and "engine embed takes texts" in refused.output
    lines.write_bytes(b"dog\n\xffcat\n")
    refused = CliRunner().invoke(main, ["embed", str(path), "--input", str(lines)])
    assert refused.exit_code == 2 and "line 2: byte 1 of the line is not UTF-8" in refused.output
