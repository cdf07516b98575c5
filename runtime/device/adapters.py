"""The adapters of an engine on its device: the extended plan, the number of slots, and the memory that they take."""

from collections.abc import Mapping, Sequence

from enginewright.adapter_file import AdapterFile, AdapterPiece, SiteAdapter
from enginewright.adapter_plan import site_rank, with_adapters
from enginewright.adapter_sites import Site
from enginewright.errors import UsageError
from enginewright.plan import Plan
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.engine import Engine
from enginewright.targets import CPU

GPU_SLOTS = 8  # adapters of a step by default on a GPU, where each takes memory from the start
ALIGN = 16  # alignment of a factor or vector in a slot, in bytes
CHANGE_BYTES, PIECE_BYTES = 48, 32  # of csrc/cuda/adapters.cuh: a SiteChange, and an AdapterPiece
BLOCK_ROWS = 16  # rows of a factor are padded to a multiple of this (r16_columns)


def num_slots(engine: Engine, config: RuntimeConfig) -> int:
    """Number of adapters that a step may have.

    Args:
        engine: the open engine.
        config: limits, with `enable_lora`.
    """
    default = config.max_num_seqs if engine.target == CPU else min(config.max_num_seqs, GPU_SLOTS)
    return config.max_loras or default


def served_sites(engine: Engine) -> Sequence[Site]:
    """Lists the layers that adapters can change on the engine's device.

    On a GPU these are the plain linear layers, without those that have a matrix for each expert or head, the output
    head, and tables of embeddings.
    """
    sites = engine.adapter_sites.sites
    return sites if engine.target == CPU else [site for site in sites if site.matrices == 1 and site.kind == "linear"]


def model_plan(engine: Engine, config: RuntimeConfig) -> Plan:
    """Returns the plan of an engine's own model.

    Args:
        engine: the open engine.
        config: limits; `enable_lora` extends the plan.

    Raises:
        UsageError: the engine cannot have adapters, or not on this device.
    """
    if not config.enable_lora:
        return engine.plan
    sites = served_sites(engine)
    if engine.target != CPU and engine.plan.adapting is None:
        raise UsageError(
            f"{engine.file.path} cannot be used with adapters on a GPU",
            "it has no code for them, since an older release built it",
            "Build it again with `engine build`.",
        )
    return with_adapters(engine.plan, sites, config.max_lora_rank, num_slots(engine, config))


def adapter_bytes(engine: Engine, config: RuntimeConfig) -> int:
    """Computes the bytes of all slots on a GPU. On a CPU, kernels use the factors in the memory of `AdapterFile`."""
    if not config.enable_lora or engine.target == CPU:
        return 0
    return num_slots(engine, config) * slot_bytes(served_sites(engine), config.max_lora_rank)


def aligned(num_bytes: int) -> int:
    """Rounds up to a multiple of ALIGN."""
    return -(-num_bytes // ALIGN) * ALIGN


def slot_bytes(sites: Sequence[Site], max_rank: int) -> int:
    """Computes the bytes of a slot, which hold any adapter with this rank, and a piece for each run of rows of a layer.

    Args:
        sites: the engine's sites.
        max_rank: largest rank of a module.
    """
    total = aligned(CHANGE_BYTES * len(sites))
    for site in sites:
        pieces, ranks = len(site.runs), site_rank(site, max_rank)
        padded = site.rows + BLOCK_ROWS * pieces  # rows of B
        total += 2 * (ranks * site.columns + padded * max_rank) + 4 * (ranks + padded + 2 * site.rows)
        total += PIECE_BYTES * (2 * pieces + 1) + ALIGN * (2 * pieces + 5)
    return aligned(total)


def bytes_in_slot(adapter: AdapterFile, num_sites: int) -> int:
    """Computes the bytes that an adapter takes in a slot.

    Args:
        adapter: the adapter.
        num_sites: number of the engine's sites.
    """
    total = aligned(CHANGE_BYTES * num_sites)
    for site in adapter.sites.values():
        total += sum(aligned(view.nbytes) for view in views_of(site))
        total += aligned(PIECE_BYTES * len(without_gaps(site)))
    return total


def views_of(site: SiteAdapter) -> Sequence[memoryview]:
    """Lists the matrices and vectors of a site."""
    factors = [site.a, *(piece.b for piece in site.pieces)]
    views = [view for factor in factors for view in (factor.data, factor.scale)]
    return [view for view in (*views, site.bias, site.gain) if view is not None and view.nbytes]


def without_gaps(site: SiteAdapter) -> Sequence[tuple[int, int, AdapterPiece | None]]:
    """Lists begin, count and piece of a site's rows, ascending; None for rows between pieces. Together all rows."""
    found, end = list[tuple[int, int, AdapterPiece | None]](), 0
    for piece in site.pieces:
        if piece.begin > end:
            found.append((end, piece.begin - end, None))
        found.append((piece.begin, piece.count, piece))
        end = piece.begin + piece.count
    if end < site.rows:
        found.append((end, site.rows - end, None))
    return found


def check_slot(adapter: AdapterFile, engine: Engine, config: RuntimeConfig) -> None:
    """Checks that an adapter for an engine fits into a slot.

    Raises:
        UsageError: it has other layers than the engine's sites, or more ranks than they may have; or it changes layers
            that cannot have adapters on a GPU.
    """
    by_key: Mapping[str, Site] = {site.key: site for site in served_sites(engine)}
    if engine.target != CPU:
        others = [site.key for site in engine.adapter_sites.sites if site.key not in by_key]
        changed = adapter.sites.keys() & others
        changed |= {key for key, change in adapter.sites.items() if change.replaced is not None}
        if changed:
            raise UsageError(
                f"the adapter {adapter.name} cannot be used on a GPU",
                f"it changes {min(changed)}, and layers of experts or of heads, the output head and embeddings can "
                "have adapters on CPUs alone",
                "Merge it at build: engine build --merge ADAPTER.",
            )
    for key, change in adapter.sites.items():
        site = by_key.get(key)
        if site is None or change.rank > site_rank(site, config.max_lora_rank):
            why = "no adapter can change it" if site is None else f"it has {change.rank} rows of A there"
            raise _no_slot(adapter, f"{why}: {key}")
    space = slot_bytes(served_sites(engine), config.max_lora_rank)
    if engine.target != CPU and (needed := bytes_in_slot(adapter, len(by_key))) > space:
        raise _no_slot(adapter, f"it takes {needed} bytes on the GPU, and a slot has {space}")


def _no_slot(adapter: AdapterFile, why: str) -> UsageError:
    fix = "Prepare it again with `engine adapter`, from what PEFT saves."
    return UsageError(f"the adapter {adapter.name} cannot be used", why, fix)
