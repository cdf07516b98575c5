"""An engine file, opened to be run."""

import copy
from collections.abc import Collection, Container
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginewright import _cpu
from enginewright.code import CODE, CodeArchive, read_code
from enginewright.embedding import EMBEDDING, EmbeddingConfig
from enginewright.engine_file import EngineFile
from enginewright.errors import CorruptEngineError, NoCodeForMachineError, UsageError
from enginewright.manifest import WEIGHTS, Manifest, SectionForm, plan_section
from enginewright.plan import Plan
from enginewright.runtime.text.generation_config import fault_of
from enginewright.runtime.text.tokenizer import Tokenizer
from enginewright.targets import CPU, TARGETS, architectures, choose_code, platforms_of

# Of tokenizer_config.json: texts that requests read.
TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Engine:
    """Plan, weights and tokenizer of an engine; use it in `with`, or close it.

    Weights are used where they are mapped, or read where `RuntimeConfig.mmap` is False, and are hashed by `verify`
    alone; everything else was checked.
    """

    def __init__(self, file: EngineFile, target: str) -> None:
        self.file, self.target = file, target
        self._mapped: list[_cpu.MappedFile] = []  # one at most; those of all roles share it
        self.plan = Plan.from_json(bytes(file.section(plan_section(target))))

    @classmethod
    def open(cls, path: str | Path, target: str = CPU, *, verify: bool = False) -> "Engine":
        """Open an engine.

        Args:
            target: what to run on, a platform: `cpu` or `cuda`.
            verify: hash the weights, too.

        Raises:
            CorruptEngineError: the file is damaged.
            NoCodeForMachineError: the engine was not built for it.
        """
        file = EngineFile.open(path)
        try:
            if target not in platforms_of(file.manifest.targets):
                able = [name for name in TARGETS if target in platforms_of([name])]
                raise NoCodeForMachineError(
                    f"{path} has no code for {target}",
                    f"it was built for {', '.join(file.manifest.targets)}",
                    f"Build it again with --target {' or '.join(able)}.",
                )
            damaged = file.verify_sections(name for name in file.sections if name.startswith(WEIGHTS)) if verify else []
            if damaged:
                raise CorruptEngineError(f"{path} is damaged", f"section {', '.join(damaged)}", "Build it again.")
            engine = cls(file, target)
            engine._check_texts()
            return engine
        except BaseException:
            file.close()
            raise

    def for_role(self, role: str) -> "Engine":
        """The same engine with the plan of another of its models, one of ROLES; closed with this one.

        Raises:
            UsageError: it has no such model.
        """
        if role not in self.manifest.roles:
            there = f"it has {', '.join(self.manifest.roles)}" if self.manifest.roles else "it has one model alone"
            raise UsageError(
                f"{self.file.path} has no {role} model", there, "Build it again with one: engine build --draft."
            )
        other = copy.copy(self)
        other.plan = Plan.from_json(bytes(self.file.section(plan_section(self.target, role))))
        return other

    @property
    def manifest(self) -> Manifest:
        return self.file.manifest

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of all its models, as they are stored and mapped."""
        return sum(form.nbytes for name, form in self.file.sections.items() if name.startswith(WEIGHTS))

    def bytes_of_plan(self, without: Container[str] = ()) -> int:
        """Bytes of the weights that this plan reads, but for some by name."""
        return sum(self.weight(name)[1].nbytes for name in self.plan.weight_names() if name not in without)

    def bytes_beside(self, weights: Collection[str]) -> int:
        """Bytes of the weights that are still to come where some are there: all of the engine's, if none are."""
        return self.bytes_of_plan(without=weights) if weights else self.weight_bytes

    def weight(self, name: str) -> tuple[memoryview, SectionForm]:
        """A packed weight of the plan and its form."""
        section = f"{WEIGHTS}{name}"
        if section not in self.file.sections:
            raise CorruptEngineError(f"{self.file.path} is incomplete", f"it has no section {section}")
        return self.file.section(section), self.file.sections[section]

    def read_weight(self, name: str, begin: int, buffer: NDArray[np.uint8]) -> None:
        """Fill a buffer with bytes of a packed weight from `begin` on, past the mapping; threads may do so at once."""
        self.file.read_into(f"{WEIGHTS}{name}", begin, buffer.data)

    def architecture(self, capability: tuple[int, int]) -> str:
        """Whose code a GPU of this compute capability runs.

        Raises:
            NoCodeForMachineError: the engine has none for it.
        """
        return choose_code(capability, architectures(self.manifest.targets), str(self.file.path))

    def code(self, capability: tuple[int, int]) -> CodeArchive:
        """The kernels for a GPU of this compute capability.

        Raises:
            NoCodeForMachineError: the engine has none.
            CorruptEngineError: they are damaged.
        """
        section = f"{CODE}{self.architecture(capability)}"
        return read_code(self.file.section(section), section)

    def check_mapped_weights(self) -> None:
        """See that the weights of `weight` are those that were opened: before they are first used, and each time that
        something was computed with them, before it is given away.

        From the first call on, a file that is cut short under a running step does not end the process by SIGBUS.

        Raises:
            CorruptEngineError: somebody has written to the file, or it could not be read.
            EngineError: the engine is closed.
        """
        self.file.check_unchanged()
        if not self._mapped:
            self._mapped.append(_cpu.MappedFile(self.file.mapping))
        if self._mapped[0].faulted:
            why = "its disk failed, or it was cut short for a moment (the system raised SIGBUS)"
            raise CorruptEngineError(f"{self.file.path} could not be read while it is in use", why, "Start again.")

    def check_in_use(self) -> None:
        """As `check_mapped_weights`, if the weights are used where they are mapped; else the file does not matter."""
        if self._mapped:
            self.check_mapped_weights()

    def _check_texts(self) -> None:
        """What requests will read, before the first of them: the hashes tell damage, not what a builder took over."""
        _ = self._chat_template, self._tokenizer_config, self.generation_config
        if not self.plan.generates:
            _ = self.embedding

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.file.read_section("tokenizer.json"), self._tokenizer_config, self._chat_template)

    @cached_property
    def _chat_template(self) -> str | None:
        if "chat_template" not in self.file.sections:
            return None
        try:
            return self.file.read_section("chat_template").decode()
        except UnicodeDecodeError as error:
            raise self._unusable("chat_template", f"it is no UTF-8 text: {error}") from error

    @cached_property
    def _tokenizer_config(self) -> dict[str, Any]:
        config = self._json("tokenizer_config.json")
        for key in TOKEN_KEYS:
            token = config.get(key)
            if isinstance(token, dict):  # a token with how it is matched, as some files have it
                token = config[key] = token.get("content")
            if token is not None and not isinstance(token, str):
                raise self._unusable("tokenizer_config.json", f"{key} is {token!r:.80}, not a text")
        return config

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        config = self._json("generation_config.json")
        if fault := fault_of(config, self.plan.vocab_size):
            raise self._unusable("generation_config.json", fault)
        return config

    @cached_property
    def embedding(self) -> EmbeddingConfig:
        """How texts become vectors or scores, where the engine does not generate text."""
        return EmbeddingConfig.from_json(self.file.read_section(EMBEDDING))

    @property
    def embeds(self) -> bool:
        """Whether it gives vectors."""
        return "embedding" in self.plan.outputs

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
            return cast(dict[str, Any], msgspec.json.decode(self.file.read_section(section), type=dict))
        except msgspec.MsgspecError as error:
            raise CorruptEngineError(f"section {section} cannot be read", str(error), "Build it again.") from error

    def _unusable(self, section: str, why: str) -> CorruptEngineError:
        fix = "Build it again from a checkpoint that has it right."
        return CorruptEngineError(f"section {section} of {self.file.path} cannot be used", why, fix)

    def close(self) -> None:
        self._mapped.clear()
        if "tokenizer" in vars(self):
            self.tokenizer.close()
        self.file.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
