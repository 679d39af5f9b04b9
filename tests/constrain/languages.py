"""Small random languages over toy models, whose conditional distribution can be written down; what tests share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np

from outrider.check.toy import ToyLM, ToySource, ToyTarget
from outrider.constrain.asap import ASAp
from outrider.constrain.finite import Finite
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.draft.grown import Grown
from outrider.grow.kary import KAry
from outrider.verify.invariant import Invariant

Text = tuple[int, ...]
PROMPT = (0, 1)


def language(texts: Sequence[Text], vocab_size: int, traps: Sequence[Text] = ()) -> Finite:
    """Exactly these texts, and prefixes that lead nowhere."""
    table: list[dict[int, int]] = [{}]
    accepting = set()
    for text in (*texts, *traps):
        state = 0
        for token in text:
            if token not in table[state]:
                table.append({})
                table[state][token] = len(table) - 1
            state = table[state][token]
        if text in texts:
            accepting.add(state)
    return Finite(table, frozenset(accepting), vocab_size)


def random_texts(seed: int, vocab_size: int = 3, length: int = 3, share: float = 0.4) -> list[Text]:
    rng = np.random.default_rng(seed)
    every = list(product(range(vocab_size), repeat=length))
    return [text for text in every if rng.random() < share] or [every[int(rng.integers(len(every)))]]


def chance(lm: ToyLM, text: Text) -> float:
    return math.prod(lm.probs([*PROMPT, *text[:i]])[token] for i, token in enumerate(text))


def conditional(lm: ToyLM, texts: Sequence[Text]) -> dict[Text, float]:
    """The model's distribution, given that the text is one of these."""
    weights = {text: chance(lm, text) for text in texts}
    return {text: weight / sum(weights.values()) for text, weight in weights.items()}


def future(lm: ToyLM, texts: Sequence[Text], output: Text) -> float:
    """The chance that what the model draws behind this output ends in one of the texts."""
    return sum(chance(lm, text) for text in texts if text[: len(output)] == output) / chance(lm, output)


def current(lm: ToyLM, automaton: Finite, learner: ASAp, texts: Sequence[Text]) -> dict[Text, float]:
    """What the next sample is drawn from, read off the bounds."""
    found = {}
    for text in texts:
        probability, state = 1.0, 0
        for i, token in enumerate(text):
            row = lm.probs([*PROMPT, *text[:i]])
            weights = {v: row[v] for v in automaton.table[state]}
            for v, lower in zip(*learner.lowered(text[:i]), strict=True):
                if v in weights:
                    weights[int(v)] *= math.exp(lower)
            total = sum(weights.values())
            probability *= weights[token] / total if total else 0.0
            state = automaton.table[state][token]
        found[text] = probability
    return found


def divergence(wanted: dict[Text, float], found: dict[Text, float]) -> float:
    return sum(p * (math.log(p) - math.log(found[text])) for text, p in wanted.items() if p > 0)


def toy_engine(lm: ToyLM, drafted: bool = False, draft: ToyLM | None = None) -> Engine:
    """Plain, or with trees of two tokens at each of two levels."""
    drafter = Grown(ToySource(draft or ToyLM(lm.vocab, seed=77)), KAry((2, 2), "top")) if drafted else None
    recipe = Recipe("toy", drafter, Invariant(), Fixed(Budget(6, 2) if drafted else Budget(0, 0)))
    return Engine(ToyTarget(lm), recipe, strict=True)
