"""Named recipes: which drafter, shape, acceptance rule and controller make up each method.

The only place that names concrete classes, imported when a method is built. To add a method: write its file, then an
options dataclass, a build function and a row in one of these files.
"""

from outrider.recipes import basic, drafted

RECIPES = (*basic.RECIPES, *drafted.RECIPES)
