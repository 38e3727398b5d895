"""The recorded payloads of the serving protocols: what the manifest lists, and their kinds.

A kind comes from the RPC and the folder that the manifest states, never from a file's own name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from phyai_gateway.decode.arrays import Array, Scalar
from phyai_gateway.decode.pickle_nodes import ArrayNode, Instance

UNKNOWN = "unknown"
NO_PAYLOAD = ("README.md", "manifest.json")
_RPC = {
    "SendObservations": "lerobot_observation",
    "SendPolicyInstructions": "lerobot_setup",
    "GetActions reply": "lerobot_reply",
    "data": "lerobot_matrix",
}
_PHYAI = {".pb": "native", ".msgpack": "rlinf", ".body": "kserve", ".txt": "kserve_length"}
_EXPECT = ("accept", "refuse", "accept or refuse", "n/a")


@dataclass(frozen=True)
class Payload:
    """One file. expect: accept, refuse, accept or refuse, n/a, or reference reply (...)."""

    root: Path
    name: str
    kind: str
    expect: str
    entry: Mapping[str, Any]
    problem: str = ""

    @cached_property
    def data(self) -> bytes:
        return (self.root / self.name).read_bytes()

    @property
    def decoded(self) -> Any:
        return self.entry.get("decoded")

    @property
    def folder(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def needs_token(self) -> bool:
        return "token is configured" in self.entry.get("note", "") or "api_token" in str(
            self.decoded
        )


def roots(folder: Path) -> list[Path]:
    """Return the folders with a manifest: the folder itself, or those in it."""
    found = [folder] if (folder / "manifest.json").is_file() else []
    return found or sorted(path.parent for path in folder.glob("*/manifest.json"))


def discover(folder: Path) -> list[Payload]:
    """Return every payload that a manifest lists, in its order."""
    return [
        _payload(root, entry)
        for root in roots(folder)
        for entry in json.loads((root / "manifest.json").read_text())["files"]
    ]


def unlisted(folder: Path) -> list[str]:
    """Return the files beside a manifest that it doesn't list."""
    lines = []
    for root in roots(folder):
        listed = {payload.name for payload in discover(root)}
        names = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
        lines += sorted(names - listed - set(NO_PAYLOAD))
    return lines


def _payload(root: Path, entry: Mapping[str, Any]) -> Payload:
    name, expect = str(entry.get("file", "")), str(entry.get("expect", ""))
    kind = _kind(name, entry, expect)
    problem = "" if kind != UNKNOWN else "no protocol and role fits it"
    path = root / name
    if not path.is_file():
        kind, problem = UNKNOWN, "is listed but missing"
    elif len(path.read_bytes()) != entry.get("bytes", -1):
        kind, problem = UNKNOWN, "has another size than the manifest states"
    elif hashlib.sha256(path.read_bytes()).hexdigest() != entry.get("sha256"):
        kind, problem = UNKNOWN, "has another sha256 than the manifest states"
    return Payload(root, name, kind, expect, entry, problem)


def _kind(name: str, entry: Mapping[str, Any], expect: str) -> str:
    reply = expect.startswith("reference reply")
    if expect not in _EXPECT and not reply:
        return UNKNOWN
    if "rpc" in entry:
        kind = _RPC.get(str(entry["rpc"]), UNKNOWN)
        stream = name.endswith(".grpcs") and kind == "lerobot_observation"
        return "lerobot_stream" if stream else kind
    folder = name.partition("/")[0]
    if folder in ("openpi", "groot"):
        return f"{folder}_reply" if reply else folder
    if folder == "phyai" and not reply:
        return _PHYAI.get(Path(name).suffix, UNKNOWN)
    return UNKNOWN


def plain(value: Any) -> Any:
    """Return decoded content as the manifest writes it: arrays as dtype, shape and hash."""
    if isinstance(value, ArrayNode):
        value = value.array
    if isinstance(value, Array):
        digest = hashlib.sha256(value.row_major()).hexdigest()
        dtype = value.dtype.replace(">", "<")
        return {"dtype": dtype, "shape": list(value.shape), "sha256": digest}
    if isinstance(value, Scalar):
        return {"dtype": value.dtype, "scalar": value.value}
    if isinstance(value, Instance):
        return plain(value.state)
    if isinstance(value, tuple):
        return {"tuple": [plain(item) for item in value]}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {_text(key): plain(item) for key, item in value.items()}
    return _text(value)


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def is_array(value: Any, rank: int | None = None) -> bool:
    """Return whether a value of the manifest stands for an array."""
    found = isinstance(value, dict) and "sha256" in value
    return found and (rank is None or len(value["shape"]) == rank)
