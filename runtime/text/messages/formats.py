"""The families of message formats, detected from the chat template."""

from enginewright.errors import UsageError
from enginewright.runtime.text.messages.answer_or_calls import AnswerOrCallsParser, AnswerParser
from enginewright.runtime.text.messages.calls import CallFormat, Schemas
from enginewright.runtime.text.messages.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from enginewright.runtime.text.messages.gemma import FUNCTION_GEMMA, GEMMA4
from enginewright.runtime.text.messages.glm import GLM, GLM47
from enginewright.runtime.text.messages.harmony import HARMONY, HarmonyParser
from enginewright.runtime.text.messages.hermes import HERMES
from enginewright.runtime.text.messages.llama3_json import LLAMA3_JSON
from enginewright.runtime.text.messages.mistral import MISTRAL, MISTRAL_NAMED
from enginewright.runtime.text.messages.parser import MessageFormat, MessageParser, ReasoningFormat
from enginewright.runtime.text.messages.pythonic import LFM2, PYTHONIC
from enginewright.runtime.text.messages.qwen3_xml import QWEN3_XML

# A format whose marks include those of another one comes before it.
CALL_FORMATS = (
    HARMONY,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    FUNCTION_GEMMA,
    GLM47,
    GLM,
    QWEN3_XML,
    HERMES,
    MISTRAL_NAMED,
    MISTRAL,
    LFM2,
    PYTHONIC,
    LLAMA3_JSON,
)
REASONING_FORMATS = (
    ReasoningFormat("<think>", "</think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<|channel>thought", "<channel|>", marks=("<|channel>",)),
)


def message_format(chat_template: str | None) -> MessageFormat:
    """Detects the format of a model's messages from the marks in its chat template."""
    template = chat_template or ""
    calls = (one for one in CALL_FORMATS if all(mark in template for mark in one.template_marks))
    reasoning = (one for one in REASONING_FORMATS if one.close in template)
    return MessageFormat(next(reasoning, None), next(calls, None))


def reasons(form: MessageFormat) -> bool:
    """True if a model may reason before it answers."""
    return form.reasoning is not None or form.calls is HARMONY


Parser = MessageParser | HarmonyParser | AnswerOrCallsParser


def new_parser(
    form: MessageFormat,
    schemas: Schemas | None,
    *,
    in_reasoning: bool = False,
    several: bool = True,
    only_first: bool = False,
) -> Parser | None:
    """Creates the parser of a message; None if all of it is text.

    Args:
        form: as of a MessageParser.
        schemas: as of a MessageParser.
        in_reasoning: as of a MessageParser.
        several: as of a MessageParser.
        only_first: whether marks count only at the start: those of reasoning, and after it those of calls.
    """
    if form.calls is HARMONY:
        return HarmonyParser(schemas, several=several)
    if only_first and schemas and form.calls is not None:
        return AnswerOrCallsParser(form, schemas, in_reasoning=in_reasoning, several=several)
    if form.reasoning is None and (form.calls is None or schemas is None):
        return None
    if only_first:
        return AnswerParser(form.reasoning, in_reasoning=in_reasoning)
    return MessageParser(form, schemas, in_reasoning=in_reasoning, several=several)


def call_format(name: str) -> CallFormat:
    """Finds a format by its name. Raises UsageError for an unknown one."""
    for one in CALL_FORMATS:
        if one.name == name:
            return one
    raise UsageError(
        f"there is no tool call parser {name!r}", f"there are {', '.join(one.name for one in CALL_FORMATS)}"
    )
