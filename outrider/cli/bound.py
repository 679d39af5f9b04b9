"""`outrider bound`: what a better acceptance rule or a better drafter could still bring; tables, a page, JSON."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.options import MeasuredModel, PromptOptions, SamplingOptions, parse_options
from outrider.cli.output import Html, Json, check_html, check_json, give, progress_bar
from outrider.core.errors import InputError


def bound(
    draft: Annotated[
        str, typer.Option("--draft", "-d", help="Draft model: hub id, folder or .gguf; else the one for this model.")
    ] = "",
    prompts: PromptOptions = PromptOptions(),
    positions: Annotated[int, typer.Option("--positions", help="Look at no more places than this.")] = 200,
    chain: Annotated[int, typer.Option("--chain", help="Depth of the chain.")] = 5,
    tree: Annotated[str, typer.Option("--tree", help="Children at each depth of the trees.")] = "3,2,1,1",
    trees: Annotated[int, typer.Option("--trees", help="Trees of each shape at each place.")] = 1,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="name=value of the method draft-model; repeatable.")
    ] = None,
    html: Html = None,
    json: Json = None,
    model: MeasuredModel = MeasuredModel(),
    sampling: SamplingOptions = SamplingOptions(),
) -> None:
    """Tell whether a better acceptance rule or a better drafter is the next step.

    The temperature is 1 where none is given, and texts have 64 tokens. Ctrl-C ends it; what was found is reported.
    """
    check_json(json)
    page = check_html(html)
    from outrider.bench.bound.bound import Plan, check_options
    from outrider.bench.bound.bound import bound as run
    from outrider.bench.bound.figures import result
    from outrider.bench.bound.report import html as render
    from outrider.bench.bound.report import terminal

    plan = Plan(sampling.params(temperature=1.0, max_new_tokens=64), positions, chain, tree, trees, prompts.raw)
    options = parse_options(option) | ({"draft": draft} if draft else {})
    check_options(options)
    if sampling.extra:
        raise InputError("--bad-word cannot be used here; leave it out")
    chosen = prompts.chosen()
    with model.load(max_slots=1, strict=True) as engine, progress_bar() as on_progress:
        made = run(engine, chosen, plan, options, prompts.source, on_progress)
    figures = result(made)
    give(figures, terminal(figures), render, json, page)
    if not made.complete:
        raise typer.Exit(130)
