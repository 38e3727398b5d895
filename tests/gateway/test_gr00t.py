"""The GR00T listener over real ZMQ sockets: three generations, tokens, one reply per request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.arrays import make_array
from phyai_gateway.decode.numpy_msgpack import pack_nd_form, pack_npy_form
from phyai_gateway.messages import Fault, InferRequest
from phyai_gateway.protocols.base import Limits, ListenerOptions
from phyai_gateway.protocols.gr00t import Gr00tListener
from phyai_gateway.protocols.gr00t_modality import Modality
from phyai_gateway.tokens import TokenStore
from tests.gateway.golden_clients import GrootClient
from tests.gateway.stub_router import LoopThread, StubRouter, actions_of, loop_thread, serving

TOKEN = "a-token-for-this-test"
EMBODIMENT = {
    "cameras": ["front"],
    "frames": [0],
    "state": {"arm": 5, "gripper": 1},
    "actions": {"gripper": 1, "arm": 5},
    "horizon": 12,
}
CONTRACT = ModelContract(
    "gr00t",
    cameras={"front": None},
    state_dim=6,
    action_dim=6,
    max_rows=4,
    options=("seed",),
    extra={"embodiment": "arm", "embodiments": {"arm": EMBODIMENT}},
)


@pytest.fixture(scope="module")
def thread() -> Iterator[LoopThread]:
    with loop_thread() as made:
        yield made


@pytest.fixture
def router() -> StubRouter:
    return StubRouter(CONTRACT)


@contextmanager
def client_of(thread: LoopThread, router: StubRouter, **given: Any) -> Iterator[GrootClient]:
    options = ListenerOptions(**given)
    with serving(thread, lambda: Gr00tListener(router, options)) as port, GrootClient(port) as made:
        yield made


@pytest.fixture
def client(thread: LoopThread, router: StubRouter) -> Iterator[GrootClient]:
    with client_of(thread, router) as made:
        yield made


def array(shape: tuple[int, ...], dtype: str = "<f4", start: float = 0.0) -> Any:
    values = (np.arange(int(np.prod(shape))) + start).reshape(shape).astype(dtype)
    return make_array(dtype, shape, values.tobytes())


def observation(rows: int = 1) -> dict[str, Any]:
    return {
        "video": {"front": array((rows, 1, 4, 6, 3), "|u1")},
        "state": {
            "gripper": array((rows, 1, 1), start=50),
            "arm": array((rows, 1, 5)),
        },
        "language": {"annotation.human.task_description": [["go"]] * rows},
    }


def body(found: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"endpoint": "get_action", "data": {"observation": found, "options": None}, **more}


def wanted(rows: int = 1) -> np.ndarray[Any, Any]:
    return actions_of(6, rows)


def values(found: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(found.data, "<f4").reshape(found.shape)


@pytest.mark.parametrize(("pack", "form"), [(pack_npy_form, "npy"), (pack_nd_form, "nd")])
@pytest.mark.parametrize("rows", [1, 3])
def test_nested_observation(
    client: GrootClient, router: StubRouter, pack: Any, form: str, rows: int
) -> None:
    (actions, info), got = client.ask(pack(body(observation(rows))))
    assert got == form
    assert info == {}
    assert np.array_equal(values(actions["gripper"]), wanted(rows)[:, :, :1])
    assert np.array_equal(values(actions["arm"]), wanted(rows)[:, :, 1:])
    request = router.seen[0][0]
    assert request.state is not None
    state = np.frombuffer(request.state.data, "<f4").reshape(rows, 6)
    assert state[0].tolist() == [0, 1, 2, 3, 4, 50]  # in the model's order, not the message's
    assert request.images[0].shape == ((4, 6, 3) if rows == 1 else (3, 4, 6, 3))
    assert request.instruction == ("go" if rows == 1 else None)
    assert request.instructions == (() if rows == 1 else ("go",) * 3)


def test_flat_observation_is_answered_flat(client: GrootClient) -> None:
    nested = observation()
    flat = {f"video.{k}": v for k, v in nested["video"].items()}
    flat |= {f"state.{k}": v for k, v in nested["state"].items()}
    (actions, _), _ = client.ask(pack_nd_form(body({**flat, "task": ["go"]})))
    assert set(actions) == {"action.gripper", "action.arm"}


def test_oldest_generation(client: GrootClient, router: StubRouter) -> None:
    data = {
        "video.front": array((1, 4, 6, 3), "|u1"),
        "state.arm": array((1, 5), "<f8"),
        "state.gripper": array((1, 1), "<f8"),
        "annotation.human.task_description": ["go"],
    }
    actions, form = client.ask(pack_npy_form({"endpoint": "get_action", "data": data}))
    assert form == "npy"
    assert np.array_equal(values(actions["action.arm"]), wanted()[0, :, 1:])
    assert router.seen[0][0].instruction == "go"
    reply, _ = client.ask(msgpack.packb({"endpoint": "get_modality_config"}))
    assert reply["video"] == {
        "__ModalityConfig_class__": True,
        "as_json": '{"delta_indices": [0], "modality_keys": ["video.front"]}',
    }


def test_any_single_language_key_will_do(client: GrootClient, router: StubRouter) -> None:
    found = observation() | {"language": {"annotation.human.action.task_description": [["turn"]]}}
    client.ask(pack_nd_form(body(found)))
    assert router.seen[0][0].instruction == "turn"


@pytest.mark.parametrize("dialect", [None, "b"])
def test_requests_without_arrays_get_the_remembered_dialect(
    thread: LoopThread, router: StubRouter, dialect: str | None
) -> None:
    options = {"dialect": dialect} if dialect else {}
    with client_of(thread, router, options=options) as client:
        ask = msgpack.packb({"endpoint": "get_modality_config"})
        second, third = "__ModalityConfig_class__", "__ModalityConfig__"
        # A client that has shown no array yet may be of either of the later generations.
        first = {second} if dialect else {second, third}
        assert set(client.ask(ask)[0]["video"]) == {*first, "as_json"}
        client.ask(pack_npy_form(body(observation())))
        assert set(client.ask(ask)[0]["video"]) == {second, "as_json"}
        client.ask(pack_nd_form(body(observation())))
        last = second if dialect else third
        assert set(client.ask(ask)[0]["video"]) == {last, "as_json"}


def test_kill_is_answered_and_ignored(client: GrootClient) -> None:
    assert client.ask(msgpack.packb({"endpoint": "kill"}))[0] == {}
    assert client.ask(msgpack.packb({"endpoint": "ping"}))[0]["status"] == "ok"


def test_tokens(thread: LoopThread, router: StubRouter) -> None:
    tokens = TokenStore.of({"arm": (TOKEN, ("infer",))})
    with client_of(thread, router, tokens=tokens) as client:
        for token in ({}, {"api_token": "nope"}, {"api_token": 5}, {"api_token": TOKEN + "x"}):
            for endpoint in ("ping", "get_action", "kill"):
                reply = client.ask(msgpack.packb({"endpoint": endpoint, **token}))[0]
                assert reply == {"error": "Unauthorized: Invalid API token"}
        good = msgpack.packb({"endpoint": "ping", "api_token": TOKEN})
        assert client.ask(good)[0]["status"] == "ok"
        client.ask(pack_nd_form(body(observation(), api_token=TOKEN)))
    assert router.seen[0][1].principal == "arm"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"video": {"front": array((1, 1, 4, 6, 3))}}, "uint8"),
        ({"video": {"front": array((1, 2, 4, 6, 3), "|u1")}}, "[1, 2, 4, 6, 3]"),
        ({"video": {}}, "'front'"),
        ({"video": {"front": array((2, 1, 4, 6, 3), "|u1")}}, "rows"),
        ({"state": {"arm": array((1, 1, 5))}}, "'gripper'"),
        ({"state": {"arm": array((1, 1, 4)), "gripper": array((1, 1, 1))}}, "[B, 1, 5]"),
        ({"language": {}}, "needs a prompt"),
        ({"language": {"task": [[5]]}}, "must be text"),
        ({"language": {"task": [["x" * 5000] * 2]}}, "must be text"),
    ],
)
def test_wrong_observations(client: GrootClient, change: dict[str, Any], told: str) -> None:
    reply, _ = client.ask(pack_nd_form(body(observation() | change)))
    assert told in reply["error"]
    assert isinstance(client.ask(pack_nd_form(body(observation())))[0], list)


def test_too_many_rows(client: GrootClient) -> None:
    assert "1 to 4 rows" in client.ask(pack_nd_form(body(observation(5))))[0]["error"]


def test_options_are_the_models(client: GrootClient, router: StubRouter) -> None:
    data = {"observation": observation(), "options": {"seed": 3}}
    client.ask(pack_nd_form({"data": data}))
    assert router.seen[0][0].options == {"seed": 3}
    data["options"] = {"__class__": 1}
    assert "'seed'" in client.ask(pack_nd_form({"data": data}))[0]["error"]


def test_reset_begins_a_session_of_a_stateful_model(thread: LoopThread, router: StubRouter) -> None:
    router.contracts["gr00t"] = ModelContract("gr00t", action_dim=6, stateful=True)
    with client_of(thread, router) as client:
        for _ in range(2):
            client.ask(pack_nd_form(body(observation())))
        client.ask(msgpack.packb({"endpoint": "reset", "data": {"options": None}}))
        client.ask(pack_nd_form(body(observation())))
    options = [request.options for request, _ in router.seen]
    assert [o["seq"] for o in options] == [0, 1, 0]
    assert options[0]["session_id"] == options[1]["session_id"] != options[2]["session_id"]


def test_every_failure_has_one_reply(client: GrootClient, router: StubRouter) -> None:
    errors: list[Exception] = [Fault("unavailable", "no backend."), RuntimeError("secret")]

    async def fail(_: InferRequest) -> None:
        raise errors.pop(0)

    router.before = fail
    first = client.ask(pack_nd_form(body(observation())))[0]["error"]
    second = client.ask(pack_nd_form(body(observation())))[0]["error"]
    assert first.startswith("unavailable: no backend.")
    assert second.startswith("internal")
    assert "secret" not in second


def test_robots_are_served_side_by_side(thread: LoopThread, router: StubRouter) -> None:
    arrived: list[str] = []

    async def together(request: InferRequest) -> None:
        arrived.append(request.request_id)
        while len(arrived) < 3:
            await asyncio.sleep(0.005)

    router.before = together
    options = ListenerOptions()
    with (
        serving(thread, lambda: Gr00tListener(router, options)) as port,
        ThreadPoolExecutor(3) as p,
    ):

        def ask(_: int) -> Any:
            with GrootClient(port) as client:
                return client.ask(pack_nd_form(body(observation())))[0]

        assert all(isinstance(reply, list) for reply in p.map(ask, range(3)))
    assert len({call.robot for _, call in router.seen}) == 3


def test_messages_that_are_no_requests_are_survived(thread: LoopThread, router: StubRouter) -> None:
    options = ListenerOptions(limits=Limits(max_message_bytes=1 << 20))
    with serving(thread, lambda: Gr00tListener(router, options)) as port:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        for parts in ([b"x"], [b"", b"a", b"b"], [b"no", b"x"], [b"", bytes(2 << 20)]):
            dealer.send_multipart(parts)
        dealer.send_multipart([b"", msgpack.packb({"endpoint": "ping"})])
        with GrootClient(port) as client:
            assert client.ask(msgpack.packb({"endpoint": "ping"}))[0]["status"] == "ok"
        dealer.close()
        context.term()


def test_drain_answers_what_runs(thread: LoopThread, router: StubRouter) -> None:
    made: list[Gr00tListener] = []

    async def slow(_: InferRequest) -> None:
        await asyncio.sleep(0.3)

    def make() -> Gr00tListener:
        made.append(Gr00tListener(router, ListenerOptions()))
        return made[0]

    router.before = slow
    with serving(thread, make) as port, GrootClient(port) as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.ask, pack_nd_form(body(observation())))
        while not router.seen:
            pass
        thread.run(made[0].drain())
        assert isinstance(running.result()[0], list)


def test_given_modality_configs_are_told_as_they_are() -> None:
    record = {
        "delta_indices": [-1, 0],
        "modality_keys": ["a"],
        "action_configs": [{"rep": "DELTA"}],
    }
    contract = ModelContract("m", extra={"gr00t": {"modality_configs": {"video": record}}})
    told = Modality.of(contract).reply("b")["video"]["as_json"]
    assert told["delta_indices"] == [-1, 0]
    assert told["action_configs"] == [{"rep": "DELTA"}]
    assert told["sin_cos_embedding_keys"] is None


@pytest.mark.parametrize("rows", [1, 2])
def test_several_frames_of_a_camera(client: GrootClient, router: StubRouter, rows: int) -> None:
    extra = {"gr00t": {"frames": [-1, 0], "actions": {"arm": 6}}}
    router.contracts["gr00t"] = ModelContract("gr00t", action_dim=6, max_rows=4, extra=extra)
    found = observation(rows)
    reply, _ = client.ask(pack_nd_form(body(found)))
    assert "must be uint8 [B, 2, H, W, 3]" in reply["error"]
    found["video"]["front"] = sent = array((rows, 2, 4, 6, 3), "|u1")
    (actions, _), _ = client.ask(pack_nd_form(body(found)))
    assert np.array_equal(values(actions["arm"]), wanted(rows))
    (image,) = router.seen[-1][0].images
    assert image.shape == (rows, 2, 4, 6, 3)  # never without B, which T could be taken for
    assert bytes(image.data) == bytes(sent.data)


@pytest.mark.parametrize("options", [{"dialect": "d"}, {"timeout_s": "0"}, {"timeout_s": "-1"}])
def test_wrong_options(router: StubRouter, options: dict[str, str]) -> None:
    with pytest.raises(Fault):
        Gr00tListener(router, ListenerOptions(options=options))


def test_taken_port_is_an_error_and_can_be_stopped(thread: LoopThread, router: StubRouter) -> None:
    with serving(thread, lambda: Gr00tListener(router, ListenerOptions())) as port:
        second = Gr00tListener(router, ListenerOptions(port=port))
        with pytest.raises(OSError, match="can't listen"):
            thread.run(second.start())
        thread.run(second.stop())
