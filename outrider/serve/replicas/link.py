"""`EngineLink` over replicas: the front keeps what every request said so far, and a dead replica costs it nothing.

Ray Serve starts the replicas, starts dead ones again and routes; nothing of it answers HTTP. A request whose replica
dies is asked for again from its tokens and its seed, wherever there is room, and its stream goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from outrider.core.errors import ClosedEngine, InputError, MissingExtra, OutriderError
from outrider.core.generation import FinishReason
from outrider.serve.link.seam import STATS, End, Event, EventStream, Info, Request
from outrider.serve.process.active import Active
from outrider.serve.process.link import FRUITLESS
from outrider.serve.process.records import pack_request, unpack_error, unpack_event, unpack_info
from outrider.serve.replicas.affinity import beginnings
from outrider.serve.replicas.confine import HOOK, LOOPBACK, confine_node, confine_process

log = logging.getLogger("outrider")
Routing = Literal["prefix", "random"]
APP = "outrider"
OBJECTS = 128 << 20  # bytes of Ray's store of objects: events are small
WAITING = 256  # requests of one replica, those that wait among them
PAUSE_S = 0.05  # before a request whose replica died is sent again
NO_TOKEN = f"{FRUITLESS} replicas died without a token of this request"


class ReplicasLink:
    """`load` is what `outrider.load` takes, as JSON values; `limits` what each replica's `LocalLink` takes."""

    def __init__(
        self, load: Mapping[str, Any], replicas: int, *, limits: Mapping[str, int | None] | None = None,
        routing: Routing = "prefix",
    ) -> None:  # fmt: skip
        if replicas < 1:
            raise InputError(f"{replicas} replicas: use at least 1")
        self._settings, self._limits, self._replicas, self._routing = dict(load), dict(limits or {}), replicas, routing
        self._handle: Any = None
        self._info: Info | None = None
        self._active: dict[str, Active] = {}
        self._reading: dict[str, set[asyncio.Task[None]]] = {}
        self._counts: Counter[str] = Counter()
        self._closing = False
        self.resumed = 0  # requests that went on in another replica

    async def start(self) -> None:
        confine_node()
        try:
            import ray.serve  # noqa: F401
        except ImportError as error:
            raise MissingExtra("several replicas need the package ray; run: pip install 'outrider[ray]'") from error
        self._handle = await asyncio.to_thread(self._run_replicas)
        self._info = unpack_info(await self._handle.info.remote())

    @property
    def info(self) -> Info:
        assert self._info is not None, "start the replicas first"
        return self._info

    @property
    def ready(self) -> bool:
        return self._info is not None and not self._closing

    async def submit(self, request: Request) -> EventStream:
        if not self.ready:
            raise ClosedEngine("the replicas have not started, or the server is closing")
        if request.id in self._active:
            raise InputError(f"request_id {request.id!r} is in use; give each request its own")
        active = Active.of(request, self._left)
        self._active[request.id] = active
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._read(active, request, taken)
        try:
            await taken
        except BaseException:
            self._forget(active)
            raise
        return active.stream

    async def cancel(self, id: str) -> bool:
        active = self._active.get(id)
        if active is None:
            return False
        self._end(active, FinishReason.CANCELLED, "")
        return True

    async def stats(self) -> Mapping[str, Any]:
        """Of what ended, all replicas together; what runs is counted here."""
        return {**self._counts, "running": len(self._active), "restarts": self.resumed}

    async def slots(self) -> list[Mapping[str, Any]]:
        now = time.monotonic()
        return [
            {
                "id": active.request.id, "sample": sample, "slot": -1, "running": True,
                "method": active.request.method or self.info.method, "prompt_tokens": len(active.request.prompt),
                "new_tokens": len(active.said[sample]), "cached_tokens": 0,
                "max_new_tokens": active.request.params.max_new_tokens, "seconds": now - active.begun,
            }
            for active in self._active.values()
            for sample in active.left()
        ]  # fmt: skip

    async def trace(self, id: str) -> Mapping[str, Any] | None:
        """Not kept: it stays with the replica that ran the request."""
        return None

    async def close(self, seconds: float = 0.0) -> None:
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._active:
                    await asyncio.sleep(PAUSE_S)
        for active in list(self._active.values()):
            self._end(active, FinishReason.CANCELLED, "")
        await asyncio.to_thread(_stop)

    def _run_replicas(self) -> Any:
        """Changes the process: a Ray node of its own, on the loopback address, and the replicas in it."""
        import ray
        import torch
        from ray import serve
        from ray.serve.config import RequestRouterConfig

        from outrider.serve.replicas.replica import Replica

        if ray.is_initialized():
            raise InputError("Ray runs in this process already; start the server in one of its own")
        confine_process()
        ray.init(
            address="local", _node_ip_address=LOOPBACK, include_dashboard=False, log_to_driver=False,
            object_store_memory=OBJECTS, num_cpus=self._replicas + 1, configure_logging=False,
            runtime_env={"worker_process_setup_hook": HOOK},
        )  # fmt: skip
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        more: dict[str, Any] = {}
        if self._routing == "prefix":
            from outrider.serve.replicas.router import PrefixRouter

            more["request_router_config"] = RequestRouterConfig(request_router_class=PrefixRouter)
        deployment = serve.deployment(
            Replica, name="Replica", num_replicas=self._replicas, max_ongoing_requests=WAITING, user_config={},
            ray_actor_options={"num_cpus": 0, "num_gpus": 1 if torch.cuda.is_available() else 0},
            health_check_period_s=1, graceful_shutdown_timeout_s=1, **more,
        )  # fmt: skip
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR", "enable_access_log": False})
        return serve.run(deployment.bind(self._settings, self._limits), name=APP, route_prefix=None)

    # -- requests

    def _read(self, active: Active, request: Request, taken: asyncio.Future[None] | None = None) -> None:
        tasks = self._reading.setdefault(active.request.id, set())
        task = asyncio.get_running_loop().create_task(self._follow(active, request, taken))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _follow(self, active: Active, request: Request, taken: asyncio.Future[None] | None) -> None:
        """Pass on what one replica says, until it has said all or died; then ask another one for the rest."""
        from ray.exceptions import RayActorError, RayError, RayTaskError

        try:
            replies = self._handle.options(stream=True).run.remote(
                pack_request(request), beginnings(request.prompt, request.salt)
            )
            try:
                async for kind, *rest in replies:
                    self._hear(active, kind, rest, taken)
            finally:
                replies.cancel()
            return
        except RayTaskError as error:  # of ours, not of Ray: no other replica would do better
            self._fail(active, str(error).strip().splitlines()[-1], taken)
            return
        except (RayActorError, RayError) as error:
            log.warning("a replica died with request %s; it goes on in another: %s", request.id, type(error).__name__)
        if active.request.id not in self._active:
            return
        active.fruitless = 0 if active.progress else active.fruitless + 1
        active.progress = False
        if active.fruitless >= FRUITLESS:
            self._fail(active, NO_TOKEN, taken)
            return
        self.resumed += 1
        await asyncio.sleep(PAUSE_S)
        mine = {request.sample} if request.params.n == 1 else set(active.left())
        for again in active.again():
            if again.sample in mine or again.params.n > 1:
                self._read(active, again, taken)

    def _hear(self, active: Active, kind: str, rest: list[Any], taken: asyncio.Future[None] | None) -> None:
        if kind == "event":
            self._pass_on(active, unpack_event(rest[0]))
        elif kind == "taken":
            if taken is not None and not taken.done():
                taken.set_result(None)
        else:
            self._refuse(active, unpack_error(rest[0]), taken)

    def _pass_on(self, active: Active, event: Event) -> None:
        if active.request.id not in self._active:
            return
        active.hear(event)
        if isinstance(event, End):
            self._count(event)
            if not active.left():
                self._forget(active)
        active.stream.put([event])

    def _count(self, end: End) -> None:
        self._counts["requests"] += 1
        for name in STATS:
            self._counts[name] += end.stats.get(name, 0)

    def _refuse(self, active: Active, error: Exception, taken: asyncio.Future[None] | None) -> None:
        if taken is not None and not taken.done():
            taken.set_exception(error)
        else:
            self._end(active, FinishReason.ERROR, str(error))

    def _fail(self, active: Active, reason: str, taken: asyncio.Future[None] | None) -> None:
        self._refuse(active, OutriderError(reason), taken)

    def _left(self, id: str) -> None:
        """Whoever read it does not any more."""
        if (active := self._active.get(id)) is not None:
            self._end(active, FinishReason.CANCELLED, "")

    def _end(self, active: Active, finish: FinishReason, error: str) -> None:
        """Changes state: here at once; a replica hears it as its reader leaves."""
        ends = active.ends(finish, error)
        tasks = self._reading.get(active.request.id, set())
        self._forget(active)
        for task in tuple(tasks):
            if task is not asyncio.current_task():
                task.cancel()
        active.stream.put(ends)

    def _forget(self, active: Active) -> None:
        self._active.pop(active.request.id, None)
        self._reading.pop(active.request.id, None)


def _stop() -> None:
    import ray
    from ray import serve

    with contextlib.suppress(Exception):  # a node that is gone already has stopped, too
        serve.shutdown()
    ray.shutdown()
