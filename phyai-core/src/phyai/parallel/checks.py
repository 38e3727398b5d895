"""Refuses sizes of parallel axes that an adapter does not implement."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from phyai.errors import ConfigError, PluginContractError
from phyai.parallel.mesh import AXES, Mesh

BRANCHES = 2
CONFIG_NAMES: Mapping[str, str] = {"tp": "tp_size", "cfg": "cfg_size"}


def check_axes(mesh: Mesh, plugin: str, declared: Collection[str]) -> None:
    """Check a mesh against the axes an adapter declares in ``Adapter.parallel``.

    Raises: ConfigError for an axis of size > 1 that is not declared, with what is supported, or for
        more cfg ranks than there are guidance branches; PluginContractError when the adapter
        declares an axis that does not exist.

    >>> from phyai.parallel import Mesh, check_axes
    >>> check_axes(Mesh(tp=2), "mine", {"tp"})
    """
    unknown = sorted(set(declared) - set(AXES))
    if unknown:
        raise PluginContractError(
            f"parallel axes of plugin {plugin!r} must be among {', '.join(AXES)}; got "
            f"{', '.join(map(repr, unknown))}. Fix Adapter.parallel."
        )
    if mesh.cfg > BRANCHES:
        raise ConfigError(
            f"cfg_size must be 1 or {BRANCHES}, as there are two guidance branches; got "
            f"{mesh.cfg}. Share the layers over more ranks with tp_size."
        )
    wanted = [axis for axis in AXES if getattr(mesh, axis) > 1 and axis not in declared]
    if not wanted:
        return
    named = " and ".join(f"{CONFIG_NAMES[axis]} {getattr(mesh, axis)}" for axis in wanted)
    supported = ", ".join(CONFIG_NAMES[axis] for axis in AXES if axis in declared) or "none"
    raise ConfigError(
        f"plugin {plugin!r} must implement a parallel axis of more than one rank; got {named}, "
        f"supported: {supported}. Set it to 1, or use deployment.replica_count for more copies."
    )
