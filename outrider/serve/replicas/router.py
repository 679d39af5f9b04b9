"""Ray Serve's choice of a replica, by the beginnings of texts that each has run."""

from __future__ import annotations

from typing import Any

from ray.serve._private.request_router.request_router import RequestRouter

from outrider.serve.replicas.affinity import Affinity


class PrefixRouter(RequestRouter):
    """Ray Serve makes one in the front's process."""

    def initialize_state(self, **_: Any) -> None:
        self.affinity = Affinity()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Each replica is a rank: the next one is asked only where those before it are full."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        return [[by_id[one]] for one in self.affinity.order(_beginnings(pending_request), by_id)]  # type: ignore[index]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        self.affinity.sent(_beginnings(pending_request), replica_id)
        result.add_done_callback(lambda *_: self.affinity.done(replica_id))


def _beginnings(pending_request: Any) -> list[str]:
    args: tuple[Any, ...] = pending_request.args if pending_request is not None else ()
    return list(args[1]) if len(args) > 1 else []
