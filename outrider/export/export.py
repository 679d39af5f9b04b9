"""Writing a drafter for a serving engine: beside its place, read back by an independent forward, then moved there.

A folder whose logits differ from the drafter's own is never left behind.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from outrider.core.errors import InputError, UnknownName
from outrider.export.formats import Content, engine, full_head, speculators
from outrider.export.plain import PlainEagle3
from outrider.models import LoadedModel
from outrider.models.drafts import read_card
from outrider.models.trained import load_eagle3

FORMATS = ("vllm", "sglang", "speculators")
KIND = "eagle3"  # what these formats can say
PLACES, STEPS = 24, 3  # of the comparison: a random text, and a chain behind it
NOISE = 1e-4  # of the largest logit: two orders of summation differ by less in float32
HOT_TOKENS = "hot_token_ids.pt"


@dataclass(frozen=True, slots=True)
class Report:
    format: str
    folder: str
    target: str
    layers: tuple[int, ...]  # `hidden_states[i]` is the input of 0-based layer i
    vocabulary: int
    bytes: int
    difference: float  # largest, of all logits compared
    largest: float  # logit

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def export(
    drafter: Path, target: LoadedModel, form: str, out: Path, *, dtype: torch.dtype = torch.float32,
    verifier: str = "", depth: int = 5,
) -> Report:  # fmt: skip
    """Changes the file system: `out` is there whole and compared, or not at all.

    `verifier` is what the engine will load as its target, `depth` how many tokens it will draft: `speculators` only.
    """
    if form not in FORMATS:
        raise UnknownName(f"unknown format {form!r}; known formats: {', '.join(FORMATS)}")
    card = read_card(drafter)
    if card.kind != KIND:
        raise InputError(f"{drafter}: a drafter of kind {card.kind} has no format there; export one of kind {KIND}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not empty; choose another folder or remove it")
    net = load_eagle3(drafter, target).float().cpu()
    if net.shape.scaling or (net.shape.normed and form == "sglang"):
        why = (
            "whose rotary is scaled" if net.shape.scaling else "that norms before the residual, which sglang does not,"
        )
        raise InputError(f"{drafter}: a drafter {why} is not written; serve the folder that it was added from")
    if form == "speculators":
        content = speculators(net, target, dtype, verifier or target.model.name_or_path or target.name, depth)
    else:
        content = engine(net, target, dtype)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            _write(made, content, form)
            difference, largest = compare(net, target.model.get_input_embeddings(), made, dtype)
            size = sum(file.stat().st_size for file in made.iterdir())
            os.replace(made, out)
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror}); choose another folder") from error
    return Report(form, str(out), target.name, net.shape.layers, net.shape.vocab, size, difference, largest)


def _write(folder: Path, content: Content, form: str) -> None:
    save_file(content.tensors, folder / "model.safetensors", {"format": "pt"})
    if form == "sglang" and content.token_map is not None:
        torch.save(content.token_map, folder / HOT_TOKENS)
    (folder / "config.json").write_text(json.dumps(content.config, indent=2) + "\n")


@torch.no_grad()
def compare(net: Any, embed: Callable[[Tensor], Tensor], folder: Path, dtype: torch.dtype) -> tuple[float, float]:
    """(largest difference, largest logit) over a random text and a chain; refuses what is not the same network."""
    noise = torch.Generator().manual_seed(0)
    plain = PlainEagle3(folder)
    ids = net.ids.cpu()
    if not torch.equal(plain.ids, ids) or not torch.equal(plain.t2d.nonzero()[:, 0], ids.sort().values):
        raise InputError(f"{folder}: the vocabulary map is another one; nothing was written")
    if tuple(plain.layers) != tuple(net.shape.layers):
        raise InputError(f"{folder}: the layers are others; nothing was written")
    width = len(net.shape.layers) * net.shape.hidden
    features = torch.randn(PLACES, width, generator=noise) * 3
    tokens = torch.randint(plain.vocab, (PLACES + STEPS - 1,), generator=noise)
    device = getattr(embed, "weight", tokens).device
    embedded = embed(tokens.to(device)).float().cpu()
    if dtype != torch.float32:
        net.lm_head = _one_matrix(net.lm_head)  # a rounded product is not the product of rounded factors
        for weight in net.parameters():
            weight.copy_(weight.to(dtype))
    mine, theirs = drafter_rows(net, embedded, features, STEPS), plain.run(embedded, features, STEPS)
    difference, largest = float((mine - theirs).abs().max()), float(mine.abs().max())
    if not difference <= NOISE * max(largest, 1.0):
        raise InputError(f"{folder}: its logits differ by {difference:.3g} from the drafter's; nothing was written")
    return difference, largest


def _one_matrix(head: nn.Module) -> nn.Linear:
    whole = full_head(head)
    made = nn.Linear(whole.shape[1], whole.shape[0], bias=False)
    made.weight.copy_(whole)
    return made


def drafter_rows(net: Any, embedded: Tensor, features: Tensor, steps: int) -> Tensor:
    """What the drafter's code says on the same text: [steps, draft vocabulary]."""
    first, state = len(features), net.fuse(features)[None]
    keys = values = torch.zeros(1, net.shape.kv_heads, 0, net.shape.head_dim)
    rows = []
    for step in range(steps):
        at = torch.arange(first) if step == 0 else torch.tensor([first - 1 + step])
        state = net.enter(embedded[None, at], state)
        q, k, v = net.project(embedded[None, at], state, at[None])
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        attended = scaled_dot_product_attention(q, keys, values, is_causal=step == 0, enable_gqa=True)
        state = net.finish(state, attended)[:, -1:]
        rows.append(net.logits(state)[0])
    return torch.cat(rows)
