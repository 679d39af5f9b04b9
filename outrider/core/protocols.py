"""What each part may ask of the others.

Everything is per *slot* (one running sequence) and batched over slots; a batch of one is not special. Methods that
change state say so. The records that cross between the parts are in `records.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.core.proposals import Candidates, Proposals
from outrider.core.records import (
    Budget,
    Chunk,
    Load,
    Needs,
    Piece,
    Role,
    Scores,
    SeenRow,
    StepRecord,
    StepTiming,
    Traits,
    Verdict,
)
from outrider.core.rows.side import SideRows
from outrider.core.tree import Law, QRow, TokenTree


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
        """Of logits [paths, V] each row warped as the target's are, its `width` likeliest tokens, renormalised."""
        ...

    def continuations(self) -> list[list[int]]:
        """What a constraint leaves to follow the text, or suggests, the likeliest way first; often nothing."""
        ...


class Rows(Protocol):
    """The target's processed next-token distribution at each node of one tree, computed when asked for."""

    @property
    def greedy(self) -> bool: ...
    def probs(self, node: int) -> Tensor: ...  # [V], float32, sums to 1
    def argmax(self, node: int) -> int: ...
    def pick(self, node: int, path: Sequence[int], noise: Noise) -> int: ...  # of its probabilities, in less time
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
        """An index by the target's noise behind the text and then `path`: the same for any tree, drafter or batch."""
        ...

    def pick_rows(self, probs: Tensor, tree: TokenTree) -> list[int]:
        """`pick` at every node, from [rows, V] in node order, with one transfer to the host."""
        ...


