"""Embodiment tags, their aliases and projectors, and malformed modality configs."""

from __future__ import annotations

from typing import Any

import pytest

from phyai.errors import CheckpointError, RequestError
from phyai.models.gr00t.processing.embodiments import (
    ALIASES,
    parse_ids,
    projector_id,
    resolve_tag,
)
from phyai.models.gr00t.processing.modality import EmbodimentModalities

DROID = "oxe_droid_relative_eef_relative_joint"
TAGS = ("libero_sim", DROID)


@pytest.mark.parametrize(
    ("tag", "want"),
    [
        ("libero_sim", 2),
        (DROID, 24),
        ("robocasa_panda_omron", 10),
        ("robocasa_something_new", 10),
        ("real_r1_pro_sharpa_relative_eef_mecka", 26),
        ("xdof_relative_eef_relative_joint", 27),
        ("somebody_elses", None),
    ],
)
def test_known_projectors(tag: str, want: int | None) -> None:
    assert projector_id(tag, {}) == want


def test_the_checkpoints_table_wins() -> None:
    stored = parse_ids({"robocasa_panda_omron": 13, "somebody_elses": 0})
    assert projector_id("robocasa_panda_omron", stored) == 13
    assert projector_id("somebody_elses", stored) == 0
    assert projector_id("libero_sim", stored) == 2


@pytest.mark.parametrize("number", [-1, True, "2", 1.0, 2**30])
def test_projectors_are_small_integers(number: Any) -> None:
    with pytest.raises(CheckpointError, match="integers from 0"):
        parse_ids({"libero_sim": number})


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("libero_sim", "libero_sim"),
        ("LIBERO_PANDA", "libero_sim"),
        ("Libero-Sim", "libero_sim"),
        (" libero sim ", "libero_sim"),
        (DROID.upper(), DROID),
    ],
)
def test_names_of_a_tag(name: str, want: str) -> None:
    assert resolve_tag(name, TAGS, {}) == want


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_every_alias_finds_its_tag(alias: str) -> None:
    assert resolve_tag(alias.upper(), (ALIASES[alias],), {}) == ALIASES[alias]


def test_a_tag_that_is_an_alias_of_another_is_found_by_its_own_name() -> None:
    assert resolve_tag("XDOF", ("xdof",), {}) == "xdof"


@pytest.mark.parametrize("name", ["unitree_g1", "", None, 2, ["libero_sim"]])
def test_unknown_tags_list_the_known_ones(name: Any) -> None:
    with pytest.raises(RequestError, match=f"libero_sim, {DROID}; got"):
        resolve_tag(name, TAGS, {})


def test_a_refused_tag_says_why() -> None:
    with pytest.raises(RequestError, match=r"'unitree_g1_sonic': .*too many steps"):
        resolve_tag("UNITREE_G1_SONIC", TAGS, {"unitree_g1_sonic": "too many steps"})


# ---------------------------------------------------------------- modality configs


def _entry(**changes: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {
        name: {"delta_indices": [0], "modality_keys": [f"{name}_key"]}
        for name in ("video", "state", "action", "language")
    }
    for path, value in changes.items():
        modality, _, field = path.partition("__")
        if field:
            entry[modality][field] = value
        else:
            entry[modality] = value
    return entry


def test_actions_without_configs_are_absolute() -> None:
    action = EmbodimentModalities.from_json("bot", _entry()).action
    assert [(a.rep, a.state_key) for a in action.actions] == [("ABSOLUTE", "action_key")]


def test_enumerations_are_read_by_name_and_by_value() -> None:
    configs = [{"rep": "relative", "type": "eef", "format": "xyz+rot6d", "state_key": "state_key"}]
    entry = _entry(action__action_configs=configs)
    (action,) = EmbodimentModalities.from_json("bot", entry).action.actions
    assert (action.rep, action.type, action.format) == ("RELATIVE", "EEF", "XYZ_ROT6D")


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ([], r"modality_configs\['bot'\] must be"),
        (_entry(video=None), "bot'\\].video must be"),
        (_entry(state__modality_keys=[]), "state.modality_keys"),
        (_entry(state__modality_keys=["x", "x"]), "different names"),
        (_entry(state__modality_keys="x"), "state.modality_keys"),
        (_entry(video__delta_indices=[]), "video.delta_indices"),
        (_entry(video__delta_indices=[0.5]), "video.delta_indices"),
        (_entry(state__sin_cos_embedding_keys=[1]), "sin_cos_embedding_keys"),
        (_entry(action__action_configs=[]), "one per action key"),
        (_entry(action__action_configs=["RELATIVE"]), "'action_key' must be an object"),
        (_entry(action__action_configs=[{"rep": "NEAR"}]), "ABSOLUTE, RELATIVE, DELTA"),
        (_entry(action__action_configs=[{"format": "QUAT"}]), "XYZ_ROT6D"),
        (_entry(action__action_configs=[{"state_key": 3}]), "state_key"),
    ],
)
def test_malformed_modalities_are_named(entry: Any, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        EmbodimentModalities.from_json("bot", entry)
