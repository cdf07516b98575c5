"""An engine file that is open for running."""

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
from enginewright.adapter_sites import AdapterSites, read_sites
from enginewright.code import CODE, CodeArchive, read_code
from enginewright.embedding import EMBEDDING, EmbeddingConfig
from enginewright.engine_file import EngineFile
from enginewright.errors import CorruptEngineError, NoCodeForMachineError, UsageError
from enginewright.manifest import WEIGHTS, Manifest, SectionForm, plan_section, rank_plan_section, rank_sizes
from enginewright.plan import Plan
from enginewright.runtime.text.generation_config import find_fault
from enginewright.runtime.text.tokenizer import Tokenizer
from enginewright.targets import CPU, TARGETS, architectures, choose_code, platforms_of

# Keys of tokenizer_config.json whose values are special tokens, which requests read as text.
TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Engine:
    """Plan, weights and tokenizer of an open engine file; use it in `with`, or close it.

    Weights are used where they are mapped, or are read into memory where `RuntimeConfig.mmap` is False. Their hashes
    are checked only with `verify`; everything else is checked when the file is opened.
    """

    def __init__(self, file: EngineFile, target: str) -> None:
        self.file, self.target = file, target
        self._mapped: list[_cpu.MappedFile] = []  # at most one, which the engines of all roles share
        self.plan = Plan.from_json(bytes(file.section(plan_section(target))))

    @classmethod
    def open(cls, path: str | Path, target: str = CPU, *, verify: bool = False) -> "Engine":
        """Opens an engine file.

        Args:
            path: the engine file.
            target: the platform to run on, `cpu` or `cuda`.
            verify: whether to check the hashes of the weights, too.

        Raises:
            CorruptEngineError: the file is damaged.
            NoCodeForMachineError: the engine was not built for this platform.
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
        """Returns the same engine with the plan of another of its models; it is closed together with this one.

        Args:
            role: the role of the model, one of ROLES.

        Raises:
            UsageError: the engine has no such model.
        """
        if role not in self.manifest.roles:
            there = f"it has {', '.join(self.manifest.roles)}" if self.manifest.roles else "it has only one model"
            raise UsageError(
                f"{self.file.path} has no {role} model", there, "Build it again with one: engine build --draft."
            )
        other = copy.copy(self)
        other.plan = Plan.from_json(bytes(self.file.section(plan_section(self.target, role))))
        return other

    def for_rank(self, rank: int, size: int) -> "Engine":
        """Returns the same engine with the plan of a rank, on a platform whose plans are cut in the build.

        Args:
            rank: the rank.
            size: number of ranks.

        Raises:
            UsageError: the engine was not built for so many ranks.
        """
        section = rank_plan_section(self.target, rank, size)
        if section not in self.file.sections:
            ways = " or ".join(map(str, (1, *self.rank_sizes)))
            raise UsageError(
                f"{self.file.path} cannot be divided among {size} GPUs",
                f"it was built for {ways}: kernels for GPUs are compiled for the part of each",
                f"Build it again with --tensor-parallel-size {size}, or leave the option out.",
            )
        other = copy.copy(self)
        other.plan = Plan.from_json(bytes(self.file.section(section)))
        return other

    @property
    def rank_sizes(self) -> tuple[int, ...]:
        """Numbers of ranks, more than one, that the engine has plans for on its platform."""
        return rank_sizes(self.file.sections, self.target)

    @property
    def manifest(self) -> Manifest:
        """Manifest of the engine file."""
        return self.file.manifest

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of all its models, as they are stored and mapped."""
        return sum(form.nbytes for name, form in self.file.sections.items() if name.startswith(WEIGHTS))

    def plan_weight_bytes(self, without: Container[str] = ()) -> int:
        """Bytes of the weights that this plan reads, except for the names in `without`."""
        return sum(self.weight(name)[1].nbytes for name in self.plan.weight_names() if name not in without)

    def missing_weight_bytes(self, weights: Collection[str]) -> int:
        """Bytes of the weights still to load when `weights` are loaded: all of the engine's if none are."""
        return self.plan_weight_bytes(without=weights) if weights else self.weight_bytes

    def weight(self, name: str) -> tuple[memoryview, SectionForm]:
        """Finds a packed weight of the plan.

        Returns:
            The bytes in the mapped file, and their form.

        Raises:
            CorruptEngineError: the file has no such section.
        """
        section = f"{WEIGHTS}{name}"
        if section not in self.file.sections:
            raise CorruptEngineError(f"{self.file.path} is incomplete", f"it has no section {section}")
        return self.file.section(section), self.file.sections[section]

    def read_weight(self, name: str, begin: int, buffer: NDArray[np.uint8]) -> None:
        """Reads a part of a packed weight from the file, not through the mapping; several threads may do so at once.

        Args:
            name: the name of the weight.
            begin: the offset of the first byte in the weight.
            buffer: the memory to fill.
        """
        self.file.read_into(f"{WEIGHTS}{name}", begin, buffer.data)

    def architecture(self, capability: tuple[int, int]) -> str:
        """Name of the architecture whose code a GPU of this compute capability runs.

        Raises:
            NoCodeForMachineError: the engine has no code for this GPU.
        """
        return choose_code(capability, architectures(self.manifest.targets), str(self.file.path))

    def code(self, capability: tuple[int, int]) -> CodeArchive:
        """The kernels for a GPU of this compute capability.

        Raises:
            NoCodeForMachineError: the engine has no code for this GPU.
            CorruptEngineError: the kernels are damaged.
        """
        section = f"{CODE}{self.architecture(capability)}"
        return read_code(self.file.section(section), section)

    def check_mapped_weights(self) -> None:
        """Checks that the mapped weights have not changed since the file was opened.

        It is called before the weights are first used, and after each step before its results are given out. From the
        first call on, a file that is truncated during a step does not end the process by SIGBUS.

        Raises:
            CorruptEngineError: the file was written to, or could not be read.
            EngineError: the engine is closed.
        """
        self.file.check_unchanged()
        if not self._mapped:
            self._mapped.append(_cpu.MappedFile(self.file.mapping))
        if self._mapped[0].faulted:
            why = "its disk failed, or it was truncated for a moment (the system raised SIGBUS)"
            raise CorruptEngineError(f"{self.file.path} could not be read while it is in use", why, "Start again.")

    def check_in_use(self) -> None:
        """Checks the mapped weights if they are used where they are mapped; otherwise the file no longer matters.

        Raises:
            CorruptEngineError, EngineError: as `check_mapped_weights`.
        """
        if self._mapped:
            self.check_mapped_weights()

    def _check_texts(self) -> None:
        """Parses the texts that requests will read, before the first request.

        The hashes show damage, but not mistakes that a builder copied from the checkpoint.
        """
        _ = self._chat_template, self._tokenizer_config, self.generation_config
        if not self.plan.generates:
            _ = self.embedding

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the engine, with its chat template."""
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
            if isinstance(token, dict):  # some files store a token together with its matching rules
                token = config[key] = token.get("content")
            if token is not None and not isinstance(token, str):
                raise self._unusable("tokenizer_config.json", f"{key} is {token!r:.80}, not a text")
        return config

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The model's defaults for sampling (generation_config.json).

        Raises:
            CorruptEngineError: the section is no valid generation config.
        """
        config = self._json("generation_config.json")
        if fault := find_fault(config, self.plan.vocab_size):
            raise self._unusable("generation_config.json", fault)
        return config

    @cached_property
    def embedding(self) -> EmbeddingConfig:
        """Conversion of the model's output into vectors or scores, for an engine that does not generate text."""
        return EmbeddingConfig.from_json(self.file.read_section(EMBEDDING))

    @cached_property
    def adapter_sites(self) -> AdapterSites:
        """Linear layers that may have adapters.

        Raises:
            UsageError: the engine was built without a list of them.
            CorruptEngineError: the list is damaged.
        """
        return read_sites(self.file)

    @property
    def embeds(self) -> bool:
        """True if the engine's output is vectors."""
        return "embedding" in self.plan.outputs

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a text: of the generation config and of the tokenizer, since either may lack one."""
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
        fix = "Build it again from a checkpoint in which it is correct."
        return CorruptEngineError(f"section {section} of {self.file.path} cannot be used", why, fix)

    def close(self) -> None:
        """Closes the engine file and frees the tokenizer."""
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
