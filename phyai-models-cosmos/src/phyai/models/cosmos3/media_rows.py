"""Rows of a model request: what generation and policy requests have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phyai.errors import RequestError
from phyai.models.cosmos3.args import CheckpointArgs
from phyai.models.cosmos3.batch import HostRow, Known
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.processing.checks import check_integer
from phyai.models.cosmos3.request import Cosmos3Request, has_media
from phyai.models.cosmos3.request_rows import (
    count_rows,
    fps_of,
    known_video,
    latent_indexes,
    noise_of,
    scales_of,
    texts,
    video_shape_of,
)

MAX_SOUND_FRAMES = 65536


@dataclass(frozen=True, slots=True)
class ActionRows:
    """The action half of every row.

    chunk: action rows of the network.  known: mask and values, and domains: one per row.
    start: frame of action row 0.  raw_dim: channels in use.
    """

    chunk: int
    known: Sequence[Known]
    domains: Sequence[int]
    start: int
    raw_dim: int


def media_rows(
    request: Cosmos3Request,
    config: Cosmos3Config,
    args: CheckpointArgs,
    scale: tuple[int, int],
    *,
    latents: Any,
    pixels: Any,
    usual: Sequence[int],
    actions: ActionRows | None = None,
) -> list[HostRow]:
    """Return the rows of a request.

    scale: pixels of a latent along time and along a side.  latents, pixels: what the video starts
    from.  usual: latent frames that are given when the request names none.
    Raises: RequestError.
    """
    rows = count_rows(request, args)
    shape, fps = video_shape_of(request, config), fps_of(request)
    scales = scales_of(request.guidance_scale, rows)
    tokens, uncond = texts(request, config, args, scales)
    given, clips = known_video(
        latents,
        pixels,
        _indexes(request, usual, shape[0]),
        rows=rows,
        channels=config.latent_channel,
        shape=shape,
        scale=scale,
    )
    shapes: dict[str, tuple[int, ...]] = {"video": (config.latent_channel, *shape)}
    if actions is not None:
        shapes["action"] = (actions.chunk, config.action_dim)
    if sound := sound_frames_of(request, config):
        shapes["sound"] = (config.sound_dim, sound)
    noise = noise_of(request, shapes, rows)
    found = []
    for i in range(rows):
        known: dict[str, Known] = {}
        if (video := given[i]) is not None:
            known["video"] = video
        if actions is not None:
            known["action"] = actions.known[i]
        found.append(
            HostRow(
                tokens=tokens[i],
                uncond=uncond[i],
                shape=shape,
                fps=fps,
                scale=scales[i],
                noise=noise[i],
                known=known,
                pixels=clips[i],
                domain=None if actions is None else actions.domains[i],
                action_start=0 if actions is None else actions.start,
                raw_dim=0 if actions is None else actions.raw_dim,
            )
        )
    return found


def sound_frames_of(request: Any, config: Cosmos3Config) -> int:
    """Return the frames of the sound latent, 0 without sound.  Raises: RequestError."""
    if not request.sound_frames:
        return 0
    if not config.sound_gen:
        raise RequestError(
            f"sound_frames must be left out with a checkpoint without sound heads; got "
            f"{request.sound_frames}. Leave it out."
        )
    for name in ("sound_dim", "sound_latent_fps"):
        asked, own = getattr(request, name, None), getattr(config, name)
        if asked is not None and asked != own:
            raise RequestError(
                f"{name} must be {own:g}, as the checkpoint's; got {asked!r}. Leave it out."
            )
    return check_integer("sound_frames", request.sound_frames, 1, MAX_SOUND_FRAMES)


def _indexes(request: Cosmos3Request, usual: Sequence[int], frames: int) -> tuple[int, ...]:
    named = request.cond_frame_indexes
    indexes = latent_indexes(usual if named is None else named, frames)
    if not indexes and has_media(request):
        raise RequestError(
            "cond_frame_indexes must name the latent frames that are given; got none beside "
            "latents or pixels. Send (0,) for an image."
        )
    return indexes
