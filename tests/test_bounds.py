"""Compiled code reads and writes inside its arrays: its tests once more, with bounds checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAST_THE_END = """
import numpy as np
from outrider.draft.table.recycling import Matrix, _write
matrix = Matrix(np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32))
_write(matrix, np.array([3]), np.arange(1), np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32))
"""

TESTS = [f"tests/{name}" for name in ("draft", "grow", "runtime/native", "store", "core/test_noise.py")]


@pytest.mark.slow
def test_compiled_functions_stay_inside_their_arrays(tmp_path: Path) -> None:
    """In a cache of their own: a compiled function is kept without regard to whether bounds are checked."""
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True)

    planted = run("-c", PAST_THE_END)
    assert planted.returncode and "IndexError" in planted.stderr, "bounds are not checked"
    result = run("-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *TESTS)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
