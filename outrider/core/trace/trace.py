"""Trace: what one sequence proposed, verified, kept and waited for, step by step, within a number of bytes.

The engine notes the plan, the offer, the verdict and the times of each step as they come; a step becomes part of the
trace when its times are known. Probabilities are of the rows that the verifier walked along: behind a rejected
candidate the target's opinion is not asked for. On a GPU they stay there until somebody reads them or `PENDING` steps
are together, so that no step waits for them. Cost: tens of microseconds a step and a softmax a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.proposals import Proposals
from outrider.core.protocols import StepCosts
from outrider.core.records import Budget, StepTiming, Verdict
from outrider.core.target_rows import TargetRows
from outrider.core.tree import PointDraws, TokenTree

VERSION = 1
MAX_BYTES = 4 << 20  # of one sequence's trace; later steps are counted only
STEP_BYTES, NODE_BYTES = 900, 16  # what a step takes in memory, and each node of its tree
PENDING = 64  # steps whose probabilities may wait on the device
CURVE_EVERY = 16  # steps between two looks at the cost model's curve
MAX_CURVE = 256  # candidates that a curve goes up to

Floats = NDArray[np.float32]


class Reason(StrEnum):
    """Why a step had the candidates that it had."""

    PLAIN = "plain"  # the method does not draft
    FAILED = "failed"  # the drafter raised before, and the sequence goes on without it
    NO_ROOM = "no-room"  # the text ends with this step: a candidate could not be used
    RESTS = "rests"  # the controller asked for nothing: speculation did not pay lately
    NOTHING_OFFERED = "nothing-offered"  # no drafter had a candidate
    NONE_PAID = "none-paid"  # there were candidates, and none was worth its row
    CUT = "cut"  # the likeliest were verified; another one was not worth its row, or over the budget
    ALL = "all"  # everything that was offered


class StepCurve(NamedTuple):
    """What the cost model says from step `first` on: seconds of a step with 0, 1, ... candidates in the whole pass."""

    first: int
    batch: int
    seconds: Floats

    def as_dict(self) -> dict[str, Any]:
        return {"first": self.first, "batch": self.batch, "seconds": _rounded(self.seconds, 7)}


class TracedStep(NamedTuple):
    """One step; arrays are by node, and node 0 is the pending token."""

    first: int  # place in the output of the first token that it emitted
    tokens: NDArray[np.int32]
    parents: NDArray[np.int16]
    drafters: tuple[str, ...]  # of each node; empty: unnamed
    guess: Floats | None  # the drafter's chance of a node, given its parent
    path: tuple[int, ...]  # accepted nodes
    emitted: tuple[int, ...]  # tokens that became text
    wanted: Budget  # what the controller allowed
    room: Budget  # what the text and the context had room for
    offered: int  # candidates that the drafters had
    reason: Reason
    timing: StepTiming
    context: int  # tokens of this sequence before the step
    expected: float | None  # seconds without drafting that the cost model expected; None: there is none
    floor: float | None  # likewise of a step without candidates
    ended: float  # seconds from the start of the prompt to the end of the step


@dataclass(slots=True)
class Trace:
    """Of one sequence. Changes state in `plan`, `offer`, `judge`, `end`, which the engine calls in this order."""

    limit: int = MAX_BYTES
    steps: list[TracedStep] = field(default_factory=list)
    curves: list[StepCurve] = field(default_factory=list)
    left_out: int = 0  # steps that there was no room for
    bytes: int = 0
    _chances: list[tuple[Floats, Floats]] = field(default_factory=list)  # a step: of its nodes, of what it emitted
    _pending: list[tuple[TokenTree, Verdict, list[tuple[int, int]], Tensor]] = field(default_factory=list)
    _wanted: Budget = field(default=Budget(0, 0))
    _room: Budget = field(default=Budget(0, 0))
    _offered: int = 0
    _judged: tuple[TokenTree, Verdict] | None = None

    def plan(self, wanted: Budget, room: Budget) -> None:
        self._wanted, self._room, self._offered = wanted, room, 0

    def offer(self, proposals: Proposals, i: int) -> None:
        more = proposals.candidates[i].total if proposals.candidates else 0
        self._offered = proposals.trees[i].candidates + more

    def judge(self, tree: TokenTree, verdict: Verdict, rows: TargetRows) -> None:
        """Before the step's tokens are text: the rows are those behind what stands there now."""
        self._judged = (tree, verdict)
        if self.bytes >= self.limit:
            return
        pairs = _looked_at(tree, verdict)
        chances = rows.chances(pairs)
        self._pending.append((tree, verdict, pairs, chances))
        if chances.device.type == "cpu" or len(self._pending) >= PENDING:
            self._settle()

    def end(
        self, emitted: tuple[int, ...], timing: StepTiming, first: int, context: int, ended: float, *,
        drafts: bool, failed: bool, costs: StepCosts | None,
    ) -> None:  # fmt: skip
        """The step's tokens are text, from place `first` of the output on, and its times are known.

        `drafts`: the method has a drafter.
        """
        if self._judged is None:  # it ended in an error
            return
        tree, verdict = self._judged
        self._judged = None
        if self.bytes >= self.limit:
            self.left_out += 1
            return
        expected, floor = self._look_up(costs, timing)
        self.bytes += STEP_BYTES + NODE_BYTES * len(tree)
        self.steps.append(
            TracedStep(
                first, tree.tokens.astype(np.int32), tree.parents.astype(np.int16), tree.origins, _guesses(tree),
                verdict.path, emitted, self._wanted, self._room, self._offered, self._reason(tree, drafts, failed),
                timing, context, expected, floor, ended,
            )
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; docs/guides/explain.md says what each one is."""
        self._settle()
        names = list(dict.fromkeys(name for step in self.steps for name in step.drafters if name))
        return {
            "version": VERSION,
            "drafters": names,
            "steps": [
                _step_dict(step, names, *chances) for step, chances in zip(self.steps, self._chances, strict=False)
            ],
            "curves": [curve.as_dict() for curve in self.curves],
            "left_out": self.left_out,
        }

    def _settle(self) -> None:
        """Bring what waits on the device to the host, with one transfer."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        flat = torch.cat([chances for *_, chances in pending]).float().cpu().numpy()
        begun = 0
        for tree, verdict, pairs, _ in pending:
            of_nodes = np.full(len(tree), np.nan, np.float32)
            values = dict(zip(pairs, flat[begun : begun + len(pairs)].tolist(), strict=True))
            begun += len(pairs)
            for (parent, token), value in values.items():
                if (node := tree.child(parent, token)) >= 0:
                    of_nodes[node] = value
            walked = [0, *verdict.path]
            tokens = [*(int(tree.tokens[node]) for node in verdict.path), verdict.next_token]
            of_emitted = [values[pair] for pair in zip(walked, tokens, strict=True)]
            self._chances.append((of_nodes, np.array(of_emitted, np.float32)))

    def _look_up(self, costs: StepCosts | None, timing: StepTiming) -> tuple[float | None, float | None]:
        """What the cost model expects of this step, and of one without candidates; keeps its curve now and then."""
        if costs is None:
            return None, None
        candidates = timing.rows - timing.batch
        due = not self.curves or len(self.steps) >= self.curves[-1].first + CURVE_EVERY
        due = due or self.curves[-1].batch != timing.batch
        upto = min(max(2 * candidates, 32), MAX_CURVE) if due else candidates
        seconds = costs.seconds(timing.batch, max(candidates, upto), timing.context)
        if due:
            curve = StepCurve(len(self.steps), timing.batch, seconds[: upto + 1].astype(np.float32))
            self.curves.append(curve)
            self.bytes += STEP_BYTES + curve.seconds.nbytes
        return float(seconds[candidates]), float(seconds[0])

    def _reason(self, tree: TokenTree, drafts: bool, failed: bool) -> Reason:
        if not drafts:
            return Reason.PLAIN
        if failed:
            return Reason.FAILED
        if not self._room:
            return Reason.NO_ROOM
        if not self._wanted:
            return Reason.RESTS
        if not self._offered:
            return Reason.NOTHING_OFFERED
        if not tree.candidates:
            return Reason.NONE_PAID
        return Reason.CUT if tree.candidates < self._offered else Reason.ALL


def _looked_at(tree: TokenTree, verdict: Verdict) -> list[tuple[int, int]]:
    """Parent and token of each candidate that the verifier came past, and of each token that it chose."""
    walked = [0, *verdict.path]
    chosen = zip(walked, [*(int(tree.tokens[node]) for node in verdict.path), verdict.next_token], strict=True)
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    past = set(walked)
    beside = ((parent, token) for parent, token in zip(parents[1:], tokens[1:], strict=True) if parent in past)
    return list(dict.fromkeys((*chosen, *beside)))


def _guesses(tree: TokenTree) -> Floats | None:
    """The drafter's chance of each node given its parent: its claim, or the q that it was drawn with."""
    if tree.weights is not None and tree.candidates:
        above = tree.weights[tree.parents]
        guess = np.minimum(tree.weights / np.maximum(above, 1e-12), 1.0).astype(np.float32)
        guess[0] = 1.0
        return guess
    if isinstance(tree.draws, PointDraws) or not tree.candidates:
        return None
    guess = np.full(len(tree), np.nan, np.float32)
    for draws in tree.draws:
        for draw in draws:
            if draw.child > 0 and draw.row is not None and np.isnan(guess[draw.child]):
                guess[draw.child] = draw.row.prob(draw.token)
    return guess


def _step_dict(step: TracedStep, names: Sequence[str], of_nodes: Floats, of_emitted: Floats) -> dict[str, Any]:
    number = {name: i for i, name in enumerate(names)}
    depths = [0] * len(step.tokens)
    parents = step.parents.tolist()
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    origins = step.drafters or ("",) * len(parents)
    return {
        "first": step.first,
        "emitted": list(step.emitted),
        "probability": _rounded(of_emitted[: len(step.emitted)], 6),
        "path": list(step.path),
        "tree": {
            "tokens": step.tokens.tolist(),
            "parents": parents,
            "depths": depths,
            "drafters": [number.get(name, -1) for name in origins],
            "guess": None if step.guess is None else _rounded(step.guess, 6),
            "probability": _rounded(of_nodes, 6),
        },
        "budget": {
            "nodes": step.wanted.nodes, "depth": step.wanted.depth, "room_nodes": step.room.nodes,
            "room_depth": step.room.depth, "offered": step.offered, "verified": len(parents) - 1,
            "reason": str(step.reason),
        },
        "rows": step.timing.rows,
        "batch": step.timing.batch,
        "context": step.context,
        "pass_context": step.timing.context,
        "draft_s": round(step.timing.draft, 7),
        "verify_s": round(step.timing.verify, 7),
        "host_s": round(step.timing.rest, 7),
        "expected_s": None if step.expected is None else round(step.expected, 7),
        "floor_s": None if step.floor is None else round(step.floor, 7),
        "ended_s": round(step.ended, 6),
    }  # fmt: skip


def _rounded(values: Floats, digits: int) -> list[float | None]:
    """Plain numbers; None where there is none."""
    return [None if value != value else round(value, digits) for value in values.tolist()]
