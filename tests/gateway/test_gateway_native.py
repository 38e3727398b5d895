"""A gateway over real gRPC to model servers that are killed, stopped and come back."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from phyai_gateway.gateway import Gateway, GatewaySettings
from phyai_gateway.health import ProbeSettings
from phyai_gateway.messages import Call, Fault, InferRequest
from phyai_gateway.native_client import NativeBackend
from tests.gateway.stub_world import run, until

ROOT = Path(__file__).parents[2]
PROBE = ProbeSettings(period_s=0.2, first_period_s=0.1, timeout_s=1.0, fall=3)


@asynccontextmanager
async def servers(
    count: int, delay_s: float
) -> AsyncIterator[list[tuple[asyncio.subprocess.Process, str]]]:
    """Start model servers, each answering with its number after the delay."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.gateway.stub_server", str(number), str(delay_s)),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number in range(count)
    ]
    try:
        found = []
        for process in processes:
            assert process.stdout is not None
            port = int(await process.stdout.readline())
            found.append((process, f"127.0.0.1:{port}"))
        yield found
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


@asynccontextmanager
async def gateway(endpoints: list[str]) -> AsyncIterator[Gateway]:
    made = Gateway(NativeBackend, GatewaySettings(probe=PROBE))
    await made.start()
    try:
        for endpoint in endpoints:
            made.add("pi05", endpoint)
        await until(lambda: len(made.router.pools["pi05"].ready()) == len(endpoints), 30)
        yield made
    finally:
        await made.stop()


class Load:
    """Robots that ask one request after the other, and what became of them."""

    def __init__(self, made: Gateway, robots: int) -> None:
        self._made, self.answers = made, Counter[str]()
        self._stop = asyncio.Event()
        self._tasks = [asyncio.create_task(self._robot(n)) for n in range(robots)]

    async def _robot(self, robot: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            request = InferRequest(f"{robot}-{count}", "pi05")
            try:
                reply = await self._made.router.infer(request, Call("test"))
                assert reply.request_id == request.request_id
                self.answers["ok"] += 1
            except Fault as fault:
                self.answers[fault.status] += 1
                await asyncio.sleep(0.01)

    async def more(self, count: int) -> None:
        """Wait for so many further good answers."""
        mark = self.answers["ok"]
        await until(lambda: self.answers["ok"] >= mark + count, 30)

    async def end(self) -> Counter[str]:
        self._stop.set()
        await asyncio.gather(*self._tasks)
        return self.answers


def test_a_killed_server_costs_only_its_own_requests() -> None:
    async def work() -> None:
        async with servers(2, 0.02) as found, gateway([e for _, e in found]) as made:
            load = Load(made, 8)
            await load.more(50)
            found[0][0].send_signal(signal.SIGKILL)
            await load.more(50)
            await until(lambda: len(made.router.pools["pi05"].ready()) == 1, 30)
            await load.more(50)
            answers = await load.end()
            lost = sum(count for status, count in answers.items() if status != "ok")
            # At most what ran there when it died; what came later was not started and went on.
            assert lost <= 4, answers
            assert set(answers) <= {"ok", "unavailable"}

    run(work, 90)


@pytest.mark.slow
def test_a_stopped_server_is_found_out_and_taken_back() -> None:
    async def work() -> None:
        async with servers(2, 0.005) as found, gateway([e for _, e in found]) as made:
            load = Load(made, 4)
            await load.more(20)
            found[0][0].send_signal(signal.SIGSTOP)
            pool = made.router.pools["pi05"]
            await until(lambda: len(pool.ready()) == 1, 30)
            await load.more(20)
            found[0][0].send_signal(signal.SIGCONT)
            await until(lambda: len(pool.ready()) == 2, 30)
            await load.more(20)
            answers = await load.end()
            assert set(answers) <= {"ok", "deadline_exceeded"}
            assert answers["deadline_exceeded"] <= 4  # those that ran there when it stopped

    run(work, 90)


@pytest.mark.parametrize("how", ["closed", "garbage", "silent"])
def test_what_is_no_model_server_never_gets_a_request(how: str) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if how == "garbage":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" * 100)
        if how == "silent":
            await reader.read()
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        made = Gateway(NativeBackend, GatewaySettings(probe=PROBE))
        await made.start()
        try:
            member = made.add("pi05", endpoint)
            await until(lambda: member.probe_failures >= 2, 30)
            assert member.state == "connecting"
            with pytest.raises(Fault) as caught:
                await made.router.infer(InferRequest("r", "pi05"), Call("test"))
            assert caught.value.status == "unavailable"
        finally:
            await made.stop()
            server.close()

    run(work, 60)
