"""Runner: live caches, buckets, memory budget, per-grid tables, what a weight update refreshes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from phyai import engine_core
from phyai.adapter import NoConditioning
from phyai.addresses import nbytes
from phyai.errors import CapacityError, ConfigError
from phyai.graph import GraphService
from phyai.scheduler import Scheduler
from phyai.solver import Direct
from phyai.testing.capture import RecordingCapturer
from phyai.types import Key, Prepared
from tests.core.toy_adapter import FlowAdapter, ToyAdapter, ToyRequest, open_engine, registry

ROW_BYTES = 4 * (4 + 4 + 6 + 6) + 1
"""features, state, noise and x of one row of the toy adapter, and its rows_valid flag."""


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


def request(rows: int, steps: int = 1, seed: int = 0) -> ToyRequest:
    generator = torch.Generator().manual_seed(seed)
    return ToyRequest(torch.randn(rows, 4, generator=generator), steps)


def places(engine: Any) -> list[tuple[int, int]]:
    """Return (num_steps, bucket) of the live caches, least recent first."""
    return [(key.num_steps, bucket) for key, bucket in engine.core.runner._bound]


# ---------------------------------------------------------------- live caches


def test_a_key_and_bucket_is_bound_once() -> None:
    with open_engine(FlowAdapter) as engine:
        engine.step(request(2))
        first = engine.core.runner._bound[Key(num_steps=1), 2]
        engine.step(request(2, seed=1))
        assert engine.core.runner._bound[Key(num_steps=1), 2] is first
        assert engine.core.services.graphs.stats()["replays"] == 4  # encode and solve, twice


def test_the_least_recent_cache_leaves_at_the_limit() -> None:
    with open_engine(FlowAdapter, runtime={"max_live_caches": 2}) as engine:
        want = {n: engine.step(request(1, n)) for n in (1, 2)}
        assert places(engine) == [(1, 1), (2, 1)]
        engine.step(request(1, 1))
        engine.step(request(1, 3))  # 2 was the least recent
        assert places(engine) == [(1, 1), (3, 1)]
        assert engine.core.services.memory.nbytes == 2 * ROW_BYTES
        assert len(engine.core.services.graphs.report()) == 4
        assert torch.equal(engine.step(request(1, 2)), want[2])
        assert torch.equal(engine.step(request(1, 1)), want[1])


def test_results_do_not_alias_the_buffers() -> None:
    with open_engine() as engine:
        first = engine.step(request(2))
        kept = first.clone()
        engine.step(request(2, seed=1))
        assert torch.equal(first, kept)


# ---------------------------------------------------------------- buckets


@pytest.mark.parametrize(
    ("rows", "static", "bucket"),
    [(1, True, 1), (2, True, 2), (3, True, 4), (5, True, 6), (6, True, 6), (3, False, 3)],
)
def test_the_bucket_of_a_batch(rows: int, static: bool, bucket: int) -> None:
    assert Scheduler(6, static).batch_bucket(rows) == bucket


class Watching(FlowAdapter):
    """Remembers what the network sees."""

    name = "toy-watching"

    def conditioning(self) -> Any:
        adapter = self
        adapter.seen: list[Any] = []

        class Watch(NoConditioning):
            def encode(self, cache: Any) -> None:
                cache["features"].copy_(2.0 * cache.inputs["state"])
                adapter.seen.append((cache.capacity, cache.rows, cache.inputs["state"].clone()))

        return Watch()


@pytest.mark.parametrize("known", [0, 1])
def test_padding_rows_are_copies_of_row_0_and_are_cut_off(known: int) -> None:
    with open_engine(Watching, max_batch_size=6, known=known) as engine:
        exact = [engine.step(request(rows)) for rows in (3, 5)]
        engine.core.runner.scheduler = Scheduler(6, static_shapes=True)
        padded = [engine.step(request(rows)) for rows in (3, 5)]
        seen = engine.adapter.seen[-2:]  # type: ignore[attr-defined]
    assert [t.shape[0] for t in padded] == [3, 5]
    for got, want in zip(padded, exact, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    for (capacity, rows, state), (want_capacity, want_rows) in zip(
        seen, [(4, 3), (6, 5)], strict=True
    ):
        assert (capacity, rows) == (want_capacity, want_rows)
        assert all(torch.equal(row, state[0]) for row in state[rows:])


def test_what_fills_a_bucket_does_not_change_a_row() -> None:
    with open_engine(FlowAdapter) as engine:
        engine.core.runner.scheduler = Scheduler(4, static_shapes=True)
        whole = request(4, 3)
        full = engine.step(whole)
        part = engine.step(ToyRequest(whole.state[:3], 3))
        assert torch.equal(full[:3], part)  # the same bucket: every bit


# ---------------------------------------------------------------- memory budget


def test_over_the_budget_is_refused_before_allocation_and_smaller_requests_go_on() -> None:
    with open_engine(FlowAdapter, runtime={"memory_budget_bytes": 2 * ROW_BYTES}) as engine:
        want = engine.step(request(2))
        peak = engine.core.services.memory.peak_nbytes
        with pytest.raises(CapacityError, match="budget of 162 bytes"):
            engine.step(request(3))
        assert engine.core.services.memory.peak_nbytes <= peak
        assert torch.equal(engine.step(request(2)), want)


def test_an_old_cache_makes_room_within_the_budget() -> None:
    with open_engine(FlowAdapter, runtime={"memory_budget_bytes": 3 * ROW_BYTES}) as engine:
        want = {n: engine.step(request(1, n)) for n in (1, 2, 3)}
        engine.step(request(1, 1))
        assert places(engine) == [(2, 1), (3, 1), (1, 1)]
        engine.step(request(2, 4))
        assert places(engine) == [(1, 1), (4, 2)]
        for steps, result in want.items():
            assert torch.equal(engine.step(request(1, steps)), result)


def test_a_cache_that_fits_only_in_part_leaves_nothing_behind() -> None:
    buffers = 4 * 4 + 1
    for budget in (buffers - 1, buffers, buffers + 4 * (4 + 6), ROW_BYTES - 1):
        with open_engine(runtime={"memory_budget_bytes": budget}) as engine:
            with pytest.raises(CapacityError):
                engine.step(request(1))
            assert engine.core.services.memory.nbytes == 0
            assert places(engine) == []


# ---------------------------------------------------------------- tables of a grid


class Tables(FlowAdapter):
    """A network with a table per grid."""

    name = "toy-tables"

    def load(self) -> None:
        super().load()
        policy = self.policy
        self.log: list[tuple[str, int]] = []
        log = self.log

        class Network(torch.nn.Module):
            prediction = "velocity"

            def __init__(self) -> None:
                super().__init__()
                self.tables: dict[Any, torch.Tensor] = {}

            def prepare_grid(self, grid: Any) -> None:
                log.append(("prepare", len(grid)))
                if len(grid) == 13:
                    raise ConfigError("no grid of 13 steps.")
                self.tables.setdefault(grid[0].grid, torch.empty(len(grid))).copy_(
                    torch.tensor(grid[0].grid)
                )

            def release_grid(self, grid: Any) -> None:
                log.append(("release", len(grid)))
                del self.tables[grid[0].grid]

            def forward(self, x: Any, step: Any, cache: Any) -> Any:
                out = policy(x, step, cache)["action"]
                return {"action": x["action"] - out * step.row(self.tables[step.grid])}

        self.network = Network()

    def denoiser(self) -> Any:
        return self.network


def test_tables_of_a_grid_leave_with_its_last_cache() -> None:
    with open_engine(Tables, runtime={"max_live_caches": 2}) as engine:
        adapter: Any = engine.adapter
        engine.step(request(1, 5))
        engine.step(request(2, 5))
        engine.step(request(1, 7))  # one cache of the grid of 5 is left
        assert {len(t) for t in adapter.network.tables.values()} == {5, 7}
        engine.step(request(1, 9))
        assert {len(t) for t in adapter.network.tables.values()} == {7, 9}
        for steps in range(20, 60):
            engine.step(request(1, steps))
        assert len(adapter.network.tables) == 2
    assert adapter.network.tables == {}


def test_tables_are_written_in_place_and_again_after_a_refresh() -> None:
    with open_engine(Tables) as engine:
        adapter: Any = engine.adapter
        engine.step(request(1, 5))
        (table,) = adapter.network.tables.values()
        engine.step(request(2, 5))
        address, adapter.log[:] = table.data_ptr(), []
        table.zero_()
        engine.core.runner.refresh()
        assert adapter.log.count(("prepare", 5)) >= 1
        (again,) = adapter.network.tables.values()
        assert again.data_ptr() == address
        assert again[0] == 1.0


class Scaled(NoConditioning):
    """Features with a weight that only the conditioning holds."""

    def __init__(self) -> None:
        self.scale = torch.full((4,), 2.0)

    def encode(self, cache: Any) -> None:
        cache["features"].copy_(self.scale * cache.inputs["state"])


class Damped(Direct):
    """Direct with a weight that only the solver holds, and noise that shows in the result."""

    def __init__(self) -> None:
        self.damp = torch.full((1,), 0.5)

    def solve(self, denoiser: Any, x: Any, *args: Any, **options: Any) -> Any:
        clean = super().solve(denoiser, x, *args, **options)
        return {leaf: self.damp * t + x[leaf] for leaf, t in clean.items()}


class Spread(ToyAdapter):
    """Every part has a weight of its own, and no module is named for the dump."""

    name = "toy-spread"

    def load(self) -> None:
        super().load()
        self.offset = torch.full((1,), 0.5)

    def start(self, cache: Any) -> Any:
        return {leaf: self.offset * t for leaf, t in super().start(cache).items()}

    def conditioning(self) -> Any:
        return Scaled()

    def solver(self) -> Any:
        return Damped()


@pytest.mark.parametrize("held", ["scale", "damp", "offset"])
def test_graphs_are_captured_anew_when_a_weight_of_any_part_moves(held: str) -> None:
    def service(backend: Any, device: torch.device, **options: Any) -> GraphService:
        return GraphService("cuda", device, capturer=RecordingCapturer(num_warmup_iters=1))

    with mock.patch.object(engine_core, "GraphService", service):
        recorded = open_engine(Spread)
    with recorded, open_engine(Spread) as exact:
        recorded.step(request(2))
        for engine in (recorded, exact):
            runner = engine.core.runner
            holders = {"scale": runner.conditioning, "damp": runner.solver}
            part = holders.get(held, engine.adapter)
            setattr(part, held, 3.0 * getattr(part, held))  # at another address
        want = exact.step(request(2))
        assert not torch.equal(recorded.step(request(2)), want)  # the graph is stale
        recorded.core.runner.refresh()
        torch.testing.assert_close(recorded.step(request(2)), want)
        stats = recorded.core.services.graphs.stats()
    assert (stats["recaptures"], stats["fallbacks"]) == (2, 0)  # encode and solve


def test_the_model_is_counted_when_it_may_have_changed_and_not_at_every_look() -> None:
    policy = 4 * (6 * 4 + 6)
    with (
        open_engine(Spread) as engine,
        mock.patch("phyai.runner.nbytes", wraps=nbytes) as counted,
    ):
        conditioning: Any = engine.core.runner.conditioning

        def model() -> int:
            return int(engine.stats()["replicas"][0]["memory"]["model"])

        assert [model() for _ in range(3)] == [policy + 4 * (4 + 1 + 1)] * 3
        assert counted.call_count == 1
        conditioning.scale = torch.zeros(4, 2)[:, 0]  # half of a storage of 8
        engine.core.runner.refresh()
        assert [model() for _ in range(3)] == [policy + 4 * (8 + 1 + 1)] * 3
        engine.step(request(1))
        engine.step(request(1))
        model()
        assert counted.call_count == 3
    with open_engine(Tables, runtime={"max_live_caches": 1}) as engine:
        sizes = []
        for steps in (5, 9):
            engine.step(request(1, steps))
            sizes.append(engine.core.memory_report()["model"])
        assert sizes == [policy + 4 * 5, policy + 4 * 9]


def test_a_grid_the_network_refuses_leaves_nothing_behind() -> None:
    with open_engine(Tables) as engine:
        with pytest.raises(ConfigError, match="13 steps"):
            engine.step(request(1, 13))
        assert places(engine) == []
        assert engine.core.services.memory.nbytes == 0
        engine.step(request(1, 12))


# ---------------------------------------------------------------- what is not built yet


def test_rollouts_are_refused_until_they_exist() -> None:
    class Ahead(ToyAdapter):
        name = "toy-ahead"

        def _prepared(self, *args: Any) -> Prepared:
            return replace(super()._prepared(*args), key=Key(rollout=True))

    with open_engine(Ahead) as engine:
        with pytest.raises(ConfigError, match="rollout must be False"):
            engine.step(request(2))
        assert places(engine) == []
        assert engine.core.services.memory.nbytes == 0


# ---------------------------------------------------------------- recording


def test_recording_changes_no_bit_and_keeps_every_step() -> None:
    with open_engine(FlowAdapter, known=1) as engine:
        plain = engine.step(request(2, 3))
        with engine.core.services.profile.recorder.recording() as tensors:
            recorded = engine.step(request(2, 3))
        assert torch.equal(plain, recorded)
        assert len(tensors["steps.action.x"]) == len(tensors["steps.action.velocity"]) == 3
        assert tensors["steps.action.x"][0].shape == (2, 3, 2)
        for x in tensors["steps.action.x"]:  # known elements are in place from the first step on
            assert torch.equal(x[:, :1], torch.full((2, 1, 2), 0.1))
