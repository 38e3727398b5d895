"""gRPC reflection: asked for, on loopback only, and named when its package is missing."""

from __future__ import annotations

import sys
from typing import Any

import grpc
import pytest

from phyai_gateway import running
from phyai_gateway.cli import main, parser
from phyai_gateway.protocols.base import ListenerOptions
from phyai_gateway.protocols.kserve.grpc_listener import KserveGrpcListener
from phyai_gateway.protocols.native import NativeListener
from phyai_gateway.protocols.robot import RobotListener
from tests.gateway.stub_world import World, run, world


async def listed(kind: Any, w: World, *, reflection: bool) -> list[str]:
    """Return the services that a listener tells of itself."""
    from grpc_reflection.v1alpha import reflection_pb2 as pb

    listener = kind(w.gateway.router, ListenerOptions(reflection=reflection))
    port = await listener.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                pb.ServerReflectionRequest.SerializeToString,
                pb.ServerReflectionResponse.FromString,
            )(timeout=10)
            await call.write(pb.ServerReflectionRequest(list_services=""))
            answer = await call.read()
            await call.write(
                pb.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health")
            )
            assert (await call.read()).file_descriptor_response.file_descriptor_proto
            call.cancel()
            return [service.name for service in answer.list_services_response.service]
    finally:
        await listener.stop()


def test_listeners_describe_their_services_when_asked_to() -> None:
    async def work() -> None:
        async with world() as w:
            assert {
                "robot.inference.v1.ModelInference",
                "robot.inference.v1.ModelRegistry",
                "phyai.serving.v1.ModelContracts",
                "grpc.health.v1.Health",
            } <= set(await listed(NativeListener, w, reflection=True))
            kserve = await listed(KserveGrpcListener, w, reflection=True)
            assert "inference.GRPCInferenceService" in kserve
            robot = await listed(RobotListener, w, reflection=True)
            assert "robot.RobotInference" in robot
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await listed(NativeListener, w, reflection=False)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(work)


def test_only_loopback_listeners_describe_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phyai_gateway.reflection.check", lambda: None)

    async def work() -> None:
        async with world() as w:
            words = ["--reflection", "--insecure-bind", "--gateway", "0.0.0.0:0"]
            plan = running.plan_of(parser().parse_args([*words, "--listen", "native=127.0.0.1:0"]))
            made = [one for one, _ in running.make_listeners(plan, w.gateway)]
            asked = [one.options.reflection for one in made if isinstance(one, NativeListener)]
            assert asked == [False, True]

    run(work)


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("grpc_reflection")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc_reflection", None)
    assert main(["--gateway", "127.0.0.1:0", "--http-port", "0", "--reflection"]) == 2
    assert "pip install 'phyai-gateway[reflection]'" in capsys.readouterr().err
