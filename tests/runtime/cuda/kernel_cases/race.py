"""The race over scores against plain torch; `test_kernels.py` runs this file in a process of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.core.noise import on_device, race_scores
from outrider.core.numeric.picked import pick_score
from outrider.runtime.cuda.race import STRETCH, pick

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


@pytest.mark.parametrize("width", [5, 300, STRETCH, 3 * STRETCH + 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if GPU else torch.float16])
def test_it_says_what_the_races_in_torch_and_on_the_host_say(width: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(width)
    torch.manual_seed(width)
    rows = 24
    keys = rng.integers(0, 1 << 64, rows, dtype=np.uint64)
    temperatures = torch.tensor(rng.choice([1e-5, 0.3, 0.7, 1.0, 2.5], rows))
    whole = (3 * torch.randn(rows, width + 3)).to(dtype)
    whole[:, width // 2 : width // 2 + width // 4] = -torch.inf
    scores = whole.to(DEVICE)[:, :width]  # rows that do not follow each other without a gap
    got = pick(scores, temperatures.to(DEVICE), on_device(keys, DEVICE))
    assert got.dtype == torch.int64
    assert torch.equal(got, race_scores(scores, temperatures.to(DEVICE), on_device(keys, DEVICE)))
    host = [
        int(pick_score(row, temperature, key))
        for row, temperature, key in zip(scores.float().cpu().numpy(), temperatures.tolist(), keys, strict=True)
    ]
    assert got.tolist() == host


def test_keys_decide() -> None:
    scores, ones = torch.zeros(64, 700, device=DEVICE), torch.ones(64, dtype=torch.float64, device=DEVICE)
    keys = on_device(np.arange(64, dtype=np.uint64) * np.uint64(7919), DEVICE)
    assert len(set(pick(scores, ones, keys).tolist())) > 50
    assert torch.equal(pick(scores, ones, keys), pick(scores.flip(0), ones, keys))


def test_rows_without_a_race_change_nothing_of_the_others() -> None:
    torch.manual_seed(4)
    scores = torch.randn(6, 3 * STRETCH + 5).to(DEVICE)
    temperatures = torch.tensor([1.0, 0.0, 0.7, 0.0, 0.0, 1.3], dtype=torch.float64)
    keys = on_device(np.arange(3, 9, dtype=np.uint64), DEVICE)
    racing = temperatures > 0
    mixed, alone = (
        pick(scores[rows], temperatures[rows].to(DEVICE), keys[rows]).tolist() for rows in (racing | True, racing)
    )
    assert [token for token, one in zip(mixed, racing.tolist(), strict=True) if one] == alone
    assert all(0 <= token < scores.shape[1] for token in mixed)
