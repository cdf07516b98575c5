"""Ray Serve's request router for replicas of the server; the rule is that of `engine route`."""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from enginewright.ray.known import Hints, KnownReplicas


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Prefers the replica that has least to do for a request. Calls name their prompt by the argument `hints`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._known = KnownReplicas(max_lead=0)
        super().__init__(*arguments, **named)

    def initialize_state(self, max_lead: int) -> None:
        """Sets the number of requests that a replica may run beyond the least busy one, to reuse a prefix."""
        self._known.max_lead = max_lead

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in the order in which Ray tries them: a full one takes nothing.

        Args:
            candidate_replicas: the replicas that run.
            pending_request: the request.
        """
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranks = self._known.ranks(_hints(pending_request), list(by_id))
        return [[by_id[id] for id in rank] for rank in ranks]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forgets replicas that have ended."""
        self._known.keep({replica.replica_id.unique_id for replica in replicas})
        super().update_replicas(replicas)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Counts a request that is sent."""
        self._known.begun(replica_id.unique_id)
        super().on_send_request(replica_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remembers the prompt of a request that a replica has accepted.

        Args:
            pending_request: the request.
            replica_id: the replica.
            result: the result that will come.
        """
        self._known.takes(replica_id.unique_id, _hints(pending_request).keys)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Counts a request that has ended.

        Args:
            replica_id: the replica.
            internal_request_id: Ray's id of the request.
        """
        self._known.ended(replica_id.unique_id)


def _hints(request: PendingRequest | None) -> Hints:
    hints = None if request is None else request.kwargs.get("hints")
    return hints if isinstance(hints, Hints) else Hints()
