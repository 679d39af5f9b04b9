"""Methods whose drafter is a small network trained on the target's hidden states.

Without a drafter named, the user's newest for this target is used, else the one that comes with the package; where
there is none, the method is refused with the commands that train one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from outrider.errors import InputError
from outrider.methods import MethodInfo, Options, Parts, option
from outrider.protocols import Grower, Recipe, Role
from outrider.recipes.common import (
    AUTO,
    CONTROLLER_HELP,
    Candidates,
    ControllerName,
    VerifierName,
    budget_option,
    check_drafter,
    controller,
    cost_curve,
    no_drafter,
    told_if_compiling,
    verifier,
    wide_steps,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from outrider.draft.eagle3 import Eagle3Source, LoneLayer
    from outrider.draft.eagle3_layer import Eagle3Layer
    from outrider.draft.eagle3_recorded import Recording
    from outrider.draft.feature_cache import FeatureCache
    from outrider.models import LoadedModel

log = logging.getLogger("outrider")
A_DRAFTER = "a trained drafter (outrider train run)"
# Candidates: several at each depth where rows cost little, else one, so that `payoff` can choose small trees.
SOME, MANY = 6, 24


@dataclass(frozen=True, slots=True)
class TrainedOptions(Options):
    drafter: str = option(
        "", "a folder made by `outrider train run` or a name in `outrider drafters list`; empty: the target's newest"
    )
    budget: Candidates = budget_option(AUTO, f"most candidates a step; auto: {MANY} on a GPU, else {SOME}")
    depth: int = option(6, "how deep a tree may be", least=1)
    grower: Literal["auto", "topk", "dyspec", "cost-aware", "chain"] = option(
        "auto", "how the tree grows; auto: topk where nothing is drawn, else dyspec"
    )
    beam: int = option(10, "topk: nodes expanded at each depth", least=1)
    width: int = option(64, "how many of the likeliest tokens a draft row keeps", least=1)
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("recursive", "acceptance rule; the invariant one drafts without sampling")


def load_trained(kind: str, folder: Path, target: LoadedModel) -> Any:
    """The network in the target's precision, on its device."""
    from outrider.models.drafts import CARD, WEIGHTS, read_drafter, unpacked

    card, stored = read_drafter(folder, target, kind)
    shape, net, _ = _classes(kind)
    shared = () if kind == "eagle3" else (partial(target_head, target),)
    try:
        made = net.from_tensors(shape.from_dict(card.shape), unpacked(stored), *shared)
    except (KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"{folder}: {WEIGHTS} does not hold what {CARD} says ({error}); train it again") from error
    return made.to(target.device, target.model.dtype)


def load_eagle3(folder: Path, target: LoadedModel) -> Eagle3Layer:
    return load_trained("eagle3", folder, target)


def _classes(kind: str) -> tuple[Any, Any, Any]:
    """Of its shape, its network and its source."""
    if kind == "eagle3":
        from outrider.draft.eagle3 import Eagle3Source
        from outrider.draft.eagle3_layer import Eagle3Layer, Eagle3Shape

        return Eagle3Shape, Eagle3Layer, Eagle3Source
    if kind == "eagle2":
        from outrider.draft.eagle2 import Eagle2Layer, Eagle2Source
        from outrider.draft.eagle3_layer import Eagle3Shape

        return Eagle3Shape, Eagle2Layer, Eagle2Source
    if kind == "fspad":
        from outrider.draft.fspad import FspadLayer, FspadShape, FspadSource

        return FspadShape, FspadLayer, FspadSource
    from outrider.draft.medusa import HeadsShape, MedusaHeads, MedusaSource

    if kind == "medusa":
        return HeadsShape, MedusaHeads, MedusaSource
    from outrider.draft.hydra import HydraHeads, HydraSource

    return HeadsShape, HydraHeads, HydraSource


def target_head(target: LoadedModel, ids: Tensor, dtype: Any = None) -> nn.Linear:
    """The target's own head over these tokens: its very weights where they are all, else a copy of some.

    With a dtype it is frozen as well, and copied only where the target's is another.
    """
    from torch import nn

    whole = target.model.get_output_embeddings()
    every = len(ids) == len(whole.weight)
    head = nn.Linear(whole.weight.shape[1], len(ids), bias=whole.bias is not None, device="meta")
    for name, weight in whole.named_parameters(recurse=False):
        if not every or dtype is not None:
            own = weight if every else weight.detach()[ids.to(weight.device)]
            weight = nn.Parameter(own.detach().to(dtype or weight.dtype), requires_grad=False)
        setattr(head, name, weight)
    return head


