"""Stores of plain token ids, made on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from outrider.store.build import sort_shard
from outrider.store.format import Manifest, separator, write_manifest
from outrider.store.store import Store, open_store
from outrider.store.tokens import BARE

Documents = Sequence[Sequence[int]]
Make = Callable[..., Store]


def make_store(folder: Path, shards: Sequence[Documents], vocabulary: int = 4) -> Store:
    folder.mkdir(exist_ok=True)
    manifest = Manifest("ids", BARE, vocabulary)
    end = separator(manifest.width)
    for i, documents in enumerate(shards):
        flat = [token for document in documents for token in (*document, end)]
        name = f"{i:05d}.shard"
        sort_shard(folder / name, np.array(flat, dtype=f">u{manifest.width}"), len(documents), vocabulary, BARE)
        manifest.shards.append(name)
    write_manifest(folder, manifest)
    return open_store(folder)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    count = 0

    def store(shards: Sequence[Documents], vocabulary: int = 4) -> Store:
        nonlocal count
        count += 1
        return make_store(tmp_path / str(count), shards, vocabulary)

    return store
