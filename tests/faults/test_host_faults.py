"""Faults of the machine: jumping clocks, full disks, taken ports, expired certificates."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phyai_gateway.cli import main
from tests.faults.askers import ASK
from tests.faults.processes import (
    PORTS,
    SOON_S,
    Gateway,
    Model,
    Process,
    eventually,
    run,
    running,
)
from tests.faults.robots import robots
from tests.gateway.http_client import fetch
from tests.gateway.test_http_tls import make_certificate, trusting
from tests.ports import free_ports

pytestmark = pytest.mark.slow


def broken(kind: str, flag: Path) -> tuple[str, ...]:
    return ("-m", "tests.faults.broken_host", kind, str(flag))


def test_nothing_depends_on_the_wall_clock(tmp_path: Path) -> None:
    """The clock jumps by 20 years back and 10 ahead all the time; not one request fails."""

    async def work() -> None:
        flag = tmp_path / "jump"
        models = [Model(number, 0.01) for number in range(2)]
        gateway = Gateway(
            [one.endpoint for one in models], protocols=PORTS, program=broken("clock", flag)
        )
        async with running(*models, gateway):
            async with robots(gateway.ports["native"], 8, robot_ids=True, pause_s=0.01) as load:
                await load.more(50)
                flag.touch()
                for _ in range(3):
                    for name, ask in ASK.items():
                        await asyncio.to_thread(ask, gateway.ports[name])
                    await load.more(50)
                    flag.unlink()
                    await asyncio.sleep(0.7)
                    flag.touch()
                await asyncio.sleep(2.0)  # probes, housekeeping and events under jumps
                assert all(row["healthy"] for row in await gateway.backends())
                await load.more(50)
            assert not load.bad(), load.codes()
            assert set(load.by_server()) == {0, 1}

    run(work)


def test_a_full_disk_costs_only_what_a_restart_would_know(tmp_path: Path) -> None:
    """Said on the status page and in the log; written as soon as there is room."""

    async def work() -> None:
        flag, state = tmp_path / "full", tmp_path / "state.json"
        models = [Model(number) for number in range(2)]
        gateway = Gateway([models[0].endpoint], "--state", str(state), program=broken("disk", flag))
        async with running(*models, gateway), robots(gateway.ports["native"], 4) as load:
            await load.more(20)

            async def saved(count: int) -> bool:
                return state.exists() and len(json.loads(state.read_text())["backends"]) == count

            await eventually(lambda: saved(1), SOON_S, "the first state is saved")
            flag.touch()
            body = {"model_name": "stub", "endpoint": models[1].endpoint}
            answer = await fetch(gateway.ports["http"], "POST", "/v1/backends", body)
            assert answer.status == 202  # registered: the disk is no reason to refuse

            async def warned() -> bool:
                warnings = (await gateway.snapshot()).get("warnings", [])
                return any("No space left" in text for text in warnings)

            await eventually(warned, SOON_S, "the warning")
            await gateway.serving(2)
            await load.more(100)
            assert load.by_server()[1] > 0
            assert await saved(1)  # the old one is whole
            said = [line for line in gateway.lines if "state file was not written" in line]
            assert len(said) == 1  # tried each second, told once
            flag.unlink()
            await eventually(lambda: saved(2), SOON_S, "the state is saved")

            async def quiet() -> bool:
                return not await warned()

            await eventually(quiet, SOON_S, "the warning goes")
            assert not load.bad()
            await gateway.kill()
            assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json"]

    run(work)


@pytest.mark.parametrize("name", PORTS)
def test_a_taken_port_ends_the_start_with_its_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        taken = held.getsockname()[1]
        words = ["--gateway", f"127.0.0.1:{taken if name == 'native' else 0}"]
        words += ["--http-port", str(taken if name == "http" else 0)]
        if name not in ("native", "http"):
            words += ["--listen", f"{name}=127.0.0.1:{taken}"]
        assert main(words) == 2
    said = capsys.readouterr().err
    assert f"{name} cannot listen on 127.0.0.1" in said
    assert "in use" in said or "cannot be bound" in said, said
    assert "Traceback" not in said


def test_a_taken_port_of_a_model_server_is_named(tmp_path: Path) -> None:
    async def work() -> None:
        model = Model(0)
        with socket.socket() as held:
            held.bind(("127.0.0.1", model.port))
            held.listen()
            await Process.start(model)
            assert await model.ended() != 0
        assert f"address 127.0.0.1:{model.port} must be free" in "\n".join(model.lines)

    run(work)


def expired(folder: Path, name: str) -> Any:
    """Make NAME.pem, valid for a day in 2020, and its key."""
    files = make_certificate(folder, name)
    (folder / "index.txt").touch()
    (folder / "serial").write_text("01\n")
    (folder / "ca.cnf").write_text(
        f"[ca]\ndefault_ca=me\n[me]\ndatabase={folder}/index.txt\nserial={folder}/serial\n"
        f"new_certs_dir={folder}\ndefault_md=sha256\npolicy=any\nx509_extensions=own\n"
        "[any]\ncommonName=supplied\n[own]\nsubjectAltName=IP:127.0.0.1\n"
        "basicConstraints=critical,CA:TRUE\n"
    )
    request = folder / "request.csr"
    openssl = ["openssl", "req", "-new", "-key", str(files.key), "-subj", f"/CN={name}"]
    subprocess.run([*openssl, "-out", str(request)], check=True, capture_output=True, timeout=60)
    openssl = ["openssl", "ca", "-batch", "-selfsign", "-config", str(folder / "ca.cnf")]
    openssl += ["-keyfile", str(files.key), "-in", str(request), "-out", str(files.cert)]
    openssl += ["-startdate", "20200101000000Z", "-enddate", "20200102000000Z", "-notext"]
    subprocess.run(openssl, check=True, capture_output=True, timeout=60)
    return files


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_an_expired_certificate_is_told_and_replaced_without_a_restart(tmp_path: Path) -> None:
    """Clients refuse it; the gateway says so at its start and serves once it is renewed."""

    async def work() -> None:
        old, new = expired(tmp_path, "old"), make_certificate(tmp_path, "new")
        cert, key = tmp_path / "used.pem", tmp_path / "used.key"
        shutil.copy(old.cert, cert)
        shutil.copy(old.key, key)
        (http,) = free_ports(1)
        gateway = Process(
            *(sys.executable, "-u", "-m", "phyai_gateway.cli", "--gateway", "127.0.0.1:0"),
            *("--http-port", str(http), "--tls-cert", str(cert), "--tls-key", str(key)),
        )
        async with running(gateway):
            await gateway.says("http listens on")
            await gateway.says("expired")
            with pytest.raises(ssl.SSLError, match="expired"):
                await fetch(http, "GET", "/health", context=trusting(old.cert))
            shutil.copy(new.key, key)
            shutil.copy(new.cert, cert)
            gateway.send(signal.SIGHUP)

            async def trusted() -> bool:
                try:
                    answer = await fetch(http, "GET", "/health", context=trusting(new.cert))
                except OSError:
                    return False
                return answer.status == 200

            await eventually(trusted, SOON_S, "the new certificate is used")

    run(work)
