"""A page of metrics in the form that a scraper accepts."""

from abc import abstractmethod
from collections.abc import Iterator

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry


class MetricsText(Collector):
    """The text of a process's metrics: those that `collect` gives, and memory, threads and the like of the process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Renders the metrics.

        Args:
            accept: the Accept header of the scraper.

        Returns:
            The text, and its content type.
        """
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    @abstractmethod
    def collect(self) -> Iterator[Metric]:
        """All metric families, each once."""

    def describe(self) -> list[Metric]:
        """An empty list; otherwise prometheus_client would collect once to learn the names."""
        return []
