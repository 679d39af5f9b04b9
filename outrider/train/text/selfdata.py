"""Text that the target writes by itself, as training data for its drafter: both sides of many conversations at once.

All sequences of a shard run in step and have one length, so that no token is padding and no mask is needed; turn marks
are forced, the rest is sampled. Answers follow the target's distribution at a few temperatures. User turns are cut
harder, with a first token at a higher temperature, since a small model that writes on freely as the user drifts into
nonsense. A turn that only repeats itself is ended. Every third shard is about answers of earlier ones. A shard depends
only on the seed, its number and the shards before it, is whole or not there, and carries a checksum, so an interrupted
run goes on where it was. No first user turn comes twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.runtime.support import cache_argument
from outrider.train.loops import Loops
from outrider.train.text.dialogue import ANSWER, FORCED, USER, Dialogue, dialogue
from outrider.train.text.material import Answer, about, answers_in
from outrider.train.text.room import cache_of

log = logging.getLogger("outrider")
NEVER = -math.inf
SIZE = ("batch",)  # settings that may change from shard to shard
SAID = {"batch": "shard", "answer_temperatures": "temperatures"}  # names that users know settings by
# Not cuDNN's attention, which plans anew for every length: a text that grows by a token a pass has a thousand.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class DataPlan:
    """How much, how long, and how it is sampled."""

    tokens: int
    length: int = 1024  # of a sequence
    batch: int = 1024  # sequences of a shard; they run together
    answer_temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 0.7, 1.0)  # one is drawn for each sequence
    user_temperature: float = 0.8
    user_first_temperature: float = 1.5  # of a user turn's first token: what the turn is about
    user_min_p: float = 0.05
    most: int = 400  # tokens of a turn, before it is ended by force
    loop: int = 24  # tokens said again within a turn, after which it is ended too; 0: never
    about_every: int = 3  # of so many shards the last is about answers of earlier ones; 0: none is
    seed: int = 0

    @property
    def shards(self) -> int:
        return max(1, math.ceil(self.tokens / (self.length * self.batch)))


@dataclass(frozen=True, slots=True)
class SelfData:
    tokens: Tensor  # [sequences, length], int32
    roles: Tensor  # [sequences, length], uint8

    @property
    def answer_tokens(self) -> int:
        return int((self.roles == ANSWER).sum())


def write_data(
    target: LoadedModel, plan: DataPlan, folder: Path, on_progress: Callable[[int, int], None] = lambda done, of: None,
    *, as_it_is: bool = False,
) -> SelfData:  # fmt: skip
    """Sample what is missing in `folder` and give everything back. `on_progress(tokens, of)` is called now and then.

    Shards of another size are gone on from. Text of other settings is refused, or taken `as_it_is` where it is enough.
    """
    if as_it_is and (found := _enough(folder, target.fingerprint, plan)) is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    start = target.model.config.get_text_config().bos_token_id
    script = dialogue(target.tokenizer, target.eos_ids, start or 0)
    identity = _identity(target.fingerprint, plan)
    shards, seen, each = list[SelfData](), set[bytes](), plan.length * plan.batch
    done = 0
    while done < plan.tokens or not shards:
        of = done + max(1, math.ceil((plan.tokens - done) / each)) * each
        path = folder / f"shard-{len(shards):04d}.safetensors"
        if (shard := read_shard(path, identity, besides=SIZE)) is None:

            def on_step(step: int, before: int = done, of: int = of) -> None:
                on_progress(before + step * plan.batch, of)

            shard_script = _about_earlier(target, script, plan, len(shards), shards)
            shard = _unseen(sample_shard(target.model, shard_script, plan, len(shards), on_step), seen)
            write_shard(path, shard, identity)
        done += _planned(settings_of(path))
        seen.update(_keys(shard))
        shards.append(shard)
        on_progress(done, max(done, of))
    return joined(shards)


def sampled(folder: Path, plan: DataPlan) -> int:
    """Sequences that the shards of a plan were written with, the repeated ones that were left out among them."""
    tokens = rows = 0
    for path in sorted(folder.glob("shard-*.safetensors")):
        if rows and tokens >= plan.tokens:
            break
        settings = settings_of(path)
        tokens, rows = tokens + _planned(settings), rows + settings["batch"]
    return rows


def _enough(folder: Path, fingerprint: str, plan: DataPlan) -> SelfData | None:
    """Text of other settings, all of it; None where there is none, and refused where it is less than planned."""
    paths = sorted(folder.glob("shard-*.safetensors"))
    asked = json.loads(_identity(fingerprint, plan))
    other = next((told for path in paths if (told := differences(settings_of(path), asked, SIZE))), "")
    if not other:
        return None
    text = read_data(folder, fingerprint)
    there = max(text.tokens.numel(), sum(_planned(settings_of(path)) for path in paths))
    if there < plan.tokens:
        raise InputError(
            f"{folder} holds {there:,} tokens, too few for the {plan.tokens:,} asked for, and none can be added: it "
            f"has {other}; ask for the same or for fewer tokens, or choose another folder"
        )
    log.warning("%s is taken as it is; it has %s", folder, other)
    return text


def read_data(folder: Path, fingerprint: str) -> SelfData:
    """All the text in `folder`; refused where another target wrote it."""
    shards = []
    for path in shards_of(folder):
        about, shard = _load(path)
        writer = json.loads(about["plan"])["target"]
        if writer != fingerprint:
            raise InputError(f"{path} was written by another target ({writer}), not by this one ({fingerprint})")
        shards.append(shard)
    return joined(shards)


def shards_of(folder: Path) -> list[Path]:
    """The files of a text; refused where there is none."""
    if not (paths := sorted(folder.glob("shard-*.safetensors"))):
        raise InputError(f"{folder}: no text here; write some with: outrider train data --out {folder}")
    return paths


def joined(shards: Sequence[SelfData]) -> SelfData:
    return SelfData(torch.cat([s.tokens for s in shards]), torch.cat([s.roles for s in shards]))


def digest(data: SelfData) -> str:
    """A short name for exactly this text."""
    made = hashlib.sha256(data.tokens.numpy().tobytes())
    made.update(data.roles.numpy().tobytes())
    return made.hexdigest()[:16]


def write_shard(path: Path, shard: SelfData, identity: str) -> None:
    """Changes the folder: the shard is whole or not there. `identity` is JSON that names the target, and the plan."""
    save_file(asdict(shard), f"{path}.partial", {"plan": identity, "digest": digest(shard)})
    os.replace(f"{path}.partial", path)


def read_shard(path: Path, identity: str, besides: Collection[str] = ()) -> SelfData | None:
    """None where there is none yet; refused where it was written with settings that differ, `besides` these."""
    if not path.exists():
        return None
    about, shard = _load(path)
    if told := differences(json.loads(about["plan"]), json.loads(identity), besides):
        raise InputError(f"{path} has {told}; ask for the same, or choose another folder")
    return shard


def settings_of(path: Path) -> dict[str, Any]:
    """What a shard was written with."""
    try:
        with safe_open(path, "pt") as file:
            return dict(json.loads(file.metadata()["plan"]))
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); remove it and run again") from error


def differences(had: Mapping[str, Any], asked: Mapping[str, Any], besides: Collection[str] = ()) -> str:
    """`length 24 (asked: 48), seed 0 (asked: 1)`; empty where nothing differs."""
    had, asked = _flat(had), _flat(asked)
    names = [name for name in {**asked, **had} if name not in besides and had.get(name) != asked.get(name)]
    return ", ".join(f"{SAID.get(name, name)} {had.get(name)} (asked: {asked.get(name)})" for name in names)


def _identity(fingerprint: str, plan: DataPlan) -> str:
    return json.dumps({"target": fingerprint, **asdict(plan), "tokens": 0})


def _planned(settings: Mapping[str, Any]) -> int:
    """Tokens that a shard was to have, before repeated sequences were left out; 0 where no plan says that."""
    return int(settings.get("batch", 0) * settings.get("length", 0))


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a plan beside those around it."""
    plans = [value for value in settings.values() if isinstance(value, dict)]
    return {name: value for part in (settings, *plans) for name, value in part.items() if not isinstance(value, dict)}


