"""Graph unit ``step``: the network replayed once per step, equal to the loop and to eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from phyai import plugins
from phyai.engine_core import EngineCore
from phyai.errors import PluginContractError
from phyai.solver import Euler
from phyai.testing.capture import RecordingCapturer
from tests.core.guided_adapter import GuidedAdapter, GuidedArgs, GuidedRequest
from tests.core.test_guidance import UNITS, request, same
from tests.core.toy_adapter import config, open_engine, registry


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


def recorded(cls: type[GuidedAdapter] = GuidedAdapter, **args: Any) -> EngineCore:
    """Open a core whose regions are recorded and replayed as a GPU does."""
    plugins.register(cls)
    capturer = RecordingCapturer(num_warmup_iters=1)
    core = EngineCore(cls.name, GuidedArgs(**args), config(), capturer=capturer)
    core.services.graphs._capturer.static = lambda: [  # type: ignore[attr-defined]
        *core.services.memory.buffers().values(),
        *core.adapter.network.parameters(),  # type: ignore[attr-defined]
        *core.adapter.network.tables.values(),  # type: ignore[attr-defined]
    ]
    return core


def requests() -> list[GuidedRequest]:
    return [
        request(2, known=True),
        request(1),
        request(2, known=True, interval=(0.3, 0.9)),
        request(2, guided=False),
        request(2, rtc=True, steps=3),
    ]


# ---------------------------------------------------------------- the same numbers


def test_the_units_give_the_same_bits() -> None:
    with open_engine(GuidedAdapter, unit="loop") as loop:
        want = [loop.step(one) for one in requests()]
    with open_engine(GuidedAdapter, unit="step") as step:
        for one, expected in zip(requests() * 2, want * 2, strict=True):
            same(step.step(one), expected)


@UNITS
def test_recorded_regions_equal_eager_for_both_branches(unit: str) -> None:
    with open_engine(GuidedAdapter, unit=unit, runtime={"static_shapes": True}) as eager:
        want = [eager.step(one) for one in requests()[2:]]
    core = recorded(unit=unit)
    try:
        for _ in ("recorded", "replayed"):
            for one, expected in zip(requests()[2:], want, strict=True):
                same(core.step(one), expected)
        assert core.services.graphs.fallbacks == 0
        assert all(region.mode == "cuda" for region in core.services.graphs.report())
    finally:
        core.close()


def test_the_network_of_each_branch_is_one_region_replayed_at_every_step() -> None:
    core = recorded(unit="step")
    try:
        core.step(request(2))
        runs = len(core.adapter.network.branches)  # type: ignore[attr-defined]
        core.step(request(2))
        assert len(core.adapter.network.branches) == runs  # type: ignore[attr-defined]
        replays = {region.name: region.replays for region in core.services.graphs.report()}
        assert replays == {
            "cache1/encode": 2,
            "cache1/uncond/encode": 2,
            "cache1/network": 8,
            "cache1/uncond/network": 8,
        }
        assert core.services.graphs.captures == 4
    finally:
        core.close()


def test_a_step_graph_reads_the_row_of_its_step() -> None:
    with open_engine(GuidedAdapter, unit="step") as engine:
        engine.step(request(1))
        (bound,) = engine.core.runner._bound.values()
        buffers = engine.core.services.memory.buffers()
        assert buffers["cache1/position"].tolist() == [3]  # the last step's
        assert {n for n in buffers if n.startswith("cache1/out.")} == {
            "cache1/out.action",
            "cache1/out.video",
        }
        assert bound.x["action"].data_ptr() == buffers["cache1/x.action"].data_ptr()


def test_new_weights_are_used_in_place_and_moved_ones_are_captured_again() -> None:
    plain = request(2)
    core = recorded(unit="step")
    try:
        first = core.step(plain)
        core.update_weights([("gain", torch.tensor(0.75))])
        changed = core.step(plain)
        assert not torch.allclose(first["action"], changed["action"])
        assert core.services.graphs.captures == 4
        network: Any = core.adapter.network  # type: ignore[attr-defined]
        network.tables = {grid: table.clone() for grid, table in network.tables.items()}
        core.runner.refresh()
        same(core.step(plain), changed)
        assert core.services.graphs.recaptures >= 2
    finally:
        core.close()


# ---------------------------------------------------------------- rules of a step graph


@pytest.mark.parametrize("read", ["index", "sigma", "dt"])
def test_a_network_must_not_read_a_value_of_the_step(read: str) -> None:
    with (
        open_engine(GuidedAdapter, unit="step", reads=read) as engine,
        pytest.raises(PluginContractError, match=f"must not read step.{read}: one graph"),
    ):
        engine.step(request(1))
    with open_engine(GuidedAdapter, unit="loop", reads=read) as engine:
        engine.step(request(1))


def test_a_network_that_is_not_captured_may_read_the_step() -> None:
    with open_engine(GuidedAdapter, unit="step") as engine:
        want = engine.step(request(2))
    core = recorded(unit="step", reads="sigma", network_safe=False)
    try:
        same(core.step(request(2)), want)
        modes = {region.name: region.mode for region in core.services.graphs.report()}
        assert modes["cache1/network"] == modes["cache1/uncond/network"] == "eager"
        assert modes["cache1/encode"] == "cuda"
    finally:
        core.close()


@UNITS
def test_an_encoder_that_is_not_captured_stays_eager_alone(unit: str) -> None:
    core = recorded(unit=unit, encode_safe=False)
    try:
        core.step(request(2))
        modes = {region.name: region.mode for region in core.services.graphs.report()}
        assert {mode for name, mode in modes.items() if name.endswith("encode")} == {"eager"}
        assert {mode for name, mode in modes.items() if not name.endswith("encode")} == {"cuda"}
    finally:
        core.close()


class Keeping(Euler):
    """Keeps every prediction, as multi-step solvers do."""

    kept: ClassVar[list[Any]] = []

    def solve(self, denoiser: Any, x: Any, *rest: Any, **more: Any) -> Any:
        self.kept.clear()

        class Wrapped:
            prediction = denoiser.prediction

            def __call__(self, x: Any, step: Any, cache: Any) -> Any:
                out = denoiser(x, step, cache)
                Keeping.kept.append((out["action"], out["action"].clone()))
                return out

        return super().solve(Wrapped(), x, *rest, **more)


class KeepingAdapter(GuidedAdapter):
    name = "guided-keeping"

    def solver(self) -> Any:
        return Keeping()


def test_predictions_outlive_the_next_replay() -> None:
    core = recorded(KeepingAdapter, unit="step")
    try:
        core.step(request(2, guided=False))
        assert len(Keeping.kept) == 4
        assert all(torch.equal(now, then) for now, then in Keeping.kept)
    finally:
        core.close()


def test_the_unit_must_be_known() -> None:
    with pytest.raises(PluginContractError, match="graph_unit of adapter 'guided' must be 'loop'"):
        open_engine(GuidedAdapter, unit="steps")
