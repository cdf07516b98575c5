"""Answers with adapters: those of PEFT's model, the same bits in any batch, and never another adapter's KV cache."""

import copy
import dataclasses
import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from enginewright import LLM, LoRARequest, SamplingParams
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.model_cache import adapter_files
from enginewright.errors import UsageError
from enginewright.runtime.core.outputs import RequestOutput
from tests.helpers.adapters import logits, prepared, trained, trained_experts
from tests.helpers.command import run_engine
from tests.helpers.engines import folder_of_engines
from tests.helpers.tiny import ALL_EXPERTS, MIXTURES, MemoryCheckpoint, saved, tiny_config, tiny_model
from tests.tolerances import ADAPTED_LOGPROBS

LINEARS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
LIMITS: dict[str, Any] = {"kv_cache_memory": 64 << 20, "threads": 1, "max_num_batched_tokens": 64, "max_num_seqs": 8}
EXPERTS: dict[str, Any] = {
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
TOKENS = [(number * 31 + 36) % 200 + 5 for number in range(40)]  # tokens of `prompt`, and others
CASES: Sequence[tuple[str, str, dict[str, Any]]] = [
    ("llama", "bf16", {"target_modules": LINEARS}),
    ("llama", "bf16", {"target_modules": ["v_proj"], "r": 1}),
    ("llama", "bf16", {"target_modules": LINEARS, "r": 64, "use_rslora": True}),
    ("llama", "bf16", {"target_modules": LINEARS, "use_dora": True}),
    ("llama", "int8-sq", {"target_modules": LINEARS, "rank_pattern": {"q_proj": 3, "down_proj": 11}}),
    ("llama", "int4-rtn", {"target_modules": LINEARS}),
    ("qwen2", "int8-wo", {"target_modules": LINEARS, "bias": "lora_only"}),
    ("gemma3_text", "bf16", {"target_modules": LINEARS}),
    ("phi3", "fp8", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    ("gpt2", "bf16", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    ("granitemoehybrid", "int8-wo", {"target_modules": ["q_proj", "o_proj", "in_proj", "out_proj"]}),
    ("deepseek_v3", "bf16", {"target_modules": ["q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}),
    ("qwen3_moe", "bf16", {**EXPERTS, "rank_pattern": {"down_proj": 3}}),
    ("qwen3_moe", "int8-sq", EXPERTS),
    ("mixtral", "int4-rtn", {**EXPERTS, "lora_alpha": 9}),
    ("glm4_moe", "bf16", {**EXPERTS, "target_modules": ["shared_experts.gate_proj", "shared_experts.down_proj"]}),
]
TIED, UNTIED = ({"tie_word_embeddings": is_tied} for is_tied in (True, False))
WITH_Q: dict[str, Any] = {"target_modules": ["q_proj"]}
# Changes of the output head and the embedding.
VOCABULARY: Sequence[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("llama", UNTIED, "bf16", {"target_modules": ["q_proj", "lm_head"]}),
    ("llama", TIED, "int8-wo", {"target_modules": ["lm_head"], "r": 33}),
    ("llama", TIED, "bf16", {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}),
    ("llama", UNTIED, "int4-rtn", {"target_modules": ["embed_tokens"]}),
    ("llama", TIED, "int8-sq", {"target_modules": ["embed_tokens"]}),
    ("llama", UNTIED, "int8-sq", {"target_modules": ["embed_tokens", "lm_head"], "use_rslora": True, "r": 3}),
    ("gemma3_text", {}, "bf16", {"target_modules": ["embed_tokens", "lm_head"], "r": 1}),
    ("gpt2", {}, "bf16", {"target_modules": ["wte", "lm_head"]}),
    ("granite", {}, "int8-wo", {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
    ("llama", TIED, "bf16", {**WITH_Q, "trainable_token_indices": TOKENS}),
    ("llama", TIED, "bf16", {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": TOKENS}),
    (
        "llama",
        UNTIED,
        "int8-wo",
        {**WITH_Q, "trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS[:9]}},
    ),
    ("gemma3_text", {}, "int8-sq", {**WITH_Q, "trainable_token_indices": TOKENS}),
    ("llama", TIED, "bf16", {**WITH_Q, "modules_to_save": ["lm_head"]}),
    ("llama", TIED, "int8-sq", {**WITH_Q, "modules_to_save": ["embed_tokens"]}),
    ("qwen3_moe", {}, "int8-wo", {**WITH_Q, "modules_to_save": ["embed_tokens", "lm_head"]}),
]


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + place * place * 7 + place) % 200 + 5 for place in range(length)]


@pytest.mark.parametrize(("family", "quant", "lora"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_answers_are_those_of_peft(family: str, quant: str, lora: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(family, **ALL_EXPERTS.get(family, {}))
    model, engine = tiny_model(config), tmp_path / "tiny.engine"
    build_engine(MemoryCheckpoint.of(model, config), BuildConfig(quant=quant_config(quant), gate=None), engine)
    check_answers(engine, model, trained(model, tmp_path / "adapter", **lora), tmp_path, quant)


@pytest.mark.parametrize(
    ("family", "overrides", "quant", "lora"),
    VOCABULARY,
    ids=[f"{family}-{quant}-{'-'.join(map(str, lora))}" for family, _, quant, lora in VOCABULARY],
)
def test_answers_with_heads_and_embeddings(
    family: str, overrides: dict[str, Any], quant: str, lora: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny_config(family, **{**ALL_EXPERTS.get(family, {}), **overrides})
    model, engine = tiny_model(config), tmp_path / "tiny.engine"
    build_engine(MemoryCheckpoint.of(model, config), BuildConfig(quant=quant_config(quant), gate=None), engine)
    check_answers(engine, model, trained(model, tmp_path / "adapter", **lora), tmp_path, quant)


@pytest.mark.parametrize("method", ["int4-rtn", "fp8"])
@pytest.mark.parametrize("kind", ["target_modules", "modules_to_save"])
def test_answers_with_a_head_that_is_quantized_as_a_layer(method: str, kind: str, tmp_path: Path) -> None:
    model, engine = tiny_model(config := tiny_config("llama", **UNTIED)), tmp_path / "tiny.engine"
    config_of_build = BuildConfig(quant=quant_config(method, quantize_lm_head=True), gate=None)
    build_engine(MemoryCheckpoint.of(model, config), config_of_build, engine)
    adapted = trained(model, tmp_path / "adapter", **{**WITH_Q, kind: ["lm_head"], "lora_alpha": 9})
    check_answers(engine, model, adapted, tmp_path, method)


@pytest.mark.parametrize("quant", ["bf16", "int8-wo"])
def test_answers_with_layers_of_single_experts(quant: str, tmp_path: Path) -> None:
    """The checkpoint and the adapter have each expert's layers by themselves."""
    model, engine = tiny_model(tiny_config("qwen3_moe", **ALL_EXPERTS["qwen3_moe"])), tmp_path / "tiny.engine"
    saved(copy.deepcopy(model).to(torch.bfloat16), tmp_path / "base")
    checkpoint = open_checkpoint(str(tmp_path / "base"))
    build_engine(checkpoint, BuildConfig(quant=quant_config(quant), gate=None), engine)
    check_answers(engine, model, trained_experts(model, tmp_path / "adapter"), tmp_path, quant)


def check_answers(engine: Path, model: PreTrainedModel, adapted: Any, tmp_path: Path, quant: str) -> None:
    """Compares log-probabilities with those of a model, and of the model that an adapter has made of it."""
    request = LoRARequest("adapter", 1, str(prepared(engine, tmp_path / "adapter")))
    tokens = prompt(1, 37)
    with LLM(engine, enable_lora=True, **LIMITS) as llm:
        own, base = llm.generate([tokens, tokens], SCORED, lora_request=[request, None])
    for output, reference in (own, adapted), (base, model):
        rows = torch.log_softmax(logits(reference, torch.tensor([tokens])), -1)[0]
        right = rows[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert float((scores(output) - right).abs().max()) < ADAPTED_LOGPROBS[quant], output.request_id
    assert float((scores(own) - scores(base)).abs().max()) > 2 * ADAPTED_LOGPROBS[quant], "it is another model"


def scores(output: RequestOutput) -> torch.Tensor:
    """Log-probabilities of a prompt's tokens but the first."""
    assert output.prompt_logprobs is not None
    return torch.tensor([next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry is not None])


@dataclasses.dataclass
class Adapted:
    """An engine, and adapters of it with different ranks and modules."""

    engine: Path
    requests: list[LoRARequest | None]  # the base first


@cache
def adapted(family: str) -> Adapted:
    folder = folder_of_engines() / f"adapted-{family}"
    folder.mkdir()
    config = tiny_config(family, **(TIED if family == "llama" else {}))
    model, engine = tiny_model(config), folder / "tiny.engine"
    build_engine(MemoryCheckpoint.of(model, config), BuildConfig(gate=None), engine)
    modules = LINEARS if family == "llama" else ["q_proj", "o_proj"]
    choices: list[dict[str, Any]] = [{"r": 3}, {"r": 16, "target_modules": ["q_proj"]}, {"r": 33}, {"use_dora": True}]
    if family in MIXTURES:
        parts = [EXPERTS["target_parameters"], [], EXPERTS["target_parameters"][1:], []]
        choices = [{**choice, "target_parameters": own} for choice, own in zip(choices, parts, strict=True)]
    if family == "llama":
        choices += [
            {"r": 5, "target_modules": ["lm_head", "embed_tokens"]},
            {"trainable_token_indices": TOKENS},
            {"modules_to_save": ["lm_head"]},
        ]
    requests: list[LoRARequest | None] = [None]
    for number, choice in enumerate(choices):
        trained(model, folder / str(number), seed=number, **{"target_modules": modules, **choice})
        requests.append(LoRARequest(f"adapter {number}", number + 1, str(prepared(engine, folder / str(number)))))
    return Adapted(engine, requests)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(adapted("llama").engine, enable_lora=True, **LIMITS) as opened:
        yield opened


def answer(output: RequestOutput) -> list[tuple[Any, ...]]:
    """All that a completion shows, to be compared bit by bit."""
    return [
        (
            one.token_ids,
            one.finish_reason,
            [sorted((key, lp.logprob) for key, lp in row.items()) for row in one.logprobs],
        )
        for one in output.outputs
        if one.logprobs is not None
    ]


@pytest.mark.parametrize("family", ["llama", "granitemoehybrid", "qwen3_moe"])
def test_answers_have_the_same_bits_alone_and_in_any_batch(family: str) -> None:
    """Twenty requests of four adapters and the base, with preemptions, in chunks, with prefix hits, on two threads."""
    case = adapted(family)
    prompts = [prompt(seed % 3, 20 + 13 * seed) for seed in range(4)]
    wanted = list(product(prompts, case.requests))
    texts, requests = [text for text, _ in wanted], [request for _, request in wanted]
    with LLM(case.engine, enable_lora=True, enable_prefix_caching=False, **LIMITS) as llm:
        alone = [answer(llm.generate([text], PARAMS, lora_request=[own])[0]) for text, own in wanted]
    with LLM(case.engine, enable_prefix_caching=False, **LIMITS) as plain:
        base = [answer(plain.generate([text], PARAMS)[0]) for text in prompts]
    assert base == alone[:: len(case.requests)], "answers without an adapter are those of an engine without any"
    assert len({str(one) for one in alone}) == len(alone), "each adapter has answers of its own"
    limits = {**LIMITS, "threads": 2, "max_num_batched_tokens": 23}
    for memory, slots in (64 << 20, 8), (1 << 20, 2):
        with LLM(case.engine, enable_lora=True, **{**limits, "kv_cache_memory": memory, "max_loras": slots}) as llm:
            for _ in range(2):  # the second time with all prefixes in the cache
                assert [answer(one) for one in llm.generate(texts, PARAMS, lora_request=requests)] == alone


def test_no_prefix_of_another_adapter_is_used(llm: LLM) -> None:
    text, requests = prompt(1, 70), adapted("llama").requests
    first = [llm.generate([text], PARAMS, lora_request=[own])[0] for own in requests]
    assert [one.num_cached_tokens for one in first] == [0] * len(requests)
    again = [llm.generate([text], PARAMS, lora_request=[own])[0] for own in requests]
    assert [one.num_cached_tokens for one in again] == [64] * len(requests)
    assert list(map(answer, again)) == list(map(answer, first))
    salted = llm.generate([text], PARAMS, lora_request=requests[1], cache_salt="another")[0]
    assert salted.num_cached_tokens == 0 and answer(salted) == answer(first[1])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, logprobs=0, ignore_eos=True),
        SamplingParams(n=2, best_of=3, temperature=1.0, seed=5, max_tokens=6, logprobs=0, ignore_eos=True),
        SamplingParams(n=2, use_beam_search=True, temperature=0, max_tokens=6, logprobs=0),
        SamplingParams(temperature=0, max_tokens=12, logprobs=0, structured_outputs={"regex": "[a-z]{3,9}"}),
    ],
    ids=["n", "best_of", "beams", "grammar"],
)
def test_requests_of_all_kinds(llm: LLM, params: SamplingParams) -> None:
    text, requests = prompt(2, 30), adapted("llama").requests
    alone = [answer(llm.generate([text], params, lora_request=[own])[0]) for own in requests]
    together = llm.generate([text] * len(requests), params, lora_request=requests)
    assert list(map(answer, together)) == alone and len({str(one) for one in alone}) > 1


def test_speculation_changes_no_bit(llm: LLM) -> None:
    requests = adapted("llama").requests
    texts = [prompt(seed % 2, 40) * 2 for seed in range(len(requests))]
    right = list(map(answer, llm.generate(texts, PARAMS, lora_request=requests)))
    with LLM(adapted("llama").engine, enable_lora=True, speculate="ngram", **LIMITS) as drafting:
        assert list(map(answer, drafting.generate(texts, PARAMS, lora_request=requests))) == right


def test_a_replaced_file_is_used_from_then_on(llm: LLM, tmp_path: Path) -> None:
    first, second = adapted("llama").requests[1:3]
    assert first is not None and second is not None
    text, path = prompt(3, 40), tmp_path / "served.lora"
    right = [answer(llm.generate([text], PARAMS, lora_request=own)[0]) for own in (first, second)]
    for source, expected in zip((first, second, first), (right[0], right[1], right[0]), strict=True):
        path.with_suffix(".new").write_bytes(Path(source.lora_path).read_bytes())
        path.with_suffix(".new").replace(path)
        assert answer(llm.generate([text], PARAMS, lora_request=LoRARequest("served", 9, str(path)))[0]) == expected


def test_what_cannot_be_used_is_refused(llm: LLM, tmp_path: Path) -> None:
    own = adapted("llama").requests[1]
    assert own is not None
    other = LoRARequest("other", 1, str(adapted("granitemoehybrid").requests[1].lora_path))  # type: ignore[union-attr]
    (tmp_path / "text.lora").write_text("no adapter")
    wrong: list[tuple[Any, str]] = [
        (other, "does not belong to the engine"),
        (LoRARequest("none", 1, str(tmp_path / "none.lora")), "no such file|there is no"),
        (LoRARequest("none"), "has no file"),
        (LoRARequest("engine", 1, str(adapted("llama").engine)), "is an engine"),
        ([own, own], "2 adapters"),
        ("text", "must be a LoRARequest"),
    ]
    for given, text in wrong:
        with pytest.raises(UsageError, match=text):
            llm.generate([prompt(1, 9)], PARAMS, lora_request=given)
    with LLM(adapted("llama").engine, **LIMITS) as plain, pytest.raises(UsageError, match="opened without adapters"):
        plain.generate([prompt(1, 9)], PARAMS, lora_request=own)
    with (
        LLM(adapted("llama").engine, enable_lora=True, max_lora_rank=16, **LIMITS) as small,
        pytest.raises(UsageError, match="max_lora_rank is 16"),
    ):
        small.generate([prompt(1, 9)], PARAMS, lora_request=adapted("llama").requests[3])


def test_a_folder_of_peft_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`engine generate --lora` and `--lora-modules` with what PEFT has saved; batches and single answers have it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    case, folder, texts = adapted("llama"), adapted("llama").engine.parent / "0", ["The sea", "A hill, a river"]
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    limits = "--max-model-len", 60, "--temperature", 0, "--max-tokens", 9, "--ignore-eos"
    with LLM(case.engine, enable_lora=True, **LIMITS) as llm:
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        right = [one.outputs[0].text for one in llm.generate(texts, params, lora_request=case.requests[1])]
        base = [one.outputs[0].text for one in llm.generate(texts, params)]
    assert right != base
    for adapter, expected in (folder, right), (folder.with_suffix(".lora"), right), (None, base):
        options = () if adapter is None else ("--lora", adapter)
        result = run_engine("generate", case.engine, "--input", lines, *options, *limits)
        assert result.exit_code == 0, result.output
        assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == expected
    (made,) = (tmp_path / "cache").rglob("*.lora")
    before = made.stat()
    assert adapter_files([f"poet={folder}"], [case.engine]) == (f"poet={made}",) and made.stat() == before
    assert adapter_files([f"poet={made}"], [tmp_path]) == (f"poet={made}",)
    with pytest.raises(UsageError, match="it is prepared for one engine"):
        adapter_files([f"poet={folder}"], [case.engine, case.engine])
    wrong = run_engine("generate", case.engine, "--lora", case.engine, "-p", "x")
    assert wrong.exit_code == UsageError.exit_code and "is an engine, not an adapter" in wrong.output
    empty = run_engine("generate", case.engine, "--lora", tmp_path, "-p", "x")
    assert empty.exit_code == UsageError.exit_code and "holds no adapter_config.json" in empty.output
