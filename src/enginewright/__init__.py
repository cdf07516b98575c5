"""Ahead-of-time engine builder for large language models, and the runtime that serves what it builds.

from enginewright import LLM, SamplingParams
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginewright.runtime.api.async_llm import AsyncEngineArgs, AsyncLLM
    from enginewright.runtime.api.beam_outputs import BeamSearchParams
    from enginewright.runtime.api.llm import LLM, LoRARequest
    from enginewright.runtime.core.outputs import CompletionOutput, RequestOutput
    from enginewright.runtime.core.prompts import TextPrompt, TokensPrompt
    from enginewright.runtime.sampling.parameters import RequestOutputKind, SamplingParams
    from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "LoRARequest",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use: the command and the builder do without them."""
    match name:
        case "LLM" | "LoRARequest":
            module = "api.llm"
        case "AsyncEngineArgs" | "AsyncLLM":
            module = "api.async_llm"
        case "BeamSearchParams":
            module = "api.beam_outputs"
        case "CompletionOutput" | "RequestOutput":
            module = "core.outputs"
        case "TextPrompt" | "TokensPrompt":
            module = "core.prompts"
        case "RequestOutputKind" | "SamplingParams":
            module = "sampling.parameters"
        case "StructuredOutputsParams":
            module = "sampling.structured_outputs"
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"enginewright.runtime.{module}"), name)