def drafter_of(parts: Parts, kind: str, named: str) -> Any:
    """The network, loaded once for all methods of one target; refused with the remedy where there is none."""
    from outrider.models.kept import find_drafter

    if (kind, named) in parts.drafts:
        return parts.drafts[kind, named]
    folder = find_drafter(parts.loaded, kind, named)
    if folder is None:
        raise no_drafter(kind, repr(parts.loaded.name))
    return parts.drafts.setdefault((kind, named), load_trained(kind, folder, parts.loaded))


def kind_of(parts: Parts, named: str) -> str:
    """Of the drafter that is named, else the first kind of which the target has one; empty where there is none."""
    from outrider.models.kept import find_drafter

    if named:
        return kind_of_folder(named)
    return next((kind for kind in KINDS if find_drafter(parts.loaded, kind) is not None), "")


def kind_of_folder(named: str) -> str:
    """Of the drafter in this folder, or kept under this name."""
    from outrider.models.drafts import read_card
    from outrider.models.kept import named_folder

    kind = read_card(named_folder(named)).kind
    if kind not in KINDS:
        raise InputError(f"option drafter is {named!r}, a drafter of kind {kind}; use one of {', '.join(KINDS)}")
    return kind


def _build(kind: str, parts: Parts, options: TrainedOptions) -> Recipe:
    from torch import nn

    from outrider.draft.grown import Grown
    from outrider.target.packed import PackedLinears

    nodes = options.budget if isinstance(options.budget, int) else MANY if wide_steps(parts) else SOME
    net = drafter_of(parts, kind, options.drafter)
    deepest = getattr(net, "deepest", max(nodes, options.depth))  # heads: one a depth
    depth = min(nodes if options.grower == "chain" else options.depth, deepest)
    budget = controller(options.controller, min(nodes, depth) if options.grower == "chain" else nodes, depth)
    linears = PackedLinears(nn.ModuleList([net, *getattr(net, "shared", ())]), eight_bits=True)
    made = partial(_classes(kind)[2], net, parts.loaded.model.get_input_embeddings(), width=options.width,
                   active=linears.active)  # fmt: skip
    grower, sampled = _grower(parts, options, depth), options.verifier != "invariant"
    branch = min(_branch(options), options.width)
    if (cache := _recorded_cache(parts, kind, net, options, depth)) is not None:
        from outrider.draft.eagle3_recorded import Recorded

        make = recording_maker(beam=options.beam, branch=branch, device=parts.target.device, kept=parts.drafts)
        drafter: Grown = Recorded(
            made(cache=cache), grower, sampled, make=make, depth=depth, always=options.grower == "topk"
        )
    else:
        beside = parts.target.traits.own_threads
        source = made(lone=_lone_maker(parts, beside)) if kind == "eagle3" else made()
        drafter = Grown(source, grower, sampled, beside=beside)
    return Recipe(kind, drafter, verifier(options.verifier), budget)


def _lone_maker(parts: Parts, beside: bool) -> Callable[[Any], LoneLayer | None]:
    """Runs single sequences on kernels of our own; made once for all methods of one network.

    On the calling thread alone `beside` a target with threads of its own: theirs may still spin, and waking others for
    a millisecond of work costs more than it saves where cores are busy.
    """
    import torch

    from outrider.draft.eagle3_native import made_for
    from outrider.native.team import Team

    def make(net: Any) -> LoneLayer | None:
        if parts.drafts.get("lone", (None,))[0] is not net:
            team = Team(1 if beside else torch.get_num_threads())
            with told_if_compiling("the drafter"):
                parts.drafts["lone"] = net, made_for(net, team)
        return parts.drafts["lone"][1]

    return make


def _branch(options: TrainedOptions) -> int:
    return max(options.beam, 10)


def _recorded_cache(parts: Parts, kind: str, net: Any, options: TrainedOptions, depth: int) -> FeatureCache | None:
    """Room for all that a target's slots can hold, shared by the methods that draft with this network.

    None where drafts are not recorded: off CUDA, for growers other than top-k, for heads without a layer.
    """
    import torch

    from outrider.draft.eagle3 import Eagle3Source
    from outrider.draft.eagle3_recorded import MOST, TEXT, fits
    from outrider.draft.feature_cache import FeatureCache

    suits = issubclass(_classes(kind)[2], Eagle3Source) and options.grower in ("auto", "topk")
    if not suits or parts.target.device.type != "cuda" or find_spec("triton") is None:
        return None
    if not fits(options.beam, min(_branch(options), options.width), depth):
        return None
    key = ("cache", kind, options.drafter)
    if key not in parts.drafts:
        cache = FeatureCache(net.shape.kv_heads, net.shape.head_dim, net.fc.weight.dtype, net.fc.weight.device)
        try:
            cache.reserve(parts.target.traits.slots, parts.target.max_context + TEXT + MOST + 1)
        except torch.OutOfMemoryError:
            log.warning("drafts of %s are not recorded but made step by step: too little GPU memory", kind)
            return None
        parts.drafts[key] = cache
    return parts.drafts[key]


