"""What openpi keeps in its training configs and inference needs, as data.

A converted openpi checkpoint does not say which config made it, so users name it.
Source: openpi training config table; values as published, not inferred.
"""

from __future__ import annotations

from dataclasses import dataclass

from phyai.errors import ConfigError, did_you_mean
from phyai.models.pi.config import Model


@dataclass(frozen=True, slots=True)
class OpenpiConfig:
    """One openpi training config.

    state_in_prompt: the state is part of the text. delta_mask: run lengths, positive =
    relative dims (see ``normalize.make_bool_mask``); None = all actions absolute.
    """

    name: str
    model: Model
    horizon: int
    robot: str | None = None
    state_in_prompt: bool = False
    delta_mask: tuple[int, ...] | None = None
    asset_id: str | None = None
    default_prompt: str | None = None


_TWO_ARMS = (6, -1, 6, -1)
_LIBERO_ASSET = "physical-intelligence/libero"


def _aloha(name: str, model: Model, prompt: str | None = None) -> OpenpiConfig:
    return OpenpiConfig(name, model, 50, "aloha", model == "pi05", _TWO_ARMS, "trossen", prompt)


_CONFIGS = (
    _aloha("pi0_aloha", "pi0"),
    _aloha("pi05_aloha", "pi05"),
    _aloha("pi0_aloha_towel", "pi0", "fold the towel"),
    _aloha("pi0_aloha_tupperware", "pi0", "open the tupperware and put the food on the plate"),
    _aloha("pi0_aloha_pen_uncap", "pi0", "uncap the pen"),
    _aloha("pi05_aloha_pen_uncap", "pi05", "uncap the pen"),
    OpenpiConfig("pi0_aloha_sim", "pi0", 50, "aloha_sim", default_prompt="Transfer cube"),
    OpenpiConfig("pi0_droid", "pi0", 10, "droid", asset_id="droid"),
    OpenpiConfig("pi05_droid", "pi05", 15, "droid", True, asset_id="droid"),
    OpenpiConfig("pi05_full_droid_finetune", "pi05", 16, "droid_joint_position", True, (7, -1)),
    OpenpiConfig("pi05_droid_finetune", "pi05", 16, "droid", True),
    OpenpiConfig("pi0_libero", "pi0", 50, "libero", False, (6, -1), _LIBERO_ASSET),
    OpenpiConfig("pi05_libero", "pi05", 10, "libero", False, None, _LIBERO_ASSET),
)
OPENPI_CONFIGS: dict[str, OpenpiConfig] = {config.name: config for config in _CONFIGS}


def get_openpi_config(name: str, model: str) -> OpenpiConfig:
    """Return the openpi training config ``name`` of ``model``.

    Raises: ConfigError for an unknown name, or one of the other model.
    """
    mine = sorted(config.name for config in _CONFIGS if config.model == model)
    config = OPENPI_CONFIGS.get(name)
    if config is None or config.model != model:
        hint = did_you_mean(name, mine) if config is None else ""
        raise ConfigError(
            f"openpi config of a {model} checkpoint must be one of {', '.join(mine)}; got "
            f"{name!r}.{hint} Choose one of them."
        )
    return config
