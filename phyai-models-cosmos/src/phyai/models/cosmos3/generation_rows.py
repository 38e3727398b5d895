"""Splits a Cosmos3T2VRequest into checked rows."""

from __future__ import annotations

from phyai.models.cosmos3.args import CheckpointArgs
from phyai.models.cosmos3.batch import HostRow
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.media_rows import media_rows
from phyai.models.cosmos3.request import Cosmos3T2VRequest


def generation_rows(
    request: Cosmos3T2VRequest,
    config: Cosmos3Config,
    args: CheckpointArgs,
    scale: tuple[int, int],
) -> list[HostRow]:
    """Return the rows of a request.  scale: pixels of a latent along time and along a side.

    Raises: RequestError.
    """
    return media_rows(
        request,
        config,
        args,
        scale,
        latents=request.cond_latents,
        pixels=request.cond_video_pixels,
        usual=(),
    )
