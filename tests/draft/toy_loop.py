"""The whole loop on a toy target with any drafter, every outcome enumerated; what drafters' tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from outrider.check.enumeration import Branches, outcomes
from outrider.check.exhaustive import CONTEXT, plain_distribution
from outrider.check.toy import ToyLM, ToyTarget
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.protocols import Drafter, Recipe, Verifier
from outrider.core.records import Budget, Scores, StepRecord, Verdict
from outrider.core.sampling import History, SamplingParams
from outrider.core.tree import TokenTree, root

TOKENS = 4


def distribution_gap(
    make: Callable[[], Drafter], verifier: Verifier, budget: Budget, target: ToyLM, limit: int = 60_000
) -> float:
    """Largest difference in probability between texts generated with a new drafter each time and the target's."""

    def generate(paths: Branches) -> tuple[int, ...]:
        engine = Engine(
            ToyTarget(target), Recipe("toy", make(), verifier, Fixed(budget)), strict=True,
            make_noise=lambda seed, sample, stream, text, position: paths.noise(stream, text, position, sample),
        )  # fmt: skip
        params = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=0)
        return tuple(engine.submit(CONTEXT, params).result().token_ids)

    found, want = outcomes(generate, limit), plain_distribution(target, TOKENS)
    assert abs(sum(found.values()) - 1.0) < 1e-6
    return max(abs(found.get(text, 0.0) - want.get(text, 0.0)) for text in {*found, *want})


def history(tokens: Sequence[int], vocab_size: int, temperature: float = 0.0) -> History:
    return History(tokens, SamplingParams(temperature=temperature), vocab_size)


def step(drafter: Drafter, slot: int, past: History, logits: np.ndarray, token: int) -> None:
    """A step without candidates: the target gave this row and the token came next."""
    tree = root(int(past.tokens[-1]))
    past.append([token])
    scores = Scores(torch.as_tensor(logits, dtype=torch.float32)[None, :])
    drafter.observe([slot], [StepRecord(tree, Verdict((), token), (token,), scores)])


def spelled(tree: TokenTree) -> set[tuple[int, ...]]:
    """The tree as the set of its paths."""
    return {tuple(tree.path_tokens(node)) for node in range(1, len(tree))}
