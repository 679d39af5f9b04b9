"""A BlockFFN language model from scratch, on text files: with the losses of `chunk_sparsity` or without them.

What comes out is a folder that loads like every model. It trains on fixed windows of one long row of tokens, of which
the last hundredth only measures: perplexity, and the share of experts unused by a token and by stretches of tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.errors import InputError
from outrider.models.networks.blockffn import BlockFFNConfig, BlockFFNForCausalLM, routed_layers
from outrider.train.chunk_sparsity import (
    AdaptiveWeight,
    SparsityTarget,
    chunk_share,
    chunk_sparsity,
    locality,
    spread,
    token_sparsity,
)

LOOK = 5  # updates between two looks at how sparse it is
CHUNKS = (1, 2, 4, 8, 16, 32)  # consecutive tokens for which sparsity is told
SPECIAL = "<|endoftext|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFFNPlan:
    hidden: int = 384
    layers: int = 9
    heads: int = 6
    experts: int = 64
    expert_size: int = 48
    vocabulary: int = 8192
    steps: int = 2000
    seconds: float = 0.0  # the rate falls to nothing when so much time is over; 0: after the steps
    batch: int = 32  # windows an update
    length: int = 256  # tokens of a window
    lr: float = 2e-3
    warmup: int = 50
    seed: int = 0
    sparsity: float = 0.8  # wanted share of experts that a token does not use
    local: float = 2e-3  # weight of `locality`; 0: without
    chunks: float = 5e-2  # first weight of `chunk_share`; 0: without
    chunk: int = 64  # tokens of a chunk in training


Progress = Callable[[int, int, dict[str, float]], None]


def train_blockffn(
    tokens: Tensor, plan: BlockFFNPlan, device: torch.device, on_progress: Progress = lambda step, of, seen: None
) -> tuple[BlockFFNForCausalLM, dict[str, Any]]:
    """The trained model in float32 and what it was measured at. `tokens` are one long row, on any device."""
    held_out = max(len(tokens) // 100, 4 * plan.length)
    if len(tokens) < 2 * held_out:
        raise InputError(f"{len(tokens)} tokens of text are too few to train on; give more")
    torch.manual_seed(plan.seed)
    model = BlockFFNForCausalLM(_config(plan)).to(device)
    training, measuring = tokens[:-held_out].to(device), tokens[-held_out:].to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    chunk_weight = AdaptiveWeight(plan.chunks, ramp=100 // LOOK, every=100 // LOOK)
    sparsity = SparsityTarget(plan.sparsity)
    picks = torch.Generator().manual_seed(plan.seed)
    begun, seen = time.monotonic(), dict[str, float]()
    model.train()
    for step in range(plan.steps):
        share = (time.monotonic() - begun) / plan.seconds if plan.seconds else step / plan.steps
        if share >= 1:
            break
        rate = plan.lr * min((step + 1) / plan.warmup, 0.5 + 0.5 * math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(training) - plan.length - 1, (plan.batch,), generator=picks).to(device)
        rows = training[starts[:, None] + torch.arange(plan.length + 1, device=device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = _loss(model, rows)
        scores = [layer.scores.float() for layer in routed_layers(model)]
        together = spread(torch.cat(scores))
        total = loss + sparsity.value * together
        if plan.local:
            total = total + plan.local * torch.stack([locality(z) for z in scores]).mean()
        if plan.chunks:
            chunks = torch.stack([chunk_share(z, plan.chunk) for z in scores]).mean()
            total = total + chunk_weight.value * chunks
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOOK == 0:  # fetched seldom: it waits for the device
            seen = {"loss": float(loss.detach()), "sparsity": token_sparsity(torch.stack(scores) > 0)}
            sparsity.step(seen["sparsity"])
            if plan.chunks:
                seen["chunks"] = float(chunks.detach())
                chunk_weight.step(seen["chunks"])
        on_progress(step + 1, plan.steps, seen)
    model.eval().requires_grad_(False)
    told = measured(model, measuring, plan.length)
    return model, {**told, "updates": step + 1, "seconds": time.monotonic() - begun, "plan": asdict(plan)}


@torch.no_grad()
def measured(model: BlockFFNForCausalLM, tokens: Tensor, length: int) -> dict[str, Any]:
    """Perplexity of a text, and the share of experts that stretches of it do not use."""
    losses, active = list[float](), list[Tensor]()
    for rows in tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1).split(16):
        losses += [float(_loss(model, rows))] * len(rows)
        active.append(torch.stack([layer.scores > 0 for layer in routed_layers(model)], 1).flatten(0, 1))
    used = torch.cat(active)
    unused = {n: chunk_sparsity(used, n) for n in CHUNKS if n <= length}
    return {"perplexity": math.exp(sum(losses) / len(losses)), "unused by consecutive tokens": unused}


def read_text(paths: Sequence[Path], at_most: int) -> str:
    """The text of these files and of all files in these folders, in the order of their names."""
    parts, total = list[str](), 0
    files = (file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*"))))
    for file in files:
        if not file.is_file():
            continue
        try:
            parts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue  # no text
        total += len(parts[-1])
        if total >= at_most:
            break
    if not total:
        raise InputError(f"no text in {', '.join(map(str, paths))}; name files or folders of text in UTF-8")
    return SPECIAL.join(parts)[:at_most]


def new_tokenizer(text: str, vocabulary: int) -> Any:
    """Byte pairs that occur most in this text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[SPECIAL], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    pairs.train_from_iterator((text[i : i + 4096] for i in range(0, min(len(text), 20_000_000), 4096)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token=SPECIAL)


def encoded(tokenizer: Any, text: str) -> Tensor:
    """One long row."""
    lines = [text[i : i + 100_000] for i in range(0, len(text), 100_000)]
    found = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for line in found for token in line])


def _config(plan: BlockFFNPlan) -> BlockFFNConfig:
    return BlockFFNConfig(
        vocab_size=plan.vocabulary, hidden_size=plan.hidden, num_hidden_layers=plan.layers, bos_token_id=None,
        num_attention_heads=plan.heads, num_key_value_heads=plan.heads, num_experts=plan.experts, eos_token_id=0,
        expert_size=plan.expert_size, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip


def _loss(model: BlockFFNForCausalLM, rows: Tensor) -> Tensor:
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
