"""A server's file, who may come in, and the document about both."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from phyai.engine import Engine
from phyai.errors import ConfigError
from phyai_gateway.client import (
    AsyncClient,
    InvalidRequest,
    NotAllowed,
    ServerUnavailable,
)
from phyai_gateway.server import config as server_config
from phyai_gateway.server import listening
from phyai_gateway.server.config import ObservationOptions, ServerOptions, TensorOptions, TlsOptions
from phyai_gateway.server.policy import Policy
from tests.gateway.serving import (
    HORIZON,
    ScaleAdapter,
    address,
    manifest,
    pictures,
    register,
    run,
    serving,
    state,
    write_config,
)
from tests.gateway.serving import isolated as isolated

TOKEN = "a-token-of-some-length"


# ---------------------------------------------------------------- files

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"server": {"colour": 1}}, r"server\.colour"),
    "no name": ({"server": {"model_name": " "}}, r"server\.model_name"),
    "port": ({"server": {"port": 70000}}, r"server\.port.*65535"),
    "a port in the host": ({"server": {"host": "127.0.0.1:1"}}, r"server\.host"),
    "workers": ({"server": {"workers": 0}}, r"server\.workers"),
    "grace": ({"server": {"grace_seconds": -1.0}}, r"server\.grace_seconds"),
    "timeout": ({"server": {"request_timeout_s": 601.0}}, r"server\.request_timeout_s"),
    "message": ({"server": {"max_message_bytes": 2**31}}, r"server\.max_message_bytes"),
    "type": ({"server": {"port": "50063"}}, r"server\.port"),
    "listen": ({"server": {"listen": {"openpi": "8000"}}}, r"server\.listen"),
    "options": ({"server": {"listen_options": {"openpi": {"a": "b"}}}}, r"listen_options"),
    "factory": ({"adapter": {"factory": "os:system"}}, r"adapter\.factory"),
    "adapter key": ({"adapter": {"arg": {}}}, r"adapter.*'arg'"),
    "adapter arg": ({"adapter": {"args": {"engine_args": 1}}}, r"adapter\.args\.engine_args"),
    "names": ({"adapter": {"args": {"image_names": ["a", "a"]}}}, r"image_names"),
    "plugin arg": ({"plugin_args": {"size": 1}}, r"plugin_args\.size"),
    "gateway": ({"server": {"register_with": ["h"]}}, r"^server\.register_with: .*HOST:PORT.*'h'"),
    "top": ({"serve": {}}, r"serve must be a known key"),
}


def _file(folder: Path, change: dict[str, Any]) -> Path:
    register()
    data = yaml.safe_load(write_config(folder).read_text())
    for key, value in change.items():
        data[key] = {**data.get(key, {}), **value}
    file = folder / "changed.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings_are_refused_with_their_path(tmp_path: Path, name: str) -> None:
    change, text = REFUSED[name]
    with pytest.raises(ConfigError, match=text):
        server_config.load(_file(tmp_path, change))


def test_a_file_without_a_server_is_refused(tmp_path: Path) -> None:
    register()
    file = tmp_path / "x.yaml"
    file.write_text("plugin: gateway_scale\n")
    with pytest.raises(ConfigError, match="server must be given"):
        server_config.load(file)


def test_media_are_not_served_to_robots(tmp_path: Path) -> None:
    """By the manifest: media and no actions. As tensors, without guards, they may be."""
    only_media = manifest(media="toy:files")
    Engine.register(ScaleAdapter, only_media)
    file = write_config(tmp_path)
    with pytest.raises(ConfigError, match=r"must return actions .*; got 'gateway_scale'"):
        server_config.load(file)
    assert server_config.load(write_config(tmp_path, adapter={"factory": "tensors"})).adapter
    both = {**only_media.capabilities, "action_dim": 3}
    Engine.register(ScaleAdapter, replace(only_media, capabilities=both))
    assert server_config.load(write_config(tmp_path)).adapter == ObservationOptions()


def test_factories_of_earlier_files_are_understood(tmp_path: Path) -> None:
    """PI05Backend's file works, and its requests become observations."""
    args = {"image_names": ["main", "wrist_images"], "state_dim": 4, "action_dim": 2}
    named = {"factory": "phyai.server.backends.pi05:PI05Backend", "args": args}
    loaded = server_config.load(_file(tmp_path, {"adapter": named}))
    assert loaded.adapter == ObservationOptions(("main", "wrist_images"), 4, 2)
    raw = {"factory": "phyai.server.backends.tensor:TensorBackend", "args": {"output_name": "x"}}
    loaded = server_config.load(_file(tmp_path, {"adapter": raw}))
    assert loaded.adapter == TensorOptions(output_name="x")
    assert server_config.load(_file(tmp_path, {})).adapter == ObservationOptions()

    async def test() -> None:
        async with serving(tmp_path, adapter=named) as server, AsyncClient(address(server)) as c:
            images = {"main": pictures()["front"], "wrist_images": pictures()["wrist"]}
            assert (await c.infer(images, state(), "go")).shape == (HORIZON, 2)
            with pytest.raises(InvalidRequest, match="'main', 'wrist_images'"):
                await c.infer(pictures(), state(), "go")

    run(test)


