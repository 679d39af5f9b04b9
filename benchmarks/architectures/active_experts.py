"""The default policy on a mixture model, with a cost model that is told how many experts steps touch and without.

    python benchmarks/architectures/active_experts.py [--layers 6] [--hidden 256] [--experts 32] [--tokens 96]
        [--rounds 3] [--right 0.8] [--device cpu] [--json -]

The model has random weights, and two topics: tokens of one go to experts of their own, those of the other all to the
same. Drafts are the model's own text, of which each token is right with a given chance. Both cost models begin with
the curve that is measured on the model, and see every step; runs alternate. Texts are compared token by token.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from outrider.control.cost import measure
from outrider.control.cost_model import CostModel
from outrider.control.experts import ExpertUse
from outrider.control.fixed import Fixed
from outrider.control.goodput import Goodput
from outrider.core.engine import Engine
from outrider.core.params import SamplingParams
from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise, Part, Recipe
from outrider.core.records import Budget, Chunk, Needs, Role, StepRecord
from outrider.core.tree import fixed
from outrider.draft.mix import Mix
from outrider.runtime.targets import eager_target
from outrider.verify.invariant import Invariant

VOCABULARY = 512
TOPICS = ("different experts", "shared experts")


def mixture(args: argparse.Namespace) -> Any:
    """Tokens of the second half have a large part of their embedding in common, so that routers see little else.

    Its experts run one after another, as each is read: what a step costs grows with those that it touches.
    """
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=args.hidden, intermediate_size=2 * args.hidden, num_attention_heads=4,
        num_hidden_layers=args.layers, num_key_value_heads=2, num_local_experts=args.experts, num_experts_per_tok=2,
        max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    with torch.device(args.device):
        model = MixtralForCausalLM(config).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.normal_()
        common = torch.randn(args.hidden, device=args.device)
        table[VOCABULARY // 2 :] += 4 * common
        table[: VOCABULARY // 2] -= 0.5 * common
    return model


@dataclass
class Recited:
    """Proposes the known text as a chain, each token right with a given chance; it says that chance, too."""

    texts: dict[tuple[int, ...], list[int]]  # by prompt
    right: float
    rng: np.random.Generator
    name: str = "recited"
    needs: Needs = field(default_factory=Needs)
    shared_noise: bool = False
    contexts: dict[int, Context] = field(default_factory=dict)

    def begin(self, slot: int, context: Context) -> None:
        self.contexts[slot] = context

    def absorb(self, chunks: Sequence[Chunk]) -> None: ...

    def end(self, slot: int) -> None:
        del self.contexts[slot]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None: ...

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        trees = []
        for slot, budget in zip(slots, budgets, strict=True):
            text = self.contexts[slot].tokens.tolist()
            known = next(whole for prompt, whole in self.texts.items() if tuple(text[: len(prompt)]) == prompt)
            coming = np.array(known[len(text) : len(text) + min(budget.nodes, budget.depth)], dtype=np.int64)
            wrong = self.rng.random(len(coming)) >= self.right
            tokens = np.concatenate([[text[-1]], np.where(wrong, (coming + 1) % VOCABULARY, coming)])
            trees.append(fixed(tokens, np.arange(len(tokens)) - 1, self.name, self.right ** np.arange(len(tokens))))
        return Proposals(trees, max((tree.depth for tree in trees), default=0))


def generate(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[list[int]], list[float]]:
    """Texts and seconds of each, one after another."""
    texts, seconds = [], []
    for prompt in prompts:
        begun = time.perf_counter()
        handle = engine.submit(prompt, SamplingParams(max_new_tokens=tokens))
        while engine.step():
            pass
        seconds.append(time.perf_counter() - begun)
        texts.append([*prompt, *handle.result().token_ids])
    return texts, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--right", type=float, default=0.8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    model = mixture(args)
    target = eager_target(model, max_slots=1, max_context=512, self_test=False)
    curve = measure(target, repeats=2)
    experts, counted = curve.experts, target.traits.active_experts
    assert experts is not None and counted is not None
    rng = np.random.default_rng(0)
    half = VOCABULARY // 2
    prompts = [[int(t) for t in rng.integers(topic * half, (topic + 1) * half, 24)] for topic in (0, 1, 0, 1)]
    nothing = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
    known, plain = generate(Engine(target, nothing, strict=True), prompts, args.tokens)
    texts = {tuple(prompt): text for prompt, text in zip(prompts, known, strict=True)}
    report: dict[str, Any] = {
        "seconds by rows": {rows: round(curve.seconds(rows), 5) for rows in curve.rows},
        "experts by rows": dict(zip(experts.rows, experts.touched, strict=True)),
        "seconds an expert": experts.seconds, "plain": round(sum(plain), 3),
    }  # fmt: skip
    taken: dict[str, list[float]] = {"blind": [], "told": []}
    rows: dict[str, dict[str, list[int]]] = {name: {topic: [] for topic in TOPICS} for name in taken}
    for seed in range(args.rounds):
        for name in taken:
            use = ExpertUse(counted, experts) if name == "told" else None
            costs = CostModel(curve.seconds, experts=use)
            part = Part(Recited(texts, args.right, np.random.default_rng(seed)), Role.FREE)
            control = Goodput(Budget(32, 16), [part.role], costs, even=True)
            engine = Engine(target, Recipe("mix", Mix([part], control), Invariant(), control, costs=costs), strict=True)
            seconds = 0.0
            for place, prompt in enumerate(prompts):
                sizes = rows[name][TOPICS[place % 2]]
                end = engine.watch(lambda step, sizes=sizes: sizes.append(step.timing.rows))
                (text,), (one,) = generate(engine, [prompt], args.tokens)
                end()
                assert text == texts[tuple(prompt)], "another text than plain decoding"
                seconds += one
            taken[name].append(seconds)
    for name in taken:
        means = {topic: round(float(np.mean(sizes)), 2) for topic, sizes in rows[name].items()}
        report[name] = {"seconds": round(median(taken[name]), 3), "rows a step": means}
    text = json.dumps(report, indent=1)
    print(text, flush=True)
    if args.json not in ("", "-"):
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
