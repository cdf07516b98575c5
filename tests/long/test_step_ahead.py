"""Steps that begin before the tokens of the one before are known, of a model without a sliding window."""

from collections.abc import Iterator

import pytest

from enginewright.runtime.engine import Engine
from tests.core import test_step_ahead as short


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with short.engine_of("llama", tmp_path_factory.mktemp("ahead")) as opened:
        yield opened


test_answers_are_those_of_one_step_at_a_time = short.test_answers_are_those_of_one_step_at_a_time
test_a_last_token_is_not_waited_for_in_vain = short.test_a_last_token_is_not_waited_for_in_vain
