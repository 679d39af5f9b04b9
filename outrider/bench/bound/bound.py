"""The bound: on text of the target itself, the best that any exact rule can do with a drafter, and what each rule does.

Plain decoding writes the text. At positions along it the drafter's real trees are grown, the target scores them all in
the one forward of that step, and every rule is evaluated on them (`reach`); none of it changes the text. Nothing here
is timed: what a rule or a drafter costs is the business of `compare`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.bench.bound.reach import SCHEMES as ONE_TOKEN
from outrider.bench.bound.reach import Array, chain_tokens, hits, part_of, tree_tokens
from outrider.bench.compare import common_settings
from outrider.bench.machine import machine
from outrider.control.fixed import Fixed
from outrider.core.errors import InputError
from outrider.core.noise import DRAFT, StreamNoise, fresh_seed
from outrider.core.params import SamplingParams
from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Grower, Noise, Recipe, Rows, Source
from outrider.core.records import Budget, Chunk, Needs, StepRecord, Verdict
from outrider.core.tree import Law, TokenTree, merge, root
from outrider.draft.grown import Grown
from outrider.grow.chain import Chain
from outrider.grow.kary import KAry
from outrider.grow.top_plus_one import TopPlusOne
from outrider.methods import check, find, parse_options
from outrider.methods.common import expansion, verifier
from outrider.models.kept import find_drafter
from outrider.store.prompts import Prompt

if TYPE_CHECKING:
    from outrider.api import Outrider

DRAFTS = 8  # acceptance is reported for 1 .. so many drafts
METHOD = "draft-model"  # whose drafter is measured

Progress = Callable[[int, int, str], None]  # tokens done, tokens in all, which prompt


@dataclass(frozen=True, slots=True)
class TreeKind:
    """A form of tree, how its candidates are drawn, and the rules that can verify it.

    `baseline` is the rule that decides token by token, against which the others are held.
    """

    name: str
    drawing: str
    grower: Grower
    budget: Budget
    rules: tuple[str, ...]
    baseline: str
    optimum: str | None = None  # the rule that no other beats on this shape, where one is known


@dataclass(frozen=True, slots=True)
class Plan:
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    positions: int = 200  # at most
    chain: int = 5  # depth of the chain
    tree: str = "3,2,1,1"  # children at each depth of the trees
    trees: int = 1  # of each shape at each position
    raw: bool = False  # no chat template

    def __post_init__(self) -> None:
        for name in ("positions", "chain", "trees"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; use 1 or more")
        if self.params.greedy:
            raise InputError("at temperature 0 all rules keep the target's likeliest token; use a temperature above 0")
        if self.params.n != 1:
            raise InputError(f"a bound takes one sample a prompt, not {self.params.n}; give more prompts")
        if self.params.seed is None:
            object.__setattr__(self, "params", self.params.with_(seed=fresh_seed()))
        self.shapes()

    def shapes(self) -> list[TreeKind]:
        sizes = expansion("tree", self.tree)
        budget = Budget(int(np.cumprod(sizes).sum()), len(sizes))
        name = f"tree {','.join(map(str, sizes))}"
        chain = ("invariant", "rejection", "block")
        iid = ("invariant", "naive", "recursive", "k-seq", "traversal")
        distinct = ("invariant", "naive", "recursive", "traversal")
        one = Budget(self.chain, self.chain)
        return [
            TreeKind(f"chain of {self.chain}", "one draw", Chain(), one, chain, "rejection", "block"),
            TreeKind(name, Law.IID, KAry(sizes, "iid"), budget, iid, "recursive"),
            TreeKind(name, Law.WITHOUT_REPLACEMENT, KAry(sizes, "without-replacement"), budget, distinct, "recursive"),
            TreeKind(
                name, Law.TOP_PLUS_ONE, TopPlusOne(sizes), budget, ("invariant", "optimal", "traversal"), "optimal"
            ),
            TreeKind(name, Law.FIXED, KAry(sizes, "top"), budget, ("invariant",), "invariant"),
        ]

    @property
    def depth(self) -> int:
        return max(shape.budget.depth for shape in self.shapes())

    @property
    def nodes(self) -> int:
        return self.trees * sum(shape.budget.nodes for shape in self.shapes())


@dataclass(frozen=True, slots=True)
class Position:
    """What was found at one place of one text."""

    text: int  # which prompt
    hits: dict[Law, dict[str, Array]]  # scheme -> rule, or the optimum -> [DRAFTS]
    tokens: list[dict[str, float]]  # per shape: rule -> expected tokens a step
    nodes: list[float]  # per shape: candidates of a tree


@dataclass(slots=True)
class Bound:
    plan: Plan
    settings: dict[str, Any]
    machine: dict[str, Any]
    positions: list[Position] = field(default_factory=list)
    complete: bool = False


def bound(
    engine: Outrider, prompts: Sequence[Prompt], plan: Plan, options: dict[str, Any] | None = None,
    source: str = "built-in", on_progress: Progress | None = None,
) -> Bound:  # fmt: skip
    """Measure it. `options` are those of the method draft-model. An interrupt ends it early: what is there is kept."""
    if not prompts:
        raise InputError("there are no prompts to measure on; give at least one")
    if plan.nodes >= engine.target.max_rows:
        raise InputError(
            f"{plan.trees} trees of each shape are up to {plan.nodes} candidates a step and "
            f"{engine.target.max_rows - 1} fit; use fewer trees or a smaller shape"
        )
    drafter = engine.recipe(METHOD, check_options(options or {})).drafter
    assert isinstance(drafter, Grown)
    made = Bound(plan, _settings(engine, prompts, plan, options or {}, source), machine())
    encoded = [_encode(engine, prompt, plan) for prompt in prompts]
    most = plan.params.max_new_tokens
    stride = math.ceil(len(prompts) * most / plan.positions)
    # Texts go on a little past the last position, so that every position has room for the deepest tree.
    params = plan.params.with_(max_new_tokens=most + plan.depth)
    probe = _Probe(made, drafter.source, stride)
    recipe = Recipe("bound", probe, probe, Fixed(Budget(plan.nodes, plan.depth)))
    try:
        for index, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
            probe.text = index
            if on_progress is not None:
                probe.report = partial(_report, on_progress, index * most, len(prompts) * most, prompt.id)
            engine.engine.submit(ids, params, recipe).result()
        made.complete = True
    except KeyboardInterrupt:
        pass
    return made


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of the drafting method, refused early; the rule that draws is what makes its drafter sample."""
    asked = {**options, "verifier": "rejection"}
    check(METHOD, asked)
    return asked


