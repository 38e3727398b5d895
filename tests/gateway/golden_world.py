"""One live listener per protocol for the golden payloads, and what must hold for each of them."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.arrays import Array
from phyai_gateway.messages import Fault
from phyai_gateway.protocols.base import Listener, ListenerOptions
from phyai_gateway.protocols.gr00t import Gr00tListener
from phyai_gateway.protocols.kserve.listener import KserveListener
from phyai_gateway.protocols.lerobot import LerobotListener
from phyai_gateway.protocols.native import NativeListener
from phyai_gateway.protocols.openpi import OpenpiListener
from phyai_gateway.protocols.rlinf.listener import RlinfListener
from phyai_gateway.tokens import TokenStore
from tests.gateway import golden_clients as clients
from tests.gateway import lerobot_robot as robot
from tests.gateway.golden_serving import Payload
from tests.gateway.stub_router import LoopThread, StubRouter, serving

MIB = 1 << 20
NOISE_BYTES = 2 * MIB  # of buffers that don't depend on the payload


class OnlyToken(TokenStore):
    """Knows the one token of the recordings, which is shorter than a real store allows."""

    def __init__(self, token: str) -> None:
        super().__init__(())
        self._only = token

    def check(self, presented: str | None, scope: str) -> str:
        if presented != self._only:
            raise Fault("unauthenticated", "a known token is needed.")
        return "golden"


class World:
    """One listener per protocol, on one stub router."""

    def __init__(self, thread: LoopThread, everything: list[Payload], stack: ExitStack) -> None:
        self.thread, self.everything, self._stack = thread, everything, stack
        self.router = StubRouter()
        self.ports = {
            "openpi": self._serve(OpenpiListener, "libero"),
            "groot": self._serve(Gr00tListener, "groot"),
            "groot+token": self._serve(Gr00tListener, "groot", OnlyToken(self._token())),
            "lerobot": self._serve(LerobotListener, None),
            "native": self._serve(NativeListener, None),
            "rlinf": self._serve(RlinfListener, "pi05"),
            "kserve": self._serve(KserveListener, "pi05"),
        }
        recorded = [clients.recorded_setup(p) for p in everything if is_good(p, "lerobot_setup")]
        derived = [
            (p.folder, clients.derived_setup(p.decoded["observation"]))
            for p in everything
            if is_good(p, "lerobot_observation") and p.decoded
        ]
        self.recorded, self.derived = recorded, derived

    def _serve(
        self, make: Callable[..., Listener], model: str | None, tokens: TokenStore | None = None
    ) -> int:
        options = ListenerOptions(default_model=model, tokens=tokens)
        return self._stack.enter_context(serving(self.thread, lambda: make(self.router, options)))

    def _token(self) -> str:
        tokens = [p.decoded.get("api_token") for p in self.everything if is_good(p, "groot")]
        return next((token for token in tokens if token), "s3cret")

    def offer(self, *contracts: ModelContract) -> None:
        self.router.contracts = {contract.name: contract for contract in contracts}
        self.router.seen.clear()
        self.router.actions = None

    def last(self) -> Any:
        return self.router.seen[-1][0]

    def setup_for(self, payload: Payload) -> clients.Candidate:
        """Return the setup an observation was made for: of its own folder first."""
        if payload.decoded:
            return clients.derived_setup(payload.decoded["observation"])
        data = payload.data
        if payload.kind == "lerobot_stream":
            data = b"".join(m[m.find(b"\x80\x04") :] for m in robot.split_stream(data)[:1])
        keys = clients.observation_keys(data)
        near = [made for folder, made in self.derived if folder == payload.folder]
        return clients.best([*self.recorded, *near], keys)


def is_good(payload: Payload, kind: str) -> bool:
    return payload.kind == kind and payload.expect == "accept"


FORBIDDEN = {"os.system", "subprocess.Popen", "os.exec", "pickle.find_class", "import", "open"}
_watch: list[list[str]] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watch and event in FORBIDDEN:
        _watch[-1].append(f"{event} {args[0]!r:.80}")


sys.addaudithook(_audit)  # can't be taken away again, hence the list that says who watches


@contextmanager
def harmless(size: int) -> Iterator[None]:
    """Check that what runs inside imports, opens, executes and allocates nothing it should not."""
    before = set(sys.modules)
    tracemalloc.start()
    start = tracemalloc.get_traced_memory()[0]
    _watch.append([])
    try:
        yield
        grown = tracemalloc.get_traced_memory()[1] - start
    finally:
        tracemalloc.stop()
        events = _watch.pop()
    assert not events
    assert grown < 3 * size + NOISE_BYTES, f"{grown} bytes for a payload of {size}"
    assert set(sys.modules) == before
    assert not list(Path(tempfile.gettempdir()).glob("phyai_pwned*"))
    assert not list(Path("/tmp").glob("phyai_pwned*"))


def outcome(payload: Payload, accepted: bool) -> bool:
    """Return whether the payload was accepted, after checking that it should be."""
    wanted = {"accept": (True,), "refuse": (False,)}.get(payload.expect, (True, False))
    assert accepted in wanted, f"expected {payload.expect}"
    return accepted


def fits_text(text: str) -> None:
    """Check an error text: short, without paths, tracebacks or a server's names."""
    assert text
    assert len(text) < 1200
    assert "Traceback" not in text
    assert "phyai_gateway" not in text
    assert "site-packages" not in text


def hashed(data: Any) -> str:
    return hashlib.sha256(bytes(data)).hexdigest()


def array_of(value: np.ndarray[Any, Any]) -> Array:
    return Array(memoryview(value.tobytes()), value.dtype.str, value.shape)


def numpy_array(value: Any) -> np.ndarray[Any, Any]:
    if not isinstance(value, Array):
        return np.asarray(value)
    return np.frombuffer(value.row_major(), value.dtype.replace(">", "<")).reshape(value.shape)


def numpy_of(tensor: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(tensor.data, "<f4")
