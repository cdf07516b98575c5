"""Finds the tokens of a message's texts, which a parser gives out later than the tokens, and without marks."""

from collections.abc import Sequence

from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.text.messages.parser import Piece, TextPiece


class TokenAligner:
    """Assigns tokens to the texts that a parser finds in a message; those of marks, reasoning and calls get none.

    A token belongs to the first text that contains one of its characters. A token without characters of its own, such
    as a part of a character, belongs to the text at its position.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []  # end of the message, which the parser may still give out as text
        self._num_pending = 0  # number of characters in it
        self._tokens: list[tuple[int, int, SampledToken]] = []  # unassigned tokens, each with its start and end in it

    def align(self, tokens: Sequence[SampledToken], text: str, pieces: Sequence[Piece], num_held: int) -> list[Piece]:
        """Assigns the next tokens of a message to texts.

        Args:
            tokens: the tokens.
            text: their text.
            pieces: the pieces that the parser found with them.
            num_held: the number of characters at the end of the message that the parser still holds back.

        Returns:
            The pieces, with the tokens of their texts.
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
            if isinstance(piece, TextPiece):
                place = _find(pending, piece.text, place, past)
                piece = TextPiece(piece.text, self._take(place, place + len(piece.text)))
                place += len(piece.text)
            aligned.append(piece)
        self._texts, self._num_pending = [pending[past:]], num_held
        left = [one for one in self._tokens if one[1] > past or one[0] >= past]
        self._tokens = [(max(begin - past, 0), end - past, token) for begin, end, token in left]
        return aligned

    def _take(self, begin: int, end: int) -> tuple[SampledToken, ...]:
        matching, left = list[SampledToken](), list[tuple[int, int, SampledToken]]()
        for one in self._tokens:
            if one[0] < end and (one[1] > begin or one[0] >= begin):
                matching.append(one[2])
            else:
                left.append(one)
        self._tokens = left
        return tuple(matching)


def _find(pending: str, text: str, place: int, past: int) -> int:
    """Position of a text; usually it is the last one before the text that is held back, otherwise a mark follows it."""
    return past - len(text) if pending.endswith(text, place, past) else pending.find(text, place, past)
