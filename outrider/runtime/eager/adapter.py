"""Adapter: puts a `Pass` through a transformers model, and finds out how that model wants it.

Models that ask transformers' registry for their attention get ours, switched on around the forward only. Models with
attention code of their own keep it and are handed the mask. What a model derives from storage order instead of
`position_ids` it gets by depth (`positions.py`). Recurrent layers keep their projections, and what comes between these
is replaced (`recurrent/mixers.py`). On a CPU its linear layers multiply by packed copies of their weights.
Its code, weights and settings stay as they were.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.core.errors import UnsupportedModel
from outrider.core.tree import chain
from outrider.models.quiet import first_line
from outrider.runtime.attention import attention_configs, switched
from outrider.runtime.cache import LayerShape
from outrider.runtime.eager.experts import ActiveExperts
from outrider.runtime.packed import PackedLinears
from outrider.runtime.passes import NAME, Pass, running, tree_block
from outrider.runtime.positions import TableEnds, by_depth, custom_windows, stand_ins
from outrider.runtime.probe import ShapeRecorder
from outrider.runtime.recurrent.hybrid_cache import HybridCache
from outrider.runtime.recurrent.mixers import Mixers
from outrider.runtime.recurrent.states import StateStore
from outrider.runtime.replaced import Replacement, replaced
from outrider.runtime.support import cache_argument, plain_logits


class Adapter:
    def __init__(self, model: Any, mixers: Mixers | None = None) -> None:
        """`mixers` are the model's recurrent layers, where it has any."""
        self.model, self.mixers = model, mixers
        self._cache_argument = cache_argument(model)
        self.model_type: str = model.config.get_text_config(decoder=True).model_type
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.dtype: torch.dtype = model.dtype
        self.configs = attention_configs(model)
        self.can_trim = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.custom_attention = False
        self.stand_ins = stand_ins(model)
        self.positions: int | None = None  # rows of a table of positions, where the model has one
        self._linears = PackedLinears(model)
        self.experts = ActiveExperts(model)
        self.states = StateStore(1, border=1)  # of the probe: what a slot takes
        self.shapes, self.vocab_size = self._probe()
        if not self.states.memories:
            self.mixers = None

    @torch.inference_mode()
    def _probe(self) -> tuple[dict[int, LayerShape], int]:
        """One forward of two tokens: what the layers store, and whether the model called our attention."""
        name = type(self.model).__name__
        for self.custom_attention in (False, True):
            current, recorder = Pass([tree_block(0, 0, chain(0, [0]))], self.dtype, self.device), ShapeRecorder()
            self.states.bind(current)
            cache = HybridCache(recorder, None, self.states) if self.mixers else recorder
            try:
                with TableEnds() as tables:
                    out = self(current, cache, logits=current.rows, hidden=False)
            except Exception as error:
                if self.custom_attention:
                    plain_logits(self.model, current.input_ids)
                    why = first_line(error, typed=True)
                    raise UnsupportedModel(
                        f"{name} takes neither our attention nor a cache and a mask of ours ({why})"
                    ) from error
                continue
            if current.attended or not recorder.shapes:
                break
        every_layer = sorted(recorder.shapes) == list(range(len(recorder.shapes)))
        if not self.states.memories and not (recorder.shapes and every_layer):
            raise UnsupportedModel(f"{name} does not keep its state in a key/value cache; this runtime needs one")
        if recorder.rows - {current.rows}:
            stored = max(recorder.rows)
            raise UnsupportedModel(
                f"{name} stores {stored} rows for {current.rows} tokens: it puts rows of its own beside the text, and "
                "this runtime keeps one row a token"
            )
        windowed = any(v and _names_a_window(k) for k, v in vars(self.model.config).items())
        if self.custom_attention and windowed and not any(custom_windows(self.model)):
            raise UnsupportedModel(f"{name} has windows in attention code of its own; this runtime cannot honour them")
        self.positions = min(tables.ends, default=None)
        return dict(sorted(recorder.shapes.items())), out.logits.shape[-1]

    def repack(self) -> None:
        """Changes state: linear layers multiply by copies of the weights that the model has now."""
        self._linears = PackedLinears(self.model)

    def __call__(self, current: Pass, cache: Cache, *, logits: int, hidden: bool) -> Any:
        """Run the pass; logits of at least the first so many rows of each block."""
        options: dict[str, Any] = {}
        if hidden:
            options["output_hidden_states"] = True
        if logits < current.rows and self.can_trim:
            options["logits_to_keep"] = torch.arange(logits, device=self.device) if logits else 1
        if self.custom_attention:
            options["attention_mask"] = current.explicit_mask
        attention = nullcontext() if self.custom_attention else switched(self.configs, NAME)
        if self._cache_argument:
            options[self._cache_argument] = cache
        recurrence = nullcontext() if self.mixers is None else self.mixers.active(cache)
        inputs, positions = self._inputs(current), by_depth(self.stand_ins, current)
        counted = self.experts.active()
        with running(current), self._linears.active(), counted, attention, recurrence, inputs, positions:
            return self.model(
                input_ids=current.input_ids,
                position_ids=current.positions,
                use_cache=True,
                return_dict=True,
                **options,
            )

    def _inputs(self, current: Pass) -> AbstractContextManager[None]:
        """Changes what the embedding says in side rows, for the duration of a forward."""
        if not current.vectors:
            return nullcontext()
        embedding = self.model.get_input_embeddings()
        look_up = embedding.forward

        def forward(ids: Tensor) -> Tensor:
            rows = look_up(ids)
            for block, first, vectors in current.vectors:
                rows[block, first : first + len(vectors)] = vectors
            return rows

        return replaced([Replacement(vars(embedding), "forward", forward)])


def _names_a_window(setting: str) -> bool:
    return "window" in setting or setting in ("attention_types", "attention_chunk_size")
