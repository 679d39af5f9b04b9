"""`outrider index ...`: retrieval stores, built from a folder of text, described and asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.output import Json, check_json, emit, out, progress_bar
from outrider.cli.shell import STDOUT, resumable
from outrider.core.errors import InputError

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
LOOK_BACK = 64

app = typer.Typer(no_args_is_help=True, help="Retrieval stores: a corpus, indexed for the methods retrieval and rasd.")

Folder = Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a store.")]
ShardBytes = Annotated[
    str, typer.Option("--shard-bytes", help="Tokens of a shard in bytes (256M, 1G); sorting takes five times that.")
]


@app.command()
@resumable()
def build(
    corpus: Annotated[Path, typer.Option("--corpus", metavar="DIR", help="Folder of text, or one file.")],
    store: Annotated[Path, typer.Option("--out", metavar="STORE", help="Where the store goes, and resumes from.")],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", "-t", help="The model whose tokenizer is used: as --model elsewhere.")
    ] = "smollm2",
    shard_bytes: ShardBytes = "512M",
    field: Annotated[str, typer.Option("--field", help="Where a line of a .jsonl file has its text.")] = "text",
    add: Annotated[bool, typer.Option("--add", help="Add the corpus to a store that holds another.")] = False,
    join: Annotated[bool, typer.Option("--merge", help="Then join shards that fit into one.")] = False,
    fm: Annotated[
        bool,
        typer.Option("--fm", help="Compact: about a third of the size, for `outrider find` and `sample --within`."),
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a hub model.")
    ] = False,
    json: Json = None,
) -> None:
    """Index a folder of text. Run it again after an interruption: it goes on where it was."""
    check_json(json)
    size = parse_bytes(shard_bytes)
    from outrider.models import load_tokenizer
    from outrider.store.build import build as index
    from outrider.store.build import merge as join_shards
    from outrider.store.fm.files import compact

    name = str(Path(tokenizer).resolve()) if Path(tokenizer).is_dir() else tokenizer
    loaded = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
    with progress_bar() as on_progress:
        made = index(
            corpus, loaded, name, store, shard_bytes=size, field=field, add=add, on_progress=on_progress
        )  # fmt: skip
        if join:
            join_shards(store, size, on_progress)
        if fm:
            compact(store, on_progress)
    if not made.shards:
        typer.echo(f"{store}: holds this corpus already", err=True)
    _show(store, json)


@app.command()
def merge(store: Folder, shard_bytes: ShardBytes = "512M", json: Json = None) -> None:
    """Join shards that fit into one: fewer are searched faster."""
    check_json(json)
    from outrider.store.build import merge as join_shards

    with progress_bar() as on_progress:
        join_shards(store, parse_bytes(shard_bytes), on_progress)
    _show(store, json)


@app.command()
def info(
    store: Folder,
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and compare checksums.")] = False,
    json: Json = None,
) -> None:
    """What a store holds."""
    check_json(json)
    from outrider.store.format import check_shard, read_manifest

    if verify:
        for name in read_manifest(store).shards:
            check_shard(store / name)
    _show(store, json)


@app.command()
def query(
    store: Folder,
    text: Annotated[str, typer.Argument(help="The end of it is looked up.")],
    top: Annotated[int, typer.Option("--top", help="Show so many next tokens.")] = 10,
    tokenizer: Annotated[
        str,
        typer.Option("--tokenizer", "-t", help="A model with the store's tokenizer; else the one it was built with."),
    ] = "",
    json: Json = None,
) -> None:
    """The longest end of a text that occurs in the store, how often, and what follows."""
    check_json(json)
    import numpy as np

    from outrider.models import load_tokenizer
    from outrider.store.store import open_store
    from outrider.store.tokens import encoder, fingerprint

    opened = open_store(store)
    assert opened.manifest is not None
    name = tokenizer or opened.manifest.tokenizer
    loaded = load_tokenizer(name)
    opened = open_store(store, fingerprint(loaded), name)
    ids = encoder(loaded)([text])[0]
    match = opened.longest(np.array(ids[-LOOK_BACK:], dtype=np.int64)).match
    tokens, counts = opened.next_tokens(match)
    total = match.count
    best = np.argsort(-counts, kind="stable")[: max(top, 0)]
    found: dict[str, Any] = {
        "tokens": len(ids),
        "matched": match.length,
        "match": loaded.decode(ids[len(ids) - match.length :]),
        "count": total,
        "next": [
            {"token": int(tokens[i]), "text": loaded.decode([int(tokens[i])]), "count": int(counts[i]),
             "probability": int(counts[i]) / total}
            for i in best
        ],
    }  # fmt: skip
    emit(json, found)
    if json == STDOUT:
        return
    out().print(
        f"longest match: {match.length} of {len(ids)} tokens, {total:,} times: {found['match']!r}", markup=False
    )
    from rich.table import Table

    table = Table("next token", "id", "count", "probability", box=None, pad_edge=False)
    for row in found["next"]:
        table.add_row(repr(row["text"]).replace("[", "\\["), str(row["token"]), f"{row['count']:,}",
                      f"{row['probability']:.3f}")  # fmt: skip
    out().print(table if found["next"] else "nothing follows: the text ended there", markup=True)


def parse_bytes(text: str) -> int:
    """`512M` -> 536,870,912."""
    if (parts := re.fullmatch(r"(\d+)([kmg]?)b?", text.strip().lower())) is None:
        raise InputError(f"--shard-bytes {text}: write a number such as 256M or 1G")
    return int(parts[1]) * UNITS[parts[2]]


def _show(folder: Path, json: str | None) -> None:
    from outrider.store.fm import files as compact
    from outrider.store.format import is_compact, read_manifest
    from outrider.store.store import describe, open_store

    small = is_compact(read_manifest(folder))
    found = compact.describe(compact.open_compact(folder)) if small else describe(open_store(folder))
    emit(json, found)
    if json == STDOUT:
        return
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("tokens", f"{found['tokens']:,} in {found['documents']:,} documents")
    each = f", {found['bytes_per_token']:.1f} a token" if found["tokens"] else ""
    table.add_row("on disk", f"{found['bytes']:,} bytes in {len(found['shards'])} shards{each}")
    table.add_row("tokenizer", f"{found['tokenizer']} ({found['fingerprint']}, {found['vocabulary']:,} ids)")
    for corpus in found["corpora"]:
        left = "" if corpus["finished"] else "; not finished: run the same build again"
        left_out = f"; {corpus['skipped_files']:,} files and {corpus['skipped_lines']:,} lines left out"
        table.add_row(
            "corpus", f"{corpus['path']}: {corpus['files']:,} files, {corpus['bytes']:,} bytes{left_out}{left}"
        )
    out().print(table)
