"""A stage for comparisons: a toy model in the real engine under a clock of its own, so that times are planted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from outrider.bench.contenders import Contender, run_engine
from outrider.check.toy import ToyLM, ToyTarget
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.protocols import Context, Recipe
from outrider.core.records import Budget, Needs, Piece, Scores, Traits, Verdict
from outrider.core.tree import Law, TokenTree
from outrider.draft.forced import Forced
from outrider.store.prompts import Message
from outrider.verify.invariant import Invariant

PREFILL_S, VERIFY_S = 100.0, 1.0


@dataclass
class Clock:
    now: float = 1.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


class TimedTarget(ToyTarget):
    """Takes its time: a prefill a long one, a step always the same."""

    clock: Clock
    named = Traits()

    @property
    def traits(self) -> Traits:
        return self.named

    def run(self, pieces: Sequence[Piece], needs: Needs) -> list[Scores]:
        self.clock.pass_(PREFILL_S if pieces[0].tree is None else VERIFY_S)
        return super().run(pieces, needs)


@dataclass(frozen=True)
class SlowController(Fixed):
    """Spends time after the step, where the engine's own timing of a step has ended."""

    clock: Clock | None = None
    seconds: float = 0.0

    def observe(self, *args: Any) -> None:
        assert self.clock is not None
        self.clock.pass_(self.seconds)


class Gullible:
    """A broken rule: accepts whatever was drafted."""

    name = "gullible"
    honours = frozenset(Law)
    coupled = False

    def verify(self, tree: TokenTree, rows: Any, noise: Any) -> Verdict:
        last = len(tree) - 1
        return Verdict(tuple(tree.path(last)), rows.argmax(last))


class Coupled(Invariant):
    coupled = True


@dataclass
class Stage:
    """Stands in for the loaded model: what a comparison asks of it, and a record of what it asked."""

    clock: Clock = field(default_factory=Clock)
    slots: int = 4
    max_context: int = 256
    asked: list[list[Message]] = field(default_factory=list)
    prepared: list[int] = field(default_factory=list)  # lengths of texts that steps were made ready for

    def __post_init__(self) -> None:
        self.lm = ToyLM(vocab=5, seed=3)
        self.target = TimedTarget(self.lm, slots=self.slots, max_context=self.max_context)
        self.target.clock = self.clock
        self.tokenizer = SimpleNamespace(chat_template="yes")
        self.loaded = SimpleNamespace(name="toy", fingerprint="toy", model=SimpleNamespace(dtype=torch.float64))
        self.engine = Engine(
            self.target,
            self.recipe(),
            decode=lambda tokens: "".join(chr(97 + int(t)) for t in tokens),
            strict=True,
            clock=self.clock,
        )

    def recipe(self, method: str = "plain", options: Any = None) -> Recipe:
        return Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))

    def prepare(self, contexts: Sequence[int]) -> None:
        self.prepared = list(contexts)

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 5 for c in text]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        self.asked.append(list(messages))
        return self.encode("".join(m["role"][0] + m["content"] for m in messages))

    def step(self) -> bool:
        return self.engine.step()

    def answers(self, context: Context) -> list[int]:
        tokens = list(context.prompt)
        for _ in range(64):
            tokens.append(int(self.lm.probs(tokens).argmax()))
        return tokens[len(context.prompt) :]

    def forced(self, accept: float = 1.0, width: int = 1, **changes: Any) -> Recipe:
        """With everything accepted and width w, a step gives w + 1 tokens in the time of one."""
        parts = {"verifier": Invariant(), "controller": Fixed(Budget(width, width))} | changes
        return Recipe("forced", Forced(self.answers, 5, accept), **parts)

    def contender(
        self, label: str, recipe: Recipe | None = None, begun: Callable[[str], None] | None = None
    ) -> Contender:
        def begin() -> Any:
            if begun:
                begun(label)
            return lambda prompts, params: run_engine(self, recipe or self.recipe(), prompts, params)  # type: ignore

        return Contender(label, label, begin)
