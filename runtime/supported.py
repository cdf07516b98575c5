"""What this release can run of a plan; the rest is refused by name."""

from enginewright.errors import NoCodeForMachineError
from enginewright.plan import PagedCache, Plan


def paged_caches(plan: Plan) -> tuple[PagedCache, ...]:
    """The plan's caches, all of which are paged.

    Raises:
        NoCodeForMachineError: one of them is of another kind.
    """
    paged = tuple(cache for cache in plan.caches if isinstance(cache, PagedCache))
    if len(paged) != len(plan.caches):
        other = next(cache for cache in plan.caches if not isinstance(cache, PagedCache))
        raise NoCodeForMachineError(
            f"the engine keeps a {type(other).__name__} of {len(other.layers)} of its layers",
            "this release has executors for paged caches alone",
            "Run it with the release that built it.",
        )
    return paged
