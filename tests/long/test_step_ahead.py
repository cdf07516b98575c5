"""Steps that begin before the tokens of the one before are known, of a model without a sliding window."""

from collections.abc import Iterator

import pytest

from enginewright.runtime.engine import Engine
from tests.core import test_step_ahead as short
from tests.helpers.engines import built_tiny


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(built_tiny("llama", tie_word_embeddings=False)) as opened:
        yield opened


test_answers_are_those_of_one_step_at_a_time = short.test_answers_are_those_of_one_step_at_a_time
test_a_last_token_is_not_waited_for_in_vain = short.test_a_last_token_is_not_waited_for_in_vain
