"""Completions generated token by token within a grammar, by a model that prefers some characters to the end."""

from collections.abc import Callable
from typing import Any

from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from enginewright.runtime.grammar.grammar_protocol import LIMITS, LOOK, OPEN, TAKE
from enginewright.runtime.grammar.grammar_worker import GrammarWalks, answer
from enginewright.runtime.grammar.number_digits import NumberDigits
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams

LONG_TOKENS = ["00", "333", "3333333", "0" * 30, ".3", "33}", "3,"]


def _vocabulary() -> LLTokenizer:
    """The bytes, and tokens of several digits."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {name: token for token, name in enumerate([*alphabet, *LONG_TOKENS, "<end>"])}
    tokenizer = Tokenizer(models.BPE(names, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return LLTokenizer(tokenizer.to_str(), len(names), [names["<end>"]])


TRIE = _vocabulary()
END = TRIE.eos_token
BYTE = {TRIE.decode_bytes([token]): token for token in range(256)}
DIGITS = NumberDigits(TRIE)


class Writer:
    """A completion so far, and the tokens that may come next."""

    def __init__(self, **wanted: Any) -> None:
        params = StructuredOutputsParams(**wanted)
        made = answer(wanted)
        assert "source" in made, made
        self._grammar = GrammarWalks(made["source"], TRIE, LIMITS, DIGITS if params.has_json else None)
        self.tokens: list[int] = []
        self.allowed = self._allowed(self._mask(OPEN, []))

    def _mask(self, kind: int, tokens: list[int]) -> int | memoryview:
        reply = self._grammar.answer(kind, 0, tokens)
        assert reply is not None and not reply.failed
        return reply.masks[0]

    @staticmethod
    def _allowed(mask: int | memoryview) -> set[int]:
        if isinstance(mask, int):
            return {mask}
        bits = int.from_bytes(mask, "little")
        return {token for token in range(TRIE.vocab_size) if bits >> token & 1}

    def take(self, token: int) -> None:
        """Appends a token, and checks that the mask after it as a draft token is the one after it as a token."""
        assert token in self.allowed
        ahead, mask = self._mask(LOOK, [token]), self._mask(TAKE, [token])
        assert isinstance(mask, int) or token == END or ahead == mask
        self.tokens.append(token)
        self.allowed = self._allowed(mask)

    @property
    def text(self) -> str:
        return TRIE.decode_bytes([token for token in self.tokens if token != END]).decode()

    def writes(self, text: str) -> bool:
        """True if a completion may be exactly this."""
        for byte in text.encode():
            if BYTE[bytes([byte])] not in self.allowed:
                return False
            self.take(BYTE[bytes([byte])])
        return END in self.allowed

    def write_all(self, choose: Callable[[list[int]], int], max_tokens: int = 400) -> bool:
        """Generates until the end; False if it has not come."""
        while self.tokens[-1:] != [END] and len(self.tokens) < max_tokens:
            self.take(choose(sorted(self.allowed)))
        return self.tokens[-1:] == [END]


def liking(wanted: str) -> Callable[[list[int]], int]:
    """A choice that prefers these characters, and tokens of them, and otherwise closes what is open."""

    def choose(allowed: list[int]) -> int:
        texts = {token: TRIE.decode_bytes([token]).decode("latin-1") for token in allowed if token != END}
        liked = [token for token, text in texts.items() if text and set(text) <= set(wanted)]
        if liked:
            return max(liked, key=lambda token: (len(texts[token]), wanted.find(texts[token][0])))
        for text in ("\n", "}", "]", '"', ",", "e", "-", *map(chr, range(97, 123)), *"<>/=_{:."):
            if text in texts.values():
                return BYTE[text.encode()]
        return allowed[-1]

    return choose
