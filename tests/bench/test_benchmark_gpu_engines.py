"""The part `engines` of `python -m benchmarks.gpu` where there is no GPU: what is asked of one, the CPU can do."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.gpu import answers, engines
from enginewright.builder import build
from enginewright.runtime.core import engine_core as core
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.step.inputs import StepInputs, StepOutputs
from tests.helpers.gpu_report import reported
from tests.helpers.ladder import Ladder
from tests.helpers.late_executor import LateExecutor
from tests.helpers.tiny import VOCAB_SIZE


def steps_of(patch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the steps that the CPU's executors run from now on."""
    steps: list[int] = []
    run = CpuExecutor.run
    patch.setattr(CpuExecutor, "run", lambda self, inputs: steps.append(inputs.sizes.tokens) or run(self, inputs))
    return steps


def test_engines_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({case.name for case in engines.cases()}) == len(engines.cases()) > 40
    monkeypatch.setattr(build, "code_sections", lambda kernels, targets: {})  # nothing here runs it
    case = engines.Case("llama", "bf16")
    built = engines.build(case, tmp_path, "sm_90a")
    with monkeypatch.context() as patch:
        steps = steps_of(patch)
        found = engines.check(case, built, "cpu")
    assert "error" not in found and found["from the CPU"] == 0.0
    assert set(steps) >= {64, sum(engines.LENGTHS)} and sum(engines.LENGTHS) > 128  # of kernels for many tokens, too
    built.expected[0][:] += 1.0
    assert "its logits are off" in str(engines.check(case, built, "cpu")["error"])
    together = engines.in_flight(built.path, "cpu")
    assert "error" not in together and together["as on the CPU"] == together["requests"] == 16


@pytest.fixture(scope="module")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "code_sections", lambda kernels, targets: {})
        case = engines.Case(engines.WIDE, "bf16", batch_invariant=True)
        return engines.build(case, tmp_path_factory.mktemp("engines"), "sm_90a").path


def test_bits_that_hang_on_company_are_noticed(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of(monkeypatch)
    found = engines.in_company(tiny_engine, "cpu")
    assert found == {"positions": 256, "of other bits": 0} and {256, 97, 37, 8} <= set(steps)
    scores = engines.scores

    def other(engine: Engine, device: str, limits: dict[str, int], runs: list[list[list[int]]]) -> list[np.ndarray]:
        (logits,) = scores(engine, device, limits, runs)
        if limits["max_num_batched_tokens"] == 97:
            logits[5, 7] = np.nextafter(logits[5, 7], np.float32(np.inf))
        return [logits]

    monkeypatch.setattr(engines, "scores", other)
    assert "1 in steps of 97" in str(engines.in_company(tiny_engine, "cpu")["error"])


@pytest.mark.parametrize("ahead", [False, True])
def test_answers_are_compared(ahead: bool, tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LateExecutor] = []
    if ahead:
        monkeypatch.setattr(core, "open_executor", lambda *given: made.append(LateExecutor(*given)) or made[-1])
    found = reported(tmp_path, lambda report: answers.measure(report, "x", tiny_engine, "cpu"))
    for kind in answers.KINDS:
        figure = found[f"x/{kind.name}"]
        assert figure["as on the CPU"] == 1.0 and figure.get("log-probabilities off by", 0.0) == 0.0
        assert found[f"x/{kind.name}, ahead"] == {"as alone": answers.PROMPTS, "of": answers.PROMPTS}
    assert [one.num_late > 0 for one in made] == ([False] * 2 * len(answers.KINDS) + [True] if ahead else [])


def test_wrong_answers_are_noticed(tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {kind.name: kind for kind in answers.KINDS}
    (right,) = answers.answered(tiny_engine, "cpu", [kinds["greedy"]]).values()

    def why(kind: str, change: Callable[[SampledToken], SampledToken], at: int = 3) -> str:
        ours = [[*answer[:at], *(change(token) for token in answer[at:])] for answer in right]
        return str(answers.compared(kinds[kind], ours, right).get("error", ""))

    assert why("greedy", lambda token: token) == ""
    assert (
        why("greedy", lambda token: replace(token, logprob=token.logprob - 0.1)) == "log-probabilities are off by 0.1"
    )
    assert "38% of its tokens are the CPU's" in why("sampled", lambda token: replace(token, token=token.token ^ 1))
    assert why("sampled", lambda token: replace(token, token=token.token ^ 1), at=7) == ""
    assert why("allowed tokens", lambda token: replace(token, token=6)) == "it has tokens that are not allowed"
    assert "tokens, or NaN" in why("sampled", lambda token: replace(token, is_nan=True))


class WrongWhenLate(LateExecutor):
    """Tokens that are not known when their step begins are others."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        self._sampled = (self._sampled + 1) % VOCAB_SIZE
        return super().run(inputs)


def test_steps_ahead_and_faults_of_one_kind_are_noticed(
    tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [kind for kind in answers.KINDS if kind.name in ("greedy", "a grammar", "sampled")]
    monkeypatch.setattr(answers, "KINDS", kinds)
    monkeypatch.setattr(core, "open_executor", WrongWhenLate)
    monkeypatch.setattr(Ladder, "allow", lambda self, mask, after=(): mask.fill(1))
    found = reported(tmp_path, lambda report: answers.measure(report, "x", tiny_engine, "cpu"))
    assert {name: "error" in figure for name, figure in found.items()} == {
        "x/greedy": False,
        "x/a grammar": True,
        "x/sampled": False,
        "x/greedy, ahead": True,
        "x/sampled, ahead": True,
    }
    assert "AssertionError" in str(found["x/a grammar"]["error"])
