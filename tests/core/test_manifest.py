"""Manifests: JSON round trip, API versions, and every rule with its message."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from phyai.errors import PluginContractError
from phyai.manifest import ADAPTER_API, AdapterManifest, Preset
from phyai.plugin_rules import ApiVersionError, check_api, check_manifest

GOOD = AdapterManifest(
    id="act",
    summary="ACT, a regression policy.",
    target="act.model:Act",
    args="act.model:ActArgs",
    architectures=("act",),
    key_probes=("action_head.weight",),
    capabilities={"kind": "policy", "cameras": ["top"], "control_hz": 50.0, "sessions": False},
    aliases=("act_so100",),
    presets=(Preset("tiny", "Small and random.", "act.tiny:build", "act.tiny:sample"),),
    weights_licence="Apache-2.0",
    golden="act.golden:runs",
)

ROOT = Path(__file__).parents[2]


def test_json_round_trip_keeps_every_field_and_type() -> None:
    text = GOOD.to_json()
    assert AdapterManifest.from_json(text) == GOOD
    assert json.loads(text)["presets"][0]["build"] == "act.tiny:build"


def test_a_manifest_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GOOD.id = "other"  # type: ignore[misc]


def test_a_good_manifest_passes() -> None:
    check_manifest(GOOD, "act")
    check_api(GOOD)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": "acts"}, ["id", "'act'", "'acts'"]),
        ({"summary": "  "}, ["summary"]),
        ({"target": "act.model.Act"}, ["target", "package.module:Name"]),
        ({"target": "act.model:"}, ["target"]),
        ({"args": "act model:Args"}, ["args", "package.module:Name"]),
        ({"args": None}, ["args"]),
        ({"architectures": ["act"]}, ["architectures", "tuple"]),
        ({"architectures": "act"}, ["architectures", "tuple"]),
        ({"key_probes": ("",)}, ["key_probes", "non-empty"]),
        ({"aliases": (1,)}, ["aliases"]),
        ({"presets": [GOOD.presets[0]]}, ["presets", "tuple"]),
        ({"presets": (Preset("tiny", "x", "build"),)}, ["presets['tiny'].build"]),
        ({"presets": (Preset("tiny", "x", "a:b", "sample"),)}, ["presets['tiny'].sample"]),
        ({"golden": "act.golden"}, ["golden", "package.module:Name"]),
        ({"weights_licence": None}, ["weights_licence"]),
        ({"capabilities": {"dtype": object()}}, ["capabilities", "JSON"]),
        ({"capabilities": {"limit": float("nan")}}, ["capabilities", "JSON"]),
        ({"capabilities": {1: "one"}}, ["capabilities", "JSON"]),
        ({"capabilities": {"cameras": ("top",)}}, ["capabilities", "lists"]),
        ({"capabilities": None}, ["capabilities"]),
    ],
)
def test_a_broken_rule_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PluginContractError) as caught:
        check_manifest(dataclasses.replace(GOOD, **changes), "act")
    assert all(word in str(caught.value) for word in ["plugin 'act'", *words])


def test_an_id_with_a_colon_is_refused_because_it_reads_as_a_distribution() -> None:
    with pytest.raises(PluginContractError, match="letters, digits"):
        check_manifest(dataclasses.replace(GOOD, id="a:b"), "a:b")


@pytest.mark.parametrize("api", [(1, 0), (1, 2), (1, 3)])
def test_an_equal_or_older_minor_is_compatible(api: tuple[int, int]) -> None:
    check_api(dataclasses.replace(GOOD, api=api), core=(1, 3))


@pytest.mark.parametrize(
    ("api", "remedy"),
    [
        ((1, 4), "Upgrade phyai-core"),
        ((2, 0), "Upgrade phyai-core"),
        ((0, 9), "Upgrade the plugin"),
    ],
)
def test_an_incompatible_api_says_which_side_to_upgrade(api: tuple[int, int], remedy: str) -> None:
    with pytest.raises(ApiVersionError, match=remedy) as caught:
        check_api(dataclasses.replace(GOOD, api=api), core=(1, 3))
    assert f"{api[0]}.{api[1]}" in str(caught.value)
    assert "1.3" in str(caught.value)


@pytest.mark.parametrize("api", ["1.0", (1,), (1, "0"), [1, 0], (1, -1), (True, 0)])
def test_an_api_that_is_no_pair_is_a_broken_rule(api: Any) -> None:
    with pytest.raises(PluginContractError, match="api must be two integers"):
        check_api(dataclasses.replace(GOOD, api=api))


def test_a_manifest_has_cores_api_by_default() -> None:
    assert GOOD.api == ADAPTER_API


@pytest.mark.parametrize(
    "path",
    sorted(
        path.relative_to(ROOT).as_posix()
        for folder in ("phyai-models-*", "examples", "phyai-core/src/phyai/scaffold")
        for path in ROOT.glob(f"{folder}/**/plugin.py*")
        if "AdapterManifest(" in path.read_text(encoding="utf-8")
    ),
)
def test_our_manifests_say_which_api_they_are_written_for(path: str) -> None:
    """Left out, it would be that of whatever core is installed, and never incompatible."""
    assert "api=(1, 0)" in (ROOT / path).read_text(encoding="utf-8")
