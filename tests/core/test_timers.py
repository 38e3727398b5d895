"""Stage timers, counters, recorder, and the profile that bundles them."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch

from phyai.timers import Profile, Recorder, Timers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every reading of the clock one second later than the one before."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))


@pytest.mark.usefixtures("clock")
def test_stages_nest_and_add_up() -> None:
    timers = Timers()
    with timers.stage("encode"):
        for _ in range(2):
            with timers.stage("vision"):
                pass
    with timers.stage("vision"):
        pass
    assert timers.collect() == {"encode": 5000.0, "encode/vision": 2000.0, "vision": 1000.0}
    assert timers.collect() == {}


def test_a_stage_stands_before_those_inside_it() -> None:
    timers = Timers()
    with timers.stage("encode"), timers.stage("vision"):
        assert timers.current == "encode/vision"
    assert timers.current == ""
    assert list(timers.collect()) == ["encode", "encode/vision"]


def test_real_time_is_measured_in_milliseconds() -> None:
    timers = Timers()
    with timers.stage("nap"):
        time.sleep(0.02)
    assert timers.collect()["nap"] >= 20.0


def test_an_exception_still_ends_the_stage() -> None:
    timers = Timers()
    with pytest.raises(KeyError), timers.stage("outer"), timers.stage("inner"):
        raise KeyError
    with timers.stage("next"):
        pass
    assert sorted(timers.collect()) == ["next", "outer", "outer/inner"]


def test_reset_forgets() -> None:
    timers = Timers()
    with timers.stage("a"):
        pass
    timers.reset()
    assert timers.collect() == {}


def test_threads_do_not_nest_into_each_other() -> None:
    timers = Timers()

    def other() -> None:
        with timers.stage("other"):
            pass

    with timers.stage("main"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert list(timers.collect()) == ["main"]  # a request's stages are those of its own thread


def test_resetting_one_thread_leaves_the_others_alone() -> None:
    timers = Timers()
    with timers.stage("mine"):
        pass
    thread = threading.Thread(target=timers.reset)
    thread.start()
    thread.join()
    assert list(timers.collect()) == ["mine"]


def test_the_cpu_is_never_synchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", calls.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with Timers("cpu").stage("a"):
        pass
    assert calls == []
    with Timers("cuda:0").stage("a"):
        pass
    assert calls == [torch.device("cuda:0")] * 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with Timers("cuda:0").stage("a"):
        pass
    assert len(calls) == 2


def test_counters_run_on() -> None:
    profile = Profile()
    profile.count("vision_tokens", 256)
    profile.count("vision_tokens", 256)
    profile.timers.count("calls")
    profile.timers.reset()
    assert dict(profile.counters) == {"vision_tokens": 512, "calls": 1}
    assert Profile().counters["vision_tokens"] == 0


def test_an_idle_recorder_copies_nothing() -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(name)

    recorder = Recorder()
    recorder.put("x", Untouchable())  # type: ignore[arg-type]
    assert not recorder.active
    assert not recorder.wants("x")


def test_recorder_keeps_copies_in_order() -> None:
    profile = Profile()
    x = torch.zeros(2, requires_grad=True)
    with profile.recorder.recording() as tensors:
        profile.record("x", x)
        with torch.no_grad():
            x += 1
        profile.record("x", x)
    profile.record("x", x)
    assert [t.tolist() for t in tensors["x"]] == [[0.0, 0.0], [1.0, 1.0]]
    assert not any(t.requires_grad for t in tensors["x"])


def test_recorder_names_and_nesting() -> None:
    recorder, one = Recorder(), torch.ones(1)
    with recorder.recording(["a"]) as outer:
        assert recorder.wants("a")
        assert not recorder.wants("b")
        with recorder.recording(["b"]) as inner:
            recorder.put("a", one)
            recorder.put("b", one)
        recorder.put("a", one)
        recorder.put("b", one)
    assert list(inner) == ["b"]
    assert {name: len(values) for name, values in outer.items()} == {"a": 1}
    assert not recorder.active


def test_recorder_stops_after_an_error() -> None:
    recorder = Recorder()
    with pytest.raises(KeyError), recorder.recording():
        raise KeyError
    assert not recorder.active


def test_profile_delegates() -> None:
    timers, recorder = Timers(), Recorder()
    profile = Profile("cpu", timers=timers, recorder=recorder)
    with profile.stage("s"):
        pass
    assert list(timers.collect()) == ["s"]
    assert profile.counters is timers.counters


def test_results_alone_do_not_make_regions_eager() -> None:
    recorder = Recorder()
    assert not recorder.inside
    for names, inside in ((None, True), (["result.x"], False), (["result.x", "steps.x.x"], True)):
        with recorder.recording(names):
            assert recorder.inside is inside
    assert not recorder.inside
