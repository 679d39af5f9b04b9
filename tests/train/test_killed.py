"""`kill -9` in the middle of the commands: run again, they end with the numbers of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from outrider.cli import app
from outrider.models import LoadedModel
from outrider.train.loop import CHECKPOINT

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(four_layers: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    four_layers.model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the killed process has: sums over several threads may have other last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(*command: str) -> list[str]:
    return ["train", *command, "--device", "cpu"]


def undisturbed(command: list[str]) -> None:
    """In this process, which saves the seconds that a new one takes to begin."""
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output


def killed(command: list[str], when: Path) -> None:
    """Started as a process, and killed as soon as that file is there."""
    with subprocess.Popen(
        [sys.executable, "-m", "outrider", *command],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    ) as process:  # fmt: skip
        while process.poll() is None and not when.exists():
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"it ended before: {process.stderr.read() if process.stderr else ''}"


def shards(folder: Path) -> dict[str, dict[str, list[Any]]]:
    """All that the folder holds; what a killed process was writing has another name."""
    return {
        path.name: {name: tensor.tolist() for name, tensor in load_file(path).items()}
        for path in sorted(folder.iterdir())
        if not path.name.endswith(".partial")
    }


def test_killed_commands_lose_nothing_and_repeat_nothing(model: Path, tmp_path: Path) -> None:
    def data(folder: str) -> list[str]:
        sizes = "--tokens 8k --length 32 --shard 32".split()
        return train("data", "--model", str(model), "--out", str(tmp_path / folder), *sizes)

    killed(data("cut"), tmp_path / "cut" / "shard-0001.safetensors")
    found = list(shards(tmp_path / "cut"))
    assert 2 <= len(found) < 8
    before = {name: (tmp_path / "cut" / name).stat().st_mtime_ns for name in found}
    undisturbed(data("cut"))
    undisturbed(data("whole"))
    assert shards(tmp_path / "cut") == shards(tmp_path / "whole") and len(shards(tmp_path / "whole")) == 8
    assert all((tmp_path / "cut" / name).stat().st_mtime_ns == at for name, at in before.items())

    def run(folder: str) -> list[str]:
        sizes = "--steps 250 --batch 2 --vocab 40 --unroll 1 --layers 1,2,3 --checkpoint-every 25 -o held_out=4".split()
        text = str(tmp_path / "whole")
        return train("run", "--model", str(model), "--data", text, "--out", str(tmp_path / folder), *sizes)

    killed(run("drafter"), tmp_path / "drafter" / CHECKPOINT)
    assert not (tmp_path / "drafter" / "drafter.json").exists()
    undisturbed(run("drafter"))
    undisturbed(run("other"))
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("drafter", "other"))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
    assert not (tmp_path / "drafter" / CHECKPOINT).exists()
