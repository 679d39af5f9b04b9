"""Keeps foreign libraries to one voice: their bars and notes off while ours are on, their errors cut to one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def first_line(error: BaseException, *, typed: bool = False) -> str:
    """`typed`: with the error's type before it, for those whose message alone says little (KeyError: 'cache')."""
    kind, line = type(error).__name__, str(error).strip().split("\n")[0].rstrip(".: ")
    return f"{kind}: {line or 'no message'}" if typed else line or kind
