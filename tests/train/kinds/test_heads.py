"""Smaller heads: rows and ids that fit, factors that are the best of their rank, a search that finds the best size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.export import export
from outrider.models import LoadedModel
from outrider.models.drafts import DraftCard, packed, read_card, write_drafter
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape
from outrider.models.trained import load_eagle3
from outrider.train.kinds.eagle3 import Eagle3Plan
from outrider.train.kinds.heads import HeadPlan, heads_of, level_seconds, make_head, measured, ranked, smaller
from outrider.train.kinds.registry import train_drafter
from outrider.train.reshape.slim import chain_length, second_moment, slimmed
from outrider.train.reshape.trim import (
    Ranking,
    SearchPlan,
    draft_flops,
    rank_tokens,
    search,
    token_counts,
    trimmed,
    utility,
)
from outrider.train.text.dialogue import ANSWER
from outrider.train.text.selfdata import SelfData

LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def net() -> Eagle3Layer:
    torch.manual_seed(4)
    made = Eagle3Layer(Eagle3Shape(32, 4, 2, 8, 48, LAYERS, 50), torch.randperm(64)[:50].sort().values)
    for weight in made.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.2)
    return made.requires_grad_(False)


@pytest.fixture(scope="module")
def drafter(net: Eagle3Layer, four_layers: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    card = DraftCard(four_layers.name, four_layers.fingerprint, LAYERS, kind="eagle3", shape=net.shape.as_dict())
    write_drafter(folder, packed(net.tensors(), False), card)
    return folder


def test_counts_are_of_answers_only() -> None:
    data = SelfData(torch.tensor([[9, 9, 9, 5, 7, 5]]), torch.tensor([[0, 1, 1, 2, 2, 2]]))
    assert token_counts(data, 12).tolist() == [0, 0, 0, 0, 0, 2, 0, 1, 0, 0, 0, 0]


def test_rankings_are_nested_keep_what_ends_a_text_and_cover_more_with_size() -> None:
    counts = torch.tensor([0, 5, 1, 9, 9, 0, 2, 4])
    ranking = rank_tokens(counts, torch.tensor([1, 2, 3, 4, 5, 6]), frozenset({5, 99}))
    assert ranking.ids.tolist() == [5, 3, 4, 1, 6, 2]
    assert ranking.keep(3).tolist() == [3, 4, 5]
    for size in range(6):
        assert set(ranking.keep(size).tolist()) < set(ranking.keep(size + 1).tolist())
        assert ranking.coverage(size) <= ranking.coverage(size + 1)
    assert ranking.coverage(6) == pytest.approx(26 / 30)  # a token the drafter cannot say counts as missing
    assert ranking.least(18 / 30) == 3 and ranking.least(0.99) == 6


def test_a_trimmed_head_says_the_same_about_the_tokens_it_kept(net: Eagle3Layer) -> None:
    state = torch.randn(5, 32)
    keep = net.ids[torch.tensor([1, 7, 8, 30, 49])]
    cut = trimmed(net, keep)
    assert torch.equal(cut.ids, keep) and cut.shape.vocab == 5
    torch.testing.assert_close(cut.logits(state), net.logits(state)[:, [1, 7, 8, 30, 49]])
    whole = trimmed(net, net.ids)
    assert torch.equal(whole.logits(state), net.logits(state))
    stranger = next(i for i in range(64) if i not in net.ids.tolist())
    with pytest.raises(InputError, match="larger --vocab"):
        trimmed(net, torch.tensor([stranger]))


def test_full_rank_changes_nothing_and_lower_rank_loses_what_the_decomposition_says(net: Eagle3Layer) -> None:
    state = torch.randn(6, 32)
    torch.testing.assert_close(slimmed(net, 32).logits(state), net.logits(state), atol=1e-4, rtol=1e-4)
    normed = torch.randn(20_000, 32, dtype=torch.float64)
    weight = net.lm_head.weight.double()
    tail = torch.linalg.svdvals(weight)[8:].square().sum()
    slim = slimmed(net, 8)
    product = slim.lm_head[1].weight.double() @ slim.lm_head[0].weight.double()
    assert torch.linalg.matrix_rank(product) == 8
    assert (weight - product).square().sum() == pytest.approx(float(tail), rel=1e-4)
    assert ((weight - product) @ normed.T).square().sum(0).mean() == pytest.approx(float(tail), rel=0.05)


def test_the_factors_are_the_best_for_the_states_they_see(net: Eagle3Layer) -> None:
    torch.manual_seed(0)
    states = torch.randn(4000, 32) @ torch.diag(torch.logspace(0, -2, 32)) @ torch.randn(32, 32)
    moment = states.double().T @ states.double() / len(states)

    def error(slim: Eagle3Layer) -> float:
        return float((slim.lm_head(states) - net.lm_head(states)).square().sum(-1).mean())

    assert error(slimmed(net, 6, moment)) < 0.7 * error(slimmed(net, 6))


def test_every_token_stays_within_reach_of_a_head_of_low_rank(net: Eagle3Layer) -> None:
    slim = slimmed(net, 8)
    weight = slim.lm_head[1].weight @ slim.lm_head[0].weight
    unit = torch.nn.functional.normalize(weight, dim=1)
    best = (slim.lm_head(unit) / weight.norm(dim=1)).argmax(-1)
    assert torch.equal(best, torch.arange(50))


def test_the_second_moment_is_that_of_what_the_head_reads(net, four_layers, text) -> None:
    few = SelfData(text.tokens[:3], text.roles[:3])
    seen: list[torch.Tensor] = []
    hook = net.lm_head.register_forward_hook(lambda module, given, result: seen.append(given[0]))
    from outrider.train.kinds.eagle3 import answers, look, unrolled

    _, embedded, state = look(four_layers, net, few.tokens.long())
    wanted = answers(few)
    for step, after in enumerate(unrolled(net, embedded, state, 2)):
        net.logits(after[wanted & (torch.arange(48) >= step)])
    hook.remove()
    rows = torch.cat(seen).double()
    torch.testing.assert_close(second_moment(four_layers, net, few, 2), rows.T @ rows / len(rows))


def test_operations_of_a_small_shape_by_hand() -> None:
    shape = Eagle3Shape(4, 2, 1, 2, 6, (1, 2, 3), 10)
    layer = 2 * 12 * 4 + 2 * 8 * 4 + 2 * (2 * 8 * 2) + 2 * 4 * 4 + 6 * 4 * 6
    assert draft_flops(shape) == layer + 2 * 4 * 10 and draft_flops(shape, 3) == layer + 2 * 4 * 3
    assert draft_flops(replace(shape, rank=2)) == layer + 2 * 2 * (4 + 10)
    assert chain_length((0.5, 0.5, 1.0)) == 1 + 0.5 + 0.25 + 0.25


def zipf(exponent: float, total: int = 128_000) -> Ranking:
    counts = (1e9 / torch.arange(1, total + 1, dtype=torch.float64) ** exponent).round()
    return rank_tokens(counts, torch.arange(total), frozenset())


@pytest.mark.parametrize("exponent", [1.1, 1.2, 1.4, 1.6])
def test_the_search_comes_within_a_percent_of_trying_every_size(exponent: float) -> None:
    pytest.importorskip("optuna")
    ranking, shape = zipf(exponent), Eagle3Shape(4096, 32, 8, 128, 14336, (2, 16, 29), 128_000)
    plan = SearchPlan(least_coverage=0.8 if exponent < 1.2 else 0.95)
    found = search(ranking, lambda size: draft_flops(shape, size), plan)
    best = max(
        utility(size, ranking, lambda n: draft_flops(shape, n), plan).utility
        for size in range(1000, 50_001, 7) if ranking.coverage(size) >= plan.least_coverage
    )  # fmt: skip
    assert found.feasible and found.coverage >= plan.least_coverage and found.utility > best - 0.01


def test_where_no_size_covers_enough_the_fewest_tokens_that_do_are_taken() -> None:
    pytest.importorskip("optuna")
    ranking, shape = zipf(1.05), Eagle3Shape(4096, 32, 8, 128, 14336, (2, 16, 29), 128_000)
    found = search(ranking, lambda size: draft_flops(shape, size), SearchPlan(trials=20))
    assert not found.feasible and found.size > 50_000
    assert ranking.coverage(found.size) >= 0.95 > ranking.coverage(found.size - 1)


def test_more_weight_on_coverage_keeps_more_tokens() -> None:
    pytest.importorskip("optuna")
    ranking, shape = zipf(1.3), Eagle3Shape(4096, 32, 8, 128, 14336, (2, 16, 29), 128_000)
    sizes = [
        search(ranking, lambda size: draft_flops(shape, size), SearchPlan(weight=weight, least_coverage=0.0)).size
        for weight in (0.2, 0.7, 0.97)
    ]
    assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.parametrize(("vocab", "rank"), [(20, 0), (0, 8), (20, 8)])
def test_decoding_with_a_smaller_head_is_still_exact(
    four_layers, drafter, text, tmp_path, vocab: int, rank: int
) -> None:
    _, made, _ = make_head(drafter, four_layers, text, HeadPlan(vocab, rank), tmp_path / "small")
    assert (made.vocab, made.rank) == (vocab or 50, rank)
    net = load_eagle3(tmp_path / "small", four_layers)
    assert (net.shape.vocab, net.shape.rank) == (vocab or 50, rank) and 2 in net.ids  # what ends a text
    options = {"drafter": str(tmp_path / "small"), "controller": "fixed", "budget": 6, "depth": 3}
    for sampling, rule in (({"temperature": 0.0}, "recursive"), ({"temperature": 0.9, "seed": 3}, "invariant")):
        engines = (
            Outrider(four_layers, "plain"),
            Outrider(four_layers, "eagle3", options | {"verifier": rule}, strict=True),
        )
        plain, drafted = (e.generate([[1, 5, 9], [7, 7]], max_new_tokens=20, **sampling) for e in engines)
        assert [g.token_ids for g in drafted] == [g.token_ids for g in plain]
        said = {t for g in drafted for t, o in zip(g.token_ids, g.origins, strict=True) if o.depth}
        assert said <= set(net.ids.tolist())
    sampled = Outrider(four_layers, "eagle3", options, strict=True).generate([[1, 5]], temperature=1.0, seed=1)
    assert sampled[0].stats.drafted > 0


def test_a_smaller_head_can_be_trained_on_and_exported(four_layers, drafter, text, tmp_path) -> None:
    make_head(drafter, four_layers, text, HeadPlan(30, 8), tmp_path / "small")
    plan = Eagle3Plan(steps=12, batch=8, lr=3e-3, held_out=16, unroll=2)
    learner, curve = train_drafter("eagle3", four_layers, text, plan, tmp_path / "trained", begin=tmp_path / "small")
    before, after = load_eagle3(tmp_path / "small", four_layers), learner.net
    assert after.shape.rank == 8
    for factor in (0, 1):
        assert not torch.equal(before.lm_head[factor].weight, after.lm_head[factor].weight)
    assert curve[-1].sampled > curve[0].sampled
    made = export(tmp_path / "trained", four_layers, "vllm", tmp_path / "out")
    assert made.vocabulary == 30 and made.difference < 1e-4 * made.largest
    half = export(tmp_path / "trained", four_layers, "vllm", tmp_path / "half", dtype=torch.bfloat16)
    assert half.difference < 1e-4 * half.largest


def test_figures_show_what_each_size_costs_and_reaches(four_layers, net, text) -> None:
    held_out, rest = SelfData(text.tokens[:8], text.roles[:8]), SelfData(text.tokens[8:], text.roles[8:])
    made = heads_of(net, four_layers, rest, [(10, 0), (30, 0), (0, 0), (0, 4)])
    rows = [measured(head, four_layers, held_out) for head in made]
    assert [(row.vocab, row.rank) for row in rows] == [(10, 0), (30, 0), (50, 0), (50, 4)]
    assert rows[0].coverage < rows[1].coverage < rows[2].coverage == rows[3].coverage
    assert rows[0].megabytes < rows[1].megabytes < rows[2].megabytes and rows[3].megabytes < rows[2].megabytes
    said = held_out.tokens[held_out.roles == ANSWER].long()
    assert rows[2].coverage == pytest.approx(float(torch.isin(said, net.ids).float().mean()))
    assert all(row.milliseconds > 0 and 1 <= row.chain <= 6 for row in rows)
    with pytest.raises(InputError, match="larger --vocab"):
        smaller(net, ranked(net, four_layers, rest), 60, 0)


def test_a_level_is_timed_in_the_form_that_drafting_runs(net, monkeypatch) -> None:
    from outrider.runtime import packed as packing

    if not packing._eight_bits_supported():
        pytest.skip("this torch has no eight-bit linear layers")
    made: list[torch.Tensor] = []
    small = packing._small
    monkeypatch.setattr(packing, "_small", lambda weight, bias: (made.append(weight), small(weight, bias))[1])
    fresh = trimmed(net, net.ids[:30])  # weights that nobody has packed yet
    level_seconds(fresh, rounds=1)
    assert any(torch.equal(weight, fresh.lm_head.weight) for weight in made)


def test_the_command(four_layers, drafter, text, tmp_path, monkeypatch) -> None:
    pytest.importorskip("optuna")
    from outrider.cli.train.trim import trim

    monkeypatch.setattr("outrider.models.load_model", lambda *_, **__: four_layers)
    monkeypatch.setattr("outrider.train.text.selfdata.read_data", lambda *_: text)
    monkeypatch.setattr("outrider.train.text.selfdata.shards_of", lambda *_: [])
    app = typer.Typer()
    app.command()(trim)
    line = ["--drafter", str(drafter), "--data", "x", "--out", str(tmp_path / "small")]
    done = CliRunner().invoke(app, [*line, "--search", "--least-coverage", "0.5", "--json=-"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["now"]["vocab"] == told["search"]["size"] == read_card(tmp_path / "small").shape["vocab"]
    with pytest.raises(InputError, match="already holds"):
        CliRunner().invoke(app, [*line, "--rank", "4"], catch_exceptions=False, standalone_mode=False)
