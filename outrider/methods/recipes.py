"""Named recipes: which drafter, shape, acceptance rule and controller make up each method.

The only place that names concrete classes, imported when a method is built. To add a method: write its file, then an
options dataclass, a build function and a row in one of these files.
"""

from outrider.methods import (
    basic,
    blocks,
    copies,
    cross,
    drafted,
    early_exit,
    fixed_point,
    mixed,
    prompt_rows,
    retrieval,
    stopping,
    superposed,
    tables,
    trained,
)

RECIPES = (
    *basic.RECIPES, *copies.RECIPES, *cross.RECIPES, *drafted.RECIPES, *early_exit.RECIPES, *fixed_point.RECIPES,
    *blocks.RECIPES, *mixed.RECIPES, *prompt_rows.RECIPES, *retrieval.RECIPES, *stopping.RECIPES,
    *superposed.RECIPES, *tables.RECIPES, *trained.RECIPES,
)  # fmt: skip
