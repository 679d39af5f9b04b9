"""The single file in Chromium: what is shown is what the document says, with the mouse, the keys and on a phone."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.params import SamplingParams
from outrider.explain import explain
from tests.explain.browser import LAPTOP, PHONE, drive
from tests.explain.made import decode, made, plain_of

GENERATION = made(steps=14)
PAGE = explain([GENERATION, plain_of(GENERATION)], "Say <b>something</b>", SamplingParams(), decode, "toy")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return PAGE.save(tmp_path_factory.mktemp("page") / "page.html").as_uri()


@pytest.fixture(scope="module")
def looked(url: str) -> Any:
    """One visit that walks through everything; each test reads its part."""
    return drive(
        url,
        """
        const out = {};
        const text = () => page.locator(".text-view");
        out.prompt = await text().locator(".user").textContent();
        out.tokens = await text().locator(".answer .tokens-frame .token").evaluateAll((spans) =>
          spans.map((span) => [span.textContent, span.className]));
        out.legend = await text().locator(".legend li").allTextContents();
        const drafted = text().locator(".tokens-frame .token.drafted").first();
        await drafted.hover();
        out.note = await text().locator(".note").innerText();
        await text().locator(".tokens-frame .tokens").focus();
        await page.keyboard.press("ArrowRight");
        out.focused = await text().locator(".token.looked").count();
        out.verdict = await text().locator(".verdict").textContent();
        await page.getByLabel("plain decoding beside it").check();
        out.plain = await text().locator(".plain .tokens").textContent();
        out.clocks = await text().locator(".clock").allTextContents();
        await page.getByRole("button", { name: "Replay both" }).click();
        await page.waitForFunction(() => document.querySelectorAll(".to-come").length === 0);
        await text().locator(".tokens-frame .tokens").focus();
        for (let i = 0; i < 4; i += 1) await page.keyboard.press("ArrowRight");
        await page.keyboard.press("Enter");
        out.opened = await page.locator(".where").textContent();
        const range = page.getByLabel("Step", { exact: true });
        out.steps = [];
        for (let i = 0; i < STEPS; i += 1) {
          await range.evaluate((node, at) => { node.value = at; node.dispatchEvent(new Event("input")); }, i);
          out.steps.push(await page.evaluate(() => ({
            where: document.querySelector(".where").textContent,
            now: [...document.querySelectorAll(".token.now")].map((span) => span.textContent),
            nodes: document.querySelectorAll(".tree .node").length,
            accepted: [...document.querySelectorAll(".tree .node.accepted")].map((node) => +node.dataset.node),
            own: document.querySelectorAll(".tree .node.target").length,
            unreached: document.querySelectorAll(".tree .node.unreached").length,
            times: document.querySelector(".bar").getAttribute("aria-label"),
            curve: document.querySelector(".curve").getAttribute("aria-label"),
            why: document.querySelector(".why p").textContent,
          })));
        }
        await page.getByRole("button", { name: "First step" }).focus();
        await page.keyboard.press("End");
        out.last = await page.locator(".where").textContent();
        await page.keyboard.press("ArrowLeft");
        out.before = await page.locator(".where").textContent();
        await page.getByRole("tab", { name: "Steps" }).focus();
        await page.keyboard.press("ArrowLeft");
        out.tab = await page.locator("[aria-selected=true]").textContent();
        return out;
        """.replace("STEPS", str(GENERATION.stats.steps)),
        size=LAPTOP,
    )


def test_every_token_is_there_in_the_colour_of_its_origin(looked: Any) -> None:
    names = list(dict.fromkeys(PAGE.document["trace"]["drafters"]))
    expected = [
        [piece, "token target" if not name else f"token drafted o{names.index(name)} d{min(depth, 4)}"]
        for piece, (name, depth) in zip(PAGE.document["pieces"], PAGE.document["origins"], strict=True)
    ]
    assert looked["tokens"] == expected
    assert looked["prompt"] == "Say <b>something</b>"
    drafted = sum(bool(name) for name, _ in PAGE.document["origins"])
    assert looked["legend"][0].startswith(f"target {len(expected) - drafted}")


def test_a_token_says_what_was_thought_of_it_and_what_was_rejected(looked: Any) -> None:
    assert "depth 1" in looked["note"] and "70.0%" in looked["note"] and "40.0%" in looked["note"]
    assert "rejected here" in looked["note"] and "target 30.0%" in looked["note"]
    assert looked["focused"] == 1


def test_plain_decoding_stands_beside_it_with_both_clocks(looked: Any) -> None:
    count = len(GENERATION.token_ids)
    assert looked["verdict"] == f"✓ identical: all {count} tokens"
    assert looked["plain"] == GENERATION.text
    ends = [PAGE.document["trace"]["steps"][-1]["ended_s"], PAGE.document["plain"]["ended_s"][-1]]
    assert looked["clocks"] == [f"{end:.2f} s" for end in ends]


def test_the_scrubber_shows_each_step_as_the_trace_has_it(looked: Any) -> None:
    for number, (step, seen) in enumerate(zip(PAGE.document["trace"]["steps"], looked["steps"], strict=True), 1):
        tree, path = step["tree"], step["path"]
        assert seen["where"].startswith(f"step {number} of {GENERATION.stats.steps} ")
        assert seen["now"] == PAGE.document["pieces"][step["first"] : step["first"] + len(step["emitted"])]
        assert seen["nodes"] == len(tree["tokens"]) + 1 and seen["own"] == 1
        assert sorted(seen["accepted"]) == sorted(path)
        assert seen["unreached"] == sum(p is None for p in tree["probability"][1:])
        assert f"verify {1e3 * step['verify_s']:.1f} ms" in seen["times"] and "floor 20.0 ms" in seen["times"]
        assert seen["curve"].startswith(f"{step['rows'] - 1} candidates")
        budget = step["budget"]
        assert seen["why"].startswith(f"{budget['verified']} of {budget['offered']} candidates")


def test_the_keyboard_is_enough(looked: Any) -> None:
    steps = GENERATION.stats.steps
    assert looked["opened"].startswith("step ")
    assert looked["last"].startswith(f"step {steps} of") and looked["before"].startswith(f"step {steps - 1} of")
    assert looked["tab"] == "Text"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_s_width_holds_both_views(url: str, scheme: str) -> None:
    found = drive(
        url,
        """
        const wide = async () => page.evaluate(() => document.documentElement.scrollWidth);
        await page.getByLabel("plain decoding beside it").check();
        const text = await wide();
        await page.getByRole("tab", { name: "Steps" }).click();
        const back = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
        return { text, steps: await wide(), back };
        """,
        size=PHONE,
        scheme=scheme,
    )
    assert found["text"] <= PHONE[0] and found["steps"] <= PHONE[0]
    assert (found["back"] == "rgb(16, 19, 24)") == (scheme == "dark")
