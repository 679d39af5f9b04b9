"""Every method of the package over toy models, with trees so small that all their outcomes can be enumerated.

The target and the models that draft are tables over a few tokens; what else a method is built from comes from a model
of random weights with the same vocabulary. Drafters that are trained are taken as they are before training.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from outrider import methods
from outrider.check.toy import ToyLM, ToyTarget
from outrider.control.cost import CostCurve
from outrider.core.protocols import Recipe
from outrider.core.records import Needs, Scores
from outrider.methods import MethodInfo, Parts
from outrider.methods.common import verifier
from outrider.methods.recipes import RECIPES
from outrider.models import LoadedModel, load_model
from outrider.models.networks.acceptance import AcceptanceHead, AcceptanceShape
from outrider.train.kinds.registry import KINDS, find_kind, plan_of
from outrider.train.text.dialogue import ANSWER
from outrider.train.text.selfdata import SelfData

VOCAB, WIDTH, LAYERS = 3, 24, 4
PROMPT_ROWS = 32  # a prompt is one pass: every outcome runs it anew
TARGET, DRAFT = ToyLM(VOCAB, seed=9), ToyLM(VOCAB, seed=54)
RULE = "recursive"  # for methods whose default rule is not a coupled one
SMALL: dict[str, Any] = {  # options, for methods that have them: so few candidates that all outcomes can be enumerated
    "depth": 2, "expansion": "2", "beam": 2, "controller": "fixed", "size": "budget", "init": "random",
    "drafter": "toy", "memory_bytes": 1 << 20, "exits": "1", "window": 1, "ngram": 2, "guesses": 1, "threshold": 0.0,
    "parts": "draft-model,prompt-lookup",
}  # fmt: skip


class _Target(ToyTarget):
    """With hidden states as wide as the model's."""

    def _scores(self, contexts: list[list[int]], needs: Needs, logits: bool) -> Scores:
        scores = super()._scores(contexts, needs, logits)
        hidden = {layer: _wide(state) for layer, state in scores.hidden.items()}
        return dataclasses.replace(scores, hidden=hidden)


def _wide(state: Tensor) -> Tensor:
    return state.float().repeat(1, WIDTH // VOCAB)


def coupled_methods() -> list[str]:
    """All of the package that can run under a rule coupled to the draft, those first that do so unless told."""
    able = [info for info in RECIPES if _rule(info) is not None]
    return [info.name for info in sorted(able, key=lambda info: _default(info) != _rule(info))]


def one_a_family() -> list[str]:
    """The first coupled method of each family."""
    return list({methods.find(name).family: name for name in reversed(coupled_methods())}.values())


def toy_target() -> ToyTarget:
    return _Target(TARGET, prompt_rows=PROMPT_ROWS)


def toy_recipe(name: str, target: ToyTarget, budget: int = 2) -> Recipe:
    """The method over this target under a coupled rule, as new, with at most so many candidates a step."""
    info = methods.find(name)
    known = {field.name for field in dataclasses.fields(info.options)}
    wanted = {**SMALL, "budget": budget, "verifier": _rule(info)}
    if info.name == "mix":  # its parts are others here
        del wanted["drafter"]
    recipe = methods.build(name, _parts(target), {key: value for key, value in wanted.items() if key in known})
    assert recipe.verifier.coupled, f"{name} was built under the {recipe.verifier.name} rule"
    return recipe


@contextmanager
def quiet() -> Iterator[None]:
    """Advice on how to set up a method is not for toys."""
    log = logging.getLogger("outrider")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@cache
def _rule(info: MethodInfo) -> str | None:
    """The method's own rule where it is coupled; None where none can be asked for."""
    default = _default(info)
    return default if default is None or verifier(default).coupled else RULE


def _default(info: MethodInfo) -> str | None:
    return next((option.default for option in info.option_list if option.name == "verifier"), None)


def _parts(target: ToyTarget) -> Parts:
    # Always the same seconds, so that what is drafted depends on nothing but texts and noise.
    flat = CostCurve((1, 64), (1,), (128,), (((1.0, 1.0),),))
    return Parts(target, _loaded(), lambda name: _loaded(), _toy_draft, _drafts(), flat)


def _toy_draft(model: Any) -> ToyTarget:
    return ToyTarget(DRAFT, prompt_rows=PROMPT_ROWS)


@cache
def _loaded() -> LoadedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return load_model(LlamaForCausalLM(config).requires_grad_(False))


@cache
def _drafts() -> dict[Any, Any]:
    """Networks under the names by which methods look for them."""
    made: dict[Any, Any] = {("", count): DRAFT for count in range(LAYERS)}  # the shipped draft, and the first layers
    made["kangaroo", SMALL["drafter"]] = DRAFT
    made[SMALL["drafter"], 0] = DRAFT
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        made["acceptance-head", ""] = AcceptanceHead(AcceptanceShape(VOCAB, "draft-model", blocks=1))
    text = SelfData(torch.arange(8 * 16).view(8, 16) % VOCAB, torch.full((8, 16), ANSWER, dtype=torch.uint8))
    for kind in KINDS:
        if kind not in ("kangaroo", "draft-model", "acceptance-head"):  # those are models, or judge one
            with torch.random.fork_rng(devices=[]):
                learner: Any = find_kind(kind).begin(_loaded(), text, plan_of(find_kind(kind), {"held_out": 4}), None)
            made[kind, SMALL["drafter"]] = learner.net.to(_loaded().model.dtype)
    return made
