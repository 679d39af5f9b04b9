"""The Triton kernels, in a process of their own: without a GPU Triton must start as an interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

CASES = sorted((Path(__file__).parent / "kernel_cases").glob("*.py"))


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_kernels() -> None:
    """One process for all files: half of what a file takes is the start."""
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", *map(str, CASES), "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
