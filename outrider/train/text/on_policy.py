"""On-policy text: conversations in which the drafter itself gives the answers, to learn where its own words lead.

DistillSpec (arXiv 2310.08461), as data for any kind of drafter. Sequences of the target's text keep their user turns
and turn marks; in a share of them every answer is written anew by the drafter, the others stay as they are. The
target's distribution after each token is the goal, as on any other text, so that training needs nothing new:
`outrider train run --from`. The drafter writes blocks as it drafts them, from the target's features of all that stands
before; the target runs once a block and chooses nothing. What comes depends on the drafter: write again once it has
learnt from it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

import torch

from outrider.api import Outrider
from outrider.core.engine import Handle
from outrider.core.errors import InputError
from outrider.core.protocols import Noise, Recipe, Rows
from outrider.core.records import Verdict
from outrider.core.sampling import SamplingParams
from outrider.core.tree import Law, TokenTree
from outrider.models import LoadedModel
from outrider.models.drafts import CARD, WEIGHTS
from outrider.train.text.dialogue import ANSWER, FORCED, Dialogue, dialogue
from outrider.train.text.replay import chain_of
from outrider.train.text.selfdata import SelfData, digest, joined, read_shard, write_shard

Text = tuple[list[int], list[int]]  # tokens and their roles
Writing = Generator[tuple[list[int], int], list[int], Text]


@dataclass(frozen=True, slots=True)
class OnPolicyPlan:
    share: float = 0.5  # of the sequences: so many get the drafter's answers, the others keep the target's
    sequences: int = 0  # so many of the text's first ones; 0: all
    temperatures: tuple[float, ...] = (1.0,)  # of the drafter; the sequences have them in turn
    block: int = 6  # tokens drafted a step
    batch: int = 16  # sequences of a shard; they run together
    most: int = 400  # tokens of an answer that others follow, before it is ended by force
    seed: int = 0


class AsDrafted:
    """No rule of acceptance: the chain becomes text as it was drafted, its last token in place of the target's."""

    name = "as-drafted"
    honours = frozenset(Law)
    coupled = True

    def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
        if not tree.candidates:  # nothing was drafted, but a step must say something
            return Verdict((), rows.argmax(0) if rows.greedy else noise.draw(rows.probs(0), 0, 0))
        return Verdict(tuple(range(1, tree.candidates)), int(tree.tokens[-1]))


