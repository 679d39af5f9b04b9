"""Replay of verification errors: text on which a drafter meets its own wrong proposals again.

Draft-OPD (arXiv 2605.29343), as data for any kind of drafter. The target decodes with the drafter; every step whose
proposal fell is an anchor. For each there are two windows of one length: the text up to it and what was really said,
and the same text and the whole block as it was drafted, wrong tokens and all. Only the blocks count. The target's
distribution after each token is the goal, as on any other text, so that training needs nothing new: `outrider train
run --from`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from outrider import methods
from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Drafter, Noise, Recipe
from outrider.core.records import Budget, Chunk, Needs, StepRecord
from outrider.core.sampling import SamplingParams
from outrider.core.tree import TokenTree
from outrider.models import LoadedModel
from outrider.models.drafts import read_card
from outrider.train.text.dialogue import ANSWER, FORCED
from outrider.train.text.selfdata import SelfData, write_shard


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    prompts: int = 256  # sequences whose beginnings are decoded
    new_tokens: int = 128
    length: int = 128  # of a window
    block: int = 6  # tokens drafted a step
    batch: int = 8  # sequences that run together
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Mistake:
    text: tuple[int, ...]  # all that was said in the end
    anchor: int  # how much of it was there when the block was drafted
    block: tuple[int, ...]  # as drafted
    accepted: int


@dataclass(slots=True)
class Noted:
    """A drafter that is listened to."""

    inner: Drafter
    mistakes: list[Mistake] = field(default_factory=list)
    _contexts: dict[int, Context] = field(default_factory=dict)
    _open: dict[int, list[tuple[int, tuple[int, ...], int]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def needs(self) -> Needs:
        return self.inner.needs

    @property
    def shared_noise(self) -> bool:
        return self.inner.shared_noise

    def begin(self, slot: int, context: Context) -> None:
        self._contexts[slot], self._open[slot] = context, []
        self.inner.begin(slot, context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        self.inner.absorb(chunks)

    def end(self, slot: int) -> None:
        if (context := self._contexts.pop(slot, None)) is not None:
            text = tuple(context.tokens.tolist())
            self.mistakes += [Mistake(text, *fallen) for fallen in self._open.pop(slot)]
        self.inner.end(slot)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return self.inner.propose(slots, budgets, noise)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            block = first_path(record.tree)
            whole = len(record.emitted) == record.gain  # a text that was cut says nothing of the rest
            if whole and len(record.verdict.path) < len(block):
                anchor = len(self._contexts[slot].tokens) - len(record.emitted)
                self._open[slot].append((anchor, block, len(record.verdict.path)))
        self.inner.observe(slots, records)


def first_path(tree: TokenTree) -> tuple[int, ...]:
    """The tokens of a chain; of a tree, those that were proposed first at every depth."""
    tokens, node = list[int](), 0
    while below := [draw.child for draw in tree.draws[node] if draw.child > 0]:
        node = below[0]
        tokens.append(int(tree.tokens[node]))
    return tuple(tokens)


def rollout(
    target: LoadedModel, drafter: Path, data: SelfData, plan: ReplayPlan,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Mistake]:  # fmt: skip
    """Decode the beginnings of sequences with the drafter, and note where its proposals fell."""
    prompts = [text for text in map(_beginning, data.tokens, data.roles) if text][: plan.prompts]
    longest = max(map(len, prompts), default=0)  # a slot holds so much, not all that the model could: more fit
    limits = {"max_slots": plan.batch, "max_context": longest + plan.new_tokens}
    params = SamplingParams(max_new_tokens=plan.new_tokens, temperature=plan.temperature, seed=plan.seed)
    with Outrider(target, "plain", limits=limits, strict=True) as engine:
        recipe, inner = chain_of(engine, drafter, plan.block, "invariant")
        noted = Noted(inner)
        handles = [engine.engine.submit(prompt, params, replace(recipe, drafter=noted)) for prompt in prompts]
        for done, handle in enumerate(handles):
            handle.result()
            on_progress(done + 1, len(handles))
    return noted.mistakes


def chain_of(engine: Outrider, drafter: Path, block: int, verifier: str) -> tuple[Recipe, Drafter]:
    """A method that drafts chains of one length with the drafter in a folder, of whatever kind; and what drafts."""
    kind = read_card(drafter).kind
    wanted = {"drafter": str(drafter), "draft": str(drafter), "budget": block, "depth": block,
              "grower": "chain", "threshold": 0.0, "controller": "fixed", "verifier": verifier}  # fmt: skip
    known = {option.name for option in methods.find(kind).option_list}
    recipe = engine.recipe(kind, {name: value for name, value in wanted.items() if name in known})
    if recipe.drafter is None:
        raise InputError(f"{drafter}: nothing drafts here; train a drafter first")
    return recipe, recipe.drafter


def _beginning(tokens: torch.Tensor, roles: torch.Tensor) -> list[int]:
    """All that stands before the first answer."""
    return tokens[: int((roles == ANSWER).int().argmax())].tolist()


def windows(mistakes: Sequence[Mistake], length: int) -> SelfData:
    """Two for each mistake that has enough text before it: what was said, and what was drafted."""
    tokens, roles = [], []
    for mistake in mistakes:
        before, drafted = mistake.text[: mistake.anchor], mistake.block
        said = mistake.text[mistake.anchor : mistake.anchor + len(drafted)]
        if len(before) + len(drafted) < length or len(said) < len(drafted):
            continue
        for block in (said, drafted):
            tokens.append((*before, *block)[-length:])
            roles.append([FORCED] * (length - len(block)) + [ANSWER] * len(block))
    return SelfData(
        torch.tensor(tokens, dtype=torch.int32).view(-1, length),
        torch.tensor(roles, dtype=torch.uint8).view(-1, length),
    )


def write_replay(
    target: LoadedModel, drafter: Path, data: SelfData, plan: ReplayPlan, folder: Path,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:  # fmt: skip
    """Changes the folder: one shard of windows, as `train data` writes them; how many anchors and windows there are."""
    if folder.exists() and any(folder.glob("shard-*")):
        raise InputError(f"{folder} already holds text; choose another folder or remove it")
    if not 1 <= plan.block < plan.length:
        raise InputError(f"a window of {plan.length} tokens cannot hold text and a block of {plan.block}")
    mistakes = rollout(target, drafter, data, plan, on_progress)
    made = windows(mistakes, plan.length)
    if not len(made.tokens):
        raise InputError(f"no proposal fell after {plan.length - plan.block} tokens of text; use shorter windows")
    folder.mkdir(parents=True, exist_ok=True)
    identity = json.dumps({"target": target.fingerprint, "replay": asdict(plan)})
    write_shard(folder / "shard-0000.safetensors", made, identity)
    return {"anchors": len(mistakes), "windows": len(made.tokens), "answers": made.answer_tokens}
