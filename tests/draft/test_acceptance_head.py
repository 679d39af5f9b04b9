"""An acceptance head while drafting: it is shown the states of the tokens it judges, and may say what it likes."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from outrider.api import Outrider
from outrider.check.gate import Size, check
from outrider.check.report import Outcome
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.errors import InputError
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.sampling import SamplingParams
from outrider.draft.acceptance_head import HeadMarks
from outrider.draft.grown import Grown
from outrider.draft.model.draft_model import ModelSource
from outrider.grow.stopping import Doubt, Stopping
from outrider.models.drafts import LAYERS, DraftCard, new_draft, save_draft, write_drafter
from outrider.models.networks.acceptance import AcceptanceHead, AcceptanceShape
from outrider.models.trained import ACCEPTANCE
from outrider.runtime.targets import eager_target
from outrider.verify.invariant import Invariant
from outrider.verify.rejection import Rejection
from tests.watched import llama

PROMPTS = [[1, 2, 3, 4], [9, 8], [7, 7, 7, 30, 2, 1]]
PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
TINY = Size(2, 12, 8, 2, 10, 8, 24, 2, thorough=False)


def nonsense(hidden: int = 32, drafter: str = LAYERS, digest: str = "") -> AcceptanceHead:
    """Weights so large that every answer is yes or no, as the token falls."""
    torch.manual_seed(7)
    head = AcceptanceHead(AcceptanceShape(hidden, drafter, digest, blocks=1))
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=5.0)
    return head.requires_grad_(False)


class Compared(HeadMarks):
    """Every mark against the head on what the draft model says of the whole text at once."""

    seen = 0
    said: ClassVar[set[bool]] = set()

    @torch.inference_mode()
    def chances(self, slots, trees, done):
        marks = super().chances(slots, trees, done)
        model = self.source.target.backend.adapter.model
        for slot, tree, first, found in zip(slots, trees, done, marks, strict=True):
            text = self.source._seats[slot].context.tokens.tolist() + tree.path_tokens(len(tree) - 1)
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
            expected = self.head(states[len(text) - (len(tree) - first) :])
            assert found == pytest.approx(expected.numpy(), abs=2e-2)
            Compared.seen += len(found)
            Compared.said |= {bool(chance > 0.5) for chance in found}
        return marks


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_marks_are_the_heads_word_on_the_states_of_the_tokens_that_were_drafted(temperature: float) -> None:
    target = llama(1)
    with torch.no_grad():
        draft = llama(1)
        for weight in draft.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    source = ModelSource(eager_target(draft, max_slots=4), shows=True)
    grower = Stopping(Doubt(0.5), Compared(source, nonsense()))
    engine = Engine(eager_target(target, max_slots=4), PLAIN, strict=True)
    recipe = Recipe("judged", Grown(source, grower, sampled=True), Rejection(), Fixed(Budget(6, 6)))
    params = SamplingParams(max_new_tokens=14, temperature=temperature, seed=3)
    Compared.seen, Compared.said = 0, set()
    texts = []
    for run in (recipe, PLAIN):
        handles = [engine.submit(prompt, params, run) for prompt in PROMPTS]
        texts.append([list(handle.result().token_ids) for handle in handles])
    assert Compared.seen > 10 and Compared.said == {True, False}
    if temperature == 0:
        assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def folders(tiny_llama, tmp_path_factory) -> tuple[Path, Path]:
    """A draft model of the target's layers, and a head that says nonsense about it."""
    from outrider.models.drafts import digest_of

    place, target = tmp_path_factory.mktemp("judged"), tiny_llama
    draft = new_draft(target, (0,))
    save_draft(place / "draft", draft, DraftCard(target.name, target.fingerprint, (0,)))
    hidden = int(draft.config.hidden_size)
    head = nonsense(hidden, digest=digest_of(place / "draft"))
    card = DraftCard(target.name, target.fingerprint, (0,), kind=ACCEPTANCE, shape=head.shape.as_dict())
    write_drafter(place / "head", head.tensors(), card)
    return place / "draft", place / "head"


@pytest.mark.slow
def test_the_gate_is_green_with_a_head_that_says_nonsense(tiny_llama, folders) -> None:
    draft, head = folders
    options = {"drafter": str(draft), "head": str(head), "threshold": 0.5, "controller": "fixed", "budget": 5}
    report = check(tiny_llama, "specdec-plus-plus", options, size=TINY)
    outcomes = {part.name: part.outcome for part in report.parts}
    assert outcomes.pop("seeded") is Outcome.SKIPPED  # the rule is coupled to the draft
    assert set(outcomes.values()) == {Outcome.PASSED}


def test_a_head_of_another_drafter_is_refused_with_the_remedy(tiny_llama, folders, tmp_path) -> None:
    draft, head = folders
    target = tiny_llama
    other = new_draft(target, (1,))
    save_draft(tmp_path / "other", other, DraftCard(target.name, target.fingerprint, (1,)))
    with Outrider(target, "plain", strict=True) as engine:
        options = {"head": str(head), "drafter": str(tmp_path / "other")}
        with pytest.raises(
            InputError, match="was trained for another draft-model drafter.*train run --kind acceptance"
        ):
            engine.recipe("specdec-plus-plus", options)
        options["drafter"] = str(draft)
        assert engine.recipe("specdec-plus-plus", options).lossless
