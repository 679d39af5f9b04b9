"""From positions to the figures of a bound: means with standard errors, gaps to the optimum, and the verdict.

Positions of one text resemble each other, so the error of a mean is taken over texts; with one text alone, over its
positions. Gaps and gains are differences at the same position or tree, and their errors are of the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.bench.bound.bound import DRAFTS, Bound, Position, TreeKind
from outrider.bench.bound.reach import OPTIMUM, RULES, SAMPLED, SCHEMES, Array
from outrider.core.tree import Law

SURE = 2.0  # standard errors that a difference must be away from zero to count


def result(made: Bound) -> dict[str, Any]:
    """Everything a report shows, as plain values."""
    found = made.positions
    texts = np.array([position.text for position in found], dtype=np.int64)
    return {
        "settings": made.settings,
        "machine": made.machine,
        "complete": made.complete,
        "positions": len(found),
        "texts": len(set(texts.tolist())),
        "drafts": list(range(1, DRAFTS + 1)),
        "schemes": [_scheme(scheme, found, texts) for scheme in SCHEMES] if found else [],
        "shapes": [_shape(i, shape, found, texts) for i, shape in enumerate(made.plan.shapes())] if found else [],
        "verdict": _verdict(made, texts) if found else None,
    }


def mean(values: Array, texts: Sequence[int] | np.ndarray) -> dict[str, float | None]:
    """The mean and its standard error, clustered by text."""
    average = float(values.mean())
    sums = np.array([(values[texts == text] - average).sum() for text in np.unique(texts)])
    if len(sums) == 1:
        sums = values - average
    count = len(sums)
    error = math.sqrt(count / (count - 1) * float(sums @ sums)) / len(values) if count > 1 else None
    return {"mean": average, "error": error}


def _scheme(scheme: Law, found: Sequence[Position], texts: np.ndarray) -> dict[str, Any]:
    best = _hits(found, scheme, OPTIMUM)
    rules = []
    for rule in RULES[scheme]:
        reached = _hits(found, scheme, rule)
        rules.append({
            "rule": rule,
            "exact": (scheme, rule) not in SAMPLED,
            "acceptance": [mean(column, texts) for column in reached.T],
            "gap": [mean(column, texts) for column in (best - reached).T],
        })  # fmt: skip
    return {"scheme": str(scheme), "optimum": [mean(column, texts) for column in best.T], "rules": rules}


def _shape(index: int, shape: TreeKind, found: Sequence[Position], texts: np.ndarray) -> dict[str, Any]:
    tokens = {rule: np.array([position.tokens[index][rule] for position in found]) for rule in shape.rules}
    return {
        "shape": shape.name,
        "drawing": str(shape.drawing),
        "nodes": float(np.mean([position.nodes[index] for position in found])),
        "baseline": shape.baseline,
        "optimum": shape.optimum,
        "rules": [
            {"rule": rule, "tokens_per_step": mean(per_step, texts),
             "gain": mean(per_step - tokens[shape.baseline], texts)}
            for rule, per_step in tokens.items()
        ],
    }  # fmt: skip


def _hits(found: Sequence[Position], scheme: Law, rule: str) -> Array:
    return np.array([position.hits[scheme][rule] for position in found])  # [positions, DRAFTS]


def _verdict(made: Bound, texts: np.ndarray) -> dict[str, Any]:
    """What is lost to the rules and what to the drafter, for each number of drafts; and which is the next step."""
    by_drafts = [_losses(made.positions, texts, k) for k in range(1, DRAFTS + 1)]
    drafts = min(int(made.settings["tree"].split(",")[0]), DRAFTS)
    chosen = by_drafts[drafts - 1]
    difference, error = chosen["drafter_minus_rule"]["mean"], chosen["drafter_minus_rule"]["error"]
    sure = error is not None and abs(difference) > SURE * error
    next_step = ("drafter" if difference > 0 else "rule") if sure else "undecided"
    return {"next": next_step, "drafts": drafts, "text": _words(chosen, next_step), "by_drafts": by_drafts}


def _losses(found: Sequence[Position], texts: np.ndarray, k: int) -> dict[str, Any]:
    optima = {scheme: _hits(found, scheme, OPTIMUM)[:, k - 1] for scheme in SCHEMES}
    reached = {(scheme, rule): _hits(found, scheme, rule)[:, k - 1] for scheme in SCHEMES for rule in RULES[scheme]}
    best = max(optima, key=lambda scheme: float(optima[scheme].mean()))
    winner = max(reached, key=lambda pair: float(reached[pair].mean()))
    rule_gap, drafter_gap = optima[best] - reached[winner], 1.0 - optima[best]
    return {
        "drafts": k,
        "optimum": {"scheme": str(best), **mean(optima[best], texts)},
        "best_rule": {"scheme": str(winner[0]), "rule": winner[1], **mean(reached[winner], texts)},
        "match": mean(reached[Law.FIXED, "invariant"], texts),
        "rule_gap": mean(rule_gap, texts),
        "drafter_gap": mean(drafter_gap, texts),
        "drafter_minus_rule": mean(drafter_gap - rule_gap, texts),
    }


def _words(losses: dict[str, Any], next_step: str) -> str:
    best, top = losses["best_rule"], losses["optimum"]
    k = losses["drafts"]
    plural = "s" if k > 1 else ""
    rule, drafter = max(losses["rule_gap"]["mean"], 0.0), losses["drafter_gap"]["mean"]
    facts = (
        f"With {k} draft{plural} a position the best rule at hand ({best['rule']}, drafts drawn {best['scheme']}) says "
        f"one of them {_percent(best['mean'])} of the time; where the target's own draw must match the likeliest "
        f"token{plural} of the draft it is {_percent(losses['match']['mean'])}. No exact rule can pass "
        f"{_percent(top['mean'])} (drawn {top['scheme']}): a better rule is worth at most {_percent(rule)}, a better "
        f"drafter up to {_percent(drafter)}. "
    )
    advice = {
        "drafter": "The next step is a better drafter.",
        "rule": "The next step is a better rule.",
        "undecided": "The two are too close to call; measure at more positions or on more prompts.",
    }
    return facts + advice[next_step]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"
