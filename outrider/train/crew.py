"""The processes that train one drafter together: `accelerate launch` starts them, `accelerate` joins their gradients.

Every process has the whole target and the whole drafter and sees its share of each batch; the sum of their gradients,
each weighted by its share of the answer tokens, is that of the joint batch. One process alone needs no library.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from outrider.core.errors import InputError, MissingExtra
from outrider.train.text.selfdata import SelfData


@dataclass(frozen=True, slots=True)
class Crew:
    accelerator: Any = None  # None: alone

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.accelerator is None or self.accelerator.is_main_process

    @property
    def device(self) -> str | None:
        """Where this process should work; None where nothing but the machine decides."""
        return None if self.accelerator is None else str(self.accelerator.device)

    def share(self, batch: SelfData) -> SelfData:
        """This process's sequences of a batch that all of them know."""
        if self.accelerator is None:
            return batch
        count = self.accelerator.num_processes
        if len(batch.tokens) < count:
            raise InputError(
                f"a batch of {len(batch.tokens)} sequences is too small for {count} processes; raise --batch"
            )
        mine = slice(self.accelerator.process_index, None, count)
        return SelfData(batch.tokens[mine], batch.roles[mine])

    def join(self, weights: Iterable[nn.Parameter], loss: Tensor, part: float) -> Tensor:
        """Changes the gradients into those of the joint batch, of which this process had `part`; the joint loss."""
        if self.accelerator is None:
            return loss
        for weight in weights:
            if weight.grad is not None:
                weight.grad = self.accelerator.reduce(weight.grad * part, reduction="sum")
        return self.accelerator.reduce(loss * part, reduction="sum")

    def align(self, weights: Iterable[nn.Parameter]) -> None:
        """Changes the weights into those of the first process."""
        if self.accelerator is not None:
            from accelerate.utils import broadcast

            for weight in weights:
                weight.data.copy_(broadcast(weight.data))

    def wait(self) -> None:
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()


def crew() -> Crew:
    """Those that a launcher started together with this process."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Crew()
    try:
        from accelerate import Accelerator
    except ImportError:
        raise MissingExtra("training with several processes needs accelerate; install outrider[train]") from None
    return Crew(Accelerator(cpu=os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")))
