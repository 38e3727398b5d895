"""The worker side of the protocol: answers one JSON line per request line until ``quit``.

    python -m benchmarks.peers.worker NAME [OPTIONS]

Standard output belongs to the protocol; whatever else prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from benchmarks.peers.base import Peer, Refused, Setup
from benchmarks.peers.models import model_of
from safetensors.torch import save_file
from torch import Tensor

PROTOCOL = 1


def peak_rss_bytes() -> int:
    """Return the largest resident size this process has had, file pages included."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


class Server:
    """Holds the peer between two requests.

    make: returns the peer for the name of a model.
    """

    def __init__(self, make: Callable[[str], Peer]) -> None:
        self.make = make
        self.peer: Peer | None = None
        self.setup: Setup | None = None
        self.actions: Tensor | None = None
        self.first_call_s: float | None = None

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        handler = getattr(self, f"on_{message.get('op')}", None)
        if handler is None:
            raise Refused(f"op must be one of the protocol's; got {message.get('op')!r}.")
        reply: dict[str, Any] = handler(message)
        return reply

    def on_hello(self, message: dict[str, Any]) -> dict[str, Any]:
        if message.get("protocol") != PROTOCOL:
            raise Refused(f"protocol must be {PROTOCOL}; got {message.get('protocol')!r}.")
        self.peer = self.make(message.get("model", "pi05"))
        about = self.peer.describe()
        about["versions"] = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            **about["versions"],
        }
        return {**about, "threads": torch.get_num_threads()}

    def on_estimate(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"bytes": self._peer().estimate(Setup.from_message(message))}

    def on_load(self, message: dict[str, Any]) -> dict[str, Any]:
        setup = Setup.from_message(message)
        torch.set_num_threads(setup.threads)
        began = time.perf_counter()
        facts = self._peer().load(setup)
        self.setup = setup
        return {"seconds": time.perf_counter() - began, **facts}

    def on_inputs(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.setup is None:
            raise Refused("inputs must follow load.")
        steps = message.get("steps", self.setup.steps)
        self.actions = None
        return self._peer().inputs(Path(message["path"]), steps)

    def on_run(self, message: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        self.actions, stages = self._peer().run()
        seconds = time.perf_counter() - began
        if self.first_call_s is None:
            self.first_call_s = seconds
        return {"seconds": seconds, "stages": stages}

    def on_result(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.actions is None:
            raise Refused("result must follow run.")
        save_file({"actions": self.actions.float().contiguous()}, message["path"])
        return {"peak_rss_bytes": peak_rss_bytes(), "first_call_s": self.first_call_s}

    def on_quit(self, message: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _peer(self) -> Peer:
        if self.peer is None:
            raise Refused("hello must come first.")
        return self.peer


def serve(server: Server, requests: TextIO, replies: TextIO) -> None:
    """Answer request lines until ``quit`` or the end of the input."""
    for line in requests:
        message: dict[str, Any] = {}
        try:
            message = json.loads(line)
            reply = {"ok": True, **server.answer(message)}
        except Refused as refused:
            reply = {"ok": False, "refused": True, "error": str(refused)}
        except Exception as error:
            traceback.print_exc()
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
        if message.get("op") == "quit":
            return


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    name, options = sys.argv[1], " ".join(sys.argv[2:])
    serve(Server(lambda model: model_of(model).peer(name, options)), sys.stdin, replies)


if __name__ == "__main__":
    main()
