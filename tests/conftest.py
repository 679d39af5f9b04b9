"""Models and data that several test folders share; made once a session."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.control import cost
from outrider.core.errors import OutriderError
from outrider.models import LoadedModel, load_model

# No deadlines: machines are noisy. A continuous integration run repeats the same examples; elsewhere they are fresh.
settings.register_profile("fresh", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable" if os.environ.get("CI") else "fresh")


_TESTS = itertools.count()


def pytest_collection_finish() -> None:
    """What was imported stays: a full collection need not go through half a million objects again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries that count at the end what was left over miss nothing


@pytest.fixture(scope="session", autouse=True)
def private_cost_curves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What methods measure about this machine and toy models stays out of the user's cache.

    Few sizes, once: 144 steps of the embedded model take half a minute. What measuring does has tests of its own.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr("outrider.control.cost.user_cache_path", lambda _: folder)
        patch.setattr("outrider.control.cost.stored", partial(cost.stored, rows=(1, 4, 16, 64), repeats=1))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_drafters_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Methods find drafters in the user's data folder, and training keeps them there; commands run apart inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("data")
        patch.setenv("XDG_DATA_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def private_data_folder(no_drafters_of_the_users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test keeps no other finds."""
    monkeypatch.setenv("XDG_DATA_HOME", str(no_drafters_of_the_users / str(next(_TESTS))))


@pytest.fixture(scope="session", autouse=True)
def no_pictures() -> Iterator[None]:
    """Drawing the curve takes longer than training so small a drafter; the test that looks at it draws it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.train.picture.draw_curve", lambda curve, path: None)
        yield


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The embedded model on the CPU in float32."""
    try:
        return load_model("smollm2", device="cpu")
    except OutriderError as error:
        pytest.skip(f"the embedded model cannot be obtained here: {error}")


@pytest.fixture(scope="session")
def tiny_llama() -> LoadedModel:
    """Random weights, two layers, 64 tokens, no tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    return load_model(LlamaForCausalLM(config).requires_grad_(False))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Prompt sets that lie beside the checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the prompt sets in ../shared/data beside the checkout")
    return folder
