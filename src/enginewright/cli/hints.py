"""Hints for users of other programs: our names for their commands, options and quantization formats."""

import difflib
import re
import shlex
from collections.abc import Collection, Mapping, Sequence

# Commands of vLLM, llama.cpp, Ollama and other programs -> our command.
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
# Commands of other programs that take a question -> the option of `engine generate` for it.
QUESTIONS = {"ask": "--chat", "complete": "--prompt", "completion": "--prompt"}

_INT4 = "int4-awq (calibrated, the more exact) or int4-rtn (rounded to nearest, built in seconds)"
_BITS_5 = "auto with --bits, which gives each layer a format of 4, 8 or 16 bits"
# Patterns of quantization formats of other programs, in lower case with hyphens -> our method.
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

_IN_THE_FILE = "All that a model needs is in its engine file: leave it out."
_BY_BUILD = "Formats are chosen when the engine is built: engine build MODEL --quant METHOD."
# Options of vLLM, llama.cpp and other programs that do not exist here -> a sentence that says what to do instead.
OPTIONS: Mapping[str, str] = {
    name: hint
    for names, hint in (
        ("--node-rank -r --headless", "This machine is node 0; the others run engine worker with --node-rank."),
        ("--data-parallel-size -dp", "Run several servers behind engine route."),
        ("--enable-expert-parallel -ep", "--tensor-parallel-size divides layers of experts by experts: leave it out."),
        ("--split-mode --tensor-split", "Ranks get equal parts: --tensor-parallel-size."),
        ("--n-gpu-layers --gpu-layers -ngl", "An engine runs on one device as a whole: --device cuda."),
        ("--gpu-memory-utilization --mem-fraction-static", "Set the memory of the KV cache: --kv-cache-memory 8GiB."),
        ("--dtype --quantization -q", _BY_BUILD),
        ("--kv-cache-dtype --cache-type-k -ctk --cache-type-v -ctv", "It is chosen by engine build --kv-cache-dtype."),
        ("--model -m --model-path", "Name the engine file without an option: engine run FILE."),
        ("--hf-repo -hf", "Build the model first: engine build OWNER/NAME."),
        ("--revision", "Write it after the model when you build: engine build OWNER/NAME@REVISION."),
        (
            "--tokenizer --tokenizer-mode --skip-tokenizer-init --download-dir --load-format --config-format",
            _IN_THE_FILE,
        ),
        ("--chat-template --jinja", "The chat template is in the engine file, as the checkpoint had it: leave it out."),
        ("--generation-config", "The model's own sampling defaults are in the engine file: leave it out."),
        ("--trust-remote-code", "Code in a model's folder is never run: leave it out."),
        ("--max-seqs --max-num-seqs --parallel -np", "The batch size is an option of engine run: --max-num-seqs."),
        (
            "--batch-size -b --ubatch-size -ub",
            "Tokens of a step are an option of engine run: --max-num-batched-tokens.",
        ),
        ("--max-seq-len --ctx-size --context-length", "The longest sequence to run is --max-model-len."),
        ("--max-model-len", "The longest sequence of an engine is set by engine build --max-seq-len."),
        ("--n-predict --predict -n --max-new-tokens", "The length of an answer is --max-tokens of engine generate."),
        ("--temp", "Write --temperature."),
        ("--repeat-penalty", "Write --repetition-penalty."),
        ("--system-prompt -sys", "Write --system, together with --chat."),
        ("--conversation -cnv", "Ask one question with --chat, or serve the engine with engine run."),
        ("--file -f", 'Give the text itself: --prompt "$(cat FILE)".'),
        ("--grammar-file", 'Give the grammar itself: --grammar "$(cat FILE)".'),
        (
            "--guided-decoding-backend --structured-outputs-config",
            "Structured outputs need no setting: requests ask for them.",
        ),
        (
            "--enable-auto-tool-choice --reasoning-parser",
            "Calls and reasoning are found by the model's chat template: leave it out (see --tool-call-parser).",
        ),
        ("--enable-lora", "Name adapters: --lora-modules NAME=FILE or --lora-dir DIR."),
        ("--lora", "Write --lora-modules NAME=FILE."),
        (
            "--speculative-config --speculative-model --model-draft -md",
            "Add the draft model with engine build --draft, and choose it with --speculate.",
        ),
        ("--block-size --swap-space --cpu-offload-gb --mlock", "It has no counterpart here: leave it out."),
        (
            "--enforce-eager --compilation-config --max-seq-len-to-capture",
            "Kernels are compiled by engine build: leave it out.",
        ),
        ("--flash-attn -fa --attention-backend", "Attention is chosen for the machine: leave it out."),
        ("--enable-chunked-prefill", "Long prompts are always read in chunks: see --prefill-chunk-size of engine run."),
        ("--cont-batching -cb", "Requests are always batched in flight: leave it out."),
        ("--disable-log-requests --disable-log-stats", "Choose what is logged with --log-level warning."),
        ("--uvicorn-log-level", "Write --log-level."),
        ("--alias", "Write --served-model-name."),
        (
            "--ssl-keyfile --ssl-certfile --ssl-key-file --ssl-cert-file",
            "HTTPS is an option of engine run: --ssl-certfile and --ssl-keyfile.",
        ),
        ("--allowed-origins", "CORS is an option of engine run: --allowed-origins."),
    )
    for name in names.split()
}
_GPU_NAMES = ("gpu", "cuda", "nvidia", "nvptx")


def hint_for_option(name: str, typed: Sequence[str], known: Collection[str]) -> str:
    """Returns a sentence that says what to do instead of an option of another program; "" if none is known.

    Args:
        name: The unknown option. Click gives only the first letter of `-ngl`.
        typed: The words of the command line.
        known: Options of the command.
    """
    foreign = [option for option in OPTIONS if option not in known]
    complete = [word for word in typed if word in OPTIONS and word.startswith(name)]
    near = difflib.get_close_matches(name, foreign, n=1, cutoff=0.9) if name.startswith("--") else []
    return next((OPTIONS[word] for word in (*complete, name, *near) if word in OPTIONS), "")


def hint_for_target(value: str, architectures: Collection[str]) -> str:
    """Returns what to write instead of a target that names no GPU architecture; "" for any other value."""
    words = re.split(r"[+,]", value.lower())
    if not any(word.strip(" :") in _GPU_NAMES for word in words):
        return ""
    return (
        "Name the GPU's architecture: cuda:sm_80 (A100), cuda:sm_89 (RTX 40), cuda:sm_90a (H100), cuda:sm_100a (B200); "
        f"there are {', '.join(architectures)}."
    )


def hint_for_quant(name: str, known: Collection[str]) -> str:
    """Returns a question that suggests a method for an unknown value of `--quant`; "" if no method is similar."""
    plain = re.sub(r"[_.\s]+", "-", name.strip().lower())
    for pattern, meant in _METHODS:
        if re.fullmatch(pattern, plain):
            return f"Did you mean {meant}?"
    near = difflib.get_close_matches(plain, known, n=1)
    return f"Did you mean {near[0]}?" if near else ""


def hint_for_command(typed: Sequence[str], known: Collection[str], program: str) -> str:
    """Returns a question that suggests a command for an unknown one; "" if no command is similar.

    Args:
        typed: The unknown command, and the words after it.
        known: The commands.
        program: The words before the command: `engine`, or `engine bench`.
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