def _load(path: Path) -> tuple[dict[str, str], SelfData]:
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
        shard = SelfData(**load_file(path))
        if about["digest"] != digest(shard):
            raise InputError(f"{path} is damaged: its checksum differs; remove it and run again")
        return about, shard
    except (OSError, SafetensorError, TypeError, KeyError) as error:
        raise InputError(f"{path} cannot be read ({error}); remove it and run again") from error


def _about_earlier(
    target: LoadedModel, script: Dialogue, plan: DataPlan, number: int, shards: Sequence[SelfData]
) -> Dialogue:
    """The script of a shard: its conversations are about earlier answers when it is its turn and there are enough."""
    if not plan.about_every or (number + 1) % plan.about_every or not script.follow or target.tokenizer is None:
        return script
    head, mark = (len(target.tokenizer.encode(text, add_special_tokens=False)) for text in script.marks[:2])
    answers: list[Answer] = []
    for shard in shards:
        for tokens, roles in zip(shard.tokens.numpy(), shard.roles.numpy(), strict=True):
            answers += answers_in(tokens, roles, head, mark, script.ends)
    if len(answers) < plan.batch // 4:
        return script
    seed = plan.seed * 1_000_003 + number
    return about(script, target.tokenizer, answers, plan.batch, plan.length * 5 // 8, seed)


def _unseen(shard: SelfData, seen: set[bytes]) -> SelfData:
    """The sequences whose beginning is new, each once."""
    known, kept = set(seen), []
    for row, key in enumerate(_keys(shard)):
        if key not in known:
            known.add(key)
            kept.append(row)
    return SelfData(shard.tokens[kept], shard.roles[kept])


def _keys(shard: SelfData) -> list[bytes]:
    """What must not come twice: everything up to the first answer; all of a sequence without a user."""
    keys = []
    for tokens, roles in zip(shard.tokens.numpy(), shard.roles.numpy(), strict=True):
        asked = (roles == FORCED).sum() > 1  # more than a start token
        end = int((roles == ANSWER).argmax()) or len(tokens)
        keys.append(hashlib.sha256(tokens[: end if asked else None].tobytes()).digest())
    return keys


@torch.inference_mode()
def sample_shard(
    model: PreTrainedModel, script: Dialogue, plan: DataPlan, number: int, on_step: Callable[[int], None]
) -> SelfData:
    """One batch of conversations. Nothing is read back from the device before the end."""
    device, rows = model.device, plan.batch
    noise = torch.Generator(device).manual_seed(plan.seed * 1_000_003 + number)
    turns = _Turns.start(script, plan, device, noise)
    tokens = torch.zeros(rows, plan.length, dtype=torch.int64, device=device)
    roles = torch.zeros(rows, plan.length, dtype=torch.uint8, device=device)
    cache = {cache_argument(model): cache_of(model, plan.length)}
    tokens[:, 0] = turns.first_tokens()
    loops = Loops(rows, plan.loop, device)
    with sdpa_kernel(ATTENTION):
        for at in range(1, plan.length):
            logits = model(tokens[:, at - 1 : at], **cache, use_cache=True).logits[:, -1].float()
            tokens[:, at], roles[:, at] = turns.next(logits)
            turns.looping = loops.add(tokens, at, turns.turn)
            if at % 64 == 0:
                on_step(at)
    return SelfData(tokens.to(torch.int32).cpu(), roles.cpu())


@dataclass(slots=True)
class _Turns:
    """Where each sequence stands in its conversation; all state is on the device, one entry a sequence."""

    plan: DataPlan
    noise: torch.Generator
    forced: Tensor  # [pieces, longest piece]
    lengths: Tensor  # [pieces]
    answer: Tensor  # [pieces] the turn after the piece is the model's own
    least: Tensor  # [pieces] fewest tokens of that turn
    then: Tensor  # [pieces, choices] what follows; the piece itself where nothing does
    ends: Tensor  # the ids that end a turn
    temperature: Tensor  # of the answers
    piece: Tensor  # current piece
    place: Tensor  # how many of its tokens are out
    turn: Tensor  # tokens of the sampled turn so far
    looping: Tensor  # it only repeats itself

    @classmethod
    def start(cls, script: Dialogue, plan: DataPlan, device: torch.device, noise: torch.Generator) -> _Turns:
        pieces = script.pieces
        longest, choices = max(len(p.tokens) for p in pieces), math.lcm(*(len(p.then) or 1 for p in pieces))

        def table(values: Any) -> Tensor:
            return torch.tensor(values, device=device)

        def pick(values: Tensor) -> Tensor:
            return values[torch.randint(len(values), (plan.batch,), generator=noise, device=device)]

        then = [(p.then or (i,)) * (choices // len(p.then or (i,))) for i, p in enumerate(pieces)]
        firsts = table(script.first)
        zero = torch.zeros(plan.batch, dtype=torch.int64, device=device)
        return cls(
            plan, noise,
            forced=table([[*p.tokens, *[0] * (longest - len(p.tokens))] for p in pieces]),
            lengths=table([len(p.tokens) for p in pieces]),
            answer=table([p.answer for p in pieces]),
            least=table([p.least for p in pieces]),
            then=table(then),
            ends=table(sorted(script.ends)).long(),
            temperature=pick(table(plan.answer_temperatures)),
            # as many beginnings as sequences: each once
            piece=firsts if len(firsts) == plan.batch else pick(firsts), place=zero, turn=zero.clone(),
            looping=zero.bool(),
        )  # fmt: skip

    def first_tokens(self) -> Tensor:
        self.place = torch.ones_like(self.place)
        return self.forced[self.piece, 0]

    def next(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of every sequence and its role, from the target's logits [sequences, vocabulary]."""
        forcing = self.place < self.lengths[self.piece]
        answering = self.answer[self.piece]
        token = torch.where(forcing, self.forced[self.piece, self.place.clamp(max=self.forced.shape[1] - 1)],
                            self._sample(logits, answering))  # fmt: skip
        role = torch.where(forcing, FORCED, torch.where(answering, ANSWER, USER))
        self.place += forcing
        self.turn = torch.where(forcing, 0, self.turn + 1)
        if len(self.ends):
            ended = ~forcing & torch.isin(token, self.ends)
            full = ~forcing & ~ended & ((self.turn >= self.plan.most) | self.looping)
            choice = torch.randint(self.then.shape[1], token.shape, generator=self.noise, device=token.device)
            self.piece = torch.where(ended | full, self.then[self.piece, choice], self.piece)
            self.place = torch.where(ended, 1, torch.where(full, 0, self.place))
            # The piece begins in place of the end: mostly the same token, else the turn goes on by force.
            mark = self.forced[self.piece, 0]
            role = torch.where(ended & (mark != token), FORCED, role)
            token = torch.where(ended, mark, token)
        return token, role.to(torch.uint8)

    def _sample(self, logits: Tensor, answering: Tensor) -> Tensor:
        plan = self.plan
        user = torch.where(self.turn == 0, plan.user_first_temperature, plan.user_temperature)
        temperature = torch.where(answering, self.temperature, user)[:, None]
        if len(self.ends):
            early = ~answering & (self.turn < self.least[self.piece])
            logits[:, self.ends] = logits[:, self.ends].masked_fill(early[:, None], NEVER)
        # p(x) >= min_p * max p, on logits: temperature * log(min_p) below the highest.
        cut = torch.where(answering[:, None], NEVER, temperature * math.log(plan.user_min_p))
        kept = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + cut, NEVER)
        # Gumbel's trick: at temperature 0 the noise vanishes and the likeliest token stays.
        waits = torch.empty_like(logits).exponential_(generator=self.noise)
        return (kept - temperature * waits.log_()).argmax(-1)
