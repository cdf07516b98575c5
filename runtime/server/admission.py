"""Decides which requests may wait, before anything is tokenized, so that an overload costs little."""

from collections.abc import Sequence

from enginewright.runtime.core.prompts import Conversation, Prompt
from enginewright.runtime.count import format_bytes
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.server.errors import ApiError, overloaded

CHARS_PER_TOKEN = 4  # rough estimate for a text that is not tokenized yet
LOGPROB_BYTES = 900  # memory of one named token, from the engine's thread to the last byte of the response


class Admission:
    """Counts completions without a first token, tokens of their prompts, and memory for log-probabilities.

    Args:
        max_answers: maximum number of completions that wait for their first token, those in the batch included.
        max_tokens: maximum number of tokens of waiting prompts; a longer prompt may wait if no other does.
        max_logprob_bytes: maximum memory for the log-probabilities of all running requests, in bytes.
        max_model_len: maximum number of tokens of a sequence.
    """

    def __init__(self, max_answers: int, max_tokens: int, max_logprob_bytes: int, max_model_len: int) -> None:
        self._max_answers, self._max_tokens = max_answers, max_tokens
        self._max_logprob_bytes, self._max_model_len = max_logprob_bytes, max_model_len
        self.num_answers = self.num_tokens = self.logprob_bytes = 0

    def enter(self, prompts: Sequence[Prompt], params: SamplingParams) -> list["Reservation"]:
        """Reserves a place in the queue for each prompt of a request.

        Args:
            prompts: the prompts.
            params: the sampling parameters of their answers.

        Returns:
            One reservation per prompt.

        Raises:
            ApiError: 429, too many requests are waiting; 400, the request could never be admitted.
        """
        answers = len(prompts) * params.num_candidates
        if answers > self._max_answers:
            raise ApiError(
                400,
                f"{answers} answers in one request: this server takes {self._max_answers} at most",
                param="prompt" if len(prompts) > 1 else "n",
            )
        tokens = [estimate_tokens(prompt) for prompt in prompts]
        self._check_queue(answers, sum(tokens))
        logprob_bytes = [self._logprob_bytes(count, params) for count in tokens]
        if sum(logprob_bytes) > self._max_logprob_bytes:
            raise ApiError(
                400,
                f"these log-probabilities may take {format_bytes(sum(logprob_bytes))}, and this server allows "
                f"{format_bytes(self._max_logprob_bytes)}: ask for fewer tokens, answers or log-probabilities",
                param="logprobs" if params.prompt_logprobs is None else "prompt_logprobs",
            )
        if self.logprob_bytes + sum(logprob_bytes) > self._max_logprob_bytes:
            raise overloaded(f"log-probabilities of {format_bytes(self.logprob_bytes)} are being written")
        return [Reservation(self, params.num_candidates, *sizes) for sizes in zip(tokens, logprob_bytes, strict=True)]

    def enter_texts(self, characters: int) -> "Reservation":
        """Reserves a place for texts that are embedded; together they count as one answer.

        Args:
            characters: the number of characters of all texts.

        Raises:
            ApiError: 429, too many requests are waiting.
        """
        tokens = characters // CHARS_PER_TOKEN + 1
        self._check_queue(1, tokens)
        return Reservation(self, 1, tokens, 0)

    def _check_queue(self, answers: int, tokens: int) -> None:
        if self.num_answers + answers > self._max_answers:
            raise overloaded(f"{self.num_answers} answers wait for their first token")
        if self.num_tokens and self.num_tokens + tokens > self._max_tokens:
            raise overloaded(f"prompts of {self.num_tokens} tokens wait")

    def _logprob_bytes(self, prompt_tokens: int, params: SamplingParams) -> int:
        """Maximum memory for the log-probabilities of a prompt and its answers, each with one token more."""
        max_tokens = self._max_model_len if params.max_tokens is None else min(params.max_tokens, self._max_model_len)
        answers = 0 if params.logprobs is None else params.num_candidates * max_tokens * (params.logprobs + 1)
        prompt = 0 if params.prompt_logprobs is None else min(prompt_tokens, self._max_model_len)
        return (answers + prompt * ((params.prompt_logprobs or 0) + 1)) * LOGPROB_BYTES


class Reservation:
    """Place of one prompt in the queue until its answers start, and memory of its log-probabilities until they end."""

    def __init__(self, admission: Admission, num_answers: int, num_tokens: int, logprob_bytes: int) -> None:
        self._admission = admission
        self._num_answers = self._num_tokens = 0
        self._logprob_bytes = logprob_bytes
        admission.logprob_bytes += logprob_bytes
        self._hold(num_answers, num_tokens)

    def tokenized(self, num_tokens: int) -> None:
        """Replaces the estimate of the prompt's tokens by their number, once the prompt is tokenized."""
        self._hold(0, num_tokens - self._num_tokens)

    def begun(self) -> None:
        """Records that one completion has its first token, so that the prompt has been read."""
        self._hold(-min(self._num_answers, 1), -self._num_tokens)

    def close(self) -> None:
        """Gives back all that is still reserved."""
        self._hold(-self._num_answers, -self._num_tokens)
        self._admission.logprob_bytes -= self._logprob_bytes
        self._logprob_bytes = 0

    def _hold(self, answers: int, tokens: int) -> None:
        self._num_answers += answers
        self._num_tokens += tokens
        self._admission.num_answers += answers
        self._admission.num_tokens += tokens


def estimate_tokens(prompt: Prompt) -> int:
    """Rough number of tokens of a prompt, which is a text, token ids or a conversation."""
    if isinstance(prompt, str):
        return len(prompt) // CHARS_PER_TOKEN + 1
    if isinstance(prompt, Conversation):
        return sum(estimate_tokens(message["content"]) for message in prompt.messages)
    return len(prompt)
