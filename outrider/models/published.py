"""Published EAGLE-3 drafters: folders for vLLM and SGLang, and those of the `speculators` package, as drafters of ours.

Every name, shape and setting is checked against the format and the target: an engine that skips what it does not know
drafts nonsense at full speed. Weights keep their precision; draft ids are put in rising order. What our layer does not
compute (biases, several layers, other norms, other rotary functions) is refused with the reason.

Layer ids: ours and those at the top of the config mean the input of layer i. The same name inside `eagle_config` means
the output of the layer named (SGLang), so one is added. Without either they are 2, n // 2 and n - 3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from outrider.core.errors import InputError
from outrider.models import hub
from outrider.models.drafts import CARD, MAP, DraftCard
from outrider.models.load import HUB_ID, LoadedModel

CONFIG, KIND, LAYER_IDS = "config.json", "eagle3", "eagle_aux_hidden_state_layer_ids"
SAID, EMBEDDINGS = "t2d", "embed_tokens.weight"
ARCHITECTURES = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator",
)  # fmt: skip
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # of the layer: those whose norms and gates are Llama's
FLAGS = {
    "attention_bias": "its attention has biases", "bias": "its layers have biases", "mlp_bias": "its MLP has biases",
    "norm_before_fc": "it norms the features before fusing them", "fc_norm": "it norms the features before fusing them",
    "norm_output": "it goes on from normed states", "quantization_config": "its weights are quantised",
}  # fmt: skip
ALIKE = 0.1  # relative difference of embeddings that are the target's, but for the rounding of either
Tensors = dict[str, Tensor]
Config = Mapping[str, Any]


def find_published(named: str, revision: str | None = None) -> Path:
    """A local folder, or the files of a hub id."""
    path = Path(named).expanduser()
    if path.is_dir():
        return path
    if path.exists() or not HUB_ID.fullmatch(named) or named.startswith("."):
        raise InputError(f"no folder {named!r}; give a drafter's folder or a hub id such as owner/name")
    folder = hub.snapshot(named, ("*.json", "*.safetensors"), revision)
    if not any(folder.glob("*.safetensors")):
        folder = hub.snapshot(named, ("*.json", "pytorch_model*.bin"), revision)
    return folder


def target_name(folder: Path) -> str:
    """What a `speculators` folder says its target is called; empty for one that does not say."""
    about = _config(folder).get("speculators_config") or {}
    return str((about.get("verifier") or {}).get("name_or_path") or "")


def read_published(folder: Path, target: LoadedModel) -> tuple[Tensors, DraftCard]:
    """The tensors and the card of a drafter of ours; refused where it is not the same network for this target."""
    config = _config(folder)
    try:
        return _read(folder, config, config.get("transformer_layer_config", config), target)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # a field that is missing or of another type
        if isinstance(error, InputError):
            raise
        _refuse(
            folder, f"{CONFIG} {'lacks' if isinstance(error, KeyError) else 'cannot be used:'} {error}; fetch it again"
        )


def _read(folder: Path, config: Config, layer: Config, target: LoadedModel) -> tuple[Tensors, DraftCard]:
    _check_kind(folder, config, layer)
    shape = _shape(folder, config, layer, target)
    stored = {_name_here(name): tensor for name, tensor in _tensors(folder).items()}
    stored = {name: tensor for name, tensor in stored.items() if name}
    ids = _ids(folder, stored, target)
    _check_embeddings(folder, stored.pop(EMBEDDINGS, None), target)
    if (listed := int(config.get("draft_vocab_size") or layer["vocab_size"])) != len(ids):
        _refuse(folder, f"its head says {len(ids):,} tokens, {CONFIG} {listed:,}")
    shape["vocab"] = len(ids)
    _check_tensors(folder, stored, shape)
    order = ids.argsort()
    ids = ids[order]
    stored["lm_head.weight"] = stored["lm_head.weight"][order].contiguous()
    stored[MAP] = ids - torch.arange(len(ids))
    recipe = {"published": {key: value for key, value in config.items() if key != "transformer_layer_config"}}
    layers = tuple(shape["layers"])
    return stored, DraftCard(target.name, target.fingerprint, layers, recipe, kind=KIND, shape=shape)


def _refuse(folder: Path, why: str) -> NoReturn:
    raise InputError(f"{folder}: {why}")


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except OSError:
        _refuse(folder, f"no drafter here (neither {CARD} nor {CONFIG}); give the folder of an EAGLE-3 drafter")
    except ValueError as error:
        _refuse(folder, f"{CONFIG} cannot be read ({error}); fetch it again")
    if not isinstance(config, dict):
        _refuse(folder, f"{CONFIG} is not the config of a drafter; fetch it again")
    return config


def _check_kind(folder: Path, config: Config, layer: Config) -> None:
    names = config.get("architectures") or [""]
    if config.get("speculators_model_type", KIND) != KIND or names[0] not in ARCHITECTURES:
        what = config.get("speculators_model_type") or names[0] or "of an unknown architecture"
        _refuse(folder, f"it is {what}; only EAGLE-3 drafters can be added ({', '.join(ARCHITECTURES)})")
    for flag, why in FLAGS.items():
        if config.get(flag) or layer.get(flag):
            _refuse(folder, f"{why} ({flag} in {CONFIG}), which our layer does not have")
    if (count := int(layer.get("num_hidden_layers") or 1)) != 1:
        _refuse(folder, f"it has {count} layers; only drafters of one layer can be added")
    if layer.get("model_type", "llama") not in FAMILIES:
        _refuse(folder, f"its layer is one of {layer['model_type']}; known are {', '.join(FAMILIES)}")
    if layer.get("hidden_act", "silu") not in ("silu", "swish"):
        _refuse(folder, f"its MLP is gated by {layer['hidden_act']}; only silu is known")
    if float(config.get("logit_scale") or 1.0) != 1.0:
        _refuse(folder, f"its logits are scaled by {config['logit_scale']}, which our layer does not do")
    if not (config.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        _refuse(
            folder, "it reads the target's last features only, as EAGLE-1 and EAGLE-2 do; only EAGLE-3 can be added"
        )


def _tensors(folder: Path) -> Tensors:
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        _refuse(folder, "has no weights (*.safetensors or pytorch_model*.bin); fetch it again")
    found: Tensors = {}
    for file in files:
        try:
            read = load_file if file.suffix == ".safetensors" else _load_plain
            found |= read(file)
        except Exception as error:  # whatever bytes are in it
            if isinstance(error, OSError | SafetensorError | RuntimeError | ValueError | EOFError):
                _refuse(folder, f"{file.name} cannot be read ({error}); fetch it again")
            raise
    return found


def _load_plain(file: Path) -> Tensors:
    return torch.load(file, map_location="cpu", weights_only=True)  # tensors only: no code is run


def _name_here(name: str) -> str:
    """As our layer calls it; empty for what is no weight of it."""
    name = name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)
    return "" if name.endswith("rotary_emb.inv_freq") or name.startswith("verifier_") else name


def _ids(folder: Path, stored: Tensors, target: LoadedModel) -> Tensor:
    """The target's id of each draft id. Changes `stored`: both maps are taken out of it."""
    head = stored.get("lm_head.weight")
    if head is None or head.ndim != 2:
        _refuse(folder, "has no lm_head.weight: a drafter that borrows the target's head cannot be added")
    vocab, said = int(target.model.config.get_text_config().vocab_size), len(head)
    offsets, known = stored.pop(MAP, None), stored.pop(SAID, None)
    if offsets is None and said != vocab:
        _refuse(folder, f"its head says {said:,} tokens, the target {vocab:,}, and there is no {MAP} to map them")
    ids = torch.arange(said) + (0 if offsets is None else _whole(folder, offsets, said))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        worst = int(ids.max() if ids.max() >= vocab else ids.min())
        _refuse(folder, f"{MAP} leads to token {worst}, the target has 0..{vocab - 1}; it belongs to another model")
    if len(ids.unique()) < said:
        _refuse(folder, f"{MAP} leads to one token twice; it holds offsets from the draft's ids to the target's")
    if known is not None and (len(known) != vocab or not torch.equal(known.bool().nonzero()[:, 0], ids.sort().values)):
        _refuse(folder, f"{SAID} names other tokens than {MAP}, or another vocabulary; fetch it again")
    return ids


