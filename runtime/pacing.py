"""How many prompt tokens a step may read beside decodes, so that those who are being written to keep their pace.

Chunked prefill (Sarathi-Serve, Agrawal et al. 2024), with a chunk that is measured instead of set: results do not
depend on where a prompt is cut, so the cut may follow the clock.
"""

FIRST_CHUNK = 32  # tokens, before anything was measured
LEAST_CHUNK = 16
WEIGHT = 0.25  # of the newest measurement


class Pacer:
    """Learns what a decode step and a prompt token take.

    Args:
        slowdown: a step that also reads prompts may take this many times as long as one that only decodes.
    """

    def __init__(self, slowdown: float | None) -> None:
        self._slowdown = slowdown
        self._decode_s: float | None = None
        self._token_s: float | None = None

    @property
    def max_prompt_tokens(self) -> int | None:
        """Beside decodes; None is no limit."""
        if self._slowdown is None:
            return None
        if self._decode_s is None or self._token_s is None:
            return FIRST_CHUNK
        return max(LEAST_CHUNK, int((self._slowdown - 1) * self._decode_s / self._token_s))

    def note(self, seconds: float, num_decodes: int, num_prompt_tokens: int) -> None:
        """A step took this long."""
        if self._slowdown is None or num_decodes == 0:
            return
        if num_prompt_tokens == 0:
            self._decode_s = _moved(self._decode_s, seconds)
        elif self._decode_s is not None:
            extra = max(seconds - self._decode_s, 1e-9) / num_prompt_tokens
            self._token_s = _moved(self._token_s, extra)


def _moved(mean: float | None, value: float) -> float:
    return value if mean is None else mean + WEIGHT * (value - mean)
