"""Reads ``processor_config.json`` and its two companions into checked settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phyai.errors import CheckpointError, CheckpointNotFound
from phyai.json_files import read_json_object
from phyai.models.gr00t.processing.embodiments import parse_ids
from phyai.models.gr00t.processing.images import ImageRecipe
from phyai.models.gr00t.processing.modality import EmbodimentModalities
from phyai.models.gr00t.processing.statistics import Statistics, parse_statistics

CONFIG = "processor_config.json"
STATISTICS = "statistics.json"
IDS = "embodiment_id.json"
FOLDER = "processor"
PROCESSOR_CLASS = "Gr00tN1d7Processor"
# Flag -> value when the file has none.
FLAGS = {
    "formalize_language": True,
    "use_percentiles": False,
    "clip_outliers": True,
    "apply_sincos_state_encoding": False,
    "use_relative_action": False,
    "exclude_state": False,
}
_SIZES = ("max_state_dim", "max_action_dim", "max_action_horizon")


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """Settings of one checkpoint's processor; names as in ``processor_kwargs``.

    modalities: by embodiment tag.  ids: ``embodiment_id.json``.
    sizes: max_state_dim and the like, where the file has them.
    """

    modalities: Mapping[str, EmbodimentModalities]
    statistics: Mapping[str, Statistics]
    ids: Mapping[str, int] = field(default_factory=dict)
    recipe: ImageRecipe = field(default_factory=ImageRecipe)
    sizes: Mapping[str, int] = field(default_factory=dict)
    formalize_language: bool = True
    use_percentiles: bool = False
    clip_outliers: bool = True
    apply_sincos_state_encoding: bool = False
    use_relative_action: bool = False
    exclude_state: bool = False

    @classmethod
    def from_json(
        cls,
        kwargs: Mapping[str, Any],
        statistics: Mapping[str, Any],
        ids: Mapping[str, Any] | None = None,
    ) -> ProcessorSettings:
        """Return the settings of ``processor_kwargs`` and its companions.

        Raises: CheckpointError naming the field that is missing or of another form.
        """
        configs = kwargs.get("modality_configs")
        if not isinstance(configs, Mapping) or not configs:
            raise CheckpointError(
                f"{CONFIG} must hold modality_configs with at least one embodiment; got "
                f"{configs!r}. Download it again."
            )
        return cls(
            {tag: EmbodimentModalities.from_json(tag, data) for tag, data in configs.items()},
            parse_statistics(statistics),
            parse_ids(ids or {}),
            ImageRecipe.from_settings(kwargs),
            {name: _size(kwargs, name) for name in _SIZES if kwargs.get(name) is not None},
            **{name: _flag(kwargs, name, default) for name, default in FLAGS.items()},
        )


def find_folder(folder: Path | None, processor_dir: Path | None) -> Path | None:
    """Return where the processor's files are: ``processor_dir``, the checkpoint, its ``processor``.

    None when a checkpoint has none.  Raises: CheckpointNotFound for a ``processor_dir`` without.
    """
    if processor_dir is not None:
        places = [processor_dir, processor_dir / FOLDER]
    else:
        places = [] if folder is None else [folder, folder / FOLDER]
    found = next((place for place in places if (place / CONFIG).is_file()), None)
    if found is None and processor_dir is not None:
        raise CheckpointNotFound(
            f"processor_dir must hold {CONFIG}; {str(processor_dir)!r} has none. Check the path."
        )
    return found


def read_settings(folder: Path, overrides: Mapping[str, Any]) -> ProcessorSettings:
    """Return the settings in ``folder``; ``overrides`` replace keys of ``processor_kwargs``.

    Raises: CheckpointError and its kinds.
    """
    data = read_json_object(folder / CONFIG)
    kind = data.get("processor_class", PROCESSOR_CLASS)
    kwargs = data.get("processor_kwargs")
    if kind != PROCESSOR_CLASS or not isinstance(kwargs, dict):
        raise CheckpointError(
            f"{folder / CONFIG} must be of {PROCESSOR_CLASS} with processor_kwargs; got "
            f"{kind!r}. Use a checkpoint of GR00T N1.7."
        )
    ids = folder / IDS
    return ProcessorSettings.from_json(
        {**kwargs, **overrides},
        read_json_object(folder / STATISTICS),
        read_json_object(ids) if ids.is_file() else None,
    )


def _flag(data: Mapping[str, Any], name: str, default: bool) -> bool:
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{name} must be true or false; got {value!r}. Correct {CONFIG}.")
    return value


def _size(data: Mapping[str, Any], name: str) -> int:
    value = data[name]
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"{name} must be a positive integer; got {value!r}. Correct {CONFIG}."
        )
    return value
