"""GET /metrics of the proxy. Labels are its routes, statuses, and the replicas of its command line."""

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from enginewright.route.fleet import Fleet
from enginewright.route.prefixes import CHUNK_BYTES
from enginewright.route.replica import Replica
from enginewright.runtime.server.exposition import MetricsText

PREFIX = "enginewright_route_"


class RouteMetrics(MetricsText):
    """The text of the proxy's metrics.

    Args:
        fleet: the replicas.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        super().__init__()

    def collect(self) -> Iterator[Metric]:
        """All metric families."""
        answers = CounterMetricFamily(PREFIX + "requests", "Requests, by route and status.", labels=["route", "status"])
        for (route, status), count in self._fleet.answers.items():
            answers.add_metric([route, status], count)
        yield answers
        attempts = CounterMetricFamily(
            PREFIX + "attempts",
            "Requests sent to a replica, by its status, or by refused, lost or gone.",
            labels=["replica", "outcome"],
        )
        for replica in self._fleet.all:
            for outcome, count in replica.outcomes.items():
                attempts.add_metric([replica.name, outcome], count)
        yield attempts
        yield self._gauge("replica_up", "Whether the replica takes requests: 1, or 0.", lambda one: one.is_healthy)
        yield self._gauge("replica_requests_running", "Requests at the replica.", lambda one: len(one.running))
        yield self._counter(
            "replica_ejections", "Times that no more requests were sent.", lambda one: one.num_ejections
        )
        answered, matched = "Prompts that were answered.", "Those that the replica had answered before."
        yield self._counter("prompt_bytes", answered, lambda one: one.prompt_chunks * CHUNK_BYTES)
        yield self._counter("prompt_matched_bytes", matched, lambda one: one.matched_chunks * CHUNK_BYTES)
        moves = CounterMetricFamily(PREFIX + "session_moves", "Sessions that went on at another replica.", labels=[])
        moves.add_metric([], self._fleet.sessions.num_moves)
        yield moves
        buckets, total = self._fleet.first_byte.buckets()
        first_byte = HistogramMetricFamily(
            PREFIX + "first_byte_seconds", "Until the first byte of an answer.", labels=[]
        )
        first_byte.add_metric([], buckets, total)
        yield first_byte

    def _gauge(self, name: str, text: str, value: Callable[[Replica], float]) -> Metric:
        return self._by_replica(GaugeMetricFamily(PREFIX + name, text, labels=["replica"]), value)

    def _counter(self, name: str, text: str, value: Callable[[Replica], float]) -> Metric:
        return self._by_replica(CounterMetricFamily(PREFIX + name, text, labels=["replica"]), value)

    def _by_replica(self, family: GaugeMetricFamily | CounterMetricFamily, value: Callable[[Replica], float]) -> Metric:
        for replica in self._fleet.all:
            family.add_metric([replica.name], value(replica))
        return family
