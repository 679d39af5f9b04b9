"""One way to a ready model: the embedded name, a hub id, a folder, a .gguf file or a model already loaded.

Every failure that a user can cause becomes one line with its remedy; a hub that cannot be reached is noticed at once.
Does not judge whether a runtime can decode the architecture exactly: the target does.
"""

from __future__ import annotations

import logging
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from outrider.core.errors import InputError, MissingExtra, OutriderError, UnknownName, UnsupportedModel, did_you_mean
from outrider.models import embedded, hub
from outrider.models.convert import converted, folder_for
from outrider.models.files.skeleton import PICKED, fingerprint_of
from outrider.models.loaded import LoadedModel as LoadedModel
from outrider.models.networks.announced import announce
from outrider.models.quiet import first_line, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16, "float64": torch.float64, "fp64": torch.float64,
}  # fmt: skip
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the files are: a local folder, or a hub id."""

    name: str
    path: str
    local: bool
    dequantised: bool = False


def load_model(
    source: str | PathLike[str] | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    distributed: Any = None,
) -> LoadedModel:
    """Device: a GPU where there is one. Dtype: float32 on a CPU, on a GPU the checkpoint's own (bfloat16 for GGUF).

    A loaded model stays where and as it is unless `device` or `dtype` is given; it is put into evaluation mode.
    `distributed` is a `transformers` DistributedConfig: of the weights only this process's part is kept.
    """
    wanted = None if dtype is None else parse_dtype(dtype)
    if is_model(source):
        if revision is not None:
            raise InputError("revision has no meaning for a model that is already loaded; leave it out")
        model = source
        if device is not None:
            _move(model, parse_device(device))
        if wanted is not None:
            _move(model, wanted)
        name = source.name_or_path or type(source).__name__
        return _ready(model, tokenizer or _tokenizer_of(source, trust_remote_code), name)

    at = default_device() if device is None else parse_device(device)
    place = _find(source)
    if revision is not None and place.local:
        raise InputError(f"revision {revision!r} has no meaning for the local model {place.name!r}; leave it out")
    if wanted is None and (at.type == "cpu" or place.dequantised):
        wanted = torch.float32 if at.type == "cpu" else torch.bfloat16
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if not place.local:
        common |= {"revision": revision, "local_files_only": not hub.reachable()}
    spread = {} if distributed is None else {"distributed_config": distributed}
    from transformers import AutoModelForCausalLM

    announce(place.path)
    with quiet_transformers() if place.local else nullcontext():
        try:
            model = AutoModelForCausalLM.from_pretrained(place.path, dtype=wanted or "auto", **common, **spread)
        except Exception as error:
            raise _explain(error, place, offline=common.get("local_files_only", False)) from error
        tokenizer = tokenizer or _load_tokenizer(place, common)
    model.requires_grad_(False)
    if not spread and model.device != at:
        _move(model, at)
    return _ready(model, tokenizer, place.name)


def _move(model: PreTrainedModel, to: torch.device | torch.dtype) -> None:
    """To a device or a dtype, which not every quantised model can be moved to."""
    try:
        model.to(to)  # type: ignore[arg-type]
    except ValueError as error:
        raise InputError(
            f"the model cannot be moved to {to} ({first_line(error)}); load it there with transformers and give that"
        ) from error


def is_model(source: object) -> TypeGuard[PreTrainedModel]:
    """A model of transformers, which without its class imported it cannot be; importing that takes seconds."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(source, library.PreTrainedModel)


def load_tokenizer(source: str | PathLike[str], *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that `load_model` would load, without its weights."""
    place = _find(source)
    announce(place.path)
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if not place.local:
        common["local_files_only"] = not hub.reachable()
    with quiet_transformers() if place.local else nullcontext():
        try:
            tokenizer = _load_tokenizer(place, common)
        except InputError as error:
            if place.local or not isinstance(error.__cause__, OSError):
                raise
            raise _explain(error.__cause__, place, offline=common["local_files_only"]) from error
    if tokenizer is None:
        raise InputError(f"the model {place.name!r} comes without a tokenizer; name one that has it")
    return tokenizer


def check_source(source: str) -> None:
    """Refuse what cannot be a model, without loading it; whether a hub knows an id is only found out by asking."""
    text, path = str(source), Path(source).expanduser()
    if text == embedded.NAME:
        return
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"no file {text!r}; give the path of an existing .gguf file")
        return
    if text and path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"the folder {text!r} has no config.json; give the folder of a transformers model")
        return
    if path.is_file():
        raise InputError(f"{text!r} is a file; give a model folder, a .gguf file, a hub id or {embedded.NAME!r}")
    if not HUB_ID.fullmatch(text) or text.startswith("."):
        raise InputError(f"no folder {text!r}; give a model folder, a .gguf file, a hub id or {embedded.NAME!r}")


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parse_device(device: str | torch.device) -> torch.device:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"no device {device!r}; use cpu, cuda, cuda:0 or mps") from error
    missing = (
        (parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count())
        or (parsed.type == "mps" and not torch.backends.mps.is_available())
    )  # fmt: skip
    if missing:
        raise InputError(f"device {str(parsed)!r} is not on this machine; use {default_device().type}")
    return parsed


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if isinstance(dtype, str) and (known := DTYPES.get(dtype.removeprefix("torch."))) is not None:
        return known
    names = [name for name in DTYPES if "float" in name]
    raise InputError(f"no dtype {str(dtype)!r}; {did_you_mean(dtype, names)}use one of {', '.join(names)}")


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The ids that end a text, as `transformers` decides: the generation config's, the model's, the tokenizer's."""
    for owner in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else map(int, ids))
    return frozenset()