def _whole(folder: Path, offsets: Tensor, said: int) -> Tensor:
    if offsets.is_floating_point() or tuple(offsets.shape) != (said,):
        _refuse(folder, f"{MAP} has the shape {tuple(offsets.shape)}, its head {said:,} tokens; fetch it again")
    return offsets.long()


def _check_embeddings(folder: Path, theirs: Tensor | None, target: LoadedModel) -> None:
    """A copy of the target's is not needed; others would be needed, and a drafter here reads the target's."""
    if theirs is None:
        return
    ours = target.model.get_input_embeddings().weight.detach().cpu().float()
    if theirs.shape != ours.shape or float((theirs.float() - ours).norm()) > ALIKE * float(ours.norm()):
        _refuse(
            folder, f"its embeddings are not those of {target.name!r}; name the model it was trained for with --model"
        )


def _shape(folder: Path, config: Config, layer: Config, target: LoadedModel) -> dict[str, Any]:
    """All that the config says of the network; the size of its vocabulary is that of its head."""
    theirs = target.model.config.get_text_config()
    hidden, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
    sizes = {
        "hidden": hidden, "heads": heads, "kv_heads": int(layer.get("num_key_value_heads") or heads),
        "head_dim": int(layer.get("head_dim") or hidden // heads), "intermediate": int(layer["intermediate_size"]),
    }  # fmt: skip
    vocab, features = int(layer["vocab_size"]), int(config.get("target_hidden_size") or hidden)
    wanted = int(theirs.hidden_size)
    if (hidden, features) != (wanted, wanted):
        other = hidden if hidden != wanted else features
        _refuse(
            folder, f"its hidden size is {other}, that of {target.name!r} {wanted}; name the model it was trained for"
        )
    if vocab != int(theirs.vocab_size):
        _refuse(
            folder, f"its vocabulary is {vocab:,}, that of {target.name!r} {int(theirs.vocab_size):,}; name its model"
        )
    theta, scaling = _rotary(folder, layer)
    return {
        **sizes, "layers": _layer_ids(folder, config, int(theirs.num_hidden_layers)), "theta": theta,
        "eps": float(layer.get("rms_norm_eps") or 1e-6), "rank": 0,
        "normed": bool(config.get("norm_before_residual")), "scaling": scaling,
    }  # fmt: skip


def _layer_ids(folder: Path, config: Config, total: int) -> list[int]:
    inside = (config.get("eagle_config") or {}).get(LAYER_IDS) or []
    ids = config.get(LAYER_IDS) or [int(layer) + 1 for layer in inside] or [2, total // 2, total - 3]
    ids = [int(layer) for layer in ids]
    if not all(0 <= layer <= total for layer in ids):
        _refuse(folder, f"it reads the inputs of layers {', '.join(map(str, ids))}; the target has 0..{total}")
    return ids


def _rotary(folder: Path, layer: Config) -> tuple[float, list[float]]:
    """The base, and how frequencies are scaled, if they are."""
    given = {**(layer.get("rope_scaling") or {}), **(layer.get("rope_parameters") or {})}
    theta = float(given.get("rope_theta") or layer.get("rope_theta") or 10_000.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    if float(given.get("partial_rotary_factor") or layer.get("partial_rotary_factor") or 1.0) != 1.0:
        _refuse(folder, "it turns only a part of each head by position, which our layer does not do")
    if kind in ("default", "mrope"):  # for text the three positions of mrope are one
        return theta, []
    if kind != "llama3":
        _refuse(folder, f"its rotary positions are of the type {kind}; known are default and llama3")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return theta, [float(given[name]) for name in names if name in given or _refuse(folder, f"its rotary lacks {name}")]


def _check_tensors(folder: Path, stored: Tensors, shape: Mapping[str, Any]) -> None:
    d, mid, count = shape["hidden"], shape["intermediate"], len(shape["layers"])
    wide, narrow = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    wanted = {"fc.weight": (d, count * d), "norm.weight": (d,), "lm_head.weight": (shape["vocab"], d)} | {
        f"midlayer.{name}.weight": size for name, size in {
            "self_attn.q_proj": (wide, 2 * d), "self_attn.k_proj": (narrow, 2 * d), "self_attn.v_proj": (narrow, 2 * d),
            "self_attn.o_proj": (d, wide), "mlp.gate_proj": (mid, d), "mlp.up_proj": (mid, d),
            "mlp.down_proj": (d, mid), "input_layernorm": (d,), "hidden_norm": (d,), "post_attention_layernorm": (d,),
        }.items()
    }  # fmt: skip
    unknown, missing = sorted(stored.keys() - wanted.keys()), sorted(wanted.keys() - stored.keys())
    if any(name.endswith(".bias") for name in unknown):
        _refuse(
            folder, f"it has biases ({', '.join(n for n in unknown if n.endswith('.bias'))}), which our layer has not"
        )
    if any(name.startswith("layers.") for name in unknown):
        _refuse(folder, "it has several layers; only drafters of one layer can be added")
    if unknown:
        _refuse(folder, f"it has tensors that are not of the format: {', '.join(unknown)}")
    if missing:
        _refuse(folder, f"it lacks {', '.join(missing)}; fetch it again")
    for name, size in wanted.items():
        if tuple(stored[name].shape) != size:
            _refuse(folder, f"{name} has the shape {tuple(stored[name].shape)}, {CONFIG} and the target ask for {size}")
        if stored[name].dtype not in (torch.float32, torch.bfloat16, torch.float16):
            _refuse(
                folder, f"{name} is stored as {stored[name].dtype}; only float32, bfloat16 and float16 can be added"
            )
