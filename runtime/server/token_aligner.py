"""Which tokens the texts of a message are written with: they come later than their tokens, and without marks."""

from collections.abc import Sequence

from enginewright.runtime.sampling.sampling import SampledToken
from enginewright.runtime.text.messages.parser import Piece, Text


class TokenAligner:
    """Gives the texts that a parser finds in a message their tokens. Tokens of marks, reasoning and calls are of none.

    A token belongs to the first text that has one of its characters, and one without characters of its own, such as a
    part of a character, to the text that goes on where it stands.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []  # the end of the message, of which the parser may still make text
        self._num_pending = 0  # characters of it
        self._tokens: list[tuple[int, int, SampledToken]] = []  # those of no text yet; where each begins and ends in it

    def align(self, tokens: Sequence[SampledToken], text: str, pieces: Sequence[Piece], num_held: int) -> list[Piece]:
        """The pieces that a parser has made of a message's next tokens, with the tokens of their texts.

        Args:
            text: of the tokens.
            num_held: characters at the end of the message that the parser still holds back.
        """
        start, self._num_pending = self._num_pending, self._num_pending + len(text)
        self._texts.append(text)
        self._tokens += [(start, self._num_pending, token) for token in tokens]
        past, place = self._num_pending - num_held, 0
        if not past:
            return list(pieces)
        pending = "".join(self._texts)
        aligned: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Text):
                place = _find(pending, piece.text, place, past)
                piece = Text(piece.text, self._take(place, place + len(piece.text)))
                place += len(piece.text)
            aligned.append(piece)
        self._texts, self._num_pending = [pending[past:]], num_held
        left = [one for one in self._tokens if one[1] > past or one[0] >= past]
        self._tokens = [(max(begin - past, 0), end - past, token) for begin, end, token in left]
        return aligned

    def _take(self, begin: int, end: int) -> tuple[SampledToken, ...]:
        taken, left = list[SampledToken](), list[tuple[int, int, SampledToken]]()
        for one in self._tokens:
            if one[0] < end and (one[1] > begin or one[0] >= begin):
                taken.append(one[2])
            else:
                left.append(one)
        self._tokens = left
        return tuple(taken)


def _find(pending: str, text: str, place: int, past: int) -> int:
    """Where a text stands: as a rule it is the last thing before what is held back, else a mark follows it."""
    return past - len(text) if pending.endswith(text, place, past) else pending.find(text, place, past)
