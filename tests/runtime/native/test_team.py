"""Threads that run one compiled function: together, in step, with errors that reach the caller."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from outrider.runtime.native.kernels.team import Team, barrier


@njit(nogil=True)
def in_step(me: int, count: int, sync: NDArray[np.int64], steps: NDArray[np.int64], wrong: NDArray[np.int64]) -> None:
    """Everybody counts its rounds and looks, between two barriers, whether the others stand where it does."""
    for round_ in range(200):
        steps[me * 8] = round_
        barrier(sync, count)
        for other in range(count):
            wrong[me * 8] += steps[other * 8] != round_
        barrier(sync, count)


@njit(nogil=True)
def failing(me: int, count: int, sync: NDArray[np.int64], who: int) -> None:
    if me == who:
        raise ValueError("broken")
    barrier(sync, count)


@njit(nogil=True)
def adding(me: int, count: int, sync: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    out[me] += 1


def in_order(team: Team) -> bool:
    wrong = np.zeros(64, dtype=np.int64)
    team.run(in_step, np.full(64, -1), wrong)
    return not wrong.any()


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_nobody_passes_a_barrier_before_all_are_there(threads: int) -> None:
    team = Team(threads)
    assert all(in_order(team) for _ in range(3))
    out = np.zeros(threads, dtype=np.int64)
    team.run(adding, out)
    assert out.tolist() == [1] * threads


@pytest.mark.parametrize("who", [0, 1, 2])
def test_an_error_of_any_thread_is_raised_and_the_team_goes_on(who: int) -> None:
    team = Team(3)
    with pytest.raises(ValueError, match="broken"):
        team.run(failing, who)
    assert in_order(team)


def test_runs_from_several_threads_take_turns() -> None:
    team, out, fine = Team(2), np.zeros(2, dtype=np.int64), []

    def use() -> None:
        for _ in range(50):
            team.run(adding, out)
        fine.append(in_order(team))

    users = [threading.Thread(target=use) for _ in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert fine == [True] * 4 and out.tolist() == [200, 200]


def test_teams_side_by_side_and_their_threads_end_with_them() -> None:
    before = set(threading.enumerate())
    teams = [Team(2), Team(3)]
    assert all(in_order(team) for team in teams)
    started = set(threading.enumerate()) - before
    assert len(started) == 3
    gone = [weakref.ref(team) for team in teams]
    teams.clear()
    assert all(ref() is None for ref in gone)
    for thread in started:
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_team_works_in_a_child_process() -> None:
    team = Team(2)
    assert in_order(team)
    child = os.fork()
    if child == 0:
        os._exit(0 if in_order(team) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert in_order(team)


def test_the_interpreter_ends_while_a_team_sleeps() -> None:
    code = (
        "import numpy as np; from tests.runtime.native.test_team import *; "
        "t = Team(3); t.run(adding, np.zeros(3, np.int64))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
