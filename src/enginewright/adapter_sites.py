"""The section `adapter_sites` of an engine: linear layers that adapters can change, and where their weights are from.

An adapter is trained for the layers of a checkpoint. An engine has these fused, reordered and multiplied by factors:

    weight[i, j] = row_factors[i] · stored[row, column_order[j]] · column_factors[j]

before it is quantized, where `stored`, [out, in], is the checkpoint's layer that row i of the site is from, and `row`
its row there. A missing vector of factors is all ones, and a missing order changes nothing.
"""

from collections.abc import Mapping

import msgspec

from enginewright.engine_file import EngineFile
from enginewright.errors import CorruptEngineError, UsageError
from enginewright.manifest import MAX_BYTES, WEIGHTS, SectionForm

ADAPTER_SITES = "adapter_sites"  # name of the section, and prefix of those of its vectors
BUILD_AGAIN = "Build it again with `engine build`."


class RowRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of one of the checkpoint's layers, one after another."""

    module: str  # name of the layer, such as model.layers.0.self_attn.q_proj
    first: int  # first of its rows
    count: int  # number of rows


class Site(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A linear layer of the plan. Gates come before ups in a gated one. Vectors are names of sections."""

    weight: str  # name of its weight in the plan
    rows: int  # rows of the weight, N
    columns: int  # columns of the weight, K
    runs: tuple[
        RowRun, ...
    ]  # rows of the checkpoint's layers, in the order of the weight's unless `row_order` is there
    bias: str | None = (
        None  # name of its bias in the plan, which has the same rows; None: none that adapters can change
    )
    row_order: str | None = None  # I32 [N], position of each row of the weight among those of `runs`
    row_factors: str | None = None  # F32 [N], factors of the weight's rows
    bias_factors: str | None = None  # F32 [N], factors of the bias
    column_factors: str | None = None  # F32 [K], factors of columns
    column_order: str | None = None  # I32 [K], stored column of each column

    def vectors(self) -> Mapping[str, int]:
        """Lists its sections with their numbers of elements."""
        by_rows = (self.row_order, self.row_factors, self.bias_factors)
        lengths = {name: self.rows for name in by_rows if name is not None}
        return lengths | {name: self.columns for name in (self.column_factors, self.column_order) if name is not None}


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
        _require(len({site.weight for site in self.sites}) == len(self.sites), "two sites have one weight")
        for site in self.sites:
            form = sections.get(f"{WEIGHTS}{site.weight}")
            _require(form is not None and form.shape == (site.rows, site.columns), f"{site.weight} is no such weight")
            sane = all(0 <= run.first <= MAX_BYTES and 0 < run.count <= MAX_BYTES and run.module for run in site.runs)
            _require(sane, f"{site.weight} has impossible rows")
            _require(
                site.row_order is not None or sum(run.count for run in site.runs) == site.rows,
                f"{site.weight} has other rows than its layers",
            )
            if site.bias is not None:
                form = sections.get(f"{WEIGHTS}{site.bias}")
                _require(form is not None and form.shape == (site.rows,), f"{site.bias} is no bias of {site.weight}")
            for name, length in site.vectors().items():
                fits = name in sections and sections[name].nbytes == 4 * length
                _require(fits, f"{site.weight} has no vector {name} of {length} numbers")


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
            "it does not generate text, or an older release built it",
            BUILD_AGAIN,
        )
    return AdapterSites.from_json(file.read_section(ADAPTER_SITES), file.sections)


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise unusable(fault)


def unusable(fault: str) -> CorruptEngineError:
    """Makes the error for sites that cannot be; fault: what is wrong with them."""
    return CorruptEngineError("the engine's adapter sites cannot be used", fault, BUILD_AGAIN)
