"""A model without its matrices: its code and configuration, its small tensors, and the files where the rest lies.

What a runtime packs by itself is read from the files tensor by tensor; the skeleton says what belongs where, and with
the packed weights in the place of its own it runs, so that what was packed can be checked against it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from outrider.core.errors import InputError
from outrider.models.files.tensors import Floats, Gguf, Safetensors, Tensors
from outrider.models.gguf_file import check_whole, read_header
from outrider.models.quiet import quiet_transformers

PICKED = 16  # values of a tensor that name it in a fingerprint


@dataclass(frozen=True)
class Skeleton:
    model: Any  # of transformers; its matrices are on "meta"
    tokenizer: Any
    tensors: Tensors

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(module): name for name, module in self.model.named_modules()}

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return bool(self.model.config.tie_word_embeddings)

    def rows(self, module: nn.Module, low: int, high: int) -> Floats:
        """Rows of a module's matrix."""
        if self.tied and module is self.model.get_output_embeddings():
            module = self.model.get_input_embeddings()
        name = f"{self._names[id(module)]}.weight"
        return np.ascontiguousarray(self.tensors.rows(name, low, high), dtype=np.float32)

    def fingerprint(self) -> str:
        def picked(name: str, weight: Tensor) -> Tensor:
            count, columns = weight.numel(), weight.shape[-1] if weight.dim() > 1 else 1
            places = range(0, count, max(1, count // PICKED))
            rows = [(place // columns, place % columns) for place in places][:PICKED]
            found = [self.tensors.rows(name, row, row + 1).reshape(-1)[column] for row, column in rows]
            return torch.from_numpy(np.array(found, dtype=np.float32))

        return fingerprint_of(self.model, picked)


def fingerprint_of(model: Any, picked: Callable[[str, Tensor], Tensor]) -> str:
    """A short name for these weights: names, shapes and 16 values of every parameter, rounded to bfloat16.

    Rounding makes it the same for a checkpoint loaded in another precision. Not a proof against tampering.
    """
    digest = hashlib.sha256(json.dumps([model.config.model_type, model.config.get_text_config().vocab_size]).encode())
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        values = picked(name, weight)
        if len(values):
            digest.update(values.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def of_folder(folder: Path) -> Skeleton | None:
    """Of a model folder with safetensors files; None where it must be loaded as a whole."""
    from transformers import AutoConfig, AutoTokenizer

    with quiet_transformers():
        config = AutoConfig.from_pretrained(folder)
        tensors = Safetensors(folder)
        if not _usual(config):
            return None
        has = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
        return _built(config, AutoTokenizer.from_pretrained(folder) if has else None, tensors, folder)


def of_gguf(path: Path) -> Skeleton | None:
    """Of a GGUF file; None where its architecture must be read as a whole."""
    from transformers import AutoConfig, AutoTokenizer

    check_whole(path)
    with quiet_transformers(), _read_once():
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        if not _usual(config):
            return None
        try:
            tensors = Gguf(path, config.num_attention_heads, config.num_key_value_heads)
        except InputError:
            return None
        config.tie_word_embeddings = "lm_head.weight" not in tensors.shapes
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    with quiet_transformers():
        return _built(config, tokenizer, tensors, None)


@contextmanager
def _read_once() -> Iterator[None]:
    """For the configuration and again for the tokenizer `transformers` reads the header, by a reader that makes arrays
    of every token, which takes seconds and 500 MB; here by ours, once."""
    import gguf

    def read(path: str) -> Any:
        header = read_header(Path(path), facts=True)
        return SimpleNamespace(fields=header.facts, tensors=[SimpleNamespace(name=name) for name in header.tensors])

    with patch.object(gguf, "GGUFReader", cache(read)):
        yield


def _usual(config: Any) -> bool:
    return config.model_type in ("llama", "qwen2", "qwen3", "mistral") and not hasattr(config, "quantization_config")


def _built(config: Any, tokenizer: Any, tensors: Tensors, folder: Path | None) -> Skeleton | None:
    """None where the files do not hold just what the model's code asks for."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if folder is not None and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    elif folder is None and model.generation_config.eos_token_id is None and tokenizer is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    wanted = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    have = dict(tensors.shapes)
    if config.tie_word_embeddings:
        have.pop("lm_head.weight", None)
    if wanted != have:
        return None
    matrices = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)
    }
    for name, shape in wanted.items():
        if name not in matrices:
            owner, _, key = name.rpartition(".")
            values = torch.from_numpy(np.array(tensors.rows(name, 0, shape[0]), dtype=np.float32))
            setattr(model.get_submodule(owner), key, nn.Parameter(values, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its table is worked out, not stored
    model.name_or_path = "" if folder is None else str(folder)
    return Skeleton(model.eval().requires_grad_(False), tokenizer, tensors)
