"""The noise streams: equal bits everywhere, the right distributions, and no key used twice.

Chi-square tests run on fixed seeds with a false-alarm rate of 1e-4 each, so they repeat exactly.
"""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.noise import (
    _GOLDEN,
    DRAFT,
    VERIFY,
    StreamNoise,
    _on_device,
    _race_on_device,
    fresh_seed,
    inverse,
    key,
    mix,
    race,
    text_hash,
    uniform,
    uniforms,
)
from outrider.core.tree import fixed

FALSE_ALARM = 1e-4
CPU = torch.device("cpu")
words = st.integers(0, 2**64 - 1)


def assert_counts_follow(counts: np.ndarray, probs: np.ndarray) -> None:
    expected = counts.sum() * probs
    assert (counts[probs == 0] == 0).all()
    live = probs > 0
    statistic = float((((counts - expected) ** 2)[live] / expected[live]).sum())
    freedom = int(live.sum()) - 1
    spread = 2 / (9 * freedom)  # Wilson and Hilferty: the cube root of a chi-square is nearly normal
    assert statistic < freedom * (1 - spread + NormalDist().inv_cdf(1 - FALSE_ALARM) * math.sqrt(spread)) ** 3


@given(words, st.integers(1, 200))
def test_tensor_bits_equal_scalar_bits(stream: int, count: int) -> None:
    expected = [uniform(mix(stream + (i + 1) * _GOLDEN)) for i in range(count)]
    assert uniforms(stream, count, CPU).tolist() == expected
    assert _on_device(stream, count, CPU).tolist() == expected


def test_mix_is_the_published_splitmix64() -> None:
    # the first outputs of the reference generator started at seed 1234567
    assert [mix(1234567 + (i + 1) * _GOLDEN) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_uniform_never_reaches_its_ends() -> None:
    assert 0.0 < uniform(0) < 1e-15
    assert 1.0 - 1e-15 < uniform(2**64 - 1) < 1.0


def test_uniforms_fill_the_interval_evenly() -> None:
    u = uniforms(key(3, 1, 4), 200_000, CPU).numpy()
    assert_counts_follow(np.bincount((u * 100).astype(int), minlength=100), np.full(100, 0.01))
    pairs = (u[::2] * 10).astype(int) * 10 + (u[1::2] * 10).astype(int)  # neighbours are independent
    assert_counts_follow(np.bincount(pairs, minlength=100), np.full(100, 0.01))


def test_first_uniforms_of_successive_keys_are_even() -> None:
    u = np.array([uniform(key(1, 0, VERIFY, step, 2, 0, 0)) for step in range(20_000)])
    assert_counts_follow(np.bincount((u * 50).astype(int), minlength=50), np.full(50, 0.02))
    pairs = (u[::2] * 7).astype(int) * 7 + (u[1::2] * 7).astype(int)
    assert_counts_follow(np.bincount(pairs, minlength=49), np.full(49, 1 / 49))


def test_race_draws_from_its_probabilities() -> None:
    probs = torch.tensor([0.4, 0.0, 0.3, 0.1, 0.1, 0.07, 0.03])
    counts = np.bincount([race(probs, key(9, i)) for i in range(20_000)], minlength=7)
    assert_counts_follow(counts, probs.double().numpy())


@given(words, st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1e-6), st.floats(0.01, 1.0)), min_size=1, max_size=60))
def test_race_equals_the_argmin_over_all_tokens(stream: int, weights: list[float]) -> None:
    weights[stream % len(weights)] += 0.5
    probs = torch.tensor(weights, dtype=torch.float64)
    probs = (probs / probs.sum()).float()
    u = uniforms(stream, len(weights), CPU).tolist()
    times = [-math.log1p(-x) / p if p > 0 else math.inf for x, p in zip(u, probs.double().tolist(), strict=True)]
    won = race(probs, stream)
    assert probs[won] > 0 and times[won] == pytest.approx(min(times), rel=1e-12)


def test_race_keeps_the_favourite_at_the_smallest_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    for p in np.linspace(0.05, 1.0, 200):
        monkeypatch.setattr("outrider.core.noise._bits", lambda _, count: np.zeros(count, dtype=np.uint64))
        assert race(torch.tensor([0.0, p, 0.0], dtype=torch.float64), 0) == 1


def test_coin_has_its_probability_and_sure_coins_are_sure() -> None:
    noise = [StreamNoise(5, 0, VERIFY, step, 10) for step in range(10_000)]
    heads = sum(n.coin(0.3, 1, 0) for n in noise)
    assert_counts_follow(np.array([heads, len(noise) - heads]), np.array([0.3, 0.7]))
    assert all(n.coin(1.0, 1, 0) for n in noise) and not any(n.coin(0.0, 1, 0) for n in noise)


