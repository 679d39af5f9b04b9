"""Linear attention with decays, in one pass over a tree: Mamba-2, lightning attention, the gated delta rule.

    h_t = exp(a_t) h_parent(t) + v_t k_t^T        y_t = h_t q_t

An ancestor's part in h_t is what it wrote times the decays on the path between, a difference of accumulated
log-decays. So all rows follow from the one committed state, and no state is built for any of them:

    S_t = sum of a over t and its ancestors
    y_t = exp(S_t) h q_t + sum over t and its ancestors s of exp(S_t - S_s) (q_t k_s) v_s

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
    """Rows: log-decays [B, n, H, 1 or K], keys [B, n, G, K], values [B, n, H, V], queries as keys. State: [B, H, V, K].

    With fewer groups than heads, consecutive heads share a key and a query.
    """

    kept = 3

    def begin(self, rows: Sequence[Tensor]) -> Tensor:
        _, keys, values, _ = rows
        return torch.zeros((*values.shape[2:], keys.shape[-1]), device=keys.device)

    def outputs(self, state: Tensor, rows: Sequence[Tensor], ancestry: Ancestry) -> Tensor:
        decays, keys, values, queries = (row.float() for row in rows)
        return _read(state, ancestry.sums(decays), keys, values, queries, ancestry)

    def advance(self, state: Tensor, rows: Sequence[Tensor], counts: Tensor) -> Tensor:
        decays, keys, values = (row.float() for row in rows[:3])
        return _write(state, decays, keys, values, counts)


class DeltaRule:
    """Rows: log-decays [B, n, H, 1 or K], betas [B, n, H], keys [B, n, H, K], values [B, n, H, V], queries as keys."""

    kept = 4

    def begin(self, rows: Sequence[Tensor]) -> Tensor:
        _, _, keys, values, _ = rows
        return torch.zeros((*values.shape[2:], keys.shape[-1]), device=keys.device)

    def outputs(self, state: Tensor, rows: Sequence[Tensor], ancestry: Ancestry) -> Tensor:
        decays, betas, keys, values, queries = (row.float() for row in rows)
        sums = ancestry.sums(decays)
        written = _corrections(state, sums, betas, keys, values, ancestry)
        return _read(state, sums, keys, written, queries, ancestry)

    def advance(self, state: Tensor, rows: Sequence[Tensor], counts: Tensor) -> Tensor:
        decays, betas, keys, values = (row.float() for row in rows[:4])
        path = chain(*keys.shape[:2], keys.device)
        written = _corrections(state, path.sums(decays), betas, keys, values, path)
        return _write(state, decays, keys, written, counts)


def _read(
    state: Tensor, sums: Tensor, keys: Tensor, values: Tensor, queries: Tensor, ancestry: Ancestry
) -> Tensor:  # fmt: skip
    """y_t of every row, [B, n, H, V]."""
    heads, groups = values.shape[2], keys.shape[2]
    from_ancestors = torch.einsum("bhts,bshv->bthv", _products(queries, keys, sums, ancestry), values)
    queries = queries.repeat_interleave(heads // groups, 2) * sums.exp()
    return from_ancestors + torch.einsum("bhvk,bthk->bthv", state, queries)


def _write(state: Tensor, decays: Tensor, keys: Tensor, values: Tensor, counts: Tensor) -> Tensor:
    """The state behind the first `counts[b]` rows of a stretch of text."""
    heads, groups = values.shape[2], keys.shape[2]
    rows = valid(counts, keys.shape[1])[:, :, None, None]
    sums = decays.masked_fill(~rows, 0).cumsum(1)  # [B, n, H, 1 or K]
    keys = keys.repeat_interleave(heads // groups, 2) * (sums[:, -1:] - sums).exp() * rows
    return sums[:, -1].exp()[:, :, None] * state + torch.einsum("bshv,bshk->bhvk", values, keys)


def _corrections(
    state: Tensor, sums: Tensor, betas: Tensor, keys: Tensor, values: Tensor, ancestry: Ancestry
) -> Tensor:  # fmt: skip
    """u of every row, [B, n, H, V]."""
    betas = betas.transpose(1, 2)[..., None]  # [B, H, n, 1]
    known = torch.einsum("bhvk,bthk->bhtv", state, keys * sums.exp())
    overlap = _products(keys, keys, sums, ancestry)  # its diagonal is not read
    wanted = betas * (values.transpose(1, 2) - known)
    return torch.linalg.solve_triangular(betas * overlap, wanted, upper=False, unitriangular=True).transpose(1, 2)


def _products(queries: Tensor, keys: Tensor, sums: Tensor, ancestry: Ancestry) -> Tensor:
    """[B, H, n, n]: q_t k_s, after the decays between t and its ancestor s; 0 where s is none."""
    heads, groups = sums.shape[2], keys.shape[2]
    if sums.shape[3] == 1:
        plain = torch.einsum("btgk,bsgk->bgts", queries, keys).repeat_interleave(heads // groups, 1)
        return plain * ancestry.between(sums)[..., 0].permute(0, 3, 1, 2)
    return torch.einsum("bthk,bshk,btshk->bhts", queries, keys, ancestry.between(sums))
