"""Reads the `config_groups` of compressed-tensors, which assign formats to layers, with care."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from enginewright.builder.config import ConfigReader
from enginewright.passes.quant.method import MAX_GROUP_SIZE

KINDS = ("int", "float")
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group", "token")
# Keys of `weights` and `input_activations` about the search for scales, and the dtypes that the tensors have anyway.
HARMLESS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "actorder")
REPEATS = 4  # limit of repetitions in a regular expression: more of them could take very long, and nobody needs them
QUANTIZED_CLASSES = ("Linear", "Embedding")


@dataclass(frozen=True)
class QuantizationArgs:
    """The quantization of one kind of tensor."""

    bits: int  # bits of a number
    kind: str  # one of KINDS
    symmetric: bool  # True if there are no zero points
    strategy: str  # one of STRATEGIES
    block: tuple[int, int] | None  # rows and columns that share a scale; None if the strategy has no size
    dynamic: bool  # True if scales are computed when an engine runs

    @staticmethod
    def read(config: ConfigReader) -> "QuantizationArgs":
        """Reads the settings of a group."""
        kind = config.read(str, "type", default="int").lower()
        if kind not in KINDS:
            raise config.unsupported(f"type = {kind!r}", f"Implemented are {', '.join(KINDS)}.")
        size = config.read(int, "group_size", default=None)
        found = "tensor" if size is None else "channel" if size == -1 else "group"
        strategy = config.read(str, "strategy", default=found).lower()
        if strategy not in STRATEGIES:
            raise config.unsupported(f"strategy = {strategy!r}", f"Implemented are {', '.join(STRATEGIES)}.")
        blocks = config.read_list(int, "block_structure")
        if strategy == "block" and (blocks is None or len(blocks) != 2 or min(blocks) < 1):
            raise config.error(f"block_structure is {blocks}, not two sizes above 0")
        if strategy in ("group", "tensor_group") and (size is None or size < 1):
            raise config.error(f"group_size is {size}, not above 0")
        block = (blocks[0], blocks[1]) if strategy == "block" and blocks else None
        if strategy in ("group", "tensor_group") and size is not None:
            block = (1, size)
        if (bits := config.read_size("num_bits", default=8)) > 8:
            raise config.unsupported(f"num_bits = {bits}", "Implemented are 1 to 8.")
        arguments = QuantizationArgs(
            bits=bits,
            kind=kind,
            symmetric=config.read(bool, "symmetric", default=True),
            strategy=strategy,
            block=block,
            # "local": of two scales, that of quantization groups is computed when an engine runs.
            dynamic=config.holds("dynamic", "local") or config.read(bool, "dynamic", default=False),
        )
        config.refuse_any_unread(HARMLESS)
        return arguments

    @property
    def is_fp8(self) -> bool:
        """True if numbers are FP8."""
        return self.kind == "float" and self.bits == 8

    @property
    def int8_group(self) -> int | None:
        """Columns of INT8 activations that share a scale, 0 for a whole token; None for other numbers."""
        if self.kind != "int":
            return None
        size = self.block[1] if self.block else 0
        return size if size % 32 == 0 and size <= MAX_GROUP_SIZE else 0


@dataclass(frozen=True)
class Scheme:
    """The scheme of a group of layers."""

    targets: tuple[str, ...]  # names of modules, patterns, and classes
    form: str  # one of compressed-tensors' formats
    weights: QuantizationArgs  # quantization of weights
    activations: QuantizationArgs | None  # quantization of activations; None: they stay floating point

    @staticmethod
    def read(config: ConfigReader, form: str) -> "Scheme | None":
        """Reads a group; None if it quantizes no weights. form: format of a group that names none."""
        targets = tuple(config.read_list(str, "targets") or ())
        weights, activations = config.section("weights"), config.section("input_activations")
        if config.section("output_activations") is not None:
            raise config.unsupported("output_activations")
        form = config.read(str, "format", default=form)
        config.refuse_any_unread()
        if weights is None:
            return None
        return Scheme(
            targets, form, QuantizationArgs.read(weights), QuantizationArgs.read(activations) if activations else None
        )


@dataclass(frozen=True)
class Schemes:
    """The groups of a checkpoint, by the kind of their targets: modules first, then patterns, then classes."""

    schemes: Sequence[Scheme]  # all groups
    patterns: Sequence[tuple[re.Pattern[str], Scheme]]  # pattern of module names, and its group

    def of(self, module: str) -> Scheme | None:
        """Finds the scheme of a quantized module."""
        if len(self.schemes) == 1:
            return self.schemes[0]
        exact = [scheme for scheme in self.schemes if module in scheme.targets]
        matching = [scheme for pattern, scheme in self.patterns if pattern.match(module)]
        by_class = [scheme for scheme in self.schemes if set(scheme.targets) & set(QUANTIZED_CLASSES)]
        return next(iter([*exact, *matching, *by_class]), None)


def read_schemes(config: ConfigReader, form: str, forms: Sequence[str]) -> Schemes:
    """Reads all groups.

    Args:
        config: the quantization_config.
        form: format of groups that name none.
        forms: implemented formats.
    """
    groups = config.section("config_groups")
    if groups is None:
        raise config.error("config_groups is missing")
    schemes, patterns = [], []
    for name in groups.names():
        group = groups.section(name)
        scheme = Scheme.read(group, form) if group is not None else None
        if group is None or scheme is None:
            continue
        if scheme.form not in forms:
            raise group.unsupported(f"format = {scheme.form!r}", f"Implemented are {', '.join(forms)}.")
        schemes.append(scheme)
        expressions = [target.removeprefix("re:") for target in scheme.targets if target.startswith("re:")]
        patterns += [(_compiled(expression, group), scheme) for expression in sorted(expressions)]
    return Schemes(schemes, patterns)


def _compiled(expression: str, config: ConfigReader) -> re.Pattern[str]:
    """Compiles a pattern of somebody else, if matching cannot take long."""
    if len(re.findall(r"[*+{]", expression)) > REPEATS or re.search(r"\)[*+{]", expression) or len(expression) > 500:
        raise config.unsupported(f"targets has {expression!r}, a pattern that could take long to match"[:300])
    try:
        return re.compile(expression)
    except re.error as error:
        raise config.error(f"targets has {expression!r}, which is not a regular expression: {error}") from error
