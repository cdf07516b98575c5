"""Configuration of an embedding engine; the builder writes it into a section of the engine file."""

from typing import Literal

import msgspec

from enginewright.errors import CorruptEngineError

EMBEDDING = "embedding.json"  # name of the section
RESULTS = ("embedding", "score")  # names of a plan's output other than "logits"


class EmbeddingConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Rules by which a text becomes a vector, or a pair of texts a score."""

    result: Literal["embedding", "score"] = "embedding"  # kind of result: a vector or a score
    normalize: bool = False  # True if vectors are scaled to length 1
    any_dimensions: bool = False  # True if any prefix of a vector is a vector, too (Matryoshka)
    dimensions: tuple[int, ...] = ()  # lengths of the prefixes that are vectors, where not all are
    prompts: dict[str, str] = {}  # name → text that is put in front of an input
    default_prompt: str | None = None  # name of the prompt for requests that name none
    activation: Literal["identity", "sigmoid"] = "identity"  # function that is applied to a score

    def to_json(self) -> bytes:
        """Encodes the section's JSON."""
        return msgspec.json.encode(self, order="sorted")

    @staticmethod
    def from_json(data: bytes) -> "EmbeddingConfig":
        """Decodes the section's JSON.

        Raises:
            CorruptEngineError: the JSON does not describe a usable configuration.
        """
        try:
            config = msgspec.json.decode(data, type=EmbeddingConfig)
        except msgspec.MsgspecError as error:
            raise CorruptEngineError(f"section {EMBEDDING} cannot be read", str(error), "Build it again.") from error
        if config.default_prompt is not None and config.default_prompt not in config.prompts:
            why = f"its default prompt {config.default_prompt!r} is not among its prompts"
            raise CorruptEngineError(f"section {EMBEDDING} cannot be used", why, "Build it again.")
        return config
