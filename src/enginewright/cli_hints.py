"""What people who come from other programs type, and what it is called here."""

import difflib
import re
import shlex
from collections.abc import Collection, Sequence

# Commands of vLLM, llama.cpp, Ollama and others -> ours.
COMMANDS = {
    "benchmark": "bench",
    "check": "verify",
    "compare": "diff",
    "compile": "build",
    "convert": "build",
    "info": "inspect",
    "quantize": "build",
    "serve": "run",
    "server": "run",
    "show": "inspect",
    "start": "run",
}
# Commands that take a question -> the option of `engine generate` that it goes to.
QUESTIONS = {"ask": "--chat", "chat": "--chat", "complete": "--prompt", "completion": "--prompt"}

_INT4 = "int4-awq (calibrated, the more exact) or int4-rtn (rounded to nearest, built in seconds)"
_BITS_5 = "auto with --bits, which gives each layer a format of 4, 8 or 16 bits"
# Names of quantization formats elsewhere, in lower case with hyphens -> the method that is meant.
_METHODS: Sequence[tuple[str, str]] = (
    (r"(w4a16-|w4a8-|int4-|4bit-)?awq(-marlin)?|int4-w4a8-awq", "int4-awq"),
    (r"(w4a16-|int4-|4bit-)?gptq(-marlin)?", "int4-gptq"),
    (r"nf4|bnb(-4bit)?|bitsandbytes(-4bit)?|(int4-)?rtn", "int4-rtn"),
    (r"nvfp4|mxfp4-moe|fp4|w4a4|float4|e2m1", "mxfp4"),
    (r"i?q4(-.*)?|int4(-.*)?|w4(a8|a16)?|4-?bits?|[iu]4|awq-gptq", _INT4),
    (r"sq|smooth-?quant|int8-smooth-?quant|w8a8-(sq|smooth-?quant)|int8-w8a8-sq", "int8-sq"),
    (r"int8-w8a8|w8a8-int8|a8w8|dynamic-int8|torchao-int8", "w8a8 (rounded to nearest) or int8-sq (calibrated)"),
    (r"q8(-.*)?|w8a16|8-?bits?|w8|int8(-.*)?|i8|llm-int8", "int8-wo (8-bit weights) or w8a8 (8-bit activations, too)"),
    (r"(float8|fp8|f8|w8a8-fp8|fp8-w8a8)(-.*)?|e4m3(fn)?", "fp8"),
    (r"b?f(loat)?p?16|half|f(loat)?p?32|full(-prec(ision)?)?|none|no|off", "bf16"),
    (r"q[56](-.*)?|[56]-?bits?|int[56]|mixed(-precision)?", _BITS_5),
    (r"i?q[123](-.*)?|[23]-?bits?|int[23]|w[23]a16", f"{_INT4}; formats of fewer than 4 bits are not implemented"),
)


def hint_for_quant(name: str, known: Collection[str]) -> str:
    """What a name that is no method of `--quant` may mean, as a question; "" where nothing is near."""
    plain = re.sub(r"[_.\s]+", "-", name.strip().lower())
    for pattern, meant in _METHODS:
        if re.fullmatch(pattern, plain):
            return f"Did you mean {meant}?"
    near = difflib.get_close_matches(plain, known, n=1)
    return f"Did you mean {near[0]}?" if near else ""


def hint_for_command(typed: Sequence[str], known: Collection[str], program: str) -> str:
    """What words that begin with no command may mean, as a question; "" where nothing is near.

    Args:
        typed: the word that is no command, and the words behind it.
        known: the commands.
        program: what stands before them: `engine`, or `engine bench`.
    """
    name, *rest = typed
    if program.endswith(" bench") and _is_path(name):
        return _did_you_mean(program, "offline", *typed)
    if name in QUESTIONS and "generate" in known:
        engine, *words = rest or ["ENGINE"]
        question = words[:1] if words and not words[0].startswith("-") else ["QUESTION"]
        others = words[1:] if words[:1] == question else words
        return _did_you_mean(program, "generate", engine, QUESTIONS[name], *question, *others)
    if COMMANDS.get(name) in known:
        return _did_you_mean(program, COMMANDS[name], *rest)
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean '{near[0]}'?" if near else ""


def _did_you_mean(program: str, *words: str) -> str:
    return f"Did you mean: {program} {shlex.join(words)}"


def _is_path(word: str) -> bool:
    return "/" in word or word.endswith((".engine", ".gguf"))
