"""Models with recurrent states, on long texts: what a state has lost after thousands of tokens would show."""

import numpy as np
import pytest
import torch

from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from tests import tolerances
from tests.checkpoint import test_hybrids as short
from tests.checkpoint.test_hybrids import GREEDY, config_of, engine_of, generated, texts
from tests.checkpoint.test_models import case_id
from tests.helpers.breadth import others, repeated
from tests.helpers.graphs import relative_error
from tests.helpers.llm import tokens_of
from tests.helpers.tiny import HYBRIDS, OF_EACH_STATE, tiny_model

PROMPT, STEPS = 3000, 200
LONGEST = PROMPT + STEPS + 1
OTHERS = others(HYBRIDS, OF_EACH_STATE)

test_logits_are_those_of_transformers = repeated(
    short.test_logits_are_those_of_transformers,
    ("family", "overrides"),
    others(short.CASES, short.SOME_CASES),
    ids=case_id,
)
test_bits_are_the_same_alone_and_with_others_however_prompts_are_cut = repeated(
    short.test_bits_are_the_same_alone_and_with_others_however_prompts_are_cut, "family", OTHERS
)
test_engines_are_near_transformers = repeated(
    short.test_engines_are_near_transformers, ("family", "quant"), others(short.BY_QUANT, short.SOME_BY_QUANT)
)
test_generated_tokens_are_those_of_transformers = repeated(
    short.test_generated_tokens_are_those_of_transformers, "family", OTHERS
)
test_preemption_changes_no_token = repeated(short.test_preemption_changes_no_token, "family", OTHERS)
test_what_transformers_saves_can_be_built = repeated(
    short.test_what_transformers_saves_can_be_built, "family", others(short.SAVED, short.SOME_SAVED)
)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("length", [*range(1, 70, 3), 127, 129, 500, 1023, PROMPT])
def test_prompts_of_any_length_are_near_transformers(family: str, length: int) -> None:
    """Prompts are computed in chunks of 37 tokens, which no convolution, tile or block divides."""
    (text,) = texts([length], seed=length)
    expected = _reference(family, text)
    with Engine.open(engine_of(family, longest=LONGEST)) as engine:
        limits = RuntimeConfig(threads=2, max_num_batched_tokens=37, max_logit_rows=37, max_num_seqs=1)
        (actual,) = score(CpuExecutor(engine, limits), [text])
    assert relative_error(actual, expected) < tolerances.HYBRID_ENGINE_LOGITS["bf16"]


@pytest.mark.parametrize("family", HYBRIDS)
def test_decoding_goes_on_as_transformers_would(family: str) -> None:
    prompts = texts([PROMPT, 611, 5])
    params = GREEDY.clone()
    params.max_tokens = STEPS
    outputs = generated(family, prompts, params, longest=LONGEST, max_model_len=LONGEST)
    for prompt, answer in zip(prompts, tokens_of(outputs), strict=True):
        assert len(answer) == STEPS
        logits = _reference(family, prompt + answer)
        for position, token in enumerate(answer, len(prompt) - 1):
            best, second = np.sort(logits[position])[::-1][:2]
            if best - second > tolerances.HYBRID_CLEAR_MARGIN:
                assert token == logits[position].argmax(), position


def _reference(family: str, text: list[int]) -> np.ndarray:
    with torch.no_grad():
        return tiny_model(config_of(family, LONGEST))(torch.tensor([text]), use_cache=False).logits[0].numpy()  # type: ignore[no-any-return]
