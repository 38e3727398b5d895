"""Sessions and the rest of core: the contract, capabilities, keys, graphs, buckets, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from phyai.adapter import NoConditioning
from phyai.engine_core import EngineCore
from phyai.errors import CapacityError, PluginContractError, RequestError
from phyai.manifest import AdapterManifest
from phyai.plugins import register
from phyai.testing.capture import RecordingCapturer
from phyai.types import BufferSpec, Key, Observation
from tests.core.session_adapter import DIM, MoveRequest, Odometer, OdometerArgs, counts, frame, way
from tests.core.toy_adapter import config, open_engine, registry

ROW_BYTES = 4 * DIM


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


# ---------------------------------------------------------------- contract


def test_prepare_must_pass_the_sessions_on() -> None:
    class Forgetful(Odometer):
        name = "odometer-forgetful"

        def prepare(self, request: Any) -> Any:
            made = super().prepare(request)
            return type(made)(made.tensors, made.rows, made.key, made.meta)

    with open_engine(Forgetful) as engine:
        with pytest.raises(PluginContractError, match=r"phyai\.sessions\.session_rows"):
            engine.step(frame("a", 0))
        assert way(engine.step(frame(None, None))) == 1


class OtherNames(Odometer):
    """Knows ``stream`` and ``frame`` for session_id and seq."""

    name = "odometer-other-names"

    def prepare(self, request: Any) -> Any:
        rows = [request] if isinstance(request, Observation) else request
        words = {"stream": "session_id", "frame": "seq"}
        named = [{words.get(n, n): v for n, v in row.options.items()} for row in rows]
        return super().prepare([replace(r, options=n) for r, n in zip(rows, named, strict=True)])


def test_an_adapters_own_names_of_the_options() -> None:
    def named(stream: str, number: int) -> Observation:
        return replace(frame(None, None), options={"stream": stream, "frame": number})

    with open_engine(OtherNames) as engine:
        for number in range(3):
            for _ in range(2):  # and sent again
                results = engine.step([named("a", number), frame(None, None), named("b", number)])
                assert [way(r) for r in results] == [number + 1, 1, number + 1]
        before = counts(engine)
        for rows in ([frame("c", 0), named("a", 3)], [named("a", 3), frame("c", 0)]):
            with pytest.raises(RequestError, match=r"by the same options.*'a'"):
                engine.step(rows)
        results = engine.step([named("a", 2), frame(None, None), named("b", 3)])
        assert [way(r) for r in results] == [3, 1, 4]
        engine.step(frame("c", 0))
        with pytest.raises(RequestError, match=r"by the same options.*'a'"):
            engine.step([frame("c", 0), named("a", 3)])  # the first row is not run again
        after = counts(engine)
        assert after["live"] == before["live"] + 1
        assert after["evicted"] == 0
        assert way(engine.step([named("a", 3)])[0]) == 4


def test_session_buffers_are_the_same_for_every_key() -> None:
    class Growing(Odometer):
        name = "odometer-growing"

        def cache(self) -> Any:
            def buffers(key: Key) -> Any:
                extra = BufferSpec((key.bucket("words"),), torch.float32, session=True)
                return {**self.buffers(), "words": extra}

            return buffers

    with open_engine(Growing) as engine:
        engine.step(frame("a", 0, prompt="go"))
        with pytest.raises(PluginContractError, match=r"'words'.*got \[4\] .* after \[2\]"):
            engine.step(frame("a", 1, prompt="stop"))
        assert way(engine.step(frame("a", 1, prompt="on"))) == 2


def test_a_session_goes_on_under_another_key() -> None:
    with open_engine(Odometer) as engine:
        prompts = ["go", "stop", "go", "turn left"]
        results = [engine.step(frame("a", i, prompt=text)) for i, text in enumerate(prompts)]
        assert [way(r) for r in results] == [1, 2, 3, 4]
        assert len(engine.core.runner._bound) == 3


def plugin(**capabilities: Any) -> AdapterManifest:
    return AdapterManifest(
        id="odometer", summary="A toy.", target="tests.core.session_adapter:Odometer",
        args="tests.core.session_adapter:OdometerArgs", capabilities=capabilities,
    )  # fmt: skip


def core(cls: type[Odometer] = Odometer, runtime: Any = None, **more: Any) -> EngineCore:
    register(cls, more.pop("manifest", None))
    return EngineCore(cls.name, OdometerArgs(), config(**(runtime or {})), **more)


def test_a_plugin_without_sessions_says_so() -> None:
    class Plain(Odometer):
        def buffers(self) -> Any:
            return {"way": BufferSpec((DIM,), torch.float32, zero=True, scratch=True)}

    model = MoveRequest(torch.ones(1, DIM), ("a",), (0,))
    told = r"'session_id' needs a plugin that keeps.*capabilities\['sessions'\] of 'odometer' is"
    for capabilities in ({}, {"sessions": False}, {"options": ["seed"]}):
        with registry():
            engine = core(Plain, manifest=plugin(**capabilities))
            for _ in range(2):
                for request in (frame("a", 0), frame("a", 4) if capabilities else frame("a", 0)):
                    with pytest.raises(RequestError, match=told):
                        engine.step(request)
                with pytest.raises(RequestError, match=told):
                    engine.step(model)
            assert engine.adapter.prepared == (2 if capabilities else 3)  # type: ignore[attr-defined]
            engine.step(frame(None, None))
            engine.close()
    engine = core(Plain, manifest=plugin(sessions=True))
    with pytest.raises(PluginContractError, match="its cache must have a session buffer"):
        engine.step(frame("a", 0))
    engine.close()


def test_session_buffers_need_the_capability_and_rows() -> None:
    engine = core(manifest=plugin(sessions=False))
    with pytest.raises(PluginContractError, match=r"way.*manifest must offer sessions"):
        engine.step(frame(None, None))
    engine.close()

    class Shared(Odometer):
        name = "odometer-shared"

        def buffers(self) -> Any:
            return {"way": BufferSpec((1, DIM), torch.float32, rows=False, session=True)}

    engine = core(Shared)
    with pytest.raises(PluginContractError, match=r"'way'.* must have rows"):
        engine.step(frame(None, None))
    assert engine.services.memory.nbytes == 0
    engine.close()


# ---------------------------------------------------------------- graphs


def test_recorded_graphs_and_padded_batches_give_what_eager_gives() -> None:
    """A capture runs its region several times, on rows that are updated in place."""
    batches = [
        [frame("a", 0), frame("b", 0, 2.0), frame("c", 0, 3.0)],
        [frame("a", 1)],
        [frame("c", 1, 3.0), frame(None, None, 8.0), frame("a", 2)],
        [frame("b", 1, 2.0), frame("c", 2, 3.0)],
        [frame("a", 3), frame("b", 2, 2.0), frame("c", 3, 3.0)],
    ]
    want = [[1, 2, 3], [2], [6, 8, 3], [4, 9], [4, 6, 12]]
    capturer = RecordingCapturer()
    graphs = core(capturer=capturer)
    addresses: dict[str, int] = {}
    capturer.static = lambda: graphs.services.memory.buffers().values()
    for batch, expected in zip(batches, want, strict=True):
        results = graphs.step(batch)
        assert [way(r) for r in results] == expected
        now = {n: t.data_ptr() for n, t in graphs.services.memory.buffers().items()}
        assert all(now[name] == at for name, at in addresses.items())
        addresses.update(now)
    stats = graphs.services.graphs.stats()
    assert stats["fallbacks"] == 0
    assert capturer.records == 6  # encode and solve of buckets 4, 1 and 2
    graphs.close()


def test_padding_rows_see_row_0_and_are_not_kept() -> None:
    seen: list[torch.Tensor] = []

    class Watching(Odometer):
        name = "odometer-watching"

        def conditioning(self) -> Any:
            class Watch(NoConditioning):
                def plan(self, cache: Any, batch: Any) -> None:
                    seen.append(cache["way"].clone())

            return Watch()

    engine = core(Watching, {"static_shapes": True})
    engine.step([frame("a", 0), frame("b", 0, 2.0), frame(None, None)])
    engine.step([frame("b", 1, 2.0), frame("a", 1), frame(None, None)])
    assert seen[0].abs().sum() == 0
    assert seen[1][:, 0].tolist() == [2.0, 1.0, 0.0, 2.0]
    assert engine.sessions.stats()["live"] == 2
    engine.close()


# ---------------------------------------------------------------- memory


def test_memory_is_constant_over_300_steps() -> None:
    with open_engine(Odometer, runtime={"max_sessions": 3}) as engine:
        held = []
        for step in range(300):
            engine.step([frame("a", step), frame(f"b{step}", 0), frame(f"c{step}", 0)])
            memory = engine.core.services.memory
            held.append((memory.nbytes, len(memory.buffers()), counts(engine)["bytes"]))
        assert len(set(held)) == 1
        got = counts(engine)
        assert (got["live"], got["opened"], got["evicted"]) == (3, 601, 598)
        assert got["bytes"] == 3 * ROW_BYTES
        assert len(engine.core.sessions._lost) == 598


def test_rows_count_in_the_budget_and_are_made_when_needed() -> None:
    cache = 4 * (DIM + DIM + DIM + DIM) + 1  # row, move, noise, x and rows_valid
    budget = 2 * cache + ROW_BYTES
    with open_engine(Odometer, runtime={"memory_budget_bytes": budget}) as engine:
        engine.step(frame(None, None, prompt="go"))
        engine.step(frame(None, None))
        assert engine.core.services.memory.nbytes == 2 * cache
        engine.step(frame("a", 0))
        assert len(engine.core.runner._bound) == 2
        engine.step(frame("b", 0))  # the older cache makes room
        assert len(engine.core.runner._bound) == 1
        assert engine.core.services.memory.nbytes == cache + 2 * ROW_BYTES
        engine.step([frame("a", 1)])
        with pytest.raises(CapacityError, match="budget"):
            engine.step([frame(name, 0) for name in "cdef"])
        assert [way(engine.step(frame(n, s))) for n, s in (("a", 2), ("b", 1))] == [3, 2]


def test_a_weight_update_keeps_the_sessions() -> None:
    with open_engine(Odometer) as engine:
        engine.step(frame("a", 0))
        engine.core.runner.refresh()
        assert way(engine.step(frame("a", 1))) == 2
