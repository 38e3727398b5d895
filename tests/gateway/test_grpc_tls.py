"""TLS of gRPC listeners: new handshakes take a renewed certificate, and never half a pair."""

from __future__ import annotations

import shutil
from pathlib import Path

import grpc
import pytest

from phyai_gateway.proto import kserve_v2_pb2 as pb
from phyai_gateway.protocols.base import ListenerOptions
from phyai_gateway.protocols.kserve.grpc_listener import KserveGrpcListener
from phyai_gateway.tls import TlsFiles
from tests.gateway.stub_world import run, world
from tests.gateway.test_http_tls import make_certificate

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))


async def lives(port: int, ca: Path, client: TlsFiles | None = None) -> bool:
    """Return whether a client that trusts the authority gets an answer over a new connection."""
    own = (client.key.read_bytes(), client.cert.read_bytes()) if client else (None, None)
    trusted = grpc.ssl_channel_credentials(ca.read_bytes(), *own)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted, OPTIONS) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ServerLive",
            pb.ServerLiveRequest.SerializeToString,
            pb.ServerLiveResponse.FromString,
        )
        asked = call(pb.ServerLiveRequest(), timeout=20)
        code = await asked.code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
        return code is grpc.StatusCode.OK


def test_a_renewed_certificate_is_taken_whole(tmp_path: Path) -> None:
    old, new = make_certificate(tmp_path, "old"), make_certificate(tmp_path, "new")
    used = TlsFiles(tmp_path / "used.pem", tmp_path / "used.key")
    used.cert.write_bytes(old.cert.read_bytes())
    used.key.write_bytes(old.key.read_bytes())

    async def work() -> None:
        async with world(1) as w:
            listener = KserveGrpcListener(w.gateway.router, ListenerOptions(tls=used))
            port = await listener.start()
            assert await lives(port, old.cert)
            assert not await lives(port, new.cert)
            used.cert.write_bytes(new.cert.read_bytes())  # its key comes a moment later
            assert await lives(port, old.cert)
            used.key.unlink()
            assert await lives(port, old.cert)
            used.key.write_bytes(new.key.read_bytes())
            assert await lives(port, new.cert)
            assert not await lives(port, old.cert)
            await listener.stop()

    run(work, 60)


def test_mtls_of_grpc_follows_the_authority(tmp_path: Path) -> None:
    authority, stranger = make_certificate(tmp_path, "ca"), make_certificate(tmp_path, "stranger")
    server, robot = (
        make_certificate(tmp_path, "server", "ca"),
        make_certificate(tmp_path, "robot", "ca"),
    )
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.cert.read_bytes())
    used = TlsFiles(server.cert, server.key, trusted)

    async def work() -> None:
        async with world(1) as w:
            listener = KserveGrpcListener(w.gateway.router, ListenerOptions(tls=used))
            port = await listener.start()
            assert await lives(port, authority.cert, robot)
            assert not await lives(port, authority.cert, stranger)
            assert not await lives(port, authority.cert)
            trusted.write_bytes(stranger.cert.read_bytes())
            assert await lives(port, authority.cert, stranger)
            assert not await lives(port, authority.cert, robot)
            await listener.stop()

    run(work, 60)
