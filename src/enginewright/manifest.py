"""The manifest: the parts of an engine, their sources, and the hashes that protect them.

Canonical JSON: sorted keys, no spaces, defaults left out, whole numbers only, so that one manifest has one text.
docs/engine-file.md specifies every field.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

from enginewright.dtypes import DTYPES
from enginewright.targets import platforms_of

# version of the file and all that is in it, plans included; rises when a reader of the last one would be wrong
FORMAT_VERSION = 2
WEIGHTS = "weights/"  # prefix of sections that are weights: large, typed, and hashed only on demand
TABLE = ".table"  # end of the name of a table as an adapter site, since a head may have its weight, too

PLANS = "plan/"
RANK_PLANS = "ranks/"  # prefix of sections that are plans of one of several ranks
DRAFT = "draft"  # a smaller model of the same tokenizer
SKIP = "skip"  # the first layers of the model itself, with its head
MTP = "mtp"  # the multi-token prediction layer of the checkpoint
EAGLE = "eagle"  # a head that reads hidden states of several layers of the model
MEDUSA = "medusa"  # heads that all read one hidden state of the model
ROLES = (DRAFT, SKIP, MTP, EAGLE, MEDUSA)  # of the plans that propose draft tokens
NGRAM = "ngram"  # draft tokens are looked up in the text: no plan

MAX_BYTES = 2**53  # limit of the bytes of a section or a file: every JSON reader keeps whole numbers up to here
MAX_NAME = 255  # characters of a name
ROWS = 16  # rows of a block in an r16 layout
K_ALIGN = 64  # columns of r16 layouts are padded to a multiple of this
_SECTION_NAME = re.compile(r"[!#-\[\]-~]{1,255}")  # printable ASCII but '"' and '\\'

Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class SectionForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Size, hash and form of a section's bytes."""

    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]  # length, without the zeros up to a multiple of 64
    sha256: Sha256  # hash of these bytes
    dtype: str | None = None  # number type of a weight; None for plain bytes, as for the next two
    shape: tuple[Count, ...] | None = None  # shape of a weight
    layout: str | None = None  # layout in which kernels read a weight (csrc/cpu/kernel.h)
    evidence: bool = False  # True if the build measured it (goldens, a quality report): it is no part of the content


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Default limits for the runtime, which may exceed max_batch_size."""

    max_seq_len: Count  # tokens of a sequence
    max_batch_size: Count  # sequences that run at once


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an engine that only the builder knows."""

    builder_version: str  # release that built the engine
    name: str  # name of the model
    model_type: str  # `model_type` of the model's config.json
    targets: tuple[str, ...]  # targets that the engine has code for, such as "cpu"
    recipe: dict[str, Any]  # every choice that changes the content, as JSON without fractions (write "0.5")
    sources: dict[str, Sha256]  # input file, relative to its checkpoint → SHA-256
    limits: Limits  # default limits
    # roles of the plans that propose draft tokens, among ROLES; each has one for each platform
    roles: tuple[str, ...] = ()
    speculate: str | None = None  # default source of draft tokens, NGRAM or one of the roles; None: no speculation
    engine: Sha256 | None = None  # content hash of the engine that an adapter is for; None: the file is an engine


