"""Embodiment tags: the names users give them, and the projector each of them uses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from phyai.errors import CheckpointError, RequestError, did_you_mean

# Projector of tags that a checkpoint's embodiment_id.json does not name.
PROJECTORS = {
    "simpler_env_google": 0,
    "simpler_env_widowx": 1,
    "libero_sim": 2,
    "new_embodiment": 10,
    "robocasa_panda_omron": 10,
    "robocasa_gr1_tabletop": 10,
    "unitree_g1_sonic": 11,
    "oxe_droid_relative_eef_relative_joint": 24,
    "real_g1_relative_eef_relative_joints": 25,
    "unitree_g1_full_body_with_waist_height_nav_cmd": 25,
}
# Families of tags that share one projector.
_FAMILIES = (("real_r1_pro_sharpa_", 26), ("xdof_", 27), ("robocasa_", 10))
ALIASES = {
    "libero_panda": "libero_sim",
    "real_g1": "real_g1_relative_eef_relative_joints",
    "unitree_g1": "unitree_g1_full_body_with_waist_height_nav_cmd",
    "xdof": "xdof_relative_eef_relative_joint",
    "xdof_subtask": "xdof_relative_eef_relative_joint_subtask",
    "real_r1_pro_sharpa": "real_r1_pro_sharpa_relative_eef",
    "real_r1_pro_sharpa_human": "real_r1_pro_sharpa_relative_eef_human",
    "real_r1_pro_sharpa_maxinsights": "real_r1_pro_sharpa_relative_eef_maxinsights",
    "real_r1_pro_sharpa_mecka": "real_r1_pro_sharpa_relative_eef_mecka",
}
"""Names of the official enumeration (lower case) whose value is another word."""
_MAX_ID = 1 << 20


def projector_id(tag: str, stored: Mapping[str, int]) -> int | None:
    """Return the projector of a tag: the checkpoint's table first, then the known ones."""
    if tag in stored:
        return stored[tag]
    if tag in PROJECTORS:
        return PROJECTORS[tag]
    return next((number for prefix, number in _FAMILIES if tag.startswith(prefix)), None)


def parse_ids(data: Mapping[str, Any]) -> dict[str, int]:
    """Return the content of ``embodiment_id.json``, tag -> projector.

    Raises: CheckpointError for anything but small integers.
    """
    for tag, number in data.items():
        if type(number) is not int or not 0 <= number < _MAX_ID:
            raise CheckpointError(
                f"embodiment_id.json must map tags to integers from 0; got {number!r} for "
                f"{tag!r}. Download it again."
            )
    return dict(data)


def resolve_tag(name: Any, known: Iterable[str], refused: Mapping[str, str]) -> str:
    """Return the checkpoint's tag for what a user calls it; case does not matter.

    known: usable tags of the checkpoint.  refused: tag -> why it cannot be used.
    Raises: RequestError listing the known tags.
    """
    tags = tuple(known)
    if isinstance(name, str):
        wanted = name.strip()
        if wanted in tags:
            return wanted
        folded = {re.sub(r"[\s-]+", "_", tag.lower()): tag for tag in (*tags, *refused)}
        key = re.sub(r"[\s-]+", "_", wanted.lower())
        found = folded.get(ALIASES.get(key, key)) or folded.get(key)
        if found is not None and found in refused:
            raise RequestError(
                f"embodiment must be one that can run here; got {found!r}: {refused[found]}"
            )
        if found is not None:
            return found
    raise RequestError(
        f"embodiment must be one of this checkpoint's: {', '.join(sorted(tags)) or 'none'}; got "
        f"{name!r}.{did_you_mean(str(name), tags)} Fine-tune, or use the checkpoint of that robot."
    )
