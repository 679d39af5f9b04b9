"""Every kind of trained drafter, through one code path: it learns, is stored, resumes, and is refused elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest
import torch

from outrider.api import Outrider
from outrider.check import exhaustive, gate
from outrider.check.gate import Outcome, Size, check
from outrider.core.errors import InputError, UnknownName
from outrider.models import LoadedModel
from outrider.models.drafts import read_card
from outrider.models.trained import load_trained
from outrider.train.kinds.registry import KINDS, find_kind, plan_of, train_drafter
from outrider.train.loop import CHECKPOINT, CURVE, split
from outrider.train.picture import draw_curve
from outrider.train.text.selfdata import ANSWER, DataPlan, SelfData, write_data
from tests.drafters import drafter
from tests.train.conftest import make_markov, make_target

SETTINGS = {
    "eagle3": {"vocab": 64, "unroll": 3, "intermediate": 32}, "eagle2": {"intermediate": 32},
    "fspad": {"intermediate": 32}, "medusa": {"heads": 3, "lr": 1e-2}, "hydra": {"heads": 3},
    "ppd": {"lr": 1e-1, "anchors": 16},
    "dflash": {"deep": 1, "block": 4, "intermediate": 32, "lr": 3e-2}, "deer": {"layers": "2", "block": 4, "lr": 1e-2},
}  # fmt: skip
SLOW = ("dflash", "deer")  # of several layers
NO_NETWORK = ("ppd",)  # only vectors


def every(kinds: Iterable[str]) -> pytest.MarkDecorator:
    kept = [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in kinds]
    return pytest.mark.parametrize("kind", kept)


EVERY = every(SETTINGS)
NETWORKS = every(kind for kind in SETTINGS if kind not in NO_NETWORK)


@pytest.fixture(scope="module")
def markov() -> LoadedModel:
    return make_markov()


@pytest.fixture(scope="module")
def its_text(markov: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> SelfData:
    return write_data(markov, DataPlan(tokens=6 * 32 * 48, length=48, batch=32), tmp_path_factory.mktemp("text"))


@NETWORKS
def test_training_beats_a_drafter_that_copies_the_unigram_prior(
    kind: str, markov: LoadedModel, its_text: SelfData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.train.picture.draw_curve", draw_curve)
    settings = {"steps": 60, "batch": 8, "lr": 3e-3, "held_out": 16, **SETTINGS[kind]}
    plan = plan_of(find_kind(kind), settings)
    _, curve = train_drafter(kind, markov, its_text, plan, tmp_path, measure_every=30)
    held_out, training = split(its_text, plan.held_out)
    prior = torch.bincount(training.tokens[training.roles == ANSWER].long(), minlength=64).double()
    prior /= prior.sum()
    p = markov.model(held_out.tokens.long()).logits[:, 1:-1].double().softmax(-1)
    wanted = held_out.roles[:, 2:] == ANSWER
    overlap = float(torch.minimum(p, prior).sum(-1)[wanted].mean())
    likeliest = float((p.argmax(-1) == prior.argmax())[wanted].double().mean())
    assert curve[-1].sampled > overlap + 0.1 and curve[-1].greedy > likeliest + 0.1
    assert curve[-1].sampled > curve[0].sampled and curve[-1].loss < curve[1].loss
    assert [point["step"] for point in json.loads((tmp_path / CURVE).read_text())] == [0, 30, 60]
    assert (tmp_path / "curve.svg").read_text().startswith("<?xml")


@EVERY
def test_the_target_stays_as_it_was(kind: str, another: LoadedModel, tmp_path: Path) -> None:
    """Its head is shared by most kinds: neither trained, nor cast, nor moved with the drafter."""
    half = make_target(1)
    half.model.to(torch.bfloat16)
    before = {name: weight.clone() for name, weight in half.model.named_parameters()}
    text = write_data(another, DataPlan(tokens=8 * 24, length=24, batch=8), tmp_path / "text")
    folder = drafter(kind, half, text, tmp_path / "drafter", steps=2)
    drafter(kind, half, text, tmp_path / "more", steps=1)
    load_trained(kind, folder, half)
    for name, weight in half.model.named_parameters():
        assert torch.equal(weight, before[name]) and weight.grad is None and not weight.requires_grad, name


@NETWORKS
@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_stored_drafter_comes_back_goes_on_and_is_as_good(
    kind: str, markov: LoadedModel, its_text: SelfData, tmp_path: Path, eight_bits: bool
) -> None:
    settings = {"steps": 20, "batch": 8, "lr": 3e-3, "eight_bits": eight_bits, **SETTINGS[kind]}
    plan = plan_of(find_kind(kind), settings)
    learner, curve = train_drafter(kind, markov, its_text, plan, tmp_path / "a", licence="Apache-2.0")
    card = read_card(tmp_path / "a")
    assert (card.kind, card.licence, card.recipe["steps"]) == (kind, "Apache-2.0", 20)
    assert torch.equal(load_trained(kind, tmp_path / "a", markov).ids, learner.net.ids)
    _, more = train_drafter(
        kind, markov, its_text, plan_of(find_kind(kind), settings | {"steps": 0}), tmp_path / "b", begin=tmp_path / "a"
    )
    assert more[0].greedy == pytest.approx(curve[-1].greedy, abs=0.03)
    assert more[0].sampled == pytest.approx(curve[-1].sampled, abs=0.03)


class Stopped(Exception):
    pass


@EVERY
def test_an_interrupted_run_ends_with_the_weights_of_a_whole_one(
    kind: str, four_layers: LoadedModel, text: SelfData, tmp_path: Path
) -> None:
    plan = plan_of(find_kind(kind), {"steps": 9, "batch": 4, "held_out": 8, **SETTINGS[kind]})

    def stop(step: int, of: int, point: object) -> None:
        if step == 7:
            raise Stopped

    with pytest.raises(Stopped):
        train_drafter(kind, four_layers, text, plan, tmp_path / "a", measure_every=3, save_every=0, on_progress=stop)
    assert (tmp_path / "a" / CHECKPOINT).exists() and not (tmp_path / "a" / "drafter.json").exists()
    steps: list[int] = []
    resumed, curve = train_drafter(
        kind, four_layers, text, plan, tmp_path / "a", measure_every=3, on_progress=lambda step, *_: steps.append(step)
    )
    assert steps == [7, 8, 9] and [point.step for point in curve] == [0, 3, 6, 9]
    whole, _ = train_drafter(kind, four_layers, text, plan, tmp_path / "b", measure_every=3)
    for (name, a), b in zip(whole.net.named_parameters(), resumed.net.parameters(), strict=True):
        assert torch.equal(a, b), name


@EVERY
def test_a_drafter_of_another_target_or_kind_is_refused(
    kind: str, four_layers: LoadedModel, another: LoadedModel, text: SelfData, tmp_path: Path
) -> None:
    drafter(kind, four_layers, text, tmp_path)
    with pytest.raises(InputError, match=f"trained for .* outrider train run --kind {kind}"):
        load_trained(kind, tmp_path, another)
    other = next(name for name in SETTINGS if name != kind)
    with pytest.raises(InputError, match=f"of kind {kind}, not {other}"):
        load_trained(other, tmp_path, four_layers)
    card = json.loads((tmp_path / "drafter.json").read_text())
    (tmp_path / "drafter.json").write_text(json.dumps(card | {"shape": {}}))
    with pytest.raises(InputError, match="train it again"):
        load_trained(kind, tmp_path, four_layers)


@EVERY
def test_a_target_without_a_drafter_is_told_how_to_train_one(kind: str, tiny_llama: LoadedModel) -> None:
    engine = Outrider(tiny_llama, "plain")
    with pytest.raises(InputError, match=f"outrider train data .* outrider train run --kind {kind} .* --data DATA"):
        engine.recipe(kind)


@pytest.fixture(scope="module")
def young(four_layers: LoadedModel, text: SelfData, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A drafter of this kind after five updates, made once."""
    return cache(lambda kind: drafter(kind, four_layers, text, tmp_path_factory.mktemp(kind), steps=5))


