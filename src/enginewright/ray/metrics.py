"""One page of metrics from those of all replicas."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


def merged(pages: Mapping[str, str]) -> bytes:
    """Joins pages in Prometheus' text format. Each value gets the label `replica`.

    Args:
        pages: the pages by the ids of their replicas.
    """
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in text_string_to_metric_families(page):
            joined = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            joined.samples += [one._replace(labels={"replica": replica, **one.labels}) for one in family.samples]
    registry = CollectorRegistry()
    registry.register(_Families(list(families.values())))
    return generate_latest(registry)


class _Families:
    """A collector of metrics that exist already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
