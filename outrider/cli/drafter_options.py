"""Options that the commands around `outrider train` have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Option("--model", "-m", help="smollm2 (embedded), a hub id, a folder or a .gguf file.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Of the target: float32, bfloat16 or float16.")]
Drafter = Annotated[Path, typer.Option("--drafter", metavar="FOLDER", help="Made by `outrider train run`.")]
Text = Annotated[Path, typer.Option("--data", metavar="FOLDER", help="Text made by `outrider train data`.")]
