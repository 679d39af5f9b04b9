"""Fusion: while a step is recorded, a model's own code runs on tensors that wait to see what is done with them.

A norm, a projection, a SiLU or a rotary embedding returns a `Lazy` tensor; when the next operation is one that a kernel
can do in the same launch (a projection of a norm, a residual added to a projection, one projection gating another) it
does, and any other operation gets the plain value. No architecture is known here: which projections share an input is
seen in a probe, and a norm or a rotary function is taken over only if it computes the usual formula on random numbers.
The model is touched for the time of the recording only, but for where its weights lie (`joined_weights`). Exact up to
rounding order; costs nothing once recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.runtime.cuda import reference
from outrider.runtime.cuda.joined_weights import Joined, join
from outrider.runtime.cuda.reference import Norm
from outrider.runtime.replaced import Replacement, replaced

ROTARY = "apply_rotary_pos_emb"  # the function by which transformers' models rotate queries and keys
MAX_JOINED = 3  # projections of one launch


@dataclass(frozen=True, slots=True)
class Normed:
    x: Tensor
    norm: Norm


@dataclass(frozen=True, slots=True)
class Product:
    family: Family
    which: int
    given: Tensor  # what the projection was called with: a Lazy norm, or plain


@dataclass(frozen=True, slots=True)
class Silu:
    product: Product


@dataclass(frozen=True, slots=True)
class Rotated:
    x: Tensor  # [B, H, R, D]
    rotary: tuple[Tensor, Tensor]  # cos, sin [B, R, D]


@dataclass(frozen=True, slots=True)
class Added:
    x: Tensor
    y: Tensor  # of the same shape, or in parts that add up to it


@dataclass(slots=True)
class Family:
    """Projections that are given the same input, in the order of their calls; computed together when one is needed."""

    layers: tuple[nn.Linear, ...]
    ops: Any
    joined: Joined | None = None  # their weights as one matrix
    ready: dict[int, Tensor] = field(default_factory=dict)
    given: Tensor | None = None

    @property
    def weights(self) -> list[Tensor]:
        return [layer.weight for layer in self.layers]

    def value(self, which: int, given: Tensor) -> Tensor:
        if given is not self.given or which not in self.ready:
            self.ready, self.given = dict(enumerate(self.products(given))), given
        value = self.ready.pop(which)
        if not self.ready:
            self.given = None
        return value

    def products(self, given: Tensor) -> Sequence[Tensor]:
        x, norm = _opened(given)
        if self.ops.streams(x, self.weights):
            together = self._streamed(x, norm, self.layers)
        elif self.joined is not None:
            together = F.linear(self._ready(x, norm), *self.joined)
        else:
            return self._one_by_one(x, norm, self.layers)
        return together.split([layer.out_features for layer in self.layers], -1)

    def added(self, given: Tensor, residual: Tensor) -> Tensor:
        """The only product and a residual."""
        x, norm = _opened(given)
        if norm is None and self.layers[0].bias is None and (left := self.ops.parts(x, self.weights[0])) is not None:
            return Lazy.of(Added(residual, left), residual.shape, residual, self.ops)
        if self.ops.streams(x, self.weights):
            return self._streamed(x, norm, self.layers, residual=residual)
        product = self._one_by_one(x, norm, self.layers)[0]
        return Lazy.of(Added(residual, product), product.shape, product, self.ops)  # a norm of it may follow

    def gated(self, given: Tensor, which: int) -> Tensor:
        """SiLU of one product times the other."""
        x, norm = _opened(given)
        layers = self.layers if which == 0 else self.layers[::-1]
        if self.ops.streams(x, self.weights):
            return self._streamed(x, norm, layers, gated=True)
        x = self._ready(x, norm)
        together = self.ops.gated(x, *(layer.weight for layer in layers))
        return self.ops.gate(*self._one_by_one(x, None, layers)) if together is None else together

    def _streamed(self, x: Tensor, norm: Norm | None, layers: Sequence[nn.Linear], **around: Any) -> Tensor:
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        return self.ops.project(x, weights, biases=biases, norm=norm, **around)

    def _one_by_one(self, x: Tensor, norm: Norm | None, layers: Sequence[nn.Linear]) -> list[Tensor]:
        x = self._ready(x, norm)
        return [F.linear(x, layer.weight, layer.bias) for layer in layers]

    def _ready(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else self.ops.rms_norm(x, norm.weight, norm.eps)


class Lazy(Tensor):
    """A tensor whose value is computed when something asks for it that no kernel does on the way."""

    op: Normed | Product | Silu | Rotated | Added
    ops: Any
    cached: Tensor | None

    @staticmethod
    def of(op: Normed | Product | Silu | Rotated | Added, shape: Sequence[int], like: Tensor, ops: Any) -> Lazy:
        made = Tensor._make_wrapper_subclass(Lazy, torch.Size(shape), dtype=like.dtype, device=like.device)
        made.op, made.ops, made.cached = op, ops, None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule = _RULES.get(func)
        if rule is not None and (out := rule(*args)) is not None:
            return out
        return func(*(real(a) for a in args), **{name: real(a) for name, a in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """For what reaches torch past the rules."""
        return func(*(real(a) for a in args), **{name: real(a) for name, a in (kwargs or {}).items()})


def real(x: Any) -> Any:
    """The value of a Lazy tensor, also inside lists and tuples; anything else as it is."""
    if isinstance(x, (list, tuple)) and any(isinstance(part, Tensor) for part in x):
        return type(x)(real(part) for part in x)
    if not isinstance(x, Lazy):
        return x
    if x.cached is None:
        op = x.op
        if isinstance(op, Normed):
            x.cached = x.ops.rms_norm(op.x, op.norm.weight, op.norm.eps)
        elif isinstance(op, Product):
            x.cached = op.family.value(op.which, op.given)
        elif isinstance(op, Silu):
            x.cached = F.silu(op.product.family.value(op.product.which, op.product.given))
        elif isinstance(op, Added):
            x.cached = op.x + reference.joined(op.y, op.x)
        else:
            x.cached = reference.rotated(op.x, op.rotary)
    return x.cached


def unrotated(x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """A tensor that is to be rotated to its positions, and how; one that is not, as it is."""
    if isinstance(x, Lazy) and isinstance(x.op, Rotated) and x.cached is None:
        return x.op.x, x.op.rotary
    return real(x), None


def _opened(x: Tensor) -> tuple[Tensor, Norm | None]:
    if isinstance(x, Lazy) and isinstance(x.op, Normed) and x.cached is None:
        return x.op.x, x.op.norm
    return real(x), None


def _waiting(x: Any, kind: type) -> Any:
    return x.op if isinstance(x, Lazy) and isinstance(x.op, kind) and x.cached is None else None


def _add(a: Any, b: Any, *_: Any) -> Tensor | None:
    """A residual and a projection that nobody shares an input with."""
    for product, residual in ((_waiting(b, Product), a), (_waiting(a, Product), b)):
        if product is None or len(product.family.layers) > 1 or not isinstance(residual, Tensor):
            continue
        value = real(residual)
        if value.shape == (b if residual is a else a).shape:
            return product.family.added(product.given, value)
    return None


def _mul(a: Any, b: Any, *_: Any) -> Tensor | None:
    """SiLU of one projection times another of the same input."""
    for silu, other in ((_waiting(a, Silu), _waiting(b, Product)), (_waiting(b, Silu), _waiting(a, Product))):
        if silu is None or other is None:
            continue
        first, family = silu.product, other.family
        pair = first.family is family and first.given is other.given and len(family.layers) == 2
        if pair and first.which != other.which and all(layer.bias is None for layer in family.layers):
            return family.gated(first.given, first.which)
    return None


def _silu(x: Any, *_: Any) -> Tensor | None:
    op = _waiting(x, Product)
    return None if op is None else Lazy.of(Silu(op), x.shape, x, x.ops)


_RULES: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _add),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _mul),
    **dict.fromkeys((F.silu, torch._C._nn.silu), _silu),
}
_ABOUT = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "__hash__")),
}  # questions that need no value


class Fusion:
    """What of a model can be fused; `ops` are the kernels, or their reference."""

    def __init__(self, model: nn.Module, ops: Any, probe: Callable[[], object]) -> None:
        self.ops = ops
        families = _families(model, ops, probe)
        layers = [(layer, _product(family, i)) for family in families for i, layer in enumerate(family.layers)]
        norms = [(module, _normed(module, ops)) for module in _usual_norms(model)]
        self._replacements = [Replacement(vars(module), "forward", forward) for module, forward in (*layers, *norms)]
        for namespace in _modelings(model):
            if _is_usual_rotary(rotary := namespace[ROTARY]):
                self._replacements.append(Replacement(namespace, ROTARY, _rotate_lazily(rotary, ops)))

    def active(self) -> AbstractContextManager[None]:
        """Changes the model for as long as it lasts."""
        return replaced(self._replacements)


def _families(model: nn.Module, ops: Any, probe: Callable[[], object]) -> list[Family]:
    """Projections by the input that they were seen to share."""
    seen: dict[int, list[nn.Linear]] = {}
    kept: list[Tensor] = []  # an input that lives on keeps its id its own

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
        kept.append(args[0])
        seen.setdefault(id(args[0]), []).append(layer)  # type: ignore[arg-type]

    plain = [
        m for m in model.modules()
        if type(m) is nn.Linear and "forward" not in m.__dict__ and not m._forward_pre_hooks and not m._forward_hooks
    ]  # fmt: skip
    hooks = [layer.register_forward_pre_hook(note) for layer in plain]
    try:
        probe()
    finally:
        for hook in hooks:
            hook.remove()
    out: list[Family] = []
    for layers in seen.values():
        alike = len(set(layers)) == len(layers) <= MAX_JOINED and len({m.in_features for m in layers}) == 1
        biased = {m.bias is not None for m in layers}
        together = [tuple(layers)] if alike and len(biased) == 1 else [(m,) for m in dict.fromkeys(layers)]
        out += [Family(group, ops, join(group)) for group in together]
    return out


def _product(family: Family, which: int) -> Callable[[Tensor], Tensor]:
    layer = family.layers[which]

    def forward(x: Tensor) -> Tensor:
        return Lazy.of(Product(family, which, x), (*x.shape[:-1], layer.out_features), x, family.ops)

    return forward


def _normed(module: nn.Module, ops: Any) -> Callable[[Tensor], Tensor]:
    norm = Norm(module.weight, _eps(module))  # type: ignore[arg-type]

    def forward(x: Tensor) -> Tensor:
        added = _waiting(x, Added)
        if added is not None:
            x.cached, out = ops.add_norm(added.x, added.y, norm.weight, norm.eps)  # type: ignore[attr-defined]
            return out
        x = real(x)
        return Lazy.of(Normed(x, norm), x.shape, x, ops)

    return forward


def _eps(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))


def _usual_norms(model: nn.Module) -> list[nn.Module]:
    known: dict[type, bool] = {}
    for module in model.modules():
        kind = type(module)
        if "RMSNorm" in kind.__name__ and kind not in known:
            known[kind] = _is_usual_norm(module)
    return [m for m in model.modules() if known.get(type(m)) and getattr(m, "weight", None) is not None]


@torch.inference_mode()
def _is_usual_norm(module: Any) -> bool:
    """Whether this is x / rms(x) times a weight: other norms go by the same name."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 1:
        return False
    x = 0.1 * torch.randn(3, weight.shape[0], device=weight.device).to(weight.dtype)
    return _close(module(x), reference.rms_norm(x, weight, _eps(module)))


