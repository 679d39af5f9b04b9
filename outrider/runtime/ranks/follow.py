"""What ranks 1 and up run: load a part of the model, then do whatever rank 0 says, until it says the end or is gone."""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from outrider.core.errors import OutriderError
from outrider.runtime.ranks.group import END, HOST, TIMEOUT, Part, join
from outrider.runtime.ranks.load import load_part
from outrider.runtime.targets import eager_target


def main(text: str) -> None:
    part = Part(**json.loads(text))
    threading.Thread(target=_leave_with_rank_0, daemon=True).start()
    join(TCPStore(HOST, part.port, is_master=False, timeout=TIMEOUT), part.rank, part.ranks)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // part.ranks))
    target = eager_target(load_part(part).model, **part.limits)
    told: list[tuple[str, tuple[object, ...]]] = [(END, ())]
    while True:
        dist.broadcast_object_list(told, src=0)
        name, values = told[0]
        if name == END:
            dist.destroy_process_group()
            return
        with suppress(OutriderError):  # refused by rank 0 as well, which tells the caller
            getattr(target, name)(*values)


def _leave_with_rank_0() -> None:
    """The pipe ends with the process that holds its other end, however that ended; no exchange would say so in time."""
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
