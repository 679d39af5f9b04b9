"""Linear attention with decays, in one pass over a tree: Mamba-2, lightning attention, the gated delta rule.

    h_t = exp(a_t) h_parent(t) + v_t k_t^T        y_t = h_t q_t

An ancestor's part in h_t is what it wrote times the decays on the path between, a difference of accumulated
log-decays. So all rows follow from the one committed state, and no state is built for any of them:

    S_t = sum of a over t and its ancestors       y_t = exp(S_t) h q_t + sum over ancestors s of exp(S_t - S_s) (q_t k_s) v_s

The delta rule writes what is missing, u_t = beta_t (v_t - what h_t holds under k_t already), which depends on what the
ancestors wrote: a triangular system in u along each path, solved for all paths at once. With u for v it is the same.
All in float32. The idea for trees: STree (arXiv:2505.14969).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.runtime.recurrent.ancestry import Ancestry, chain
from outrider.runtime.recurrent.recurrence import valid


class Decayed:
    """Rows: log-decays [B, n, H], keys [B, n, G, K], values [B, n, H, V], queries as keys. The state: [B, H, V, K].

    With fewer groups than heads, consecutive heads share a key and a query.
    """

    kept = 3

    def begin(self, rows: Sequence[Tensor]) -> Tensor:
        _, keys, values, _ = rows
        return torch.zeros((*values.shape[2:], keys.shape[-1]), device=keys.device)

    def outputs(self, state: Tensor, rows: Sequence[Tensor], ancestry: Ancestry) -> Tensor:
        decays, keys, values, queries = (row.float() for row in rows)
        return _read(state, decays, keys, values, queries, ancestry)

    def advance(self, state: Tensor, rows: Sequence[Tensor], counts: Tensor) -> Tensor:
        decays, keys, values = (row.float() for row in rows[:3])
        return _write(state, decays, keys, values, counts)


class DeltaRule:
    """Rows: log-decays [B, n, H], betas [B, n, H], keys [B, n, H, K], values [B, n, H, V], queries as keys."""

    kept = 4

    def begin(self, rows: Sequence[Tensor]) -> Tensor:
        _, _, keys, values, _ = rows
        return torch.zeros((*values.shape[2:], keys.shape[-1]), device=keys.device)

    def outputs(self, state: Tensor, rows: Sequence[Tensor], ancestry: Ancestry) -> Tensor:
        decays, betas, keys, values, queries = (row.float() for row in rows)
        written = _corrections(state, decays, betas, keys, values, ancestry)
        return _read(state, decays, keys, written, queries, ancestry)

    def advance(self, state: Tensor, rows: Sequence[Tensor], counts: Tensor) -> Tensor:
        decays, betas, keys, values = (row.float() for row in rows[:4])
        path = chain(*keys.shape[:2], keys.device)
        return _write(state, decays, keys, _corrections(state, decays, betas, keys, values, path), counts)


def _read(
    state: Tensor, decays: Tensor, keys: Tensor, values: Tensor, queries: Tensor, ancestry: Ancestry
) -> Tensor:  # fmt: skip
    """y_t of every row, [B, n, H, V]."""
    heads, groups = values.shape[2], keys.shape[2]
    sums = ancestry.sums(decays)
    scores = torch.einsum("btgk,bsgk->bgts", queries, keys).repeat_interleave(heads // groups, 1)
    from_ancestors = torch.einsum("bhts,bshv->bthv", ancestry.decays(sums) * scores, values)
    from_text = torch.einsum("bhvk,bthk->bthv", state, queries.repeat_interleave(heads // groups, 2))
    return from_ancestors + sums.exp()[..., None] * from_text


def _write(state: Tensor, decays: Tensor, keys: Tensor, values: Tensor, counts: Tensor) -> Tensor:
    """The state behind the first `counts[b]` rows of a stretch of text."""
    heads, groups = values.shape[2], keys.shape[2]
    rows = valid(counts, keys.shape[1])[..., None]  # [B, n, 1]
    sums = decays.masked_fill(~rows, 0).cumsum(1)
    left = (sums[:, -1:] - sums).exp() * rows  # [B, n, H]
    written = torch.einsum("bshv,bshk->bhvk", left[..., None] * values, keys.repeat_interleave(heads // groups, 2))
    return sums[:, -1].exp()[:, :, None, None] * state + written


def _corrections(
    state: Tensor, decays: Tensor, betas: Tensor, keys: Tensor, values: Tensor, ancestry: Ancestry
) -> Tensor:  # fmt: skip
    """u of every row, [B, n, H, V]."""
    sums = ancestry.sums(decays)
    beta = betas.transpose(1, 2)[..., None]  # [B, H, n, 1]
    known = torch.einsum("bhvk,bthk->bhtv", state, keys) * sums.exp().transpose(1, 2)[..., None]
    overlap = torch.einsum("bthk,bshk->bhts", keys, keys) * ancestry.decays(sums) * beta  # the diagonal is not read
    wanted = beta * (values.transpose(1, 2) - known)
    return torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True).transpose(1, 2)