def recording_maker(
    *, beam: int, branch: int, device: torch.device, kept: dict[Any, Any] | None = None
) -> Callable[[Eagle3Source], Recording]:
    """Makes a source's recording, on the kernels of the runtime that records whole steps; off CUDA it only runs.

    One of each kind is `kept`: methods are made often, recording takes a while.
    """
    from outrider.draft.eagle3_recorded import Recording

    kept = {} if kept is None else kept

    def make(source: Eagle3Source) -> Recording:
        key = ("recorded", source.name, beam, branch)
        have = kept.get(key)
        if have is None or have.net is not source.net or have.cache is not source.cache:
            kept[key] = Recording(
                source.net, source.embed, source.cache, beam=beam, branch=branch, **_recording_on(device, source)
            )
        return kept[key]

    return make


def _recording_on(device: torch.device, source: Eagle3Source) -> dict[str, Any]:
    """Kernels, what surrounds a forward, and what records it."""
    import torch

    from outrider.target import graphed_reference as reference

    if device.type != "cuda":
        return {"ops": reference, "active": source.active, "record": None}
    from outrider.target.graphed import kernels
    from outrider.target.graphed_step import recorded

    ops = SimpleNamespace(**vars(kernels()), Layout=reference.Layout)
    pool = torch.cuda.graph_pool_handle()
    return {"ops": ops, "active": fused(source, ops), "record": partial(recorded, device=device, pool=pool)}


def fused(source: Eagle3Source, ops: Any) -> Callable[[], AbstractContextManager[None]]:
    """What surrounds a forward of the layer so that norms, projections and gates share launches."""
    import torch

    from outrider.target.graphed_fusion import Fusion

    net: Any = source.net
    shape = net.shape
    zeros = partial(torch.zeros, device=source.device, dtype=source.dtype)

    @torch.inference_mode()
    def probe() -> None:
        row = zeros((1, 2, shape.hidden))
        state = net.enter(row, net.fuse(zeros((1, 2, len(shape.layers) * shape.hidden))))
        query, _, _ = net.project(row, state, None)
        net.logits(net.finish(state, query))

    return Fusion(torch.nn.ModuleList([net, *getattr(net, "shared", ())]), ops, probe).active


def _grower(parts: Parts, options: TrainedOptions, depth: int) -> Grower:
    if options.grower == "chain":
        from outrider.grow.chain import Chain

        return Chain()
    if options.grower == "dyspec":
        from outrider.grow.dyspec import Threshold

        return Threshold(depth)
    if options.grower == "cost-aware":
        from outrider.grow.cost_aware import CostAware

        return CostAware(cost_curve(parts).seconds, length=parts.target.length, depth=depth)
    from outrider.grow.dyspec import Threshold
    from outrider.grow.either import Either
    from outrider.grow.topk import TopK

    ranked = TopK(beam=options.beam, branch=_branch(options), depth=depth)
    return ranked if options.grower == "topk" else Either(ranked, Threshold(depth))


def _method(kind: str, summary: str, paper: str, needs: str = A_DRAFTER) -> MethodInfo:
    build: Callable[[Parts, TrainedOptions], Recipe] = partial(_build, kind)

    def places(options: TrainedOptions) -> None:
        check_drafter(kind, options.drafter)

    return MethodInfo(
        kind, summary, paper, "feature", True, needs, TrainedOptions, build, f"draft/{kind}.py", places,
        role=Role.RUNS, samples=True,
    )  # fmt: skip


RECIPES = (
    _method("eagle3", "one trained layer goes on from the target's hidden states; a dynamic tree",
            "arXiv 2503.01840; arXiv 2406.16858", "a trained drafter (shipped for smollm2)"),
    _method("eagle2", "one trained layer guesses the target's next top feature, read by its own head; a dynamic tree",
            "arXiv 2406.16858; arXiv 2401.15077"),
    _method("fspad", "eagle2 with features sampled by the drawn token and logits freed from the guess",
            "arXiv 2408.15562"),
    _method("medusa", "trained heads each guess one token further ahead from the target's last feature",
            "arXiv 2401.10774"),
    _method("hydra", "trained heads, each told the tokens drafted before it", "arXiv 2402.05109"),
)  # fmt: skip
KINDS = tuple(info.name for info in RECIPES)
