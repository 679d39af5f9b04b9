"""A hybrid of a Llama-like model: some of its attention layers become Mamba-2 layers, taught by the whole model.

After MambaInLlama (arXiv 2408.15237): a Mamba-2 layer begins with the attention's own products, values as its inputs,
keys as what it writes under and queries as what it reads with. First each such layer learns what the attention that it
replaces gives, all of them at once, from the model's own hidden states; then the whole learns the model's distribution.
What comes out is a Bamba model, which `transformers` knows; what is not replaced is the model to the bit. Lossy as a
copy of the model; a target like every other for whoever decodes with it.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.train.kinds.distill import DraftLearner
from outrider.train.loop import LOSS_HELP, LoopPlan, Point, Progress, fast, finish, parts, prepare, setting, train
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import SelfData

RENAMED = (
    ("mlp.", "feed_forward."),
    ("post_attention_layernorm", "pre_ff_layernorm"),
    ("model.norm.", "model.final_layernorm."),
)
OPEN = 1.278  # a gate of which SiLU makes 1
STEPS = (1e-3, 1e-1)  # time steps of heads at first: from long memories to short ones
REPORT = "hybrid.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPlan(LoopPlan):
    loss: str = setting("mix", LOSS_HELP)
    layers: tuple[int, ...] = setting(
        (), "attention layers that become recurrent; empty: every third from the third on"
    )
    align: int = setting(300, "updates in which each layer learns from the one it replaces, before the whole learns", 1)


def hybrid_of(target: LoadedModel, layers: tuple[int, ...]) -> Any:
    """The model with these layers recurrent, in float32 on its device; not trained yet."""
    from transformers import BambaConfig, BambaForCausalLM

    theirs = target.model.config
    if theirs.model_type != "llama" or getattr(theirs, "attention_bias", False) or getattr(theirs, "mlp_bias", False):
        raise InputError(f"a hybrid is made of a Llama without biases, not of {theirs.model_type}")
    total, heads = theirs.num_hidden_layers, theirs.num_attention_heads
    if not layers or not all(0 <= layer < total for layer in layers) or len(set(layers)) == total:
        raise InputError(f"layers {layers}: name some of the model's layers 0..{total - 1}, and not all")
    width = theirs.hidden_size // heads
    if getattr(theirs, "head_dim", None) not in (None, width):
        raise InputError("a hybrid needs heads that make up the hidden size together")
    config = BambaConfig(
        vocab_size=theirs.vocab_size, hidden_size=theirs.hidden_size, intermediate_size=theirs.intermediate_size,
        num_hidden_layers=total, num_attention_heads=heads, num_key_value_heads=theirs.num_key_value_heads,
        rms_norm_eps=theirs.rms_norm_eps, max_position_embeddings=theirs.max_position_embeddings,
        rope_parameters={**theirs.rope_parameters, "partial_rotary_factor": 1.0}, mamba_proj_bias=True,
        tie_word_embeddings=theirs.tie_word_embeddings, mamba_expand=1, mamba_n_heads=heads, mamba_n_groups=heads,
        mamba_d_head=width, mamba_d_state=width, mamba_chunk_size=64, num_logits_to_keep=None,
        attn_layer_indices=[layer for layer in range(total) if layer not in layers],
        bos_token_id=theirs.bos_token_id, eos_token_id=theirs.eos_token_id, pad_token_id=theirs.pad_token_id,
    )  # fmt: skip
    with torch.device(target.model.device):
        model = BambaForCausalLM(config).float().eval().requires_grad_(False)
    stored = {_renamed(name): weight for name, weight in target.model.state_dict().items()}
    model.load_state_dict({name: weight.float() for name, weight in stored.items()}, strict=False)
    for layer in layers:
        _begin(model.model.layers[layer].mamba, target.model.model.layers[layer].self_attn)
    model.generation_config = target.model.generation_config
    return model


@dataclass(slots=True)
class HybridLearner(DraftLearner):
    """The whole learns the model's distribution, by what was replaced and what stands beside it."""

    layers: tuple[int, ...]

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        blocks = {f"{layer}": self.draft.model.layers[layer] for layer in self.layers}
        return {f"{at}.{name}": weight for at, block in blocks.items() for name, weight in block.named_parameters()}


