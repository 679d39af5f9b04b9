"""The records that cross between the parts: what is asked of the target, what it answers, what a step was.

All are immutable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.rows.side import SideRows
from outrider.core.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter wants from the target besides the logits that every verify step yields."""

    logits: bool = False  # also for the rows of prompts
    hidden: tuple[int, ...] = ()  # as in transformers' hidden_states: i is the input of 0-based layer i; -1 the last
    top: int = 0  # likeliest tokens of each verified row, on the host, if that costs the target nothing more
    rounded: bool = False  # allowed by the engine: only a row's largest logit is exact, others stay below it

    @property
    def of_prompt(self) -> bool:
        """Whether anything is asked of the rows of a prompt: then each sequence must see its prompt run."""
        return self.logits or bool(self.hidden)

    def __or__(self, other: Needs) -> Needs:
        hidden = tuple(sorted({*self.hidden, *other.hidden}))
        return Needs(self.logits or other.logits, hidden, max(self.top, other.top))


NO_NEEDS = Needs()
GREEDY = Needs(rounded=True)  # what plain greedy decoding asks for


@dataclass(frozen=True, slots=True)
class TopRows:
    """Per row, likeliest first; the id is -1 and the log-probability -inf where the row has no further token."""

    ids: NDArray[np.int32]  # [rows, count]
    logprobs: NDArray[np.float32]  # [rows, count], of the softmax over the whole vocabulary at temperature 1


@dataclass(frozen=True, slots=True)
class HiddenRows(Mapping[int, Tensor]):
    """Hidden states of one slot's rows, [rows, d] by layer: cut out of those of the whole pass when asked for."""

    whole: Mapping[int, Tensor]  # [rows of the pass, d]
    first: int
    count: int

    @classmethod
    def of(cls, hidden: Mapping[int, Tensor]) -> HiddenRows:
        """Of states that stand alone: they are the whole of it."""
        if isinstance(hidden, HiddenRows):
            return hidden
        return cls(hidden, 0, len(next(iter(hidden.values()), ())))

    def __getitem__(self, layer: int) -> Tensor:
        return self.whole[layer][self.first : self.first + self.count]

    def __iter__(self) -> Iterator[int]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


@dataclass(frozen=True, slots=True)
class Scores:
    """The target's answer for the rows of one slot."""

    logits: Tensor | None  # [rows, V], raw, in the model's dtype; None where nobody asked (prompts)
    hidden: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> [rows, d]
    likeliest: Sequence[int] | None = None  # argmax of each row of the logits, where the target knows it already
    top: TopRows | None = None  # at least as many as were asked for, or None
    among: tuple[Tensor, int] | None = None  # all rows of the pass, [rows, V], and where `logits` begin in them
    side: Scores | None = None  # of the side rows, where the pass had any
    raced: Sequence[int] | None = None  # the token that each row's race has found, where the piece asked for it


@dataclass(frozen=True, slots=True)
class Race:
    """How the target's noise chooses a token at each row of a tree: see `noise.race_scores`."""

    temperature: float  # above 0
    keys: NDArray[np.uint64]  # [rows]


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows that one slot has in a pass: a stretch of its text, or a tree behind its pending token."""

    slot: int
    tokens: Sequence[int] = ()  # text: goes behind what the slot holds, and stays
    tree: TokenTree | None = None  # candidates: of these only what `commit` keeps stays
    done: int = 0  # leading nodes of the tree that ran since the last commit; rows cover the rest
    side: SideRows | None = None  # behind nodes of the tree, and after them in the order of rows; never kept
    race: Race | None = None  # of a tree none of which has run: for a target that says that it `races`

    @property
    def rows(self) -> int:
        """Of its slot in flight."""
        if self.tree is None:
            return len(self.tokens)
        return len(self.tree) + (len(self.side) if self.side is not None else 0)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of one slot's prompt that went through the target: tokens at positions start .. start + len."""

    slot: int
    start: int
    tokens: Sequence[int]
    scores: Scores


