"""How the benchmarks of this folder print what they found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def give_rows(rows: Sequence[dict[str, Any]], as_json: bool, heading: str, line: str) -> None:
    """JSON where it was asked for, else a line a row, in a format that names the row's fields."""
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    print("\n".join([heading, *(line.format_map(row) for row in rows)]))
