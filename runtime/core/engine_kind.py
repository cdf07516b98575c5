"""Refuses requests that an engine cannot serve, by what it does: generate text, embed texts, or compare texts."""

from enginewright.errors import UsageError
from enginewright.runtime.engine import Engine


def refuse_vectors(engine: Engine) -> None:
    """Raises UsageError if an engine computes no embedding vectors."""
    if not engine.embeds:
        does = "writes text" if engine.plan.generates else "gives scores to pairs of texts"
        fix = "" if engine.plan.generates else "Use score or rerank."
        raise UsageError(f"{engine.manifest.name} is no embedding model", f"it {does}", fix)


def refuse_answers(engine: Engine) -> None:
    """Raises UsageError if an engine generates no text."""
    if not engine.plan.generates:
        gives = "a vector for a text" if engine.embeds else "scores to pairs of texts"
        fix = f"Use {'embed, score or rerank' if engine.embeds else 'score or rerank'}."
        raise UsageError(f"{engine.manifest.name} writes no text", f"it is a model that gives {gives}", fix)


def refuse_scores(engine: Engine) -> None:
    """Raises UsageError if an engine cannot compare texts."""
    if engine.plan.generates:
        raise UsageError(f"{engine.manifest.name} is no model that compares texts", "it writes text")
