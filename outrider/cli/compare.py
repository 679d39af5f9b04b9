"""`outrider compare`: methods against plain decoding, interleaved on the same prompts; a table, a page, JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import Precision, Runtime, SamplingOptions, parse_options
from outrider.cli.output import Html, Json, check_html, check_json, emit, out, progress_bar
from outrider.cli.shell import STDOUT
from outrider.errors import InputError


def compare(
    methods: Annotated[
        str, typer.Option("--methods", help="Names of `outrider methods`; label=name runs one again under a label.")
    ] = "plain,prompt-lookup,draft-model",
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", metavar="FILE", help="JSONL with prompt, turns or messages; else built in."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="First so many prompts of each group.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Repeat everything so often.")] = 1,
    batch: Annotated[int, typer.Option("--batch", help="Prompts that run together.")] = 1,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself: no chat template.")] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="METHOD.NAME=VALUE", help="For one method; repeatable."),
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
    """Measure methods against plain decoding on the same prompts.

    Plain decoding always takes part. Ctrl-C ends the measurement; what is complete by then is reported.
    """
    check_json(json)
    page = check_html(html)
    from outrider.bench.compare import Plan, per_group
    from outrider.bench.compare import compare as run
    from outrider.bench.contenders import method_contender, parse_specs
    from outrider.bench.figures import result
    from outrider.bench.report import html as render
    from outrider.bench.report import terminal
    from outrider.files import write_atomic
    from outrider.prompts import built_in_prompts, read_prompts

    specs = parse_specs(methods, parse_options(option))
    plan = Plan(sampling.params(), rounds, batch, raw)
    if sampling.extra:
        raise InputError("--bad-word cannot be used in a comparison; leave it out")
    chosen = per_group(read_prompts(prompts) if prompts else built_in_prompts(), limit)
    source = Path(prompts).name if prompts else "built-in"
    import outrider

    with outrider.load(
        model, method="plain", device=device, dtype=dtype, runtime=runtime, precision=precision, max_slots=batch
    ) as engine:
        contenders = [method_contender(engine, spec) for spec in specs]
        with progress_bar() as on_progress:
            comparison = run(engine, chosen, contenders, plan, source, on_progress)
    figures = result(comparison)
    if json != STDOUT:
        out().print(terminal(figures))
    emit(json, figures)
    if page is not None:
        write_atomic(page, render(figures))
    if not comparison.complete:
        raise typer.Exit(130)