@NETWORKS
@pytest.mark.parametrize("verifier", ["recursive", "invariant"])
def test_it_passes_the_gate(
    kind: str, verifier: str, four_layers: LoadedModel, young: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "one_a_family", lambda: ["prompt-lookup"])  # enumerations have tests of their own
    monkeypatch.setattr(exhaustive, "SMALL", ((1, 1),))
    monkeypatch.setattr(exhaustive, "SHAPES", ((1, 1),))
    monkeypatch.setattr(exhaustive, "CASES", exhaustive.CASES[:1])
    options = {"drafter": str(young(kind)), "verifier": verifier}
    report = check(four_layers, kind, options, size=Size(3, 24, 20, 5, 16, 16, 60, 3, thorough=False))
    assert report.verdict == "same output" and report.status == 0, [part.summary for part in report.parts]
    outcomes = {part.name: part.outcome for part in report.parts}
    assert outcomes["greedy"] is Outcome.PASSED and outcomes["martingale"] is Outcome.PASSED


def test_settings_of_other_kinds_are_refused_by_name() -> None:
    assert plan_of(find_kind("eagle3"), {"layers": "1,3", "decay": "0.5"}).layers == (1, 3)
    with pytest.raises(InputError, match=r"kind medusa has no setting 'unroll' \(a setting of eagle3, eagle2.*heads"):
        plan_of(find_kind("medusa"), {"unroll": 3})
    with pytest.raises(InputError, match="kind eagle3 has no setting 'magic'; its own: steps"):
        plan_of(find_kind("eagle3"), {"magic": 1})
    with pytest.raises(InputError, match="setting heads is 0; use 1 or more"):
        plan_of(find_kind("hydra"), {"heads": 0})
    with pytest.raises(InputError, match="setting heads is 'many'; it must be a int"):
        plan_of(find_kind("hydra"), {"heads": "many"})
    with pytest.raises(InputError, match="setting lr is nan"):
        plan_of(find_kind("hydra"), {"lr": "nan"})
    with pytest.raises(UnknownName, match="unknown loss 'l2'; known losses: kl, rkl, jsd, tvd, tvdpp, nla, ce, mix"):
        plan_of(find_kind("eagle2"), {"loss": "l2"})
    with pytest.raises(UnknownName, match="known kinds: eagle3, eagle2, fspad, medusa, hydra"):
        find_kind("eagle9")


def test_every_kind_has_a_plan_a_learner_and_help_for_every_setting() -> None:
    for kind in KINDS.values():
        assert callable(kind.begin) and kind.summary
        for name, field in kind.settings.items():
            assert field.metadata.get("help"), f"{kind.name}: {name}"
