"""A rank that dies is a named error for the caller, and a caller that dies leaves no rank behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import outrider
from outrider.runtime.ranks.group import RankLost
from outrider.runtime.ranks.leader import LeadingTarget


def test_a_rank_that_dies_ends_the_request_with_its_name(folders: dict[str, str]) -> None:
    engine = outrider.load(folders["target"], "plain", tensor_parallel=2, max_context=128)
    target = engine.target
    assert isinstance(target, LeadingTarget)
    (other,) = target.group.processes
    handle = engine.submit([5, 6, 7, 8], max_new_tokens=100)
    for _ in range(3):
        engine.step()
    os.kill(other.pid, signal.SIGKILL)
    with pytest.raises(RankLost, match="rank 1 of 2 was killed by signal 9"):
        while not handle.done:
            engine.step()
        handle.results()
    with pytest.raises(RankLost, match="load it again"):
        engine.generate([1, 2, 3], max_new_tokens=3)
    engine.close()


def test_the_other_ranks_end_with_rank_0(folders: dict[str, str], tmp_path: Path) -> None:
    said = tmp_path / "pid"
    script = (
        "import os, pathlib, sys, outrider\n"
        f"engine = outrider.load({folders['target']!r}, 'plain', tensor_parallel=2, max_context=64)\n"
        f"pathlib.Path({str(said)!r}).write_text(str(engine.target.group.processes[0].pid))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=120)
    pid = int(said.read_text())
    for _ in range(100):
        if not _runs(pid):
            return
        time.sleep(0.1)
    pytest.fail("rank 1 outlived rank 0 by ten seconds")


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"