class SharedNoise(Noise, Protocol):
    """What a drafter with `shared_noise` asks besides: how the target would pick from the draft's distribution."""

    def first(self, ids: NDArray[np.int64], probs: NDArray[np.float64], path: Sequence[int], count: int) -> list[int]:
        """Places of the tokens that `pick` would choose first, in that order."""
        ...


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
    def acquire(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        """A slot for a text that begins with `tokens`; it may hold a beginning of them already (see `length`).

        Only texts that were acquired with the same salt are found.
        """
        ...

    def release(self, slot: int) -> None: ...  # its text may be found by `acquire` until the room is wanted
    def fits(self, rows: Mapping[int, int]) -> bool: ...  # whether each of these slots can take so many more rows
    def length(self, slot: int) -> int: ...  # committed tokens in the cache; the pending one is not among them
    def fork(self, slot: int, length: int | None = None) -> int: ...  # a new slot that holds the same first tokens
    def truncate(self, slot: int, length: int) -> None: ...  # forget what stands behind the first `length` tokens
    def run(self, pieces: Sequence[Piece], needs: Needs) -> list[Scores]: ...  # one pass; a slot has one piece in it
    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None: ...  # pending token and path stay
    def prepare(self, contexts: Sequence[int], needs: Needs) -> None: ...  # for single texts of so many tokens, now


@runtime_checkable
class Closes(Protocol):
    """A target that holds more than memory, processes for instance."""

    def close(self) -> None: ...


class Source(Protocol):
    """A drafter's inner next-token distribution, unrolled by a grower one tree level at a time over the whole batch."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> Needs: ...
    def begin(self, slot: int, context: Context) -> None: ...
    def absorb(self, chunks: Sequence[Chunk]) -> None: ...
    def end(self, slot: int) -> None: ...
    def start(self, slots: Sequence[int]) -> list[QRow]: ...  # the distribution after each slot's pending token
    def extend(
        self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]
    ) -> list[list[QRow]]: ...  # those after nodes done[i].. of each tree; earlier nodes were given before
    def observe(
        self, slots: Sequence[int], records: Sequence[StepRecord]
    ) -> None: ...  # a record's tree may hold other nodes than the source was asked for


@runtime_checkable
class Refreshes(Protocol):
    """A target whose model may be tuned in place."""

    def refresh(self, model: Any) -> None: ...  # runs this model's weights as they are now; every slot must be free


class States(Protocol):
    """A source that shows the hidden states behind its distributions."""

    def states(self, slots: Sequence[int]) -> list[Tensor]: ...  # [nodes, d]: of those that ran last, in their order


class Marks(Protocol):
    """Says of nodes that a source has just run how likely each is to be accepted, given that its parent was.

    A grower that is handed marks asks for them after every level; the trees carry them as their weights.
    """

    def chances(
        self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]
    ) -> list[NDArray[np.float64]]: ...  # of nodes done[i].. of each tree, which `Source.extend` was given


class WholeSource(Source, Protocol):
    """A source whose distribution at a depth is the same whatever is drafted above: a hint to growers.

    They take all rows of a tree from one call, and go on without asking between its levels.
    """

    def marginals(self, slots: Sequence[int]) -> list[list[QRow]]: ...  # a row a depth; none: nothing to go on from


class Grower(Protocol):
    """Unrolls a source into one tree a slot. Knows no model."""

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],  # None: nothing is drawn for that slot, the likeliest tokens are point masses
    ) -> list[TokenTree]: ...  # fmt: skip

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None: ...  # for the shapes to come


class Drafter(Protocol):
    """Proposes a tree a slot. Can be wrong, never harmful: a bad proposal costs time only.

    Every call but `begin` and `end` is for several slots at once. After `begin` comes what went through the target of
    the slot's prompt, piece by piece; it may be only the end of it, or nothing, where the target held a prefix already:
    what a drafter was not handed it reads from the context.
    """

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> Needs: ...
    @property
    def shared_noise(self) -> bool: ...  # draws with the target's own stream, which every coupled rule refuses
    def begin(self, slot: int, context: Context) -> None: ...
    def absorb(self, chunks: Sequence[Chunk]) -> None: ...  # stretches of prompts, with the scores that `needs` asked
    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals: ...
    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None: ...
    def end(self, slot: int) -> None: ...


@runtime_checkable
class HasSideRows(Protocol):
    """A drafter with rows of its own beside the candidates. Optional: looked for in the recipe's drafter.

    It is asked once the trees of a step are settled, and finds its rows' scores in `Scores.side` of the record; they
    are None where a pass had no room for the rows.
    """

    def side_rows(self, slots: Sequence[int], trees: Sequence[TokenTree]) -> Sequence[SideRows | None]: ...


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

    def reads(self, part: int) -> bool:
        """Whether the part is told of the prompts that run now."""
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
    """Learns what steps of a target take, whatever method asked for them. Seconds are without drafting."""

    def add(self, rows: int, batch: int, seconds: float, context: int) -> None: ...
    def seconds(self, batch: int, candidates: int, context: int) -> NDArray[np.float64]: ...  # with 0, 1, ... of them


@runtime_checkable
class Constraint(Protocol):
    """Reshapes the target's distribution before verification, by the node's path: grammars, foreign processors."""

    def reshape(self, tokens: NDArray[np.int64], logits: Tensor) -> Tensor: ...  # context and path; [V] -> [V]


@runtime_checkable
class Bound(Protocol):
    """A constraint that acts after the temperature, where it lowers tokens, and learns from the rows that ran."""

    @property
    def whole_trees(self) -> bool: ...  # wants all nodes of a verified tree, not only those that tokens came from
    def begin(self, prompt: Sequence[int], params: SamplingParams) -> None: ...  # refuses what it cannot be exact for
    def lowered(self, output: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids after this output, and what is added to their logits / T; at temperature 0 only -inf counts."""
        ...

    def observe(self, seen: Sequence[SeenRow]) -> None: ...  # changes state, but no answer of `lowered`


@runtime_checkable
class Predicate(Protocol):
    """A constraint that is asked about one token after the other, in the order in which noise would choose them.

    The first that may follow is the one that a mask over the distribution would have left to be chosen.
    """

    def choose(self, output: Sequence[int], order: Iterator[int]) -> int: ...  # EmptySupport where none may follow


@runtime_checkable
class Automaton(Protocol):
    """A constraint with a state that goes from token to token: grammars, copies, substrings of a corpus.

    Compiled once, and shared by sequences, each of which starts with a state of its own. States are values: `advance`
    leaves the old one good, so that every node of a tree has one. Ids that end the text are not its matter: they are
    allowed where it is complete, and nowhere else.
    """

    def start(self, prompt: Sequence[int]) -> Any: ...  # the state before the first token of the output
    def advance(self, state: Any, token: int) -> Any: ...  # None where the token may not follow
    def mask(self, states: Sequence[Any]) -> NDArray[np.int32]:
        """[states, words], made for the caller: token t may follow where bit t % 32 of word t // 32 is set."""
        ...

    def allows(self, state: Any, token: int) -> bool: ...  # the same for one token, in less time than a mask
    def forced(self, state: Any) -> Sequence[int]: ...  # legal tokens of text that is bound to follow; often empty
    def complete(self, state: Any) -> bool: ...  # the text may end here


@runtime_checkable
class Suggests(Protocol):
    """An automaton that knows likely ways on where none is bound to follow, such as those of a text it copies from."""

    def continuations(self, state: Any) -> list[list[int]]: ...  # legal tokens, the likeliest way first


AnyConstraint = Constraint | Automaton | Bound | Predicate
Constraints = AnyConstraint | Sequence[AnyConstraint]  # what a request may be given; () is nothing
CompileForm = Callable[[SamplingParams], Automaton]  # of parameters that ask for a form: JSON, a grammar, choices


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
