"""What each part may ask of the others, and the records that cross between them.

Everything is per *slot* (one running sequence) and batched over slots; a batch of one is not special. Methods that
change state say so; the records are immutable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.proposals import Candidates, Proposals
from outrider.tree import Law, QRow, TokenTree


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter wants from the target besides the logits that every verify step yields."""

    logits: bool = False  # also for the rows of the prefill
    hidden: tuple[int, ...] = ()  # as in transformers' hidden_states: i is the input of 0-based layer i; -1 the last
    # The likeliest tokens of each verified row on the host, if that costs the target nothing more; who needs them can
    # take them from the logits. Asks for nothing of the prefill, so it makes no difference where needs are compared.
    top: int = field(default=0, compare=False)
    # What the engine allows in greedy decoding: only the largest logit of a row has to be the model's own, others may
    # be rounded as long as they stay below it.
    rounded: bool = field(default=False, compare=False)

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
class Scores:
    """The target's answer for the rows of one slot."""

    logits: Tensor | None  # [rows, V], raw, in the model's dtype; None where nobody asked (prefill)
    hidden: dict[int, Tensor] = field(default_factory=dict)  # layer -> [rows, d]
    likeliest: Sequence[int] | None = None  # argmax of each row of the logits, where the target knows it already
    top: TopRows | None = None  # at least as many as were asked for, or None


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
class Load:
    """What else is in the pass that a controller plans for."""

    batch: int  # sequences, its own among them
    others: int = 0  # candidates of those that are not its own


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Wall-clock seconds of one step of the whole batch, and its size.

    Of drafting, what the sequences of one controller took where it is told; all of it elsewhere.
    """

    draft: float
    verify: float
    rest: float
    rows: int  # rows that went through the target, all slots together
    batch: int
    others: int = 0  # candidates among them of sequences that another controller plans for

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.rest


class Context(Protocol):
    """A live view of one sequence. `tokens` ends with the pending token; it grows between steps."""

    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def output(self) -> Sequence[int]: ...
    @property
    def tokens(self) -> NDArray[np.int64]: ...  # prompt and output, a view; do not keep it across steps
    @property
    def temperature(self) -> float: ...
    @property
    def prediction(self) -> Sequence[int]: ...  # what the caller expects the output to be; empty: nothing said
    def draft_rows(self, logits: Tensor, paths: Sequence[Sequence[int]], width: int) -> list[QRow]:
        """The draft's law after each path: warped as the target's rows are, cut to the `width` likeliest, renormalised.

        `logits` is [rows, vocabulary], a row for each path.
        """
        ...


class Rows(Protocol):
    """The target's processed next-token law at each node of one tree, computed when asked for."""

    @property
    def greedy(self) -> bool: ...
    def probs(self, node: int) -> Tensor: ...  # [V], float32, sums to 1
    def argmax(self, node: int) -> int: ...
    def together(self) -> Tensor | None: ...  # [rows, V]: all of them, where that costs less than one by one; else None


class Noise(Protocol):
    """The only source of randomness of drafters and verifiers, so that a test can branch on every outcome.

    `node` and `draw` key the random bits: one decision has one key, and no key is used twice in a step.
    """

    def coin(self, p: float, node: int, draw: int) -> bool:
        """True with probability p."""
        ...

    def draw(self, weights: Tensor | NDArray[np.float64], node: int, draw: int) -> int:
        """An index, with probability proportional to its weight."""
        ...

    def pick(self, probs: Tensor, path: Sequence[int]) -> int:
        """An index by the target's own noise behind the text and these tokens: the same for any tree, drafter or batch.

        `path` is what stands between the pending token and the decision.
        """
        ...

    def pick_rows(self, probs: Tensor, tree: TokenTree) -> list[int]:
        """`pick` at every node, from [rows, V] in node order, with one transfer to the host."""
        ...


class SharedNoise(Noise, Protocol):
    """What a drafter with `shared_noise` asks besides: how the target's own race would end under the draft's law."""

    def first(self, ids: NDArray[np.int64], probs: NDArray[np.float64], path: Sequence[int], count: int) -> list[int]:
        """Places of the tokens that `pick` would choose first, in that order."""
        ...


@dataclass(frozen=True, slots=True)
class Traits:
    """What a target says of itself: how it runs, and what its steps cost and keep."""

    runtime: str = ""
    precision: str | None = None  # of the weights; None: the dtype that the model has
    weight_bytes: int | None = None  # read by a step of greedy decoding, where the runtime knows
    slots: int = 1  # sequences that it holds at once
    even: bool = False  # a step costs the same whatever ran before it
    own_threads: bool = False  # it computes in threads other than torch's
    width: Callable[[int], int] | None = None  # rows that a step of one sequence runs now for so many; None: as many


class Target(Protocol):
    """Runs the model. All methods change state except `length`."""

    @property
    def traits(self) -> Traits: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_context(self) -> int: ...  # positions a sequence may use
    @property
    def max_rows(self) -> int: ...  # rows of one tree that fit behind the committed prefix
    @property
    def free_slots(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def acquire(self) -> int: ...
    def release(self, slot: int) -> None: ...
    def fork(self, slot: int) -> int: ...
    def length(self, slot: int) -> int: ...  # committed tokens in the cache; the pending one is not among them

    def prefill(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]], needs: Needs
    ) -> Iterator[list[Chunk]]: ...  # runs all but the last prompt token, which stays pending; must be exhausted

    def verify(
        self, slots: Sequence[int], trees: Sequence[TokenTree], needs: Needs, done: Sequence[int] | None = None
    ) -> list[Scores]: ...  # `done[i]`: leading nodes of tree i already run since the last commit; rows cover the rest

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None: ...  # pending token and path stay

    def prepare(
        self, contexts: Sequence[int], needs: Needs
    ) -> None: ...  # make ready now what is otherwise made when it has paid: steps of single texts of so many tokens


