"""Guidance: branches with caches of their own, g per row, intervals, cfg ranks, wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phyai import plugins
from phyai.bound import chain
from phyai.engine_core import EngineCore
from phyai.errors import CapacityError, ConfigError, PluginContractError
from phyai.guidance import Guidance, combined, local_branches
from phyai.hooks import hookimpl
from phyai.parallel import Group, Mesh
from phyai.types import BufferSpec, Key, Prepared
from tests.core.guided_adapter import (
    ACTIONS,
    HORIZON,
    GuidedAdapter,
    GuidedArgs,
    GuidedRequest,
    by_hand,
    prepared,
)
from tests.core.thread_ranks import on_all, services
from tests.core.toy_adapter import config, open_engine, registry, use_hooks

UNITS = pytest.mark.parametrize("unit", ["loop", "step"])


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


def request(rows: int = 2, *, guided: bool = True, **more: Any) -> GuidedRequest:
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, 16, (rows, 5), generator=generator)
    uncond = torch.randint(0, 16, (rows, 2), generator=generator) if guided else None
    scale = torch.linspace(1.5, 4.0, rows) if guided else None
    return GuidedRequest(tokens, uncond, scale, **more)


def close(got: Any, want: Any) -> None:
    assert got.keys() == want.keys()
    for leaf, tensor in got.items():
        torch.testing.assert_close(tensor, want[leaf], atol=2e-6, rtol=0)


def same(got: Any, want: Any) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(tensor, want[leaf]) for leaf, tensor in got.items())


# ---------------------------------------------------------------- the loop


@UNITS
@pytest.mark.parametrize("known", [False, True])
def test_a_guided_request_equals_the_loop_by_hand(unit: str, known: bool) -> None:
    with open_engine(GuidedAdapter, unit=unit) as engine:
        for rows in (1, 3):
            whole = request(rows, known=known)
            close(engine.step(whole), by_hand(engine.adapter.network, whole))  # type: ignore[attr-defined]


@UNITS
def test_each_row_has_its_own_scale(unit: str) -> None:
    whole = request(3)
    assert whole.scale is not None
    with open_engine(GuidedAdapter, unit=unit) as engine:
        all_rows = engine.step(whole)
        again = engine.step(replace(whole, scale=whole.scale.flip(0)))
    assert torch.equal(all_rows["action"][1], again["action"][1])  # the middle one kept its scale
    assert not torch.allclose(all_rows["action"][0], again["action"][0])


@UNITS
def test_one_branch_is_not_guided_and_costs_one_evaluation_per_step(unit: str) -> None:
    with open_engine(GuidedAdapter, unit=unit) as engine:
        counters = engine.core.services.profile.counters
        plain = request(2, guided=False)
        close(engine.step(plain), by_hand(engine.adapter.network, plain))  # type: ignore[attr-defined]
        assert (counters["evaluations.cond"], counters["evaluations.uncond"]) == (4, 0)
        engine.step(request(2))
        assert (counters["evaluations.cond"], counters["evaluations.uncond"]) == (8, 4)


@UNITS
@pytest.mark.parametrize(
    ("interval", "inside"),
    [((0.2, 0.8), 3), ((0.25, 0.75), 1), ((0.5, 0.75), 0), ((0, 2), 4)],
)
def test_outside_the_interval_the_unconditional_branch_is_not_evaluated(
    unit: str, interval: tuple[float, float], inside: int
) -> None:
    whole = request(2, interval=interval)  # sigmas 1, 0.75, 0.5, 0.25; both ends are outside
    with open_engine(GuidedAdapter, unit=unit) as engine:
        close(engine.step(whole), by_hand(engine.adapter.network, whole))  # type: ignore[attr-defined]
        counters = engine.core.services.profile.counters
        assert (counters["evaluations.cond"], counters["evaluations.uncond"]) == (4, inside)


def test_guidance_is_combined_in_float32() -> None:
    cond, uncond = (torch.randn(2, 3).bfloat16() for _ in range(2))
    out = combined(cond, uncond, torch.tensor([1.0, 2.0]))
    assert out.dtype == torch.float32
    assert torch.equal(out[1], uncond[1].float() + 2 * (cond[1].float() - uncond[1].float()))


# ---------------------------------------------------------------- branches


def test_each_branch_is_encoded_once_into_a_cache_of_its_own_shapes() -> None:
    with open_engine(GuidedAdapter) as engine:
        engine.step(request(2))
        log = engine.adapter.args.log  # type: ignore[attr-defined]
        assert log == [
            ("plan", "cond", (2, 5)),
            ("plan", "uncond", (2, 2)),
            ("encode", "cond", (2, 5, 3)),
            ("encode", "uncond", (2, 2, 3)),
        ]
        (bound,) = engine.core.runner._bound.values()
        cond, uncond = bound.caches
        assert bound.cache is cond
        assert cond.key.buckets == (("tokens", 5),)
        assert uncond.key.buckets == (("tokens", 2),)
        for cache in (cond, uncond):
            assert "uncond/tokens" not in cache.inputs
            assert "noise.action" in cache.inputs
        names = {region.name for region in engine.core.services.graphs.report()}
        assert names == {"cache1/encode", "cache1/uncond/encode", "cache1/solve"}
    assert engine.core is not None


def test_closing_a_key_frees_both_branches() -> None:
    with open_engine(GuidedAdapter, unit="step", runtime={"max_live_caches": 1}) as engine:
        engine.step(request(2))
        guided = engine.core.services.memory.nbytes
        engine.step(request(2, guided=False))
        assert not any("uncond" in name for name in engine.core.services.memory.buffers())
        assert engine.core.services.memory.nbytes < guided
        assert len(engine.core.runner.step_unit._networks) == 1  # type: ignore[union-attr]
        assert len(engine.core.services.graphs.report()) == 2


def test_a_second_branch_that_does_not_fit_leaves_nothing_behind() -> None:
    with open_engine(GuidedAdapter) as engine:
        engine.step(request(2))
        needed = engine.core.services.memory.nbytes
        (bound,) = engine.core.runner._bound.values()
        cond = bound.caches[0].nbytes
    for budget in (cond, cond + 8, needed - 1):
        with open_engine(GuidedAdapter, runtime={"memory_budget_bytes": budget}) as engine:
            with pytest.raises(CapacityError, match="memory budget"):
                engine.step(request(2))
            assert engine.core.services.memory.nbytes == 0
            engine.step(request(1, guided=False))


def test_guidance_stands_between_rtc_and_the_known_parts() -> None:
    with open_engine(GuidedAdapter) as engine:
        engine.step(request(1, rtc=True))
        (bound,) = engine.core.runner._bound.values()
        names = [type(part).__name__ for part in chain(bound.predict)]
    assert names == ["GuidedRTC", "Guidance", "Hold", "_Recorded", "Network"]


def test_the_recorder_tells_the_branches_apart() -> None:
    with open_engine(GuidedAdapter, unit="step") as engine:
        whole = request(2)
        with engine.core.services.profile.recorder.recording() as tensors:
            engine.step(whole)
        cond, uncond, both = (
            tensors[f"steps.{at}action.velocity"] for at in ("", "uncond.", "guided.")
        )
        assert len(cond) == len(uncond) == len(both) == 4
        assert whole.scale is not None
        want = uncond[1] + whole.scale[:, None, None] * (cond[1] - uncond[1])
        torch.testing.assert_close(both[1], want)


def test_requests_that_share_a_batch_keep_their_prompts_and_scales() -> None:
    with open_engine(GuidedAdapter) as engine:
        runner = engine.core.runner
        one, two = prepared(request(1)), prepared(request(2))
        want = [runner.run(one), runner.run(two)]
        both = runner.run_joined([one, two])
        for got, alone in zip(both, want, strict=True):
            close(got, alone)


# ---------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        ({"branches": ("cond", "third")}, ConfigError, r"branches must be \('cond',\) or"),
        ({"branches": ("uncond",)}, ConfigError, "branches must be"),
        ({"guidance_interval": (0.5, 0.5)}, ConfigError, "guidance_interval must be"),
    ],
)
def test_bad_keys_are_refused_and_the_next_request_works(
    key: dict[str, Any], error: type[Exception], message: str
) -> None:
    with open_engine(GuidedAdapter) as engine:
        batch = prepared(request(1))
        with pytest.raises(error, match=message):
            engine.core.runner.run(replace(batch, key=replace(batch.key, **key)))
        assert engine.core.services.memory.nbytes == 0
        engine.step(request(1))


def test_a_guided_request_needs_its_scales() -> None:
    with open_engine(GuidedAdapter) as engine:
        batch = prepared(request(1))
        for scale in ({}, {"guidance.scale": torch.ones(1, 1)}):
            tensors = {n: t for n, t in batch.tensors.items() if n != "guidance.scale"}
            with pytest.raises(PluginContractError, match=r"must hold 'guidance.scale' \[B\]"):
                engine.core.runner.run(replace(batch, tensors={**tensors, **scale}))
        engine.step(request(1))


# ---------------------------------------------------------------- wrappers and sessions


class EveryOther:
    """A step cache: its answer is a buffer, so it belongs to a row and a branch."""

    approximate = True

    def __init__(self, inner: Any) -> None:
        self.inner, self.prediction = inner, inner.prediction
        self.seen: list[Any] = []

    def __call__(self, x: Any, step: Any, cache: Any) -> Any:
        self.seen.append((cache.branch, step.index, step.sigma))
        if step.index % 2 == 0:
            out = self.inner(x, step, cache)
            for leaf, tensor in out.items():
                cache[f"kept.{leaf}"].copy_(tensor)
        return {leaf: cache[f"kept.{leaf}"].clone() for leaf in x}


@UNITS
def test_a_step_cache_keeps_each_branch_apart_and_sees_real_steps(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[EveryOther] = []

    @hookimpl(wrapper=True)
    def phyai_cache() -> Any:
        inner = yield
        action, video = ((HORIZON, ACTIONS), (1,))
        kept = {
            "kept.action": BufferSpec(action, torch.float32, scratch=True),
            "kept.video": BufferSpec(video, torch.float32, scratch=True),
        }
        return lambda key: {**inner(key), **kept}

    @hookimpl(wrapper=True)
    def phyai_denoiser(stage: str) -> Any:
        inner = yield
        if stage == "network":
            made.append(EveryOther(inner))
            return made[-1]
        return inner

    hooks = SimpleNamespace(phyai_cache=phyai_cache, phyai_denoiser=phyai_denoiser)
    use_hooks(monkeypatch, cache=hooks)
    with open_engine(GuidedAdapter, unit=unit) as engine:
        adapter: Any = engine.adapter
        engine.step(request(2, steps=2))
        (bound,) = engine.core.runner._bound.values()
        cond, uncond = bound.caches
        assert not torch.allclose(cond["kept.action"], uncond["kept.action"])
        assert [branch for branch, *_ in made[-1].seen] == ["cond", "uncond"] * 2
        assert [step for _, *step in made[-1].seen] == [[0, 1.0]] * 2 + [[1, 0.5]] * 2
        assert adapter.network.branches == ["cond", "uncond"]


class Counting(GuidedAdapter):
    """Adds up in a session buffer, which the unconditional branch has, too."""

    name = "guided-counting"

    def cache(self) -> Any:
        shapes = super().cache()
        total = BufferSpec((1,), torch.float32, session=True)
        return lambda key: {**shapes(key), "total": total}

    def conditioning(self) -> Any:
        encoding = super().conditioning()

        class Adding:
            inner = encoding

            def encode(self, cache: Any) -> None:
                encoding.encode(cache)
                cache["total"].add_(1.0)

        return Adding()


def test_sessions_live_on_the_conditional_branch() -> None:
    with open_engine(Counting) as engine:
        runner = engine.core.runner
        for seq in range(3):
            batch = prepared(request(1))
            with engine.core.sessions.turn(batch):
                runner.run(batch)
            (bound,) = runner._bound.values()
            # Nothing is kept of a row without a session, and nothing leaks through the buffers.
            assert [float(cache["total"]) for cache in bound.caches] == [1.0, 1.0], seq


# ---------------------------------------------------------------- two cfg ranks


def open_cores(unit: str) -> list[EngineCore]:
    """One core per cfg rank; the ranks are threads, and each is given the request."""
    plugins.register(GuidedAdapter)
    parallel = [replace(one, mesh=Mesh()) for one in services(Mesh(cfg=2))]
    return [EngineCore("guided", GuidedArgs(unit=unit), config(), parallel=one) for one in parallel]


@UNITS
@pytest.mark.parametrize("interval", [None, (0.2, 0.8)])
def test_two_cfg_ranks_share_the_branches_and_give_the_same_bits(unit: str, interval: Any) -> None:
    whole = request(2, known=True, interval=interval)
    with open_engine(GuidedAdapter, unit=unit) as engine:
        want = engine.step(whole)
    cores = open_cores(unit)
    try:
        got = on_all(2, lambda rank: cores[rank].step(whole))
        for result in got:
            same(result, want)
        inside = 4 if interval is None else 3
        for rank, branch in enumerate(("cond", "uncond")):
            counters = cores[rank].services.profile.counters
            done = {n: counters[f"evaluations.{n}"] for n in ("cond", "uncond")}
            assert done == {"cond": 0, "uncond": 0, branch: inside if rank else 4}
            encodes = [entry[1] for entry in cores[rank].args.log if entry[0] == "encode"]  # type: ignore[attr-defined]
            assert encodes == [branch]
            traffic = cores[rank].services.parallel.cfg.traffic
            assert traffic.collectives == 4  # one per step
            assert traffic.payload_bytes == 4 * 4 * 2 * (HORIZON * ACTIONS + 1)
    finally:
        for core in cores:
            core.close()


def test_a_request_without_guidance_is_computed_by_every_cfg_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = request(2, guided=False)
    cores = open_cores("loop")
    try:
        for _ in range(2):
            one, two = on_all(2, lambda rank: cores[rank].step(plain))
            same(one, two)
        said = [r for r in caplog.records if "without guidance" in r.getMessage()]
        assert len(said) == 2  # each rank says it once
        assert cores[1].services.parallel.cfg.traffic.collectives == 0
    finally:
        for core in cores:
            core.close()


def test_cfg_ranks_must_fit_the_branches() -> None:
    key = Key(branches=("cond", "uncond"))
    assert local_branches(key, Group("cfg")) == ("cond", "uncond")
    assert local_branches(key, Group("cfg", (0, 1), 1)) == ("uncond",)
    assert local_branches(Key(), Group("cfg", (0, 1), 1)) == ("cond",)
    with pytest.raises(ConfigError, match="cfg ranks must be 1 or 2"):
        local_branches(key, Group("cfg", (0, 1, 2), 1))


# ---------------------------------------------------------------- words


def test_keys_and_tensors_of_a_branch() -> None:
    key = Key(
        branches=("cond", "uncond"),
        buckets=(("tokens", 5), ("frames", 2), ("uncond.tokens", 3), ("other.tokens", 4)),
    )
    assert key.for_branch("cond").buckets == (("tokens", 5), ("frames", 2), ("other.tokens", 4))
    assert key.for_branch("uncond").bucket("tokens") == 3
    one = Key(buckets=(("uncond.tokens", 3),))
    assert one.for_branch("cond") is one
    named = {"a": 1, "uncond/a": 2, "uncond/b": 3, "cond/c": 4, "x/y": 5}
    batch = Prepared({n: torch.tensor([v]) for n, v in named.items()}, 1, key)

    def seen(branch: str) -> dict[str, int]:
        return {n: int(t) for n, t in batch.for_branch(branch).tensors.items()}

    assert seen("cond") == {"a": 1, "c": 4, "x/y": 5}
    assert seen("uncond") == {"a": 2, "b": 3, "x/y": 5}
    assert batch.for_branch("uncond").key == key.for_branch("uncond")


def test_a_broken_inner_prediction_is_passed_on() -> None:
    class Clean:
        prediction = "clean"

    assert Guidance(Clean(), {}).prediction == "clean"  # type: ignore[arg-type]
