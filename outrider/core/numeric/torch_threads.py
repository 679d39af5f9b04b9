"""Sets how many threads torch uses, for the length of a call.

A thread of torch's goes on spinning for a while after its work, on a core that the threads of a compiled step need:
between such steps nothing may run on more than the calling thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many of torch's on this thread; a fraction of a microsecond."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
