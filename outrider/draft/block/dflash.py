"""DFlash: a few trained layers fill a whole block of masks in one pass, the target's own states as keys and values.

arXiv 2602.06036; trees from the block's marginals, as in DDTree, come from the grower. Lossless: the distribution at a
depth does not hang on what is drafted at the others, and draws say so. The block is the pending token and masks behind
it; it sees the target's fused states at every earlier place of the text, in every layer, and itself. What the target
was not run over for it is left out. Cost: one forward over the block a step, whatever its length, and
two small products for each accepted token; nothing is asked between the levels of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.core.layer_driver import BlockDriver
from outrider.core.tree import QRow
from outrider.draft.feature.text import TextReader
from outrider.draft.marginals import Marginals


class DFlashSource(Marginals, TextReader):
    driver: BlockDriver

    def __init__(self, driver: BlockDriver, *, width: int = 64, name: str = "dflash") -> None:
        """A distribution keeps its `width` likeliest tokens."""
        super().__init__(driver)
        self.width, self.name = min(width, driver.traits.vocab), name

    @torch.inference_mode()
    def marginals(self, slots: Sequence[int]) -> list[list[QRow]]:
        """After each pending token, from the target's features before it; none where there are none yet."""
        able = [slot for slot in slots if self.knows(slot)]
        wanted = [self.seat(slot).wanted(slot, self.driver.deepest) for slot in able]
        found = dict(zip(able, self.driver.blocks(wanted, self.width) if able else [], strict=True))
        for slot in able:
            seat = self.seat(slot)
            seat.ran = len(seat.waiting)
        return [found.get(slot, []) for slot in slots]
