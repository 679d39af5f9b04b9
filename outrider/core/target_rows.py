"""The target's rows along one tree, as verifiers and traces ask for them: processed when asked for, and kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.core.noise import StreamNoise, race_order
from outrider.core.numeric.picked import pick_score
from outrider.core.protocols import Noise, Predicate
from outrider.core.records import SeenRow
from outrider.core.sampling import History
from outrider.core.tree import TokenTree
from outrider.core.warping import cheap_together, from_the_top

NONE_LEFT = -1  # in place of a token: nothing may follow


class TargetRows:
    """The target's processed distribution at each node of one tree, computed when asked for and kept."""

    def __init__(
        self, logits: Tensor, tree: TokenTree, history: History, likeliest: Sequence[int] | None = None,
        noise: Noise | None = None, among: tuple[Tensor, int] | None = None, raced: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.logits = logits  # [rows, V], raw, never written to
        self.among = among  # the rows of all slots, and where these begin among them
        self.likeliest = likeliest  # the argmax of each raw row, where it is known already
        self.tree = tree
        self.history = history
        self.chosen = raced  # at each node, where that was found out for many sequences at once
        self._noise = noise  # what chooses where a predicate has to be asked
        self._probs: dict[int, Tensor] = {}
        self._argmax: dict[int, int] = {}

    @property
    def greedy(self) -> bool:
        return self.history.params.greedy

    def probs(self, node: int) -> Tensor:
        """[V] float32. At temperature 0, and with a predicate, all of it stands on one token."""
        if node not in self._probs:
            if self.greedy or self.history.predicate is not None:
                row = torch.zeros(self.logits.shape[1], device=self.logits.device)
                row[self.argmax(node)] = 1.0
            else:
                row = torch.softmax(self._process(node), 0)
            self._probs[node] = row
        return self._probs[node]

    def together(self) -> Tensor | None:
        """[rows, V] on a GPU, where one row costs as much as all; None elsewhere, and where rows are reshaped."""
        history = self.history
        if self.greedy or self.chosen is not None or not cheap_together(self.logits):
            return None
        if any(history.reshapes(self.tree.path_tokens(node)) for node in range(len(self.tree))):
            return None
        return torch.softmax(history.warp(self.logits.float()), -1)

    def pick(self, node: int, path: Sequence[int], noise: Noise) -> int:
        """The token that the target's noise chooses behind this node; on the host mostly without a softmax."""
        if self.chosen is not None:
            return self._said(self.chosen, node)
        history = self.history
        no_row = self.greedy or history.predicate is not None or cheap_together(self.logits)
        if no_row or not isinstance(noise, StreamNoise):
            return noise.pick(self.probs(node), path)
        key, logits = np.uint64(noise.target_key(path)), self.logits[node]
        if history.only_divided:
            return int(pick_score(history.scored(logits, path).numpy(), history.temperature, key))
        return int(pick_score(history.process(logits, path).numpy(), 1.0, key))

    def argmax(self, node: int) -> int:
        """The likeliest token, the lowest id among equals; with a predicate the one that is chosen."""
        if self.chosen is not None:
            return self._said(self.chosen, node)
        if self.likeliest is not None and not self.history.edits_rows:
            return int(self.likeliest[node])
        if node not in self._argmax:
            path = self.tree.path_tokens(node)
            reshaped = self.history.reshapes(path)
            if self.history.predicate is not None:
                self._argmax[node] = self._chosen(self.history.predicate, node, path)
            elif self.likeliest is not None and (not reshaped or self.history.keeps(self.likeliest[node], path)):
                self._argmax[node] = int(self.likeliest[node])
            elif self.logits.device.type == "cpu":
                self._argmax[node] = token = _largest_id(self.logits[node])
                if reshaped and not self.history.keeps(token, path):
                    self._argmax[node] = self.history.likeliest(self.logits[node], path)
            elif reshaped:
                self._argmax[node] = int(self._process(node).argmax())
            else:  # one transfer for the whole tree
                self._argmax.update(enumerate(self.logits.argmax(1).tolist()))
        return self._argmax[node]

    def _said(self, chosen: Sequence[int], node: int) -> int:
        if chosen[node] == NONE_LEFT:
            raise self.history.nothing_left(self.tree.path_tokens(node))
        return chosen[node]

    def logprobs(self, node: int) -> tuple[Tensor, Tensor]:
        """Raw and processed log-probabilities, [V] float32 each.

        Processed ones are of the distribution that is sampled from; at temperature 0, of the processed logits
        (penalties, bias, bans and constraint included) at temperature 1.
        """
        return torch.log_softmax(self.logits[node].float(), 0), torch.log_softmax(self._process(node), 0)

    def chances(self, pairs: Sequence[tuple[int, int]]) -> Tensor:
        """The probability of each (node, token), on the target's device; at temperature 0 that at temperature 1."""
        drawn = not self.greedy and self.history.predicate is None
        rows = {
            node: self.probs(node) if drawn else torch.softmax(self._process(node), 0)
            for node in dict.fromkeys(node for node, _ in pairs)
        }
        return torch.stack([rows[node][token] for node, token in pairs])

    def legal_mass(self, node: int) -> float:
        return self.history.legal_mass(self.logits[node], self.tree.path_tokens(node))

    def seen(self, path: Sequence[int], next_token: int) -> list[SeenRow]:
        """For a bound: the rows that the tokens came from, in their order; then, if it wants them, all others."""
        assert self.history.bound is not None
        first = [0, *path]
        rest = set(range(len(self.tree))) - set(first) if self.history.bound.whole_trees else set()
        rows = []
        for node in [*first, *sorted(rest)]:
            children = [int(self.tree.tokens[child]) for child in self.tree.children(node)]
            children += [next_token] if node == first[-1] else []
            rows.append(self.history.seen(self.logits[node], self.tree.path_tokens(node), children))
        return rows

    def _chosen(self, predicate: Predicate, node: int, path: Sequence[int]) -> int:
        """The first token that passes, in the order in which the target's noise chooses, or from the likeliest down."""
        order, _ = self.order(node)
        return predicate.choose((*self.history.output, *path), order)

    def order(self, node: int) -> tuple[Iterator[int], Tensor]:
        """All tokens that have probability, in the order in which noise chooses; and the probabilities, in float64."""
        scores = self._process(node)
        assert self._noise is not None
        probs = torch.softmax(scores.double(), 0)
        if self.greedy:
            return from_the_top(scores), probs
        return race_order(probs.clone(), self.tree.path_tokens(node), self._noise), probs

    def _process(self, node: int) -> Tensor:
        return self.history.process(self.logits[node], self.tree.path_tokens(node))


def _largest_id(row: Tensor) -> int:
    """The id of the largest of a row on the host, the lowest among equals."""
    return int(row.numpy().argmax() if row.dtype is torch.float32 else row.argmax())
