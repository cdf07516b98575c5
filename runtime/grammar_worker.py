"""The process that compiles grammars before the engine's own does: what others have written may take any time, or any
depth of its stack.

A frame is the fields of a StructuredOutputsParams; the reply is {"source": llguidance's own form} or {"failed": why}.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from enginewright.runtime.structured_outputs import StructuredOutputsParams
from enginewright.runtime.worker_protocol import serve

# Of llguidance, below its own. What is beyond: grammars that are ambiguous without end, and expressions whose
# automata explode. A mask takes 50 us as a rule; at these, 0.1 s.
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "max_grammar_size": 100_000,
    "max_items_in_row": 500,
    "max_lexer_states": 20_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "verbose_errors": False,
}


def limits() -> LLParserLimits:
    return LLParserLimits(**LIMITS)


def reason(text: str) -> str:
    """An error of llguidance's without the source that it shows below."""
    return " ".join(re.split(r"^ *\d+ \|", text, maxsplit=1, flags=re.MULTILINE)[0].split())


def answer(frame: dict[str, Any]) -> dict[str, str]:
    try:
        wanted = StructuredOutputsParams(**frame)
        source = _message(wanted, _source(wanted)) if wanted.is_whole else _source(wanted)
    except MemoryError:
        raise
    except Exception as error:  # what reads GBNF raises no narrower class
        return {"failed": reason(str(error))}
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(source, None, limits=limits())
    return {"failed": reason(messages[0])} if is_wrong else {"source": source}


def _source(wanted: StructuredOutputsParams) -> str:
    if wanted.regex is not None:  # \d, \w and \s are those of ASCII
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(wanted.regex, 'dws')}/")
    if wanted.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in wanted.choice))
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(any_to_lark(wanted.grammar))
    schema = dict(wanted.json) if isinstance(wanted.json, Mapping) else {"type": "object"}
    options: Any = wanted.json_options  # llguidance names no type that a mapping of options could have
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def _message(wanted: StructuredOutputsParams, source: str) -> str:
    """The grammar of a message, of an answer's own grammar and what the message has around it."""
    answer, *others = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    before = [] if wanted.before is None else [{"name": "before", "lark_grammar": wanted.before}]
    message = {"lark_grammar": "start: @before @answer" if wanted.within is None else wanted.within}
    return json.dumps({"grammars": [message, *before, answer | {"name": "answer"}, *others]})


if __name__ == "__main__":
    serve(answer)
