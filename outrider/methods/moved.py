"""What plug-ins written for an earlier layout run into, said in a sentence that names the new place.

Two things changed under them: modules moved (`MOVED`), and the calls that drafters, sources and growers take. Nothing
here makes old code run: docs/develop/migration.md shows how to change it. Asked when a plug-in is loaded or built,
never in the decode loop.
"""

from __future__ import annotations

import inspect
import re
import traceback
from typing import Any

PAGE = "docs/develop/migration.md"

# (package before, package now): the modules that kept their names
_KEPT_NAMES = {
    ("outrider", "outrider.core"): (
        "tree proposals protocols sampling params noise sequence text generation engine errors files inputs"
    ),
    ("outrider", "outrider.store"): "memory prompts",
    ("outrider", "outrider.methods"): "recipes preflight",
    ("outrider", "outrider.runtime"): "trial conversions",
    ("outrider", "outrider.core.numeric"): "compiled",
    ("outrider.native", "outrider.core.numeric"): "torch_threads numbers",
    ("outrider.native", "outrider.runtime.native.kernels"): "attention linear products screen step team vectors",
    ("outrider.recipes", "outrider.methods"): (
        "basic common copies cross drafted early_exit fixed_point mixed retrieval tables trained"
    ),
    ("outrider.target", "outrider.runtime"): (
        "attention packed passes positions progress selftest support thresholds weights"
    ),
    ("outrider.draft", "outrider.draft.lookup"): (
        "prompt_lookup predicted suffix suffix_index byte_lookup retrieval rasd"
    ),
    ("outrider.draft", "outrider.draft.table"): (
        "recycling stand aded puct lookahead jacobi ngram_pool ngram_table top_rows odds places positions"
    ),
    ("outrider.draft", "outrider.draft.model"): "cross_vocabulary vocabulary_map mirror ngram_cache early_exit",
    ("outrider.draft", "outrider.draft.feature"): "eagle3 medusa hydra",
    ("outrider.draft", "outrider.models.networks"): "eagle2 fspad kangaroo shared_head",
}
_NEW_NAMES = {
    "outrider.runtimes": "outrider.runtime.choice",
    "outrider.native": "outrider.runtime.native.kernels",
    "outrider.native.building": "outrider.core.numeric.llvm",
    "outrider.target": "outrider.runtime",
    "outrider.target.adapter": "outrider.runtime.eager.adapter",
    "outrider.target.cache": "outrider.runtime.cache",
    "outrider.target.eager": "outrider.runtime.targets",
    "outrider.target.graphed": "outrider.runtime.targets",
    "outrider.target.native": "outrider.runtime.targets",
    "outrider.target.openvino": "outrider.runtime.targets",
    "outrider.draft.model": "outrider.draft.model.draft_model",
    "outrider.draft.ngram_laws": "outrider.draft.table.ngram_distributions",
    "outrider.draft.head_laws": "outrider.core.numeric.likeliest",
    "outrider.draft.eagle3_layer": "outrider.models.networks.eagle3",
    "outrider.draft.eagle3_native": "outrider.runtime.layers.native",
    "outrider.draft.eagle3_recorded": "outrider.runtime.layers.recorded",
    "outrider.draft.feature_cache": "outrider.runtime.layers.cache",
}
MOVED: dict[str, str] = {
    **{f"{old}.{name}": f"{new}.{name}" for (old, new), names in _KEPT_NAMES.items() for name in names.split()},
    **_NEW_NAMES,
}


def moved_import(error: BaseException) -> str:
    """Where the module lies now whose import failed, as a sentence; empty where the cause is another."""
    if not isinstance(error, ImportError):
        return ""
    old = next((name for name in _imported(error) if name in MOVED), "")
    return f"it imports {old}, which is {MOVED[old]} now; see {PAGE}" if old else ""


def _imported(error: ImportError) -> list[str]:
    """What the failed statement may have meant, the most exact first: the error itself may name a parent only."""
    frames = traceback.extract_tb(error.__traceback__)
    statement = (frames[-1].line or "") if frames else ""
    from_package = re.search(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
    joined = [f"{from_package[2]}.{from_package[1]}"] if from_package else []
    written = sorted(re.findall(r"\boutrider(?:\.\w+)*", statement), key=len, reverse=True)
    return [*joined, *written, error.name or ""]


def old_signature(drafter: Any) -> str:
    """What of a drafter from elsewhere, or of the source and grower in it, is of the earlier protocol; empty: nothing.

    Outrider's drafters are held to the protocol by the type checker, so they are not looked at again.
    """
    parts = {"drafter": drafter, "source": getattr(drafter, "source", None), "grower": getattr(drafter, "grower", None)}
    for kind, part in parts.items():
        if part is None or type(part).__module__.split(".")[0] == "outrider":
            continue
        where = f"its {kind} {type(part).__name__}"
        if kind != "grower" and len(_required(part, "begin")) > 2:
            return f"{where} has begin(slot, context, chunks), which is begin(slot, context) and absorb(chunks) now"
        if kind != "grower" and not callable(getattr(part, "absorb", None)):
            return f"{where} has no absorb(chunks), which is handed what went through the target of prompts now"
        if {"slot", "record"} & {*_required(part, "observe")}:
            return f"{where} has observe(slot, record), which is observe(slots, records) now: all slots in one call"
    return ""


def _required(part: Any, method: str) -> list[str]:
    """The parameters of a method that have to be given."""
    try:
        parameters = inspect.signature(getattr(part, method)).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return []  # missing or not readable: the first call will tell
    return [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
