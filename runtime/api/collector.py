"""Collects the deltas of a request into its output."""

from collections.abc import Sequence
from dataclasses import replace

from enginewright.runtime.core.outputs import CompletionOutput, Delta, Logprob, RequestOutput
from enginewright.runtime.core.request import Request
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.text.tokenizer import Tokenizer


class Collector:
    """Collects the deltas of one request.

    Args:
        request_id: the id of the output.
        prompt: the text of the prompt, if it was given as text.
        prompt_ids: the token ids of the prompt.
        request: the engine's request.
        tokenizer: the engine's tokenizer.
    """

    def __init__(
        self, request_id: str, prompt: str | None, prompt_ids: list[int], request: Request, tokenizer: Tokenizer
    ) -> None:
        self.request = request
        self._request_id, self._prompt, self._prompt_ids, self._tokenizer = request_id, prompt, prompt_ids, tokenizer
        self._pieces: list[list[str]] = [[] for _ in range(request.params.n)]
        self._logprobs = request.params.logprobs is not None
        self._outputs = [
            CompletionOutput(index, logprobs=[] if self._logprobs else None, cumulative_logprob=self._initial_logprob)
            for index in range(request.params.n)
        ]

    @property
    def _initial_logprob(self) -> float | None:
        return 0.0 if self._logprobs else None

    @property
    def finished(self) -> bool:
        """True once all choices have ended."""
        return all(output.finished() for output in self._outputs)

    def add(self, delta: Delta) -> None:
        """Adds a delta to its choice."""
        output = self._outputs[delta.index]
        self._pieces[delta.index].append(delta.text)
        for token in delta.tokens:
            output.token_ids.append(token.token)
            if output.logprobs is not None and output.cumulative_logprob is not None:
                output.logprobs.append(self._named(token))
                output.cumulative_logprob += token.logprob or 0.0
        output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason

    def output(self) -> RequestOutput:
        """The complete output so far."""
        outputs = []
        for output, pieces in zip(self._outputs, self._pieces, strict=True):
            pieces[:] = ["".join(pieces)]
            logprobs = None if output.logprobs is None else list(output.logprobs)
            outputs.append(replace(output, text=pieces[0], token_ids=list(output.token_ids), logprobs=logprobs))
        return self._request_output(outputs)

    def latest(self, deltas: Sequence[Delta]) -> RequestOutput:
        """The part of the output that the last added deltas brought, one per choice."""
        outputs = []
        for delta in deltas:
            output = self._outputs[delta.index]
            start = len(output.token_ids) - len(delta.tokens)
            logprobs = None if output.logprobs is None else output.logprobs[start:]
            outputs.append(replace(output, text=delta.text, token_ids=output.token_ids[start:], logprobs=logprobs))
        return self._request_output(outputs)

    def _request_output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        request, prompt_logprobs = self.request, None
        if request.params.prompt_logprobs is not None:
            prompt_logprobs = [None if token is None else self._named(token) for token in request.prompt_logprobs]
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=request.num_cached_tokens,
            metrics=request.metrics,
            num_draft_tokens=request.num_draft_tokens,
            num_accepted_tokens=request.num_accepted_tokens,
            prompt_logprobs=prompt_logprobs,
        )

    def _named(self, sampled: SampledToken) -> dict[int, Logprob]:
        ranks = {token: rank for rank, (token, _) in enumerate(sampled.top_logprobs, start=1)}
        values = dict(sampled.top_logprobs)
        values.setdefault(sampled.token, sampled.logprob or 0.0)
        return {
            token: Logprob(value, ranks.get(token), self._tokenizer.decode([token], skip_special_tokens=False))
            for token, value in values.items()
        }
