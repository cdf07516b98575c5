"""Who may wait: decided before anything is tokenized, so that a crowd is turned away at little cost."""

from collections.abc import Mapping, Sequence

from enginewright.runtime.prompts import Prompt
from enginewright.runtime.server.errors import ApiError, overloaded

CHARS_PER_TOKEN = 4  # of a text that has not been tokenized yet; a rough guess does for a crowd


class Admission:
    """Answers without a first token, and tokens of their prompts.

    Args:
        max_answers: running ones included, as long as they have no token.
        max_tokens: of prompts; one that alone is longer may wait if nobody else does.
    """

    def __init__(self, max_answers: int, max_tokens: int) -> None:
        self._max_answers, self._max_tokens = max_answers, max_tokens
        self.num_answers = self.num_tokens = 0

    def enter(self, prompts: Sequence[Prompt], num_choices: int) -> list["Place"]:
        """A place for each prompt.

        Raises:
            ApiError: 429, too many are waiting; 400, so many could never wait at once.
        """
        answers = len(prompts) * num_choices
        if answers > self._max_answers:
            raise ApiError(
                400,
                f"{answers} answers in one request: this server takes {self._max_answers} at most",
                param="prompt" if len(prompts) > 1 else "n",
            )
        if self.num_answers + answers > self._max_answers:
            raise overloaded(f"{self.num_answers} answers wait for their first token")
        tokens = [guess(prompt) for prompt in prompts]
        if self.num_tokens and self.num_tokens + sum(tokens) > self._max_tokens:
            raise overloaded(f"prompts of {self.num_tokens} tokens wait")
        return [Place(self, num_choices, count) for count in tokens]


class Place:
    """What one prompt takes in the queue until its answers begin."""

    def __init__(self, admission: Admission, num_answers: int, num_tokens: int) -> None:
        self._admission = admission
        self._num_answers = self._num_tokens = 0
        self._hold(num_answers, num_tokens)

    def tokenized(self, num_tokens: int) -> None:
        """The guess is a number now."""
        self._hold(0, num_tokens - self._num_tokens)

    def begun(self) -> None:
        """One answer has its first token, so the prompt has been read."""
        self._hold(-min(self._num_answers, 1), -self._num_tokens)

    def close(self) -> None:
        self._hold(-self._num_answers, -self._num_tokens)

    def _hold(self, answers: int, tokens: int) -> None:
        self._num_answers += answers
        self._num_tokens += tokens
        self._admission.num_answers += answers
        self._admission.num_tokens += tokens


def guess(prompt: Prompt) -> int:
    """Tokens of a prompt: a text, token ids, or messages."""
    if isinstance(prompt, str):
        return len(prompt) // CHARS_PER_TOKEN + 1
    return sum(guess(one["content"]) if isinstance(one, Mapping) else 1 for one in prompt)
