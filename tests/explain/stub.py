"""A pretended server behind the page: it streams an answer that was made before, and has a fleet that moves."""

from __future__ import annotations

import json
import mimetypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from outrider.core.generation import Generation
from outrider.explain import document, page_files
from outrider.explain.headers import PAGE_HEADERS
from tests.explain.made import decode

METHODS = ["mix", "plain", "suffix"]


class Stub(ThreadingHTTPServer):
    """`fast` is the answer to everything, `plain` that of the method plain. With a key others get 401."""

    def __init__(self, fast: Generation, plain: Generation, pause: float = 0.0, key: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fast, self.plain, self.pause, self.key = fast, plain, pause, key
        self.asked: list[dict[str, Any]] = []
        self.readings = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def fleet(self) -> dict[str, Any]:
        self.readings += 1
        n = self.readings
        return {
            "info": {"model": "toy", "method": "mix", "slots": 4},
            "stats": {
                "running": 3, "waiting": n % 5, "requests": 40 + n, "prompt_tokens": 4000, "cached_tokens": 1000,
                "new_tokens": 900 * n, "steps": 300 * n, "cache_blocks": 200, "cache_blocks_used": 50,
                "acceptance": {"suffix": {"1": [100, 83], "2": [83, 40]}, "eagle3": {"1": [50, 10]}},
                "fleet": {"gap_p50_s": 0.02, "gap_p99_s": 0.05, "today": {"tokens": 900 * n, "passes": 300 * n,
                                                                           "saved_s": 12.5 * n}},
            },
            "sequences": [
                {"slot": i, "method": "mix", "prompt_tokens": 120, "cached_tokens": 80 * (i == 1), "running": i < 3,
                 "new_tokens": 10 * n + i, "seconds": 1.0}
                for i in range(4)
            ],
        }  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    server: Stub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        files = page_files()
        name = self.path.removeprefix("/page/") if self.path.startswith("/page/") else ""
        if self.path == "/":
            self._give(files["index.html"].read_bytes(), "text/html; charset=utf-8", PAGE_HEADERS)
        elif name in files:
            kind = mimetypes.guess_type(name)[0] or "text/javascript"
            self._give(files[name].read_bytes(), kind, PAGE_HEADERS)
        elif self._allowed():
            self._data()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._allowed():
            return
        self.server.asked.append(body)
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        generation = self.server.plain if body.get("method") == "plain" else self.server.fast
        for event in chunks(generation, body):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
            time.sleep(self.server.pause)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None: ...

    def _data(self) -> None:
        if self.path == "/props":
            self._json({"outrider": {"method": "mix", "methods": METHODS}})
        elif self.path == "/v1/outrider/fleet":
            self._json(self.server.fleet())
        elif self.path == "/v1/outrider/trace/answer-1":
            self._json(document(self.server.fast, decode, model="toy"))
        else:
            self._json({"error": {"message": f"there is no {self.path}"}}, 404)

    def _allowed(self) -> bool:
        fine = not self.server.key or self.headers.get("Authorization") == f"Bearer {self.server.key}"
        if not fine:
            self._json({"error": {"message": "no key, or a wrong one"}}, 401)
        return fine

    def _json(self, value: Any, status: int = 200) -> None:
        self._give(json.dumps(value).encode(), "application/json", {}, status)

    def _give(self, content: bytes, kind: str, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def chunks(generation: Generation, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A chunk a step, as the server streams them."""
    assert generation.trace is not None
    pieces = document(generation, decode)["pieces"]
    for step in generation.trace.steps:
        part = slice(step.first, step.first + len(step.emitted))
        choice = {
            "index": 0, "delta": {"content": "".join(pieces[part])}, "finish_reason": None,
            "token_ids": list(step.emitted),
            "outrider": {"origins": [{"drafter": o.drafter, "depth": o.depth} for o in generation.origins[part]]},
        }  # fmt: skip
        yield {"id": "answer-1", "choices": [choice]}
    ms = 1e3 * generation.stats.decode_s
    yield {
        "id": "answer-1", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}],
        "timings": {"predicted_ms": ms, "method": generation.stats.method},
    }  # fmt: skip


@contextmanager
def served(fast: Generation, plain: Generation, pause: float = 0.0, key: str = "") -> Iterator[Stub]:
    stub = Stub(fast, plain, pause, key)
    thread = threading.Thread(target=stub.serve_forever, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.shutdown()
        stub.server_close()
