"""Mutated recordings through the whole way from bytes to a request: a request, or a Fault."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.limits import MIB
from phyai_gateway.decode.numpy_msgpack import GrootHook, openpi_hook, unpack
from phyai_gateway.messages import Fault, InferRequest
from phyai_gateway.protocols import (
    gr00t_observation,
    lerobot_objects,
    lerobot_request,
    lerobot_wire,
    openpi_observation,
)
from tests.gateway import lerobot_robot as robot

GOLDEN = Path(__file__).parents[1] / "golden/serving"
OPEN = ModelContract("m", needs_prompt=False, max_rows=4)


def lerobot(payload: bytes) -> InferRequest:
    setup = lerobot_objects.read_setup(memoryview(robot.setup(cameras={"front": (32, 32, 3)})))
    found = lerobot_objects.read_observation(memoryview(payload))
    made = lerobot_request.plan(setup, OPEN, {})
    return lerobot_request.request_of(found, setup, made, OPEN, "id")


def lerobot_setup(payload: bytes) -> object:
    return lerobot_request.plan(lerobot_objects.read_setup(memoryview(payload)), OPEN, {})


def openpi(payload: bytes) -> InferRequest:
    found = unpack(payload, openpi_hook)
    if not isinstance(found, dict):
        raise Fault("invalid_argument", "not a map")
    return openpi_observation.request_of(found, OPEN, "id")


def groot(payload: bytes) -> InferRequest:
    found = unpack(payload, GrootHook())
    data = found.get("data") if isinstance(found, dict) else None
    observation = data.get("observation", data) if isinstance(data, dict) else None
    if not isinstance(observation, dict):
        raise Fault("invalid_argument", "not a map")
    parts = gr00t_observation.split(observation)
    batched = "observation" in data
    return gr00t_observation.request_of(parts, OPEN, "id", batched=batched).request


def stream(payload: bytes) -> memoryview:
    chunks = lerobot_wire.ChunkStream(1 << 20)
    try:
        messages = robot.split_stream(payload)
    except struct.error:  # the recording's own container, not the wire
        raise Fault("invalid_argument", "not a recording") from None
    for message in messages:
        chunks.feed(lerobot_wire.read_observation(message))
    return chunks.finish()


ROUTES: dict[str, tuple[Callable[[bytes], Any], str]] = {
    "lerobot": (lerobot, "lerobot*/*obs*.pkl"),
    "setup": (lerobot_setup, "lerobot*/*setup*.pkl"),
    "stream": (stream, "lerobot*/*.grpcs"),
    "openpi": (openpi, "openpi/*.msgpack"),
    "groot": (groot, "groot/*get_action*.msgpack"),
}


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_mutated_recordings_make_a_request_or_a_fault(route: str, data: st.DataObject) -> None:
    read, pattern = ROUTES[route]
    files = [path for path in sorted(GOLDEN.glob(pattern)) if path.stat().st_size < 20_000]
    payload = bytearray(data.draw(st.sampled_from(files)).read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, max(len(payload) - 1, 0)))
        size = data.draw(st.sampled_from([0, 1, 1, 1, 9]))
        if route == "stream" and at < 4:
            continue  # lengths of the recording's own container
        payload[at : at + size] = data.draw(st.binary(min_size=size, max_size=size))
    tracemalloc.start()
    try:
        found = read(bytes(payload))
    except Fault as fault:
        told: str | None = fault.message
    else:
        told = None
        assert found is not None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert told is None or len(told) < 2000
    assert peak < 3 * len(payload) + 2 * MIB