def write_on_policy(
    target: LoadedModel, drafter: Path, data: SelfData, plan: OnPolicyPlan, folder: Path,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:  # fmt: skip
    """Changes the folder: the shards that are missing there, as `train data` writes them; what there is in all.

    `on_progress(tokens, of)` is called now and then. A shard is whole or not there, so that an interrupted run goes on
    where it was.
    """
    _check(plan)
    start = target.model.config.get_text_config().bos_token_id
    script = dialogue(target.tokenizer, target.eos_ids, start or 0)
    count, length = min(plan.sequences or len(data.tokens), len(data.tokens)), data.tokens.shape[1]
    identity = json.dumps(
        {"target": target.fingerprint, "drafter": _name(drafter), "data": digest(data), "on policy": asdict(plan)}
    )
    # One place more than the text has: a step leaves room for a token of the target's, of which there is none here.
    limits = {"max_slots": math.ceil(plan.batch * plan.share), "max_context": length + 1}
    shards = []
    with Outrider(target, "plain", limits=limits, strict=True) as engine:
        recipe = replace(chain_of(engine, drafter, plan.block, "rejection")[0], verifier=AsDrafted())
        folder.mkdir(parents=True, exist_ok=True)
        for number, begin in enumerate(range(0, count, plan.batch)):
            path = folder / f"shard-{number:04d}.safetensors"
            part = range(begin, min(begin + plan.batch, count))
            if (shard := read_shard(path, identity)) is None:

                def on_step(done: int, before: int = begin * length) -> None:
                    on_progress(before + done, count * length)

                shard = _rewritten(engine, recipe, data, part, script, plan, on_step)
                write_shard(path, shard, identity)
            shards.append(shard)
            on_progress(part.stop * length, count * length)
    made = joined(shards)
    chosen = [row for row in range(count) if is_chosen(row, plan.share) and (data.roles[row] == ANSWER).any()]
    rewritten = SelfData(made.tokens[chosen], made.roles[chosen])
    return {"sequences": count, "rewritten": len(chosen), "tokens": made.tokens.numel(),
            "answers": made.answer_tokens, "own": rewritten.answer_tokens}  # fmt: skip


def is_chosen(row: int, share: float) -> bool:
    """Spread evenly over the text."""
    return _chosen(row + 1, share) > _chosen(row, share)


def _chosen(rows: int, share: float) -> int:
    """How many of the first so many sequences get the drafter's answers."""
    return math.floor(rows * share + 1e-9)


def answered(
    tokens: list[int], roles: list[int], ends: frozenset[int], most: int, requests: Sequence[Sequence[int]] = ()
) -> Writing:
    """The sequence with other answers, and as long: yields all that stands before one, and its length at most; is sent
    the answer, with the token that ended it.

    Turn marks stay the text's own. A mark begins with a token that ends a turn; the answer's own where it is that one,
    else it is forced. After the last answer come `requests` for more, in turn, with their marks; without any, what is
    left is filled up and never counts.
    """
    length, said, marked = len(tokens), list[int](), list[int]()
    stretches, asking = list(_stretches(tokens, roles)), cycle(requests)
    if requests and ANSWER in roles and not stretches[-1][0]:
        stretches.pop()  # a user turn that the end has cut off
    for number, (is_answer, part, kinds) in enumerate(stretches):  # grows while there is room
        if not is_answer:
            said, marked = [*said, *part], [*marked, *kinds]
            continue
        if len(said) >= length:
            break
        if not said:  # something must stand before what is written
            said, marked = part[:1], [FORCED]
        if requests and number + 1 == len(stretches):
            request = list(next(asking))
            stretches += [(False, request, [FORCED] * len(request)), (True, [], [])]
            part = []  # the request brings the mark with it
        left, more = length - len(said), number + 1 < len(stretches)
        new = yield said, min(most, left) if more else left
        marks = list[int]()
        if more:
            following = stretches[number + 1]
            if ends.intersection(part[-1:]):
                marks = part[-1:]
            elif following[1][0] in ends:
                marks = [following[1].pop(0)]
                following[2].pop(0)
        if marks and new[-1:] == marks:
            marks = []
        elif marks and new[-1] in ends:
            new = new[:-1]
        said, marked = [*said, *new, *marks], [*marked, *[ANSWER] * len(new), *[FORCED] * len(marks)]
    rest = max(0, length - len(said))
    return [*said, *said[-1:] * rest][:length], [*marked, *[FORCED] * rest][:length]


def _stretches(tokens: list[int], roles: list[int]) -> Iterator[tuple[bool, list[int], list[int]]]:
    """A sequence in pieces that are answers or are not."""
    begin = 0
    for is_answer, same in groupby(roles, lambda role: role == ANSWER):
        end = begin + len(list(same))
        yield is_answer, tokens[begin:end], roles[begin:end]
        begin = end


def _rewritten(
    engine: Outrider, recipe: Recipe, data: SelfData, part: range, script: Dialogue, plan: OnPolicyPlan,
    on_step: Callable[[int], None],
) -> SelfData:  # fmt: skip
    """These sequences; the chosen ones run together, each asks for its next answer as soon as it has one."""
    texts: dict[int, Text] = {row: (data.tokens[row].tolist(), data.roles[row].tolist()) for row in part}
    length, asked = data.tokens.shape[1], dict[int, int]()
    running: dict[int, tuple[Writing, Handle]] = {}
    pieces = [script.pieces[number] for number in script.follow]
    requests = [piece.tokens for piece in pieces if piece.answer]  # those that need no words of a user's

    def go_on(row: int, writing: Writing, said: list[int] | None) -> None:
        try:
            before, most = next(writing) if said is None else writing.send(said)
        except StopIteration as end:
            texts[row] = end.value
            return
        asked[row] = asked.get(row, -1) + 1
        params = SamplingParams(
            max_new_tokens=most + 1,
            temperature=plan.temperatures[_chosen(row, plan.share) % len(plan.temperatures)],
            stop_token_ids=tuple(sorted(script.ends)),
            ignore_eos=not script.ends,
            seed=_seed(plan.seed, row, asked[row]),
        )
        full = len(before) + most
        handle = engine.engine.submit(before, params, recipe, stop_check=lambda tokens: len(tokens) >= full)
        running[row] = writing, handle

    for row in part:
        if is_chosen(row, plan.share):
            at = row % max(1, len(requests))
            go_on(row, answered(*texts[row], script.ends, plan.most, requests[at:] + requests[:at]), None)
    while running:
        engine.step()
        for row, (writing, handle) in list(running.items()):
            if handle.done:
                del running[row]
                go_on(row, writing, handle.result().token_ids)
        reached = sum(len(handle.sequences[0].history.tokens) for _, handle in running.values())
        on_step((len(part) - len(running)) * length + reached)
    tokens, roles = zip(*texts.values(), strict=True)
    return SelfData(torch.tensor(tokens, dtype=torch.int32), torch.tensor(roles, dtype=torch.uint8))


def _seed(seed: int, row: int, turn: int) -> int:
    """Of one answer: no two draw the same numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed} {row} {turn}".encode()).digest()[:6], "little")


def _name(drafter: Path) -> str:
    """A short name for exactly this drafter, which may be trained again in the same folder."""
    made = hashlib.sha256()
    for name in (CARD, WEIGHTS):
        try:
            made.update((drafter / name).read_bytes())
        except OSError as error:
            why = error.strerror
            raise InputError(f"{drafter}: no drafter here ({name}: {why}); give a folder of a trained one") from None
    return made.hexdigest()[:16]


def _check(plan: OnPolicyPlan) -> None:
    if not 0 < plan.share <= 1:
        raise InputError(f"a share of {plan.share:g} of the sequences cannot be written; use a number above 0, up to 1")
    if min(plan.block, plan.batch, plan.most) < 1 or plan.sequences < 0 or not plan.temperatures:
        raise InputError("blocks, batches and answers have at least one token or sequence, and there is a temperature")
    for temperature in plan.temperatures:
        SamplingParams(temperature=temperature)  # refuses what cannot be drawn with
