"""Commands of docs/serving.md run as written, on free ports; its links lead somewhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native_cache import share_native
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
PAGES = ("serving.md", "serving_protocols.md", "replicas.md", "ray.md")
PAGE = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"```console\n(.*?)```", PAGE, re.S) for line in block.splitlines()
]
# Every port a command names or takes by default; defaults can be moved by an option alone.
DEFAULTS = {"50063": "server.port", "50064": "server.http_port"}
GATEWAY_DEFAULTS = {"50111": "--gateway", "30000": "--http-port", "8080": "", "8000": ""}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)", text):
        if not link.startswith("http"):
            assert (ROOT / "docs" / link).exists(), link


def test_page_starts_what_it_asks() -> None:
    started = [c for c in COMMANDS if c.endswith("&")]
    assert len(started) == 4
    assert sum("ask_server" in c for c in COMMANDS) == 2


@pytest.mark.slow
def test_commands_of_the_page_work(tmp_path: Path) -> None:
    share_native(tmp_path / "cache")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    numbers = ["50063", "50064", "50065", "50066", "50067", "50068", *GATEWAY_DEFAULTS]
    ports = dict(zip(numbers, map(str, free_ports(len(numbers))), strict=True))
    script = "\n".join(["set -me", "trap 'kill $(jobs -p) 2>/dev/null' EXIT"])
    for command in COMMANDS:
        script += "\n" + _moved(command, ports)
    script += "\necho all done"
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PHYAI_CACHE": str(tmp_path / "cache"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=270)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        raise AssertionError(out) from None
    assert process.returncode == 0, out
    assert out.count("50 actions of 7 in") == 16, out
    assert "all done" in out, out


def _moved(command: str, ports: dict[str, str]) -> str:
    """Return the command on free ports, also instead of those it takes by default."""
    known = "|".join(ports)
    found = re.sub(rf"\b({known})\b", lambda m: ports[m[1]], command)
    if command.startswith("phyai serve"):
        for port, key in DEFAULTS.items():
            if key not in command:
                found = found.replace(" &", f" --set {key}={ports[port]} &")
    if command.startswith("phyai-gateway"):
        found = found.replace("--lerobot ", f"--lerobot 127.0.0.1:{ports['8080']} ")
        found = found.replace("--listen openpi ", f"--listen openpi=127.0.0.1:{ports['8000']} ")
        given = f"--gateway 127.0.0.1:{ports['50111']} --http-port {ports['30000']}"
        found = found.replace(" &", f" {given} &")
    return found
