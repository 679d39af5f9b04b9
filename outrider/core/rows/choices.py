"""Choices: the token that the target says at every row of a step, for all sequences in one pass over their rows.

On a GPU, where one row costs as much as all, and asking for a value costs a wait: penalties, bias, bans, masks,
truncation and the race with the target's noise, each in a few operations for all rows, and one transfer of the tokens.
The same tokens as `TargetRows` finds node by node, but where two times agree to about 1e-6. On the host that is left
to it: there a row costs what it costs, and most nodes of a tree are never asked for. So are sequences with a foreign
processor, a bound or a predicate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.core.legal import ban
from outrider.core.noise import StreamNoise, on_device, race_scores, target_keys
from outrider.core.protocols import Noise
from outrider.core.records import RowPicker
from outrider.core.rows.edits import edit_together
from outrider.core.target_rows import NONE_LEFT, TargetRows
from outrider.core.warping import cheap_together, truncate_together

LIMIT = 1 << 24  # scores worked on at once: what bounds the memory that it takes


@torch.inference_mode()
def choose(step: Sequence[tuple[TargetRows, Noise, bool]], pick: RowPicker | None = None) -> None:
    """Changes the rows that can be chosen together: each has its `chosen` then.

    With each goes the noise that chooses where it samples, and whether a rule is to ask for that at all.
    """
    if not step or not cheap_together(step[0][0].logits):
        return
    greedy, noises = list[TargetRows](), dict[TargetRows, StreamNoise]()
    for rows, noise, sampled in step:
        if rows.chosen is not None:
            continue
        if rows.greedy and _asks(rows):
            greedy.append(rows)
        elif not rows.greedy and sampled and isinstance(noise, StreamNoise) and _asks(rows):
            noises[rows] = noise
    found = [(part, _likeliest(part)) for part in _parts(greedy)]
    for part in _parts(noises):
        found.append((part, _drawn(part, [noises[rows] for rows in part], pick or race_scores)))
    if not found:
        return
    tokens, at = torch.cat([said for _, said in found]).tolist(), 0  # the only wait
    for part, _ in found:
        for rows in part:
            rows.chosen = tokens[at : at + len(rows.tree)]
            at += len(rows.tree)


def _asks(rows: TargetRows) -> bool:
    """Whether this is to be found out here. What its automaton fails with is for its own request, where it is asked."""
    if rows.history.one_by_one:
        return False
    try:
        if _settled(rows):
            return False
        rows.history.masks(rows.tree)
        return True
    except Exception:
        return False


def _settled(rows: TargetRows) -> bool:
    """Whether the likeliest tokens are known already, and nothing takes them away."""
    if not rows.greedy or rows.likeliest is None:
        return False
    if not rows.history.edits_rows:
        return True
    paths = (rows.tree.path_tokens(node) for node in range(len(rows.tree)))
    return all(
        not rows.history.reshapes(path) or rows.history.keeps(token, path)
        for token, path in zip(rows.likeliest, paths, strict=True)
    )


def _parts(step: Iterable[TargetRows]) -> Iterator[list[TargetRows]]:
    """As many sequences at once as memory is set aside for, and at least one."""
    part: list[TargetRows] = []
    size = 0
    for rows in step:
        if part and size + rows.logits.numel() > LIMIT:
            yield part
            part, size = [], 0
        part.append(rows)
        size += rows.logits.numel()
    if part:
        yield part


def _likeliest(part: Sequence[TargetRows]) -> Tensor:
    scores, dead = _scored(part)
    return _marked(scores.argmax(1), dead)


def _drawn(part: Sequence[TargetRows], noises: Sequence[StreamNoise], pick: RowPicker) -> Tensor:
    scores, dead = _scored(part)
    sizes, given = [len(rows.tree) for rows in part], [rows.history.params for rows in part]
    temperatures = np.repeat([p.temperature for p in given], sizes)
    cut = np.repeat([not rows.history.only_divided for rows in part], sizes)
    if cut.any():
        places = np.flatnonzero(cut)
        at = torch.from_numpy(places).to(scores.device, non_blocking=True)
        by = torch.from_numpy(temperatures[places].astype(np.float32)).to(scores.device, non_blocking=True)
        kept = truncate_together(
            scores[at].float() / by[:, None],
            np.repeat([p.top_k for p in given], sizes)[places],
            np.repeat([p.top_p for p in given], sizes)[places],
            np.repeat([p.min_p for p in given], sizes)[places],
        )
        scores = kept if cut.all() else scores.float().index_copy(0, at, kept)
        temperatures[places] = 1.0
    by = torch.from_numpy(temperatures).to(scores.device, non_blocking=True)
    return _marked(pick(scores, by, on_device(target_keys(noises, [rows.tree for rows in part]), scores.device)), dead)


def _marked(tokens: Tensor, dead: Tensor | None) -> Tensor:
    return tokens if dead is None else tokens.masked_fill(dead, NONE_LEFT)


def _scored(part: Sequence[TargetRows]) -> tuple[Tensor, Tensor | None]:
    """[rows, V]: all that comes before the temperature; and [rows] where nothing is left, where that can be."""
    scores = _gathered(part)
    if not any(rows.history.edits_rows for rows in part):
        return scores, None
    scores = scores.to(torch.float32, copy=True)
    paths = [(rows.history, rows.tree.path_tokens(node)) for rows in part for node in range(len(rows.tree))]
    edit_together(scores, [history.edits(path) for history, path in paths])
    words, masked, first = [], list[int](), 0
    for rows in part:
        if (row_words := rows.history.masks(rows.tree)) is not None:
            words.append(row_words)
            masked += range(first, first + len(rows.tree))
        first += len(rows.tree)
    if words:
        at = torch.tensor(masked).to(scores.device, non_blocking=True)
        scores[at] = ban(scores[at], np.concatenate(words))
    return scores, scores.amax(1) == -torch.inf


def _gathered(part: Sequence[TargetRows]) -> Tensor:
    """[rows, V] raw, in the model's dtype; a view where they lie side by side."""
    wholes = {id(rows.among[0]) if rows.among is not None else -1 for rows in part}
    if len(wholes) > 1 or part[0].among is None:
        return torch.cat([rows.logits for rows in part]) if len(part) > 1 else part[0].logits
    places = np.concatenate([np.arange(len(rows.tree)) + rows.among[1] for rows in part if rows.among is not None])
    first, last = int(places[0]), int(places[-1]) + 1
    if (np.diff(places) == 1).all():
        return part[0].among[0][first:last]
    return part[0].among[0][torch.from_numpy(places).to(part[0].logits.device, non_blocking=True)]
