"""A config.json with values of the wrong kind is refused by the field's name, whatever they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from phyai.errors import CheckpointError, ConfigError
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from tests.minicpm.minicpm_engines import ROOT

ODD: tuple[Any, ...] = (None, "x", -1, 0, 1.5, True, [], {}, [1, "a"], float("nan"), 10**12)
NUMBERS = ("layer_norm_eps", "rms_norm_eps", "rope_theta", "partial_rotary_factor")


def paths(data: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in data.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


CONFIG = json.loads((ROOT / "config.json").read_text("utf-8"))
FIELDS = [".".join(path) for path in paths(CONFIG)]


def read(folder: Path, field: str, value: Any) -> MiniCPMRobotConfig:
    data = json.loads(json.dumps(CONFIG))
    part, *path = data, *field.split(".")
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(data), "utf-8")
    return MiniCPMRobotConfig.from_folder(folder)


@pytest.mark.parametrize("field", FIELDS)
def test_odd_values_are_taken_or_refused(field: str, tmp_path: Path) -> None:
    for value in ODD:
        with suppress(CheckpointError, ConfigError):
            read(tmp_path, field, value)


@pytest.mark.parametrize("field", [name for name in FIELDS if name.endswith(NUMBERS)])
def test_numbers_must_be_finite_and_above_zero(field: str, tmp_path: Path) -> None:
    for value in ("1", -1, 0, True, [], {}, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=field.split(".")[-1]):
            read(tmp_path, field, value)


@pytest.mark.parametrize("value", ["x", 3, [1, 2], [1, 2, -1], [1, 2, "a"], [1, 2, True], {}])
def test_sections_are_three_counts(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mrope_section"):
        read(tmp_path, "text_config.rope_parameters.mrope_section", value)


@pytest.mark.parametrize("value", ["linear_attention", 8, [1] * 8, [["a"]] * 8, {}])
def test_layer_types_are_a_list_of_names(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layer_types"):
        read(tmp_path, "text_config.layer_types", value)


def test_a_switch_is_true_or_false(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add_pos_embed"):
        read(tmp_path, "action_head_cfg.add_pos_embed", "yes")


def test_null_means_the_released_value(tmp_path: Path) -> None:
    assert read(tmp_path, "text_config.rope_parameters.rope_theta", None).text.rope_theta == 1e7
