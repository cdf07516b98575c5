"""The section `adapter_sites` of an engine: linear layers that adapters can change, and where their weights are from.

An adapter is trained for the layers of a checkpoint. An engine has these fused, reordered and multiplied by factors:

    weight[i, j] = row_factors[i] · stored[row, column_order[j]] · column_factors[j]

before it is quantized, where `stored`, [out, in], is the checkpoint's layer that row i of the site is from, and `row`
its row there. A missing vector of factors is all ones, and a missing order changes nothing.

The weight of a layer of experts is as many matrices, each from the same rows of an expert's own layers, whose names
have `{}` for the expert's number; or of a parameter with the matrices of all experts, whose name has none. That of a
layer of heads has a matrix for each head, which is its rows of one layer, or their transpose.

A table of embeddings is a site of its own, also where it is the weight of the output head.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from enginewright.engine_file import EngineFile
from enginewright.errors import CorruptEngineError, UsageError
from enginewright.manifest import MAX_BYTES, TABLE, WEIGHTS, SectionForm

ADAPTER_SITES = "adapter_sites"  # name of the section, and prefix of those of its vectors
EXPERT = "{}"  # an expert's number, in names of layers that each expert has
SiteKind = Literal["linear", "output_head", "table"]
BUILD_AGAIN = "Build it again with `engine build`."


class RowRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of one of the checkpoint's layers, one after another."""

    # Name of the layer, such as model.layers.0.self_attn.q_proj; of experts, model.layers.0.mlp.experts.{}.up_proj or
    # model.layers.0.mlp.experts.gate_up_proj
    module: str
    first: int  # first of its rows
    count: int  # number of rows


class Site(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A linear layer of the plan, or a table. Gates come before ups in a gated one. Vectors are names of sections."""

    weight: str  # name of its weight in the plan
    rows: int  # rows of the weight, or of an expert's matrix, N
    columns: int  # columns of the weight, K
    # Rows of the checkpoint's layers, in the order of the weight's unless `row_order` is there; of each expert
    runs: tuple[RowRun, ...]
    bias: str | None = (
        None  # name of its bias in the plan, which has the same rows; None: none that adapters can change
    )
    row_order: str | None = None  # I32 [N], position of each row of the weight among those of `runs`
    row_factors: str | None = None  # F32 [N] or [experts, N], factors of the weight's rows
    bias_factors: str | None = None  # F32 [N], factors of the bias
    column_factors: str | None = None  # F32 [K], or [experts, K] where experts differ, factors of columns
    column_order: str | None = None  # I32 [K], stored column of each column
    experts: int = 0  # matrices of the weight of a layer of experts; 0: it is none
    heads: int = 0  # matrices of the weight of a layer of heads, whose `runs` are of all of them; 0: it is none
    transposed: bool = False  # True if each head's matrix is its rows of the layer transposed, [K, N]
    # "output_head": the layer makes logits; "table": the weight is a table of embeddings, with a row for each token
    kind: SiteKind = "linear"

    @property
    def key(self) -> str:
        """Name of the site, which no other one has."""
        return self.weight + TABLE * (self.kind == "table")

    @property
    def matrices(self) -> int:
        """Matrices of the weight."""
        return self.experts or self.heads or 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight: [N, K], [experts, N, K] or [heads · N, K]."""
        matrices, rows = (self.experts,) if self.experts else (), self.rows * (self.heads or 1)
        return (*matrices, rows, self.columns)

    @property
    def stored_rows(self) -> int:
        """Rows of the checkpoint's layers that `runs` are: of an expert, or of all heads."""
        return (self.heads or 1) * (self.columns if self.transposed else self.rows)

    def vectors(self) -> Mapping[str, tuple[int, ...]]:
        """Lists its sections with their possible numbers of elements."""
        matrices, rows, columns = max(self.experts, 1), self.rows, self.columns
        lengths = {
            self.row_order: (self.stored_rows,),
            self.row_factors: (matrices * rows,),
            self.bias_factors: (rows,),
            self.column_factors: (columns, matrices * columns),
            self.column_order: (columns,),
        }
        return {name: possible for name, possible in lengths.items() if name is not None}


class AdapterSites(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All sites of an engine."""

    sites: tuple[Site, ...]  # sites, in the order of the plan's calls

    def to_json(self) -> bytes:
        """Encodes the sites as canonical JSON."""
        return msgspec.json.encode(self, order="sorted")

    @staticmethod
    def from_json(data: bytes, sections: Mapping[str, SectionForm]) -> "AdapterSites":
        """Decodes and checks the sites of an engine.

        Args:
            data: the JSON.
            sections: name → form of the engine's sections.

        Raises:
            CorruptEngineError: the JSON is not that of sites, or they do not fit the engine.
        """
        try:
            sites = msgspec.json.decode(data, type=AdapterSites)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise unusable(str(error)) from error
        sites.check(sections)
        return sites

    def check(self, sections: Mapping[str, SectionForm]) -> None:
        """Checks that sizes are sane, and that weights and vectors are there.

        Args:
            sections: name → form of the engine's sections.

        Raises:
            CorruptEngineError: they are not.
        """
        _require(len({site.key for site in self.sites}) == len(self.sites), "two sites have one weight")
        for site in self.sites:
            form = sections.get(f"{WEIGHTS}{site.weight}")
            counts = site.experts, site.heads
            possible = 0 <= min(counts) == 0 and max(counts) <= MAX_BYTES and (site.heads > 0 or not site.transposed)
            _require(possible, f"{site.weight} has an impossible number of experts or heads")
            plain = not (site.heads and (site.bias or site.row_factors or site.column_factors or site.column_order))
            _require(plain, f"{site.weight} is a layer of heads with factors")
            whole = len(site.runs) == 1 and not (site.row_order or max(counts))
            whole = whole and (site.kind != "table" or not (site.bias or site.vectors()))
            _require(whole or site.kind == "linear", f"{site.weight} is a head or a table of several layers")
            _require(form is not None and form.shape == site.shape, f"{site.weight} is no such weight")
            sane = all(0 <= run.first <= MAX_BYTES and 0 < run.count <= MAX_BYTES and run.module for run in site.runs)
            _require(sane, f"{site.weight} has impossible rows")
            _require(
                site.row_order is not None or sum(run.count for run in site.runs) == site.stored_rows,
                f"{site.weight} has other rows than its layers",
            )
            if site.bias is not None:
                form = sections.get(f"{WEIGHTS}{site.bias}")
                fits = form is not None and form.shape == (site.rows,) and not site.experts
                _require(fits, f"{site.bias} is no bias of {site.weight}")
            for name, lengths in site.vectors().items():
                fits = name in sections and sections[name].nbytes in [4 * length for length in lengths]
                _require(fits, f"{site.weight} has no vector {name} of {lengths[-1]} numbers")


def read_sites(file: EngineFile) -> AdapterSites:
    """Reads the sites of an engine.

    Args:
        file: the engine's file, open.

    Raises:
        UsageError: the engine has none.
        CorruptEngineError: the section is damaged.
    """
    if ADAPTER_SITES not in file.sections:
        raise UsageError(
            f"{file.path} cannot be used with adapters",
            "it does not generate text, was built with --rotate, or by an older release",
            BUILD_AGAIN,
        )
    return AdapterSites.from_json(file.read_section(ADAPTER_SITES), file.sections)


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise unusable(fault)


def unusable(fault: str) -> CorruptEngineError:
    """Makes the error for sites that cannot be; fault: what is wrong with them."""
    return CorruptEngineError("the engine's adapter sites cannot be used", fault, BUILD_AGAIN)
