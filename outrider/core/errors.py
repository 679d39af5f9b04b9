"""The one family of errors: everything Outrider raises on purpose derives from `OutriderError`.

A message names the bad input and the remedy in one line, so that a command line can print it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class OutriderError(Exception):
    """Something the caller can mend; the message says what and how."""


class InputError(OutriderError, ValueError):
    """A value that cannot be used: a prompt, a parameter, a file."""


class UnknownName(OutriderError, LookupError):
    """A method, model or option name that does not exist; the message lists the known ones."""


class UnsupportedModel(OutriderError):
    """An architecture that this runtime cannot run exactly."""


class UnsupportedDraws(OutriderError):
    """A tree whose draws a verification rule cannot honour exactly."""


class EmptySupport(OutriderError):
    """Penalties, bans and constraints together left no token to choose behind `output`."""

    def __init__(self, message: str, output: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.output = output


class PredicateFailed(OutriderError):
    """A caller's predicate raised, or gave no answer in time."""


class MissingExtra(OutriderError, ImportError):
    """A feature whose optional dependency is not installed; the message names the extra."""


class PassFailed(OutriderError, RuntimeError):
    """The model could not run the rows of one request, not even plainly and by itself; others went on."""


class CacheFull(OutriderError):
    """The rows of a pass do not fit into the cache beside what runs; nothing has changed."""


class FullQueue(OutriderError, RuntimeError):
    """As many requests wait as may wait: take results, or ask again later."""


class ClosedEngine(OutriderError, RuntimeError):
    """The engine was closed."""


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """For a message about an unknown name: "did you mean suffix? " where a known one is close, else nothing."""
    close = get_close_matches(str(name), [str(one) for one in known], n=1)
    return f"did you mean {close[0]}? " if close else ""
