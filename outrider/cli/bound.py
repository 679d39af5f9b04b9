"""`outrider bound`: what a better acceptance rule or a better drafter could still bring; tables, a page, JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import Precision, Runtime, SamplingOptions, parse_options
from outrider.cli.output import Html, Json, check_html, check_json, emit, out, progress_bar
from outrider.cli.shell import STDOUT
from outrider.errors import InputError


def bound(
    draft: Annotated[
        str, typer.Option("--draft", "-d", help="Draft model: hub id, folder or .gguf; else the one for this model.")
    ] = "",
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", metavar="FILE", help="JSONL with prompt, turns or messages; else built in."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="First so many prompts of each group.")] = None,
    positions: Annotated[int, typer.Option("--positions", help="Look at no more places than this.")] = 200,
    chain: Annotated[int, typer.Option("--chain", help="Depth of the chain.")] = 5,
    tree: Annotated[str, typer.Option("--tree", help="Children at each depth of the trees.")] = "3,2,1,1",
    trees: Annotated[int, typer.Option("--trees", help="Trees of each shape at each place.")] = 1,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself: no chat template.")] = False,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="name=value of the method draft-model; repeatable.")
    ] = None,
    html: Html = None,
    json: Json = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="smollm2 (embedded), a hub id, a folder or a .gguf file.")
    ] = "smollm2",
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, ...")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16.")] = None,
    runtime: Runtime = "auto",
    precision: Precision = None,
    sampling: SamplingOptions = SamplingOptions(),
) -> None:
    """Tell whether a better acceptance rule or a better drafter is the next step.

    The temperature is 1 where none is given, and texts have 64 tokens. Ctrl-C ends it; what was found is reported.
    """
    check_json(json)
    page = check_html(html)
    from outrider.bench.bound import Plan, check_options
    from outrider.bench.bound import bound as run
    from outrider.bench.bound_figures import result
    from outrider.bench.bound_report import html as render
    from outrider.bench.bound_report import terminal
    from outrider.bench.compare import per_group
    from outrider.files import write_atomic
    from outrider.prompts import built_in_prompts, read_prompts

    plan = Plan(sampling.params(temperature=1.0, max_new_tokens=64), positions, chain, tree, trees, raw)
    options = parse_options(option) | ({"draft": draft} if draft else {})
    check_options(options)
    if sampling.extra:
        raise InputError("--bad-word cannot be used here; leave it out")
    chosen = per_group(read_prompts(prompts) if prompts else built_in_prompts(), limit)
    source = Path(prompts).name if prompts else "built-in"
    import outrider

    loaded = outrider.load(
        model, method="plain", device=device, dtype=dtype, runtime=runtime, precision=precision, max_slots=1,
        strict=True,
    )  # fmt: skip
    with loaded as engine, progress_bar() as on_progress:
        made = run(engine, chosen, plan, options, source, on_progress)
    figures = result(made)
    if json != STDOUT:
        out().print(terminal(figures))
    emit(json, figures)
    if page is not None:
        write_atomic(page, render(figures))
    if not made.complete:
        raise typer.Exit(130)
