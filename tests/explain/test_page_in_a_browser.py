"""The served page in Chromium, behind a pretended server: the chat, plain decoding beside it, the steps, the fleet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.explain import document
from tests.explain.browser import PHONE, drive
from tests.explain.made import decode, made, plain_of
from tests.explain.stub import Stub, served

FAST = made(steps=10)
DOCUMENT = document(FAST, decode)
ASK = """
  await page.getByLabel("Message").fill("Tell me");
  await page.getByRole("button", { name: "Send" }).click();
  await page.waitForSelector(".legend");
"""


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with served(FAST, plain_of(FAST)) as made_up:
        yield made_up


@pytest.fixture(scope="module")
def talked(stub: Stub) -> Any:
    return drive(
        stub.url,
        """
        const out = {};
        await page.getByLabel("plain decoding beside it").check();
        """
        + ASK
        + """
        await page.waitForFunction(() => document.querySelector(".verdict").textContent.startsWith("✓"));
        out.verdict = await page.locator(".verdict").textContent();
        out.tokens = await page.locator(".tokens-frame").first().locator(".token").evaluateAll((spans) =>
          spans.map((span) => [span.textContent, span.className]));
        out.plain = await page.locator(".tokens").nth(1).textContent();
        out.clocks = await page.locator(".clock").allTextContents();
        out.methods = await page.getByLabel("Method").locator("option").allTextContents();
        await page.getByRole("tab", { name: "Steps" }).click();
        out.where = await page.locator(".where").textContent();
        await page.getByRole("tab", { name: "Text" }).click();
        await page.getByLabel("Message").fill("And more");
        await page.getByLabel("Message").press("Enter");
        await page.waitForFunction(() => document.querySelectorAll(".legend").length === 2);
        return out;
        """,
    )


def test_the_chat_s_colours_are_the_api_s_origins(talked: Any) -> None:
    names = DOCUMENT["trace"]["drafters"]
    expected = [
        [piece, "token target" if not name else f"token drafted o{names.index(name)} d{min(depth, 4)}"]
        for piece, (name, depth) in zip(DOCUMENT["pieces"], DOCUMENT["origins"], strict=True)
    ]
    assert talked["tokens"] == expected


def test_plain_decoding_runs_beside_it_and_is_compared_token_by_token(talked: Any, stub: Stub) -> None:
    assert talked["verdict"] == f"✓ identical: all {len(FAST.token_ids)} tokens"
    assert talked["plain"] == FAST.text and len(talked["clocks"]) == 2
    first, second = stub.asked[:2]
    assert "method" not in first and second["method"] == "plain" and first["seed"] == second["seed"]
    assert first["outrider"] == {"origins": True, "trace": True}


def test_the_conversation_goes_on_and_its_steps_can_be_seen(talked: Any, stub: Stub) -> None:
    assert talked["where"].startswith(f"step 1 of {FAST.stats.steps}")
    assert [message["role"] for message in stub.asked[2]["messages"]] == ["user", "assistant", "user"]
    assert talked["methods"] == ["mix (default)", "plain", "suffix"]


def test_texts_that_differ_say_up_to_where_they_are_the_same() -> None:
    with served(FAST, plain_of(FAST, differs_at=4)) as stub:
        said = drive(
            stub.url,
            'await page.getByLabel("plain decoding beside it").check();'
            + ASK
            + 'await page.waitForFunction(() => document.querySelector(".verdict").textContent.includes("differ"));'
            'await page.waitForFunction(() => !document.querySelector(".composer .main").textContent.includes("Stop"));'
            'return page.locator(".verdict").textContent();',
        )
    assert said == "identical for the first 4 tokens, then they differ"


def test_an_answer_can_be_stopped_and_what_is_there_stays() -> None:
    with served(FAST, plain_of(FAST), pause=0.3) as stub:
        said = drive(
            stub.url,
            """
            await page.getByLabel("Message").fill("Tell me");
            await page.getByRole("button", { name: "Send" }).click();
            await page.waitForFunction(() => document.querySelectorAll(".tokens .token").length > 2);
            await page.getByRole("button", { name: "Stop" }).click();
            await page.waitForFunction(() => document.querySelector(".trouble").textContent === "stopped");
            return page.locator(".tokens").first().textContent();
            """,
        )
    assert said and FAST.text.startswith(said) and said != FAST.text


def test_the_fleet_moves_and_says_in_words_what_it_shows_in_shades(stub: Stub) -> None:
    found = drive(
        stub.url + "#fleet",
        """
        await page.waitForSelector(".heat-map");
        const first = await page.locator(".tiles").innerText();
        await page.waitForFunction((before) => document.querySelector(".tiles").innerText !== before, first);
        return {
          head: await page.locator(".heat-map thead").innerText(),
          rows: await page.locator(".heat-map tbody tr").allInnerTexts(),
          strips: await page.locator(".strip-bar").evaluateAll((bars) => bars.map((bar) => bar.ariaLabel)),
          parts: await page.locator(".strip-bar").nth(1).locator("rect").evaluateAll((parts) =>
            parts.map((part) => part.getAttribute("class"))),
          waits: await page.locator(".sequence.waits").count(),
          saved: await page.locator(".big").textContent(),
          gaps: await page.locator(".chart").last().getAttribute("aria-label"),
        };
        """,
    )
    assert found["head"].split() == ["drafter", "1", "2"]
    assert [row.split() for row in found["rows"]] == [["eagle3", "20%", "\N{EN DASH}"], ["suffix", "83%", "48%"]]
    assert "80 of them reused" in found["strips"][1] and "0 of them reused" in found["strips"][0]
    assert found["parts"] == ["strip-part reused", "strip-part prompt", "strip-part new"]
    assert found["waits"] == 1 and found["saved"].startswith("about ") and "20.0 ms" in found["gaps"]


def test_a_server_with_a_key_is_asked_with_it() -> None:
    with served(FAST, plain_of(FAST), key="let-me-in") as stub:
        found = drive(
            stub.url,
            """
            await page.getByLabel("Message").fill("Tell me");
            await page.getByLabel("API key").fill("let-me-in");
            await page.getByLabel("API key").press("Tab");
            await page.getByRole("button", { name: "Send" }).click();
            await page.waitForSelector(".legend");
            return page.getByLabel("Method").locator("option").count();
            """,
            expected=("401",),
        )
    assert found == 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_fits_a_phone(stub: Stub, scheme: str) -> None:
    widths = drive(
        stub.url,
        'await page.getByLabel("plain decoding beside it").check();'
        + ASK
        + """
        await page.waitForFunction(() => document.querySelector(".verdict").textContent.startsWith("✓"));
        const wide = () => page.evaluate(() => document.documentElement.scrollWidth);
        const out = [await wide()];
        for (const name of ["Steps", "Fleet"]) {
          await page.getByRole("tab", { name }).click();
          if (name === "Fleet") await page.waitForSelector(".heat-map");
          out.push(await wide());
        }
        return out;
        """,
        size=PHONE,
        scheme=scheme,
    )
    assert max(widths) <= PHONE[0]
