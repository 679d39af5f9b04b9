"""Parallel prompt decoding at run time: guesses are those of training behind the last accepted node, in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.api import Outrider
from outrider.check import exhaustive, gate
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.draft.feature.prompt_rows import PromptDrafter
from outrider.grow.sparse_states import sparse_states
from outrider.models import LoadedModel, load_model
from outrider.models.networks.prompt_rows import PromptRows, PromptShape
from outrider.runtime.targets import eager_target, native_target
from outrider.train.kinds.prompt_rows import PromptRowsLearner, PromptRowsPlan
from outrider.train.losses import LOSSES
from outrider.verify.invariant import Invariant
from tests.drafters import drafter, some_text
from tests.watched import llama

PROMPTS = [[1, 2, 3, 4], [9, 8], [5], [7, 7, 7, 30, 2, 1]]
PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
RATES = np.array([[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.2, 0.1]])


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(llama(1).requires_grad_(False))


@pytest.fixture(params=[1, 2])
def net(request: pytest.FixtureRequest) -> PromptRows:
    torch.manual_seed(4)
    made = PromptRows(PromptShape(32, 3, request.param, 3))
    torch.nn.init.normal_(made.vectors)
    return made.requires_grad_(False)


def trained(loaded: LoadedModel, net: PromptRows, text: list[int]) -> torch.Tensor:
    """What training computes behind the last token of a text, [prompts, V]."""
    learner = PromptRowsLearner(loaded, net, PromptRowsPlan(), LOSSES["kl"])
    _, cache = learner.read(torch.tensor([text]))
    return learner.ahead(torch.tensor([[len(text) - 1]]), cache)[0, 0]


class Watched(PromptDrafter):
    """Keeps what was guessed behind which text."""

    def __init__(self, *of: Any, **more: Any) -> None:
        super().__init__(*of, **more)
        self.found: list[tuple[list[int], np.ndarray]] = []

    def observe(self, slots: Any, records: Any) -> None:
        super().observe(slots, records)
        for slot in slots:
            seat = self._seats[slot]
            if len(seat.guesses):
                self.found.append((seat.context.tokens[:-1].tolist(), seat.guesses))  # the pending one is not in it


def recipe(net: PromptRows, rows: int = 12, kind: Any = Watched) -> Recipe:
    states = sparse_states(RATES, rows, net.shape.members)
    return Recipe("ppd", kind(net.vectors, states.states, ranks=3), Invariant(), Fixed(Budget(rows, 3)))


@pytest.mark.parametrize("make", [eager_target, native_target])
def test_guesses_of_a_run_are_those_of_training_for_the_same_text(loaded, net: PromptRows, make: Any) -> None:
    target, asked = make(loaded.model, max_slots=3), recipe(net)
    engine = Engine(target, PLAIN, strict=True)
    params = SamplingParams(max_new_tokens=16, temperature=0.0)
    results = [h.result() for h in [engine.submit(prompt, params, asked) for prompt in PROMPTS]]
    plain = [h.result() for h in [engine.submit(prompt, params) for prompt in PROMPTS]]
    assert [g.token_ids for g in results] == [g.token_ids for g in plain]
    found = asked.drafter.found  # type: ignore[union-attr]
    assert {len(guesses) for _, guesses in found} >= {2, 3} and len(found) > 20
    for text, guesses in found[::3]:
        want = trained(loaded, net, text)[: len(guesses)].topk(3).indices.numpy()
        assert (want == guesses).all(), text


def test_prompts_of_another_place_are_caught(loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the rows behind the pending token, whatever was accepted."""
    torch.manual_seed(4)
    net = PromptRows(PromptShape(32, 3, 1, 3)).requires_grad_(False)
    net.vectors.data.normal_()
    observe = PromptDrafter.observe

    def wrong(self: PromptDrafter, slots: Any, records: Any) -> None:
        for slot in slots:
            self._seats[slot].asked = [0, *self._seats[slot].asked][:-1]
        observe(self, slots, records)

    monkeypatch.setattr(PromptDrafter, "observe", wrong)
    with pytest.raises((AssertionError, IndexError)):
        test_guesses_of_a_run_are_those_of_training_for_the_same_text(loaded, net, eager_target)


def test_members_do_not_see_each_other(loaded) -> None:
    """A prompt's answer is the mean of those of its members run alone."""
    torch.manual_seed(5)
    both = PromptRows(PromptShape(32, 2, 2, 3)).requires_grad_(False)
    both.vectors.data.normal_()
    alone = []
    for member in both.vectors:
        one = PromptRows(PromptShape(32, 2, 1, 3)).requires_grad_(False)
        one.vectors.data.copy_(member[None])
        alone.append(trained(loaded, one, [1, 2, 3]))
    torch.testing.assert_close(trained(loaded, both, [1, 2, 3]), torch.stack(alone).mean(0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_few_rows_and_little_room_change_no_text(loaded, net: PromptRows, rows: int) -> None:
    engine = Engine(eager_target(loaded.model, max_slots=2, max_context=20), PLAIN, strict=True)
    params = SamplingParams(max_new_tokens=30, temperature=0.7, seed=2)
    plain = [h.result() for h in [engine.submit(prompt, params) for prompt in PROMPTS]]
    found = [h.result() for h in [engine.submit(prompt, params, recipe(net, rows)) for prompt in PROMPTS]]
    assert [g.token_ids for g in found] == [g.token_ids for g in plain]


@pytest.mark.slow
def test_it_passes_the_gate(loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "one_a_family", lambda: ["prompt-lookup"])  # enumerations have tests of their own
    monkeypatch.setattr(exhaustive, "SMALL", ((1, 1),))
    monkeypatch.setattr(exhaustive, "SHAPES", ((1, 1),))
    monkeypatch.setattr(exhaustive, "CASES", exhaustive.CASES[:1])
    folder = drafter("ppd", loaded, some_text(loaded, tmp_path / "text"), tmp_path / "ppd", steps=2)
    report = gate.check(loaded, "ppd", {"drafter": str(folder)}, size=gate.Size(3, 24, 20, 5, 16, 16, 60, 3, False))
    assert report.verdict == "same output" and report.status == 0, [part.summary for part in report.parts]


def test_a_mixture_refuses_it_as_a_part(loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    net = PromptRows(PromptShape(32, 3, 1, 3)).requires_grad_(False)
    monkeypatch.setattr("outrider.models.trained.drafter_of", lambda *_: net)
    with Outrider(loaded, "plain", runtime="eager") as engine:
        assert engine.recipe("ppd", {"budget": 4}).name == "ppd"
        with pytest.raises(InputError, match="'ppd', whose rows beside the candidates a mixture does not run; use it"):
            engine.recipe("mix", {"parts": "ppd,prompt-lookup"})
