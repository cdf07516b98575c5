"""Which requests may wait: decided before anything is tokenized, so that an overload costs little."""

from collections.abc import Sequence

from enginewright.runtime.core.prompts import Conversation, Prompt
from enginewright.runtime.count import format_bytes
from enginewright.runtime.sampling.sampling import SamplingParams
from enginewright.runtime.server.errors import ApiError, overloaded

CHARS_PER_TOKEN = 4  # of a text that has not been tokenized yet, roughly
LOGPROB_BYTES = 900  # of one named token, from the engine's thread to the last byte of a response


class Admission:
    """Counts completions without a first token, tokens of their prompts, and memory for log-probabilities.

    Args:
        max_answers: completions that may wait for their first token, those in the batch included.
        max_tokens: of prompts; a longer prompt may wait if no other does.
        max_logprob_bytes: of all running requests.
        max_model_len: positions of a sequence.
    """

    def __init__(self, max_answers: int, max_tokens: int, max_logprob_bytes: int, max_model_len: int) -> None:
        self._max_answers, self._max_tokens = max_answers, max_tokens
        self._max_logprob_bytes, self._max_model_len = max_logprob_bytes, max_model_len
        self.num_answers = self.num_tokens = self.logprob_bytes = 0

    def enter(self, prompts: Sequence[Prompt], params: SamplingParams) -> list["Reservation"]:
        """A reservation for each prompt.

        Raises:
            ApiError: 429, too many are waiting; 400, so many could never wait at once.
        """
        answers = len(prompts) * params.num_candidates
        if answers > self._max_answers:
            raise ApiError(
                400,
                f"{answers} answers in one request: this server takes {self._max_answers} at most",
                param="prompt" if len(prompts) > 1 else "n",
            )
        tokens = [guess(prompt) for prompt in prompts]
        self._check_queue(answers, sum(tokens))
        logprob_bytes = [self._logprob_bytes(count, params) for count in tokens]
        if sum(logprob_bytes) > self._max_logprob_bytes:
            raise ApiError(
                400,
                f"these log-probabilities may take {format_bytes(sum(logprob_bytes))}, and this server gives them "
                f"{format_bytes(self._max_logprob_bytes)}: ask for fewer tokens (max_tokens), answers (n), or of them",
                param="logprobs" if params.prompt_logprobs is None else "prompt_logprobs",
            )
        if self.logprob_bytes + sum(logprob_bytes) > self._max_logprob_bytes:
            raise overloaded(f"log-probabilities of {format_bytes(self.logprob_bytes)} are being written")
        return [Reservation(self, params.num_candidates, *sizes) for sizes in zip(tokens, logprob_bytes, strict=True)]

    def enter_texts(self, characters: int) -> "Reservation":
        """A reservation for texts that are embedded: they count as one answer, however many they are.

        Raises:
            ApiError: 429, too many are waiting.
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
        """Memory that the log-probabilities of a prompt and its answers may take; each names one token more."""
        most = self._max_model_len if params.max_tokens is None else min(params.max_tokens, self._max_model_len)
        answers = 0 if params.logprobs is None else params.num_candidates * most * (params.logprobs + 1)
        prompt = 0 if params.prompt_logprobs is None else min(prompt_tokens, self._max_model_len)
        return (answers + prompt * ((params.prompt_logprobs or 0) + 1)) * LOGPROB_BYTES


class Reservation:
    """What one prompt takes in the queue until its answers begin, and its log-probabilities until they end."""

    def __init__(self, admission: Admission, num_answers: int, num_tokens: int, logprob_bytes: int) -> None:
        self._admission = admission
        self._num_answers = self._num_tokens = 0
        self._logprob_bytes = logprob_bytes
        admission.logprob_bytes += logprob_bytes
        self._hold(num_answers, num_tokens)

    def tokenized(self, num_tokens: int) -> None:
        """The prompt is tokenized: its number of tokens is known, and takes the place of the guess."""
        self._hold(0, num_tokens - self._num_tokens)

    def begun(self) -> None:
        """One completion has its first token, so the prompt has been read."""
        self._hold(-min(self._num_answers, 1), -self._num_tokens)

    def close(self) -> None:
        self._hold(-self._num_answers, -self._num_tokens)
        self._admission.logprob_bytes -= self._logprob_bytes
        self._logprob_bytes = 0

    def _hold(self, answers: int, tokens: int) -> None:
        self._num_answers += answers
        self._num_tokens += tokens
        self._admission.num_answers += answers
        self._admission.num_tokens += tokens


def guess(prompt: Prompt) -> int:
    """A rough number of tokens of a prompt: a text, token ids, or a conversation."""
    if isinstance(prompt, str):
        return len(prompt) // CHARS_PER_TOKEN + 1
    if isinstance(prompt, Conversation):
        return sum(guess(message["content"]) for message in prompt.messages)
    return len(prompt)
