"""ASAp: learns what a grammar leaves of a text's future, until samples are the model's, conditioned on the grammar.

Paper: grammar-aligned decoding (arXiv 2405.21047). Masking alone ignores how much probability a legal token will lose
later. Here a trie holds, for each output that was seen, the model's probability before masking and a bound on the
chance that a continuation which the model draws is legal to its end:

    bound(w) = 1 where w was not looked at,   sum over legal v of p(v | w) bound(w v)   where it was

and a token is drawn in proportion to p(v | w) bound(w v). The first sample is that of masking; bounds never rise and
are never below the truth; where all is looked at, samples are exactly the model's, given that the text is legal. A
sample that ends at its greatest length counts as legal as far as it went. Of temperature and truncation only the
temperature may be asked for: the bound acts behind it. LOSSY while bounds are loose, as is the mask itself.

Bounds change in `settle` only, between rounds of samples: whatever runs in one round cannot depend on what ran first.
A trie is of one prompt, one grammar and one set of parameters. Cost: a softmax over each emitted row, and a few numbers
for each output that was seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.core.records import SeenRow

FEW = 64  # legal tokens of a row that are all kept: their sum has no rounding that a difference would have
MAX_NODES = 1 << 20  # of a trie; what does not fit keeps the bound 1, which is sound
OTHER_ROWS = 1e-3  # of legal mass, by which a row may differ from an earlier one behind the same output


@dataclass(slots=True)
class _Node:
    """What is known of one output. `mass` is None until its row was seen."""

    bound: float = 1.0
    mass: float | None = None
    probs: dict[int, float] = field(default_factory=dict)  # of legal tokens that were looked at, or of all of a few
    few: bool = False  # `probs` has all legal tokens
    children: dict[int, _Node] = field(default_factory=dict)

    def tighten(self) -> None:
        """Changes state: the sum rule, from the children's bounds."""
        if self.mass is None:
            return
        if self.few:
            now = math.fsum(p * self._bound(token) for token, p in self.probs.items())
        else:
            now = self.mass - math.fsum(p * (1 - self._bound(token)) for token, p in self.probs.items())
        self.bound = min(self.bound, max(now, 0.0))

    def _bound(self, token: int) -> float:
        child = self.children.get(token)
        return 1.0 if child is None else child.bound


@dataclass(frozen=True, slots=True)
class _Found:
    """What one row says: legal mass, and the probability of legal tokens that are worth keeping."""

    output: tuple[int, ...]
    mass: float
    probs: dict[int, float]
    few: bool


class ASAp:
    """A `protocols.Bound`. Give it beside a grammar to every sample of a prompt, and `settle` between rounds.

    `whole_trees` learns from all nodes of a verified tree, which is sooner there; texts then depend on what a drafter
    proposed in earlier rounds. Without it equal seeds give equal texts with any drafter.
    """

    def __init__(self, whole_trees: bool = False, max_nodes: int = MAX_NODES) -> None:
        self.whole_trees, self.max_nodes = whole_trees, max_nodes
        self.nodes = 1
        self._root = _Node()
        self._asked: tuple[tuple[int, ...], SamplingParams] | None = None
        self._found: list[_Found] = []
        self._dead: list[tuple[int, ...]] = []

    @property
    def bound(self) -> float:
        """On the chance that a text drawn from the model alone is legal: 1 at first, never below the truth."""
        return self._root.bound

    def begin(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if params.top_k or params.top_p < 1 or params.min_p:
            raise InputError("ASAp learns the whole distribution: leave out top_k, top_p and min_p")
        same = replace(
            params, n=1, seed=None, max_new_tokens=max(1, params.min_new_tokens), stop=(), logprobs=None, prediction=()
        )  # what is left decides the distribution
        asked = tuple(prompt), same
        if self._asked is not None and self._asked != asked:
            raise InputError("this ASAp has learnt from another prompt or other parameters; make one for each")
        self._asked = asked

    def lowered(self, output: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens with a bound below 1, and its logarithm."""
        node = self._at(output)
        found = [] if node is None else [(v, child.bound) for v, child in node.children.items() if child.bound < 1]
        ids = np.array([token for token, _ in found], dtype=np.int64)
        with np.errstate(divide="ignore"):
            return ids, np.log(np.array([bound for _, bound in found], dtype=np.float64)).astype(np.float32)

    def observe(self, seen: Sequence[SeenRow]) -> None:
        """Takes a note of rows for `settle`."""
        for row in seen:
            if row.legal is None:  # nothing is restricted there: behind the end of a text, or what no text can be
                continue
            found = _read(row)
            node = self._at(row.output)
            if node is not None and node.mass is not None and abs(node.mass - found.mass) > OTHER_ROWS:
                raise InputError("this ASAp has learnt from another grammar or model; make one for each")
            self._found.append(found)

    def dead(self, output: Sequence[int]) -> None:
        """Takes a note that nothing legal follows this output: where a sample ended with `EmptySupport`."""
        self._dead.append(tuple(output))

    def settle(self) -> float:
        """Changes bounds by all that was seen since the last call; returns the new `bound`."""
        found = sorted(self._found, key=lambda one: one.output)
        dead = sorted(self._dead)
        self._found, self._dead = [], []
        touched = {output[:end] for output in dead for end in range(len(output))}
        for output in dead:
            if (node := self._at(output, grow=True)) is not None:
                node.bound = 0.0
        for one in found:
            if (node := self._at(one.output, grow=True)) is None:
                continue
            if node.mass is None:
                node.mass, node.few = one.mass, one.few
            for token, prob in one.probs.items():
                node.probs.setdefault(token, prob)
            touched.update(one.output[:end] for end in range(len(one.output) + 1))
        for output in sorted(touched, key=len, reverse=True):
            if (node := self._at(output)) is not None:
                node.tighten()
        return self.bound

    def _at(self, output: Iterable[int], grow: bool = False) -> _Node | None:
        node = self._root
        for token in output:
            child = node.children.get(token)
            if child is None:
                if not grow or self.nodes >= self.max_nodes:
                    return None
                child = node.children[token] = _Node()
                self.nodes += 1
            node = child
        return node


def _read(row: SeenRow) -> _Found:
    assert row.legal is not None
    bits = np.unpackbits(row.legal.view(np.uint8), bitorder="little")[: len(row.probs)].view(bool)
    legal = np.flatnonzero(bits)
    few = len(legal) <= FEW
    kept = legal.tolist() if few else [token for token in dict.fromkeys(row.children) if bits[token]]
    return _Found(row.output, float(row.probs[legal].sum()), {v: float(row.probs[v]) for v in kept}, few)
