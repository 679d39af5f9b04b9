"""`outrider compare`: methods against plain decoding, interleaved on the same prompts; a table, a page, JSON."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.options import MeasuredModel, PromptOptions, SamplingOptions, parse_options
from outrider.cli.output import Html, Json, check_html, check_json, give, progress_bar
from outrider.core.errors import InputError


def compare(
    methods: Annotated[
        str, typer.Option("--methods", help="Names of `outrider methods`; label=name runs one again under a label.")
    ] = "plain,prompt-lookup,draft-model",
    prompts: PromptOptions = PromptOptions(),
    rounds: Annotated[int, typer.Option("--rounds", help="Repeat everything so often.")] = 1,
    batch: Annotated[int, typer.Option("--batch", help="Prompts that run together.")] = 1,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="METHOD.NAME=VALUE", help="For one method; repeatable."),
    ] = None,
    html: Html = None,
    json: Json = None,
    model: MeasuredModel = MeasuredModel(),
    sampling: SamplingOptions = SamplingOptions(),
) -> None:
    """Measure methods against plain decoding on the same prompts.

    Plain decoding always takes part. Ctrl-C ends the measurement; what is complete by then is reported.
    """
    check_json(json)
    page = check_html(html)
    from outrider.bench.compare import Plan
    from outrider.bench.compare import compare as run
    from outrider.bench.contenders import method_contender, parse_specs
    from outrider.bench.figures import result
    from outrider.bench.report import html as render
    from outrider.bench.report import terminal

    specs = parse_specs(methods, parse_options(option))
    plan = Plan(sampling.params(), rounds, batch, prompts.raw)
    if sampling.extra:
        raise InputError("--bad-word cannot be used in a comparison; leave it out")
    chosen = prompts.chosen()
    with model.load(max_slots=batch) as engine:
        contenders = [method_contender(engine, spec) for spec in specs]
        with progress_bar() as on_progress:
            comparison = run(engine, chosen, contenders, plan, prompts.source, on_progress)
    figures = result(comparison)
    give(figures, terminal(figures), render, json, page)
    if not comparison.complete:
        raise typer.Exit(130)
