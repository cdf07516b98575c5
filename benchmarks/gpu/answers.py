"""All kinds of requests to a tiny model's engine on the GPU, compared with the CPU, with steps ahead and without."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.gpu.report import Report
from enginewright import SamplingParams
from enginewright.errors import EngineError
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.core.outputs import Delta
from enginewright.runtime.device.devices import open_engine
from enginewright.runtime.sampling.sampler import SampledToken
from tests.helpers.ladder import Ladder
from tests.helpers.tiny import VOCAB_SIZE

Limits = Mapping[str, int]
# Steps of few tokens, in which an answer's bits do not depend on its batch, and steps that use kernels for many tokens.
LIMITS = {"max_model_len": 192, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_logit_rows": 64}
AT_ONCE = LIMITS | {"max_num_batched_tokens": 256, "max_logit_rows": 256}
PROMPTS, TOKENS = 16, 8  # of a kind; of an answer
# Of tokens, those before an answer's first that is not the CPU's. Logits are up to 0.02 apart (in emulation), so that
# one sampled token in a hundred differs, and all after it: 0.87 are alike. With another seed it would be almost none.
ALIKE = 0.6
LOGPROB = 0.08  # apart, where the tokens before are the same
Answer = list[SampledToken]


@dataclass(frozen=True)
class Kind:
    """A kind of requests."""

    name: str
    params: SamplingParams
    ladder: bool = False  # the answers follow the tests' grammar

    def prompts(self) -> list[list[int]]:
        random = np.random.default_rng(len(self.name))
        return [random.integers(3, VOCAB_SIZE, int(length)).tolist() for length in random.integers(1, 90, PROMPTS)]


GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.9, seed=7)
KINDS = (
    Kind("greedy", replace(GREEDY, logprobs=5)),
    Kind("allowed tokens", replace(GREEDY, allowed_token_ids=tuple(range(5, VOCAB_SIZE, 3)))),
    Kind("a grammar", GREEDY, ladder=True),
    Kind("penalties", replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5)),
    Kind("sampled", SAMPLED),
    Kind("sampled, of top-k", replace(SAMPLED, top_p=1.0, top_k=20, min_p=0.02, logit_bias={9: 2.0}, logprobs=2)),
    Kind("sampled by a grammar", replace(SAMPLED, frequency_penalty=0.5), ladder=True),
)


class Heard:
    """The answer to one request, token by token."""

    def __init__(self) -> None:
        self.tokens: Answer = []

    def put(self, item: Delta | EngineError) -> None:
        if isinstance(item, EngineError):
            raise item
        self.tokens += item.tokens


def answered(
    path: Path, device: str, kinds: Sequence[Kind], limits: Limits = LIMITS, steps_ahead: int = 0
) -> dict[str, list[Answer]]:
    """To all prompts of these kinds at once, a few of them in a step. steps_ahead: at most."""
    heard: dict[str, list[Heard]] = {kind.name: [] for kind in kinds}
    with open_engine(path, device) as engine:
        core = EngineCore(engine, RuntimeConfig(**limits, device=device))
        core.executor.steps_ahead = min(steps_ahead, core.executor.steps_ahead)
        for kind in kinds:
            for prompt in kind.prompts():
                heard[kind.name].append(Heard())
                grammars = [Ladder(VOCAB_SIZE, prompt[-1])] if kind.ladder else ()
                core.add(core.request(prompt, kind.params, heard[kind.name][-1].put, grammars=grammars))
        while core.has_work:
            for request, delta in core.step():
                request.sink(delta)
        core.close()
    return {name: [one.tokens for one in answers] for name, answers in heard.items()}


def compared(kind: Kind, ours: list[Answer], theirs: list[Answer]) -> dict[str, float | str]:
    """With the CPU's."""
    alike, apart, wrong = 0, 0.0, []
    allowed = set(kind.params.allowed_token_ids or range(VOCAB_SIZE))
    for mine, other in zip(ours, theirs, strict=True):
        if len(mine) != TOKENS or any(one.is_nan for one in mine):
            wrong.append(f"an answer has {len(mine)} tokens, or NaN")
        elif not allowed >= {one.token for one in mine}:
            wrong.append("it has tokens that are not allowed")
        for a, b in zip(mine, other, strict=False):
            if a.token != b.token:
                break
            alike += 1
            if kind.params.logprobs is not None:
                apart = max(apart, abs((a.logprob or 0.0) - (b.logprob or 0.0)))
                apart = max(apart, *(abs(x - y) for (_, x), (_, y) in zip(a.top_logprobs, b.top_logprobs, strict=True)))
    share = alike / sum(map(len, theirs))
    if share < ALIKE:
        wrong.append(f"{share:.0%} of its tokens are the CPU's")
    if apart > LOGPROB:
        wrong.append(f"log-probabilities are off by {apart:.2g}")
    found: dict[str, float | str] = {"as on the CPU": share}
    if kind.params.logprobs is not None:
        found["log-probabilities off by"] = apart
    return found | ({"error": wrong[0]} if wrong else {})


def measure(report: Report, name: str, path: Path, device: str, limits: Limits = LIMITS) -> None:
    """Each kind by itself, one step after the other; then all of them together, with a step ahead.

    Args:
        limits: Limits with which answers are bitwise the same in any batch.
    """
    alone: dict[str, list[Answer]] = {}
    for kind in KINDS:
        with report.case(f"{name}/{kind.name}"):
            alone |= answered(path, device, [kind], limits)
            (on_cpu,) = answered(path, "cpu", [kind], limits).values()
            report.add(f"{name}/{kind.name}", **compared(kind, alone[kind.name], on_cpu))
    together = answered(path, device, [kind for kind in KINDS if kind.name in alone], limits, steps_ahead=1)
    for named, answers in alone.items():
        same = sum(a == b for a, b in zip(answers, together[named], strict=True))
        wrong = {} if same == PROMPTS else {"error": "in a batch, with a step ahead, answers differ"}
        report.add(f"{name}/{named}, ahead", **{"as alone": same, "of": PROMPTS}, **wrong)