@pytest.mark.parametrize("tensor", [False, True])
def test_draw_is_proportional_to_weight(tensor: bool) -> None:
    weights = np.array([0.0, 2.0, 0.0, 1.0, 5.0, 0.0])
    given_weights = torch.from_numpy(weights) if tensor else weights
    drawn = [StreamNoise(5, 0, DRAFT, step, 10).draw(given_weights, 0, 0) for step in range(10_000)]
    assert_counts_follow(np.bincount(drawn, minlength=6), weights / weights.sum())


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-300, 1e-200), st.floats(1e-3, 1e3)), min_size=1, max_size=40),
    st.one_of(st.just(uniform(0)), st.just(uniform(2**64 - 1)), words.map(uniform)),
)
def test_inverse_never_returns_a_zero_weight(weights: list[float], u: float) -> None:
    weights[len(weights) // 2] += 0.1
    array = np.array(weights)
    index = inverse(array, u)
    assert array[index] > 0
    assert inverse(torch.from_numpy(array), u) == index
    assert array[:index].sum() <= u * array.sum() * (1 + 1e-9)


def test_inverse_of_a_long_row_is_the_inverse_of_its_running_sum() -> None:
    rng = np.random.default_rng(4)
    weights = rng.random(5000) * (rng.random(5000) < 0.3)
    weights[:700] = weights[2048:2560] = weights[-700:] = 0.0  # whole blocks without weight
    sums = np.cumsum(weights)
    for u in [uniform(0), uniform(2**64 - 1), *rng.random(2000)]:
        index = inverse(weights, u)
        assert index == np.searchsorted(sums, u * sums[-1], side="right")
        assert inverse(torch.from_numpy(weights), u) == index
    alone = np.zeros(5000, dtype=np.float32)
    alone[4321] = 1e-30
    assert {inverse(alone, u) for u in (uniform(0), 0.5, uniform(2**64 - 1))} == {4321}
    with pytest.raises(AssertionError):
        inverse(np.zeros(5000), 0.5)


def test_race_sieves_without_losing_the_winner() -> None:
    for seed, size in enumerate([3000] * 40):
        probs = torch.softmax(torch.from_numpy(np.random.default_rng(seed).normal(size=size) * 4).float(), 0)
        times = -torch.log1p(-uniforms(key(seed), size, CPU)) / probs.double()
        assert race(probs, key(seed)) == int(times.argmin())
        assert race(probs.double(), key(seed)) == _race_on_device(probs, key(seed)) == int(times.argmin())


def test_inverse_at_the_edges_of_its_steps() -> None:
    assert inverse(np.array([0.5, 0.0, 0.5]), 0.5) == 2  # a step holds its lower end, not its upper one
    assert inverse(np.array([0.0, 5e-324]), 0.25) == 1  # u times the total vanishes
    with pytest.raises(AssertionError):
        inverse(np.zeros(3), 0.5)


def test_a_coin_and_a_draw_under_one_key_are_independent() -> None:
    noise = [StreamNoise(5, 0, VERIFY, step, 10) for step in range(4_000)]
    pairs = [2 * n.coin(0.5, 1, 0) + n.draw(np.ones(2), 1, 0) for n in noise]
    assert_counts_follow(np.bincount(pairs, minlength=4), np.full(4, 0.25))


def test_no_two_decisions_share_a_key() -> None:
    grid = itertools.product((0, 1), (DRAFT, VERIFY), range(12), range(20), range(8), (0, 1))
    keys = [key(7, *parts) for parts in grid]
    keys += [StreamNoise(7, sample, VERIFY, 0, 0).target_key([text]) for sample in (0, 1) for text in range(4000)]
    assert len(keys) == 2 * 2 * 12 * 20 * 8 * 2 + 8000 and len(set(keys)) == len(keys)


@given(st.lists(st.integers(0, 200_000), max_size=60), st.integers(0, 60))
def test_the_hash_of_a_text_is_the_same_in_one_go_and_token_by_token(tokens: list[int], cut: int) -> None:
    whole = text_hash(tokens)
    assert whole == text_hash(np.array(tokens, dtype=np.int64)) < 2**64
    assert whole == sum(text_hash([token], place) for place, token in enumerate(tokens)) % 2**64
    assert whole == (text_hash(tokens[:cut]) + text_hash(tokens[cut:], len(tokens[:cut]))) % 2**64


def test_texts_that_differ_have_different_hashes() -> None:
    rng = np.random.default_rng(0)
    texts = {tuple(text) for length in range(8) for text in itertools.product(range(4), repeat=length)}
    long = rng.integers(0, 50_000, 3000).tolist()
    texts |= {tuple(long[start:]) for start in range(1500)} | {tuple(long[:end]) for end in range(9, 1500)}
    texts |= {(*long[:i], long[i + 1], long[i], *long[i + 2 :]) for i in range(0, 1500, 2)}  # two tokens swapped
    assert len({text_hash(text) for text in texts}) == len(texts)


def _noise_after(text: list[int], seed: int = 1, sample: int = 0, stream: int = VERIFY) -> StreamNoise:
    return StreamNoise(seed, sample, stream, text_hash(text), len(text))


def test_target_noise_depends_on_seed_sample_and_text_alone() -> None:
    probs = torch.softmax(torch.linspace(-1, 1, 50), 0)
    text = np.random.default_rng(0).integers(0, 50, 40).tolist()
    here = [_noise_after(text[:20]).pick(probs, text[20 : 20 + d]) for d in range(20)]
    assert here == [_noise_after(text[: 20 + d], stream=DRAFT).pick(probs, ()) for d in range(20)]
    for other in (
        _noise_after(text[:20], sample=1),
        _noise_after(text[:20], seed=2),
        _noise_after(text[1:20]),  # the same tokens before it, but not all of them
    ):
        assert here != [other.pick(probs, text[20 : 20 + d]) for d in range(20)]


def test_picking_at_all_nodes_at_once_is_picking_at_each() -> None:
    tree = fixed(np.array([5, 1, 2, 3, 1, 9]), np.array([-1, 0, 0, 1, 3, 2]), "test")
    probs = torch.softmax(torch.from_numpy(np.random.default_rng(0).normal(size=(len(tree), 80))), 1)
    noise = _noise_after([7, 8, 5])
    assert noise.pick_rows(probs, tree) == [noise.pick(probs[i], tree.path_tokens(i)) for i in range(len(tree))]


def test_fresh_seeds_differ() -> None:
    assert len({fresh_seed() for _ in range(100)}) == 100
