"""A model over several processes says what it says in one, whatever drafts for it; a lost process is a named error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import outrider
from outrider.core.errors import InputError, OutriderError, UnsupportedModel

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [1, 2, 3, 1, 2, 3, 1, 2], [40, 41, 42]]
MODEL_FREE = ("plain", "suffix", "mix")


@pytest.fixture(scope="module")
def two_ranks(folders: dict[str, str]) -> Iterator[outrider.Outrider]:
    options = {"draft": folders["draft"], "controller": "fixed"}  # one that measures chooses other lengths
    with outrider.load(folders["target"], "draft-model", options=options, tensor_parallel=2, max_context=128) as engine:
        yield engine


@pytest.fixture(scope="module")
def one_process(folders: dict[str, str]) -> Iterator[outrider.Outrider]:
    options = {"draft": folders["draft"], "controller": "fixed"}  # one that measures chooses other lengths
    with outrider.load(folders["target"], "draft-model", options=options, runtime="eager", max_context=128) as engine:
        yield engine


def texts(engine: outrider.Outrider, method: str, temperature: float, tokens: int = 20) -> list[tuple[int, ...]]:
    sampling: dict[str, Any] = {"temperature": temperature, "seed": 11, "max_new_tokens": tokens}
    return [tuple(one.token_ids) for one in engine.generate(PROMPTS, method=method, **sampling)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", [*MODEL_FREE, "draft-model"])
def test_two_ranks_say_what_one_process_says(
    two_ranks: outrider.Outrider, one_process: outrider.Outrider, method: str, temperature: float
) -> None:
    assert texts(two_ranks, method, temperature) == texts(one_process, method, temperature)


def test_each_rank_holds_a_part_and_rank_0_all_embeddings(two_ranks: outrider.Outrider) -> None:
    weights = dict(two_ranks.loaded.model.named_parameters())
    cut = weights["model.layers.0.self_attn.q_proj.weight"]
    assert (tuple(cut.shape), tuple(cut.to_local().shape)) == ((64, 64), (32, 64))  # type: ignore[operator]
    assert not hasattr(weights["model.embed_tokens.weight"], "full_tensor")


def test_the_fingerprint_is_that_of_the_whole_model(
    two_ranks: outrider.Outrider, one_process: outrider.Outrider
) -> None:
    assert two_ranks.loaded.fingerprint == one_process.loaded.fingerprint


def test_what_one_rank_refuses_leaves_the_ranks_in_step(two_ranks: outrider.Outrider) -> None:
    before = texts(two_ranks, "plain", 0.0)
    with pytest.raises(OutriderError):
        two_ranks.target.release(0)  # refused by both
    assert texts(two_ranks, "plain", 0.0) == before


def test_a_drafter_cut_from_the_target_is_refused_by_name(two_ranks: outrider.Outrider) -> None:
    with pytest.raises(UnsupportedModel, match="tensor_parallel"):
        two_ranks.generate(PROMPTS, method="early-exit")


def test_heads_that_ranks_do_not_divide_are_refused_with_what_would_do(folders: dict[str, str]) -> None:
    with pytest.raises(InputError, match="3 ranks do not divide 4 attention heads and 2 key heads .*; use 2"):
        outrider.load(folders["target"], tensor_parallel=3)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"runtime": "native"}, "cannot be had with runtime native"),
        ({"precision": "int8"}, "cannot be had with precision int8"),
        ({"device": "cpu"}, "leave device out"),
        ({"tensor_parallel": 0}, "no number of processes"),
    ],
)
def test_what_cannot_go_together_is_refused_before_loading(more: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        outrider.load("smollm2", **{"tensor_parallel": 3, **more})
