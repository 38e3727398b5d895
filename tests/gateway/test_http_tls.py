"""TLS and mTLS on the HTTP port, with certificates made here."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from phyai_gateway.http_api import HttpApi
from phyai_gateway.protocols.base import ListenerOptions
from phyai_gateway.tls import TlsFiles
from tests.gateway.http_client import fetch, served
from tests.gateway.stub_world import run, world

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def make_certificate(folder: Path, name: str, signer: str | None = None) -> TlsFiles:
    """Make NAME.pem and NAME.key for 127.0.0.1, signed by itself or by the signer."""
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", str(key)]
    command += ["-out", str(cert), "-addext", "subjectAltName=IP:127.0.0.1"]
    if signer is not None:
        command += ["-CA", str(folder / f"{signer}.pem"), "-CAkey", str(folder / f"{signer}.key")]
        command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return TlsFiles(cert, key)


def trusting(ca: Path, client: TlsFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    return context


def test_tls_serves_who_trusts_it_and_takes_a_new_certificate(tmp_path: Path) -> None:
    old = make_certificate(tmp_path, "old")
    new = make_certificate(tmp_path, "new")
    used = TlsFiles(tmp_path / "used.pem", tmp_path / "used.key")

    def install(files: TlsFiles) -> None:
        used.cert.write_bytes(files.cert.read_bytes())
        used.key.write_bytes(files.key.read_bytes())

    async def work() -> None:
        install(old)
        async with world(1) as w, served(w, tls=used) as port:
            answer = await fetch(port, "GET", "/health", context=trusting(old.cert))
            assert answer.status == 200
            with pytest.raises(ssl.SSLError):
                await fetch(port, "GET", "/health", context=trusting(new.cert))
            with pytest.raises(OSError, match=r"closed|reset|without response"):
                await fetch(port, "GET", "/health")
            install(new)
            (api,) = w.gateway.listeners
            assert isinstance(api, HttpApi)
            api.reload_tls()
            assert (await fetch(port, "GET", "/health", context=trusting(new.cert))).status == 200

    run(work, 60)


def test_mtls_needs_a_certificate_of_the_authority(tmp_path: Path) -> None:
    authority = make_certificate(tmp_path, "ca")
    stranger = make_certificate(tmp_path, "stranger")
    server = make_certificate(tmp_path, "server", "ca")
    robot = make_certificate(tmp_path, "robot", "ca")
    files = TlsFiles(server.cert, server.key, authority.cert)

    async def work() -> None:
        async with world(1) as w, served(w, tls=files) as port:
            good = trusting(authority.cert, robot)
            assert (await fetch(port, "GET", "/health", context=good)).status == 200
            for context in (trusting(authority.cert), trusting(authority.cert, stranger)):
                with pytest.raises(OSError):  # noqa: PT011 - TLS alert or reset, by timing
                    await fetch(port, "GET", "/health", context=context)

    run(work, 60)


def test_silent_tls_clients_do_not_stop_others(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "one")

    async def work() -> None:
        async with world(1) as w, served(w, tls=files) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            answer = await fetch(port, "GET", "/health", context=trusting(files.cert))
            assert answer.status == 200
            for _, writer in silent:
                writer.close()

    run(work, 60)


def test_missing_files_are_an_error_at_start(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(1) as w:
            files = TlsFiles(tmp_path / "none.pem", tmp_path / "none.key")
            api = HttpApi(w.gateway, ListenerOptions(tls=files))
            with pytest.raises(OSError, match="No such file"):
                await api.start()

    run(work)
