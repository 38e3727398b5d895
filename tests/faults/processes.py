"""The processes of a fault: model servers and a gateway that tests kill, stop and start again."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.gateway.http_client import fetch
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
START_S = 60.0  # of a process, on a machine that does much else
SOON_S = 30.0  # of what takes a second or two; how long it took is printed, not judged
PROBES = ("--probe-period", "0.5", "--probe-timeout", "2")


async def eventually(
    holds: Callable[[], Awaitable[bool]], limit_s: float, what: str = "condition"
) -> float:
    """Wait for a condition; returns after how many seconds it held."""
    began = time.monotonic()
    while not await holds():
        assert time.monotonic() - began < limit_s, f"{what}: not within {limit_s} s"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


class Process:
    """A process with its lines; ``kill`` is SIGKILL."""

    def __init__(self, *command: str) -> None:
        self.command, self.lines = command, list[str]()
        self._reading: asyncio.Task[None] | None = None
        self.inner: Any = None

    async def start(self) -> None:
        self.inner = await asyncio.create_subprocess_exec(
            *self.command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.lines.clear()
        self._reading = asyncio.create_task(self._read(self.inner.stdout))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            self.lines.append(line.decode().rstrip())

    async def says(self, part: str, limit_s: float = START_S) -> str:
        """Return the first line with the text."""

        async def said() -> bool:
            assert self.inner.returncode is None or self._found(part), self.lines
            return self._found(part) is not None

        await eventually(said, limit_s, f"{part!r} of {self.command[-1]}")
        found = self._found(part)
        assert found is not None
        return found

    def _found(self, part: str) -> str | None:
        return next((line for line in self.lines if part in line), None)

    def tell(self, line: str) -> None:
        self.inner.stdin.write(f"{line}\n".encode())

    def send(self, number: signal.Signals) -> None:
        self.inner.send_signal(number)

    async def kill(self) -> None:
        if self.inner is not None and self.inner.returncode is None:
            self.inner.kill()
        await self.ended()

    async def ended(self, limit_s: float = 30.0) -> int:
        async with asyncio.timeout(limit_s):
            code: int = await self.inner.wait()
            assert self._reading is not None
            await self._reading
        return code

    def rss(self) -> int:
        """Return the resident bytes."""
        for line in Path(f"/proc/{self.inner.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmRSS")

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.inner.pid}/fd").iterdir()))


class Model(Process):
    """A model server of ``model_process``; restarts get the same port."""

    def __init__(self, number: int, delay_s: float = 0.01, workers: int = 4) -> None:
        (self.port,) = free_ports(1)
        self.number = number
        super().__init__(
            *(sys.executable, "-u", "-m", "tests.faults.model_process", str(number), str(delay_s)),
            *("--port", str(self.port), "--workers", str(workers)),
        )

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        await super().start()
        await self.says(str(self.port))


PORTS = ("native", "http", "lerobot", "openpi", "gr00t", "rlinf", "kserve")


class Gateway(Process):
    """``phyai-gateway`` with a listener of each protocol asked for, always on the same ports.

    program: what runs instead of the command itself, such as a wrapper that breaks its clock.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *more: str,
        protocols: Sequence[str] = ("native", "http"),
        program: Sequence[str] = ("-m", "phyai_gateway.cli"),
    ) -> None:
        self.ports = dict(zip(protocols, free_ports(len(protocols)), strict=True))
        command = [sys.executable, "-u", *program, *PROBES]
        command += ["--gateway", f"127.0.0.1:{self.ports['native']}"]
        command += ["--http-port", str(self.ports["http"]), "--http-model", "stub"]
        for name in protocols[2:]:
            command += ["--listen", f"{name}=127.0.0.1:{self.ports[name]}"]
        for endpoint in endpoints:
            command += ["--backend", "stub", endpoint]
        self._count = len(endpoints)
        super().__init__(*command, *more)

    async def start(self) -> None:
        await super().start()
        await self.says("http listens on")

    async def serving(self, count: int | None = None) -> None:
        """Wait until so many backends are ready, else all that it was started with."""
        wanted = self._count if count is None else count

        async def ready() -> bool:
            return sum(row["healthy"] for row in await self.backends()) >= wanted

        await eventually(ready, START_S, f"{wanted} ready backends")

    async def snapshot(self) -> dict[str, Any]:
        try:
            answer = await fetch(self.ports["http"], "GET", "/v1/backends")
        except OSError:
            return {"backends": []}
        found: dict[str, Any] = json.loads(answer.body)
        return found

    async def backends(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.snapshot())["backends"]
        return found

    async def asked_of(self, endpoint: str) -> int:
        """Return how many requests a backend has had, when none of them is under way."""

        async def settled() -> bool:
            return not (await self.backend(endpoint))["in_flight_requests"]

        await eventually(settled, SOON_S, f"requests at {endpoint} end")
        return int((await self.backend(endpoint))["requests"])

    async def backend(self, endpoint: str) -> dict[str, Any]:
        return next(row for row in await self.backends() if row["endpoint"] == endpoint)


@asynccontextmanager
async def running(*processes: Process) -> AsyncIterator[None]:
    """Start them; kill whatever still runs at the end."""
    try:
        await asyncio.gather(*(one.start() for one in processes))
        for one in processes:
            if isinstance(one, Gateway):
                await one.serving()
        yield
    finally:
        for one in processes:
            if one.inner is not None:
                await one.kill()


def run(work: Callable[[], Awaitable[None]], limit_s: float = 150.0) -> None:
    """Run an async test, bounded in time."""

    async def bounded() -> None:
        async with asyncio.timeout(limit_s):
            await work()

    asyncio.run(bounded())
