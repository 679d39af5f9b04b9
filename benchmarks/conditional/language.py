"""ASAp on a real model and a language so small that the model's distribution, given the language, is computed exactly.

    PYTHONPATH=. python benchmarks/conditional/language.py --model smollm2

The language 00000 | 1[01][01][01][01], each text with the end of the text behind it. Prints the bound on the
probability of the language beside the truth, and the divergence of the current distribution from the conditional one,
both read off the bounds: under masking alone, after rounds of samples, and with every inner node looked at.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import pairwise, product

import numpy as np
import torch

import outrider
from outrider.constrain.asap import ASAp
from outrider.constrain.finite import Finite
from outrider.core.params import SamplingParams
from outrider.core.records import NO_NEEDS, Piece, SeenRow
from outrider.core.schedule import run_all
from outrider.core.tree import from_paths
from outrider.search.aligned import rounds
from tests.constrain.languages import language

PROMPT = "Five random bits, for example 01101, 11010, 10011:"
Text = tuple[int, ...]
Rows = dict[Text, np.ndarray]


def rows_of(engine: outrider.Outrider, prompt: list[int], texts: list[Text]) -> Rows:
    """The model's distribution behind every beginning of the texts, from one tree."""
    target = engine.target
    slot = target.acquire()
    run_all(target, [(slot, prompt[:-1])])
    tree = from_paths(prompt[-1], texts)
    (scores,) = target.run([Piece(slot, tree=tree)], NO_NEEDS)
    probs = torch.softmax(scores.logits.double(), 1).numpy()
    target.release(slot)
    return {tuple(tree.path_tokens(node)): probs[node] for node in range(len(tree))}


def drawn_from(rows: Rows, automaton: Finite, learner: ASAp, texts: list[Text], end: int) -> dict[Text, float]:
    """The distribution of the next sample."""
    found = {}
    for text in texts:
        probability, state = 1.0, 0
        for i, token in enumerate((*text, end)):
            legal = set(automaton.table[state]) | ({end} if state in automaton.accepting else set())
            weights = {v: rows[text[:i]][v] for v in legal}
            for v, lower in zip(*learner.lowered(text[:i]), strict=True):
                weights[int(v)] *= math.exp(lower)
            probability *= weights[token] / sum(weights.values())
            state = automaton.table[state].get(token, -1)
        found[text] = probability
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--runtime", default="auto")
    asked = parser.parse_args()
    with outrider.load(asked.model, method="plain", runtime=asked.runtime, max_context=256) as engine:
        zero, one = (engine.tokenizer.convert_tokens_to_ids(digit) for digit in "01")
        texts = [(zero,) * 5, *((one, *rest) for rest in product((zero, one), repeat=4))]
        automaton = language(texts, engine.target.vocab_size)
        prompt, (end,) = engine.encode(PROMPT), sorted(engine.loaded.eos_ids)[:1]
        rows = rows_of(engine, prompt, texts)
        chances = {t: math.prod(rows[t[:i]][v] for i, v in enumerate((*t, end))) for t in texts}
        truth = sum(chances.values())
        wanted = {text: chance / truth for text, chance in chances.items()}

        def told(what: str, learner: ASAp, **more: object) -> None:
            found = drawn_from(rows, automaton, learner, texts, end)
            kl = sum(p * math.log(p / found[text]) for text, p in wanted.items())
            print(json.dumps({"after": what, "bound": learner.bound, "truth": truth, "divergence": kl, **more}))

        learner = ASAp()
        told("nothing: masking", learner)
        params = SamplingParams(temperature=1.0, max_new_tokens=8, n=8, seed=1)
        bounds = [1.0]
        for done in rounds(engine, prompt, params, [automaton], learner, asked.rounds):
            bounds.append(done.bound)
            if done.number + 1 in (1, 2, 5, 10, 20, asked.rounds):
                told(f"{8 * (done.number + 1)} samples", learner)
        falling = all(after <= before for before, after in pairwise(bounds))
        for prefix, probs in rows.items():
            state = 0
            for token in prefix:
                state = automaton.table[state][token]
            words = automaton.mask([state])[0].copy()
            if state in automaton.accepting:
                words[end // 32] |= np.int32(1 << end % 32)
            learner.observe([SeenRow(prefix, probs, words, ())])
        learner.settle()
        told("every inner node", learner, never_rose=falling, never_below=bool(min(bounds) >= truth * (1 - 1e-9)))


if __name__ == "__main__":
    main()
