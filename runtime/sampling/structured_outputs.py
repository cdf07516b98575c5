"""Constraints on an answer: JSON, a regular expression, a choice of texts, or a context-free grammar."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from enginewright.errors import UsageError, shorten
from enginewright.runtime.checks import require, require_known

# White space between the parts of JSON: a space, or a new line with its indentation. It is bounded, since a model may
# otherwise write nothing but white space until it reaches its limit of tokens.
WHITESPACE = r" |\n[ \t]{0,16}"
MAX_CHARS = 128 << 10  # characters of a schema as JSON, an expression, a grammar, or all texts of a choice
MAX_CHOICES = 10_000
MAX_CHOICE_CHARS = 16 << 10  # characters of one text of a choice, since its automaton takes 400 bytes for each
MAX_REPEATS = 100_000  # repeats of a part of an expression or a grammar, since each may be a state of its automaton
MAX_PROPERTIES = 1000  # properties of all objects of a schema: if all are optional, compile time is quadratic


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """A constraint on an answer. Exactly one of the first five fields is given; their names are vLLM's.

    Raises:
        UsageError: none of the five is given, or several, or a value is invalid.
    """

    json: str | Mapping[str, Any] | None = None  # JSON schema, as text or decoded
    regex: str | None = None  # regular expression that the whole answer matches, in the syntax of Rust's regex crate
    choice: Sequence[str] | None = None  # texts, one of which is the answer
    grammar: str | None = None  # context-free grammar in llguidance's Lark or llama.cpp's GBNF
    json_object: bool | None = None  # true if the answer is any JSON object
    disable_any_whitespace: bool = False  # true if there is no white space between the parts of JSON
    whitespace_pattern: str | None = None  # regular expression of that white space; None: a space or a new line
    before: str | None = None  # grammar, in llguidance's Lark, of what precedes the answer, such as reasoning
    within: str | None = None  # grammar, in llguidance's Lark, of the message around the answer, which is @answer there
    key: str = field(init=False, repr=False, compare=False)  # all fields as JSON; equal keys mean equal grammars

    def __new__(cls, *args: Any, **options: Any) -> "StructuredOutputsParams":
        """Raises UsageError for unknown names, for which `__init__` would raise a TypeError."""
        require_known(options, OPTIONS, "structured output")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.json, str):
            try:
                object.__setattr__(self, "json", msgspec.json.decode(self.json, type=dict[str, Any]))
            except (msgspec.MsgspecError, RecursionError) as error:
                raise UsageError("structured_outputs.json is no JSON schema", str(error)) from error
        kinds = [name for name in KINDS if getattr(self, name) is not None]
        require(len(kinds) == 1, "structured_outputs", f"must have one of {', '.join(KINDS)}, not {len(kinds)}")
        require(self.json_object in (None, True), "structured_outputs.json_object", "must be true")
        for name in ("regex", "grammar", "whitespace_pattern", "before", "within"):
            value = getattr(self, name)
            is_text = value is None or (isinstance(value, str) and value != "")
            require(is_text, f"structured_outputs.{name}", f"must be a text, not {shorten(value)}")
        require(
            isinstance(self.json, Mapping | None),
            "structured_outputs.json",
            f"must be a JSON schema, not {shorten(self.json)}",
        )
        object.__setattr__(self, "key", self._encode())
        rule = f"must not be longer than {MAX_CHARS} characters"
        require(len(self.key) <= MAX_CHARS, f"structured_outputs.{kinds[0]}", rule)
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_repeats(f"structured_outputs.{name}", getattr(self, name) or "")
        if self.choice is not None:
            self._check_choice(self.choice)
        if self.json is not None:
            self._check_schema()
        require(isinstance(self.disable_any_whitespace, bool), "disable_any_whitespace", "must be true or false")
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            rule = "goes with json or json_object, whose white space it is about"
            require(self.is_json or not getattr(self, name), f"structured_outputs.{name}", rule)
        is_one = not self.disable_any_whitespace or self.whitespace_pattern is None
        require(is_one, "structured_outputs.whitespace_pattern", "cannot be combined with disable_any_whitespace")
        is_one = self.before is None or self.within is None
        require(is_one, "structured_outputs.within", "cannot be combined with before")

    def _check_schema(self) -> None:
        # The decoded key has plain types only, for which isinstance is ten times as fast as for Mapping.
        parts = list(_objects(msgspec.json.decode(self.key)["json"]))
        num_properties = sum(len(part["properties"]) for part in parts if isinstance(part.get("properties"), dict))
        rule = f"must not name more than {MAX_PROPERTIES} properties, not {num_properties}"
        require(num_properties <= MAX_PROPERTIES, "structured_outputs.json", rule)
        for part in parts:
            named = part.get("patternProperties")
            for pattern in (part.get("pattern"), *(named if isinstance(named, dict) else ())):
                if isinstance(pattern, str):
                    _check_repeats("structured_outputs.json", pattern)

    @staticmethod
    def _check_choice(choice: Sequence[str]) -> None:
        some = isinstance(choice, list | tuple) and len(choice) > 0 and all(isinstance(one, str) for one in choice)
        require(some, "structured_outputs.choice", "must be texts, one at least")
        rule = f"must not hold more than {MAX_CHOICES} texts"
        require(len(choice) <= MAX_CHOICES, "structured_outputs.choice", rule)
        rule = f"must not hold a text of more than {MAX_CHOICE_CHARS} characters"
        require(max(map(len, choice)) <= MAX_CHOICE_CHARS, "structured_outputs.choice", rule)

    @classmethod
    def of(cls, given: Any) -> "StructuredOutputsParams":
        """Converts a mapping of the fields; returns an object of this class as it is.

        Raises:
            UsageError: it is neither, or the fields are invalid.
        """
        if isinstance(given, StructuredOutputsParams):
            return given
        require(isinstance(given, Mapping), "structured_outputs", f"must be a mapping, not {shorten(given)}")
        return cls(**given)

    @property
    def is_json(self) -> bool:
        """True if the answer itself is JSON."""
        return self.json is not None or self.json_object is not None

    @property
    def has_json(self) -> bool:
        """True if any part of the message is JSON, which a grammar marks with %json."""
        return self.is_json or any("%json" in text for text in (self.grammar, self.within) if text)

    @property
    def is_whole(self) -> bool:
        """True if it constrains the whole message, and not only the answer in it."""
        return self.before is not None or self.within is not None

    @property
    def json_options(self) -> dict[str, Any]:
        """llguidance's options for white space in JSON (described in its docs/json_schema.md)."""
        separators = {"item_separator": ",", "key_separator": ":"}
        if self.disable_any_whitespace:
            return {"whitespace_flexible": False, **separators}
        pattern = WHITESPACE if self.whitespace_pattern is None else self.whitespace_pattern
        return {"whitespace_flexible": True, "whitespace_pattern": pattern, **separators}

    def _encode(self) -> str:
        try:
            return msgspec.json.encode({name: getattr(self, name) for name in OPTIONS}).decode()
        except (TypeError, ValueError, RecursionError) as error:  # ValueError also for half of a surrogate pair
            raise UsageError("structured_outputs holds what is no JSON", str(error)) from error


OPTIONS = tuple(one.name for one in fields(StructuredOutputsParams) if one.init)
KINDS = OPTIONS[:5]


# {n}, {n,} or {n,m}, unless a backslash escapes the brace.
_REPEATS = re.compile(r"(?<!\\)\{\s*([0-9]+)\s*(?:,\s*([0-9]*)\s*)?\}")


def _check_repeats(name: str, text: str) -> None:
    """Raises UsageError if an expression or a grammar repeats something too often."""
    for digits in filter(None, (group for match in _REPEATS.finditer(text) for group in match.groups())):
        is_small = len(digits) < 20 and int(digits) <= MAX_REPEATS
        require(is_small, name, f"must not repeat anything more than {MAX_REPEATS} times")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yields each object in a decoded JSON value, at any depth."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            yield one
            one = one.values()
        rest += [inner for inner in one if isinstance(inner, dict | list)]
