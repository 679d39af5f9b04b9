"""BlockFFN (arXiv 2507.08771): a Llama whose feed-forward layers are many small experts behind a differentiable router.

    a = ReLU(W x)    r = RMSNorm(a)    y = sum over experts i with a_i > 0 of r_i Down_i SiLU(Up_i x)

There is no top-k: as many experts run as the router lets through. A pass of few rows reads the experts that any of its
rows needs, each once, and no others; the rest would be multiplied by zero. Lossless: an architecture. Loaded by name
(`model_type` blockffn) like every other model, and run by the runtime eager. Cost: the router and that union.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

NAME = "blockffn"
FEW = 64  # rows for which experts are picked out; of more, nearly every expert is needed by some


class BlockFFNConfig(LlamaConfig):
    model_type = NAME

    def __init__(self, num_experts: int = 64, expert_size: int = 48, router_eps: float = 1e-5, **more: Any) -> None:
        self.num_experts, self.expert_size, self.router_eps = num_experts, expert_size, router_eps
        super().__init__(**{"intermediate_size": num_experts * expert_size} | more)


class RoutedFeedForward(nn.Module):
    """Experts lie one behind another in both matrices, so that neighbours among them are one product."""

    def __init__(self, config: BlockFFNConfig) -> None:
        super().__init__()
        self.num_experts, self.eps = config.num_experts, config.router_eps
        shape = (config.num_experts, config.expert_size, config.hidden_size)
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.scale = nn.Parameter(torch.ones(config.num_experts))
        std = config.initializer_range
        self.up = nn.Parameter(std * torch.randn(shape))
        self.down = nn.Parameter(std / (2 * config.num_hidden_layers) ** 0.5 * torch.randn(shape))
        self.scores = torch.empty(0)  # what the router said in the last forward, [..., experts], before the ReLU
        self.last_active = torch.zeros(())  # experts that it has read

    def gates(self, x: Tensor) -> Tensor:
        """Changes state: r of every expert, [..., experts]; 0 for those that do not run."""
        self.scores = self.router(x)
        active = F.relu(self.scores).float()
        norm = torch.rsqrt(active.square().mean(-1, keepdim=True) + self.eps)  # of no active expert: 0 stays 0
        return (active * norm * self.scale).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows, gates = x.flatten(0, -2), self.gates(x).flatten(0, -2)
        if self.training or len(rows) > FEW or _recorded(x):
            self.last_active = (self.scores > 0).flatten(0, -2).any(0).sum().float()
            return self.dense(rows, gates).view_as(x)
        return self.union(rows, gates).view_as(x)

    def dense(self, rows: Tensor, gates: Tensor) -> Tensor:
        """All experts, of which the gates mute most."""
        hidden = F.silu(rows @ self.up.flatten(0, 1).T).unflatten(-1, self.up.shape[:2])
        return (hidden * gates[..., None]).flatten(-2) @ self.down.flatten(0, 1)

    def union(self, rows: Tensor, gates: Tensor) -> Tensor:
        """Changes state: the experts that some row needs, each read once for all rows."""
        needed = (gates != 0).any(0).nonzero().flatten().tolist()
        self.last_active = torch.tensor(float(len(needed)))
        out = torch.zeros_like(rows)
        for first, last in stretches(needed):
            hidden = F.silu(rows @ self.up[first:last].flatten(0, 1).T).unflatten(-1, (last - first, -1))
            out += (hidden * gates[:, first:last, None]).flatten(-2) @ self.down[first:last].flatten(0, 1)
        return out

    @property
    def expert_bytes(self) -> int:
        """Of one expert."""
        return (self.up.nbytes + self.down.nbytes) // self.num_experts

    @property
    def bytes_read(self) -> float:
        """By the last forward: the router, and the experts that it needed."""
        return self.router.weight.nbytes + float(self.last_active) * self.expert_bytes


class BlockFFNForCausalLM(LlamaForCausalLM):
    config_class = BlockFFNConfig
    config: BlockFFNConfig

    def __init__(self, config: BlockFFNConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = RoutedFeedForward(config)


def routed_layers(model: nn.Module) -> list[RoutedFeedForward]:
    return [module for module in model.modules() if isinstance(module, RoutedFeedForward)]


def bytes_read(model: Any) -> float:
    """By the last forward of a model: its routed layers by the experts that they needed, all other weights whole."""
    layers = routed_layers(model)
    routed = sum(layer.up.nbytes + layer.down.nbytes + layer.router.weight.nbytes for layer in layers)
    table = model.get_input_embeddings().weight
    tied = table is model.get_output_embeddings().weight  # else of the table of embeddings a step reads some rows only
    whole = sum(weight.nbytes for weight in model.parameters()) - routed - (0 if tied else table.nbytes)
    return whole + sum(layer.bytes_read for layer in layers)


def stretches(numbers: list[int]) -> list[tuple[int, int]]:
    """Rising numbers as (first, behind the last) of what follows without a gap."""
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n + 1 for i, n in enumerate(numbers) if i == len(numbers) - 1 or numbers[i + 1] != n + 1]
    return list(zip(starts, ends, strict=True))


def _recorded(x: Tensor) -> bool:
    """Whether the operations are noted to be repeated with other rows, which may need other experts."""
    tracing = torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()
    return tracing or (x.is_cuda and torch.cuda.is_current_stream_capturing())
