"""A small random model that speaks the embedded model's tokens: serving it costs milliseconds a step."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx
import pytest
import torch
import uvicorn
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.api import Outrider
from outrider.core.errors import OutriderError
from outrider.models import LoadedModel, load_model
from outrider.models.load import load_tokenizer
from outrider.serve.app import make_app
from outrider.serve.link.local import LocalLink
from outrider.serve.link.seam import EngineLink
from outrider.serve.settings import Settings
from outrider.serve.text import Text

Make = Callable[[], Outrider]


@pytest.fixture(scope="session")
def small_model() -> LoadedModel:
    try:
        tokenizer = load_tokenizer("smollm2")
    except OutriderError as error:
        pytest.skip(f"the embedded model cannot be obtained here: {error}")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    made = load_model(LlamaForCausalLM(config).requires_grad_(False), tokenizer=tokenizer)
    return replace(made, name="small")


@pytest.fixture(scope="session")
def make_engine(small_model: LoadedModel) -> Make:
    """Each call is another engine of the same model."""
    limits = {"max_slots": 4, "max_context": 512}
    return lambda: Outrider(small_model, "suffix", limits=limits, runtime="eager")


@dataclass(frozen=True)
class Served:
    """A server that listens, and the engine behind it."""

    url: str
    link: EngineLink
    text: Text


@contextmanager
def listening(link: EngineLink, text: Text, settings: Settings) -> Iterator[Served]:
    """A server in a thread, on a port that was free."""
    app = make_app(link, text, settings)
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen(256)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.02)
        try:
            yield Served(f"http://127.0.0.1:{door.getsockname()[1]}", link, text)
        finally:
            server.should_exit = True
            thread.join(20)


@pytest.fixture(scope="session")
def served(make_engine: Make, small_model: LoadedModel) -> Iterator[Served]:
    """Shared by all tests that only ask."""
    with listening(LocalLink(make_engine), Text(small_model.tokenizer, "small"), Settings(max_samples=8)) as up:
        yield up


@pytest.fixture(scope="session")
def engine(make_engine: Make) -> Iterator[Outrider]:
    """The same model without a server, to compare with."""
    with make_engine() as made:
        yield made


@pytest.fixture()
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client
