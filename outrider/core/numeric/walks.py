"""Walks over the nodes of a tree in compiled code: depths, and who sees whom. Parents stand before their children."""

from __future__ import annotations

import numpy as np

from outrider.core.numeric.compiled import compiled


@compiled
def depths(parents):  # type: ignore[no-untyped-def]
    """[nodes]; the first is -1 where these are no parents of a tree."""
    out = np.zeros(len(parents), np.int64)
    if parents[0] != -1:
        out[0] = -1
    for i in range(1, len(parents)):
        if not 0 <= parents[i] < i:
            out[0] = -1
            break
        out[i] = out[parents[i]] + 1
    return out


@compiled
def ancestors(parents):  # type: ignore[no-untyped-def]
    """[nodes, nodes]: whether a node is another one or stands below it."""
    out = np.zeros((len(parents), len(parents)), np.bool_)
    for i in range(len(parents)):
        if i:
            out[i] = out[parents[i]]
        out[i, i] = True
    return out
