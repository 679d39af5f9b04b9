"""The style prior: its bias is the formula, of each node's path, and speculation keeps to the changed distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.api import Outrider
from outrider.check.enumeration import Branches, outcomes
from outrider.check.toy import ToyLM, ToySource, ToyTarget
from outrider.constrain.style import SMOOTHING, WEIGHTS, Style
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.errors import InputError
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.sampling import History, SamplingParams
from outrider.core.target_rows import TargetRows
from outrider.core.tree import from_paths
from outrider.draft.grown import Grown
from outrider.grow.chain import Chain
from outrider.verify.invariant import Invariant
from outrider.verify.rejection import Rejection

CORPUS = [0, 1, 2, 0, 1, 3]  # six tokens over a vocabulary of five: 4 never occurs
VOCAB = 5


def naive(documents, vocab: int, strength: float, tokens, special=()) -> list[float]:
    """The formula by counting, one token at a time."""
    unigrams = [t for document in documents for t in document]
    out = []
    for v in range(vocab):
        smooth = (unigrams.count(v) + 1) / (len(unigrams) + vocab)
        terms = []
        for n, weight in enumerate(WEIGHTS, 1):
            context = list(tokens[-(n - 1) :]) if n > 1 else []
            places = [d[i : i + n] for d in documents for i in range(len(d) - n + 1) if d[i : i + n - 1] == context]
            if len(context) < n - 1 or not places:
                break
            share = sum(p[-1] == v for p in places) / len(places)
            terms.append((weight, math.log((1 - SMOOTHING) * share + SMOOTHING * smooth)))
        total = sum(weight for weight, _ in terms)
        out.append(0.0 if v in special else strength * sum(w / total * value for w, value in terms))
    return out


def test_the_bias_of_a_six_token_corpus_by_hand() -> None:
    style = Style.from_tokens([CORPUS], VOCAB, 0.5)
    smooth = [3 / 11, 3 / 11, 2 / 11, 2 / 11, 1 / 11]
    # After (0, 1) came 2 and 3, once each; after 1 alone the same.
    seen, unseen = math.log(0.95 * 0.5 + 0.05 * smooth[2]), math.log(0.05 * smooth[4])
    assert style.bias(np.array([0, 1]))[2].item() == pytest.approx(
        0.5 * (0.1 * math.log(0.95 / 6 + 0.05 * smooth[2]) + 0.3 * seen + 0.6 * seen), abs=1e-6
    )
    assert style.bias(np.array([0, 1]))[4].item() == pytest.approx(0.5 * (0.1 + 0.3 + 0.6) * unseen, abs=1e-6)
    # 3 ends the corpus and 4 is not in it: the first order alone carries all the weight.
    for last in (3, 4):
        assert style.bias(np.array([last]))[0].item() == pytest.approx(
            0.5 * math.log(0.95 * 2 / 6 + 0.05 * smooth[0]), abs=1e-6
        )


texts = st.lists(st.lists(st.integers(0, 5), max_size=12), min_size=1, max_size=3).filter(any)


@given(texts, st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sets(st.integers(0, 5), max_size=2))
def test_the_bias_equals_naive_counting_and_never_rules_a_token_out(documents, tokens, special) -> None:
    style = Style.from_tokens(documents, 6, 0.3, special=special)
    bias = style.bias(np.array(tokens))
    assert bias.tolist() == pytest.approx(naive(documents, 6, 0.3, tokens, special), abs=1e-5)
    assert bool(torch.isfinite(style.reshape(np.array(tokens), torch.randn(6))).all())


def test_strength_zero_returns_the_row_itself() -> None:
    row = torch.randn(VOCAB)
    style = Style.from_tokens([CORPUS], VOCAB, 0.0, special=[2])
    assert style.reshape(np.array([0, 1]), row).tolist() == row.tolist()


def test_special_tokens_keep_their_probability() -> None:
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    style = Style.from_tokens([CORPUS], VOCAB, 2.0, special=[2, 4])
    before, after = row.softmax(0), style.reshape(np.array([0, 1]), row).softmax(0)
    assert after[[2, 4]].tolist() == pytest.approx(before[[2, 4]].tolist(), rel=1e-5)
    assert not torch.allclose(before, after, atol=1e-2)


def test_what_was_banned_stays_banned() -> None:
    row = torch.full((VOCAB,), -math.inf)
    row[2] = 1.0
    style = Style.from_tokens([CORPUS], VOCAB, 1.0, special=[2])
    assert style.reshape(np.array([0]), row).tolist() == row.tolist()  # nothing but a special token is left
    row[0] = 0.0
    assert style.reshape(np.array([0]), row).isfinite().tolist() == [True, False, True, False, False]


def test_more_strength_brings_the_distribution_nearer_to_the_prior_and_further_from_the_model() -> None:
    generator = torch.Generator().manual_seed(1)
    prior = Style.from_tokens([CORPUS], VOCAB, 1.0).bias(np.array([0, 1])).softmax(0)
    to_prior, from_model = [], []
    for strength in (0.0, 0.1, 0.3, 1.0):
        style = Style.from_tokens([CORPUS], VOCAB, strength)
        generator.manual_seed(1)
        rows = torch.randn(200, VOCAB, generator=generator)
        steered = torch.stack([style.reshape(np.array([0, 1]), row) for row in rows]).softmax(1)
        plain = rows.softmax(1)
        middle = (steered + plain) / 2
        to_prior.append((steered * (steered / prior).log()).sum(1).mean().item())
        halves = [(p * (p / middle).log()).sum(1) for p in (steered, plain)]
        from_model.append(((halves[0] + halves[1]) / 2).mean().item())
    assert to_prior == sorted(to_prior, reverse=True) and from_model == sorted(from_model)
    assert from_model[0] == 0.0 < from_model[1]


def test_every_node_of_a_tree_is_biased_as_plain_decoding_of_its_path() -> None:
    style = Style.from_tokens([CORPUS, [4, 0, 1, 4]], VOCAB, 0.7, special=[3])
    for prompt in ([1], [0, 1, 2]):  # the first has a single token: orders come in with depth
        tree = from_paths(prompt[-1], [[2, 0, 1], [0, 1, 4], [4, 4]])
        logits = torch.randn(len(tree), VOCAB, generator=torch.Generator().manual_seed(2))
        params = SamplingParams(temperature=0.9)
        rows = TargetRows(logits, tree, History(prompt, params, VOCAB, constraint=style))
        for node in range(len(tree)):
            alone = History([*prompt, *tree.path_tokens(node)], params, VOCAB, constraint=style)
            assert torch.equal(rows.probs(node), torch.softmax(alone.process(logits[node]), 0))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_steered_speculation_is_steered_plain_decoding_token_for_token(tiny_llama, temperature: float) -> None:
    corpus = np.random.default_rng(0).integers(3, 64, 400).tolist()
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=7, ignore_eos=True)
    prompts = [[5, 9, 5, 9, 5], [7], corpus[:20]]
    with Outrider(tiny_llama, "prompt-lookup", {"controller": "fixed"}, strict=True) as engine:
        style = Style.from_tokens([corpus], engine.target.vocab_size, 1.0, special=[1, 2])
        made = engine.generate(prompts, params, constraint=style)
        plain = engine.generate(prompts, params, constraint=style, method="plain")
        unsteered = engine.generate(prompts, params, method="plain")
        streamed = engine.submit(prompts[0], params, constraint=style).result()
    assert [g.token_ids for g in made] == [g.token_ids for g in plain]
    assert [g.token_ids for g in made] != [g.token_ids for g in unsteered]
    assert streamed.token_ids == plain[0].token_ids
    assert sum(g.stats.accepted for g in made) > 0


def sampled_probs(constraint, tokens: int) -> dict[tuple[int, ...], float]:
    def generate(paths: Branches) -> tuple[int, ...]:
        drafter = Grown(ToySource(ToyLM(3, seed=7)), Chain(), sampled=True)  # the draft knows nothing of the style
        engine = Engine(
            ToyTarget(ToyLM(3, seed=11)), Recipe("toy", drafter, Rejection(), Fixed(Budget(2, 2))), strict=True,
            make_noise=lambda seed, sample, stream, text, position: paths.noise(stream, text, position, sample),
        )  # fmt: skip
        params = SamplingParams(max_new_tokens=tokens, temperature=1.0, seed=0)
        return tuple(engine.submit([0, 1], params, constraint=constraint).result().token_ids)

    return outcomes(generate, limit=200_000)


def steered_probs(style: Style, tokens: int) -> dict[tuple[int, ...], float]:
    steered = {(): 1.0}
    for _ in range(tokens):
        grown = {}
        for text, weight in steered.items():
            context = np.array([0, 1, *text])
            row = torch.from_numpy(ToyLM(3, seed=11).probs(context.tolist())).log()
            p = style.reshape(context, row).softmax(0)
            grown |= {(*text, v): weight * float(p[v]) for v in range(3)}
        steered = grown
    return steered


def largest_gap(a, b) -> float:
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


def test_sampled_speculation_has_the_steered_distribution() -> None:
    style = Style.from_tokens([[0, 1, 2, 2, 1, 0, 0, 1]], 3, 1.0)
    found = sampled_probs(style, 3)
    assert largest_gap(found, steered_probs(style, 3)) < 1e-6
    assert largest_gap(found, sampled_probs(None, 3)) > 0.02


def test_a_bias_from_the_committed_text_instead_of_the_nodes_path_is_seen() -> None:
    class Wrong:
        def __init__(self, style: Style) -> None:
            self.style = style

        def reshape(self, tokens, logits):
            return self.style.reshape(tokens[:2], logits)

    style = Style.from_tokens([[0, 1, 2, 2, 1, 0, 0, 1]], 3, 1.0)
    assert largest_gap(sampled_probs(Wrong(style), 3), steered_probs(style, 3)) > 0.01


def test_bad_input_is_named(tmp_path) -> None:
    def tokenizer(text, **_):
        return {"input_ids": [ord(c) % 5 for c in text]}

    tokenizer.all_special_ids = [4]
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    for path, match in (
        (empty, "empty"),
        (binary, "UTF-8"),
        (tmp_path / "folder", "no .txt"),
        (tmp_path / "none.txt", "cannot be read"),
    ):
        with pytest.raises(InputError, match=match):
            Style.from_file(path, tokenizer, 5)
    (tmp_path / "folder" / "a.txt").write_text("hello")
    (tmp_path / "folder" / "b.md").write_text("you")
    style = Style.from_file(tmp_path / "folder", tokenizer, 5)
    assert (style.tokens, style.special) == (8, (4,))
    assert "distribution is changed" in style.describe()
    for bad in ({"strength": -1.0}, {"strength": math.nan}, {"smoothing": 0.0}, {"weights": (0, 1, 1)}):
        with pytest.raises(InputError):
            Style.from_tokens([[1]], 5, **{"strength": 0.1, **bad})
    with pytest.raises(InputError, match="outside"):
        Style.from_tokens([[9]], 5)
    with pytest.raises(InputError, match="rows of 5"):
        style.reshape(np.array([1]), torch.zeros(7))


def test_plain_and_invariant_agree_on_a_toy() -> None:
    style = Style.from_tokens([[0, 1, 2, 2, 1, 0, 0, 1]], 3, 1.0)
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=4)
    drafted = Recipe("toy", Grown(ToySource(ToyLM(3, seed=7)), Chain()), Invariant(), Fixed(Budget(3, 3)))
    plain = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
    made = [
        Engine(ToyTarget(ToyLM(3, seed=11)), recipe, strict=True).submit([0], params, constraint=style).result()
        for recipe in (drafted, plain)
    ]
    assert made[0].token_ids == made[1].token_ids
