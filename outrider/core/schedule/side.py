"""The side rows of a step: what drafters want to have run beside their candidates, where there is room for it."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.core.protocols import Drafter, HasSideRows, Target
from outrider.core.rows.side import SideRows
from outrider.core.tree import TokenTree


def asked_rows(drafter: Drafter, trees: Mapping[int, TokenTree], target: Target) -> dict[int, SideRows]:
    """By slot. Rows that do not fit beside their tree are left out, all of a slot or none."""
    if not isinstance(drafter, HasSideRows):
        return {}
    asked = zip(trees.items(), drafter.side_rows(list(trees), list(trees.values())), strict=True)
    return {
        slot: rows
        for (slot, tree), rows in asked
        if rows is not None and rows.fits(tree, target.max_rows, target.max_context - 1 - target.length(slot))
    }
