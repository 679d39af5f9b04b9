"""Drafters of the user's: found under their target, newest first, before the shipped one; a broken one harms nobody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider import methods
from outrider.api import Outrider
from outrider.core.errors import InputError, UnknownName
from outrider.core.records import Traits
from outrider.models import LoadedModel, drafts, kept
from outrider.models.drafts import CARD, WEIGHTS, DraftCard, load_draft, new_draft, packed, save_draft, write_drafter
from outrider.models.kept import find_drafter, find_kept, keep, named_folder, remove
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape


def make(target: LoadedModel, place: Path, seed: int = 0, **card: Any) -> Path:
    torch.manual_seed(seed)
    shape = Eagle3Shape(32, 4, 2, 8, 48, (0, 1), 20)
    net = Eagle3Layer(shape, torch.arange(20) * 3)
    about = {"target": target.name, "fingerprint": target.fingerprint, "layers": (0, 1), "kind": "eagle3"} | card
    write_drafter(place, packed(net.tensors(), False), DraftCard(**about, shape=shape.as_dict()))
    return place


def test_the_newest_of_a_target_and_kind_is_found_before_the_shipped_one(tiny_llama, tmp_path, monkeypatch) -> None:
    assert find_drafter(tiny_llama, "eagle3") is None
    shipped = make(tiny_llama, tmp_path / "shipped", 9)
    monkeypatch.setattr(drafts, "shipped_folders", lambda: [shipped])
    assert find_drafter(tiny_llama, "eagle3") == shipped
    one = keep(make(tiny_llama, tmp_path / "one", 1), "here")
    assert find_drafter(tiny_llama, "eagle3") == one.folder and find_drafter(tiny_llama, "medusa") is None
    two = keep(make(tiny_llama, tmp_path / "two", 2), "there")
    assert find_drafter(tiny_llama, "eagle3") == two.folder and one.name != two.name
    again = keep(tmp_path / "one", "here again")
    assert again.folder == one.folder == find_drafter(tiny_llama, "eagle3") and len(kept.kept()) == 2
    assert find_drafter(replace(tiny_llama, fingerprint="0" * 16), "eagle3") is None
    assert (again.card.origin, again.card.date > two.card.date) == ("here again", True)


def test_a_drafter_is_named_by_its_folder_or_by_the_name_it_is_kept_under(tiny_llama, tmp_path) -> None:
    drafter = keep(make(tiny_llama, tmp_path / "one"), "here")
    assert named_folder(drafter.name) == drafter.folder and named_folder(str(tmp_path / "one")) == tmp_path / "one"
    assert named_folder("nothing") == Path("nothing")
    assert find_kept(drafter.name[:9]).folder == drafter.folder
    assert drafter.parameters == sum(p.numel() for p in Eagle3Layer(Eagle3Shape(32, 4, 2, 8, 48, (0, 1), 20),
                                                               torch.arange(20)).parameters())  # fmt: skip
    for wrong in ("nothing", ""):
        with pytest.raises(UnknownName, match=drafter.name):
            find_kept(wrong)
    keep(make(tiny_llama, tmp_path / "two", 2), "here")
    with pytest.raises(InputError, match="write more of one"):
        find_kept("eagle3-")


def test_a_drafter_that_cannot_be_read_is_passed_over_and_can_be_removed(tiny_llama, tmp_path, caplog) -> None:
    drafter = keep(make(tiny_llama, tmp_path / "one", 1), "here")
    torn = keep(make(tiny_llama, tmp_path / "two", 2), "here")
    (torn.folder / CARD).write_text("{")
    assert find_drafter(tiny_llama, "eagle3") == drafter.folder
    assert find_drafter(tiny_llama, "medusa") is None
    assert caplog.text.count(f"outrider drafters remove {torn.name}") == 1
    (drafter.folder / WEIGHTS).write_bytes((drafter.folder / WEIGHTS).read_bytes()[:-1])
    assert find_drafter(tiny_llama, "eagle3") is None
    for name in ("*", "", "eagle3-"):
        with pytest.raises(UnknownName):
            remove(name)
    remove(torn.name)
    remove(drafter.name)
    assert kept.kept() == [] and not torn.folder.exists()
    with pytest.raises(UnknownName, match="outrider drafters list"):
        remove(drafter.name)


def test_a_draft_model_of_the_users_is_the_default_draft(tiny_llama, tmp_path) -> None:
    save_draft(tmp_path, new_draft(tiny_llama, (1,)), DraftCard(tiny_llama.name, tiny_llama.fingerprint, (1,)))
    drafter = keep(tmp_path, "here")
    assert find_drafter(tiny_llama) == drafter.folder
    load_draft(drafter.folder, tiny_llama)


def parts(target: LoadedModel, device: str = "cpu") -> methods.Parts:
    runtime = SimpleNamespace(device=torch.device(device), vocab_size=64, max_context=64, free_slots=1,
                              traits=Traits())  # fmt: skip
    return methods.Parts(runtime, target, lambda name: None, lambda model: None)


@pytest.fixture
def mix(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Builds a mixture; the methods that it is made of."""
    build, asked = methods.build, list[str]()
    monkeypatch.setattr(methods, "build", lambda name, *rest: asked.append(name) or build(name, *rest))

    def made(having: methods.Parts, **options: Any) -> list[str]:
        asked.clear()
        build("mix", having, {"size": "budget", **options})
        return list(asked)

    return made


