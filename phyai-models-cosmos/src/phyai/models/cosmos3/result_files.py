"""Files of generated media: what the command line reads and writes (``phyai.media_files``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from phyai.errors import ConfigError
from phyai.models.cosmos3.args import configured
from phyai.models.cosmos3.media import (
    SUFFIXES,
    check_encoder,
    check_target,
    read_clip,
    write_results,
)
from phyai.models.cosmos3.processing.checks import check_fps
from phyai.types import ActionChunk, Media, Observation

VIDEO = "video"


class Cosmos3Files:
    """mp4 with sound, png, wav."""

    suffixes = (".mp4", ".mov", ".mkv", ".webm")

    def check(self, path: Path, request: Any, args: Any) -> None:
        options: Mapping[str, Any] = {}
        if isinstance(request, Observation):
            options = request.options
        if getattr(args, "decode_video", True) is False:
            raise ConfigError(
                "a video of the policy needs the argument decode_video; got false. Add "
                "--arg decode_video=true."
            )
        frames = options.get("num_frames", getattr(args, "num_frames", None))
        kind = "image" if frames == 1 else VIDEO
        check_target(path, SUFFIXES[kind], force=True)
        if kind == VIDEO:
            if options.get("fps") is not None:
                configured(check_fps, options["fps"])
            check_encoder(sound=bool(options.get("sound")))

    def write(self, path: Path, result: Any) -> None:
        write_results(path, _parts(result))

    def read(self, path: Path) -> np.ndarray:
        return read_clip(path).frames


def files() -> Cosmos3Files:
    """Return the files of this package's plugins."""
    return Cosmos3Files()


def _parts(result: Any) -> list[Media]:
    """Return what goes into one file: a video and its sound, an image, or a policy's video."""
    if isinstance(result, ActionChunk):
        return [Media("video", result.info[VIDEO], result.control_hz)]
    parts = [result] if result.sound is None else [result, result.sound]
    return list(parts)
