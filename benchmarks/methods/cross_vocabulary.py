"""Accepted length of a draft model with another tokenizer, with and without merged tokens; or of a lookup over bytes.

Without `--draft` the lookup over bytes stands beside the one over tokens. Greedy unless `--temperature` is given;
prompts run one after the other, so what is learnt from one serves the next. Nothing is timed; what drafting costs is
given as forwards of the draft model for each target step. Run: python benchmarks/methods/cross_vocabulary.py --target A
[--draft B] --prompts FILE.jsonl --limit 2 [--budget 5] [--max-new-tokens 64] [--temperature 0.7] [--json [FILE]]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common import arguments, give, loaded, run
from outrider.api import Outrider
from outrider.core.generation import Stats
from outrider.core.params import SamplingParams
from outrider.core.protocols import Recipe
from outrider.draft.grown import Grown
from outrider.draft.lookup.byte_lookup import ByteLookup
from outrider.draft.model.cross_vocabulary import CrossVocabulary
from outrider.store.prompts import Prompt


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=64)
    parser.add_argument("--target", dest="model", help="the same as --model")
    parser.add_argument("--draft", help="a model with another tokenizer")
    parser.add_argument("--budget", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=1)
    common = {"budget": args.budget, "controller": "fixed"}
    with loaded(args) as (engine, prompts):
        recipes = {"plain": engine.recipe("plain")}
        if args.draft:
            single, merged = (engine.recipe("draft-model", {**common, "draft": args.draft}) for _ in range(2))
            source(single).beginnings = 0
            recipes |= {"draft model, tokens of the same bytes": single, "draft model, with merged tokens": merged}
            cache = source(merged).cache
        else:
            lookup = engine.recipe("omnidraft-ngram", common)
            assert isinstance(lookup.drafter, ByteLookup)
            recipes |= {"prompt-lookup": engine.recipe("prompt-lookup", common), "omnidraft-ngram": lookup}
            cache = lookup.drafter.cache
        rows = {name: measured(engine, recipe, prompts, params) for name, recipe in recipes.items()}
        learnt = {"runs": len(cache), "bytes": cache.used}
    plain = rows["plain"]["outputs"]
    for row in rows.values():
        row["equal to plain"] = sum(a == b for a, b in zip(row.pop("outputs"), plain, strict=True))
    lines = [f"{'':40} accepted length  draft forwards a step  outputs equal to plain's"]
    lines += [
        f"{name:40} {row['accepted length']:15.2f}  {row['draft forwards a step']:21.2f}  "
        f"{row['equal to plain']:10} of {len(prompts)}"
        for name, row in rows.items()
    ]
    lines.append(f"learnt: {learnt['runs']} runs of draft tokens in {learnt['bytes'] / 1024:.0f} KiB")
    give(args, {"target": args.model, "draft": args.draft, "rows": rows, "learnt": learnt}, lines)


def source(recipe: Recipe) -> CrossVocabulary:
    assert isinstance(recipe.drafter, Grown)
    if not isinstance(recipe.drafter.source, CrossVocabulary):
        raise SystemExit("error: both models have the same vocabulary; give a draft with another tokenizer")
    return recipe.drafter.source


class Counted:
    """A runtime whose forwards are counted."""

    def __init__(self, runtime: Any) -> None:
        self.runtime, self.forwards = runtime, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def run(self, *args: Any) -> Any:
        self.forwards += 1
        return self.runtime.run(*args)


def measured(engine: Outrider, recipe: Recipe, prompts: Sequence[Prompt], params: SamplingParams) -> dict[str, Any]:
    counted = None
    if isinstance(recipe.drafter, Grown):
        drafts = source(recipe)
        counted = drafts.target = Counted(drafts.target)  # type: ignore[assignment]
    total, outputs = Stats(method=recipe.name, prompt_tokens=0), []
    for prompt in prompts:
        messages = prompt.messages or ({"role": "user", "content": prompt.turns[0]},)
        result = engine.engine.submit(engine.encode_chat(messages), params, recipe).result()
        total.add(result.stats)
        outputs.append(result.token_ids)
    return {
        "accepted length": total.mean_accepted,
        "draft forwards a step": counted.forwards / max(total.steps, 1) if isinstance(counted, Counted) else 0.0,
        "acceptance by depth": total.acceptance_by_depth,
        "tokens": total.new_tokens,
        "outputs": outputs,
    }


if __name__ == "__main__":
    run(main)
