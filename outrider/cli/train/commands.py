"""`outrider train ...`: drafters made from nothing but the target."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import Device, Model, parse_options
from outrider.cli.output import Json, check_json, emit, out, progress_bar
from outrider.cli.shell import STDOUT, resumable
from outrider.cli.train.blockffn import blockffn
from outrider.cli.train.hybrid import hybrid
from outrider.cli.train.on_policy import on_policy
from outrider.cli.train.options import (
    Drafter,
    Dtype,
    Text,
    check_drafter_folder,
    check_folders,
    numbers,
    one_process,
)
from outrider.cli.train.replay import replay
from outrider.cli.train.trim import trim
from outrider.core.errors import InputError
from outrider.train.kinds.registry import KINDS, find_kind, plan_of, train_drafter, work_folder

if TYPE_CHECKING:
    from outrider.train.loop import Point

SUFFIXES = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}

Tokens = Annotated[str, typer.Option("--tokens", help="How much text the target writes: 500k, 12M, ...")]
Length = Annotated[int, typer.Option("--length", help="Tokens of one sequence.")]
Shard = Annotated[int, typer.Option("--shard", help="Sequences that are written together.")]
Steps = Annotated[int, typer.Option("--steps", help="Updates of the drafter.")]
Batch = Annotated[int, typer.Option("--batch", help="Sequences an update.")]
Rate = Annotated[float, typer.Option("--lr", help="Highest learning rate.")]
LOSSES = "kl, rkl (reverse), jsd, tvd, tvdpp, nla (negative log acceptance), ce (hard label) or mix (kl + tvd)."
Licence = Annotated[str, typer.Option("--licence", help="A line for the drafter's card.")]
Keep = Annotated[bool, typer.Option("--keep/--no-keep", help="Keep it in the data folder, for methods to find.")]
SaveEvery = Annotated[float, typer.Option("--save-every", help="Least minutes between checkpoints.")]
CheckpointEvery = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-every", show_default=False,
        help="Updates between two measurements, each with a checkpoint; else 100, with one as --save-every allows.",
    ),
]  # fmt: skip
MEASURE_EVERY = 100


def _setting(*names: str, help: str, panel: str = "Settings of all kinds (defaults: outrider train kinds)") -> Any:
    """A setting of a kind: None means not given, and the kind's own default holds."""
    return typer.Option(*names, help=help, show_default=False, rich_help_panel=panel)


def _some(*names: str, help: str) -> Any:
    """One that not every kind has."""
    return _setting(*names, help=help, panel="Settings of some kinds (defaults: outrider train kinds)")


app = typer.Typer(no_args_is_help=True, help="Make a drafter for a model, from text that the model writes itself.")


