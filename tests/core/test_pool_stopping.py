"""Requests of real workers that are stopped: the work is saved, and the next request is fine."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for
from typing import Any

import pytest
import torch

from phyai import DeploymentConfig, Engine, EngineArgs
from phyai.engine_config import EngineConfig
from phyai.testing.sandbox import Sandbox
from tests.core.test_pool_cancelling import config

pytestmark = pytest.mark.slow

MODEL = """
import time
from dataclasses import dataclass

import torch

from phyai.adapter import Adapter, AdapterArgs
from phyai.types import Key, Prepared

EVALUATIONS = [0]


class Falling:
    prediction = "velocity"

    def __init__(self, model):
        self.model = model

    def __call__(self, x, step, cache):
        EVALUATIONS[0] += 1
        value = float(x["action"].flatten()[0])
        if value > 100:  # every step takes a while
            time.sleep(0.1)
        if value < -100:  # the number of evaluations so far is the answer, in the last step
            return {"action": x["action"] + EVALUATIONS[0] - 1}
        if self.model.tp.size > 1:
            self.model.tp.all_reduce(torch.ones(1))
        return {"action": x["action"] * 0 + 1}


@dataclass
class Args(AdapterArgs):
    max_batch_size: int = 1
    unit: str = "step"


class Model(Adapter):
    name = "stopping"
    args_cls = Args
    parallel = frozenset({"tp"})

    def __init__(self, args, config, services):
        super().__init__(args, config, services)
        self.graph_unit = args.unit
        self.tp = services.parallel.tp

    def prepare(self, request):
        steps = 1 if float(request.flatten()[0]) < -100 else 40
        return Prepared({"noise.action": request}, len(request), Key(num_steps=steps))

    def denoiser(self):
        return Falling(self)
"""

QUICK, SLOW, COUNT = 0.0, 1000.0, -1000.0


def ask(value: float) -> Any:
    return torch.full((1, 1, 1), value)


def evaluations(engine: Engine) -> float:
    """Return how often the worker's network has run, this once included.

    One step of size 1 takes (x + count - 1) off x, so 1 - count is left.
    """
    return 1.0 - float(engine.step(ask(COUNT)).flatten()[0])


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    sandbox = Sandbox(tmp_path_factory.mktemp("stopping") / "site")
    sandbox.adapter("stopping", model=MODEL, more=", capabilities={'parallel': ['tp']}")
    with sandbox.visible():
        yield importlib.import_module("stopping_dist.model").Args


def opened(args: Any, setting: EngineConfig, **deployment: Any) -> Engine:
    return Engine(
        EngineArgs("stopping", args, setting), deployment=DeploymentConfig.local(**deployment)
    )


class Cancels:
    """An ``on_progress`` that cancels at a step, on the thread that results arrive on."""

    def __init__(self, at: int) -> None:
        self.at, self.steps = at, list[int]()
        self.futures: list[Future[Any]] = []
        self.reached = threading.Event()

    def __call__(self, done: int, total: int) -> None:
        self.steps.append(done)
        if done == self.at:
            self.reached.set()
            for future in self.futures:
                assert future.cancel()


@pytest.mark.parametrize(("wait_ms", "tp"), [(0.0, 1), (1.0, 1), (0.0, 2)])
def test_a_worker_saves_the_work_of_what_is_cancelled(args: Any, wait_ms: float, tp: int) -> None:
    with opened(args(), config(wait_ms, tp)) as engine:
        before, cancels = evaluations(engine), Cancels(at=2)
        running = engine.submit(ask(SLOW), cancels)
        queued = [engine.submit(ask(SLOW)) for _ in range(3)]
        cancels.futures = [running, *queued]
        wait_for(cancels.futures, timeout=60)
        assert all(future.cancelled() for future in cancels.futures)
        with pytest.raises(CancelledError):
            running.result(0)
        ran = evaluations(engine) - before - 1
        assert 2 <= ran < 30  # of 160; the wish is on its way for a moment
        assert engine.step(ask(QUICK)).shape == (1, 1, 1)
        (replica,) = engine.stats()["replicas"]
        assert (replica["in_flight"], replica["done"], replica["failed"]) == (0, 3, 0)
        assert replica["restarts"] == 0


def test_cancelling_and_the_answer_race(args: Any) -> None:
    """Whoever is first: a result or a CancelledError, and the next request is fine."""
    with opened(args(), config(), devices=("cpu", "cpu"), replica_count=2) as engine:
        outcomes = set()
        for number in range(200):
            future = engine.submit(ask(QUICK))
            for _ in range(100 * (number % 20)):
                future.done()
            asked = future.cancel()
            wait_for([future], timeout=60)
            assert future.cancelled() == asked
            outcomes.add(asked)
            if not asked:
                assert future.result(0).shape == (1, 1, 1)
        assert engine.step(ask(QUICK)).shape == (1, 1, 1)
        replicas = engine.stats()["replicas"]
        assert [replica["in_flight"] for replica in replicas] == [0, 0]
        assert sum(replica["failed"] for replica in replicas) == 0
        assert True in outcomes


def test_ctrl_c_in_a_step_stops_it_and_what_waits_in_a_loop_can_be_cancelled(args: Any) -> None:
    main = threading.main_thread().ident
    assert main is not None
    with opened(args(), config()) as engine:
        before = evaluations(engine)

        def interrupt() -> None:
            while not engine.stats()["replicas"][0]["in_flight"]:
                time.sleep(0.01)
            time.sleep(0.3)  # it is sent, and the main thread waits
            signal.pthread_kill(main, signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            engine.step(ask(SLOW))
        assert evaluations(engine) - before - 1 < 35  # of 40
    with opened(args(unit="loop"), config()) as engine:
        before = evaluations(engine)
        first, second = engine.submit(ask(SLOW)), engine.submit(ask(SLOW))
        assert not first.cancel()
        assert second.cancel()
        with pytest.raises(CancelledError):
            second.result(30)
        assert not first.done()  # it ends before the one that it waited for
        assert first.result(60).shape == (1, 1, 1)
        assert evaluations(engine) - before - 1 == 40


def test_what_is_cancelled_ends_with_its_worker(args: Any) -> None:
    deployment = {"retry_on_worker_death": True}
    with opened(args(), config(), **deployment) as engine:
        cancels = Cancels(at=1)
        future = engine.submit(ask(SLOW), cancels)
        assert cancels.reached.wait(60)
        (replica,) = engine.stats()["replicas"]
        os.kill(replica["pid"], signal.SIGSTOP)
        assert future.cancel()
        os.kill(replica["pid"], signal.SIGKILL)
        with pytest.raises(CancelledError):
            future.result(60)