class Manifest(About, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The description of an engine in its header."""

    format_version: Annotated[int, msgspec.Meta(ge=FORMAT_VERSION, le=FORMAT_VERSION)]  # version of the format
    sections: dict[str, SectionForm]  # name → form
    content_hash: Sha256  # SHA-256 over every field and section but evidence, wherever they lie in the file

    @staticmethod
    def of(about: About, sections: Mapping[str, SectionForm]) -> "Manifest":
        """Makes the manifest of these sections.

        Args:
            about: facts that the builder knows.
            sections: name → form.

        Raises:
            ValueError: no reader would accept the manifest.
        """
        fields = {name: getattr(about, name) for name in About.__struct_fields__}
        fields |= {"format_version": FORMAT_VERSION, "sections": dict(sections)}
        manifest = Manifest(**fields, content_hash=_content_hash(fields))
        return Manifest.from_json(manifest.to_json())

    def to_json(self) -> bytes:
        """Encodes the manifest as canonical JSON."""
        return msgspec.json.encode(self, order="sorted")

    @staticmethod
    def from_json(text: str | bytes) -> "Manifest":
        """Decodes and checks a manifest.

        Raises:
            ValueError: the text is not a valid manifest; the message says why (msgspec's errors are ValueErrors too).
            RecursionError: it is nested too deeply.
        """
        manifest = _DECODER.decode(text)
        _check(manifest)
        if manifest.to_json() != (text.encode() if isinstance(text, str) else text):
            raise ValueError("the manifest is not canonical JSON")
        fields = {name: getattr(manifest, name) for name in Manifest.__struct_fields__ if name != "content_hash"}
        if _content_hash(fields) != manifest.content_hash:
            raise ValueError("the manifest does not match its content hash")
        return manifest


_DECODER = msgspec.json.Decoder(Manifest)


def _content_hash(fields: Mapping[str, Any]) -> str:
    sections = {name: form for name, form in fields["sections"].items() if not form.evidence}
    # as in the manifest's JSON, which omits defaults
    left_out = [name for name in ("roles", "speculate", "engine") if not fields[name]]
    fields = {name: value for name, value in fields.items() if name not in left_out}
    return hashlib.sha256(msgspec.json.encode({**fields, "sections": sections}, order="sorted")).hexdigest()


def _check(manifest: Manifest) -> None:
    texts = (manifest.builder_version, manifest.name, manifest.model_type, *manifest.targets)
    for text in texts:
        if not text.isprintable() or not 0 < len(text) <= MAX_NAME:
            raise ValueError(f"{text[:MAX_NAME]!r} is no name: 1 to {MAX_NAME} printable characters")
    for file in manifest.sources:
        if not file.isprintable() or file.startswith("/") or ".." in file.split("/") or not file:
            raise ValueError(f"the source {file!r} is not a file inside its checkpoint")
    _check_whole_numbers(manifest.recipe)
    for name, form in manifest.sections.items():
        check_form(name, form)
    _check_roles(manifest)


def plan_section(platform: str, role: str | None = None) -> str:
    """Names the section of a plan.

    Args:
        platform: cpu or cuda.
        role: one of ROLES; None is the engine's own model.
    """
    return f"{PLANS}{role}/{platform}" if role else f"{PLANS}{platform}"


def rank_plan_section(platform: str, rank: int, size: int) -> str:
    """Names the section of the plan of a rank. Only platforms whose kernels are specialized to its part have one.

    Args:
        platform: cuda.
        rank: the rank.
        size: number of ranks.
    """
    return f"{RANK_PLANS}{size}/{rank}/{platform}"


def rank_sizes(sections: Iterable[str], platform: str) -> tuple[int, ...]:
    """Lists the numbers of ranks for which there are plans, in ascending order.

    Args:
        sections: names of an engine's sections.
        platform: cuda.
    """
    first = re.compile(rf"{RANK_PLANS}(\d+)/0/{platform}")
    return tuple(sorted(int(match[1]) for match in map(first.fullmatch, sections) if match))


def _check_roles(manifest: Manifest) -> None:
    for role in manifest.roles:
        if role not in ROLES:
            raise ValueError(f"the role {role[:MAX_NAME]!r} is not known; there are {', '.join(ROLES)}")
        if manifest.roles.count(role) > 1:
            raise ValueError(f"the role {role!r} is there twice")
        for platform in platforms_of(manifest.targets):
            if plan_section(platform, role) not in manifest.sections:
                raise ValueError(f"the role {role!r} has no plan: there is no section {plan_section(platform, role)!r}")
    for name in manifest.sections:
        role, slash, _ = name.removeprefix(PLANS).partition("/")
        if name.startswith(PLANS) and slash and role not in manifest.roles:
            raise ValueError(f"the section {name!r} is of a role that the manifest does not list")
    if manifest.speculate is not None and manifest.speculate not in (NGRAM, *manifest.roles):
        raise ValueError(f"{manifest.speculate[:MAX_NAME]!r} is the default speculation, but no role of the engine")


def _check_whole_numbers(recipe: Any) -> None:
    pending = [recipe]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
        elif isinstance(value, float):
            raise ValueError(f"the recipe has the fraction {value!r}; write it as a string")
        elif isinstance(value, int) and abs(value) > MAX_BYTES:
            raise ValueError("the recipe has a number beyond 2^53; write it as a string")


def check_form(name: str, form: SectionForm) -> None:
    """Checks the name and the form of a section.

    Raises:
        ValueError: the section may not have this name, or this form is impossible.
    """
    if not _SECTION_NAME.fullmatch(name) or name == "__metadata__":
        raise ValueError(f"{name[:MAX_NAME]!r} is no section name: 1 to {MAX_NAME} printable ASCII characters")
    if form.dtype is None and form.shape is None and form.layout is None:
        if name.startswith(WEIGHTS):
            raise ValueError(f"section {name!r} is a weight without dtype, shape, and layout")
    elif form.dtype is None or form.shape is None or form.layout is None:
        raise ValueError(f"section {name!r} has only a part of dtype, shape, and layout")
    else:
        try:
            expected = packed_bytes(form.dtype, form.shape, form.layout)
        except ValueError as error:
            raise ValueError(f"section {name!r} is impossible: {error}") from None
        if form.nbytes != expected:
            raise ValueError(f"section {name!r} has {form.nbytes} bytes where its form takes {expected}")


def packed_bytes(dtype: str, shape: tuple[int, ...], layout: str) -> int:
    """Computes the bytes of a vector, a matrix, or consecutive matrices in one of the layouts of csrc/cpu/kernel.h.

    Args:
        dtype: number type.
        shape: [columns], [rows, columns] or [matrices, rows, columns].
        layout: name of the layout.

    Raises:
        ValueError: there is no such layout for this type and shape.
    """
    if not 1 <= len(shape) <= 3 or not all(1 <= size <= MAX_BYTES for size in shape):
        raise ValueError(f"shape {shape} is neither [columns], [rows, columns] nor [matrices, rows, columns]")
    if len(shape) == 3:
        if layout == "plain":
            raise ValueError("no tensor of 3 dimensions has the layout 'plain'")
        return shape[0] * packed_bytes(dtype, shape[1:], layout)
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    facts = DTYPES.get(dtype)
    if layout == "plain" and facts is not None and facts.bytes:
        return rows * columns * facts.bytes
    by_columns = layout in ("r16_columns", "r16_columns_pairs")
    known = by_columns or layout in ("r16", "r16_pairs")
    if not known or facts is None or not (facts.in_columns if by_columns else facts.in_r16) or len(shape) != 2:
        raise ValueError(f"no {dtype!r} tensor of {len(shape)} dimensions has the layout {layout!r}")
    parts = 2 if layout.endswith("_pairs") else 1
    if rows % parts:
        raise ValueError(f"{rows} rows cannot be pairs")
    elements = parts * -(-(rows // parts) // ROWS) * ROWS
    elements *= columns if by_columns else -(-columns // K_ALIGN) * K_ALIGN
    return elements * facts.bits // 8
