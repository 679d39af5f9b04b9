"""Team: threads that run one compiled function together, with barriers inside it that cost a fraction of a microsecond.

Between runs the threads sleep and cost nothing; the caller wakes them and takes part as thread 0. In a barrier they
spin, and after a while give the core away, so that a machine with more work than cores goes on.
"""

from __future__ import annotations

import os
import platform
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled

_ARRIVED, _FAILED = 8, 16  # places in `sync`, each on a cache line of its own
_SPINS = 2000  # before a core is given away: some tens of microseconds
_give_way = types.ExternalFunction("SwitchToThread" if platform.system() == "Windows" else "sched_yield", types.int32())


@intrinsic  # type: ignore[untyped-decorator]
def _count_up(_typing: Any, array: Any, place: Any) -> Any:
    """Adds 1 and says what was there before; what this thread wrote earlier can be seen by whoever reads it."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
        return builder.atomic_rmw("add", _address(context, builder, signature, given), ir.IntType(64)(1), "acq_rel")

    return types.int64(array, types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def _read(_typing: Any, array: Any, place: Any) -> Any:
    """What is there now, and with it all that its writer had written."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
        return builder.load_atomic(_address(context, builder, signature, given), "acquire", 8)

    return types.int64(array, types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def _pause(_typing: Any) -> Any:
    """Leaves the core's other thread more of it, where the processor has a way to say so."""

    def build(context: Any, builder: ir.IRBuilder, _signature: Any, _given: Sequence[ir.Value]) -> ir.Value:
        if platform.machine().lower() in ("x86_64", "amd64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])
        return context.get_dummy_value()

    return types.void(), build


def _address(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
    array = context.make_array(signature.args[0])(context, builder, given[0])
    return cgutils.gep(builder, array.data, given[1])


@compiled
def barrier(sync: NDArray[np.int64], count: int) -> None:
    """Nobody goes on before all `count` threads are here; for compiled functions that a team runs."""
    if count == 1:
        return
    until = (_count_up(sync, _ARRIVED) // count + 1) * count
    spins = 0
    while _read(sync, _ARRIVED) < until and _read(sync, _FAILED) == 0:
        spins += 1
        if spins > _SPINS:
            _give_way()
        else:
            _pause()


@dataclass(slots=True)
class _Desk:
    """What the caller and its threads share."""

    count: int
    sync: NDArray[np.int64] = field(default_factory=lambda: np.zeros(24, dtype=np.int64))
    job: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
    error: BaseException | None = None
    wake: list[threading.Lock] = field(default_factory=list)
    done: list[threading.Lock] = field(default_factory=list)

    def work(self, me: int) -> None:
        """Changes state: an error is kept, and nobody waits in a barrier for who left."""
        assert self.job is not None
        function, given = self.job
        try:
            function(me, self.count, self.sync, *given)
        except BaseException as error:
            self.error = self.error or error
            self.sync[_FAILED] = 1


class Team:
    """`run` may be called from any thread; one run at a time."""

    def __init__(self, threads: int) -> None:
        self.threads = max(threads, 1)
        self._open()
        _teams.add(self)

    def _open(self) -> None:
        self._lock, self._desk = threading.Lock(), _Desk(self.threads)

    def run(self, function: Callable[..., Any], *given: Any) -> None:
        """`function(me, count, sync, *given)`, compiled and free of the interpreter lock, on all threads at once.

        `me` is 0 .. count - 1, and `sync` is for `barrier`. Comes back when all are done; an error of any is raised.
        """
        with self._lock:
            desk = self._desk
            if self.threads > 1 and not desk.wake:
                self._hire(desk)
            desk.job, desk.error, desk.sync[:] = (function, given), None, 0
            for lock in desk.wake:
                lock.release()
            desk.work(0)
            for lock in desk.done:
                lock.acquire()
            desk.job, error, desk.error = None, desk.error, None
        if error is not None:
            raise error

    def _hire(self, desk: _Desk) -> None:
        """Changes state: the threads are started, asleep."""
        for me in range(1, self.threads):
            wake, done = threading.Lock(), threading.Lock()
            wake.acquire()
            done.acquire()
            desk.wake.append(wake)
            desk.done.append(done)
            threading.Thread(target=_member, args=(desk, me, wake, done), name=f"team-{me}", daemon=True).start()
        weakref.finalize(self, _dismiss, desk).atexit = False


def _member(desk: _Desk, me: int, wake: threading.Lock, done: threading.Lock) -> None:
    while True:
        wake.acquire()
        if desk.job is None:  # the team is gone
            return
        desk.work(me)
        done.release()


def _dismiss(desk: _Desk) -> None:
    for lock in desk.wake:
        lock.release()


_teams: weakref.WeakSet[Team] = weakref.WeakSet()


def _after_fork() -> None:
    """Threads do not live on in a child process: its teams begin anew."""
    for team in list(_teams):
        team._open()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
