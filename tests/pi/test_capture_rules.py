"""Captured regions hold nothing a graph cannot record; told by the operators of eager runs.

The kernels are those the CPU chooses; `test_recorded_graphs` records and replays reference ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phyai.graph import GraphService
from phyai.testing.capture import forbidden
from phyai.types import RTCOptions
from tests.pi.tiny_requests import cpu_config, engine_of, pi_config, random_request


class Watch(TorchDispatchMode):
    """Notes what a region does that a graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if (problem := forbidden(func.overloadpacket.__name__, args)) is not None:
            self.seen.add(problem)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    mode = Watch()
    capture = GraphService.capture

    def watched(
        self: GraphService, name: str, fn: Callable[[], object], *args: Any, **options: Any
    ) -> Any:
        def run() -> object:
            with mode:
                return fn()

        return capture(self, name, run, *args, **options)

    monkeypatch.setattr(GraphService, "capture", watched)
    return mode


GUIDED = RTCOptions(torch.full((6, 8), 0.3), 2, 5, mode="guided")
TRAINED = RTCOptions(torch.full((6, 8), 0.3), 3, mode="trained")


@pytest.mark.parametrize(
    ("model", "rtc"),
    [("pi0", None), ("pi0", GUIDED), ("pi05", None), ("pi05", GUIDED), ("pi05", TRAINED)],
    ids=["pi0", "pi0 guided", "pi05", "pi05 guided", "pi05 trained"],
)
def test_regions_can_be_recorded(model: str, rtc: RTCOptions | None, watch: Watch) -> None:
    config = pi_config(model, rtc_training_max_delay=6 if rtc is TRAINED else 0)
    request = random_request(
        model,
        [[True, False], [True, True]],
        [3, 12],
        num_steps=2,
        rtc=None if rtc is None else [rtc, None],
    )
    with engine_of(model, cpu_config(static_shapes=True), config=config) as engine:
        engine.step(request)
    assert watch.calls > 100
    assert watch.seen == set()


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: (x > 0).nonzero(),
        lambda x: x + torch.tensor([1.0, 2.0]),
        lambda x: x.normal_(),
        torch.randn_like,
    ],
)
def test_the_watch_sees(work: Callable[[Tensor], object], watch: Watch) -> None:
    x = torch.ones(2)
    GraphService("eager", "cpu").capture("work", lambda: work(x))()
    assert watch.seen
