"""Several gateway processes behind one port: who starts, dies and ends, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from phyai_gateway.cli import main, parser
from phyai_gateway.contract import MAX_IN_FLIGHT
from phyai_gateway.proto import robot_inference_v1_pb2 as pb
from phyai_gateway.protocols.base import ListenerOptions
from phyai_gateway.protocols.native import NativeListener
from phyai_gateway.running import make_listeners, plan_of
from phyai_gateway.share import Share
from phyai_gateway.workers import Supervisor
from tests.gateway.http_client import fetch, served
from tests.gateway.stub_world import PI05, StubBackend, fault_of, run, until, world
from tests.gateway.test_gateway_cli import gateway, model_server, serving
from tests.ports import free_ports

METRIC = re.compile(r'phyai_requests_total{model="pi05",outcome="ok",protocol="native"} (\d+)')


def test_one_process_is_told_nothing_that_the_others_must_know() -> None:
    async def work() -> None:
        async with world(1, share=Share(0, 2)) as w, served(w) as port:
            (member,) = w.gateway.members()
            path = f"/v1/backends/{member.id}"
            body = {"model_name": "pi05", "endpoint": "h:1"}
            for method, where, sent in (
                ("POST", "/v1/backends", body),
                ("PATCH", path, {"weight": 2}),
                ("DELETE", path, None),
            ):
                answer = await fetch(port, method, where, sent)
                assert answer.status == 409
                assert "--backends-file" in answer.json["error"]["message"]
            assert (await fetch(port, "GET", "/v1/backends")).status == 200
            fault = await fault_of(w.gateway.router.register("h:1", "pi05"))
            assert fault.status == "failed_precondition"

    run(work)


def test_each_has_its_share_of_what_a_backend_holds() -> None:
    async def work() -> None:
        holds = PI05.__class__(**{**_fields(), "extra": {MAX_IN_FLIGHT: 7}})
        async with world(share=Share(1, 3), slots=32) as w:
            plain, small = await w.add(), await w.add(StubBackend(1.0, holds))
            assert w.member(plain).slots == 10
            assert w.member(small).slots == 2
            assert Share(1, 64).slots(3) == 1

    run(work)


def _fields() -> dict[str, object]:
    return {name: getattr(PI05, name) for name in PI05.__slots__}


def test_only_the_first_has_listeners_that_know_their_clients() -> None:
    async def work() -> None:
        async with world() as w:
            words = ["--workers", "2", "--http-port", "30000", "--lerobot", "--listen", "openpi"]
            for index, names in (
                (0, ["http", "native", "openpi", "lerobot"]),
                (1, ["http", "native", "openpi"]),
            ):
                plan = plan_of(parser().parse_args([*words, "--worker", str(index)]))
                made = [listener.name for listener, _ in make_listeners(plan, w.gateway)]
                assert made == names
                assert plan.http[1] == 30000 + index

    run(work)


def test_two_share_a_port_and_one_alone_does_not() -> None:
    async def work() -> None:
        async with world(1) as w:
            shared = ListenerOptions(reuse_port=True)
            first = NativeListener(w.gateway.router, shared)
            port = await first.start()
            second = NativeListener(w.gateway.router, ListenerOptions(port=port, reuse_port=True))
            assert await second.start() == port
            with pytest.raises(OSError, match="cannot be bound"):
                await NativeListener(w.gateway.router, ListenerOptions(port=port)).start()
            await first.stop()
            await second.stop()

    run(work)


def test_a_taken_port_is_told_before_any_worker_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        words = ["--workers", "2", "--http-port", str(free_ports(2)[0])]
        assert main([*words, "--gateway", f"127.0.0.1:{port}"]) == 2
    assert "cannot listen on" in capsys.readouterr().err


# It waits for the signal itself: a handler's flag set just before a sleep begins ends no sleep.
CHILD = """
import signal, sys
index, mode, folder = sys.argv[-1], sys.argv[1], sys.argv[2]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with open(f"{folder}/{index}", "a") as file:
    file.write("x")
if index == "1" and (mode == "wrong" or mode == "later" and len(open(f"{folder}/1").read()) == 2):
    sys.exit(2)