def test_too_many_camera_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 1 names"):
        Policy(
            "m",
            ObservationOptions(image_names=("a", "b")),
            manifest=None,
            expects={"cameras": ["front"]},
            max_rows=1,
            max_image_pixels=100,
        )


# ---------------------------------------------------------------- who may come in


class Deaf:
    """A protocol whose clients can show nothing."""

    takes_tokens: ClassVar[bool] = False
    takes_tls: ClassVar[bool] = False


def test_addresses_that_strangers_reach_need_a_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "find_listener", lambda name: Deaf)
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"arm": {"token": TOKEN}}))
    tokens.chmod(0o600)
    outside = {"host": "0.0.0.0", "token_file": str(tokens)}
    assert listening.wanted_listeners(ServerOptions("m", **outside))
    for options in (
        {"host": "0.0.0.0"},
        {"host": "::"},
        {**outside, "listen": {"deaf": "0.0.0.0:1"}},
    ):
        with pytest.raises(ConfigError, match="loopback"):
            listening.wanted_listeners(ServerOptions("m", **options))
        allowed = ServerOptions("m", **options, insecure_bind=True)
        assert listening.risks(allowed, listening.wanted_listeners(allowed))
    with pytest.raises(ConfigError, match="http_host"):
        listening.http_address(ServerOptions("m", http_host="0.0.0.0"))
    encrypted = ServerOptions("m", http_host="0.0.0.0", tls=TlsOptions("c.pem", "k.pem"))
    assert listening.http_address(encrypted) is not None  # as for the ports beside it


def test_two_listeners_on_one_port_are_refused_before_the_weights_are_loaded() -> None:
    for options, key in (
        ({"port": 5000, "http_port": 5000}, "server.port .* server.http_port"),
        ({"listen": {"openpi": "127.0.0.1:50063"}}, "server.listen.openpi .* server.port"),
    ):
        with pytest.raises(ConfigError, match=key):
            listening.wanted_listeners(ServerOptions("m", **options))
    assert len(listening.wanted_listeners(ServerOptions("m", port=0, http_port=0))) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_tokens_and_tls_on_a_live_server(tmp_path: Path) -> None:
    ca, cert, key = _certificates(tmp_path)
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"arm": {"token": TOKEN, "scopes": ["infer"]}}))
    tokens.chmod(0o600)
    options = {"tls": {"cert": str(cert), "key": str(key)}, "token_file": str(tokens)}

    async def test() -> None:
        async with serving(tmp_path, **options) as server:
            where = f"localhost:{server.ports['native']}"
            async with AsyncClient(where, ca=ca, token=TOKEN) as client:
                assert (await client.infer(pictures(), state(), "go")).shape == (6, 3)
            async with AsyncClient(where, ca=ca, token="b" + TOKEN) as client:
                with pytest.raises(NotAllowed) as caught:
                    await client.infer(pictures(), state(), "go")
                assert TOKEN not in str(caught.value)
            async with AsyncClient(where, token=TOKEN) as client:
                with pytest.raises(ServerUnavailable):
                    await client.infer(pictures(), state(), "go", timeout_s=5)

    run(test)


def _certificates(folder: Path) -> tuple[Path, Path, Path]:
    """Return CA, certificate and key for localhost, made now."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test",
        "-days", "2",
    )  # fmt: skip
    openssl("req", *curve, "-keyout", "key.pem", "-out", "csr.pem", "-subj", "/CN=localhost")
    (folder / "names").write_text("subjectAltName=DNS:localhost\n")
    openssl(
        "x509", "-req", "-in", "csr.pem", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
        "-out", "cert.pem", "-days", "2", "-extfile", "names",
    )  # fmt: skip
    return folder / "ca.pem", folder / "cert.pem", folder / "key.pem"


# ---------------------------------------------------------------- the document


def test_the_files_in_the_document_are_valid(tmp_path: Path) -> None:
    """Every YAML block loads, the later ones laid over the first."""
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.S)]
    assert len(blocks) >= 4
    assert blocks[0]["plugin"] == "pi05"
    for block in blocks:
        file = tmp_path / "document.yaml"
        file.write_text(yaml.safe_dump({**blocks[0], **block}))
        loaded = server_config.load(file)
        assert loaded.server.model_name == "pi05"
    defaults = {key: value for key, value in blocks[0]["server"].items() if key != "model_name"}
    assert ServerOptions("pi05", **defaults) == ServerOptions("pi05")
