"""`outrider train ...`: drafters made from nothing but the target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.output import Json, check_json, emit, err, out
from outrider.cli.shell import STDOUT
from outrider.errors import InputError

if TYPE_CHECKING:
    from outrider.train.distill import Point

SUFFIXES = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}

app = typer.Typer(no_args_is_help=True, help="Make a drafter for a model, from text that the model writes itself.")


@app.command()
def distill(
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the draft goes, and resumes from.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="smollm2 (embedded), a hub id, a folder or a .gguf file.")
    ] = "smollm2",
    layers: Annotated[str, typer.Option("--layers", help="How many layers to keep, or which: 0,1,2,28,29.")] = "5",
    tokens: Annotated[str, typer.Option("--tokens", help="How much text the target writes: 500k, 12M, ...")] = "6M",
    length: Annotated[int, typer.Option("--length", help="Tokens of one sequence.")] = 1024,
    shard: Annotated[int, typer.Option("--shard", help="Sequences that are written together.")] = 1024,
    steps: Annotated[int, typer.Option("--steps", help="Updates of the draft.")] = 3000,
    batch: Annotated[int, typer.Option("--batch", help="Sequences an update.")] = 32,
    rate: Annotated[float, typer.Option("--lr", help="Highest learning rate.")] = 1e-3,
    loss: Annotated[str, typer.Option("--loss", help="kl, tvd or mix.")] = "mix",
    seed: Annotated[int, typer.Option("--seed", help="Of the text and of the batches.")] = 0,
    licence: Annotated[str, typer.Option("--licence", help="A line for the draft's card.")] = "",
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FOLDER", help="Where the text is; else OUT/data.")
    ] = None,
    save_every: Annotated[float, typer.Option("--save-every", help="Minutes between checkpoints.")] = 2.0,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, ...")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of the target: float32, bfloat16 or float16.")] = None,
    json: Json = None,
) -> None:
    """Keep a few of the target's layers and align them with it, on text it writes itself.

    Run it again after an interruption: it goes on where it was.
    """
    check_json(json)
    wanted = parse_count(tokens)
    if min(length, shard, steps, batch) < 1 or not (rate > 0 and math.isfinite(rate)):
        raise InputError("--length, --shard, --steps, --batch and --lr must be above zero")
    from outrider.models import load_model
    from outrider.train.distill import DistillPlan, pick_layers
    from outrider.train.distill import distill as train
    from outrider.train.selfdata import DataPlan, write_data

    target = load_model(model, device=device, dtype=dtype)
    chosen = pick_layers(layers, int(target.model.config.get_text_config().num_hidden_layers))
    plan = DistillPlan(chosen, steps, batch, rate, loss=loss, seed=seed)
    sampling = DataPlan(wanted, length, shard, seed=seed)
    with _bar() as (show, describe):
        describe("writing text")
        text = write_data(target, sampling, data or folder / "data", show)
        describe("training")
        _, curve = train(
            target, text, plan, folder, licence=licence, save_every=60 * save_every,
            recipe={"data": asdict(sampling)}, on_progress=lambda step, of, point: show(step, of, _line(point)),
        )  # fmt: skip
    if json != STDOUT:
        out().print(f"{folder}: layers {', '.join(map(str, chosen))}; {_line(curve[-1])}")
    emit(json, {"folder": str(folder), "layers": chosen, "curve": [asdict(point) for point in curve]})


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


def _line(point: Point) -> str:
    return f"held-out acceptance {point.greedy:.3f} greedy, {point.sampled:.3f} drawn"


@contextmanager
def _bar() -> Iterator[tuple[Callable[..., None], Callable[[str], None]]]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = err()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
               TextColumn("{task.fields[note]}"))  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, note="")

        def show(done: int, total: int, note: str = "") -> None:
            bar.update(task, completed=done, total=total, note=note)

        def describe(text: str) -> None:
            bar.reset(task, total=None, description=text, note="")

        yield show, describe