@app.command()
@resumable()
def data(
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the text goes, and resumes from.")],
    model: Model = "smollm2",
    tokens: Tokens = "5M",
    length: Length = 1024,
    shard: Shard = 1024,
    about_every: Annotated[
        int, typer.Option("--about-every", help="Of so many shards, one is about text of the others; 0: none.")
    ] = 3,
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="Of the answers; each sequence gets one of these.")
    ] = "0,0,0.7,0.7,1",
    loop: Annotated[int, typer.Option("--loop", help="End a turn that has said so many tokens again; 0: never.")] = 24,
    seed: Annotated[int, typer.Option("--seed", help="Of the text.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = None,
) -> None:
    """Let the target write prompts and answers, to train its drafter on.

    Run it again after an interruption: it goes on where it was.
    """
    check_json(json)
    wanted = parse_count(tokens)
    if min(length, shard) < 1 or min(about_every, loop) < 0:
        raise InputError("--length and --shard must be above zero, --about-every and --loop zero or more")
    answer_temperatures = tuple(numbers("--temperatures", temperatures))
    from outrider.models import load_model
    from outrider.train.text.selfdata import DataPlan, sampled, write_data

    one_process("data")
    target = load_model(model, device=device, dtype=dtype)
    plan = DataPlan(wanted, length, shard, answer_temperatures, loop=loop, about_every=about_every, seed=seed)
    with progress_bar() as show:
        text = write_data(target, plan, folder, lambda done, of: show(done, of, "writing text"))
    rows, all_rows = len(text.tokens), sampled(folder, plan)
    if json != STDOUT:
        out().print(
            f"{folder}: {text.tokens.numel():,} tokens, {text.answer_tokens:,} of them answers, in {rows:,} sequences; "
            f"{all_rows - rows:,} repeated ones left out"
        )
    emit(json, {"folder": str(folder), "sequences": rows, "repeated": all_rows - rows,
                "tokens": text.tokens.numel(), "answers": text.answer_tokens})  # fmt: skip


@app.command()
def kinds(json: Json = None) -> None:
    """List the kinds of drafters that `train run` makes, with their settings."""
    check_json(json)
    from rich.box import SIMPLE
    from rich.table import Table

    rows = [
        {"kind": kind.name, "summary": kind.summary, "settings": {
            name: {"default": setting.default, "help": setting.metadata.get("help", "")}
            for name, setting in kind.settings.items()
        }}
        for kind in KINDS.values()
    ]  # fmt: skip
    if json != STDOUT:
        listed = Table("kind", "setting", "default", "meaning", box=SIMPLE)
        for kind in KINDS.values():
            listed.add_row(f"[bold]{kind.name}[/]", "", "", kind.summary)
            for name, setting in kind.settings.items():
                default = (
                    ",".join(map(str, setting.default)) if isinstance(setting.default, tuple) else str(setting.default)
                )
                listed.add_row("", name, default, setting.metadata.get("help", ""))
        out().print(listed)
    emit(json, rows)


@app.command()
@resumable()
def run(
    text: Text,
    folder: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="A folder for it as well; training resumes from there."),
    ] = None,
    begin: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="A finished drafter to go on from.")
    ] = None,
    kind: Annotated[str, typer.Option("--kind", help=f"What to train: {', '.join(KINDS)}.")] = "eagle3",
    model: Model = "smollm2",
    steps: Annotated[int | None, _setting("--steps", help="Updates of the drafter.")] = None,
    batch: Annotated[int | None, _setting("--batch", help="Sequences an update.")] = None,
    rate: Annotated[float | None, _setting("--lr", help="Highest learning rate.")] = None,
    loss: Annotated[str | None, _setting("--loss", help=LOSSES)] = None,
    seed: Annotated[int | None, _setting("--seed", help="Of the weights and of the batches.")] = None,
    layers: Annotated[str | None, _some("--layers", help="Whose inputs are read, such as 2,15,27.")] = None,
    vocab: Annotated[int | None, _some("--vocab", help="Tokens the drafter can say.")] = None,
    intermediate: Annotated[int | None, _some("--intermediate", help="Width of its MLP; 0: the target's.")] = None,
    unroll: Annotated[int | None, _some("--unroll", help="Steps trained on its own states.")] = None,
    eight_bits: Annotated[bool | None, _some("--eight-bits/--half", help="Store matrices as int8.")] = None,
    drafter: Annotated[str | None, _some("--drafter", help="Whose drafts a head judges: a folder or name.")] = None,
    option: Annotated[
        list[str] | None, _some("--option", "-o", help="name=value, any other setting of the kind; repeatable.")
    ] = None,
    keep: Keep = True,
    licence: Licence = "",
    save_every: SaveEvery = 2.0,
    checkpoint_every: CheckpointEvery = None,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = None,
) -> None:
    """Train a drafter on the target's hidden states over text it wrote.

    It is kept among your drafters (`outrider drafters list`), where methods of this target find it. Run it again after
    an interruption: it goes on where it was. `outrider train kinds` lists the settings. On several GPUs:
    accelerate launch -m outrider train run ...
    """
    check_json(json)
    if folder is None and not keep:
        raise InputError("--no-keep without --out leaves no drafter; name a folder with --out")
    given = {"steps": steps, "batch": batch, "lr": rate, "loss": loss, "seed": seed, "layers": layers, "vocab": vocab,
             "intermediate": intermediate, "unroll": unroll, "eight_bits": eight_bits, "drafter": drafter}  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None} | parse_options(option)
    _pace(save_every, checkpoint_every)
    plan, said = plan_of(find_kind(kind), given), find_kind(kind).measured
    if folder is not None:
        check_drafter_folder(folder)
    check_folders(text, begin)
    from outrider.models import load_model
    from outrider.train.crew import crew
    from outrider.train.text.selfdata import read_data

    together = crew()
    target = load_model(model, device=device or together.device, dtype=dtype)
    read = read_data(text, target.fingerprint)
    place = folder or work_folder(kind, target, read, plan, begin)
    source = {"folder": str(text.resolve()), "sequences": len(read.tokens), "tokens": read.tokens.numel(),
              "answer_tokens": read.answer_tokens}  # fmt: skip
    with progress_bar() as show:
        _, curve = train_drafter(
            kind, target, read, plan, place, licence=licence, begin=begin, **_pace(save_every, checkpoint_every),
            recipe={"data": source}, on_progress=lambda step, of, point: show(step, of, _line(point, said)),
        )  # fmt: skip
    if not together.first:
        return
    kept = _keep(place, "outrider train run") if keep else None
    if folder is None:
        shutil.rmtree(place)
    _tell(folder, kept, f"{kind}; {_line(curve[-1], said)}", json, {"kind": kind}, curve)