sys.exit(0 if signal.sigtimedwait([signal.SIGTERM], 30) else 3)
"""


def supervisor(mode: str, folder: Path) -> Supervisor:
    return Supervisor([sys.executable, "-S", "-c", CHILD, mode, str(folder)], 2)


def starts(folder: Path) -> dict[str, int]:
    return {file.name: len(file.read_text()) for file in folder.iterdir()}


@pytest.mark.parametrize(("mode", "starts_of_1"), [("good", 2), ("later", 3)])
def test_who_dies_is_started_again_and_a_signal_ends_all(
    mode: str, starts_of_1: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it finds its settings wrong (``later``): only those of the start end everything."""
    monkeypatch.setattr("phyai_gateway.workers.FIRST_PAUSE_S", 0.01)

    async def work() -> None:
        made = supervisor(mode, tmp_path)
        running = asyncio.create_task(made.run())
        await until(lambda: starts(tmp_path) == {"0": 1, "1": 1})
        process = made.workers[1].process
        assert process is not None
        process.kill()
        await until(lambda: starts(tmp_path) == {"0": 1, "1": starts_of_1})
        made.pass_on(signal.SIGTERM)
        assert await running == 0

    run(work)


def test_wrong_settings_of_one_end_all(tmp_path: Path) -> None:
    async def work() -> None:
        assert await supervisor("wrong", tmp_path).run() == 2
        assert starts(tmp_path)["1"] == 1

    run(work)


def test_a_process_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phyai_gateway.workers.FIRST_PAUSE_S", 0.01)
    real, failed = asyncio.create_subprocess_exec, []

    async def scarce(*words: str, **more: Any) -> Any:
        if words[-1] == "1" and not failed:
            failed.append(words)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await real(*words, **more)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", scarce)

    async def work() -> None:
        made = supervisor("good", tmp_path)
        running = asyncio.create_task(made.run())
        await until(lambda: starts(tmp_path) == {"0": 1, "1": 1})
        made.pass_on(signal.SIGTERM)
        assert await running == 0
        assert failed

    run(work)


async def infer(port: int, count: int) -> None:
    """Send requests, each over a connection of its own."""
    for number in range(count):
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            call = channel.unary_unary(
                "/robot.inference.v1.ModelInference/Infer",
                pb.InferenceRequest.SerializeToString,
                pb.InferenceResponse.FromString,
            )
            request = pb.InferenceRequest(request_id=f"r{number}", model_name="pi05")
            assert (await call(request, timeout=10)).request_id == request.request_id


async def counted(http: int) -> int:
    found = METRIC.search((await fetch(http, "GET", "/metrics")).body.decode())
    return int(found.group(1)) if found else 0


@pytest.mark.slow
def test_workers_share_the_load_follow_the_file_and_end_with_their_parent(tmp_path: Path) -> None:
    async def work() -> None:
        async with world() as w, model_server(w) as (_, endpoint):
            file = tmp_path / "backends.json"
            file.write_text("[]")
            native, base, _ = free_ports(3)  # each process has a status page: base and the next
            words = ("--gateway", f"127.0.0.1:{native}", "--http-port", str(base))
            words += ("--workers", "2", "--backends-file", str(file))
            async with gateway(*words) as process:
                await process.says("native listens on")
                file.write_text(json.dumps([{"model_name": "pi05", "endpoint": endpoint}]))
                await serving(base)
                await serving(base + 1)
                await infer(native, 30)
                each = [await counted(base), await counted(base + 1)]
                assert sum(each) == 30
                assert min(each) > 0
                pids = children(process.inner.pid)
                os.kill(pids[1], signal.SIGKILL)
                await process.says("another one starts")
                await serving(base + 1)
                await infer(native, 10)
                process.inner.send_signal(signal.SIGTERM)
                assert await process.ended() == 0
            async with gateway(*words) as process:
                await serving(base)
                await serving(base + 1)
                pids = children(process.inner.pid)
                process.inner.kill()
                await until(lambda: not any(map(lives, pids)), 30)

    run(work, 120)


def children(pid: int) -> list[int]:
    """Return the processes that a process started, oldest first."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return sorted(map(int, text.split()))


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