@dataclass(slots=True)
class AlignLearner(HybridLearner):
    """Each recurrent layer learns what the attention gives that it replaces, from what that attention is given."""

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in HybridLearner.weights.fget(self).items() if ".mamba." in name}  # type: ignore[attr-defined]

    def backward(self, batch: SelfData) -> Tensor:
        """Of the share of an attention's output that its layer does not give, on average over layers."""
        total = torch.zeros((), device=self.target.device)
        for part in parts(batch, self.target.device):
            seen = self._attended(part.tokens)
            missed = []
            for layer in self.layers:
                given, wanted = seen[layer]
                with torch.autocast("cuda", torch.bfloat16) if part.tokens.is_cuda else nullcontext():
                    got = self.draft.model.layers[layer].mamba(given)
                missed.append((got.float() - wanted).square().mean() / wanted.square().mean().clamp(min=1e-9))
            value = torch.stack(missed).mean() * len(part.tokens) / len(batch.tokens)
            value.backward()
            total += value.detach()
        return total

    @torch.no_grad()
    def _attended(self, tokens: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """What the attention of each of the layers is given and gives, in float32."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        handles = [
            self.target.model.layers[layer].self_attn.register_forward_hook(
                lambda _, args, named, out, layer=layer: found.update(
                    {layer: ((named["hidden_states"] if not args else args[0]).float(), out[0].float())}
                ),
                with_kwargs=True,
            )
            for layer in self.layers
        ]
        try:
            with torch.autocast("cuda", torch.bfloat16) if tokens.is_cuda else nullcontext():
                self.target.model(tokens, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return found


def train_hybrid(
    target: LoadedModel, data: SelfData, plan: HybridPlan, folder: Path, *,
    on_progress: Progress = lambda step, of, point: None, save_every: float = 120.0, measure_every: int = 100,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """The hybrid, which `folder` holds then, ready to be loaded, and what it was measured at on held-out answers."""
    prepare(plan, data, folder)
    total = target.model.config.num_hidden_layers
    layers = plan.layers or tuple(range(2, total, 3))
    draft = hybrid_of(target, layers)
    loss = fast(LOSSES[plan.loss], target.device)
    told: dict[str, Any] = {"layers": layers, "target": target.name, "plan": asdict(plan)}
    about = {"kind": "hybrid", "target": target.fingerprint, "layers": list(layers)}
    stages = ((AlignLearner, "aligned", plan.align), (HybridLearner, "distilled", plan.steps))
    for learner, stage, steps in stages:
        settings = {**asdict(plan), "steps": steps, "layers": layers}
        (folder / stage).mkdir(exist_ok=True)
        curve = train(
            learner(target.model, draft, loss, layers), data, HybridPlan(**settings), folder / stage,
            {**about, "stage": stage}, on_progress=on_progress, save_every=save_every, measure_every=measure_every,
        )  # fmt: skip
        finish(folder / stage, curve)
        told[stage] = _said(curve[-1])
    draft.save_pretrained(folder)
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder)
    (folder / REPORT).write_text(json.dumps(told, indent=1), encoding="utf-8")
    return draft, told


def _said(point: Point) -> dict[str, float]:
    return {"loss": point.loss, "greedy": point.greedy, "sampled": point.sampled, "seconds": point.seconds}


def _renamed(name: str) -> str:
    for theirs, ours in RENAMED:
        name = name.replace(theirs, ours)
    return name


@torch.no_grad()
def _begin(mixer: Any, attention: Any) -> None:
    """Values come in, keys write, queries read; every gate is open, and a convolution passes on the token itself."""
    group = mixer.num_heads // (attention.k_proj.weight.shape[0] // attention.head_dim)

    def repeated(weight: Tensor) -> Tensor:
        return weight.float().unflatten(0, (-1, attention.head_dim)).repeat_interleave(group, 0).flatten(0, 1)

    wide, read = mixer.intermediate_size, attention.q_proj.weight.float() * attention.head_dim**-0.5
    taken = torch.cat([repeated(attention.v_proj.weight), repeated(attention.k_proj.weight), read])
    mixer.in_proj.weight.zero_()
    mixer.in_proj.weight[wide : wide + len(taken)] = taken
    mixer.in_proj.bias.zero_()
    mixer.in_proj.bias[:wide] = OPEN
    mixer.out_proj.weight.copy_(attention.o_proj.weight)
    mixer.out_proj.bias.zero_()
    mixer.conv1d.weight.zero_()
    mixer.conv1d.weight[..., -1] = 1.0
    mixer.conv1d.bias.zero_()
    shortest, longest = torch.tensor(STEPS).log10().tolist()
    steps = torch.logspace(shortest, longest, int(mixer.num_heads), device=mixer.dt_bias.device)
    mixer.dt_bias.copy_(torch.log(torch.expm1(steps)))
    mixer.A_log.zero_()
    mixer.D.zero_()