@app.command(name="eval")
def evaluate(
    drafter: Drafter,
    prompts: Annotated[Path, typer.Option("--prompts", metavar="FILE", help="JSONL with prompt, turns or messages.")],
    model: Model = "smollm2",
    budgets: Annotated[str, typer.Option("--budgets", help="Nodes of the trees.")] = "16,32",
    temperatures: Annotated[str, typer.Option("--temperatures", help="0 is greedy.")] = "0,1",
    depth: Annotated[int, typer.Option("--depth", help="How deep a tree may be.")] = 6,
    new: Annotated[int, typer.Option("--max-new-tokens", help="Of each answer.")] = 128,
    batch: Annotated[int, typer.Option("--batch", help="Sequences that run together.")] = 8,
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first so many prompts.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the sampled answers.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = None,
) -> None:
    """Decode prompts with a trained drafter and say how much of it is accepted."""
    check_json(json)
    if min(depth, new, batch) < 1:
        raise InputError("--depth, --max-new-tokens and --batch must be above zero")
    from rich.table import Table

    from outrider.models import load_model
    from outrider.store.prompts import read_prompts
    from outrider.train.evaluate import EvalPlan
    from outrider.train.evaluate import evaluate as decode

    plan = EvalPlan(
        tuple(int(n) for n in numbers("--budgets", budgets)), tuple(numbers("--temperatures", temperatures)),
        depth, new, batch, seed=seed,
    )  # fmt: skip
    listed = read_prompts(prompts, limit)
    check_folders(drafter=drafter)
    target = load_model(model, device=device, dtype=dtype)
    with progress_bar() as show:
        rows = decode(target, drafter, listed, plan, lambda done, of: show(done, of, "decoding"))
    if json != STDOUT:
        table = Table("group", *(f"{n} nodes, T={t:g}" for n in plan.budgets for t in plan.temperatures))
        for group in dict.fromkeys(row.group for row in rows):
            table.add_row(group, *(f"{row.accepted:.2f}" for row in rows if row.group == group))
        out().print(table)
    emit(json, {"drafter": str(drafter), "plan": asdict(plan), "rows": [row.as_dict() for row in rows]})


