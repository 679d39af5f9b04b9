"""Laws from the logits of a trained head over some of the target's tokens: one transfer to the host for all rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.tree import QRow

NOTHING = QRow(np.empty(0, dtype=np.int64), np.empty(0))  # the law of a drafter that has nothing to say


def head_laws(logits: Tensor, heat: Sequence[float], ids: Tensor, width: int) -> list[QRow]:
    """One law a row of [rows, vocabulary] at the row's temperature: its `width` likeliest tokens, likeliest first."""
    scaled = logits.float() / torch.tensor(heat, device=logits.device)[:, None]
    values, places = scaled.topk(width, dim=-1)
    probs = (values - scaled.logsumexp(-1, keepdim=True)).double().exp().cpu().numpy()
    found = ids[places].cpu().numpy()
    return [QRow(i[p > 0], p[p > 0]) for i, p in zip(found, probs, strict=True)]
