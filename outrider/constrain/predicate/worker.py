"""The process behind `limited.InProcess`: loads a Python file and answers questions about texts, a line of JSON each.

Run as a file, with nothing of the package imported, so that it is ready in tens of milliseconds.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

NAMES = ("viable", "complete")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what the file prints is no answer
    functions: dict[str, Any] = {}
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line), functions)) + "\n")


def _answer(asked: dict[str, str], functions: dict[str, Any]) -> dict[str, Any]:
    try:
        if "name" not in asked:
            found = runpy.run_path(sys.argv[1], run_name="predicate")
            functions |= {name: found[name] for name in NAMES if callable(found.get(name))}
            return {"names": list(functions)}
        return {"answer": bool(functions[asked["name"]](asked["text"]))}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
