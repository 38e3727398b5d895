"""The golden run itself: what it must notice in a folder it is given."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.golden_serving import UNKNOWN, discover, unlisted

pytestmark = pytest.mark.slow  # each test runs pytest in a process of its own

ROOT = Path(__file__).parents[2]
PING = b"\x81\xa8endpoint\xa4ping"


def write(folder: Path, name: str, data: bytes, **entry: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    manifest = folder / "manifest.json"
    found = json.loads(manifest.read_text())["files"] if manifest.exists() else []
    digest = hashlib.sha256(data).hexdigest()
    given = {"file": name, "bytes": len(data), "sha256": digest, "expect": "accept"}
    manifest.write_text(json.dumps({"files": [*found, given | entry]}))


@pytest.mark.parametrize(
    "entry",
    [
        {"rpc": "Other"},
        {"expect": "maybe"},
        {"bytes": 1},
        {"sha256": "0" * 64},
        {"file": "groot/absent.msgpack"},
        {"file": "elsewhere/x.msgpack"},
    ],
)
def test_entries_that_fit_nothing_are_unknown(tmp_path: Path, entry: dict[str, Any]) -> None:
    write(tmp_path, "groot/x.msgpack", PING, **entry)
    (payload,) = discover(tmp_path)
    assert payload.kind == UNKNOWN
    assert payload.problem


def test_kinds_don_t_depend_on_names(tmp_path: Path) -> None:
    write(tmp_path, "groot/a.msgpack", PING)
    write(tmp_path, "lerobot/b", b"", rpc="SendObservations")
    write(tmp_path, "c/d.pkl", b"", rpc="SendPolicyInstructions")
    kinds = [payload.kind for payload in discover(tmp_path)]
    assert kinds == ["groot", "lerobot_observation", "lerobot_setup"]


def test_files_beside_the_manifest_are_found(tmp_path: Path) -> None:
    write(tmp_path, "groot/a.msgpack", PING)
    (tmp_path / "README.md").write_text("words")
    (tmp_path / "groot/b.msgpack").write_bytes(PING)
    assert unlisted(tmp_path) == ["groot/b.msgpack"]


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir"]
    command += [str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    command += [str(ROOT / "tests/gateway/test_golden.py"), "--golden-dir", str(folder)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_wrong_outcomes_and_content_fail(tmp_path: Path) -> None:
    write(tmp_path, "groot/good.msgpack", PING, decoded={"endpoint": "ping"})
    write(tmp_path, "groot/refused.msgpack", PING, expect="refuse", level="semantic")
    write(tmp_path, "groot/other.msgpack", PING, decoded={"endpoint": "pong"})
    result = run(tmp_path)
    assert result.returncode == 1
    assert "2 failed, 2 passed" in result.stdout


def test_empty_folder_fails(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.returncode == 1
    assert "holds no payload" in result.stdout
