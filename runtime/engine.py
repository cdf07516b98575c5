"""An engine file, opened to be run."""

from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginewright.engine_file import EngineFile
from enginewright.errors import CorruptEngineError, NoCodeForMachineError
from enginewright.manifest import WEIGHTS, Manifest, SectionForm
from enginewright.plan import Plan
from enginewright.runtime.tokenizer import Tokenizer


class Engine:
    """Plan, weights and tokenizer of an engine; use it in `with`, or close it.

    Weights are used where they are mapped and are hashed by `verify` alone; everything else was checked.
    """

    def __init__(self, file: EngineFile, target: str) -> None:
        self.file = file
        self.target = target
        self.plan = Plan.from_json(bytes(file.section(f"plan/{target}")))

    @classmethod
    def open(cls, path: str | Path, target: str = "cpu", *, verify: bool = False) -> "Engine":
        """Open an engine.

        Args:
            verify: hash the weights, too.

        Raises:
            CorruptEngineError: the file is damaged.
            NoCodeForMachineError: the engine was not built for the target.
        """
        file = EngineFile.open(path)
        try:
            if target not in file.manifest.targets:
                raise NoCodeForMachineError(
                    f"{path} has no code for {target}",
                    f"it was built for {', '.join(file.manifest.targets)}",
                    f"Build it again with --target {target}.",
                )
            damaged = file.verify_sections(name for name in file.sections if name.startswith(WEIGHTS)) if verify else []
            if damaged:
                raise CorruptEngineError(f"{path} is damaged", f"section {', '.join(damaged)}", "Build it again.")
            return cls(file, target)
        except BaseException:
            file.close()
            raise

    @property
    def manifest(self) -> Manifest:
        return self.file.manifest

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, as they are stored and mapped."""
        return sum(form.nbytes for name, form in self.file.sections.items() if name.startswith(WEIGHTS))

    def weight(self, name: str) -> tuple[memoryview, SectionForm]:
        """A packed weight of the plan and its form."""
        section = f"{WEIGHTS}{name}"
        if section not in self.file.sections:
            raise CorruptEngineError(f"{self.file.path} is incomplete", f"it has no section {section}")
        return self.file.section(section), self.file.sections[section]

    def read_weight(self, name: str, begin: int, buffer: NDArray[np.uint8]) -> None:
        """Fill a buffer with bytes of a packed weight from `begin` on, past the mapping; threads may do so at once."""
        self.file.read_into(f"{WEIGHTS}{name}", begin, buffer.data)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        template = bytes(self.file.section("chat_template")).decode() if "chat_template" in self.file.sections else None
        return Tokenizer(bytes(self.file.section("tokenizer.json")), self._json("tokenizer_config.json"), template)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        return self._json("generation_config.json")

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: those of the generation config and the tokenizer's own, as either may lack one."""
        listed = self.generation_config.get("eos_token_id")
        own = self.tokenizer.token_id(self.tokenizer.config.get("eos_token"))
        ends = [*(listed if isinstance(listed, list) else [listed]), own]
        known = [token for token in ends if type(token) is int and 0 <= token < self.plan.vocab_size]
        return tuple(dict.fromkeys(known))

    def _json(self, section: str) -> dict[str, Any]:
        try:
            return cast(dict[str, Any], msgspec.json.decode(bytes(self.file.section(section)), type=dict))
        except msgspec.MsgspecError as error:
            raise CorruptEngineError(f"section {section} cannot be read", str(error), "Build it again.") from error

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
