"""One way to say where a model runs and how: names and defaults on the command line, in Python and as a drop-in."""

from __future__ import annotations

import dataclasses
import inspect

import outrider
from outrider.cli.options import MeasuredModel, ModelOptions

LOAD = inspect.signature(outrider.load).parameters
SAID_OTHERWISE = {"option", "draft"}  # both become `options`
WHERE = {"runtime", "precision", "device", "dtype"}


def test_every_option_of_a_model_is_a_parameter_of_load_with_its_default() -> None:
    for group in (ModelOptions, MeasuredModel):
        names = {field.name: field.default for field in dataclasses.fields(group) if field.name not in SAID_OTHERWISE}
        assert {*names} >= WHERE and {*names} <= {*LOAD}
        assert names == {name: LOAD[name].default for name in names}
    assert {*ModelOptions().arguments(max_slots=2)} <= {*LOAD}


def test_the_drop_in_takes_the_parameters_of_load_that_a_loaded_model_leaves_open() -> None:
    drop_in = inspect.signature(outrider.generate).parameters
    shared = {"method", "options", "max_slots", "cache_bytes", "strict"}
    assert shared <= {*drop_in} & {*LOAD}
    for name in ("method", "options", "strict"):
        assert drop_in[name].default == LOAD[name].default
