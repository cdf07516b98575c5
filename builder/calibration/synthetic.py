"""Synthetic calibration data: texts that the model writes itself, if the user gives none.

A temporary engine (int8 weights, rounded to nearest) is built on the final engine's disk, in a file without a name, and
continues short prompts in several registers. Its seeds are fixed, and its logits depend on neither threads nor the
other sequences in the batch: on machines of one instruction set the text is the same.
"""

from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

from enginewright.builder.assembly import BuildConfig, assemble
from enginewright.builder.checkpoint import Checkpoint
from enginewright.builder.progress import Progress, Silent
from enginewright.errors import EngineError
from enginewright.passes.quant import W8A8
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.text.tokenizer import Tokenizer

BATCH = 32  # sequences in a step
BEGINNINGS = (
    "",
    "The history of",
    "Chapter 1\n\n",
    "def main(",
    "Breaking news:",
    "Abstract. In this paper",
    '{"id": 1, "name": "',
    "Die Stadt",
    "Ingredients:\n-",
    "Theorem 1. Let",
    "Dear",
    "Le gouvernement",
    "#include <",
    "今天",
    "El presidente",
    "Q: How do I",
)
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that merges two sorted lists.",
    "Explain in simple words why the sky is blue.",
    "Tell me a short story about a lighthouse keeper.",
    "Translate into German: The train leaves at half past seven.",
    "A shop sells pens at 3 for 2 euros. What do 12 pens cost? Think step by step.",
    "Give me five tips for learning a language, as a list.",
    "Summarize the plot of Romeo and Juliet.",
)


def generate_samples(
    checkpoint: Checkpoint, tokenizer: Tokenizer, count: int, length: int, engine: Path, progress: Progress
) -> tuple[tuple[int, ...], ...]:
    """Generates `count` texts of `length` tokens, or of the model's limit if that is less.

    Args:
        checkpoint: the checkpoint.
        tokenizer: its tokenizer.
        count: number of texts.
        length: tokens of a text.
        engine: path of the final engine: the temporary one takes space on the same disk.
        progress: receiver of progress.

    Raises:
        EngineError: there is no space for the temporary engine, or its logits are not numbers.
    """
    progress.phase("plan a calibration draft")
    draft = assemble(checkpoint, BuildConfig(quant=W8A8()), Silent())
    length = min(length, draft.max_seq_len)
    with draft.writer(engine, evidence_sections=0) as writer:
        progress.phase("pack a calibration draft", draft.weight_bytes)
        draft.write(writer, progress)
        writer.write_header(draft.about(sources={}))
        progress.phase("write calibration text")
        prompts = list(islice(_prompts(tokenizer, length), count))
        params = [
            SamplingParams(temperature=1.0, seed=seed, max_tokens=length - len(prompt), ignore_eos=True)
            for seed, prompt in enumerate(prompts)
        ]
        with LLM(writer.temporary_path, max_model_len=length, max_num_seqs=BATCH) as llm:
            outputs = llm.generate(prompts, params)
    if any(output.outputs[0].finish_reason == "error" for output in outputs):
        raise EngineError(
            "the model cannot write text to calibrate on",
            "its logits are not numbers",
            "Are the weights damaged? With --calib-data, the build uses your texts.",
        )
    return tuple((*prompt, *output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True))


def _prompts(tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    """Yields starts of texts and, if the model has a template, chats in between, up to half a sample long."""
    first = [tokenizer.token_id(tokenizer.config.get(name)) for name in ("bos_token", "eos_token")]
    nothing = [next((token for token in first if token is not None), 0)]
    beginnings = [tokenizer.encode(text) or nothing for text in BEGINNINGS]
    chats = [prompt for prompt in _chats(tokenizer) if len(prompt) <= length // 2] or beginnings
    for beginning, chat in zip(cycle(beginnings), cycle(chats), strict=False):
        yield beginning[: length // 2]
        yield chat[: length // 2]


def _chats(tokenizer: Tokenizer) -> list[list[int]]:
    if not tokenizer.has_chat_template:
        return []
    try:
        texts = [tokenizer.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    except EngineError:  # an engine is built even if its template fails
        return []
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
