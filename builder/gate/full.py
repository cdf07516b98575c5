"""The additional measurements of `--gate full`: finding a number in a long text, and what the engine writes.

The source is streamed weight by weight and cannot write; it can only evaluate texts. So its most likely token is
computed at each position: of the number that is to be found, and of the engine's completion. Up to the first
difference, that is what the source would have written itself.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import onnx_ir as ir

from enginewright.builder.gate.texts import held_out
from enginewright.passes.streaming import stream
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.commands.quality import Full, Needle, Writing, rounded
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams

NEEDLE_LENGTHS = (256, 1024, 4096)  # tokens of the texts
NEEDLE_DEPTHS = (0.1, 0.5, 0.9)  # positions of the number, as a share of the text
NEEDLE = "\nThe number on the green door is"
PROMPT_TOKENS = 32  # tokens of a held-out text that the engine continues
WRITTEN_TOKENS = 64  # tokens of a completion
STREAM_TOKENS = 4096  # tokens of texts whose activations are in memory at once
MAX_SEQUENCES = 8  # sequences in a step of the engine
JSON_EXAMPLES = (
    ("Anna Holm, 31, lives in Oslo", {"name": "Anna Holm", "age": 31, "city": "Oslo"}),
    ("Bruno, 45, from Porto", {"name": "Bruno", "age": 45, "city": "Porto"}),
)
JSON_LINES = (
    "Chiara Conti is 27 and lives in Turin",
    "Dmitri, 62, has moved to Riga",
    "In Graz lives Eva Moser, who is 19",
    "Farid, aged 38, Lyon",
    "Grace O'Neill (54) of Cork",
    "Hiro Tanaka, Nagoya, 70 years old",
    'Ines "Nena" Duarte, 33, Faro',
    "Jonas is 8; he lives in Bern",
)


@dataclass(frozen=True)
class _Question:
    """A prompt whose completions by the engine and by the source are compared."""

    prompt: Sequence[int]  # token ids
    max_tokens: int  # maximum of the completion's tokens
    stop: tuple[str, ...] = ()  # strings that end the completion
    answer: Sequence[int] | None = None  # expected tokens; None: any completion


def measure_full(source: ir.Model, engine: Engine, threads: int) -> Full:
    """Measures what fits the engine's longest sequence.

    Args:
        source: graph of the source.
        engine: the engine.
        threads: number of threads.
    """
    fits = engine.plan.max_seq_len
    places = [(length, depth) for length in NEEDLE_LENGTHS for depth in NEEDLE_DEPTHS if length <= fits]
    needles = [_needle(engine, index, *place) for index, place in enumerate(places)]
    names, prompts = zip(*_prompts(engine), strict=True)
    kept = [index for index, prompt in enumerate(prompts) if len(prompt.prompt) + prompt.max_tokens <= fits]
    questions = [*needles, *(prompts[index] for index in kept)]
    if not questions:
        return Full((), ())
    written = _written(engine, questions, threads)
    expected = [tokens if one.answer is None else one.answer for one, tokens in zip(questions, written, strict=True)]
    agreed = list(_agreed(source, questions, expected, threads))
    found = [
        Needle(*place, source=by_source == len(answer), engine=list(tokens) == list(answer))
        for place, by_source, answer, tokens in zip(places, agreed, expected, written, strict=False)
    ]
    writings = [
        Writing(names[index], len(tokens), by_source, _is_json(engine, tokens) if prompts[index].stop else None)
        for index, by_source, tokens in zip(kept, agreed[len(found) :], written[len(found) :], strict=True)
    ]
    return Full(tuple(found), tuple(writings))


def full_values(full: Full) -> dict[str, float | None]:
    """Computes the values of MEASURES; one without data is missing."""
    values: dict[str, float | None] = {}
    found = [needle.engine for needle in full.needles if needle.source]
    valid = [writing.valid_json for writing in full.writings if writing.valid_json is not None]
    if found:
        values["needle"] = rounded(statistics.mean(found), 4)
    if valid:
        values["json"] = rounded(statistics.mean(valid), 4)
    if full.writings:
        values["divergence"] = float(statistics.median(writing.agreed for writing in full.writings))
    return values


def _needle(engine: Engine, index: int, length: int, depth: float) -> _Question:
    """Makes a held-out text with a number in it, then the start of the sentence that repeats it."""
    tokenizer = engine.tokenizer
    sentence = tokenizer.encode(NEEDLE, add_special_tokens=False)
    number = tokenizer.encode(f" {1009 + 911 * index}", add_special_tokens=False)
    end = tokenizer.encode(".\n", add_special_tokens=False)
    hay = [token for text in held_out(tokenizer, engine.plan.vocab_size) for token in text.tokens]
    hay_tokens = max(length - 2 * len(sentence + number) - len(end), 0)
    hay = (hay * -(-hay_tokens // len(hay)))[:hay_tokens]
    split = int(hay_tokens * depth)
    prompt = [*hay[:split], *sentence, *number, *end, *hay[split:], *sentence]
    return _Question(prompt, len(number), answer=number)


def _prompts(engine: Engine) -> Iterator[tuple[str, _Question]]:
    for text in held_out(engine.tokenizer, engine.plan.vocab_size, longest=PROMPT_TOKENS):
        yield text.name, _Question(text.tokens, WRITTEN_TOKENS)
    examples = "".join(f"Line: {line}\nJSON: {json.dumps(answer)}\n" for line, answer in JSON_EXAMPLES)
    for line in JSON_LINES:
        prompt = engine.tokenizer.encode(f"Each line as JSON.\n{examples}Line: {line}\nJSON:")
        yield f"JSON: {line}", _Question(prompt, WRITTEN_TOKENS, ("\n",))


def _written(engine: Engine, questions: Sequence[_Question], threads: int) -> list[list[int]]:
    """Generates the engine's greedy completions."""
    params = [
        SamplingParams(temperature=0, max_tokens=question.max_tokens, stop=question.stop) for question in questions
    ]
    longest = max(len(question.prompt) + question.max_tokens for question in questions)
    with LLM(engine, max_model_len=longest, max_num_seqs=MAX_SEQUENCES, threads=threads) as llm:
        outputs = llm.generate([list(question.prompt) for question in questions], params)
    return [output.outputs[0].token_ids for output in outputs]


def _is_json(engine: Engine, tokens: Sequence[int]) -> bool:
    try:
        return isinstance(json.loads(engine.tokenizer.decode(tokens)), dict)
    except ValueError:
        return False


def _agreed(
    source: ir.Model, questions: Sequence[_Question], answers: Sequence[Sequence[int]], threads: int
) -> Iterator[int]:
    """Counts the tokens of each completion up to the first that the source would not have chosen."""
    texts = [[*question.prompt, *answer] for question, answer in zip(questions, answers, strict=True)]
    for batch in _batches([len(text) for text in texts]):
        streamed = stream(source, [texts[index] for index in batch], threads=threads)
        for row, index in enumerate(batch):
            begin, answer = len(questions[index].prompt), answers[index]
            chosen = streamed.logits(row, begin - 1, begin - 1 + len(answer)).argmax(1).tolist()
            same = (one == other for one, other in zip(chosen, answer, strict=True))
            yield sum(1 for _ in takewhile(bool, same))


def _batches(lengths: Sequence[int]) -> Iterator[range]:
    """Groups consecutive texts with up to STREAM_TOKENS in all, or a single longer one."""
    begin = total = 0
    for index, length in enumerate(lengths):
        if index > begin and total + length > STREAM_TOKENS:
            yield range(begin, index)
            begin, total = index, 0
        total += length
    yield range(begin, len(lengths))
