"""What a load did to a server: tokens a second, and the waits of its clients at the 50th and 99th percentile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from outrider.bench.load.client import Read

COLUMNS = (  # of a table: name in the figures, head, places behind the point
    ("tokens_per_s", "tokens/s", 1),
    ("first_p50", "first p50 ms", 0), ("first_p99", "p99", 0),
    ("token_p50", "token p50 ms", 1), ("token_p99", "p99", 1),
    ("gap_p50", "gap p50 ms", 1), ("gap_p99", "p99", 1),
)  # fmt: skip


def figures(answers: Sequence[Read], count: Callable[[str], int]) -> dict[str, Any]:
    """Milliseconds and tokens. `count` says how many tokens a text has, for servers that do not."""
    good = [answer for answer in answers if answer.complete and answer.deliveries]
    tokens = [answer.tokens or count(answer.text) for answer in good]
    begun = min((answer.sent for answer in answers), default=0.0)
    ended = max((answer.ended for answer in answers), default=0.0)
    first = [answer.deliveries[0] - answer.sent for answer in good]
    each = [
        (answer.deliveries[-1] - answer.deliveries[0]) / (made - 1)
        for answer, made in zip(good, tokens, strict=True)
        if made > 1
    ]
    gaps = [later - earlier for answer in good for earlier, later in pairwise(answer.deliveries)]
    return {
        "requests": len(answers),
        "complete": len(good),
        "errors": sorted({answer.error[:120] for answer in answers if answer.error}),
        "tokens": sum(tokens),
        "seconds": ended - begun,
        "tokens_per_s": sum(tokens) / (ended - begun) if ended > begun else 0.0,
        **{
            f"{name}_p{share}": 1e3 * percentile(values, share)
            for name, values in (("first", first), ("token", each), ("gap", gaps))
            for share in (50, 99)
        },
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Between neighbours by their distance; nan of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = ordered[min(low + 1, len(ordered) - 1)]
    return min(ordered[low] + (high - ordered[low]) * (place - low), high)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A Markdown table: one line a system and load."""
    heads = ["load", "system", *(head for _, head, _ in COLUMNS), "answered"]
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for row in rows:
        cells = [f"{row[name]:.{places}f}" for name, _, places in COLUMNS]
        lines.append(f"| {row['load']} | {row['system']} | {' | '.join(cells)} | {row['complete']}/{row['requests']} |")
    return lines
