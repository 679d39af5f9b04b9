"""Two processes that a launcher started train what one process trains on the joint batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.core.errors import InputError
from outrider.train.crew import Crew, crew
from outrider.train.kinds.registry import find_kind, plan_of, train_drafter
from outrider.train.text.selfdata import DataPlan, SelfData, write_data
from tests.train.conftest import make_markov

pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.train.test_crew import work
work(Path(sys.argv[2]))
"""


def work(folder: Path) -> None:
    """What every process does."""
    target = make_markov()
    text = write_data(target, DataPlan(tokens=64 * 24, length=24, batch=64), folder / os.environ.get("RANK", "0"))
    text.roles[::3, :12] = 1  # so that shares of a batch hold different numbers of answer tokens
    settings = {"steps": 5, "batch": 6, "lr": 0.02, "vocab": 48, "unroll": 2, "layers": "1,2,3", "held_out": 8}
    plan = plan_of(find_kind("eagle3"), settings)
    train_drafter("eagle3", target, text, plan, folder / "drafter", measure_every=5)


def launched(folder: Path, processes: int) -> None:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    done = subprocess.run(
        [*launcher, str(script), str(ROOT), str(folder)], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_two_processes_take_the_steps_of_the_joint_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    work(tmp_path / "one")
    launched(tmp_path / "two", 2)
    assert all((tmp_path / "two" / str(rank)).exists() for rank in range(2))
    one, two = (load_file(tmp_path / name / "drafter" / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=2e-3, atol=2e-3)  # half precision on disk


def test_one_process_alone_is_its_own_crew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = crew()
    batch = SelfData(torch.zeros(2, 4), torch.zeros(2, 4))
    assert alone.first and alone.device is None and alone.share(batch) is batch


def test_a_batch_smaller_than_the_crew_is_refused() -> None:
    class Three:
        num_processes, process_index = 3, 0

    with pytest.raises(InputError, match="2 sequences is too small for 3 processes; raise --batch"):
        Crew(Three()).share(SelfData(torch.zeros(2, 4), torch.zeros(2, 4)))
