"""The check at load: a small tree through the runtime against the unmodified model, so that any causal LM is safe.

Cheap: one prefill, one tree of six nodes, one forward without a cache. Knows nothing about the architecture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from outrider.errors import UnsupportedModel
from outrider.protocols import Needs
from outrider.tree import fixed

if TYPE_CHECKING:
    from outrider.target.eager import TransformersTarget

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest


@torch.inference_mode()
def self_check(target: TransformersTarget, tolerance: float | None = None) -> None:
    """Raise `UnsupportedModel` naming the difference if the trees' logits are not those of plain forwards.

    `tolerance` is a share of the largest logit; None: that of the model's dtype.
    """
    name = type(target.model).__name__
    rng = np.random.default_rng(0)
    tree = fixed(rng.integers(0, target.vocab_size, 7), np.array([-1, 0, 0, 1, 2, 2, 4]))
    leaves = [3, 5, 6]
    slots = [target.acquire() for _ in range(min(2, target.free_slots))]  # two of different lengths where there is room
    prompts = [
        [*rng.integers(0, target.vocab_size, 4 + 3 * i).tolist(), int(tree.tokens[0])] for i in range(len(slots))
    ]
    texts = [prompt + tree.path_tokens(leaf) for prompt in prompts for leaf in leaves]
    width = max(map(len, texts))  # padding on the right is invisible to what stands before it
    batch = torch.tensor([t + [0] * (width - len(t)) for t in texts], device=target.device)
    try:
        for _ in target.prefill(slots, prompts, Needs()):
            pass
        scores = target.verify(slots, [tree] * len(slots), Needs())
        plain = target.model(input_ids=batch, use_cache=False, return_dict=True).logits.float()
    except Exception as error:
        raise UnsupportedModel(f"{name} does not run as a tree in this runtime: {error}") from error
    finally:
        for slot in slots:
            target.release(slot)
    differences = []
    for row, want in enumerate(plain):
        which, path = row // len(leaves), [0, *tree.path(leaves[row % len(leaves)])]
        logits, start = scores[which].logits, len(prompts[which]) - 1
        assert logits is not None
        differences.append((logits[path].float() - want[start : start + len(path)]).abs().max())
    worst = (torch.stack(differences).max() / plain.abs().max()).item()
    if not worst <= (tolerance or TOLERANCE.get(target.model.dtype, 1e-1)):
        remedy = "" if target.runtime == "eager" else "; use runtime eager"
        raise UnsupportedModel(
            f"{name} scores a tree differently from plain forwards (largest difference {worst:.1e} of the largest "
            f"logit); this runtime cannot run it exactly{remedy}"
        )
