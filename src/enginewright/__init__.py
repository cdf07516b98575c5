"""Ahead-of-time engine builder for large language models, and the runtime that serves what it builds.

from enginewright import LLM, SamplingParams
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginewright.runtime.async_llm import AsyncLLM
    from enginewright.runtime.llm import LLM
    from enginewright.runtime.sampling import SamplingParams

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imported when asked for: the command and the builder do without."""
    match name:
        case "LLM":
            from enginewright.runtime.llm import LLM

            return LLM
        case "AsyncLLM":
            from enginewright.runtime.async_llm import AsyncLLM

            return AsyncLLM
        case "SamplingParams":
            from enginewright.runtime.sampling import SamplingParams

            return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
