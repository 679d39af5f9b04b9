"""Anchors and the mask that all block drafters are trained with: many blocks of a text packed behind it, in one pass.

A block stands behind an anchor, which is the pending token when drafting. Rows of blocks see the text before their
block and the rows of their block, as if each had been drafted by itself; rows of text, where a network runs them, see
those up to themselves. The same function says what every kind sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.train.text.dialogue import ANSWER
from outrider.train.text.selfdata import SelfData


@dataclass(frozen=True, slots=True)
class Anchors:
    places: Tensor  # [B, A] of the pending tokens, rising
    real: Tensor  # [B, A] whether there is such a place; others only fill up

    def rows(self, block: int) -> Tensor:
        """[B, A, block]: the places in the text of the tokens from the anchor on."""
        return self.places[..., None] + torch.arange(block, device=self.places.device)

    def answers(self, part: SelfData, block: int) -> Tensor:
        """[B, A, block]: which of these say a token of an answer."""
        rows, length = self.rows(block), part.tokens.shape[1]
        inside = (rows < length) & self.real[..., None]
        told = part.roles.gather(1, rows.clamp(max=length - 1).flatten(1)).view(rows.shape)
        return inside & (told == ANSWER)


def choose_anchors(part: SelfData, count: int, seed: int) -> Anchors:
    """Up to `count` places of each text that a token of an answer follows, with something before them.

    A function of the text and the seed.
    """
    follows = torch.zeros_like(part.roles, dtype=torch.bool)
    follows[:, 1:-1] = part.roles[:, 2:] == ANSWER
    drawn = torch.rand(follows.shape, generator=noise_of(part, seed)).to(follows.device).masked_fill(~follows, -1.0)
    found = drawn.topk(min(count, follows.shape[1]), dim=1)
    places, order = found.indices.sort(dim=1)
    return Anchors(places, found.values.gather(1, order) >= 0)


def noise_of(part: SelfData, seed: int) -> torch.Generator:
    """The same for the same texts, so that a run that resumes draws what a whole one does."""
    return torch.Generator().manual_seed((seed * 1_000_003 + int(part.tokens.sum())) % (1 << 62))


def block_mask(
    anchors: Tensor, block: int, text: int, *, pending: bool, runs_text: bool, kept: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Who sees whom [B, rows, text + A * block]: keys are the text, then the blocks of all anchors [B, A].

    `pending`: the block begins with the pending token, which is not among the text that it sees. `runs_text`: rows of
    text come before those of the blocks, each seeing the text up to itself. `kept` [B, A, block]: rows of blocks that
    are there at all; the others are seen by nobody.
    """
    batch, count = anchors.shape
    device = anchors.device
    column, owner = torch.arange(text, device=device), torch.arange(count * block, device=device) // block
    before = column < (anchors if pending else anchors + 1)[..., None]  # [B, A, text]
    of_text = before.repeat_interleave(block, 1)
    its = (owner[:, None] == owner)[None].expand(batch, -1, -1)
    if kept is not None:
        its = its & kept.flatten(1)[:, None]
    blocks = torch.cat([of_text, its], 2)
    if not runs_text:
        return blocks
    causal = torch.ones(text, text, dtype=torch.bool, device=device).tril()
    rows = torch.nn.functional.pad(causal, (0, count * block))[None].expand(batch, -1, -1)
    return torch.cat([rows, blocks], 1)
