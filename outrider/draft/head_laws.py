"""Laws from the logits of a trained head over some of the target's tokens: one transfer to the host for all rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.draft.top_rows import largest
from outrider.tree import QRow

NOTHING = QRow(np.empty(0, dtype=np.int64), np.empty(0))  # the law of a drafter that has nothing to say


def head_laws(logits: Tensor, heat: Sequence[float], ids: Tensor, width: int) -> list[QRow]:
    """One law a row of [rows, vocabulary] at the row's temperature: its `width` likeliest tokens, likeliest first."""
    scaled = logits.float()
    if any(own != 1.0 for own in heat):
        scaled = scaled / torch.tensor(heat, device=logits.device)[:, None]
    every = scaled.softmax(-1)
    if every.device.type == "cpu":
        places, probs = largest(every.numpy(), width)
        found = ids.numpy()[places]
    else:
        kept, at = every.topk(width, dim=-1)
        probs, found = kept.cpu().numpy(), ids[at].cpu().numpy()
    pairs = zip(found, probs.astype(float), strict=True)
    return [QRow(i, p) if p[-1] > 0 else QRow(i[p > 0], p[p > 0]) for i, p in pairs]
