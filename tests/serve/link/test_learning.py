"""A server whose drafter learns from requests: answers stay, figures tell of it, and the next server goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.models import LoadedModel
from outrider.models.drafts import CARD, DraftCard, packed, read_card, write_drafter
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape
from outrider.serve.link import learning
from outrider.serve.link.local import LocalLink
from outrider.serve.link.seam import End, Request
from outrider.serve.process.counts import joined
from outrider.train.online.student import AdaptPlan
from tests.serve.link.test_local import collect, said
from tests.train.conftest import make_markov

QUICK = AdaptPlan(every=100, steps=6, batch=4, length=40, context=8, lr=3e-3, unroll=2)
REQUESTS = 16


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return make_markov()


@pytest.fixture(scope="module")
def drafter(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hardly trained: every request is news."""
    torch.manual_seed(3)
    shape = Eagle3Shape(32, 4, 2, 8, 48, (1, 2, 3), 64)
    net = Eagle3Layer(shape, torch.arange(64))
    for weight in net.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.05)
    folder = tmp_path_factory.mktemp("drafter")
    card = DraftCard(target.name, target.fingerprint, (1, 2, 3), kind="eagle3", shape=shape.as_dict())
    write_drafter(folder, packed(net.tensors(), False), card)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates as often as text allows: shares of the time are tested where they are kept."""
    monkeypatch.setattr(learning, "AdaptPlan", lambda share: QUICK)


def served(target: LoadedModel, drafter: Path, learn: Path | None, count: int = REQUESTS) -> tuple[list, dict]:
    """Texts with accepted lengths, and the figures at the end."""

    def engine() -> Outrider:
        options = {"drafter": str(drafter), "controller": "fixed", "budget": 6, "depth": 3, "verifier": "invariant"}
        return Outrider(target, "eagle3", options, strict=True)

    async def run() -> tuple[list, dict]:
        link = LocalLink(engine, learn=None if learn is None else str(learn))
        await link.start()
        try:
            texts = []
            for i in range(count):
                params = SamplingParams(max_new_tokens=48, temperature=0.7, seed=i)
                events = await collect(link, Request(str(i), (1, 3 + i, 9), params))
                (end,) = [event for event in events if isinstance(event, End)]
                texts.append((said(events)[0], end.stats["new_tokens"] / end.stats["steps"]))
                if link._learning is not None and (thread := link._learning._adaptation.source._thread) is not None:
                    await asyncio.to_thread(thread.join)
            return texts, dict(await link.stats())
        finally:
            await link.close()

    return asyncio.run(run())


def test_a_server_that_learns_says_the_same_more_quickly_and_the_next_one_goes_on(target, drafter, tmp_path) -> None:
    frozen, figures = served(target, drafter, None)
    assert not any("learn" in name for name in figures)
    learnt, figures = served(target, drafter, tmp_path / "learnt")
    assert [text for text, _ in learnt] == [text for text, _ in frozen]
    assert sum(length for _, length in learnt[-4:]) > sum(length for _, length in frozen[-4:]) + 0.6
    assert figures["learning_updates"]["taken"] > 0 and figures["learnt_rows"] == sum(len(text) for text, _ in learnt)
    assert figures["learning_failed"] == 0 and 0 < figures["learning_bytes"] <= QUICK.bytes
    assert figures["learning_acceptance"] > 0
    assert read_card(tmp_path / "learnt").recipe["adapted"]["rows"] > 0
    again, _ = served(target, drafter, tmp_path / "learnt", count=4)
    assert [text for text, _ in again] == [text for text, _ in frozen[:4]]
    assert sum(length for _, length in again) > sum(length for _, length in frozen[:4]) + 0.6


def test_a_disk_that_is_full_costs_no_answer(target, drafter, tmp_path, monkeypatch, caplog) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("outrider.train.online.adapt.write_drafter", full)
    texts, figures = served(target, drafter, tmp_path / "learnt", count=10)
    assert len(texts) == 10 and figures["learning_updates"]["taken"] and not (tmp_path / "learnt" / CARD).exists()
    assert caplog.text.count("was not kept: no space left") == 1


def test_a_folder_of_another_drafter_and_methods_without_a_head_are_refused(target, drafter, tmp_path) -> None:
    card = read_card(drafter)
    shape = Eagle3Shape(32, 4, 2, 8, 40, (1, 2, 3), 64)
    other = Eagle3Layer(shape, torch.arange(64))
    write_drafter(tmp_path / "other", packed(other.tensors(), False), replace(card, shape=shape.as_dict()))
    with pytest.raises(InputError, match="another drafter than the one that learns"):
        served(target, drafter, tmp_path / "other", count=1)
    with pytest.raises(InputError, match="no EAGLE-3 head"):
        asyncio.run(LocalLink(lambda: Outrider(target, "suffix"), learn=str(tmp_path / "x")).start())


def test_figures_of_an_engine_that_died_count_on() -> None:
    before = {"learnt_rows": 10, "learning_acceptance": 0.5, "learning_updates": {"taken": 1}}
    lasting = joined({}, before, gauges=False)
    now = joined(
        lasting, {"learnt_rows": 5, "learning_acceptance": 0.6, "learning_updates": {"taken": 2, "refused": 1}}
    )
    assert now == {"learnt_rows": 15, "learning_acceptance": 0.6, "learning_updates": {"taken": 3, "refused": 1}}
