"""Texts of a message with the tokens that they are written with, wherever tokens end."""

import pytest

from enginewright.runtime.core.outputs import Delta, merge
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.server.form import Choice, PromptPart
from enginewright.runtime.server.token_aligner import TokenAligner
from enginewright.runtime.text.messages.formats import new_parser
from enginewright.runtime.text.messages.harmony import HARMONY
from enginewright.runtime.text.messages.hermes import HERMES
from enginewright.runtime.text.messages.llama3_json import LLAMA3_JSON
from enginewright.runtime.text.messages.parser import MessageFormat, Piece, ReasoningFormat, TextPiece

THINK = ReasoningFormat("<think>", "</think>")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HARMONY_CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


def aligned(form: MessageFormat, texts: list[str], size: int = 1) -> list[Piece]:
    """The pieces of a message whose tokens are these texts, each token the number of its text.

    Args:
        size: tokens that come at once.
    """
    choice = Choice(0, PromptPart("", (), ()), parser=new_parser(form, {"add": {}}))
    deltas = [Delta(0, text, (SampledToken(number),)) for number, text in enumerate(texts)]
    deltas[-1] = Delta(0, texts[-1], deltas[-1].tokens, "stop")
    aligner, pieces = TokenAligner(), list[Piece]()
    for start in range(0, len(deltas), size):
        pieces += choice.push(merge(deltas[start : start + size])[0], aligner)
    return pieces


def numbers(pieces: list[Piece]) -> list[int]:
    return [token.token for piece in pieces if isinstance(piece, TextPiece) for token in piece.tokens]


@pytest.mark.parametrize(
    ("form", "message", "shown"),
    [
        (MessageFormat(), "Yes, a < b.\n", "Yes, a < b.\n"),
        (MessageFormat(THINK, HERMES), f"<think>\nto\n</think>\n\nto <\n{CALL}\n{CALL}\nt", "to <t"),
        (MessageFormat(THINK, HERMES), f"a<<t<{CALL}", "a<<t<"),
        (MessageFormat(THINK, HERMES), "a <tool_call>no\n</tool_call> a", "a <tool_call>no\n</tool_call> a"),
        (MessageFormat(THINK, HERMES), "a <tool_call>b <tool_call>c", "a <tool_call>b <tool_call>c"),
        (MessageFormat(None, LLAMA3_JSON), '{"name": "x"} {', '{"name": "x"} {'),
        (
            MessageFormat(None, HARMONY),
            f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY_CALL}{{}}<|call|><|start|>assistant"
            "<|channel|>final<|message|>a<|b<|return|>",
            "a<|b",
        ),
        (MessageFormat(None, HARMONY), f"{HARMONY_CALL}no", f"{HARMONY_CALL}no"),
    ],
)
def test_a_text_has_the_tokens_of_its_characters(form: MessageFormat, message: str, shown: str) -> None:
    for length in (1, 2, 3, 5, 7, len(message)):
        texts = [message[start : start + length] for start in range(0, len(message), length)]
        pieces = aligned(form, texts)
        for piece in pieces:
            if isinstance(piece, TextPiece) and length == 1:
                assert "".join(texts[token.token] for token in piece.tokens) == piece.text
        found = numbers(pieces)
        assert found == sorted(set(found)), "each is of one text"
        num_chars, num_texts = (
            sum(len(texts[number]) for number in found),
            sum(isinstance(one, TextPiece) for one in pieces),
        )
        assert len(shown) <= num_chars < len(shown) + 2 * length * num_texts, "no more than both ends of a text"
        assert all(numbers(aligned(form, texts, size)) == found for size in (2, 3, len(texts)))
        assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == shown


def test_tokens_without_characters_of_their_own() -> None:
    """Parts of a character come with it, and what ends an answer is of no text."""
    for form in (MessageFormat(), MessageFormat(THINK, HERMES)):
        assert numbers(aligned(form, ["a", "", "", "é", "b", ""])) == [0, 1, 2, 3, 4]
    assert numbers(aligned(MessageFormat(THINK, HERMES), ["", "<think>", "", "é", "</think>", "", "é"])) == [5, 6]
