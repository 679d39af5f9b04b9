"""Log-probabilities of a prompt's tokens, where a request asks for them: read from the rows as the prompt runs.

Such a prompt runs whole: nothing of it is taken from the cache. Costs a softmax over the vocabulary for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from outrider.core.generation import TokenLogprob
from outrider.core.records import Chunk

if TYPE_CHECKING:
    from outrider.core.sequence import Running

TOGETHER = 64  # rows whose probabilities are in memory at once


def read_prompt(s: Running, chunk: Chunk) -> None:
    """Changes the sequence: what this stretch says of the tokens behind each of its own. The first token has none."""
    count = s.params.prompt_logprobs
    if count is None or chunk.scores.logits is None:
        return
    report = s.prompt_logprobs = [None] if s.prompt_logprobs is None else s.prompt_logprobs
    following = s.prompt[chunk.start + 1 : chunk.start + 1 + len(chunk.tokens)]
    known = len(report) - 1 - chunk.start  # of the stretch, where a sequence that was put back runs it again
    for first in range(max(known, 0), len(following), TOGETHER):
        tokens = following[first : first + TOGETHER]
        rows = torch.log_softmax(chunk.scores.logits[first : first + len(tokens)].float(), -1)
        report += _entries(rows, tokens, count)


def _entries(rows: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    said = rows[torch.arange(len(tokens)), torch.tensor(tokens, device=rows.device)].tolist()
    best = torch.topk(rows, min(count, rows.shape[-1])) if count else None
    ids = best.indices.tolist() if best is not None else [[]] * len(tokens)
    values = best.values.tolist() if best is not None else [[]] * len(tokens)
    return [
        TokenLogprob(int(token), chance, chance, tuple((i, v, v) for i, v in zip(row, found, strict=True)))
        for token, chance, row, found in zip(tokens, said, ids, values, strict=True)
    ]
