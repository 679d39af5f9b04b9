"""How well a trained drafter does in the engine: accepted length by group of prompts, node budget and temperature.

Nothing is estimated: every figure comes from decoding with the drafter. Accepted length counts tokens emitted a target
step, the target's own included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider import methods
from outrider.api import Outrider
from outrider.core.generation import Generation
from outrider.core.sampling import SamplingParams
from outrider.core.schedule import Terms
from outrider.models import LoadedModel
from outrider.models.drafts import read_card
from outrider.store.prompts import Prompt


@dataclass(frozen=True, slots=True)
class EvalPlan:
    budgets: tuple[int, ...] = (16, 32)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    depth: int = 6
    new_tokens: int = 128
    batch: int = 8  # sequences that run together
    max_context: int = 2048
    seed: int = 0
    grower: str = ""  # how trees grow; empty: as the method does by itself


@dataclass(frozen=True, slots=True)
class Row:
    budget: int
    temperature: float
    group: str
    prompts: int
    tokens: int
    steps: int
    by_depth: tuple[float, ...]  # acceptance at each depth
    draft_ms: float = 0.0  # of a step of all sequences that run together

    @property
    def accepted(self) -> float:
        return self.tokens / max(self.steps, 1)

    def as_dict(self) -> dict[str, Any]:
        return {
            "budget": self.budget, "temperature": self.temperature, "group": self.group, "prompts": self.prompts,
            "tokens": self.tokens, "steps": self.steps, "accepted": round(self.accepted, 3),
            "by_depth": [round(rate, 3) for rate in self.by_depth],
            "draft_ms": round(self.draft_ms, 3),
        }  # fmt: skip


def evaluate(
    target: LoadedModel, folder: Path, prompts: Sequence[Prompt], plan: EvalPlan,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Row]:  # fmt: skip
    """One row for each budget, temperature and group, and one for all groups together; first turns only."""
    kind = read_card(folder).kind
    known = {option.name for option in methods.find(kind).option_list}  # some have no depth, or call a drafter a draft
    limits = {"max_slots": plan.batch, "max_context": plan.max_context}
    settings = [(budget, temperature) for budget in plan.budgets for temperature in plan.temperatures]
    rows = []
    with Outrider(target, "plain", limits=limits, strict=True) as engine:
        asked = [(prompt.group, _tokens(engine, prompt)[-(plan.max_context - plan.new_tokens) :]) for prompt in prompts]
        for done, (budget, temperature) in enumerate(settings):
            options = {"drafter": str(folder), "draft": str(folder), "budget": budget, "depth": plan.depth,
                       "controller": "fixed"}  # fmt: skip
            options |= {"grower": plan.grower} if plan.grower else {}
            recipe = engine.recipe(kind, {name: value for name, value in options.items() if name in known})
            params = SamplingParams(max_new_tokens=plan.new_tokens, temperature=temperature, seed=plan.seed)
            terms = Terms(cache_salt=str(done))  # a drafter sees the whole prompt every time
            handles = [(group, engine.engine.submit(tokens, params, recipe, terms=terms)) for group, tokens in asked]
            results = [(group, handle.result()) for group, handle in handles]
            groups = list(dict.fromkeys(group for group, _ in results))
            for name in [*groups, *(["all"] if len(groups) > 1 else [])]:
                members = [result for group, result in results if name in (group, "all")]
                rows.append(_row(budget, temperature, name, members))
            on_progress(done + 1, len(settings))
    return rows


def _tokens(engine: Outrider, prompt: Prompt) -> list[int]:
    if getattr(engine.tokenizer, "chat_template", None):
        return engine.encode_chat(prompt.conversation())
    return engine.encode(prompt.raw())


def _row(budget: int, temperature: float, group: str, results: Sequence[Generation]) -> Row:
    stats = [result.stats for result in results]
    depth = max((len(each.offered_at) for each in stats), default=0)

    def total(counts: Sequence[Sequence[int]], at: int) -> int:
        return sum(row[at] for row in counts if at < len(row))

    offered, taken = [each.offered_at for each in stats], [each.accepted_at for each in stats]
    rates = tuple(total(taken, at) / max(total(offered, at), 1) for at in range(depth))
    return Row(
        budget, temperature, group, len(stats), sum(each.new_tokens for each in stats),
        sum(each.steps for each in stats), rates,
        1000 * sum(each.draft_s for each in stats) / max(sum(each.steps for each in stats), 1),
    )  # fmt: skip
