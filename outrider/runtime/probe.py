"""What a model says about itself in one forward of two tokens: the layers' caches, the masks, the size of its outputs.

For runtimes that make something else of the model and must know beforehand that it would be right. Does not change the
model, and refuses one with attention, caches or positions of its own, with a sentence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import causal_mask_function

from outrider.core.errors import UnsupportedModel
from outrider.runtime.attention import attention_configs, switched
from outrider.runtime.cache import LayerShape
from outrider.runtime.passes import NAME, running
from outrider.runtime.positions import stand_ins

MaskRule = tuple[Callable[..., Tensor], int | None]  # transformers' function of positions, and its window if it has one


class ShapeRecorder(Cache):
    """Stands in for a cache during one forward from position 0 and notes what every layer stores."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, LayerShape] = {}
        self.rows: set[int] = set()  # stored by a layer

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        heads, key_dim, value_dim = key_states.shape[1], key_states.shape[3], value_states.shape[3]
        self.rows.add(key_states.shape[2])
        self.shapes[layer_idx] = LayerShape(heads, key_dim, value_dim, key_states.dtype, key_states.device)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Of a decoder whose attention, masks and cache are those of transformers."""

    model_type: str
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    shapes: list[LayerShape]
    rules: list[MaskRule]  # of the masks that the model asks for, in its order
    hidden: int  # hidden states that it gives
    trims: bool  # whether it can leave out rows before the vocabulary

    @property
    def windowless(self) -> bool:
        """Every layer sees all of the text before a row."""
        return all(rule is causal_mask_function for rule, _ in self.rules)


class _Listener:
    """Stands in for a pass: notes which masks are asked for and how often our attention is called."""

    def __init__(self) -> None:
        self.rules: list[MaskRule] = []
        self.attended = 0

    def restricted(self, rule: Callable[..., Tensor], size: int | None) -> None:
        self.rules.append((rule, size))


@torch.inference_mode()
def probe(model: Any) -> ModelFacts:
    """Does not change the model. Raises `UnsupportedModel` where no graph of it would be right."""
    name, text = type(model).__name__, model.config.get_text_config(decoder=True)
    if model.device.type != "cpu" or model.dtype != torch.float32:
        raise UnsupportedModel(
            f"this runtime is made from float32 models on the CPU, not {model.dtype} on {model.device.type}; "
            "load with device='cpu', dtype='float32' and choose the precision of the runtime"
        )
    if any((getattr(text, key, 0) or 0) > 1 for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise UnsupportedModel(f"{name} chooses experts at run time, which this runtime cannot; use runtime eager")
    listener, recorder = _Listener(), ShapeRecorder()
    try:
        with running(listener), switched(attention_configs(model), NAME):  # type: ignore[arg-type]
            out = model(
                input_ids=torch.zeros((1, 2), dtype=torch.long), position_ids=torch.arange(2)[None],
                past_key_values=recorder, use_cache=True, return_dict=True, output_hidden_states=True,
            )  # fmt: skip
    except Exception as error:
        raise UnsupportedModel(f"{name} does not run with a cache of our own: {error}; use runtime eager") from error
    layers = len(recorder.shapes)
    if not layers or sorted(recorder.shapes) != list(range(layers)) or listener.attended != layers:
        raise UnsupportedModel(
            f"{name} has attention or caches of its own, which this runtime cannot run; use runtime eager"
        )
    if by_storage := {s.what for s in stand_ins(model)}:
        raise UnsupportedModel(
            f"{name} takes positions from storage order ({', '.join(sorted(by_storage))}), which a graph of this "
            "runtime cannot; use runtime eager"
        )
    return ModelFacts(
        text.model_type, model.device, model.dtype, out.logits.shape[-1], [recorder.shapes[i] for i in range(layers)],
        listener.rules, len(out.hidden_states), "logits_to_keep" in inspect.signature(model.forward).parameters,
    )  # fmt: skip