def _modelings(model: nn.Module) -> list[dict[str, Any]]:
    """What is named in the Python modules of the model's code, where a rotary function is."""
    names = {type(m).__module__ for m in model.modules()}
    return [found for name in sorted(names) if ROTARY in (found := vars(sys.modules[name]))]


@torch.inference_mode()
def _is_usual_rotary(function: Callable[..., Any]) -> bool:
    q, k, angle = torch.randn(2, 3, 4, 8), torch.randn(2, 1, 4, 8), torch.rand(2, 4, 4).repeat(1, 1, 2)
    rotary = (angle.cos(), angle.sin())
    try:
        got = function(q, k, *rotary)
    except Exception:
        return False
    return all(_close(a, reference.rotated(x, rotary)) for a, x in zip(got, (q, k), strict=True))


def _close(a: Tensor, b: Tensor) -> bool:
    bound = 1e-5 if a.dtype in (torch.float32, torch.float64) else 2e-2
    return a.shape == b.shape and bool((a - b).float().norm() <= bound * b.float().norm())


def _rotate_lazily(function: Callable[..., Any], ops: Any) -> Callable[..., Any]:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any) -> Any:
        q, k, cos, sin = real(q), real(k), real(cos), real(sin)
        plain = not rest and named.get("unsqueeze_dim", 1) == 1 and set(named) <= {"unsqueeze_dim"}
        fits = q.dim() == 4 and cos.dim() == 3 and cos.shape == (q.shape[0], q.shape[2], q.shape[3])
        if not (plain and fits and k.shape[-1] == q.shape[-1] and q.stride(-1) == k.stride(-1) == 1):
            return function(q, k, cos, sin, *rest, **named)
        return tuple(Lazy.of(Rotated(x, (cos, sin)), x.shape, x, ops) for x in (q, k))

    return rotate
