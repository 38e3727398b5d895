"""The gateway killed and stopped under load: who comes back by itself, and what is lost."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import zmq

from tests.faults import askers
from tests.faults.processes import PORTS, SOON_S, Gateway, Model, eventually, run, running
from tests.faults.robots import CODE, robots
from tests.gateway import lerobot_robot
from tests.gateway.http_client import fetch

pytestmark = pytest.mark.slow
# What who asks in the moment in which a port closes may get: the kernel resets it, unread.
RESET = (ConnectionResetError, BrokenPipeError)


class Asking(threading.Thread):
    """A client that asks again and again in a thread; errors and the times of answers are kept."""

    def __init__(self, ask: Callable[[], Any], pause_s: float = 0.02) -> None:
        super().__init__(daemon=True)
        self._ask, self._pause_s = ask, pause_s
        self._ends = threading.Event()
        self.answered: list[float] = []
        self.refused = 0
        self.lost: list[BaseException] = []
        self.began: list[float] = []
        """When each of the lost ones began."""

    def run(self) -> None:
        while not self._ends.is_set():
            began = time.monotonic()
            try:
                self._ask()
                self.answered.append(time.monotonic())
            except askers.Refused:
                self.refused += 1
            except Exception as error:
                self.lost.append(error)
                self.began.append(began)
            self._ends.wait(self._pause_s)

    async def end(self) -> None:
        self._ends.set()
        await asyncio.to_thread(self.join, 30)


@contextmanager
def lerobot_client(port: int) -> Any:
    """A robot that shook hands once; gives a function that asks for one chunk, as it would."""
    with lerobot_robot.Robot(port, 5.0) as robot:
        assert robot.ready() is grpc.StatusCode.OK
        assert robot.set_up(askers.lerobot_setup())[0] is grpc.StatusCode.OK
        steps = iter(range(10**6))
        yield lambda: askers.lerobot_chunk(robot, next(steps))


def test_a_killed_gateway_is_found_again_by_every_client(tmp_path: Path) -> None:
    """Within moments of the restart, without a handshake; lost: what was in flight."""

    async def work() -> None:
        models = [Model(number, 0.02) for number in range(2)]
        state = ("--state", str(tmp_path / "state.json"))
        sessions = f",state_file={tmp_path / 'robots.json'}"
        gateway = Gateway([], *state, protocols=PORTS)
        at = gateway.command.index(f"lerobot=127.0.0.1:{gateway.ports['lerobot']}")
        command = list(gateway.command)
        command[at] += sessions
        gateway.command = tuple(command)
        async with running(*models, gateway):
            for model in models:
                body = {"model_name": "stub", "endpoint": model.endpoint}
                answer = await fetch(gateway.ports["http"], "POST", "/v1/backends", body)
                assert answer.status == 202
            await gateway.serving(2)
            with lerobot_client(gateway.ports["lerobot"]) as ask:
                robot = Asking(ask)
                others = {
                    name: Asking(lambda name=name: askers.ASK[name](gateway.ports[name], 5.0))
                    for name in ("openpi", "gr00t", "rlinf", "kserve")
                }
                threads = {"lerobot": robot, **others}
                for thread in threads.values():
                    thread.start()
                async with robots(gateway.ports["native"], 8) as load:
                    await load.more(100)
                    killed = time.monotonic()
                    await gateway.kill()
                    dead = time.monotonic()
                    await load.settled(dead)
                    assert len(load.lost()) <= 8
                    await gateway.start()
                    back = time.monotonic()
                    took = await load.until(lambda: bool(load.good(back)), SOON_S)

                    async def all_back() -> bool:
                        return all(
                            thread.answered and thread.answered[-1] > back
                            for thread in threads.values()
                        )

                    took_all = await eventually(all_back, SOON_S, "every protocol is served")
                    print(f"native back after {took:.2f} s, the others {took_all:.2f} s later")
                    await gateway.serving(2)
                    served = time.monotonic()
                    await load.more(200)
                    assert len(load.lost()) <= 8, load.codes(killed)
                    assert not load.bad(served), load.codes(served)
                    assert set(load.by_server(served)) == {0, 1}  # the state file has both
                for thread in threads.values():
                    await thread.end()
                for name in others:
                    thread = threads[name]
                    failed = list(zip(thread.began, thread.lost, strict=True))
                    assert not [one for one in failed if one[0] > served], (name, failed)
                    if name == "gr00t":  # while nobody listens a ZMQ client waits in vain
                        failed = [one for one in failed if one[0] < dead]
                    # The one in flight, and one that met a port which closes or has just opened.
                    assert len(failed) <= 2, (name, failed)

    run(work, 200)


def test_a_request_that_was_sent_to_a_dead_gateway_reaches_the_new_one() -> None:
    """ZMQ clients connect again by themselves: a REQ socket that lost its reply is made anew."""

    async def work() -> None:
        model = Model(5)
        gateway = Gateway([model.endpoint], protocols=PORTS)
        async with running(model, gateway):
            await gateway.kill()
            with askers.gr00t_socket(gateway.ports["gr00t"], 60.0) as waiting:
                waiting.send(b"\x81\xa8endpoint\xa4ping")
                with pytest.raises(zmq.Again):
                    waiting.recv(zmq.DONTWAIT)
                await gateway.start()
                assert b"Server is running" in await asyncio.to_thread(waiting.recv)

    run(work)


def test_sigterm_of_the_gateway_under_load_loses_no_accepted_request() -> None:
    """Ends by itself with status 0; every request is answered or refused unstarted."""

    async def work() -> None:
        models = [Model(number, 0.1, workers=16) for number in range(2)]
        gateway = Gateway([one.endpoint for one in models], protocols=PORTS)
        async with running(*models, gateway):
            threads = {
                name: [Asking(lambda name=name: askers.ASK[name](gateway.ports[name], 20.0), 0)]
                for name in ("openpi", "rlinf", "kserve")
            }
            for group in threads.values():
                for thread in group:
                    thread.start()
            async with robots(gateway.ports["native"], 16) as load:
                await load.more(100)

                async def all_answered() -> bool:
                    return all(thread.answered for group in threads.values() for thread in group)

                await eventually(all_answered, SOON_S, "every protocol is served")
                at = time.monotonic()
                gateway.send(signal.SIGTERM)
                assert await gateway.ended() == 0  # 1 if it had cut any of them
                ended = time.monotonic()
                print(f"ended after {ended - at:.2f} s")
                await load.settled(ended)
                # gRPC itself resets what comes in the moment in which the port closes, unread.
                reset = [one for one in load.lost() if one.code is CODE.CANCELLED]
                assert set(load.lost()) == set(reset), load.lost()
                assert all(one.began > at for one in reset), reset
                assert len([one for one in load.good() if one.began <= at < one.ended]) >= 1
            for name, group in threads.items():
                for thread in group:
                    await thread.end()
                    for error, began in zip(thread.lost, thread.began, strict=True):
                        assert isinstance(error, RESET), (name, error)
                        assert began > at, (name, error)

    run(work)


def test_a_second_signal_ends_a_gateway_that_waits_for_a_slow_model() -> None:
    async def work() -> None:
        model = Model(0, 100.0)  # nothing that ends within the limits below has waited for it
        gateway = Gateway([model.endpoint])
        async with running(model, gateway):
            asked = asyncio.create_task(
                asyncio.to_thread(askers.native, gateway.ports["native"], 100.0)
            )

            async def busy() -> bool:
                return bool((await gateway.backends())[0]["in_flight_requests"])

            await eventually(busy, SOON_S, "the request is at the model")
            gateway.send(signal.SIGTERM)
            await gateway.says("draining")
            gateway.send(signal.SIGTERM)
            assert await gateway.ended() == 1
            with suppress(askers.Refused, grpc.RpcError):
                await asked
                pytest.fail("nobody can have answered")

    run(work)