def test_mix_takes_the_drafter_that_is_kept_for_its_target(tiny_llama, tmp_path, mix) -> None:
    assert mix(parts(tiny_llama)) == ["suffix", "token-recycling", "predicted", "jump-forward"]
    keep(make(tiny_llama, tmp_path / "one", 1), "here")
    assert mix(parts(tiny_llama)) == ["suffix", "predicted", "jump-forward", "eagle3"]


@pytest.mark.parametrize("option", ["drafter", "mix.drafter"])
@pytest.mark.parametrize("by", ["folder", "name"])
def test_mix_takes_the_drafter_that_is_named(tiny_llama, tmp_path, mix, option: str, by: str) -> None:
    named = keep(make(tiny_llama, tmp_path / "one", 1), "here")
    keep(make(tiny_llama, tmp_path / "two", 2), "here")
    having = parts(tiny_llama)
    given = str(tmp_path / "one") if by == "folder" else named.name
    assert mix(having, **{option: given}) == ["suffix", "predicted", "jump-forward", "eagle3"]
    expected = drafts.unpacked(drafts.load_file(tmp_path / "one" / WEIGHTS))
    assert torch.equal(having.drafts["eagle3", given].fc.weight, expected["fc.weight"])
    assert mix(having, **{option: given, "parts": "eagle3,suffix"}) == ["eagle3", "suffix"]


def test_the_default_method_drafts_with_it_and_says_what_the_model_says(tiny_llama, tmp_path) -> None:
    keep(make(tiny_llama, tmp_path / "one", 1), "here")
    texts, drafted = [], 0
    for method, options in (("plain", {}), ("mix", {}), ("mix", {"size": "budget", "parts": "eagle3"})):
        with Outrider(tiny_llama, method, options=options, runtime="eager", strict=True) as engine:
            found = engine.generate([[3, 1, 4, 1, 5], [9, 2, 6]], max_new_tokens=24)
        texts.append([generation.token_ids for generation in found])
        drafted = sum(generation.stats.drafted for generation in found)
    assert texts[0] == texts[1] == texts[2] and drafted > 0


def test_mix_refuses_a_drafter_that_cannot_be_a_part(tiny_llama, tmp_path) -> None:
    with pytest.raises(InputError, match="no draft here"):
        methods.build("mix", parts(tiny_llama), {"drafter": str(tmp_path / "nothing")})
    make(tiny_llama, tmp_path / "one")
    with pytest.raises(InputError, match=r"of kind eagle3, which is not in option parts \(suffix\)"):
        methods.build("mix", parts(tiny_llama), {"drafter": str(tmp_path / "one"), "parts": "suffix"})
    make(tiny_llama, tmp_path / "two", kind="kangaroo")
    with pytest.raises(InputError, match="a drafter of kind kangaroo; use one of eagle3, eagle2"):
        methods.build("mix", parts(tiny_llama), {"drafter": str(tmp_path / "two")})
    make(tiny_llama, tmp_path / "three", fingerprint="0" * 16)
    with pytest.raises(InputError, match="trained for"):
        methods.build("mix", parts(tiny_llama), {"drafter": str(tmp_path / "three"), "size": "budget"})
    with pytest.raises(InputError, match=r"no medusa drafter is kept or shipped .* outrider train run --kind medusa"):
        methods.build("medusa", parts(tiny_llama), {})
    with pytest.raises(InputError, match=r"outrider drafters add FOLDER_OR_HUB_ID"):
        methods.build("eagle3", parts(tiny_llama), {})
