"""An adapter for one engine, ready to be multiplied: NAME.lora, a file in the engine file's form.

`adapter.json` lists the sites of the engine (adapter_sites.py) that it changes, and the sections of `weights/` have its
matrices. A row of a site's result is

    acc · gain + bias of the engine + bias + Σ B (A x)

over the pieces that the row is in, before the epilogue: acc is the engine's product with its scales, and x its input.
In a layer of experts, A and B are a matrix for each expert that the adapter changes; in one of heads, one of them is a
matrix for each head, and the other one is for all. In a table of embeddings x is 1 at the token and 0 elsewhere: A has
a column for each token. An adapter may have rows of its own in place of some of a layer's or a table's.
docs/engine-file.md specifies the format.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginewright.engine_file import EngineFile
from enginewright.errors import CorruptEngineError, UsageError
from enginewright.manifest import MAX_BYTES, TABLE, WEIGHTS, Manifest, SectionForm

ADAPTER = "adapter.json"  # name of the section that lists the sites
MAX_RANK = 320  # rank of a layer's matrices
MAX_INVOCATION_TOKENS = 256  # tokens that invoke an adapter
RANK_ALIGN = 16  # ranks of a site are padded with zero rows of A to a multiple of this
SharedFactor = Literal["", "a", "b"]  # a factor that is one matrix where the others are several
FactorDType = Literal["bf16", "i8"]  # dtypes of A and B
PREPARE_AGAIN = "Prepare it again with `engine adapter`."


class PieceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of a site, or columns of a table, that one layer's matrices change."""

    begin: int  # first of the rows
    count: int  # number of rows
    rank: int  # columns of B
    first_rank: int  # first row of A that B is multiplied with


