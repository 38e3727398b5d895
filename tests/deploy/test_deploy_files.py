"""Container files, manifests and the Envoy example name commands, files and ports that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from phyai_gateway import cli, running
from phyai_gateway.server import config, listening

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
MANIFESTS = ("model-server.yaml", "gateway.yaml", "network-policy.yaml")


def documents(name: str) -> list[dict[str, Any]]:
    text = (DEPLOY / "kubernetes" / name).read_text(encoding="utf-8")
    return [document for document in yaml.safe_load_all(text) if document]


def pod(name: str, kind: str) -> dict[str, Any]:
    (found,) = [d for d in documents(name) if d["kind"] == kind]
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def tokens_file(folder: Path) -> Path:
    path = folder / "tokens.json"
    path.write_text('{"robots": {"token": "0123456789abcdef0123"}}', encoding="utf-8")
    path.chmod(0o600)
    return path


# ---------------------------------------------------------------- containers


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_what_a_container_file_copies_is_there(path: Path) -> None:
    copied = re.findall(r"^COPY (?!--from)(\S+) ", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_a_container_runs_a_command_of_ours_as_nobody_special(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    (entry,) = re.findall(r'^ENTRYPOINT \["([\w-]+)"', text, re.MULTILINE)
    projects = [p.read_text(encoding="utf-8") for p in ROOT.glob("phyai-*/pyproject.toml")]
    assert any(re.search(rf"^{re.escape(entry)} = ", p, re.MULTILINE) for p in projects)
    (user,) = re.findall(r"^USER (\d+)$", text, re.MULTILINE)
    assert int(user) >= 1000
    assert "token" not in text.lower().replace("--token-file", "")


def test_a_cuda_image_says_that_nobody_tested_it() -> None:
    assert "NOT TESTED" in (DEPLOY / "docker/server-cuda.Dockerfile").read_text(encoding="utf-8")


# ---------------------------------------------------------------- Kubernetes


def test_the_serve_file_of_the_pods_is_valid(tmp_path: Path) -> None:
    file = DEPLOY / "kubernetes/serve.yaml"
    loaded = config.load(file, (f"server.token_file={tokens_file(tmp_path)}",), None)
    ports = {p["name"]: p["containerPort"] for p in _container("server")["ports"]}
    assert (loaded.server.port, loaded.server.http_port) == (ports["grpc"], ports["http"])
    wanted = listening.wanted_listeners(loaded.server)
    assert listening.risks(loaded.server, wanted) == []  # open, but to nobody without a token
    grace = pod("model-server.yaml", "StatefulSet")["terminationGracePeriodSeconds"]
    assert grace > loaded.server.grace_seconds


def test_the_gateway_takes_its_arguments(tmp_path: Path) -> None:
    container = _container("gateway")
    secret = {"tokens.json": tokens_file(tmp_path), "backend-token": tmp_path / "backend-token"}
    secret["backend-token"].write_text("0123456789abcdef0123", encoding="utf-8")
    secret["backend-token"].chmod(0o600)
    mounted = "/etc/phyai/secrets/"
    arguments = [
        re.sub(rf"{mounted}([\w.-]+)", lambda m: str(secret[m[1]]), argument)
        for argument in container["args"]
    ]
    parsed = cli.parser().parse_args(arguments)
    running.plan_of(parsed)
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert parsed.gateway.endswith(f":{ports['grpc']}")
    assert parsed.http_port == ports["http"]
    assert pod("gateway.yaml", "Deployment")["terminationGracePeriodSeconds"] > parsed.grace
    servers = next(d for d in documents("model-server.yaml") if d["kind"] == "StatefulSet")
    name, service = servers["metadata"]["name"], servers["spec"]["serviceName"]
    pods = [f"{name}-{i}.{service}:50063" for i in range(servers["spec"]["replicas"])]
    assert [endpoint for _, endpoint in parsed.backend] == pods


@pytest.mark.parametrize(("name", "kind"), [("server", "StatefulSet"), ("gateway", "Deployment")])
def test_pods_run_without_privileges(name: str, kind: str) -> None:
    file = "model-server.yaml" if name == "server" else "gateway.yaml"
    spec, container = pod(file, kind), _container(name)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    claims = next(d for d in documents(file) if d["kind"] == kind)["spec"]
    given = {v["name"] for v in spec["volumes"]} | {
        claim["metadata"]["name"] for claim in claims.get("volumeClaimTemplates", ())
    }
    assert mounted == given


def test_selectors_meet_their_pods() -> None:
    everything = [d for name in MANIFESTS for d in documents(name)]
    labels = [
        d["spec"]["template"]["metadata"]["labels"] for d in everything if "template" in d["spec"]
    ]
    for document in everything:
        spec = document["spec"]
        wanted = spec.get("selector") or spec.get("podSelector")
        assert wanted.get("matchLabels", wanted) in labels, document["metadata"]["name"]


def test_kustomize_knows_every_manifest() -> None:
    (kustomization,) = documents("kustomization.yaml")
    assert kustomization["resources"] == list(MANIFESTS)
    images = {image["name"] for image in kustomization["images"]}
    assert images == {_container("server")["image"], _container("gateway")["image"]}


def _container(name: str) -> dict[str, Any]:
    file, kind = {
        "server": ("model-server.yaml", "StatefulSet"),
        "gateway": ("gateway.yaml", "Deployment"),
    }[name]
    (found,) = pod(file, kind)["containers"]
    assert found["name"] == name
    return dict(found)


# ---------------------------------------------------------------- Envoy


def test_envoy_listens_on_loopback_and_names_its_clusters() -> None:
    text = (DEPLOY / "envoy/envoy.yaml").read_text(encoding="utf-8")
    resources = yaml.safe_load(text)["static_resources"]
    for listener in resources["listeners"]:
        assert listener["address"]["socket_address"]["address"] == "127.0.0.1"
    clusters = {cluster["name"] for cluster in resources["clusters"]}
    assert clusters == set(re.findall(r"\bcluster: (\w+)", text))
