"""The page: its files as a server gives them out, and one self-contained file with a document inside.

The modules are plain ES modules without a build step. In the single file they stand one behind the other without their
imports and exports, so each top-level name exists once among all of them. Nothing is fetched from elsewhere, and a
policy inside the file names the script and the style by their hashes, so that nothing else runs.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from outrider.core.files import check_place, write_atomic
from outrider.core.generation import Generation
from outrider.core.inputs import Message
from outrider.core.noise import fresh_seed
from outrider.core.params import SamplingParams
from outrider.explain.document import Decode, document

FOLDER = Path(__file__).parent / "page"
ENTRY = "file.js"  # what the single file runs; the server's page begins with app.js
HEIGHT = 720  # of the frame in a notebook, in pixels
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let)\b)", re.MULTILINE)


def page_files() -> dict[str, Path]:
    """The files of the served page, by the name under which it asks for them; `index.html` is the page."""
    return {path.name: path for path in sorted(FOLDER.iterdir()) if path.suffix in {".html", ".css", ".js", ".svg"}}


def single_file(content: Mapping[str, Any]) -> str:
    """One HTML file that shows this document, without a server and without a network."""
    style, script = (FOLDER / "style.css").read_text(encoding="utf-8"), _joined(ENTRY)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    title = html.escape(f"Outrider: {content.get('method', '')}: {content.get('prompt', '')[:60]}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<div id="page"></div>\n<script type="application/json" id="document">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    )


@dataclass(frozen=True, slots=True)
class Explanation:
    """One generation and its page. In a notebook it shows itself."""

    generation: Generation
    document: dict[str, Any]

    @property
    def html(self) -> str:
        return single_file(self.document)

    def save(self, path: str | Path) -> Path:
        """Write the page; returns where it lies."""
        check_place(Path(path), str(path))
        write_atomic(Path(path), self.html)
        return Path(path)

    def _repr_html_(self) -> str:
        """In a frame, so that a notebook's style and scripts and those of the page leave each other alone."""
        source = html.escape(self.html, quote=True)
        style = f"width:100%;height:{HEIGHT}px;border:0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{source}"></iframe>'


def traced(params: SamplingParams) -> SamplingParams:
    """These parameters for runs that are to be shown beside each other: one sample, one seed, and a trace."""
    seed = fresh_seed() if params.seed is None else params.seed
    return params.with_(trace=True, n=1, seed=seed)


def explain(
    runs: Sequence[Generation], messages: str | Sequence[Message], params: SamplingParams, decode: Decode, model: str
) -> Explanation:
    """The page of the first run; a second one is the same decoded plainly."""
    plain = runs[1] if len(runs) > 1 else None
    made = document(
        runs[0], decode, prompt=_shown(messages), model=model, stop=params.stop, skip=params.stop_token_ids, plain=plain
    )
    return Explanation(runs[0], made)


def _shown(messages: str | Sequence[Message]) -> str:
    if isinstance(messages, str):
        return messages
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


@cache
def _joined(entry: str) -> str:
    """The modules that `entry` needs, each behind those that it imports."""
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        source = (FOLDER / name).read_text(encoding="utf-8")
        for _, other in _IMPORT.findall(source):
            if other not in parts:
                add(other)
        parts[name] = _EXPORT.sub("", _IMPORT.sub("", source))

    add(entry)
    return "\n".join(parts.values()).replace("</script", "<\\/script")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
