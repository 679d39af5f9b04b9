"""Smaller heads for a finished drafter: fewer tokens (VocabTrim, FR-Spec) and the search for how many (TPE).

arXiv 2506.22694, 2502.14856, 2603.05210. The rows of the head that the target's own answers use most are kept, and
those that end a text always; nothing is trained. Lossless: draft ids are mapped to the target's before anybody sees
them, and the draft's distribution is the one over the tokens kept. Acceptance cannot pass the share of the text that
they make.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from outrider.core.errors import InputError, MissingExtra
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape
from outrider.train.text.dialogue import ANSWER
from outrider.train.text.selfdata import SelfData


def token_counts(data: SelfData, total: int) -> Tensor:
    """How often each of the target's tokens stands in answers, [total]; prompts are not the drafter's business."""
    return torch.bincount(data.tokens[data.roles == ANSWER].long(), minlength=total)


@dataclass(frozen=True, slots=True)
class Ranking:
    """A drafter's tokens by use, those that end a text first; equals by id. Smaller vocabularies lie in larger ones."""

    ids: Tensor  # [vocabulary], the target's
    covered: Tensor  # [vocabulary + 1]: the share of all answer tokens that the first n make up

    def coverage(self, size: int) -> float:
        return float(self.covered[min(max(size, 0), len(self.ids))])

    def keep(self, size: int) -> Tensor:
        """The first so many, rising."""
        return self.ids[:size].sort().values

    def least(self, coverage: float) -> int:
        """The fewest tokens that cover so much; all of them where that is out of reach."""
        return min(int(torch.searchsorted(self.covered, coverage)), len(self.ids))


def rank_tokens(counts: Tensor, ids: Tensor, always: frozenset[int]) -> Ranking:
    uses = counts[ids].double()
    first = torch.isin(ids, torch.tensor(sorted(always), dtype=ids.dtype))
    order = torch.sort(torch.where(first, math.inf, uses), descending=True, stable=True).indices
    total = max(float(counts.sum()), 1.0)
    return Ranking(ids[order], torch.cat([torch.zeros(1, dtype=torch.float64), uses[order].cumsum(0) / total]))


def trimmed(net: Eagle3Layer, keep: Tensor) -> Eagle3Layer:
    """The same network with the head's rows of these tokens only; a head of two matrices loses rows of the second."""
    if not len(keep) or not torch.isin(keep, net.ids.cpu()).all():
        raise InputError(
            "a head can keep one or more of its own tokens; train a drafter with a larger --vocab for others"
        )
    rows = torch.searchsorted(net.ids.cpu(), keep).to(net.ids.device)
    return with_head(net, replace(net.shape, vocab=len(keep)), net.ids[rows], last_matrix(net)[rows])


def last_matrix(net: Eagle3Layer) -> Tensor:
    """[vocabulary, hidden or rank]."""
    linears = [part for part in net.lm_head.modules() if isinstance(part, nn.Linear)]
    return linears[-1].weight.detach()


def with_head(net: Eagle3Layer, shape: Eagle3Shape, ids: Tensor, *matrices: Tensor) -> Eagle3Layer:
    """A copy whose head ends with these matrices; what comes before them in the head stays."""
    made = Eagle3Layer(shape, ids).to(net.ids.device, last_matrix(net).dtype)
    weights = {name: weight.detach() for name, weight in net.state_dict().items()}
    names = [name for name, _ in made.named_parameters() if name.startswith("lm_head.")]
    kept = {name: weight for name, weight in weights.items() if not name.startswith("lm_head.")}
    kept |= {name: weights[name] for name in names[: len(names) - len(matrices)]}
    kept |= dict(zip(names[len(names) - len(matrices) :], matrices, strict=True))
    made.load_state_dict(kept)
    return made.requires_grad_(False)


def draft_flops(shape: Eagle3Shape, vocab: int | None = None) -> int:
    """Multiplications and additions of one drafted token; the paper's stand-in for its latency."""
    d, said = shape.hidden, shape.vocab if vocab is None else vocab
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = 2 * len(shape.layers) * d * d + 2 * (2 * d) * (q + 2 * kv) + 2 * q * d + 6 * d * shape.intermediate
    head = 2 * shape.rank * (d + said) if shape.rank else 2 * d * said
    return layer + head


@dataclass(frozen=True, slots=True)
class SearchPlan:
    weight: float = 0.7  # of coverage against the cut in cost
    least_coverage: float = 0.95
    smallest: int = 1000
    largest: int = 50_000
    trials: int = 100
    seed: int = 42


@dataclass(frozen=True, slots=True)
class Found:
    size: int
    coverage: float
    saving: float  # share of the cost of the whole head
    utility: float
    feasible: bool  # within the range that was searched


def utility(size: int, ranking: Ranking, cost: Callable[[int], float], plan: SearchPlan) -> Found:
    coverage, saving = ranking.coverage(size), 1 - cost(size) / cost(len(ranking.ids))
    return Found(size, coverage, saving, plan.weight * coverage + (1 - plan.weight) * saving, True)


def search(ranking: Ranking, cost: Callable[[int], float], plan: SearchPlan | None = None) -> Found:
    """The size that a tree-structured Parzen estimator finds best: coverage against cost, coverage at least so much.

    Where no size tried covers enough, the fewest tokens that do, even beyond the range.
    """
    plan = plan or SearchPlan()
    try:
        import optuna
    except ImportError:
        raise MissingExtra("the search for a head's size needs optuna; install outrider[train]") from None
    total = len(ranking.ids)
    low, high = min(plan.smallest, total), min(plan.largest, total)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=plan.seed))

    def value(trial: optuna.Trial) -> float:
        tried = utility(trial.suggest_int("size", low, high), ranking, cost, plan)
        return tried.utility if tried.coverage >= plan.least_coverage else -1.0

    study.optimize(value, n_trials=plan.trials)
    found = utility(int(study.best_params["size"]), ranking, cost, plan)
    if found.coverage >= plan.least_coverage:
        return found
    return replace(utility(ranking.least(plan.least_coverage), ranking, cost, plan), feasible=False)
