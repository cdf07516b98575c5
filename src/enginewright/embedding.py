"""What an embedding engine makes of a text: the builder writes it into a section of the engine file."""

from typing import Literal

import msgspec

from enginewright.errors import CorruptEngineError

EMBEDDING = "embedding.json"  # the section
RESULTS = ("embedding", "score")  # names of a plan's output beside "logits"


class EmbeddingConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a text becomes a vector, or a pair of texts a score."""

    result: Literal["embedding", "score"] = "embedding"
    normalize: bool = False  # vectors have length 1
    any_dimensions: bool = False  # the first numbers of a vector, however many, are a vector, too
    dimensions: tuple[int, ...] = ()  # or so many of them
    prompts: dict[str, str] = {}  # what a text may begin with, by name
    default_prompt: str | None = None  # the name of what texts begin with where nobody says it
    activation: Literal["identity", "sigmoid"] = "identity"  # of a score

    def to_json(self) -> bytes:
        return msgspec.json.encode(self, order="sorted")

    @staticmethod
    def from_json(data: bytes) -> "EmbeddingConfig":
        try:
            config = msgspec.json.decode(data, type=EmbeddingConfig)
        except msgspec.MsgspecError as error:
            raise CorruptEngineError(f"section {EMBEDDING} cannot be read", str(error), "Build it again.") from error
        if config.default_prompt is not None and config.default_prompt not in config.prompts:
            why = f"its default prompt {config.default_prompt!r} is none of its prompts"
            raise CorruptEngineError(f"section {EMBEDDING} cannot be used", why, "Build it again.")
        return config
