"""OpenVINO graphs of transformers models: one traced forward with masks, positions and cache as inputs.

The graph takes the keys and values of the prefix as they lie in memory and gives back those of its own rows only.
Attention is written out as matrix products, because the plugin's own stateful attention walks a wide step row by row,
and in an order that makes a row's result the same to the last bit in any tree: int8 activations round, which turns the
smallest difference into a visible one. The order rests on what the plugin's products do on processors with AVX-512:
up to 512 terms are added one by one, longer sums are cut into blocks of 512 or 1024. Models that decide at run time
(mixtures of experts) or keep attention code of their own are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from outrider.core.errors import MissingExtra, UnsupportedModel
from outrider.runtime.attention import attention_configs, switched
from outrider.runtime.cache import LayerShape
from outrider.runtime.openvino.quiet import quiet_conversion
from outrider.runtime.passes import NAME as EAGER
from outrider.runtime.passes import current_pass, running
from outrider.runtime.probe import ModelFacts
from outrider.runtime.support import refuse_quantised

NAME = "outrider-openvino"  # of the traced attention in transformers' registries
GRAPH = "graph.xml"
BLOCK = 128  # columns of text that are summed together, in order; the plugin keeps the order of up to 512
LANES = 16  # columns of ones beside the values, which sum the weights: a width that vectors divide
FORMAT = 7  # raised when graphs of an earlier form must be made again


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
class CacheTensors:
    """A model's keys and values as the graph reads them: tensor 2 * layer holds keys, 2 * layer + 1 values."""

    shapes: Sequence[LayerShape]

    def __len__(self) -> int:
        return 2 * len(self.shapes)

    @property
    def groups(self) -> list[list[int]]:
        """Tensors of equal shape together, keys and values apart."""
        by_shape: dict[tuple[int, int, bool], list[int]] = {}
        for layer, shape in enumerate(self.shapes):
            by_shape.setdefault((shape.heads, shape.key_dim, False), []).append(2 * layer)
            by_shape.setdefault((shape.heads, shape.value_dim, True), []).append(2 * layer + 1)
        return list(by_shape.values())

    def dim(self, tensor: int) -> int:
        """The size of a head."""
        shape = self.shapes[tensor // 2]
        return shape.value_dim if tensor % 2 else shape.key_dim

    def recent(self, tensor: int) -> tuple[int, int, int]:
        """Its heads, the columns of a block, and the size of a head as it is stored."""
        return self.shapes[tensor // 2].heads, BLOCK, self.dim(tensor) + LANES * (tensor % 2)

    def block(self, tensor: int) -> tuple[int, int, int]:
        """Likewise of a finished block: keys lie transposed, as the product wants them."""
        heads, columns, dim = self.recent(tensor)
        return (heads, columns, dim) if tensor % 2 else (heads, dim, columns)


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a layer looks at besides the rows of the pass, keys and values each."""

    blocks: tuple[Tensor, Tensor]  # finished blocks of text, keys transposed
    recent: tuple[Tensor, Tensor]  # [B, Hk, W, D]: the unfinished block, and rows in flight from before


class _Tracing(Cache):
    """Pass and cache of the traced forward: hands out the masks, and what the layer that attends next looks at."""

    def __init__(self, masks: list[Tensor], tail_masks: list[Tensor], past: list[Tensor], recent: list[Tensor]) -> None:
        super().__init__(layers=[])
        self._masks = iter(zip(masks, tail_masks, strict=True))
        self._tails: dict[int, Tensor] = {}  # by the id of the mask over the blocks
        self._wide: dict[int, tuple[Tensor, Tensor]] = {}  # likewise: both with the first row twice
        pairs = range(0, len(past), 2)
        self._layers = [_Layer((past[i], past[i + 1]), (recent[i], recent[i + 1])) for i in pairs]
        self.new: list[Tensor] = list(past)
        self.layer = self._layers[0]
        self.attended = 0

    def restricted(self, rule: Callable[..., Tensor], size: int | None) -> Tensor:
        mask, tail = next(self._masks)
        self._tails[id(mask)] = tail
        return mask

    def both_masks(self, mask: Tensor, twice: bool) -> tuple[Tensor, Tensor]:
        """Over the blocks and over the rest; the first row `twice` where asked, made once for all layers."""
        tail = self._tails[id(mask)]
        if not twice:
            return mask, tail
        if id(mask) not in self._wide:
            every = mask.expand(-1, -1, -1, -1, tail.shape[4], -1)
            self._wide[id(mask)] = first_twice(every, 4), first_twice(tail, 4)
        return self._wide[id(mask)]

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        self.new[2 * layer_idx : 2 * layer_idx + 2] = key_states, value_states
        self.layer = self._layers[layer_idx]
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
    attention_mask: Tensor,  # additive, over the finished blocks: [B, N, 1, 1, 1 or R, BLOCK]
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Rows look at the prefix and at each other, in one softmax; query heads that share a key head are its rows.

    The sum over the columns goes by blocks of text: in order within a block, the unfinished one with the rows of this
    pass behind it, then over the blocks in order; a row counts in the block of its own position. Hidden columns add
    nothing at all. So the result is the same to the last bit, wherever a row's ancestors are stored. Where no heads
    share keys the first row goes twice: for a single one the plugin has a kernel that adds in another order.
    """
    if s_aux is not None:
        raise UnsupportedModel("it has attention sinks")
    current: _Tracing = current_pass()  # type: ignore[assignment]
    layer, twice = current.layer, int(query.shape[1]) == int(key.shape[1])
    query = first_twice(query, 2) if twice else query
    mask, tail_mask = current.both_masks(attention_mask, twice)  # the latter [B, J, 1, 1, R, W + R]
    # [B, N, Hk, D, BLOCK] and [B, N, Hk, BLOCK, Dv + LANES]: the lanes are ones, and sum the weights
    keys, values = layer.blocks
    # Shapes come from the mask, which all layers share: from a layer's own tensors, each would work them out anew.
    batch, places, rows, dim = tail_mask.shape[0], tail_mask.shape[1], tail_mask.shape[4], int(query.shape[3])
    heads, key_heads, value_dim = int(query.shape[1]), int(key.shape[1]), int(value.shape[3])
    group = heads // key_heads
    scale = float(dim) ** -0.5 if scaling is None else scaling
    folded = (query * scale).reshape(batch, 1, key_heads, group * rows, dim)
    before = folded @ keys  # [B, N, Hk, G * R, BLOCK]
    among = folded @ torch.cat([layer.recent[0], key], 2)[:, None].transpose(3, 4)  # [B, 1, Hk, G * R, W + R]
    if softcap is not None:
        before, among = (torch.tanh(scores / softcap) * softcap for scores in (before, among))
    before = before.reshape(batch, -1, key_heads, group, rows, BLOCK) + mask
    among = among.reshape(batch, 1, key_heads, group, rows, -1) + tail_mask
    before = before.reshape(batch, -1, key_heads, group * rows, BLOCK)
    among = among.reshape(batch, places, key_heads, group * rows, -1)
    top = torch.maximum(before.amax((1, 4), keepdim=True), among.amax((1, 4), keepdim=True))
    before, among = torch.exp(before - top), torch.exp(among - top)
    ones = torch.ones_like(value[..., :1]).expand(-1, -1, -1, LANES)
    tail_values = torch.cat([layer.recent[1], torch.cat([value, ones], -1)], 2)[:, None]
    out = torch.cat([before @ values, among @ tail_values], 1).sum(1)  # [B, Hk, G * R, Dv + LANES]
    out = out[..., :value_dim] / out[..., value_dim : value_dim + 1]
    out = out.reshape(batch, heads, rows, value_dim)
    return (out[:, :, 1:] if twice else out).transpose(1, 2), None


def first_twice(rows: Tensor, axis: int) -> Tensor:
    return torch.cat([rows.narrow(axis, 0, 1), rows], axis)


AttentionInterface.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[EAGER])


class _Traced(nn.Module):
    def __init__(self, model: Any, groups: list[list[int]]) -> None:
        super().__init__()
        self.model, self.groups = model, groups

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, masks: list[Tensor], tail_masks: list[Tensor],
        past: list[Tensor], recent: list[Tensor], keep: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        cache = _Tracing(masks, tail_masks, past, recent)
        options = {} if keep is None else {"logits_to_keep": keep}
        with running(cache):  # type: ignore[arg-type]
            out = self.model(
                input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True,
                return_dict=True, output_hidden_states=True, **options,
            )  # fmt: skip
        return out.logits, *out.hidden_states, *(torch.cat([cache.new[t] for t in group]) for group in self.groups)


def trace(model: Any, facts: ModelFacts) -> Any:
    """An `openvino.Model` in float32 that shares the weights' memory with `model`.

    Inputs: input_ids and position_ids [B, R], keep [K], past.t [B, N, *CacheTensors.block] and
    recent.t [B, *CacheTensors.recent], and masks: mask.i [B, N, 1, 1, 1 or R, BLOCK] over the N finished blocks,
    own.i [B, J, 1, 1, R, W + R] over the recent columns and the rows, which count in J blocks. Outputs: logits
    [B, K, V], hidden.i [B, R, d], new.g: the rows' keys or values, the tensors of a group stacked along B.
    """
    import openvino as ov

    refuse_quantised(model, "openvino")
    batch, rows, count, tensors = 2, 3, 4, CacheTensors(facts.shapes)
    example: dict[str, Any] = {
        "input_ids": torch.arange(batch * rows).view(batch, rows) % facts.vocab_size,
        "position_ids": 4 + torch.arange(rows).expand(batch, rows).contiguous(),
        "masks": [torch.zeros(batch, count, 1, 1, rows, BLOCK) for _ in facts.rules],
        "tail_masks": [torch.zeros(batch, 2, 1, 1, rows, BLOCK + rows) for _ in facts.rules],
        "past": [torch.ones(batch, count, *tensors.block(t)) for t in range(len(tensors))],
        "recent": [torch.ones(batch, *tensors.recent(t)) for t in range(len(tensors))],
    }
    dynamic: list[tuple[str, list[int]]] = [("input_ids", [-1, -1]), ("position_ids", [-1, -1])]
    dynamic += [(f"mask.{i}", [-1, -1, 1, 1, -1, BLOCK]) for i in range(len(facts.rules))]
    dynamic += [(f"own.{i}", [-1, -1, 1, 1, -1, -1]) for i in range(len(facts.rules))]
    dynamic += [(f"past.{t}", [-1, -1, *tensors.block(t)]) for t in range(len(tensors))]
    dynamic += [(f"recent.{t}", [-1, tensors.recent(t)[0], -1, tensors.recent(t)[2]]) for t in range(len(tensors))]
    if facts.trims:
        example["keep"] = torch.arange(rows)
        dynamic.append(("keep", [-1]))
    name = type(model).__name__
    try:
        with torch.no_grad(), quiet_conversion(), switched(attention_configs(model), NAME):
            graph = ov.convert_model(_Traced(model, tensors.groups), example_input=example)
        if len(graph.inputs) != len(dynamic):
            raise ValueError(f"{len(graph.inputs)} inputs instead of {len(dynamic)}")
        for port, (label, shape) in zip(graph.inputs, dynamic, strict=True):
            port.get_tensor().set_names({label})
            port.get_node().set_partial_shape(ov.PartialShape(shape))
        outputs = ["logits", *(f"hidden.{i}" for i in range(facts.hidden))]
        outputs += [f"new.{g}" for g in range(len(tensors.groups))]
        for port, label in zip(graph.outputs, outputs, strict=True):
            port.get_tensor().set_names({label})
        graph.validate_nodes_and_infer_types()
        merged(graph)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedModel(f"{name} cannot be converted for OpenVINO ({reason}); use runtime eager") from error
    return graph


def merged(graph: Any) -> Any:
    """Changes the graph: linear layers that read the same rows become one product, cut apart afterwards.

    A product of few rows costs the plugin some microseconds before it begins, whatever its size.
    """
    import numpy as np
    import openvino.opset13 as op

    readers: dict[tuple[str, int], list[Any]] = {}
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "MatMul" and node.input_value(1).get_node().get_type_name() == "Constant":
            how = node.get_attributes()
            weight = node.input_value(1).get_shape()
            if not how["transpose_a"] and how["transpose_b"] and len(weight) == 2:
                source = node.input_value(0)
                readers.setdefault((source.get_node().get_name(), source.get_index()), []).append(node)
    for nodes in readers.values():
        if len(nodes) > 1:
            weights = [node.input_value(1).get_node().data for node in nodes]
            wide = op.matmul(nodes[0].input_value(0), op.constant(np.concatenate(weights)), False, True)
            wide.set_friendly_name(nodes[0].get_friendly_name())
            parts = op.variadic_split(wide, op.constant(np.int64(-1)), op.constant(np.array([len(w) for w in weights])))
            for i, node in enumerate(nodes):
                for reader in node.output(0).get_target_inputs():
                    reader.replace_source_output(parts.output(i))
    graph.validate_nodes_and_infer_types()
    return graph


def multiplied_bytes(graph: Any) -> int:
    """Of constants that products read, with their scales; of a table that is only looked up a step reads a row."""
    unpacking = {"Convert", "Multiply", "Subtract", "Reshape"}

    def multiplied(node: Any) -> bool:
        readers = [place.get_node() for place in node.output(0).get_target_inputs()]
        return any(r.get_type_name() == "MatMul" or (r.get_type_name() in unpacking and multiplied(r)) for r in readers)

    constants = [node for node in graph.get_ops() if node.get_type_name() == "Constant" and len(node.shape) > 1]
    return sum(c.get_element_type().bitwidth * math.prod(c.shape) // 8 for c in constants if multiplied(c))


def compressed(graph: Any, precision: Precision) -> Any:
    """The graph with its weights in the precision's form."""
    if not precision.weights:
        return graph
    try:
        with quiet_conversion():
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
    with quiet_conversion():
        return nncf.compress_weights(graph, mode=mode, **options)
