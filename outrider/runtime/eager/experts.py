"""Active experts: how many experts of a mixture model a pass touches, counted where its routers have chosen them.

A mixture model reads the weights of those experts only that some row of the pass was sent to, so what a pass costs
follows from its rows' choices and not from their number alone. Modules of experts are recognised by what their forward
takes (`top_k_index`); networks that choose in another way say how many were active (`last_active`). The model
stays as it was. Cost: one small operation a layer; the numbers are fetched only when somebody asks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from outrider.runtime.replaced import Replacement, replaced

CHOSEN = "top_k_index"  # [rows, k], where transformers' experts take the choice of their router


class ActiveExperts:
    """Empty for a model without experts."""

    def __init__(self, model: nn.Module) -> None:
        layers: list[tuple[Any, int]] = [
            (module, place) for module in model.modules() if (place := _takes_choice(module)) is not None
        ]
        self._counting: list[Any] = [
            m for m in model.modules() if hasattr(m, "last_active") and hasattr(m, "num_experts")
        ]
        self._counts: list[Tensor] = []  # of this pass, by layer
        self._stand_ins = [
            Replacement(module.__dict__, "forward", self._counted(module, place)) for module, place in layers
        ]
        sizes = [int(module.num_experts) for module in (*(module for module, _ in layers), *self._counting)]
        self.total = sum(sizes) / len(sizes) if sizes else 0.0  # of a layer, on average

    def __bool__(self) -> bool:
        return self.total > 0

    def active(self) -> AbstractContextManager[None]:
        """Changes state and, for the duration of a forward, the model: it counts from zero."""
        self._counts = []
        return replaced(self._stand_ins)

    def last(self) -> float:
        """Experts that the last pass has touched, of a layer, on average."""
        counts = self._counts or [module.last_active for module in self._counting]
        return float(torch.stack(counts).mean()) if counts else 0.0

    def _counted(self, module: Any, place: int) -> Callable[..., Any]:
        forward, experts = module.forward, int(module.num_experts)

        def counted(*args: Any, **named: Any) -> Any:
            chosen = named[CHOSEN] if CHOSEN in named else args[place]
            self._counts.append(touched(chosen, experts))
            return forward(*args, **named)

        return counted


def touched(chosen: Tensor, experts: int) -> Tensor:
    """How many of so many experts are among the chosen ones; numbers beyond them stand for none."""
    hit = torch.zeros(experts + 1, device=chosen.device)
    return hit.index_fill_(0, chosen.flatten().clamp(max=experts), 1.0)[:experts].sum()


def _takes_choice(module: nn.Module) -> int | None:
    """At which place the forward of a module of experts takes the choice of its router; None: it is none."""
    if not isinstance(getattr(module, "num_experts", None), int) or "forward" in module.__dict__:
        return None
    names = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters)[1:]
    return names.index(CHOSEN) if CHOSEN in names else None
