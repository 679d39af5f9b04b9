"""The check at load: small trees through a backend against the unmodified model, so that any causal LM is safe.

Cheap: one pass of text, one tree of six nodes behind each of two texts of unequal length, one forward without a cache.
Knows nothing about the architecture. What would begin late in a text (a window, temperature tuning, the switch of a
rope) is moved near for the time of the check, so that these few tokens meet it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from outrider.core.errors import UnsupportedModel
from outrider.core.protocols import Target
from outrider.core.records import NO_NEEDS, Piece, Traits
from outrider.core.tree import fixed
from outrider.models.quiet import first_line
from outrider.runtime.support import plain_logits

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest
LONG, SHORT = 20, 4  # tokens of the two texts: past the end of the context where a runtime did not see that end


class Checkable(Protocol):
    """A backend of a model that transformers runs by itself."""

    @property
    def model(self) -> Any: ...
    @property
    def traits(self) -> Traits: ...
    def positions(self) -> tuple[int, str]: ...
    def thresholds_near(self, context: int) -> AbstractContextManager[list[str]]:
        """Changes the model and what was taken from it while it lasts; names what a text of `context` would meet."""
        ...


def self_check(backend: Checkable, target: Target, tolerance: float | None = None) -> None:
    """Raise `UnsupportedModel` naming the difference if the trees' logits are not those of plain forwards.

    `tolerance` is a share of the largest logit; None: that of the model's dtype.
    """
    with backend.thresholds_near(target.max_context) as moved:
        worst = _largest_difference(backend.model, target, min(LONG, target.max_context, backend.positions()[0]))
    if not worst <= (tolerance or TOLERANCE.get(backend.model.dtype, 1e-1)):
        remedy = "" if backend.traits.runtime == "eager" else "; use runtime eager"
        late = f", with {', '.join(moved)} reached" if moved else ""
        raise UnsupportedModel(
            f"{type(backend.model).__name__} scores a tree differently from plain forwards (largest difference "
            f"{worst:.1e} of the largest logit{late}); this runtime cannot run it exactly{remedy}"
        )


@torch.inference_mode()
def _largest_difference(model: Any, target: Target, context: int) -> float:
    """As a share of the largest logit, in texts of at most `context` tokens."""
    name = type(model).__name__
    rng = np.random.default_rng(0)
    whole = fixed(rng.integers(0, target.vocab_size, 7), np.array([-1, 0, 0, 1, 2, 2, 4]))
    tree = whole.keep(range(min(target.max_rows, int((whole.depths < context).sum()))))  # a small runtime: less of it
    leaves = sorted({*range(len(tree))} - {*tree.parents.tolist()})
    room = context - tree.depth
    slots = [target.acquire() for _ in range(min(2, target.free_slots))]
    lengths = [room, min(SHORT, room)][: len(slots)]
    prompts = [[*rng.integers(0, target.vocab_size, n - 1).tolist(), int(tree.tokens[0])] for n in lengths]
    texts = [prompt + tree.path_tokens(leaf) for prompt in prompts for leaf in leaves]
    width = max(map(len, texts))  # padding on the right is invisible to what stands before it
    batch = torch.tensor([t + [0] * (width - len(t)) for t in texts], device=target.device)
    try:
        if text := [Piece(s, p[:-1]) for s, p in zip(slots, prompts, strict=True) if len(p) > 1]:
            target.run(text, NO_NEEDS)
        scores = target.run([Piece(slot, tree=tree) for slot in slots], NO_NEEDS)
    except Exception as error:
        plain_logits(model, batch)
        why = first_line(error, typed=True)
        raise UnsupportedModel(
            f"{name} does not take its keys, masks or positions as this runtime hands them over ({why})"
        ) from error
    finally:
        for slot in slots:
            target.release(slot)
    plain = plain_logits(model, batch).float()  # last: a rope that switches late has met the prompt first
    differences = []
    for row, want in enumerate(plain):
        which, path = row // len(leaves), [0, *tree.path(leaves[row % len(leaves)])]
        logits, start = scores[which].logits, len(prompts[which]) - 1
        assert logits is not None
        differences.append((logits[path].float() - want[start : start + len(path)]).abs().max())
    return (torch.stack(differences).max() / plain.abs().max()).item()