class SiteEntry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A site that an adapter changes."""

    weight: str  # name of the site's weight in the plan
    rows: int  # rows of the weight, or of an expert's matrix, N
    columns: int  # columns of the weight, K
    rank: int  # rows of A, R, a multiple of RANK_ALIGN; 0: there is no A
    pieces: tuple[PieceEntry, ...]  # pieces, in the order of their rows, none of which is in two
    dtype: FactorDType = "bf16"  # dtype of A and B; those in "i8" have a scale for each row
    bias: bool = False  # True if something is added to the bias
    gain: bool = False  # True if rows of the engine's product have factors (DoRA)
    experts: tuple[int, ...] = ()  # experts that are changed, ascending, in a layer of experts; empty: it is none
    heads: int = 0  # matrices of a layer of heads; 0: it is none
    shared: SharedFactor = ""  # the factor that all heads share; "": there are no heads
    table: bool = False  # True if it is a table of embeddings: A is [R, N], and B has a row for each column
    replaced: int = 0  # rows of the weight that the adapter has rows of its own for

    @property
    def key(self) -> str:
        """Key of the engine's site (adapter_sites.py)."""
        return self.weight + TABLE * self.table

    @property
    def inputs(self) -> int:
        """Columns of A."""
        return self.rows if self.table else self.columns

    @property
    def outputs(self) -> int:
        """Rows that pieces are of."""
        return self.columns if self.table else self.rows

    def forms(self) -> Mapping[str, tuple[str, tuple[int, ...], str]]:
        """Lists its sections with their dtype, shape and layout."""
        name = f"{WEIGHTS}{self.key}"
        forms: dict[str, tuple[str, tuple[int, ...], str]] = {}
        of_each = (len(self.experts) or self.heads,) if self.experts or self.heads else ()
        factors = {f"{name}.a": (self.rank, self.inputs)} if self.rank else {}
        factors |= {f"{name}.b{number}": (piece.count, piece.rank) for number, piece in enumerate(self.pieces)}
        for factor, shape in factors.items():
            kind = factor.removeprefix(f"{name}.")[0]
            matrices = of_each if kind != self.shared else ()
            forms[factor] = self.dtype, (*matrices, *shape), "r16_columns"
            if self.dtype == "i8":
                forms[f"{factor}_scale"] = "f32", (*matrices, shape[0]), "plain"
        vectors = [kind for kind, is_there in (("bias", self.bias), ("gain", self.gain)) if is_there]
        forms |= {f"{name}.{kind}": ("f32", (self.rows,), "plain") for kind in vectors}
        if self.replaced:
            forms[f"{name}.ids"] = "i32", (self.replaced,), "plain"
            forms[f"{name}.rows"] = self.dtype, (self.replaced, self.columns), "r16_columns"
            if self.dtype == "i8":
                forms[f"{name}.rows_scale"] = "f32", (self.replaced,), "plain"
        return forms

    def check(self, sections: Mapping[str, SectionForm]) -> None:
        """Refuses ranks and rows that are out of range, and sections that do not have their forms.

        Args:
            sections: name → form of the file's sections.
        """
        sizes = self.rows, self.columns
        _require(all(0 < size <= MAX_BYTES for size in sizes), f"{self.weight} has an impossible shape")
        possible = 0 <= self.rank <= MAX_BYTES and self.rank % RANK_ALIGN == 0 and bool(self.pieces) == (self.rank > 0)
        _require(possible, f"{self.weight} has rank {self.rank} and {len(self.pieces)} pieces")
        experts = self.experts
        ascending = list(experts) == sorted(set(experts)) and all(0 <= expert <= MAX_BYTES for expert in experts)
        _require(ascending, f"{self.weight} does not have its experts in order")
        several = bool(experts) or self.heads > 0
        _require(
            not (several and (self.bias or self.gain)), f"{self.weight} has several matrices, and a bias or a gain"
        )
        fits = 0 <= self.heads <= MAX_BYTES and (self.heads > 0) == bool(self.shared) and not (experts and self.heads)
        fits = fits and (self.rank > 0 or not self.heads)
        _require(fits, f"{self.weight} has {self.heads} heads")
        of_one = not (several or (self.table and (self.bias or self.gain)))
        _require(of_one or not (self.table or self.replaced), f"{self.weight} is no table, or replaces no rows")
        _require(0 <= self.replaced <= self.rows, f"{self.weight} has {self.replaced} rows that are replaced")
        _require(self.table or self.gain or not self.replaced, f"{self.weight} replaces rows without a gain")
        end = 0
        for piece in self.pieces:
            _require(0 < piece.rank <= MAX_RANK, f"{self.weight} has a piece of rank {piece.rank}")
            _require(0 <= piece.first_rank <= self.rank - piece.rank, f"a piece of {self.weight} leaves A")
            inside = end <= piece.begin <= self.outputs and 0 < piece.count <= self.outputs - piece.begin
            _require(inside, f"a piece of {self.weight} leaves its rows, or those after the last piece")
            end = piece.begin + piece.count
        for name, expected in self.forms().items():
            form = sections.get(name)
            found = None if form is None else (form.dtype, form.shape, form.layout)
            _require(found == expected, f"section {name} is not there as {expected}")


