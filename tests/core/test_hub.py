"""Hub ids become local folders: against a stand-in of the hub on 127.0.0.1."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phyai import hub
from phyai.errors import CheckpointError, CheckpointNotFound, ConfigError
from phyai.weights import load_pretrained, save_safetensors

REPO = "acme/arm"
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
TOKEN = "hf_" + "x" * 34


class StandIn(ThreadingHTTPServer):
    """The endpoints of the hub that a snapshot download uses, and a log of the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.log: list[tuple[str, str, str]] = []
        self.gated = self.private = False
        self.damage = ""
        self.status = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def paths(self, kind: str) -> list[str]:
        return [path for method, path, _ in self.log if method == kind]


class Handler(BaseHTTPRequestHandler):
    """Answers from ``server.files``: commit -> name -> bytes."""

    server: StandIn
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self) -> None:
        server, path = self.server, self.path.partition("?")[0]
        token = self.headers.get("Authorization", "")
        server.log.append((self.command, path, token))
        if server.status:
            return self.error(server.status, "Broken")
        if not path.removeprefix("/api/models").startswith(f"/{REPO}"):
            return self.error(404, "RepoNotFound")
        if server.private and token != f"Bearer {TOKEN}":
            return self.error(401, "RepoNotFound")
        rest = path.removeprefix("/api/models").removeprefix(f"/{REPO}").strip("/").split("/", 2)
        revision = rest[1] if len(rest) > 1 else "main"
        commit = COMMITS.get(revision, revision)
        files = server.files.get(commit)
        if files is None:
            return self.error(404, "RevisionNotFound")
        if rest[0] == "resolve":
            return self.file(commit, rest[2], files.get(rest[2]))
        if rest[0] == "tree":
            return self.json([
                {"type": "file", "path": n, "size": len(b), "oid": "0" * 40} | lfs(n, b)
                for n, b in files.items()
            ])  # fmt: skip
        siblings = [{"rfilename": name} for name in files]
        return self.json({"id": REPO, "modelId": REPO, "sha": commit, "siblings": siblings})

    def file(self, commit: str, name: str, body: bytes | None) -> None:
        if self.server.gated:
            return self.error(403, "GatedRepo")
        if body is None:
            return self.error(404, "EntryNotFound")
        etag = hashlib.sha256(body).hexdigest() if lfs(name, body) else git_oid(body)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
        if lfs(name, body):
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(body))}
            if self.command == "GET" and self.server.damage == "flip":
                body = body[:-1] + bytes([body[-1] ^ 1])
            if self.command == "GET" and self.server.damage == "short":
                body = body[: len(body) // 2]
        self.reply(200, body, headers)

    def json(self, value: Any) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def error(self, status: int, code: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": f"{code} of the stand-in"}
        self.reply(status, b'{"error": "no"}', headers)

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def lfs(name: str, body: bytes) -> dict[str, Any]:
    if not name.endswith(".safetensors"):
        return {}
    digest = hashlib.sha256(body).hexdigest()
    return {"lfs": {"size": len(body), "oid": digest, "pointerSize": 130}}


def git_oid(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StandIn]:
    standin = StandIn()
    for number, commit in enumerate(COMMITS.values()):
        file = save_safetensors({"weight": torch.full((2, 2), float(number))}, tmp_path / "w")
        standin.files[commit] = {
            "config.json": b'{"type": "arm"}',
            "model.safetensors": file.read_bytes(),
            "assets/arm/norm_stats.json": b"{}",
            "tokenizer.model": b"words",
            "README.md": b"not needed",
            "pytorch_model.bin": b"never",
        }
    thread = threading.Thread(target=standin.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield standin
    standin.shutdown()
    thread.join()
    standin.server_close()


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def fetch(server: StandIn, cache: Path, source: str = REPO, **kw: Any) -> Path:
    return hub.resolve(source, endpoint=server.url, cache_dir=cache, progress=False, **kw)


def in_new_process(code: str, cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with its own hub settings: the hub library reads them when imported."""
    program = f"from phyai import hub, errors\n{code}"
    settings = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    settings |= {"HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"} | env
    return subprocess.run(
        [sys.executable, "-c", program], env=settings, capture_output=True, text=True, timeout=100
    )


# ---------------------------------------------------------------- local paths


def test_local_paths_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "arm").mkdir(parents=True)
    assert hub.resolve(REPO) == Path(REPO)
    assert hub.resolve(tmp_path) == tmp_path
    file = tmp_path / "m.safetensors"
    file.touch()
    assert hub.resolve(str(file)) == file


@pytest.mark.parametrize(
    "name", ["./gone", "../gone", "/gone", "~/gone", "a/b/c", "a/b.safetensors"]
)
def test_absent_paths_never_reach_the_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_download", lambda *args: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointNotFound, match="no such file or folder"):
        hub.resolve(name)


def test_absent_path_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointNotFound, match="did you mean 'checkpoints'"):
        hub.resolve(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("arm", "organisation"),
        ("acme/arm@", "org/name"),
        ("ac me/arm", "'ac-me/arm'"),
        ("https://huggingface.co/acme/arm", "'acme/arm'"),
        ("hf://acme/arm", "'acme/arm'"),
        ("", "org/name"),
    ],
)
def test_bad_ids(source: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_download", lambda *args: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointNotFound, match=hint):
        hub.resolve(source)


def test_two_revisions() -> None:
    with pytest.raises(ConfigError, match="one revision"):
        hub.resolve(f"{REPO}@v1", revision="v2")


@pytest.mark.parametrize("revision", ["../../up", "/etc", "v1/../../../up"])
def test_a_revision_stays_inside_the_cache(revision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_download", None)
    with pytest.raises(CheckpointNotFound, match="branch, tag or commit"):
        hub.resolve(REPO, revision=revision)


# ---------------------------------------------------------------- downloads


def test_download_takes_only_what_is_needed(
    server: StandIn, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = fetch(server, tmp_path / "cache")
    assert capfd.readouterr().err == ""  # progress=False
    held = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert held == {
        "config.json", "model.safetensors", "assets/arm/norm_stats.json", "tokenizer.model"
    }  # fmt: skip
    model = nn.Linear(2, 2, bias=False)
    load_pretrained(model, folder)
    assert model.weight.sum() == 0
    server.log.clear()
    assert fetch(server, tmp_path / "cache") == folder
    assert not [path for path in server.paths("GET") if "/resolve/" in path]
    only = fetch(server, tmp_path / "two", allow=("*.json",))
    assert not (only / "model.safetensors").exists()


@pytest.mark.parametrize("form", ["argument", "suffix", "commit"])
def test_pinned_revision(server: StandIn, tmp_path: Path, form: str) -> None:
    source, revision = {
        "argument": (REPO, "v1"),
        "suffix": (f"{REPO}@v1", None),
        "commit": (REPO, COMMITS["v1"]),
    }[form]
    folder = fetch(server, tmp_path, source, revision=revision)
    assert folder.name == COMMITS["v1"]
    model = nn.Linear(2, 2, bias=False)
    load_pretrained(model, folder)
    assert model.weight.sum() == 4


def test_token_of_the_environment_is_sent(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.private = True
    with pytest.raises(CheckpointNotFound, match="HF_TOKEN"):
        fetch(server, tmp_path / "a")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch(server, tmp_path / "b").is_dir()
    assert server.log[-1][2] == f"Bearer {TOKEN}"


def test_gated(server: StandIn, tmp_path: Path) -> None:
    server.gated = True
    with pytest.raises(CheckpointError, match=rf"licence.*{REPO}.*HF_TOKEN") as caught:
        fetch(server, tmp_path)
    assert not isinstance(caught.value, CheckpointNotFound)


def test_unknown_repository_and_revision(server: StandIn, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"'acme/leg' .*spelling"):
        fetch(server, tmp_path, "acme/leg")
    with pytest.raises(CheckpointNotFound, match="revision 'v9'"):
        fetch(server, tmp_path, f"{REPO}@v9")


def test_empty_selection(server: StandIn, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="got none"):
        fetch(server, tmp_path, allow=("*.onnx",))


@pytest.mark.parametrize("damage", ["flip", "short"])
def test_damaged_download_is_not_accepted(server: StandIn, tmp_path: Path, damage: str) -> None:
    server.damage = damage
    with pytest.raises(CheckpointError, match="must") as caught:
        fetch(server, tmp_path)
    assert ("damaged model.safetensors" in str(caught.value)) == (damage == "flip")
    assert not list(tmp_path.rglob("model.safetensors"))
    server.damage = ""
    model = nn.Linear(2, 2, bias=False)
    load_pretrained(model, fetch(server, tmp_path))
    assert model.weight.sum() == 0


def test_no_connection(tmp_path: Path, server: StandIn) -> None:
    folder = fetch(server, tmp_path)
    with pytest.raises(CheckpointNotFound, match="no connection"):
        hub.resolve(REPO, endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "x", progress=False)
    again = hub.resolve(REPO, endpoint="http://127.0.0.1:9", cache_dir=tmp_path, progress=False)
    assert again == folder


def test_refusing_server(server: StandIn, tmp_path: Path) -> None:
    server.status = 403
    with pytest.raises(CheckpointError, match="HTTP 403"):
        fetch(server, tmp_path)


def test_environment_of_the_hub_library(server: StandIn, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_TOKEN, then HF_HUB_OFFLINE with and without a cache; bars go to stderr."""
    server.private = True
    show = "print(hub.resolve('acme/arm'))"
    online = in_new_process(show, tmp_path / "c", HF_ENDPOINT=server.url, HF_TOKEN=TOKEN)
    assert online.returncode == 0, online.stderr
    assert Path(online.stdout.strip()).name == COMMITS["main"]
    assert "%" in online.stderr
    server.log.clear()
    code = f"""{show}
for source in ('acme/leg', 'acme/arm@v1'):
    try:
        hub.resolve(source)
    except errors.CheckpointNotFound as error:
        print('refused', 'HF_HUB_OFFLINE' in str(error))
"""
    offline = in_new_process(code, tmp_path / "c", HF_ENDPOINT=server.url, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    expected = [online.stdout.strip(), "refused True", "refused True"]
    assert offline.stdout.splitlines() == expected
    assert server.log == []


def test_import_does_not_load_the_hub_library() -> None:
    code = "import sys, phyai.hub; print('huggingface_hub' in sys.modules, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "False"]