@dataclass(frozen=True, slots=True)
class Budget:
    """How much to propose, decided before anything is drawn. Zero nodes means: do not speculate this step."""

    nodes: int
    depth: int
    least: float = 0.0  # a path less likely than this is not worth another level; only for trees that are not drawn

    def __bool__(self) -> bool:
        """Whether anything may be proposed."""
        return self.nodes > 0 and self.depth > 0

    def __and__(self, other: Budget) -> Budget:
        return Budget(min(self.nodes, other.nodes), min(self.depth, other.depth), max(self.least, other.least))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Accepted nodes from the first candidate down, and the target's own token after the last of them."""

    path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What happened to one slot in one step; what drafters and statistics learn from."""

    tree: TokenTree
    verdict: Verdict
    emitted: tuple[int, ...]  # tokens that became text: cut where the sequence stopped
    scores: Scores  # the target's rows along the tree, in node order

    @property
    def gain(self) -> int:
        """Tokens the step was worth, the target's own included: 1 for plain decoding."""
        return len(self.verdict.path) + 1


@dataclass(frozen=True, slots=True)
class SeenRow:
    """The target's distribution behind some output as it is without masks, and what a mask leaves of it."""

    output: tuple[int, ...]
    probs: NDArray[np.float64]  # [V], after the temperature
    legal: NDArray[np.int32] | None  # bit t % 32 of word t // 32; None: nothing is restricted, or the text ends there
    children: tuple[int, ...]  # tokens that were looked at behind it


@dataclass(frozen=True, slots=True)
class Load:
    """What else is in the pass that a controller plans for."""

    batch: int  # sequences, those that it plans for among them
    others: int = 0  # candidates of the other sequences
    context: int = 0  # tokens of text in the cache, of all sequences together
    prompt_rows: int = 0  # of prompts that run in the same pass


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Wall-clock seconds of one step of the whole batch, and its size."""

    draft: float  # told to a controller: what drafting for its sequences took
    verify: float
    rest: float
    rows: int  # rows that went through the target, all slots together
    batch: int
    others: int = 0  # candidates among them of sequences that another controller plans for
    context: int = 0  # tokens of text in the cache before the step, all slots together
    prompt_rows: int = 0  # that ran in the same pass; the seconds are without what they are taken to have cost
    prompts: float = 0.0  # which is this

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.rest


# Of scores [rows, V], temperatures [rows] float64 and keys [rows] int64: the tokens that the target's noise chooses,
# [rows] int64, as `noise.race_scores` says, on the device where all of them lie and without waiting for it.
RowPicker = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Traits:
    """What a target says of itself: how it runs, and what its steps cost and keep."""

    runtime: str = ""
    precision: str | None = None  # of the weights; None: the dtype that the model has
    weight_bytes: int | None = None  # read by a step of greedy decoding, where the runtime knows
    slots: int = 1  # sequences that it holds at once
    even: bool = False  # a step costs the same whatever ran before it
    other_threads: bool = False  # it computes in threads other than torch's
    width: Callable[[int], int] | None = None  # rows that a step of one sequence runs now for so many; None: as many
    experts: float = 0.0  # in a layer of a mixture model, on average
    active_experts: Callable[[], float] | None = None  # of these the last pass has touched so many; None: not counted
    same_bits: bool = False  # a row's result is the same to the last bit whatever else runs in the pass
    mixes: bool = False  # text and trees may share a pass
    side_rows: bool = False  # vectors of drafters may stand behind nodes of trees
    prompt_rows: int = 512  # rows of text that a pass should have at most, all slots together
    pick: RowPicker | None = None  # in less time than torch's operations take; None: by those
    races: bool = False  # finds within a pass what the noise of a piece chooses
    meanwhile: Callable[[Callable[[], None]], None] | None = None  # takes work that it does while the next pass runs
    # Makes ready what later passes would like to find: a little between steps, one thing where nobody waits (`idle`).
    # Whether there is more. None: it has nothing of the kind.
    spare: Callable[[bool], bool] | None = None


class Role(StrEnum):
    """What it costs to ask a drafter, which decides when a mixture asks it."""

    FREE = "free"  # next to nothing: in every step
    LOOKS = "looks"  # reading the target's rows after every step: over stretches in which that pays
    RUNS = "runs"  # a network's time for each level: as deep as pays
    DRAWS = "draws"  # its candidates are sampled: it gets a share of the budget before it draws
