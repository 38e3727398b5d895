"""Embodiment domains: the id that selects a robot's projections, and how wide its actions are."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from phyai.adapter import is_integer
from phyai.errors import RequestError, did_you_mean


@dataclass(frozen=True, slots=True)
class Domain:
    """One embodiment.  raw_dim: channels of an action; None when its data set decides."""

    name: str
    id: int
    raw_dim: int | None


_TABLE: tuple[tuple[str, int, int | None], ...] = (
    ("no_action", 0, None),
    ("av", 1, 9),
    ("camera_pose", 2, 9),
    ("hand_pose", 3, 57),
    ("pusht", 4, 2),
    ("libero", 5, None),
    ("umi", 6, 10),
    ("bridge_orig_lerobot", 7, 10),
    ("droid_lerobot", 8, 10),
    ("robomind-franka", 8, 10),
    ("galbot", 9, 30),
    ("robomind-franka-dual", 12, 20),
    ("robomind-ur", 13, 10),
    ("agibotworld", 15, 29),
    ("agibot_gear_gripper", 15, 29),
    ("agibot_gear_gripper_ext", 15, 29),
    ("xdof_yam", 16, 20),
    ("robotwin", 17, 14),
    ("fractal", 20, 10),
    ("drawanything", 21, 3),
    ("behavior1k", 22, 23),
    ("maniparena", 23, 20),
)
DOMAINS = MappingProxyType({name: Domain(name, number, dim) for name, number, dim in _TABLE})
"""By name. A pose is 9 channels (position, two columns of the rotation), a gripper one."""


def domain_of(value: Any, num_domains: int, raw_dim: Any = None) -> Domain:
    """Return the domain of a name or an id, with the channels it has in this request.

    num_domains: projections the checkpoint has.  raw_dim: channels the caller names; needed for an
        id alone and for a domain whose data set decides.
    Raises: RequestError listing the domains.

    >>> domain_of("droid_lerobot", 32)
    Domain(name='droid_lerobot', id=8, raw_dim=10)
    >>> domain_of(8, 32, raw_dim=8).raw_dim
    8
    """
    if is_integer(value):
        found = Domain(f"domain {value}", int(value), None)
    else:
        name = value.lower().strip() if isinstance(value, str) else None
        if name is None or name not in DOMAINS:
            raise RequestError(
                f"domain must be an id or one of {_listing(num_domains)}; got {value!r}."
                f"{did_you_mean(str(value), DOMAINS)} Name the robot's domain."
            )
        found = DOMAINS[name]
    if not 0 <= found.id < num_domains:
        raise RequestError(
            f"domain must have an id in [0, {num_domains}) of this checkpoint; got {found.id}. "
            f"It knows {_listing(num_domains)}."
        )
    width = found.raw_dim if raw_dim is None else raw_dim
    if width is None:
        raise RequestError(
            f"raw_action_dim must be given for {found.name}; got none. "
            "Send the channels of its actions."
        )
    if not is_integer(width) or width < 1:
        raise RequestError(
            f"raw_action_dim must be an integer of at least 1; got {width!r}. "
            "Send the channels of an action."
        )
    return Domain(found.name, found.id, int(width))


def _listing(num_domains: int) -> str:
    return ", ".join(f"{d.name} ({d.id})" for d in DOMAINS.values() if d.id < num_domains)
