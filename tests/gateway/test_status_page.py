"""The status page: files, headers, hostile names, and what a browser shows."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import struct
import subprocess
import zlib
from contextlib import suppress
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from phyai_gateway.http_api import MAX_STREAMS, HttpApi
from phyai_gateway.messages import Fault
from phyai_gateway.tokens import TokenStore
from tests.gateway.http_client import fetch, served
from tests.gateway.stub_world import StubBackend, World, run, world

PAGE = files("phyai_gateway") / "status_page"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
HOSTILE = (
    "<img src=x onerror=\"document.title='pwned'\">",
    "</script><script>document.title='pwned'</script>",
    "javascript:document.title='pwned'",
    '"><svg onload=document.title="pwned">',
    "\u202egnp.exe {{7*7}} ${7*7}",
)


def test_the_page_is_whole_and_locked_down() -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            page = await fetch(port, "GET", "/")
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
            assert page.headers["x-content-type-options"] == "nosniff"
            assert page.headers["x-frame-options"] == "DENY"
            for name in re.findall(r'(?:src|href)="([^"]+)"', page.body.decode()):
                answer = await fetch(port, "GET", f"/{name}")
                assert answer.status == 200, name
                assert answer.headers["content-security-policy"] == policy

    run(work)


def test_the_page_has_no_remote_asset_inline_code_or_markup_from_data() -> None:
    html = (PAGE / "index.html").read_text()
    script = (PAGE / "status.js").read_text()
    style = (PAGE / "status.css").read_text()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag != "style"
            for name, value in attrs:
                assert not name.startswith("on")
                assert name != "style"
                if name in ("src", "href"):
                    assert "/" not in (value or "")

    Reader().feed(html)
    assert not re.search(r"<script(?![^>]*src=)", html)
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert word not in script
    for text in (html, script, style):
        found = re.findall(r"https?://[^\s\"']+", text)
        assert [url for url in found if url != "http://www.w3.org/2000/svg"] == []
    assert "url(" not in style
    assert "@import" not in style


def test_hostile_names_travel_as_data() -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            for name in HOSTILE:
                await w.add(model=name)
            answer = await fetch(port, "GET", "/v1/backends")
            assert answer.headers["content-type"] == "application/json"
            assert {row["model_name"] for row in answer.json["backends"]} == set(HOSTILE)

    run(work)


class _First(HTMLParser):
    """Finds the figures that the server put into the page, and every tag."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.figures = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if dict(attrs).get("name") == "first-figures":
            self.figures = dict(attrs)["content"] or ""


def test_the_page_brings_its_first_figures_and_hostile_names_stay_inside() -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            empty = _First((await fetch(port, "GET", "/")).body.decode())
            assert json.loads(empty.figures)["backends"] == []
            for name in (*HOSTILE, "\u2028 &lt;b&gt; &quot; ' \\\" \n \0"):
                await w.add(model=name)
            answer = await fetch(port, "GET", "/")
            page = answer.body.decode()
            found = _First(page)
            assert found.tags == empty.tags
            assert page.count("<") == (PAGE / "index.html").read_text().count("<")
            shown = json.loads(found.figures)["backends"]
            listed = (await fetch(port, "GET", "/v1/backends")).json["backends"]
            assert [row["model_name"] for row in shown] == [row["model_name"] for row in listed]
            assert len(shown) == len(HOSTILE) + 1
            assert answer.headers["cache-control"] == "no-store"

    run(work)


def test_the_page_tells_nothing_to_who_may_not_ask() -> None:
    tokens = TokenStore.of({"boss": ("boss-token-0123456789", ("admin",))})
    boss = {"Authorization": "Bearer boss-token-0123456789"}

    async def work() -> None:
        async with world() as w, served(w) as port, served(w, tokens=tokens) as guarded:
            await w.add(model="secret-model")
            for where, headers in (
                (guarded, {}),
                (guarded, boss),  # a browser's address line sends none: one way for all
                (port, {"Host": f"evil.example:{port}"}),
                (port, {"Origin": "http://evil.example"}),
            ):
                answer = await fetch(where, "GET", "/", headers=headers)
                assert answer.status == 200
                assert b"secret-model" not in answer.body
                assert _First(answer.body.decode()).figures == ""
            assert b"secret-model" in (await fetch(port, "GET", "/")).body

    run(work)


async def _lively(w: World) -> None:
    """Backends in every state, with names that try to be markup."""
    for number in range(3):
        await w.add(StubBackend(number))
    fine, broken, leaving = w.stubs.values()
    for _ in range(60):
        await w.ask()
    broken.fault = Fault("internal", "engine failed: <b>CUDA</b> error", started=True)
    for _ in range(20):
        with suppress(Fault):
            await w.ask()
    w.gateway.patch(w.member(leaving).id, state="draining", weight=None)
    fine.release.clear()
    for name in HOSTILE[:3]:
        await w.add(model=name)
    down = StubBackend()
    down.down = True
    await w.add(down, "groot_n17")
    w.gateway.warnings.append("http on 0.0.0.0: <i>anybody</i> who reaches this port can use it.")


async def _browse(port: int, folder: Path, *arguments: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1400,900",
        *arguments,
        f"http://127.0.0.1:{port}/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 120)
    finally:
        if process.returncode is None:
            process.kill()
    return out


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
def test_a_browser_shows_every_state_and_runs_nothing_hostile(tmp_path: Path) -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            await _lively(w)
            asked = [asyncio.create_task(w.ask()) for _ in range(4)]
            await asyncio.sleep(0.1)
            shot = tmp_path / "status.png"
            # Virtual time: the stream of events never ends, and so the page never "loads".
            budget = "--virtual-time-budget=4000"
            await _browse(port, tmp_path, budget, f"--screenshot={shot}")
            dom = (await _browse(port, tmp_path, budget, "--dump-dom")).decode()
            for task in asked:
                task.cancel()
            assert "<title>PhyAI gateway</title>" in dom
            assert "&lt;img src=x onerror=" in dom
            assert "<img" not in dom
            assert "&lt;b&gt;CUDA" in dom
            for state in ("ready", "ejected", "draining", "connecting"):
                assert f'<span class="badge {state}">{state}</span>' in dom
            assert '<span id="link" class="badge live" role="status">live</span>' in dom
            width, height, colours = _measure(shot)
            assert (width, height) == (1400, 900)
            assert colours > 50

    run(work, 280)


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
def test_a_picture_at_the_load_event_has_the_figures(tmp_path: Path) -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            await _lively(w)
            await w.add(model="the-last-model")
            # No virtual time, and no stream of events: only what the page itself brought.
            api = next(one for one in w.gateway.listeners if isinstance(one, HttpApi))
            api._streams = MAX_STREAMS
            dom = (await _browse(port, tmp_path, "--dump-dom")).decode()
            assert '<td class="name">the-last-model</td>' in dom
            assert "document.title='pwned'" in dom
            assert "<title>PhyAI gateway</title>" in dom
            assert "<img" not in dom
            shot = tmp_path / "status.png"
            await _browse(port, tmp_path, f"--screenshot={shot}")
            assert _measure(shot)[2] > 50

    run(work, 280)


def _measure(path: Path) -> tuple[int, int, int]:
    """Return width, height and the number of different bytes in a PNG's rows: not one colour."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    packed, at = b"", 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += 12 + length
    return width, height, len(set(zlib.decompress(packed)))
