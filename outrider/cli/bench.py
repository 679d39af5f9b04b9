"""`outrider bench ...`: suites x systems x settings in one resumable run; peers, reports, regressions, step costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.expand import expand
from outrider.cli.options import Device, Dtype, MeasuredModel, Model, parse_options
from outrider.cli.output import Html, Json, check_folder, check_html, check_json, emit, err, give, out, progress_bar
from outrider.cli.shell import STDOUT, again
from outrider.core.errors import InputError

app = typer.Typer(no_args_is_help=True, help="Measure methods and other runtimes side by side.")

PAGE, DATA, TEXT = "report.html", "results.json", "report.md"


def run(
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Journal and report; resumes from it.")],
    suite: Annotated[
        list[str] | None,
        typer.Option("--suite", help="synthetic, built-in, spec_bench[:FILE], long:TEXT, traffic:TEXT, FILE.jsonl."),
    ] = None,
    systems: Annotated[
        str,
        typer.Option(
            "--systems",
            help="Methods, peers, PEER:MODE; or methods, peers, all.",
            show_default="plain, prompt-lookup, draft-model, transformers",
        ),
    ] = "plain,prompt-lookup,draft-model,transformers",
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes, as in 1,4,16.")] = "1",
    temperature: Annotated[str, typer.Option("--temperature", "-t", help="Temperatures, as in 0,1.")] = "0",
    rounds: Annotated[int, typer.Option("--rounds", help="Repeat everything so often; 3 or more.")] = 3,
    limit: Annotated[int | None, typer.Option("--limit", help="First so many prompts of each group.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Most tokens of an answer.")] = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own end.")] = False,
    memory: Annotated[
        str, typer.Option("--memory", help="What drafters learn: reset at every prompt, or keep through a round.")
    ] = "reset",
    seed: Annotated[int, typer.Option("--seed", help="Of sampled texts.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself: no chat template.")] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="METHOD.NAME=VALUE", help="For one method; repeatable."),
    ] = None,
    max_context: Annotated[int, typer.Option("--max-context", help="Positions of a sequence; bounds memory.")] = 2048,
    gguf: Annotated[str | None, typer.Option("--gguf", help="The model for runtimes that read GGUF.")] = None,
    draft: Annotated[str | None, typer.Option("--draft", help="Draft model folder for peers that assist.")] = None,
    json: Json = None,
    model: MeasuredModel = MeasuredModel(),
) -> None:
    """Measure. Run it again after an interruption: finished rows are not repeated."""
    check_json(json)
    from outrider.bench.journal import FILE, Journal
    from outrider.bench.peer import Processes
    from outrider.bench.runner import Bench, results
    from outrider.bench.runner import run as measure
    from outrider.bench.suites import find
    from outrider.bench.systems import contenders, parse_systems, peer_settings
    from outrider.core.params import SamplingParams

    asked = parse_systems(systems, parse_options(option))
    if memory not in ("reset", "keep"):
        raise InputError(f"--memory {memory}: use reset or keep")
    bench = Bench(
        [find(name) for name in suite or ["synthetic"]],
        SamplingParams(max_new_tokens=max_new_tokens, seed=seed, ignore_eos=ignore_eos),
        _numbers("--temperature", temperature, float), _numbers("--batch", batch, int), rounds, limit,
        memory, raw,  # type: ignore[arg-type]
    )  # fmt: skip
    for name, place in (("--gguf", gguf), ("--draft", draft)):
        if place is not None and not Path(place).exists():
            raise InputError(f"{name} {place}: no such file or folder; give the path of an existing one")
    check_folder(folder, (DATA, TEXT, PAGE), (FILE,))
    journal = Journal(folder)
    loaded = model.load(max_slots=max(bench.batches), max_context=max_context)
    with loaded as engine, Processes() as processes, progress_bar() as on_progress:
        settings = peer_settings(engine, model.model, asked, gguf, draft, memory)
        made = contenders(engine, asked, settings, processes)
        done = measure(engine, bench, made, journal, on_progress)
    journal.close()
    _give(folder, results(journal), json)
    if not done:
        typer.echo(f"interrupted; go on with: {again()}", err=True)
        raise typer.Exit(130)


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The --out folder of a bench.")], json: Json = None
) -> None:
    """Make the report again from the journal alone; needs neither model nor peers."""
    check_json(json)
    from outrider.bench.runner import read

    _give(folder, read(folder), json)


def setup(
    peer: Annotated[list[str], typer.Argument(metavar="PEER...", help="Names of peers, or all.")],
    fresh: Annotated[bool, typer.Option("--fresh", help="Make the environment again.")] = False,
    json: Json = None,
) -> None:
    """Make an environment of its own for a peer, in the user's cache."""
    check_json(json)
    from outrider.bench.environments import PEERS, find_peer, set_up

    infos = [find_peer(name) for name in (PEERS if peer == ["all"] else peer)]
    made: dict[str, Any] = {}
    console = err()
    for info in infos:
        with console.status(f"{info.name}: ...") as status:

            def say(line: str, name: str = info.name, status: Any = status) -> None:
                status.update(f"{name}: {line}")

            try:
                made[info.name] = set_up(info, say, fresh)
            except (InputError, OSError) as error:
                made[info.name] = {"error": str(error)}
    if json != STDOUT:
        for name, facts in made.items():
            told = facts.get("error") or ", ".join(f"{p} {v}" for p, v in facts["packages"].items()) or "nothing to do"
            out().print(f"{name}: {told}", markup=False)
    emit(json, made)
    if any("error" in facts for facts in made.values()):
        raise typer.Exit(2)


