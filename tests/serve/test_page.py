"""The page of a real server: its files and their policy, and in Chromium a chat, its steps and a fleet under load."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from outrider.explain import page_files
from outrider.serve.link.local import LocalLink
from outrider.serve.link.traces import Traces
from outrider.serve.settings import Settings
from outrider.serve.text import Text
from tests.explain.browser import drive, needs_browser
from tests.serve.conftest import Make, Served, listening


@pytest.fixture(scope="module")
def paged(make_engine: Make, small_model: Any) -> Iterator[Served]:
    text = Text(small_model.tokenizer, "small")
    with listening(LocalLink(make_engine), text, Settings(keys=(("somebody", "let-me-in"),))) as served:
        yield served


def ask(served: Served, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "the the the"}], "max_tokens": 40, "ignore_eos": True, **fields}
    answer = httpx.post(
        f"{served.url}/v1/chat/completions", json=body, headers={"Authorization": "Bearer let-me-in"}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def get(served: Served, path: str, key: str = "let-me-in") -> httpx.Response:
    return httpx.get(f"{served.url}{path}", headers={"Authorization": f"Bearer {key}"} if key else {})


def test_every_file_of_the_page_comes_without_a_key_and_with_a_strict_policy(paged: Served) -> None:
    for path in ["/", *(f"/page/{name}" for name in page_files())]:
        answer = get(paged, path, key="")
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert get(paged, "/page/none.js").status_code == 404
    assert get(paged, "/page/..%2Fpicture.py").status_code == 404
    page = get(paged, "/").text
    assert re.findall(r"(?:src|href)=\"([^\"]+)\"", page) == ["data:,", "page/style.css", "page/app.js"]
    assert get(paged, "/v1/outrider/fleet", key="").status_code == 401


def test_a_trace_is_the_answer_s_text_and_origins(paged: Served) -> None:
    answer = ask(paged, outrider={"origins": True, "trace": True}, return_token_ids=True, n=2, temperature=0.8, seed=3)
    found = get(paged, f"/v1/outrider/trace/{answer['id']}").json()
    documents = [found, *found["others"]]
    for choice, doc in zip(answer["choices"], documents, strict=True):
        assert doc["text"] == "".join(doc["pieces"]) == choice["message"]["content"]
        assert doc["token_ids"] == choice["token_ids"]
        origins = [{"drafter": name, "depth": depth} for name, depth in doc["origins"]]
        assert origins == choice["outrider"]["origins"]
        assert len(doc["trace"]["steps"]) == doc["stats"]["steps"]


def test_the_fleet_counts_what_was_said(paged: Served) -> None:
    before = get(paged, "/v1/outrider/fleet").json()
    ask(paged)
    after = get(paged, "/v1/outrider/fleet").json()
    assert after["stats"]["new_tokens"] - before["stats"]["new_tokens"] == 40
    assert after["stats"]["fleet"]["today"]["tokens"] >= 40 and after["sequences"] == []
    assert after["info"] == {"model": "small", "method": "suffix", "slots": 4}


def test_in_a_browser_a_chat_has_the_colours_of_the_api_s_origins(paged: Served) -> None:
    needs_browser()
    found = drive(
        f"{paged.url}/",
        """
        const answers = [];
        page.on("response", (response) =>
          response.url().includes("/v1/chat/completions") && response.ok() && answers.push(response.text()));
        await page.getByLabel("API key").fill("let-me-in");
        await page.getByLabel("API key").press("Tab");
        await page.getByLabel("Most tokens").fill("60");
        await page.getByLabel("plain decoding beside it").check();
        await page.getByLabel("Message").fill("the the the the");
        await page.getByLabel("Message").press("Enter");
        await page.waitForFunction(() => document.querySelector(".verdict")?.textContent.startsWith("✓"));
        const classes = await page.locator(".tokens-frame").first().locator(".token").evaluateAll((spans) =>
          spans.map((span) => span.className));
        await page.getByRole("tab", { name: "Steps" }).click();
        const where = await page.locator(".where").textContent();
        const chunks = (await answers[0]).split("\\n").filter((line) => line.startsWith("data: {"));
        const origins = chunks.flatMap((line) => JSON.parse(line.slice(6)).choices[0]?.outrider?.origins ?? []);
        return { origins, classes, where };
        """,
        expected=("401",),
    )
    assert len(found["classes"]) == len(found["origins"]) > 0
    for shown, origin in zip(found["classes"], found["origins"], strict=True):
        if origin["drafter"]:
            assert shown.startswith("token drafted o") and shown.endswith(f" d{min(origin['depth'], 4)}")
        else:
            assert shown == "token target"
    assert found["where"].startswith("step 1 of")  # whether anything was drafted is for the machine's speed to say


def test_in_a_browser_the_fleet_is_seen_under_load(paged: Served) -> None:
    needs_browser()
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            ask(paged, max_tokens=200)

    threads = [threading.Thread(target=load, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        found = drive(
            f"{paged.url}/",
            """
            await page.getByLabel("API key").fill("let-me-in");
            await page.getByLabel("API key").press("Tab");
            await page.getByRole("tab", { name: "Fleet" }).click();
            await page.waitForFunction(() => document.querySelectorAll(".sequence:not(.waits)").length >= 3
              && document.querySelectorAll(".sequence.waits").length >= 1);
            const tokens = () => page.locator(".sequence-count").first().textContent();
            const first = await page.locator(".strips").innerHTML();
            await page.waitForFunction((before) => document.querySelector(".strips").innerHTML !== before, first);
            const full = await page.waitForFunction(() => {  // between two answers one slot may be free for a moment
              const tiles = document.querySelector(".tiles").innerText;
              return tiles.includes("4 of 4") && tiles;
            });
            return { tiles: await full.jsonValue(), tokens: await tokens(),
              reused: await page.locator(".strip-bar .reused").count(),
              gaps: await page.locator(".chart").last().getAttribute("aria-label") };
            """,
            expected=("401",),
        )
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert "4 of 4" in found["tiles"] and int(found["tokens"]) > 0
    assert found["gaps"].startswith("half of them below ") and "below 0.00 ms" not in found["gaps"]


def test_a_question_for_a_trace_does_not_hold_up_the_engine(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document is made in another thread: the loop answers meanwhile."""
    link, entered, leave = LocalLink(make_engine), threading.Event(), threading.Event()

    def slow(self: Traces, id: str) -> None:
        entered.set()
        leave.wait(10)

    async def run() -> bool:
        await link.start()
        asked = asyncio.create_task(link.trace("x"))
        await asyncio.to_thread(entered.wait, 10)
        free = not asked.done() and bool(await link.stats())
        leave.set()
        await asked
        await link.close()
        return free

    monkeypatch.setattr(Traces, "find", slow)
    assert asyncio.run(run())
