"""A headless Chromium that tests drive: playwright-core comes from npm into the user's cache, Chromium from the system.

Where one of them is missing and cannot be had, the test is skipped and says what to install.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import platformdirs
import pytest

PLAYWRIGHT = "playwright-core@1.65.1"
NAMES = ("chromium", "chromium-browser", "google-chrome")
LAPTOP, PHONE = (1280, 800), (390, 844)

SCRIPT = """
import {{ createRequire }} from "node:module";
const {{ chromium }} = createRequire({modules})("playwright-core");
const options = {options};
const browser = await chromium.launch({{ executablePath: options.chromium, args: ["--no-sandbox"] }});
const page = await browser.newPage({{ viewport: options.viewport, colorScheme: options.scheme }});
page.setDefaultTimeout(20000);
const trouble = [];
const away = [];
page.on("console", (message) => ["error", "warning"].includes(message.type()) && trouble.push(message.text()));
page.on("pageerror", (error) => trouble.push(error.message));
page.on("request", (request) => {{
  const url = request.url();
  if (!url.startsWith(options.origin) && !/^(data|blob|about):/.test(url)) away.push(url);
}});
let found = null;
let failed = null;
try {{
  await page.goto(options.url);
  found = await (async () => {{ {body} }})();
  if (options.shot) await page.screenshot({{ path: options.shot, fullPage: options.full }});
}} catch (error) {{
  failed = String(error);
}}
await browser.close();
process.stdout.write(JSON.stringify({{ found: found ?? null, trouble, away, failed }}));
"""


def needs_browser() -> tuple[str, Path]:
    """The browser and the folder of node's modules, or a skipped test."""
    chromium = next((found for name in NAMES if (found := shutil.which(name))), None)
    if chromium is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no node and npm here: apt-get install nodejs npm")
    folder = Path(platformdirs.user_cache_dir("outrider")) / "tests" / PLAYWRIGHT
    if not (folder / "node_modules" / "playwright-core" / "package.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), PLAYWRIGHT]
        installed = subprocess.run(command, capture_output=True, text=True, timeout=180)
        if installed.returncode:
            pytest.skip(f"npm could not fetch {PLAYWRIGHT}: {installed.stderr.strip()[-200:]}")
    return chromium, folder


def drive(
    url: str, body: str, *, size: tuple[int, int] = LAPTOP, scheme: str = "light", shot: Path | None = None,
    full: bool = True, timeout: float = 120, expected: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """What `body` returns, run with `page` at that address. No console error but those that hold a word of `expected`,
    and nothing asked of elsewhere."""
    chromium, folder = needs_browser()
    options = {
        "chromium": chromium, "url": url, "scheme": scheme, "viewport": {"width": size[0], "height": size[1]},
        "origin": url if url.startswith("file:") else "/".join(url.split("/")[:3]) + "/",
        "shot": None if shot is None else str(shot), "full": full,
    }  # fmt: skip
    script = SCRIPT.format(modules=json.dumps(str(folder / "x.js")), options=json.dumps(options), body=body)
    ran = subprocess.run(
        ["node", "--input-type=module", "-"], input=script, capture_output=True, text=True, timeout=timeout
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["failed"] is None, said["failed"]
    unexpected = [line for line in said["trouble"] if not any(word in line for word in expected)]
    assert unexpected == [], "the page complained"
    assert said["away"] == [], "the page asked elsewhere"
    return said["found"]
