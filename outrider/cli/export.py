"""`outrider export`: a trained drafter as a folder that a serving engine reads, compared before it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.output import Json, check_json, emit, out
from outrider.cli.shell import STDOUT
from outrider.core.errors import InputError, did_you_mean


def export(
    drafter: Annotated[Path, typer.Option("--drafter", metavar="FOLDER", help="Made by `outrider train run`.")],
    to: Annotated[str, typer.Option("--to", help="vllm, sglang or speculators.")],
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where it goes; must not exist or be empty.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="The drafter's target; else the one its card names.")
    ] = "",
    verifier: Annotated[
        str, typer.Option("--verifier", help="speculators: the name under which the engine loads the target.")
    ] = "",
    depth: Annotated[int, typer.Option("--depth", help="speculators: tokens drafted a step.")] = 5,
    dtype: Annotated[str, typer.Option("--dtype", help="Of the weights: float32, bfloat16 or float16.")] = "float32",
    json: Json = None,
) -> None:
    """Write a drafter for vLLM, SGLang or `speculators`; its logits are compared with our own first."""
    check_json(json)
    if depth < 1:
        raise InputError("--depth must be above zero")
    from outrider.export import FORMATS
    from outrider.export import export as write
    from outrider.models import load_model
    from outrider.models.drafts import read_card
    from outrider.models.load import parse_dtype

    if to not in FORMATS:
        raise InputError(f"--to {to}: {did_you_mean(to, FORMATS)}use one of {', '.join(FORMATS)}")
    card = read_card(drafter)
    target = load_model(model or card.target, device="cpu")
    made = write(drafter, target, to, folder, dtype=parse_dtype(dtype), verifier=verifier, depth=depth)
    if json != STDOUT:
        out().print(
            f"{folder}: {to}, {made.bytes:,} bytes, {made.vocabulary:,} tokens, inputs of layers "
            f"{', '.join(map(str, made.layers))}; logits differ by at most {made.difference:.2g} of {made.largest:.3g}"
        )
    emit(json, made.as_dict())
