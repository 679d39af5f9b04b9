"""OpenVINO graphs of transformers models: one traced forward with masks, positions and cache as inputs.

The graph takes the keys and values of the prefix as they lie in memory and gives back those of its own rows only.
Attention is written out as matrix products, because the plugin's own stateful attention walks a wide step row by row,
and in an order that makes a row's result the same to the last bit in any tree behind prefixes of up to 256 tokens:
int8 activations round, which turns the smallest difference into a visible one. Models that decide at run time
(mixtures of experts) or keep attention code of their own are refused.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from outrider.errors import MissingExtra, UnsupportedModel
from outrider.target.adapter import attention_configs, switched
from outrider.target.cache import LayerShape, ShapeRecorder
from outrider.target.passes import NAME as EAGER
from outrider.target.passes import current_pass, running

NAME = "outrider-openvino"  # of the traced attention in transformers' registries
GRAPH = "graph.xml"
LANES = 16  # columns of the product that sums: a single one would go through another kernel
FORMAT = 2  # raised when graphs of an earlier form must be made again
Rule = tuple[Callable[..., Tensor], int | None]  # transformers' function of positions, and its window if it has one


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights are stored, and how many activations of a row share a scale when products are taken in int8."""

    name: str
    weights: str  # a mode of nncf, or "" as they are
    group: int  # activations a scale; 0: products in float32

    @property
    def form(self) -> str:
        """What a stored graph differs by."""
        return self.weights or "float32"


PRECISIONS = {
    p.name: p
    for p in (
        Precision("float32", "", 0),
        Precision("int8", "int8_sym", 64),
        Precision("int4", "int4_sym", 64),
        Precision("int8-weights", "int8_sym", 0),
        Precision("int4-weights", "int4_sym", 0),
    )
}


@dataclass(frozen=True, slots=True)
class Traits:
    """What a model says about itself in one forward of two tokens."""

    model_type: str
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    shapes: list[LayerShape]
    rules: list[Rule]  # of the masks that the model asks for, in its order
    hidden: int  # hidden states that it gives
    trims: bool  # whether it can leave out rows before the vocabulary

    @property
    def groups(self) -> list[list[int]]:
        """Tensors of equal shape together: 2 * layer is a layer's keys, 2 * layer + 1 its values."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for layer, shape in enumerate(self.shapes):
            by_shape.setdefault((shape.heads, shape.key_dim), []).append(2 * layer)
            by_shape.setdefault((shape.heads, shape.value_dim), []).append(2 * layer + 1)
        return list(by_shape.values())

    def tensor_shape(self, tensor: int) -> tuple[int, int]:
        """Heads and size of a head of tensor 2 * layer (+ 1 for values)."""
        shape = self.shapes[tensor // 2]
        return shape.heads, shape.value_dim if tensor % 2 else shape.key_dim


class _Listener:
    """Stands in for a pass: notes which masks are asked for and how often our attention is called."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.attended = 0

    def restricted(self, rule: Callable[..., Tensor], size: int | None) -> None:
        self.rules.append((rule, size))