@app.command()
@resumable()
def distill(
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the draft goes, and resumes from.")],
    model: Model = "smollm2",
    layers: Annotated[str, typer.Option("--layers", help="How many layers to keep, or which: 0,1,2,28,29.")] = "5",
    tokens: Tokens = "6M",
    length: Length = 1024,
    shard: Shard = 1024,
    steps: Steps = 3000,
    batch: Batch = 32,
    rate: Rate = 1e-3,
    loss: Annotated[str, typer.Option("--loss", help=LOSSES)] = "mix",
    seed: Annotated[int, typer.Option("--seed", help="Of the text and of the batches.")] = 0,
    keep: Keep = True,
    licence: Licence = "",
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FOLDER", help="Where the text is, of whatever settings; else OUT/data."),
    ] = None,
    save_every: SaveEvery = 2.0,
    checkpoint_every: CheckpointEvery = None,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = None,
) -> None:
    """Keep a few of the target's layers and align them with it, on text it writes itself.

    Run it again after an interruption: it goes on where it was.
    """
    check_json(json)
    wanted = parse_count(tokens)
    if min(length, shard, steps, batch) < 1 or not (rate > 0 and math.isfinite(rate)):
        raise InputError("--length, --shard, --steps, --batch and --lr must be above zero")
    _pace(save_every, checkpoint_every)
    check_drafter_folder(folder)
    from outrider.models import load_model
    from outrider.train.kinds.distill import DistillPlan, pick_layers
    from outrider.train.kinds.distill import distill as train
    from outrider.train.text.selfdata import DataPlan, settings_of, write_data

    target = load_model(model, device=device, dtype=dtype)
    chosen = pick_layers(layers, int(target.model.config.get_text_config().num_hidden_layers))
    plan = DistillPlan(layers=chosen, steps=steps, batch=batch, lr=rate, loss=loss, seed=seed)
    sampling, where = DataPlan(wanted, length, shard, seed=seed), data or folder / "data"
    with progress_bar() as show:
        text = write_data(
            target, sampling, where, lambda done, of: show(done, of, "writing text"), as_it_is=data is not None
        )  # fmt: skip
        written = settings_of(min(where.glob("shard-*.safetensors")))
        _, curve = train(
            target, text, plan, folder, licence=licence, **_pace(save_every, checkpoint_every),
            recipe={"data": {**written, "tokens": wanted}},
            on_progress=lambda step, of, point: show(step, of, _line(point)),
        )  # fmt: skip
    kept = _keep(folder, "outrider train distill") if keep else None
    said = f"layers {', '.join(map(str, chosen))}; {_line(curve[-1])}"
    _tell(folder, kept, said, json, {"layers": chosen}, curve)


app.command()(trim)
app.command()(replay)
app.command()(blockffn)
app.command()(hybrid)
app.command(name="on-policy")(on_policy)


def parse_count(text: str) -> int:
    """`12M` -> 12,000,000."""
    number, factor = (text[:-1], SUFFIXES[text[-1].lower()]) if text[-1:].lower() in SUFFIXES else (text, 1)
    try:
        count = float(number) * factor
    except ValueError:
        count = math.nan
    if not (count >= 1 and math.isfinite(count)):
        raise InputError(f"--tokens {text}: write a number such as 500k or 12M")
    return int(count)


def _keep(folder: Path, origin: str) -> str:
    """The name under which the drafter is kept."""
    from outrider.models.kept import keep

    return keep(folder, origin).name


def _tell(
    folder: Path | None, kept: str | None, said: str, json: str | None, about: dict[str, Any], curve: list[Point]
) -> None:  # fmt: skip
    """Where the drafter is and how well it does."""
    if json != STDOUT:
        places = [str(folder)] * (folder is not None) + [f"kept as {kept}"] * (kept is not None)
        out().print(f"{', '.join(places)}: {said}", markup=False)
    where = {"folder": None if folder is None else str(folder), "kept": kept}
    emit(json, {**where, **about, "curve": [asdict(point) for point in curve]})


def _pace(save_every: float, checkpoint_every: int | None) -> dict[str, Any]:
    """What the loop is told: updates between measurements, and the least seconds between checkpoints."""
    if checkpoint_every is None:
        return {"save_every": 60 * save_every, "measure_every": MEASURE_EVERY}
    if checkpoint_every < 1:
        raise InputError(f"--checkpoint-every {checkpoint_every}: use 1 or more updates")
    return {"save_every": 0.0, "measure_every": checkpoint_every}


def _line(point: Point, said: tuple[str, str] = ("greedy", "drawn")) -> str:
    return f"held-out acceptance {point.greedy:.3f} {said[0]}, {point.sampled:.3f} {said[1]}"
