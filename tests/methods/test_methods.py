"""The registry: typed options, unknown names list the known ones, packages and callers can add methods."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from outrider import methods
from outrider.api import Outrider
from outrider.core.errors import InputError, UnknownName
from outrider.core.layer_driver import LayerTraits
from outrider.core.params import SamplingParams
from outrider.core.records import Traits
from outrider.methods import common, mixed, registry, trained
from outrider.models import trained as models_trained
from outrider.runtime.layers.choice import Drivers


@pytest.fixture(scope="module")
def engine(tiny_llama) -> Outrider:
    return Outrider(tiny_llama, "plain", strict=True)


def test_every_method_has_a_complete_row_that_survives_json() -> None:
    rows = json.loads(json.dumps([info.as_dict() for info in methods.table()]))
    names = [row["name"] for row in rows]
    assert len(names) == len(set(names)) and {"plain", "prompt-lookup", "draft-model"} <= set(names)
    for row in rows:
        assert {"name", "paper", "family", "lossless", "needs", "summary", "options"} <= set(row)
        assert row["summary"] and row["paper"] and row["needs"]


def test_a_drafter_that_is_handed_over_is_the_one_that_drafts(tiny_llama) -> None:
    """The target itself, which is always right; the first of its layers, which is taken otherwise, is not."""
    options = {"controller": "fixed", "budget": 4, "verifier": "invariant"}
    shares = []
    for network in (None, tiny_llama.model):
        engine = Outrider(tiny_llama, "plain", strict=True)
        if network is not None:
            engine.use_drafter(network)
        handle = engine.engine.submit(
            [1, 2, 3], SamplingParams(max_new_tokens=21), engine.recipe("draft-model", options)
        )
        stats = handle.result().stats
        shares.append(stats.accepted / stats.drafted)
    assert shares[0] < shares[1] == 1.0
    with pytest.raises(UnknownName, match="did you mean eagle3.*known kinds: eagle3, eagle2"):
        engine.use_drafter(network, "eagle-3")


def test_the_default_method_exists_and_is_lossless() -> None:
    assert methods.find(methods.DEFAULT).lossless


def test_an_unknown_method_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"unknown method 'magic'; known methods: .*prompt-lookup"):
        methods.find("magic")


def test_options_are_typed_from_text_and_from_python() -> None:
    info = methods.find("prompt-lookup")
    assert methods.parse_options(info, {"budget": "7", "controller": "fixed"}).budget == 7
    assert methods.parse_options(info, {"budget": 7}).budget == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgte": 3}, "no option 'budgte'; did you mean budget\\? its options: budget"),
        ({"budget": "many"}, "option budget of prompt-lookup is 'many'; it must be a whole number"),
        ({"controller": "maybe"}, "use one of payoff, fixed"),
    ],
)
def test_bad_options_name_the_value_and_the_remedy(options, message: str) -> None:
    with pytest.raises((InputError, UnknownName), match=message):
        methods.parse_options(methods.find("prompt-lookup"), options)


@dataclass(frozen=True)
class Switch:
    on: bool = True
    size: float = 1.5


def third_party(name: str) -> methods.MethodInfo:
    return methods.MethodInfo(name, "from elsewhere", "-", "foreign", True, "nothing", Switch, lambda *_: None)  # type: ignore[arg-type,return-value]


def test_callers_can_register_a_method_of_their_own(monkeypatch) -> None:
    methods.table()
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    methods.register(third_party("mine"))
    info = methods.find("mine")
    assert methods.parse_options(info, {"on": "no", "size": "2"}) == Switch(False, 2.0)
    with pytest.raises(InputError, match="use true or false"):
        methods.parse_options(info, {"on": "perhaps"})


def test_installed_packages_register_through_the_entry_point_and_a_broken_one_is_named(monkeypatch, caplog) -> None:
    class Entry:
        def __init__(self, name: str, load) -> None:
            self.name, self.load = name, load

    def broken():
        raise ImportError("planted")

    entries = [Entry("good", lambda: [third_party("theirs")]), Entry("bad", broken)]
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    monkeypatch.setattr(registry, "_loaded", False)
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: entries)
    assert methods.find("theirs").family == "foreign"
    assert "bad could not be loaded" in caplog.text


@pytest.mark.parametrize(("device", "given", "nodes"), [("cpu", "auto", 32), ("cuda", "auto", 63), ("cuda", 8, 8)])
def test_mix_drafts_wider_where_wide_steps_cost_little(tiny_llama, device: str, given: int | str, nodes: int) -> None:
    target = SimpleNamespace(device=torch.device(device), vocab_size=64, traits=Traits())
    parts = methods.Parts(target, tiny_llama, lambda name: None, lambda model: None)
    recipe = methods.build("mix", parts, {"parts": "suffix,predicted", "size": "budget", "budget": given})
    assert recipe.controller.limit.nodes == nodes


@pytest.mark.parametrize(
    ("wide", "shipped", "parts"),
    [
        (False, None, "suffix,token-recycling,predicted,jump-forward"),
        (True, None, "suffix,token-recycling,predicted,jump-forward"),
        (False, "a drafter", "suffix,predicted,jump-forward,eagle3"),
        (True, "a drafter", "suffix,predicted,jump-forward,eagle3"),
    ],
)
def test_mix_has_a_table_only_where_there_is_no_trained_drafter(
    monkeypatch, tiny_llama, wide: bool, shipped: str | None, parts: str
) -> None:
    monkeypatch.setattr("outrider.models.drafts.shipped_draft", lambda target, kind: shipped)
    target = SimpleNamespace(device=torch.device("cuda" if wide else "cpu"), vocab_size=64, traits=Traits())
    asked, make = list[str](), mixed._drafter  # any cheap drafter stands in for those that were asked for
    suffix = methods.find("suffix")
    monkeypatch.setattr(
        mixed, "_drafter", lambda parts, info, *rest: asked.append(info.name) or make(parts, suffix, {})
    )
    methods.build("mix", methods.Parts(target, tiny_llama, lambda name: None, lambda model: None), {"size": "budget"})
    assert ",".join(asked) == parts


@pytest.mark.parametrize(
    ("device", "given", "most", "breadth"), [("cpu", "auto", 6, 1), ("cuda", "auto", 24, 4), ("cpu", 9, 9, 1)]
)
def test_a_trained_drafter_drafts_wider_where_wide_steps_cost_little(
    monkeypatch, tiny_llama, device: str, given: int | str, most: int, breadth: int
) -> None:
    net = torch.nn.Linear(2, 2)
    monkeypatch.setattr(models_trained, "drafter_of", lambda target, kind, named, made: net)
    layer = SimpleNamespace(traits=LayerTraits((1,), 2, 64, torch.device("cpu"), torch.float32))
    monkeypatch.setattr(trained, "_drivers", lambda *given: Drivers(net, layer))
    target = SimpleNamespace(device=torch.device(device), vocab_size=64, traits=Traits())
    parts = methods.Parts(target, tiny_llama, lambda name: None, lambda model: None)
    recipe = methods.build("eagle3", parts, {"budget": given})
    assert (recipe.controller.nodes, recipe.controller.breadth) == (most, breadth)
    assert not recipe.drafter.beside
    target.traits = Traits(other_threads=True)
    assert methods.build("eagle3", parts, {}).drafter.beside


def test_mix_asks_a_target_that_pads_its_steps_for_their_width(monkeypatch, tiny_llama) -> None:
    monkeypatch.setattr(common, "cost_curve", lambda parts: SimpleNamespace(seconds=float, experts=None))

    def seconds(traits: Traits) -> list[float]:
        target = SimpleNamespace(device=torch.device("cpu"), vocab_size=64, traits=traits)
        parts = methods.Parts(target, tiny_llama, lambda name: None, lambda model: None)
        recipe = methods.build("mix", parts, {"parts": "suffix"})
        assert recipe.costs is recipe.controller.costs is common.cost_model(parts)  # one a target
        return recipe.costs.seconds(1, 4).tolist()

    assert seconds(Traits()) == [1, 2, 3, 4, 5]
    assert seconds(Traits(width=lambda rows: 4 if rows <= 4 else 8)) == [4, 4, 4, 4, 8]


@pytest.mark.parametrize("rule", ["rejection", "block", "k-seq", "optimal"])
def test_mix_refuses_a_rule_that_cannot_take_sampled_and_chosen_candidates_together(
    engine: Outrider, rule: str
) -> None:
    with pytest.raises(InputError, match="use invariant, recursive, naive or traversal"):
        engine.recipe("mix", {"parts": "draft-model,suffix", "verifier": rule})
    engine.recipe("mix", {"parts": "suffix", "verifier": rule})


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("combine", ["merge", "route"])
def test_parts_that_draw_need_no_other_beside_them(engine: Outrider, temperature: float, combine: str) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=temperature, seed=3)
    recipe = engine.recipe("mix", {"parts": "draft-model", "size": "budget", "combine": combine})
    drafted = engine.engine.submit([1, 2, 3], params, recipe).result()
    plain = engine.engine.submit([1, 2, 3], params, engine.recipe("plain")).result()
    assert drafted.token_ids == plain.token_ids and drafted.stats.drafted and not drafted.stats.drafter_failures
