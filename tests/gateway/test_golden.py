"""Every recorded payload travels over a live socket and gets the outcome its manifest states.

After each hostile one a genuine request succeeds on the same server; nothing is imported or
executed, and memory stays below three times the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.conftest import golden_folders
from tests.gateway import golden_frames as frames
from tests.gateway import golden_http as http
from tests.gateway import golden_lerobot as lerobot
from tests.gateway.golden_serving import UNKNOWN, Payload, discover, unlisted
from tests.gateway.golden_world import World, harmless, is_good
from tests.gateway.stub_router import loop_thread

GOLDEN_SETS = ("serving",)


def payloads(config: pytest.Config) -> list[Payload]:
    return [p for folder in golden_folders(config, GOLDEN_SETS) for p in discover(folder)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "payload" in metafunc.fixturenames:
        found = [pytest.param(p, id=p.name) for p in payloads(metafunc.config)]
        metafunc.parametrize("payload", found or [pytest.param(None, id="no payload")])


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with loop_thread() as thread, ExitStack() as stack:
        made = World(thread, payloads(request.config), stack)
        for genuine in GENUINE.values():
            genuine(made)  # whatever is imported on first use is now
        for payload in made.everything:
            if is_good(payload, "native"):  # image files have a decoder of their own
                http.check_native_payload(made, payload)
        yield made


def test_golden(payload: Payload | None, world: World) -> None:
    assert payload is not None, "the golden folder holds no payload"
    assert payload.kind != UNKNOWN, payload.problem
    hostile = payload.expect == "refuse"
    with harmless(len(payload.data)) if hostile else ExitStack():
        CHECKS[payload.kind](world, payload)
    GENUINE[PROTOCOL[payload.kind]](world)


def test_every_golden_file_is_consumed(request: pytest.FixtureRequest) -> None:
    for folder in golden_folders(request.config, GOLDEN_SETS):
        assert discover(folder), f"{folder.name}: holds no payload"
        assert not unlisted(folder), f"{folder.name}: not in the manifest: {unlisted(folder)}"
    unknown = [p for p in payloads(request.config) if p.kind not in CHECKS]
    assert not unknown, [f"{p.name}: {p.problem or p.kind}" for p in unknown]


CHECKS: dict[str, Callable[[World, Payload], None]] = {
    "lerobot_setup": lerobot.check_setup,
    "lerobot_observation": lerobot.check_observation,
    "lerobot_stream": lerobot.check_observation,
    "lerobot_reply": lerobot.check_reply,
    "lerobot_matrix": lerobot.check_matrix,
    "openpi": frames.check_openpi,
    "openpi_reply": frames.check_openpi_reply,
    "groot": frames.check_groot,
    "groot_reply": frames.check_groot_reply,
    "native": http.check_native_payload,
    "rlinf": http.check_rlinf,
    "kserve": http.check_kserve,
    "kserve_length": http.check_kserve_length,
}
GENUINE: dict[str, Callable[[World], None]] = {
    "lerobot": lerobot.genuine_lerobot,
    "openpi": frames.genuine_openpi,
    "groot": frames.genuine_groot,
    "native": http.genuine_native,
    "rlinf": http.genuine_rlinf,
    "kserve": http.genuine_kserve,
}
PROTOCOL = {kind: kind.partition("_")[0] for kind in CHECKS}
