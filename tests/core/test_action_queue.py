"""The client's queue: order, seams, delays, left-overs, threads."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import phyai.action_queue as module
from phyai.action_queue import ActionQueue, LatencyTracker, Ticket, delay_from
from phyai.errors import ConfigError, RequestError
from phyai.types import ActionChunk, RTCOptions


def chunk(start: int, count: int = 10, *, mask: list[bool] | None = None) -> ActionChunk:
    """Return a chunk whose row i is the action of control tick start + i; model space negated."""
    ticks = np.arange(start, start + count, dtype=np.float32)
    return ActionChunk(
        actions=np.stack([ticks, ticks + 0.5], axis=1),
        names=("a", "b"),
        mask=np.array(mask if mask is not None else [True] * count),
        model_actions=np.stack([-ticks, -ticks, -ticks], axis=1),
    )


def pop_tick(queue: ActionQueue) -> int | None:
    action = queue.pop()
    if action is None:
        return None
    assert action.shape == (2,)
    assert action[1] == action[0] + 0.5
    return int(action[0])


def filled(start: int = 0, count: int = 10) -> ActionQueue:
    queue = ActionQueue()
    assert queue.merge(chunk(start, count), ticket=queue.begin_request())
    return queue


# ---------------------------------------------------------------- queue


def test_empty_queue() -> None:
    queue = ActionQueue()
    assert len(queue) == 0
    assert queue.pop() is None
    assert queue.left_over() is queue.left_over("robot") is None
    assert queue.begin_request().rtc_options(inference_delay=0) is None


def test_pops_in_order_and_both_queues_stay_parallel() -> None:
    queue = filled()
    assert [pop_tick(queue) for _ in range(4)] == [0, 1, 2, 3]
    assert len(queue) == 6
    model, robot = queue.left_over("model"), queue.left_over("robot")
    assert model is not None
    assert robot is not None
    assert model.shape == (6, 3)
    assert robot.shape == (6, 2)
    assert model[:, 0].tolist() == (-robot[:, 0]).tolist() == [-4, -5, -6, -7, -8, -9]
    assert queue.consumed == 4


def test_results_are_copies() -> None:
    queue, given_chunk = ActionQueue(), chunk(0)
    queue.merge(given_chunk, ticket=queue.begin_request())
    given_chunk.actions[:] = 99
    left = queue.left_over("robot")
    assert left is not None
    left[:] = 99
    action = queue.pop()
    assert action is not None
    action[:] = 99
    assert pop_tick(queue) == 1


def test_rtc_merge_drops_what_was_consumed_meanwhile() -> None:
    queue = filled()
    ticket = queue.begin_request()
    assert [pop_tick(queue) for _ in range(3)] == [0, 1, 2]
    assert queue.merge(chunk(0), ticket=ticket, real_delay=3)
    assert len(queue) == 7
    assert pop_tick(queue) == 3
    model = queue.left_over()
    assert model is not None
    assert model[0, 0] == -4


@pytest.mark.parametrize(("real_delay", "first"), [(None, 3), (9, 3), (3, 3), (2, 2), (0, 0)])
def test_real_delay_never_exceeds_what_was_consumed(real_delay: int | None, first: int) -> None:
    queue = filled()
    ticket = queue.begin_request()
    for _ in range(3):
        queue.pop()
    queue.merge(chunk(0), ticket=ticket, real_delay=real_delay)
    assert pop_tick(queue) == first


def test_an_idle_robot_skips_nothing() -> None:
    """The queue ran dry during a slow request: three actions were consumed, not ten."""
    queue = filled(0, 3)
    ticket = queue.begin_request()
    assert [pop_tick(queue) for _ in range(5)] == [0, 1, 2, None, None]
    queue.merge(chunk(0), ticket=ticket, real_delay=10)
    assert pop_tick(queue) == 3


def test_a_chunk_whose_time_has_passed_leaves_the_queue_empty() -> None:
    queue = filled()
    ticket = queue.begin_request()
    for _ in range(10):
        queue.pop()
    assert queue.merge(chunk(0, 8), ticket=ticket)
    assert queue.pop() is None
    assert queue.left_over() is None


def test_without_rtc_chunks_are_appended() -> None:
    queue = ActionQueue(n_action_steps=4)
    queue.merge(chunk(0), ticket=queue.begin_request(), rtc=False)
    assert pop_tick(queue) == 0
    queue.merge(chunk(4), ticket=queue.begin_request(), rtc=False)
    assert [pop_tick(queue) for _ in range(8)] == [1, 2, 3, 4, 5, 6, 7, None]


def test_rows_that_must_not_be_executed_end_the_chunk() -> None:
    queue = ActionQueue()
    queue.merge(
        chunk(0, 4, mask=[True, True, False, True]), ticket=queue.begin_request(), rtc=False
    )
    assert [pop_tick(queue) for _ in range(3)] == [0, 1, None]


def test_answers_that_come_too_late_are_ignored() -> None:
    queue = filled()
    early = queue.begin_request()
    queue.pop()
    late = queue.begin_request()
    assert queue.merge(chunk(1), ticket=late)
    assert not queue.merge(chunk(0), ticket=early)
    assert pop_tick(queue) == 1
    ticket = queue.begin_request()
    queue.reset()
    assert len(queue) == queue.consumed == 0
    assert not queue.merge(chunk(0), ticket=ticket)
    assert not queue.merge(chunk(0), ticket=ticket, rtc=False)
    assert queue.pop() is None


def test_bad_chunks_change_nothing() -> None:
    queue = filled()
    ticket = queue.begin_request()
    good = chunk(0)
    short = ActionChunk(good.actions[:5], good.names, good.mask, good.model_actions)
    with pytest.raises(RequestError, match=r"chunk must hold actions .*; got \[5, 2\]"):
        queue.merge(short, ticket=ticket)
    wide = ActionChunk(np.zeros((10, 7)), good.names, good.mask, good.model_actions)
    with pytest.raises(RequestError, match="chunk must have 2 action dims like the queue; got 7"):
        queue.merge(wide, ticket=ticket, rtc=False)
    with pytest.raises(RequestError, match="real_delay must be >= 0; got -1"):
        queue.merge(good, ticket=ticket, real_delay=-1)
    assert [pop_tick(queue) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ConfigError, match="n_action_steps must be >= 1; got 0"):
        ActionQueue(0)


# ---------------------------------------------------------------- left-over of a request


def test_a_ticket_keeps_the_left_over_of_its_moment() -> None:
    queue = filled(0, 4)
    queue.pop()
    ticket = queue.begin_request()
    queue.pop()
    left = ticket.left_over("robot")
    assert left is not None
    assert left[:, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("length", "ticks"), [(None, [2, 3]), (1, [2]), (2, [2, 3]), (5, [2, 3, 3, 3, 3])]
)
def test_padding_repeats_the_last_action(length: int | None, ticks: list[int]) -> None:
    queue = filled(2, 2)
    left = queue.left_over("robot", length=length)
    assert left is not None
    assert left[:, 0].tolist() == ticks


def test_rtc_options() -> None:
    ticket = filled(0, 3).begin_request()
    options = ticket.rtc_options(inference_delay=2, execution_horizon=3)
    assert isinstance(options, RTCOptions)
    assert (options.inference_delay, options.execution_horizon, options.space) == (2, 3, "model")
    assert options.prev_chunk[:, 0].tolist() == [0, -1, -2]
    absolute = ticket.rtc_options(inference_delay=2, space="robot", length=4)
    assert absolute is not None
    assert absolute.space == "robot"
    assert absolute.prev_chunk[:, 0].tolist() == [0, 1, 2, 2]
    with pytest.raises(ConfigError, match="space must be 'model' or 'robot'; got 'joint'"):
        ticket.left_over("joint")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="left-over length must be >= 1; got 0"):
        ticket.left_over(length=0)


# ---------------------------------------------------------------- delays


@pytest.mark.parametrize(
    ("latency", "fps", "delay"),
    [(0.0, 50, 0), (0.07, 100, 7), (0.0701, 100, 8), (0.1, 30, 3), (0.101, 30, 4), (1e-4, 20, 1)],
)
def test_delay_from(latency: float, fps: float, delay: int) -> None:
    assert delay_from(latency, fps) == delay


@pytest.mark.parametrize(
    ("latency", "fps"), [(-0.1, 30), (float("nan"), 30), (0.1, 0), (0.1, float("inf"))]
)
def test_delay_from_refuses(latency: float, fps: float) -> None:
    with pytest.raises(ConfigError, match=r"(latency|fps) must be a number"):
        delay_from(latency, fps)


def test_latency_tracker_leaves_out_the_first_inference() -> None:
    latency = LatencyTracker(window=4)
    assert latency.estimate() is None
    latency.add(30.0)
    assert latency.estimate() is None
    for seconds in (0.5, 0.1, 0.2, 0.3, 0.4):
        latency.add(seconds)
    assert latency.estimate() == 0.4  # 0.5 has left the window
    assert latency.estimate(0.5) == 0.3
    latency.reset()
    latency.add(30.0)
    assert latency.estimate() is None


def test_p95_is_a_measured_value() -> None:
    latency = LatencyTracker(skip_first=0)
    for index in range(1, 101):
        latency.add(index / 100)
    assert latency.estimate(0.95) == pytest.approx(0.96, abs=0.011)
    assert latency.estimate(0.95) in [index / 100 for index in range(1, 101)]


def test_latency_tracker_refuses() -> None:
    for bad in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="latency must be a number of seconds"):
            LatencyTracker().add(bad)
    with pytest.raises(ConfigError, match="window must be >= 1"):
        LatencyTracker(window=0)
    with pytest.raises(ConfigError, match="quantile must be in"):
        LatencyTracker().estimate(0.0)


# ---------------------------------------------------------------- properties


EVENTS = st.lists(
    st.one_of(
        st.just("pop"),
        st.just("begin"),
        st.tuples(st.just("merge"), st.integers(0, 3), st.one_of(st.none(), st.integers(0, 30))),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(EVENTS, st.integers(1, 12))
def test_rtc_neither_skips_nor_repeats_an_action(events: list[object], horizon: int) -> None:
    """Ticks are executed in order, whatever is in flight, late, lost or out of order."""
    queue, flying, done = ActionQueue(), [], 0
    for event in events:
        if event == "pop":
            tick = pop_tick(queue)
            if tick is not None:
                assert tick == done
                done += 1
        elif event == "begin":
            flying.append((queue.begin_request(), done))
        elif isinstance(event, tuple) and flying:
            _, which, extra = event
            ticket, start = flying.pop(which % len(flying))
            # a latency is measured as at least what was consumed during it
            delay = None if extra is None else done - start + extra
            queue.merge(chunk(start, horizon), ticket=ticket, real_delay=delay)
    assert queue.consumed == done
    left = queue.left_over("robot")
    if left is not None:
        assert left[:, 0].tolist() == list(range(done, done + len(left)))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.one_of(st.just(0), st.integers(1, 8)), max_size=40),
    st.one_of(st.none(), st.integers(1, 5)),
)
def test_appended_chunks_come_out_whole_and_in_order(
    events: list[int], n_action_steps: int | None
) -> None:
    """0 pops, a number appends a chunk of so many rows."""
    queue, want, got, start = ActionQueue(n_action_steps), [], [], 0
    for event in events:
        if event:
            queue.merge(chunk(start, event), ticket=queue.begin_request(), rtc=False)
            want += list(range(start, start + event))[:n_action_steps]
            start += event
        elif (tick := pop_tick(queue)) is not None:
            got.append(tick)
    while (tick := pop_tick(queue)) is not None:
        got.append(tick)
    assert got == want


def test_a_control_thread_and_an_inference_thread() -> None:
    queue, ticks, problems = filled(0, 50), [], []
    stop = threading.Event()

    def control() -> None:
        while len(ticks) < 2000 and not stop.is_set():
            tick = pop_tick(queue)
            if tick is not None:
                ticks.append(tick)
        stop.set()

    def infer() -> None:
        while not stop.is_set():
            ticket: Ticket = queue.begin_request()
            if not queue.merge(chunk(ticket.consumed, 50), ticket=ticket):
                problems.append(ticket)

    threads = [threading.Thread(target=work) for work in (control, infer)]
    for thread in threads:
        thread.start()
    threads[0].join(60)
    stop.set()
    threads[1].join(60)
    assert ticks == list(range(2000))
    assert not problems


def test_a_client_needs_no_torch() -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    roots = {
        (node.module or "").partition(".")[0]
        if isinstance(node, ast.ImportFrom)
        else node.names[0].name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert "torch" not in roots
