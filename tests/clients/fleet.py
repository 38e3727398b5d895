"""Two processes of model servers and a gateway over them, as processes that tests may kill."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from phyai.cli.run_setup import build_preset, choose_preset
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
START_S = 120.0  # of an interpreter that imports torch, on a machine that does much else
SERVERS = 2


def preset_args(manifest: Any, **changes: Any) -> dict[str, Any]:
    """Return the plugin arguments of a plugin's tiny preset, fit for YAML."""
    from phyai import plugins

    record = plugins.find(manifest)
    assert record.manifest is not None
    built = build_preset(record, choose_preset(record.manifest, "tiny"))
    plain = {key: list(v) if isinstance(v, tuple) else v for key, v in built.items()}
    return plain | changes


def model_file(folder: Path, model: str, plugin: str, args: Mapping[str, Any], **more: Any) -> Path:
    """Write a server's file; more: its ``adapter`` arguments."""
    data: dict[str, Any] = {
        "plugin": plugin,
        "plugin_args": dict(args),
        "config": {"device": {"target": "cpu", "params_dtype": "float32"}},
        "server": {"model_name": model, "port": 0, "http_port": None},
    }
    if more:
        data["adapter"] = {"factory": "observations", "args": more}
    file = folder / f"{model}.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False))  # the order of keys has a meaning
    return file


class Fleet:
    """``SERVERS`` processes with the same models, and one gateway; closes what it started."""

    def __init__(self, folder: Path, files: list[Path], listeners: Mapping[str, str]) -> None:
        """listeners: name -> what ``--listen`` is told; ``{port}`` becomes a free port."""
        self.folder, self._stack = folder, ExitStack()
        self.files = {file.stem: file for file in files}
        *ports, self.http = free_ports(len(listeners) + 1)
        self.ports = dict(zip(listeners, ports, strict=True))
        self._listeners = [
            word
            for name, told in listeners.items()
            for word in ("--listen", told.replace("{port}", str(self.ports[name])))
        ]
        self.servers: list[subprocess.Popen[str]] = []
        self.gateway: subprocess.Popen[str] | None = None
        try:
            self.servers = [self._server(index, files) for index in range(SERVERS)]
            self.models = [json.loads(_line(server)) for server in self.servers]
            self.start_gateway()
        except BaseException:
            self.close()
            raise

    def _server(self, index: int, files: list[Path]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.clients.model_servers", *map(str, files)]
        return self._start(command, f"server-{index}.log", stdout=subprocess.PIPE)

    def start_gateway(self) -> None:
        """Start it on the same ports as before, and wait until every backend is ready."""
        command = [sys.executable, "-u", "-m", "phyai_gateway.cli", "--probe-period", "1"]
        command += ["--state", str(self.folder / "state.json")]
        for ports in self.models:
            for model, of_model in ports.items():
                command += ["--backend", model, f"127.0.0.1:{of_model['native']}"]
        command += ["--gateway", "127.0.0.1:0", "--http-port", str(self.http), *self._listeners]
        log = (self.folder / "gateway.log").open("a")
        self._stack.callback(log.close)
        self.gateway = self._start(command, "gateway.log", stdout=log)
        self._wait_for(SERVERS * len(self.files))

    def kill_gateway(self) -> None:
        assert self.gateway is not None
        self.gateway.kill()
        self.gateway.communicate()

    def _wait_for(self, ready: int) -> None:
        deadline = time.monotonic() + START_S
        states: list[str] = []
        while time.monotonic() < deadline:
            assert self.gateway is not None
            assert self.gateway.poll() is None, self.log()
            try:
                states = [backend["state"] for backend in self.backends()]
            except OSError:
                states = []
            if states.count("ready") >= ready:
                return
            time.sleep(0.05)
        raise AssertionError(f"backends are {states}\n{self.log()}")

    def backends(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/v1/backends", timeout=5) as got:
            found: list[dict[str, Any]] = json.load(got)["backends"]
            return found

    def answered(self, model: str) -> list[int]:
        """Return how many requests each backend of a model has answered."""
        return [b["requests"] for b in self.backends() if b["model_name"] == model]

    def log(self) -> str:
        return "\n".join(f.read_text()[-3000:] for f in sorted(self.folder.glob("*.log")))

    def _start(self, command: list[str], log: str, **given: Any) -> subprocess.Popen[str]:
        file = self._stack.enter_context((self.folder / log).open("a"))
        return subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stderr=file, text=True, **given
        )

    def close(self) -> None:
        started = [*self.servers, *([self.gateway] if self.gateway else [])]
        for process in started:
            process.kill()
            process.communicate()
        self._stack.close()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()  # empty when the process has ended
    assert line, "a model server ended while it started"
    return line


def client_command(python: Path, script: str, *arguments: str) -> list[str]:
    """Return what runs a script of ``scripts/`` inside a client's environment."""
    return [str(python), str(Path(__file__).parent / "scripts" / script), *arguments]


def run_client(python: Path, script: str, *arguments: str, limit_s: float, folder: Path) -> str:
    """Run such a script; returns what it printed."""
    command = client_command(python, script, *arguments)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
