"""Compiled: the one way to mark a hot integer loop for compilation.

Compiled on first use and kept in the user's cache, so that only the first run on a machine waits for it. Free of the
interpreter lock; `fastmath` stays off, so sums are the ones written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Decorator for a function of numpy arrays and numbers only."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))