class Source(Protocol):
    """A drafter's inner next-token law, unrolled by a grower one tree level at a time over the whole batch."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> Needs: ...
    def begin(self, slot: int, context: Context, chunks: Iterable[Chunk]) -> None: ...
    def end(self, slot: int) -> None: ...
    def start(self, slots: Sequence[int]) -> list[QRow]: ...  # the law after each slot's pending token
    def extend(
        self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]
    ) -> list[list[QRow]]: ...  # the laws after nodes done[i].. of each tree; earlier nodes were given before
    def observe(self, slot: int, record: StepRecord) -> None: ...  # its tree may number and hold other nodes than those


class Grower(Protocol):
    """Unrolls a source into one tree a slot. Knows no model."""

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],  # None: nothing is drawn for that slot, the likeliest tokens are point masses
    ) -> list[TokenTree]: ...  # fmt: skip

    def observe(self, slot: int, record: StepRecord) -> None: ...  # what became of its tree; for the shapes to come


class Drafter(Protocol):
    """Proposes a tree a slot. Can be wrong, never harmful: a bad proposal costs time only."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> Needs: ...
    @property
    def shared_noise(self) -> bool: ...  # draws with the target's own stream, which every coupled rule refuses
    def begin(self, slot: int, context: Context, chunks: Iterable[Chunk]) -> None: ...
    def end(self, slot: int) -> None: ...
    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals: ...
    def observe(self, slot: int, record: StepRecord) -> None: ...


class Role(StrEnum):
    """What it costs to ask a drafter, which decides when a mixture asks it."""

    FREE = "free"  # next to nothing: in every step
    LOOKS = "looks"  # reading the target's rows after every step: over stretches in which that pays
    RUNS = "runs"  # a network's time for each level: as deep as pays
    DRAWS = "draws"  # its candidates are sampled: it gets a share of the budget before it draws


@dataclass(frozen=True, slots=True)
class Part:
    """A drafter of a mixture."""

    drafter: Drafter
    role: Role


class Advice(Protocol):
    """What a mixture asks its controller while it drafts. A part is known by its number."""

    def awake(self, part: int) -> bool:
        """Whether the part takes part in this stretch of steps at all: looks at rows, and may be asked."""
        ...

    def ask(
        self, part: int, slots: Sequence[int], found: Sequence[Candidates], budgets: Sequence[Budget]
    ) -> Sequence[Budget]:
        """How much to ask of the part, where the others have found this much; no nodes: not at all."""
        ...

    def shares(self) -> Sequence[float]:
        """Of the budget, for each part that draws."""
        ...


@runtime_checkable
class Remembers(Protocol):
    """A drafter (or source) whose memory outlives a request: bounded in bytes, kept as plain arrays, private if asked.

    Optional: whoever saves, loads or resets memory looks for these methods on the recipe's drafter. A part that holds
    others answers for them, with their names in front.
    """

    def memory(self) -> dict[str, NDArray[Any]]: ...  # all that is worth keeping; copies or read-only views
    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None: ...  # replaces what is there; InputError: no fit
    def forget(self) -> None: ...  # all that texts have taught; running sequences go on


class Verifier(Protocol):
    """An exact acceptance rule for the laws in `honours`; refuses other draws with `UnsupportedDraws`."""

    @property
    def name(self) -> str: ...
    @property
    def honours(self) -> frozenset[Law]: ...
    @property
    def coupled(self) -> bool: ...  # decides by the draws, so equal seeds repeat only for the same method and batch
    def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict: ...


class Controller(Protocol):
    """Decides how much to speculate: before drafting from past steps only, after it among point masses."""

    @property
    def name(self) -> str: ...
    def begin(self, slot: int) -> None: ...
    def end(self, slot: int) -> None: ...
    def plan(self, slots: Sequence[int], limits: Sequence[Budget], load: Load) -> list[Budget]: ...
    def size(
        self, slots: Sequence[int], proposals: Proposals, budgets: Sequence[Budget], load: Load, seconds: float
    ) -> list[TokenTree]: ...  # what is verified of proposals that took so long to draft
    def observe(self, slots: Sequence[int], records: Sequence[StepRecord], timing: StepTiming) -> None: ...


class StepCosts(Protocol):
    """Learns what steps of a target take, whatever method asked for them."""

    def add(self, rows: int, batch: int, seconds: float) -> None: ...  # without drafting


class Constraint(Protocol):
    """Reshapes the target's law before verification, from the node's own path; grammars and foreign processors."""

    def reshape(self, tokens: NDArray[np.int64], logits: Tensor) -> Tensor: ...  # context and path; [V] -> [V]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A method made ready to run: what the engine needs of it, and nothing concrete."""

    name: str
    drafter: Drafter | None  # None: plain decoding
    verifier: Verifier
    controller: Controller
    lossless: bool = True
    options: Any = None
    costs: StepCosts | None = None  # the target's; told of every step
