"""`outrider explain`: one generation as a page that shows every step of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import ModelWithPage, SamplingOptions
from outrider.cli.output import Json, check_json, check_page, emit, err, out, status_line
from outrider.cli.shell import STDOUT, on_interrupt
from outrider.core.errors import InputError

if TYPE_CHECKING:
    from outrider.core.generation import Generation
    from outrider.core.params import SamplingParams


def explain(
    prompt: Annotated[str, typer.Argument(help="What to answer.", show_default=False)],
    page: Annotated[str, typer.Option("-o", "--out", metavar="FILE", help="The page: one file, for any browser.")] = (
        "explain.html"
    ),
    plain: Annotated[bool, typer.Option("--plain/--no-plain", help="Run plain decoding, too, to show beside it.")] = (
        True
    ),
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself: no chat template.")] = False,
    json: Json = None,
    *,
    model: ModelWithPage,
    sampling: SamplingOptions,
) -> None:
    """Show how a text was made: who brought each token, every step's tree, and what it took.

    Ctrl-C ends the text where it is; the page of what is there is still written.
    """
    if not prompt.strip():
        raise InputError("the prompt is empty; give at least one word")
    params, extra = sampling.params(), sampling.extra
    if params.n != 1:
        raise InputError(f"--samples {params.n}: a page shows one sample; leave it out")
    check_json(json)
    path = check_page("-o", page)
    from outrider.core.text import token_decoder
    from outrider.explain import explain as explained
    from outrider.explain import traced

    params = traced(params)
    with model.load() as engine:
        messages = prompt if raw else [{"role": "user", "content": prompt}]
        runs = _run(engine, messages, params, extra, [model.method, *(["plain"] if plain else [])])
        made = explained(runs, prompt, params, token_decoder(engine.tokenizer), model.model)
    made.save(path)
    if json != STDOUT:
        out().print(made.generation.text, markup=False, soft_wrap=True)
        for run in runs:
            err().print(status_line(run.stats), style="dim")
    err().print(f"the page is in {path}")
    emit(json, made.document)


def _run(engine: Any, messages: Any, params: SamplingParams, extra: Any, methods: list[str]) -> list[Generation]:
    """One after the other, so that each has the machine to itself; an interrupt ends them with what is there."""
    runs: list[Generation] = []
    for method in methods:
        handle = engine.submit(messages, params, method=method, **extra)
        with on_interrupt(handle.cancel) as interrupted:
            try:
                runs.append(handle.result())
            except KeyboardInterrupt:  # pressed twice: do not wait for the step to end
                runs.append(handle.partial()[0])
                interrupted.append(True)
        if interrupted:
            break
    return runs
