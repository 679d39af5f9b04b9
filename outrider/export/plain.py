"""An exported folder, read and run as an engine does it: written from the formats alone, without the drafter's code.

Slow and small on purpose. It stops at the first tensor that is missing, of another shape or not known, because engines
skip what they do not know and go on with random numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.core.errors import InputError


class PlainEagle3:
    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        wrapped = "transformer_layer_config" in config
        layer: dict[str, Any] = config["transformer_layer_config"] if wrapped else config
        self.prefix = "layers.0." if wrapped else "midlayer."
        self.heads, self.groups, self.dim = (
            int(layer[key]) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        self.eps, self.theta = float(layer["rms_norm_eps"]), float(layer["rope_theta"])
        self.vocab, self.normed = int(layer["vocab_size"]), bool(config["norm_before_residual"])
        self.layers = [int(number) for number in config["eagle_aux_hidden_state_layer_ids"]]
        d, mid, said = int(layer["hidden_size"]), int(layer["intermediate_size"]), int(config["draft_vocab_size"])
        wide, narrow = self.heads * self.dim, self.groups * self.dim
        shapes = {
            "fc.weight": (d, len(self.layers) * int(config["target_hidden_size"])), "norm.weight": (d,),
            "lm_head.weight": (said, d), "d2t": (said,), "t2d": (self.vocab,),
        } | {
            self.prefix + name: shape for name, shape in {
                "self_attn.q_proj.weight": (wide, 2 * d), "self_attn.k_proj.weight": (narrow, 2 * d),
                "self_attn.v_proj.weight": (narrow, 2 * d), "self_attn.o_proj.weight": (d, wide),
                "mlp.gate_proj.weight": (mid, d), "mlp.up_proj.weight": (mid, d), "mlp.down_proj.weight": (d, mid),
                "input_layernorm.weight": (d,), "hidden_norm.weight": (d,), "post_attention_layernorm.weight": (d,),
            }.items()
        }  # fmt: skip
        stored = load_file(folder / "model.safetensors")
        found = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        wrong = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        if wrong:
            raise InputError(f"{folder}: not the tensors of the format: {', '.join(wrong)}")
        self.d2t, self.t2d = stored.pop("d2t"), stored.pop("t2d")
        self.weights = {name: tensor.float() for name, tensor in stored.items()}

    @property
    def ids(self) -> Tensor:
        """The target's id of each draft id: offsets are stored."""
        return torch.arange(len(self.d2t)) + self.d2t

    def run(self, embedded: Tensor, features: Tensor, steps: int) -> Tensor:
        """Chains of `steps` tokens behind the whole text: [steps, draft vocabulary], a row a token of the chain.

        embedded [T + steps - 1, d]: of the tokens one place ahead, then of the tokens drafted; features [T, k * d].
        """
        first = len(features)
        state = features.float() @ self.weights["fc.weight"].T
        keys = values = torch.zeros(self.groups, 0, self.dim)
        rows = []
        for step in range(steps):
            at = torch.arange(first) if step == 0 else torch.tensor([first - 1 + step])
            state, keys, values = self._layer(embedded[at].float(), state, at, keys, values)
            state = state[-1:]
            rows.append(self._norm(state, "norm") @ self.weights["lm_head.weight"].T)
        return torch.cat(rows)

    def _layer(
        self, embedded: Tensor, state: Tensor, at: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        prefix = self.prefix
        read = self._norm(state, prefix + "hidden_norm")
        both = torch.cat([self._norm(embedded, prefix + "input_layernorm"), read], 1)
        q, k, v = (
            (both @ self.weights[f"{prefix}self_attn.{name}_proj.weight"].T).view(len(at), -1, self.dim).transpose(0, 1)
            for name in "qkv"
        )
        keys, values = torch.cat([keys, self._rotary(k, at)], 1), torch.cat([values, v], 1)
        share = self.heads // self.groups
        scores = self._rotary(q, at) @ keys.repeat_interleave(share, 0).transpose(1, 2) / self.dim**0.5
        later = torch.arange(keys.shape[1])[None] > at[:, None]
        seen = scores.masked_fill(later, -torch.inf).softmax(-1) @ values.repeat_interleave(share, 0)
        state = (read if self.normed else state) + seen.transpose(0, 1).flatten(1) @ self.weights[
            prefix + "self_attn.o_proj.weight"
        ].T
        normed = self._norm(state, prefix + "post_attention_layernorm")
        gate, up = (normed @ self.weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return (
            state + (torch.nn.functional.silu(gate) * up) @ self.weights[prefix + "mlp.down_proj.weight"].T,
            keys,
            values,
        )

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weights[name + ".weight"]

    def _rotary(self, x: Tensor, at: Tensor) -> Tensor:
        """Rotary positions: the first half of a head's numbers beside the second."""
        speed = self.theta ** (-torch.arange(0, self.dim, 2) / self.dim)
        angle = at[:, None] * speed
        first, second = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