class AdapterEntries(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The content of `adapter.json`."""

    sites: tuple[SiteEntry, ...]  # sites, in the order of the plan's calls
    # tokens that invoke it: it is for them and what follows them; empty: it is for all tokens (aLoRA)
    invocation_tokens: tuple[int, ...] = ()

    def to_json(self) -> bytes:
        """Encodes the entries as canonical JSON."""
        return msgspec.json.encode(self, order="sorted")

    @staticmethod
    def from_json(data: bytes, sections: Mapping[str, SectionForm]) -> "AdapterEntries":
        """Decodes and checks the entries.

        Args:
            data: the JSON.
            sections: name → form of the file's sections.

        Raises:
            CorruptEngineError: the JSON is not that of entries, or they do not fit the sections.
        """
        try:
            entries = msgspec.json.decode(data, type=AdapterEntries)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CorruptEngineError("the adapter cannot be used", str(error), PREPARE_AGAIN) from error
        _require(len(entries.invocation_tokens) <= MAX_INVOCATION_TOKENS, "too many tokens invoke it")
        _require(len({site.key for site in entries.sites}) == len(entries.sites), "two of its sites have one weight")
        for site in entries.sites:
            site.check(sections)
        return entries


class Factor(NamedTuple):
    """A or B, as r16_columns: (n, k) at (n // 16 · columns + k) · 16 + n % 16, with rows padded with zeros.

    In a layer of experts they are a matrix for each changed expert, one after another.
    """

    data: memoryview  # BFLOAT16, or INT8 if there are scales
    scale: memoryview | None = None  # FLOAT [rows], factors of the rows; None: there are none


@dataclass(frozen=True)
class AdapterPiece:
    """The matrices of one layer, for some rows of a site."""

    begin: int  # first of the rows
    count: int  # number of rows
    rank: int  # columns of B
    first_rank: int  # first row of A that B is multiplied with
    b: Factor  # B, [count, rank]


@dataclass(frozen=True)
class ReplacedRows:
    """Rows of a weight that an adapter has rows of its own for."""

    count: int  # number of rows
    ids: memoryview  # INT32 [count], rows of the weight, ascending
    rows: Factor  # the adapter's, [count, columns of the weight]


@dataclass(frozen=True)
class SiteAdapter:
    """The changes of one linear layer of the plan, of a layer of experts, or of a table."""

    rows: int  # rows of the layer's weight, or of an expert's matrix, N
    columns: int  # columns of the layer's weight, K
    rank: int  # rows of A, R, a multiple of RANK_ALIGN; 0: there is no A
    a: Factor  # A, [R, K], or [R, N] of a table; empty if there is none
    pieces: tuple[AdapterPiece, ...]  # pieces, in the order of their rows, none of which is in two
    bias: memoryview | None  # FLOAT [N], added to the bias of the engine; None: nothing is
    gain: memoryview | None  # FLOAT [N], factors of the engine's product without its bias; None: all are 1
    matrices: tuple[int, ...] = ()  # experts, ascending, or heads, that A and B have matrices for; empty: it has one
    shared: SharedFactor = ""  # the factor that is one matrix for all heads; "": there is none
    table: bool = False  # True if it is a table of embeddings
    replaced: ReplacedRows | None = None  # rows that are replaced; None: none are

    @classmethod
    def of(cls, entry: SiteEntry, sections: Sequence[memoryview]) -> "SiteAdapter":
        """Makes the changes of a site from its entry and the content of its sections.

        Args:
            entry: the entry.
            sections: the sections, in the order of `SiteEntry.forms`.

        Raises:
            CorruptEngineError: rows that are replaced are not in order, or not there.
        """
        views = list(sections)

        def factor() -> Factor:
            return Factor(views.pop(0), views.pop(0) if entry.dtype == "i8" else None)

        a = factor() if entry.rank else Factor(memoryview(b""))
        pieces = tuple(
            AdapterPiece(piece.begin, piece.count, piece.rank, piece.first_rank, factor()) for piece in entry.pieces
        )
        bias = views.pop(0) if entry.bias else None
        gain = views.pop(0) if entry.gain else None
        replaced = ReplacedRows(entry.replaced, views.pop(0), factor()) if entry.replaced else None
        if replaced is not None:
            _check_replaced(entry, np.frombuffer(replaced.ids, "<i4"), gain)
        matrices = entry.experts or tuple(range(entry.heads))
        sizes = entry.rows, entry.columns, entry.rank
        return cls(*sizes, a, pieces, bias, gain, matrices, entry.shared, entry.table, replaced)

    def sections(self) -> Sequence[memoryview]:
        """Lists the content of its sections in the order of `SiteEntry.forms`."""
        factors = [self.a] if self.rank else []
        views = [view for factor in (*factors, *(piece.b for piece in self.pieces)) for view in factor]
        views += [self.bias, self.gain]
        if self.replaced is not None:
            views += [self.replaced.ids, *self.replaced.rows]
        return [view for view in views if view is not None]


class AdapterFile:
    """An open adapter, whose matrices are in memory; close its file, or use it in `with`.

    A file that is altered or cut short later does no harm.

    Attributes:
        name: its name.
        content_hash: hash of its content.
        engine_hash: hash of the content of the engine that it is for.
        entries: the content of `adapter.json`.
        sites: key of a site of the engine → what is changed there.
        invocation_tokens: tokens that invoke it; empty: it is for all tokens.
        max_rank: the largest rank of a layer's matrices.
        num_bytes: bytes of all matrices and vectors.
    """

    def __init__(self, file: EngineFile, engine_hash: str) -> None:
        self.file = file
        self.name, self.content_hash = file.manifest.name, file.manifest.content_hash
        self.engine_hash = engine_hash
        self.entries = entries = AdapterEntries.from_json(file.read_section(ADAPTER), file.sections)
        self.invocation_tokens = entries.invocation_tokens
        self.sites: Mapping[str, SiteAdapter] = MappingProxyType({one.key: self._site(one) for one in entries.sites})
        pieces = (piece for site in self.sites.values() for piece in site.pieces)
        self.max_rank = max((piece.rank for piece in pieces), default=0)
        self.num_bytes = sum(form.nbytes for name, form in file.sections.items() if name.startswith(WEIGHTS))

    @classmethod
    def open(cls, path: str | Path) -> "AdapterFile":
        """Opens an adapter, and checks all of it.

        Args:
            path: the adapter's file.

        Raises:
            UsageError: there is no such file, or it is an engine or a checkpoint.
            CorruptEngineError: the file is cut short or altered, or its sites do not fit its matrices.
        """
        file = EngineFile.open(path, adapters=True)
        try:
            if (engine_hash := file.manifest.engine) is None:
                raise UsageError(
                    f"{path} is an engine, not an adapter",
                    fix="An adapter is what `engine adapter` writes, NAME.lora.",
                )
            return cls(file, engine_hash)
        except BaseException:
            file.close()
            raise

    def check_fits(self, engine: Manifest) -> None:
        """Checks that the adapter was prepared for an engine.

        Args:
            engine: the engine's manifest.

        Raises:
            UsageError: it was prepared for another one.
            CorruptEngineError: it changes weights that the engine does not have.
        """
        if engine.content_hash != self.engine_hash:
            raise UsageError(
                f"the adapter {self.name} does not belong to the engine {engine.name}",
                f"it was prepared for the content {self.engine_hash[:12]}…, and the engine's is "
                f"{engine.content_hash[:12]}…",
                PREPARE_AGAIN,
            )
        for key, site in self.sites.items():
            weight = key.removesuffix(TABLE) if site.table else key
            form = engine.sections.get(f"{WEIGHTS}{weight}")
            shape = () if form is None or form.shape is None else form.shape
            heads, experts = (len(site.matrices), ()) if site.shared else (1, site.matrices)
            fits = len(shape) == (3 if experts else 2) and shape[-2:] == (heads * site.rows, site.columns)
            _require(fits, f"the engine has no {weight} of {site.rows} × {site.columns}")
            _require(not experts or experts[-1] < shape[0], f"{weight} has no expert {experts[-1:]}")

    def first_position(self, prompt: Sequence[int]) -> int:
        """Finds the first position of a prompt that has the adapter: where it is invoked last, or the first one.

        Source: https://arxiv.org/abs/2504.12397 (activated LoRA).

        Args:
            prompt: token ids.

        Raises:
            UsageError: the prompt does not invoke it.
        """
        wanted = list(self.invocation_tokens)
        if not wanted:
            return 0
        for position in range(len(prompt) - len(wanted), -1, -1):
            if prompt[position] == wanted[0] and list(prompt[position : position + len(wanted)]) == wanted:
                return position
        raise UsageError(
            f"the adapter {self.name} is not invoked",
            f"the prompt does not have its invocation tokens {', '.join(map(str, wanted))}",
            "Ask the engine itself, or end the prompt with the text that the adapter was trained with.",
        )

    def close(self) -> None:
        """Closes the file; the matrices stay valid."""
        self.file.close()

    def __enter__(self) -> "AdapterFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _site(self, entry: SiteEntry) -> SiteAdapter:
        return SiteAdapter.of(entry, [memoryview(self.file.read_section(name)) for name in entry.forms()])


def _check_replaced(entry: SiteEntry, ids: NDArray[np.int32], gain: memoryview | None) -> None:
    """Refuses rows that are not there, or twice, and those to which the engine's product would be added."""
    inside = ids[0] >= 0 and ids[-1] < entry.rows and bool((np.diff(ids) > 0).all())
    _require(inside, f"the rows that {entry.weight} replaces are not in order, or not there")
    if gain is not None:
        _require(not np.frombuffer(gain, "<f4")[ids].any(), f"{entry.weight} replaces rows whose gain is not 0")


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise CorruptEngineError("the adapter cannot be used", fault, PREPARE_AGAIN)