@torch.inference_mode()
def traits(model: Any) -> Traits:
    """Does not change the model. Raises `UnsupportedModel` where no graph of it would be right."""
    name, text = type(model).__name__, model.config.get_text_config(decoder=True)
    if model.device.type != "cpu" or model.dtype != torch.float32:
        raise UnsupportedModel(
            f"OpenVINO graphs are made from float32 models on the CPU, not {model.dtype} on {model.device.type}; "
            "load with device='cpu', dtype='float32' and choose the precision of the graph"
        )
    if any((getattr(text, key, 0) or 0) > 1 for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise UnsupportedModel(f"{name} chooses experts at run time, which a traced graph cannot; use runtime eager")
    listener, recorder = _Listener(), ShapeRecorder()
    try:
        with running(listener), switched(attention_configs(model), EAGER):  # type: ignore[arg-type]
            out = model(
                input_ids=torch.zeros((1, 2), dtype=torch.long), position_ids=torch.arange(2)[None],
                past_key_values=recorder, use_cache=True, return_dict=True, output_hidden_states=True,
            )  # fmt: skip
    except Exception as error:
        raise UnsupportedModel(f"{name} does not run with a cache of our own: {error}; use runtime eager") from error
    layers = len(recorder.shapes)
    if not layers or sorted(recorder.shapes) != list(range(layers)) or listener.attended != layers:
        raise UnsupportedModel(
            f"{name} has attention or caches of its own, which no graph is made of; use runtime eager"
        )
    return Traits(
        text.model_type, model.device, model.dtype, out.logits.shape[-1], [recorder.shapes[i] for i in range(layers)],
        listener.rules, len(out.hidden_states), "logits_to_keep" in inspect.signature(model.forward).parameters,
    )  # fmt: skip


class _Tracing(Cache):
    """Pass and cache of the traced forward: hands out the masks, and the prefix of the layer that attends next."""

    def __init__(self, masks: list[Tensor], past: list[Tensor]) -> None:
        super().__init__(layers=[])
        self._masks, self.past = iter(masks), past
        self.new: list[Tensor] = list(past)
        self.prefix = past[0], past[1]  # keys, values
        self.attended = 0

    def restricted(self, rule: Callable[..., Tensor], size: int | None) -> Tensor:
        return next(self._masks)

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        keys = 2 * layer_idx
        self.new[keys], self.new[keys + 1] = key_states, value_states
        self.prefix = self.past[keys], self.past[keys + 1]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


def attend(
    module: nn.Module,
    query: Tensor,  # [B, Hq, R, D]
    key: Tensor,  # [B, Hk, R, D], of the rows of this pass
    value: Tensor,  # [B, Hk, R, Dv]
    attention_mask: Tensor,  # additive [B, 1, R, C + R]
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Rows look at the prefix and at each other, in one softmax; query heads that share a key head are its rows."""
    if s_aux is not None:
        raise UnsupportedModel("it has attention sinks")
    keys, values = current_pass().prefix  # type: ignore[union-attr]  # [B, Hk, C, D]
    batch, rows, dim = query.shape[0], query.shape[2], query.shape[3]
    heads, key_heads = int(query.shape[1]), int(key.shape[1])
    group = heads // key_heads
    scale = float(dim) ** -0.5 if scaling is None else scaling
    folded = (query * scale).reshape(batch, key_heads, group * rows, dim)
    scores = torch.cat([folded @ keys.transpose(2, 3), folded @ key.transpose(2, 3)], -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.reshape(batch, key_heads, group, rows, -1) + attention_mask[:, :, None]
    # A matrix product adds its terms in the order of the columns, and hidden columns add nothing at all. So the sums
    # over the values and over the weights come out the same, wherever a row's ancestors are stored, as long as the
    # plugin does not cut the sum into blocks.
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)).reshape(batch, key_heads, group * rows, -1)
    stacked = torch.cat([values, value], 2)
    total = weights @ torch.ones_like(stacked[..., :LANES])
    out = (weights @ stacked) / total[..., :1]
    return out.reshape(batch, heads, rows, -1).transpose(1, 2), None


AttentionInterface.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[EAGER])


class _Traced(nn.Module):
    def __init__(self, model: Any, groups: list[list[int]]) -> None:
        super().__init__()
        self.model, self.groups = model, groups

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, masks: list[Tensor], past: list[Tensor],
        keep: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        cache = _Tracing(masks, past)
        options = {} if keep is None else {"logits_to_keep": keep}
        with running(cache):  # type: ignore[arg-type]
            out = self.model(
                input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True,
                return_dict=True, output_hidden_states=True, **options,
            )  # fmt: skip
        return out.logits, *out.hidden_states, *(torch.cat([cache.new[t] for t in group]) for group in self.groups)


def trace(model: Any, known: Traits) -> Any:
    """An `openvino.Model` in float32 that shares the weights' memory with `model`.

    Inputs: input_ids and position_ids [B, R], mask.i [B, 1, R, C + R], past.t [B, H, C, D], keep [K]. Outputs: logits
    [B, K, V], hidden.i [B, R, d], new.g: the rows' own keys and values, the tensors of a group stacked along B.
    """
    import openvino as ov

    batch, rows, prefix = 2, 3, 4
    example: dict[str, Any] = {
        "input_ids": torch.arange(batch * rows).view(batch, rows) % known.vocab_size,
        "position_ids": prefix + torch.arange(rows).expand(batch, rows).contiguous(),
        "masks": [torch.zeros(batch, 1, rows, prefix + rows) for _ in known.rules],
        "past": [torch.ones(batch, h, prefix, d) for h, d in map(known.tensor_shape, range(2 * len(known.shapes)))],
    }
    dynamic: list[tuple[str, list[int]]] = [("input_ids", [-1, -1]), ("position_ids", [-1, -1])]
    dynamic += [(f"mask.{i}", [-1, 1, -1, -1]) for i in range(len(known.rules))]
    for t in range(2 * len(known.shapes)):
        heads, dim = known.tensor_shape(t)
        dynamic.append((f"past.{t}", [-1, heads, -1, dim]))
    if known.trims:
        example["keep"] = torch.arange(rows)
        dynamic.append(("keep", [-1]))
    name = type(model).__name__
    try:
        with torch.no_grad(), _quiet(), switched(attention_configs(model), NAME):
            graph = ov.convert_model(_Traced(model, known.groups), example_input=example)
        if len(graph.inputs) != len(dynamic):
            raise ValueError(f"{len(graph.inputs)} inputs instead of {len(dynamic)}")
        for port, (label, shape) in zip(graph.inputs, dynamic, strict=True):
            port.get_tensor().set_names({label})
            port.get_node().set_partial_shape(ov.PartialShape(shape))
        outputs = ["logits", *(f"hidden.{i}" for i in range(known.hidden))]
        outputs += [f"new.{g}" for g in range(len(known.groups))]
        for port, label in zip(graph.outputs, outputs, strict=True):
            port.get_tensor().set_names({label})
        graph.validate_nodes_and_infer_types()
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedModel(f"{name} cannot be converted for OpenVINO ({reason}); use runtime eager") from error
    return graph


def compressed(graph: Any, precision: Precision) -> Any:
    """The graph with its weights in the precision's form."""
    if not precision.weights:
        return graph
    try:
        with _quiet():
            import nncf
    except ImportError as error:
        raise MissingExtra(
            f"precision {precision.name} needs the package nncf; run: pip install 'outrider[openvino]'"
        ) from error
    mode = nncf.CompressWeightsMode(precision.weights)
    options: dict[str, Any] = {}
    if precision.weights.startswith("int4"):
        adjust = nncf.GroupSizeFallbackMode.ADJUST  # a width that 64 does not divide gets smaller groups
        options = {
            "group_size": 64, "ratio": 1.0,
            "advanced_parameters": nncf.AdvancedCompressionParameters(group_size_fallback_mode=adjust),
        }  # fmt: skip
    with _quiet():
        return nncf.compress_weights(graph, mode=mode, **options)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Foreign progress bars, tables and tracer warnings are not the user's."""
    logger = logging.getLogger("nncf")
    level = logger.level
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