class _Probe:
    """Drafter and verifier in one: grows trees, looks at what the rules would do, and says the target's own token."""

    name = "probe"
    shared_noise = False
    honours = frozenset(Law)
    coupled = False

    def __init__(self, made: Bound, source: Source, stride: int) -> None:
        self.made, self.source, self.stride = made, source, stride
        self.shapes = made.plan.shapes()
        self.rules = {name: verifier(name) for shape in self.shapes for name in shape.rules}
        self.seed = made.plan.params.seed or 0
        self.rng = np.random.default_rng(self.seed)
        self.steps = 0  # of all texts
        self.text = 0  # which is being written
        self.report: Callable[[int], None] | None = None  # told how many tokens of the text are there
        self.drawn: list[list[TokenTree]] = []  # per shape; empty where this position is not looked at

    @property
    def needs(self) -> Needs:
        return self.source.needs

    def begin(self, slot: int, context: Context) -> None:
        self.context = context
        self.source.begin(slot, context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        self.source.absorb(chunks)

    def end(self, slot: int) -> None:
        self.source.end(slot)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        self.source.observe(slots, records)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        (slot,), (budget,) = slots, budgets
        said, pending = len(self.context.output), int(self.context.tokens[-1])
        if self.report is not None:
            self.report(said)
        self.drawn = []
        all_of_them = root(pending)
        if said < self.made.plan.params.max_new_tokens and budget.depth >= self.made.plan.depth:
            if self.steps % self.stride == 0:
                self.drawn = [[self._grow(shape, i, slot, pending) for i in self._numbers(j)]
                              for j, shape in enumerate(self.shapes)]  # fmt: skip
                for tree in (tree for trees in self.drawn for tree in trees):
                    all_of_them = merge(all_of_them, tree)
            self.steps += 1
        return Proposals([all_of_them])

    def _numbers(self, shape: int) -> range:
        """Which of the step's trees are of this shape: each draws with noise of its own, if it draws at all."""
        first, drawn = shape * self.made.plan.trees, self.shapes[shape].drawing != Law.FIXED
        return range(first, first + (self.made.plan.trees if drawn else 1))

    def _grow(self, shape: TreeKind, number: int, slot: int, pending: int) -> TokenTree:
        noise = StreamNoise(self.seed, number, DRAFT, self.steps, 0)  # a step's number stands for its text
        return shape.grower.grow(self.source, [slot], [pending], [shape.budget], [noise])[0]

    def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
        if self.drawn:
            self.made.positions.append(self._look(tree, rows))
        return Verdict((), noise.pick(rows.probs(0), ()))

    def _look(self, run: TokenTree, rows: Rows) -> Position:
        p, q = rows.probs(0).double().cpu(), self.drawn[0][0].draws[0][0].row
        assert q is not None, "a chain that was drawn has its row"
        found: list[dict[str, float]] = []
        for shape, trees in zip(self.shapes, self.drawn, strict=True):
            each = [self._tokens(shape, tree, part_of(run, rows, tree)) for tree in trees]
            found.append({rule: float(np.mean([tokens[rule] for tokens in each])) for rule in shape.rules})
        nodes = [float(np.mean([tree.candidates for tree in trees])) for trees in self.drawn]
        one = {scheme: hits(p, q, DRAFTS, scheme, self.rng) for scheme in ONE_TOKEN}
        return Position(self.text, one, found, nodes)

    def _tokens(self, shape: TreeKind, tree: TokenTree, rows: Rows) -> dict[str, float]:
        if isinstance(shape.grower, Chain):
            return chain_tokens(tree, rows)
        return {rule: tree_tokens(self.rules[rule], tree, rows) for rule in shape.rules}


def _report(on_progress: Progress, before: int, total: int, doing: str, said: int) -> None:
    on_progress(min(before + said, total), total, doing)


def _encode(engine: Outrider, prompt: Prompt, plan: Plan) -> list[int]:
    """The first turn of a conversation: later ones would need answers of the target."""
    if not plan.raw and not getattr(engine.tokenizer, "chat_template", None):
        raise InputError(f"{engine.loaded.name} has no chat template; add --raw to use the prompts as they are")
    ids = engine.encode(prompt.raw()) if plan.raw else engine.encode_chat(prompt.conversation())
    if len(ids) + plan.depth >= engine.target.max_context:
        raise InputError(
            f"prompt {prompt.id} has {len(ids)} tokens but the context holds {engine.target.max_context}; "
            "leave it out or shorten it"
        )
    return ids


def _settings(
    engine: Outrider, prompts: Sequence[Prompt], plan: Plan, options: dict[str, Any], source: str
) -> dict[str, Any]:
    params, made = plan.params, parse_options(find(METHOD), options)
    return {
        "model": _shown(engine.loaded.name),
        "draft": _shown(made.draft) or _default_draft(engine, made.layers),
        "width": made.width,
        "prompts": source,
        "count": len(prompts),
        **common_settings(engine, params),
        "positions": plan.positions,
        "chain": plan.chain,
        "tree": plan.tree,
        "trees": plan.trees,
        "raw": plan.raw,
    }


def _default_draft(engine: Outrider, layers: int) -> str:
    if layers:
        return f"the first {layers} layers"
    trained = find_drafter(engine.loaded)
    return "the first layers" if trained is None else f"the trained one {trained.name}"


def _shown(name: str) -> str:
    return Path(name).name if Path(name).is_absolute() else name
