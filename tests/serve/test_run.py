"""Listening and ending: a port in use is said in one line, and a signal lets running requests end."""

from __future__ import annotations

import signal
import socket
import threading
import time

import httpx
import pytest
import uvicorn

from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.serve.app import make_app
from outrider.serve.link.local import LocalLink
from outrider.serve.run import Server, door, serve
from outrider.serve.settings import Settings
from outrider.serve.text import Text
from tests.serve.conftest import Make


def test_a_port_in_use_is_named() -> None:
    with door("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(InputError, match="--port"):
            door("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("port", [-1, 65536, 99999999])
def test_a_port_that_no_machine_has_is_refused(port: int) -> None:
    with pytest.raises(InputError, match=f"--port {port}: use 1 to 65535"):
        door("127.0.0.1", port)


def test_what_the_engine_refuses_is_raised_as_it_is(
    small_model: LoadedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    def load() -> Outrider:
        raise InputError("too many slots; ask for fewer")

    app = make_app(LocalLink(load), Text(small_model.tokenizer, "small"), Settings(port=0))
    with pytest.raises(InputError, match="too many slots"):
        serve(app)
    assert "Traceback" not in capfd.readouterr().err


def test_a_signal_refuses_what_is_new_and_finishes_what_runs(make_engine: Make, small_model: LoadedModel) -> None:
    app = make_app(LocalLink(make_engine), Text(small_model.tokenizer, "small"), Settings(drain_s=30))
    said: list[str] = []
    server = Server(uvicorn.Config(app, log_level="error"), app.state.front, said.append)
    ask = {"prompt": "One, two,", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.02)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=60) as http, httpx.Client(base_url=url, timeout=60) as other:
            with http.stream("POST", "/v1/completions", json=ask) as running:
                lines = running.iter_lines()
                next(lines)
                server.handle_exit(signal.SIGTERM, None)
                refused = other.post("/v1/completions", json=ask)
                assert refused.status_code == 503 and refused.headers["retry-after"]
                assert other.get("/ready").status_code == 503 and other.get("/health").status_code == 200
                rest = list(lines)
            assert rest[-2] == "data: [DONE]" or rest[-1] == "data: [DONE]"
        thread.join(20)
        assert not thread.is_alive()
    assert any("ready" in line for line in said) and any(line.startswith("ending: 1 ") for line in said)