def fingerprint(model: PreTrainedModel) -> str:
    """A short name for these weights; see `fingerprint_of`."""

    def picked(_: str, weight: Tensor) -> Tensor:
        if not weight.is_floating_point() or weight.is_meta:
            return torch.empty(0)
        flat = _whole(weight.detach()).reshape(-1)
        return flat[:: max(1, flat.numel() // PICKED)][:PICKED]

    return fingerprint_of(model, picked)


def is_part(weight: Tensor) -> bool:
    """Whether other processes hold the rest of this weight (a DTensor, whose module takes long to import)."""
    return hasattr(weight, "full_tensor")


def _whole(weight: Tensor) -> Tensor:
    """The weight put together from its parts, which every rank must ask for; itself where it is whole."""
    return weight.full_tensor() if is_part(weight) else weight  # type: ignore[attr-defined]


def local_path(source: str | PathLike[str]) -> str:
    """The folder of a model that `load_model` would load, or its hub id."""
    return _find(source).path


def _ready(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> LoadedModel:
    model.eval()
    return LoadedModel(model, tokenizer, name, eos_ids(model, tokenizer), fingerprint(model))


def local_place(source: str | PathLike[str]) -> Path | None:
    """The folder or GGUF file of a model on this machine, fetched if it is the embedded one; None of others."""
    text, path = str(source), Path(source).expanduser()
    if text == embedded.NAME:
        return embedded.files()
    return path if path.suffix == ".gguf" or (text and path.is_dir()) else None


def _find(source: str | PathLike[str]) -> _Place:
    text = str(source)
    check_source(text)
    path = Path(text).expanduser()
    if text == embedded.NAME:
        return _Place(text, str(embedded.embedded_model()), local=True, dequantised=True)
    if path.suffix == ".gguf":
        folder = converted(folder_for(path), lambda scratch, progress: path)
        return _Place(path.stem, str(folder), local=True, dequantised=True)
    if text and path.is_dir():
        return _Place(path.resolve().name, str(path), local=True)
    return _Place(text, text, local=False)


def _load_tokenizer(place: _Place, common: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    """None where the model comes without one: token ids still work, text does not."""
    if place.local and not any((Path(place.path) / file).is_file() for file in TOKENIZER_FILES):
        logger.info("%s has no tokenizer files", place.name)
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place.path, **common)
    except ImportError as error:
        raise MissingExtra(f"the tokenizer of {place.name!r} needs a package: {first_line(error)}") from error
    except Exception as error:
        raise InputError(
            f"the tokenizer of {place.name!r} cannot be loaded ({first_line(error)}); pass tokenizer="
        ) from error


def _tokenizer_of(model: PreTrainedModel, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies beside a loaded model, where its origin is known and at hand; never a download."""
    origin = model.name_or_path
    if not origin:
        return None
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(origin, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        logger.info("no tokenizer for %s: %s", origin, first_line(error))
        return None


def _explain(error: Exception, place: _Place, offline: bool) -> OutriderError:
    """The error of a failed load, as one line with the remedy."""
    reason = first_line(error)
    if isinstance(error, ImportError):
        return MissingExtra(f"loading {place.name!r} needs a package: {reason}")
    if "trust_remote_code" in str(error):
        return InputError(f"{place.name!r} brings its own code; read it, then pass trust_remote_code=True")
    if not place.local and isinstance(error, OSError):
        why = f"the hub {hub.endpoint()} could not be reached and it is not in the local cache" if offline else reason
        return UnknownName(
            f"no model {place.name!r}: {why}; the embedded model {embedded.NAME!r} works without a hub, and so does a "
            "model folder or .gguf file"
        )
    if isinstance(error, ValueError | KeyError) and "nrecognized" in str(error):
        return UnsupportedModel(f"{place.name!r} is no causal language model that transformers knows: {reason}")
    return InputError(f"the model {place.name!r} cannot be loaded ({reason}); check its config.json and weight files")
