"""What an operator may set of the server; nothing is read from anywhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.core.errors import InputError

Unknown = Literal["ignore", "refuse"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one server. The defaults listen on this machine only, ask for no key and answer no browser of another site."""

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()  # what clients may call the model, the first is shown; empty: the model's name
    keys: tuple[tuple[str, str], ...] = ()  # (caller, key); empty: no key is asked for
    cors: tuple[str, ...] = ()  # origins whose pages may ask; empty: none
    unknown: Unknown = "ignore"  # an unknown field: left out with a header that names it, or 400
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 32 << 10
    max_prompt_tokens: int | None = None  # None: what the context holds
    max_new_tokens: int | None = None  # of a request; None: what the context holds
    max_samples: int = 16  # texts that one request may ask for
    max_waiting: int = 256  # requests that wait before further ones get 429
    max_gap_ms: float | None = None  # between two deliveries of a text, which prompts of others may cause
    max_connections: int = 1024
    body_s: float = 30.0  # to send a request
    request_s: float = 3600.0  # to be answered
    drain_s: float = 30.0  # what runs may go on for so long when the server is told to end
    keep_alive_s: float = 15.0
    learn: str | None = None  # a folder in which the drafter keeps what it learns from requests; None: it does not
    traces: int = 64  # requests of which every step is kept, for those that ask; 0: none
    defaults: dict[str, Any] = field(default_factory=dict)  # sampling fields of requests that do not say

    def __post_init__(self) -> None:
        if self.unknown not in ("ignore", "refuse"):
            raise InputError(f"unknown fields: {self.unknown!r}; use ignore or refuse")
        for name in ("max_body_bytes", "max_header_bytes", "max_samples", "max_waiting", "max_connections"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; use at least 1")
        if self.max_gap_ms is not None and not self.max_gap_ms > 0:
            raise InputError(f"--max-gap-ms {self.max_gap_ms}: use a number of milliseconds above 0")
        for caller, key in self.keys:
            if not key:
                raise InputError(f"the API key of {caller!r} is empty; write one key a line")


def read_keys(text: str) -> tuple[tuple[str, str], ...]:
    """One key a line, or `name: key`; empty lines and those that begin with # are left out."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, colon, key = line.partition(":")
        found.append((name.strip(), key.strip()) if colon else (f"key {number}", line))
    if not found:
        raise InputError("the file of API keys holds none; write one a line, or leave the option out")
    return tuple(found)
