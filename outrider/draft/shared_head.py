"""A drafter's network that ends in the target's own head, over all its tokens or those that it says most."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

MAP = "d2t"  # the tensor that maps draft ids to the target's


class SharedHead(nn.Module):
    ids: Tensor  # [vocab]: the target's id of each row of the head, rising

    def __init__(self, shape: Any, ids: Tensor, head: nn.Module) -> None:
        """`head` is the target's, over `ids`."""
        super().__init__()
        self.shape = shape
        self.register_buffer("ids", ids.long(), persistent=False)
        self.shared = (head,)  # in a tuple, so that it is no part of this module: moving or casting leaves it alone

    def logits(self, state: Tensor) -> Tensor:
        """Of what the target's head can read."""
        return self.shared[0](state)

    def tensors(self) -> dict[str, Tensor]:
        """What a file keeps: the weights, and the target's id of each draft id less the draft id."""
        return {**dict(self.named_parameters()), MAP: self.ids - torch.arange(len(self.ids), device=self.ids.device)}

    @classmethod
    def from_tensors(cls, shape: Any, tensors: Mapping[str, Tensor], head: Callable[[Tensor], nn.Module]) -> Self:
        """The inverse; KeyError or RuntimeError where the tensors are not those of this shape. `head`: over ids."""
        ids = tensors[MAP].long() + torch.arange(shape.vocab)
        net = cls(shape, ids, head(ids))
        net.load_state_dict({name: tensor for name, tensor in tensors.items() if name != MAP})
        return net.requires_grad_(False)
