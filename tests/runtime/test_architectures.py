"""Every architecture: the logits of a random tree equal independent forwards of the unmodified model over its paths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from outrider.core.records import Needs
from outrider.core.tree import TokenTree, fixed
from outrider.runtime import slots
from outrider.runtime.eager.cache import SlotCache
from outrider.runtime.passes import Block, Pass, tree_block
from outrider.runtime.targets import eager_target
from tests.runtime.running import run_text, run_trees

CONTEXT, VOCAB, WINDOW = 48, 61, 7
CAUGHT = 1e-2  # a planted bug shows by more than this
NEAR_TIE = 1e-4  # of scores of experts; two passes differ by less
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.3, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LOCAL_AND_GLOBAL = {
    "sliding_window": WINDOW, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, **LOCAL_AND_GLOBAL}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}

# name -> (class, what its configuration adds to COMMON)
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-dynamic-rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "attn_implementation": "eager"}),  # sdpa has no caps
    "gemma3": ("Gemma3", GEMMA),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": WINDOW}),
    "phi3-long-rope": (
        "Phi3",
        {
            "max_position_embeddings": 4 * CONTEXT,
            "original_max_position_embeddings": CONTEXT,
            "rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": CONTEXT},
        },
    ),
    "gpt2": ("GPT2", {}),
    "gpt2-eager-upcast": (
        "GPT2",
        {"attn_implementation": "eager", "reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
    ),
    "opt": ("OPT", {"ffn_dim": 40, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "gpt-neox": ("GPTNeoX", {}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.7}),
    "falcon": ("Falcon", {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-multi-query": ("Falcon", {"alibi": False, "multi_query": True, "new_decoder_architecture": False}),
    "falcon-alibi": ("Falcon", {"alibi": True, "multi_query": False, "new_decoder_architecture": False}),
    "falcon-eager": ("Falcon", {"alibi": False, "attn_implementation": "eager"}),
    "falcon-alibi-eager": ("Falcon", {"alibi": True, "multi_query": True, "attn_implementation": "eager"}),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "mixtral": ("Mixtral", EXPERTS),
    "qwen3-moe": (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "gpt-oss": ("GptOss", {"head_dim": 8, **EXPERTS, **LOCAL_AND_GLOBAL}),
}  # fmt: skip

# As above, walked more briefly: architectures that only the eager runtime is tested with.
FEW_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {**FEW_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
          "topk_group": 1}  # fmt: skip
LATENT = {**ROUTED, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
          "v_head_dim": 12, "num_key_value_heads": 4}  # fmt: skip
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
BART = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40, "init_std": 0.3,
        "is_decoder": True, "is_encoder_decoder": False}  # fmt: skip
GPT_NEO = {"num_layers": 2, "num_heads": 4, "window_size": WINDOW}
MPT = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT}
TEMPERATURE = {  # its rows change at every fifth position, those without rotary positions
    "head_dim": 8, "intermediate_size_mlp": 40, "num_local_experts": 4, "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": WINDOW, "attn_temperature_tuning": True, "floor_scale": 5, "attn_scale": 2.0,
}  # fmt: skip
SHARED_KEYS = {
    "head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 8,
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}  # fmt: skip
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("Apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "arcee": ("Arcee", {}),
    "bart": ("Bart", BART),
    "biogpt": ("BioGpt", {}),
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 2, "max_position_embeddings": CONTEXT}),
    "codegen": ("CodeGen", {**GPT, "n_ctx": CONTEXT, "rotary_dim": 4}),
    "deepseek-v2": ("DeepseekV2", {**LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "dots1": ("Dots1", {**ROUTED, "head_dim": 8, **LOCAL_AND_GLOBAL}),
    "ernie4-5": ("Ernie4_5", {}),
    "ernie4-5-moe": (
        "Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1},
    ),
    "exaone4": ("Exaone4", LOCAL_AND_GLOBAL),
    "gemma3n": ("Gemma3n", SHARED_KEYS),
    "glm4": ("Glm4", {"head_dim": 8}),
    "gpt-neo": ("GPTNeo", {**GPT_NEO, "attention_types": [[["global"], 2]]}),
    "gpt-neo-local": ("GPTNeo", {**GPT_NEO, "attention_types": [[["global", "local"], 1]]}),
    "gptj": ("GPTJ", {**GPT, "rotary_dim": 4}),
    "helium": ("Helium", {"head_dim": 8}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 8}),
    "llama4": ("Llama4", TEMPERATURE),
    "mpt": ("Mpt", MPT),
    "mpt-without-alibi": ("Mpt", {**MPT, "attn_config": {"alibi": False}}),
    "nemotron": ("Nemotron", {}),
    "olmo3": ("Olmo3", LOCAL_AND_GLOBAL),
    "persimmon": ("Persimmon", {}),
    "phi": ("Phi", {}),
    "qwen2-moe": ("Qwen2Moe", {**FEW_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}),
    "roformer": ("RoFormer", {"is_decoder": True, "embedding_size": 32}),
    "seed-oss": ("SeedOss", {"head_dim": 8}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "stablelm": ("StableLm", {}),
    "starcoder2-window": ("Starcoder2", {"sliding_window": WINDOW}),
    "xglm": ("XGLM", {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 40, "init_std": 0.3}),
}  # fmt: skip
WINDOWED = [
    name for name, (_, extra) in {**ZOO, **MORE}.items() if {"sliding_window", "attention_chunk_size"} & extra.keys()
]

# A seed does not get simpler by shrinking.
QUICK = settings(
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.differing_executors],
)


@cache
def build(name: str) -> Any:
    kind, extra = {**ZOO, **MORE}[name]
    text_only = kind in ("Gemma3", "Gemma3n", "Llama4")
    config_class = getattr(transformers, f"{kind}TextConfig" if text_only else f"{kind}Config")
    model_class = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    torch.manual_seed(0)
    model = model_class(config_class(**{**COMMON, **extra})).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases start at 1 and 0, where a mix-up would not show
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def random_tree(rng: np.random.Generator, pending: int, nodes: int, depth: int) -> TokenTree:
    """Children of one node may carry the same token: positions and masks are all that is tested here."""
    parents, depths = [-1], [0]
    for _ in range(nodes):
        parent = int(rng.choice([i for i, d in enumerate(depths) if d < depth] or [-1]))
        if parent >= 0:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    tokens = rng.integers(0, VOCAB, len(parents))
    tokens[0] = pending
    return fixed(tokens, np.array(parents))


@torch.no_grad()
def largest_difference(model: Any, texts: list[list[int]], trees: list[TokenTree], logits: list[torch.Tensor]) -> float:
    """Against one forward of the unmodified model over every root-to-leaf path of every tree, without a cache.

    Behind a near tie of a router nothing is compared: there rounding chooses the expert, in the model as here.
    """
    paths = [(i, leaf) for i, t in enumerate(trees) for leaf in sorted({*range(len(t))} - {*t.parents.tolist()})]
    full = [texts[i] + trees[i].path_tokens(leaf) for i, leaf in paths]
    width = max(map(len, full))
    tokens = torch.tensor([t + [0] * (width - len(t)) for t in full], device=model.device)
    with routing_margins() as margins:
        plain = model(tokens, use_cache=False).logits
    clear = torch.ones(tokens.shape, dtype=torch.bool, device=model.device)
    for margin in margins:
        if margin.numel() == tokens.numel():
            clear &= margin.view(tokens.shape) > NEAR_TIE
    clear = clear.cummin(-1).values
    differences = [torch.zeros((), device=model.device)]
    for row, (i, leaf) in enumerate(paths):
        nodes = [0, *trees[i].path(leaf)]
        behind = slice(len(texts[i]) - 1, len(full[row]))
        worst = (logits[i][nodes] - plain[row, behind]).abs().amax(-1)
        differences.append(worst.where(clear[row, behind], 0.0).max())
    return torch.stack(differences).max().item()  # keeps a nan, as max() of Python does not


@contextmanager
def routing_margins() -> Iterator[list[torch.Tensor]]:
    """By how much each choice of the best few, as routers make it, beats the first that is left out."""
    margins: list[torch.Tensor] = []
    right = torch.topk

    def watched(scores: torch.Tensor, k: int, *args: Any, **more: Any) -> Any:
        if scores.shape[-1] > k:
            best = right(scores, k + 1).values
            margins.append(best[..., k - 1] - best[..., k])
        return right(scores, k, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", watched)
        yield margins


def walk(
    model: Any, *, batch: int, seed: int, steps: int, chunk: int, nodes: int = 7, runtime: Any = eager_target,
    enough: float = float("inf"),
) -> float:  # fmt: skip
    """Decode random texts with random trees and random acceptance up to the end of the context; the worst difference.

    A slot that is full is released and takes a new text, so the cache is reused while others go on. Ends at once where
    a difference is more than `enough`: a planted bug has shown.
    """
    rng = np.random.default_rng(seed)
    target = runtime(model, max_slots=batch, prompt_rows=chunk, max_rows=nodes + 1)
    assert target.max_context == CONTEXT
    texts: dict[int, list[int]] = {}
    differences: list[float] = []
    ends = 0
    while len(differences) < steps or not ends:
        fresh = [target.acquire() for _ in range(target.free_slots)]
        texts |= {slot: rng.integers(0, VOCAB, rng.integers(1, 2 * WINDOW)).tolist() for slot in fresh}
        run_text(target, fresh, [texts[s] for s in fresh], Needs())
        slots = list(texts)
        rng.shuffle(slots)
        trees = []
        for s in slots:
            assert target.length(s) == len(texts[s]) - 1
            trees.append(random_tree(rng, texts[s][-1], int(rng.integers(0, nodes + 1)), CONTEXT - len(texts[s])))
        scores = run_trees(target, slots, trees, Needs())
        rows = [s.logits for s in scores]
        differences.append(largest_difference(model, [texts[s] for s in slots], trees, rows))
        if differences[-1] > enough:
            break
        paths = [t.path(int(rng.integers(0, len(t)))) for t in trees]
        target.commit(slots, paths)
        for s, tree, path in zip(slots, trees, paths, strict=True):
            texts[s] += [int(tree.tokens[n]) for n in path] + [int(rng.integers(0, VOCAB))]
            if len(texts[s]) > CONTEXT:
                target.release(s)
                del texts[s]
                ends += 1
    return float(np.max(differences))


@pytest.mark.parametrize("name", ZOO)
@settings(QUICK, max_examples=2)
@given(seed=st.integers(0, 2**32), chunk=st.integers(1, 64))
def test_ragged_batch_of_trees_equals_independent_forwards(name: str, seed: int, chunk: int) -> None:
    assert walk(build(name), batch=5, seed=seed, steps=20, chunk=chunk) < 1e-4


@pytest.mark.parametrize("name", ZOO)
@settings(QUICK, max_examples=2)
@given(seed=st.integers(0, 2**32), chunk=st.integers(1, 64))
def test_single_sequence_equals_independent_forwards(name: str, seed: int, chunk: int) -> None:
    assert walk(build(name), batch=1, seed=seed, steps=20, chunk=chunk) < 1e-4


@pytest.mark.parametrize("name", MORE)
def test_more_architectures_equal_independent_forwards(name: str) -> None:
    assert walk(build(name), batch=5, seed=1, steps=16, chunk=13) < 1e-4
    assert walk(build(name), batch=1, seed=2, steps=8, chunk=64) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ZOO, *MORE])
@settings(QUICK, max_examples=30, derandomize=False)
@given(seed=st.integers(0, 2**32), chunk=st.integers(1, 64), batch=st.integers(1, 6), nodes=st.integers(0, 24))
def test_many_random_walks(name: str, seed: int, chunk: int, batch: int, nodes: int) -> None:
    assert walk(build(name), batch=batch, seed=seed, steps=40, chunk=chunk, nodes=nodes) < 1e-4


# The test of the test: each planted bug must show, in every architecture that can have it.


def by_storage_order(*args: Any) -> Block:
    block = tree_block(*args)
    return replace(block, depths=np.arange(len(block.tokens)).clip(max=CONTEXT - 1 - block.length))


def seeing_siblings(*args: Any) -> Block:
    block = tree_block(*args)
    return replace(block, sees=np.tri(len(block.tokens), dtype=bool)[block.done :])


SHOWING = [*ZOO, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]


@pytest.mark.parametrize("name", SHOWING)
@pytest.mark.parametrize("bug", [by_storage_order, seeing_siblings])
def test_wrong_rows_are_caught(name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "tree_block", bug)
    assert walk(build(name), batch=2, seed=3, steps=3, chunk=16, enough=CAUGHT) > CAUGHT


@pytest.mark.parametrize("name", SHOWING)
def test_stale_cache_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotCache, "move", lambda *_: None)
    assert walk(build(name), batch=2, seed=3, steps=3, chunk=16, enough=CAUGHT) > CAUGHT


@pytest.mark.parametrize("name", WINDOWED)
def test_ignored_window_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pass, "restricted", lambda self, *_: self.mask)
    assert walk(build(name), batch=2, seed=3, steps=3, chunk=16, enough=CAUGHT) > CAUGHT
