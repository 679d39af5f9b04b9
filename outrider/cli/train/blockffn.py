"""`outrider train blockffn`: a small language model whose feed-forward layers are routed experts, from text files."""

from __future__ import annotations

from dataclasses import fields
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.options import Device
from outrider.cli.output import Json, check_folder, check_json, emit, out, progress_bar
from outrider.cli.shell import STDOUT
from outrider.core.errors import InputError

REPORT = "blockffn.json"  # what a model was trained with and measured at, beside it
Sizes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting, such as hidden=384, layers=9 or sparsity=0.8."),
]


def blockffn(
    text: Annotated[list[Path], typer.Option("--text", metavar="PATH", help="Files or folders of text.")],
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the model goes.")],
    chunk_losses: Annotated[
        bool, typer.Option("--chunk-losses/--no-chunk-losses", help="Let neighbouring tokens share experts.")
    ] = True,
    steps: Annotated[int, typer.Option("--steps", help="Updates.")] = 2000,
    minutes: Annotated[float, typer.Option("--minutes", help="Stop then, the rate lowered by then; 0: never.")] = 0.0,
    characters: Annotated[int, typer.Option("--characters", help="Of text that is read, at most.")] = 100_000_000,
    settings: Sizes = None,
    device: Device = None,
    json: Json = None,
) -> None:
    """Train a BlockFFN model from scratch: each token uses few of its experts, and a stretch of text hardly more.

    The folder then loads like any other model.
    """
    check_json(json)
    check_folder(folder, ("model.safetensors", "config.json"), (REPORT,))
    if steps < 1 or minutes < 0 or characters < 1:
        raise InputError("--steps and --characters must be above zero, --minutes zero or more")
    import torch

    from outrider.models.load import default_device, parse_device
    from outrider.train.blockffn import BlockFFNPlan, encoded, new_tokenizer, read_text, train_blockffn

    chosen = _settings(settings or [], {f.name: type(f.default) for f in fields(BlockFFNPlan)})
    without = {} if chunk_losses else {"local": 0.0, "chunks": 0.0}
    plan = BlockFFNPlan(**{"steps": steps, "seconds": 60 * minutes} | without | chosen)
    at: torch.device = default_device() if device is None else parse_device(device)
    read = read_text(text, characters)
    tokenizer = new_tokenizer(read, plan.vocabulary)
    tokens = encoded(tokenizer, read)
    with progress_bar() as show:
        model, told = train_blockffn(
            tokens, plan, at, lambda done, of, seen: show(done, of, f"training, loss {seen.get('loss', 0):.2f}")
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if json != STDOUT:
        unused = ", ".join(f"{n}: {share:.1%}" for n, share in told["unused by consecutive tokens"].items())
        parameters = sum(weight.numel() for weight in model.parameters())
        out().print(f"{folder}: {parameters:,} parameters, {len(tokens):,} tokens of text")
        out().print(f"perplexity {told['perplexity']:.2f}; experts unused by so many consecutive tokens: {unused}")
    (folder / REPORT).write_text(dumps(told, indent=1), encoding="utf-8")
    emit(json, {"folder": str(folder), "tokens": len(tokens), **told})


def _settings(given: list[str], kinds: dict[str, Any]) -> dict[str, Any]:
    found = dict[str, Any]()
    for one in given:
        name, _, value = one.partition("=")
        if name not in kinds:
            raise InputError(f"--set {one}: no setting {name!r}; known: {', '.join(kinds)}")
        try:
            found[name] = kinds[name](value)
        except ValueError:
            raise InputError(f"--set {one}: write a number") from None
    return found
