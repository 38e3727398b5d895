"""A run on disk: its observation, result, configuration and timing, to look at or to repeat."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.cli import console
from phyai.config_mapping import export, to_mapping
from phyai.config_yaml import dump_yaml
from phyai.errors import ConfigError

if TYPE_CHECKING:
    from phyai.engine_config import EngineConfig
    from phyai.types import ActionChunk, Observation

MARKER = "record.json"
FORMAT = "phyai-record/1"


def check_folder(folder: Path, *, force: bool) -> None:
    """Raise ConfigError for a file, and for a folder with other things in it unless forced."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--record must name a folder; got the file {str(folder)!r}.")
    if folder.is_dir() and any(folder.iterdir()) and not is_record(folder) and not force:
        raise ConfigError(
            f"--record must name a new, an empty or a record folder; got {str(folder)!r}, which "
            "holds other files. Choose another one, or write into it with --force."
        )
    console.check_writable("--record", folder, folder=True)


def is_record(folder: Path) -> bool:
    """Return whether an earlier run was recorded there."""
    try:
        data = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.get("format") == FORMAT


def write_record(
    folder: Path,
    *,
    observation: Observation,
    chunk: ActionChunk,
    plugin: str,
    args: Any,
    config: EngineConfig,
    facts: Mapping[str, Any],
) -> None:
    """Write one run; files of an earlier record are replaced.

    observation.json and images/*.png; result.npz (actions, model_actions, mask) and result.json
    (names, units, rate); config.yaml, which `phyai config` reads; timing.json; record.json.
    """
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    if is_record(folder):
        for old in (folder / "images").glob("*.png"):
            old.unlink()
    (folder / MARKER).unlink(missing_ok=True)  # a run that stops half-way leaves no record
    _write_json(folder / "observation.json", _observation(observation, folder / "images"))
    np.savez(
        folder / "result.npz",
        actions=chunk.actions,
        model_actions=chunk.model_actions,
        mask=chunk.mask,
    )
    result = {
        "names": list(chunk.names),
        "units": list(chunk.units),
        "control_hz": chunk.control_hz,
        "horizon": chunk.horizon,
        "info": {key: _plain(value) for key, value in chunk.info.items()},
    }
    _write_json(folder / "result.json", result)
    _write_json(folder / "timing.json", {"unit": "ms", **facts.get("timing", {})})
    settings = {
        "plugin": plugin,
        "plugin_args": changed_args(args),
        "config": to_mapping(config, "config"),
    }
    (folder / "config.yaml").write_text(dump_yaml(settings), encoding="utf-8")
    about = {key: value for key, value in facts.items() if key != "timing"}
    _write_json(folder / MARKER, {"format": FORMAT, **about})


def changed_args(args: Any) -> dict[str, Any]:
    """Return the arguments that differ from their defaults, as far as YAML can hold them."""
    found: dict[str, Any] = {}
    for f in dataclasses.fields(args):
        value = getattr(args, f.name)
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if not f.init or value is default or value == default:
            continue
        try:
            found[f.name] = export(value, f"plugin_args.{f.name}")
        except ConfigError:  # a function or a tensor: only Python can give it again
            continue
    return found


def _observation(observation: Observation, folder: Path) -> dict[str, Any]:
    files: dict[str, str] = {}
    for camera, image in observation.images.items():
        folder.mkdir(exist_ok=True)
        name = f"{len(files)}_{re.sub(r'[^A-Za-z0-9_.-]+', '_', str(camera))}.png"
        _as_picture(image).save(folder / name)
        files[str(camera)] = f"{folder.name}/{name}"
    state = observation.state
    return {
        "images": files,
        "state": None if state is None else _plain(state),
        "prompt": observation.prompt,
        "options": {key: _plain(value) for key, value in observation.options.items()},
    }


def _as_picture(image: Any) -> Any:
    """Return an image as a PIL picture; floats in [0, 1] are rounded to 8 bits."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(image)
    if pixels.ndim == 3 and pixels.shape[0] == 3 and pixels.shape[2] != 3:
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.dtype != np.uint8:
        pixels = np.clip(np.rint(pixels.astype(np.float64) * 255.0), 0, 255).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(pixels))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