def diff(
    before: Annotated[Path, typer.Argument(metavar="A.json")],
    after: Annotated[Path, typer.Argument(metavar="B.json")],
    json: Json = None,
) -> None:
    """What became faster or slower from A to B. Status 1 where a system is slower or says something else."""
    check_json(json)
    from outrider.bench.diff import diff as compare
    from outrider.bench.diff import load, terminal

    found = compare(load(before), load(after))
    if json != STDOUT:
        out().print(terminal(found))
    emit(json, found)
    if any(row["verdict"] in ("slower", "output changed") for row in found["rows"]):
        raise typer.Exit(1)


def steps(
    rows: Annotated[str, typer.Option("--rows", help="Rows of a sequence: tree sizes plus one.")] = "1,2,4,8,16,32,64",
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes, as in 1,4,16.")] = "1,4",
    context: Annotated[str, typer.Option("--context", help="Tokens in the cache, as in 128,1024.")] = "128,1024",
    repeats: Annotated[int, typer.Option("--repeats", help="Times each; the median counts.")] = 5,
    html: Html = None,
    json: Json = None,
    model: MeasuredModel = MeasuredModel(),
) -> None:
    """Time a step of the target against rows, batch and context, next to the floor of reading it once."""
    check_json(json)
    page = check_html(html)
    from outrider.bench.steps import html as render
    from outrider.bench.steps import measured_steps, terminal

    sizes, batches, contexts = (
        _numbers(name, text, int) for name, text in (("--rows", rows), ("--batch", batch), ("--context", context))
    )
    if repeats < 1:
        raise InputError(f"--repeats {repeats}: use 1 or more")
    with model.load(max_slots=max(batches), max_context=max(contexts) + max(sizes) + 1) as engine:
        made = measured_steps(engine, sizes, batches, contexts, repeats)
    give(made, terminal(made), render, json, page)


def inflate(
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the large model is written.")],
    shape: Annotated[str, typer.Option("--shape", help="8b, 1b, or as in hidden=1024,layers=32,mlp=4096.")] = "8b",
    json: Json = None,
    model: Model = "smollm2",
    device: Device = None,
    dtype: Dtype = "bfloat16",
) -> None:
    """Widen a small Llama to the shape of a large one that says the same: real acceptance at real cost."""
    check_json(json)
    check_folder(folder, ("*",), ())
    from outrider.bench.inflate import difference, parse_shape
    from outrider.bench.inflate import inflate as widen
    from outrider.models import load_model

    parse_shape(shape)
    loaded = load_model(model, device=device, dtype=dtype)
    with err().status("widening"):
        big = widen(loaded.model, parse_shape(shape, loaded.model.config))
        worst, agree = difference(loaded.model, big)
    with err().status(f"writing {folder}"):
        big.save_pretrained(folder)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(folder)
    made = {"folder": str(folder), "parameters": big.num_parameters(), "difference": worst, "same_token": agree}
    if json != STDOUT:
        told = f"{made['parameters'] / 1e9:.2f}B parameters, largest difference {worst:.1e} of the largest logit, "
        out().print(f"{folder}: {told}{100 * agree:.0f}% of rows choose the same token", markup=False)
    emit(json, made)


for _command in (run, setup, report, diff, steps, inflate):
    app.command(_command.__name__)(expand(_command))


def _give(folder: Path, figures: dict[str, Any], json: str | None) -> None:
    """The same as JSON, Markdown, a page where matplotlib is there, and tables."""
    from importlib.util import find_spec

    from outrider.bench.summary import html, markdown, terminal
    from outrider.core.files import write_atomic

    emit(str(folder / DATA), figures)
    write_atomic(folder / TEXT, markdown(figures))
    if find_spec("matplotlib") is not None:
        write_atomic(folder / PAGE, html(figures))
    else:
        err().print(f"no plots without matplotlib; later, anywhere: outrider bench report {folder}", markup=False)
    if json != STDOUT:
        out().print(terminal(figures))
    emit(json, figures)


def _numbers(name: str, text: str, kind: type) -> list[Any]:
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 0 or (kind is int and min(values) < 1):
        raise InputError(f"{name} {text}: write numbers with commas between them, such as 1,4")
    return list(dict.fromkeys(values))
