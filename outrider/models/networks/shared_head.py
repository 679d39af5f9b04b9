"""A drafter's network that ends in the target's own head, over all its tokens or those that it says most."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

MAP = "d2t"  # the tensor that maps draft ids to the target's: offsets


class Saved(nn.Module):
    """A network that a file can keep: its shape, its weights and the target's ids of the tokens that it says."""

    shape: Any
    ids: Tensor  # [vocab]: the target's id of each draft id, rising

    def tensors(self) -> dict[str, Tensor]:
        """What a file keeps: the weights, and the target's id of each draft id less the draft id."""
        return {**dict(self.named_parameters()), MAP: self.ids - torch.arange(len(self.ids), device=self.ids.device)}

    def filled(self, tensors: Mapping[str, Tensor]) -> Self:
        """Changes state: the weights are these, and frozen. RuntimeError where they are not those of this shape."""
        self.load_state_dict({name: tensor for name, tensor in tensors.items() if name != MAP}, assign=True)
        return self.requires_grad_(False)


def stored_ids(tensors: Mapping[str, Tensor], count: int) -> Tensor:
    """The target's ids that `tensors` kept; KeyError or RuntimeError where there are not so many."""
    return tensors[MAP].long() + torch.arange(count)


class SharedHead(Saved):
    def __init__(self, shape: Any, ids: Tensor, head: nn.Module) -> None:
        """`head` is the target's, over `ids`."""
        super().__init__()
        self.shape = shape
        self.register_buffer("ids", ids.long(), persistent=False)
        self.shared = (head,)  # in a tuple, so that it is no part of this module: moving or casting leaves it alone

    def logits(self, state: Tensor) -> Tensor:
        """Of what the target's head can read."""
        return self.shared[0](state)

    @classmethod
    def from_tensors(cls, shape: Any, tensors: Mapping[str, Tensor], head: Callable[[Tensor], nn.Module]) -> Self:
        """The inverse of `tensors`; KeyError or RuntimeError where these are not those of this shape.

        `head` makes the target's over the ids it is given.
        """
        ids = stored_ids(tensors, shape.vocab)
        return cls(shape, ids, head(ids)).filled(tensors)
