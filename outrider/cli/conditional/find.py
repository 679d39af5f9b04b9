"""`outrider find`: the documents of a compact store that what the model would write to a question speaks for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.options import MeasuredModel
from outrider.cli.output import Json, check_json, emit, out
from outrider.cli.shell import STDOUT
from outrider.core.errors import InputError

HEAD = 160  # characters of a document that are shown
SHOWN = 4  # n-grams


def find(
    question: Annotated[str, typer.Argument(help="What the documents should answer.")],
    store: Annotated[Path, typer.Option("--store", metavar="STORE", help="Built with: outrider index build --fm.")],
    top: Annotated[int, typer.Option("--top", help="So many documents.")] = 10,
    beams: Annotated[int, typer.Option("--beams", help="Texts that are written side by side.")] = 15,
    length: Annotated[int, typer.Option("--length", help="Tokens of each.")] = 10,
    full: Annotated[bool, typer.Option("--full", help="Show whole documents.")] = False,
    json: Json = None,
    *,
    model: MeasuredModel,
) -> None:
    """Find documents by their contents: SEAL, without a trained retriever."""
    check_json(json)
    if not question.strip():
        raise InputError("the question is empty; give at least one word")
    from outrider.search.documents import asking
    from outrider.search.documents import find as search
    from outrider.store.fm.files import open_compact
    from outrider.store.tokens import encoder, fingerprint

    opened = open_compact(store)
    with model.load() as engine:
        opened = open_compact(store, fingerprint(engine.tokenizer), engine.loaded.name)
        (words,) = encoder(engine.tokenizer)([" " + question.strip()])
        found = search(
            engine.target, engine.encode(asking(question)), words, opened, top, beams=beams, length=length
        )  # fmt: skip
        decode = engine.tokenizer.decode
        rows: list[dict[str, Any]] = [
            {"document": one.document, "score": one.score, "text": decode(opened.document(one.document).tolist()),
             "keys": [{"text": decode(list(key.tokens)), "weight": key.weight, "count": key.count,
                       "logprob": key.log_prob} for key in one.keys]}
            for one in found
        ]  # fmt: skip
    emit(json, {"question": question, "store": str(store), "documents": rows})
    if json == STDOUT:
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("score", "document", "why", "text", box=None, pad_edge=False)
    for row in rows:
        why = ", ".join(key["text"].strip() for key in row["keys"][:SHOWN])
        text = " ".join(row["text"].split())
        table.add_row(f"{row['score']:.1f}", str(row["document"]), Text(why), Text(text if full else text[:HEAD]))
    out().print(table if rows else "nothing in the store speaks to this question")
