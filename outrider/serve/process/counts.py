"""Counts of several engines, one after the other, as if there had been one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GAUGES = frozenset((  # what is now, not what was
    "running", "waiting", "cache_blocks", "cache_blocks_used", "fleet", "learning_failed", "learning_bytes",
    "learning_acceptance", "learning_acceptance_before",
))  # fmt: skip


def joined(before: Mapping[str, Any], now: Mapping[str, Any], gauges: bool = True) -> dict[str, Any]:
    """Numbers are added, mappings joined, lists added place by place; without `gauges` only what lasts."""
    made = dict(before)
    for name, value in now.items():
        if name in GAUGES:
            if gauges:
                made[name] = value
        elif isinstance(value, Mapping):
            made[name] = joined(made.get(name) or {}, value, gauges)
        elif isinstance(value, list):
            earlier = made.get(name) or []
            made[name] = [
                (earlier[i] if i < len(earlier) else 0) + (value[i] if i < len(value) else 0)
                for i in range(max(len(earlier), len(value)))
            ]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            made[name] = (made.get(name) or 0) + value
        else:
            made[name] = value
    return made
