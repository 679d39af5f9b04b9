"""Writes a small Llama as a GGUF file: what a user's own file looks like, without a download."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = ["<unk>", "<s>", "</s>", *map(chr, range(ord("a"), ord("z") + 1)), "Ġ", "ab", "th"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tiny_gguf_model(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def write_gguf(model: LlamaForCausalLM, path: Path, packed: bool) -> None:
    """`packed` stores the feed-forward weights as Q4_1 and puts the rounded values into `model` too."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for key, weight in model.named_parameters():
        name = names.get_name(key, try_suffixes=(".weight",))
        values = weight.numpy()
        for part, count in heads.items():
            if part in key:
                values = _interleaved(values, count)
        if packed and ".mlp." in key:
            blocks = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
            weight.copy_(torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q4_1)))
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF keeps the two halves of each rotary pair side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
