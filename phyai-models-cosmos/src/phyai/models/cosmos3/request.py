"""Model requests: token ids, latents or pixels, and how to sample; tensors rows first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from phyai.models.cosmos3.processing.generation import latent_shape

Noise: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True)
class Cosmos3Request:
    """What both kinds of request have.

    text_ids, text_mask: int64 [B, S], mask 0 for padding on the right; None = no padding.
    neg_text_ids, neg_text_mask: of the unconditional branch; needed where guidance_scale is not 1.
    video_shape: frames, height and width of the latent.
    cond_frame_indexes: latent frames that are given.  cond_latents, cond_video_latents: float
        [B, C, T, h, w], normalised; cond_video_pixels: float [B, 3, F, H, W] in [-1, 1], of which
        only the frames needed are encoded.
    fps: frames per second; None for stills.
    seed: each kind of media draws its own noise from it.  noise: by kind (video, action, sound),
        rows first; kinds it does not hold are drawn.
    flow_shift, schedule: None = the engine's arguments.  sigmas: noise levels, falling, without the
        final 0; they replace schedule, shift and number of steps.
    guidance_scale: one number, or one per row.
    guidance_interval: timesteps (low, high) in 0..1000; a step strictly between is guided.
    """

    text_ids: Tensor
    text_mask: Tensor | None = None
    neg_text_ids: Tensor | None = None
    neg_text_mask: Tensor | None = None
    video_shape: tuple[int, int, int] | None = None
    fps: float | None = 24.0
    num_inference_steps: int = 35
    guidance_scale: float | Sequence[float] | Tensor = 1.0
    seed: int | None = 42
    cond_frame_indexes: Sequence[int] | None = None
    noise: Noise | None = None
    flow_shift: float | None = None
    schedule: str | None = None
    sigmas: Sequence[float] | None = None
    guidance_interval: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            # A range, say, which cannot travel to another process.
            if isinstance(value, Sequence) and not isinstance(value, (str, bytes, list, tuple)):
                object.__setattr__(self, name, tuple(value))


@dataclass(frozen=True)
class Cosmos3T2VRequest(Cosmos3Request):
    """Generation: text, image or video to video, text to image, with or without sound.

    cond_frame_indexes: () or None: nothing is given. Frame 0: image to video. Frames 0 and 1: video
        to video. With latents or pixels to take them from.
    sound_frames: of the sound latent; None or 0 = no sound.  sound_dim, sound_latent_fps: None =
        the checkpoint's, and no other.
    Result: pixels float32 [B, 3, F, H, W] in [0, 1]; with sound a mapping of ``video``, ``sound``
        float32 [B, channels, samples] and ``sample_rate``.

    >>> import torch
    >>> from phyai.models.cosmos3 import Cosmos3T2VRequest
    >>> ids = torch.tensor([[257, 5, 258]])
    >>> Cosmos3T2VRequest(ids, neg_text_ids=ids, video_shape=(3, 6, 10)).guidance_scale
    6.0
    """

    guidance_scale: float | Sequence[float] | Tensor = 6.0
    cond_latents: Tensor | None = None
    cond_video_pixels: Tensor | None = None
    sound_frames: int | None = None
    sound_dim: int | None = None
    sound_latent_fps: float | None = None


@dataclass(frozen=True)
class Cosmos3ActionRequest(Cosmos3Request):
    """Actions from video, or video from actions.

    mode: ``policy`` (frame 0 given), ``forward_dynamics`` (frame 0 and all actions given) or
        ``inverse_dynamics`` (all frames given). cond_frame_indexes and cond_action_indexes override
        what it implies.
    domain_id: the embodiment, one for all rows or one per row.
    action_chunk: action rows of the network, state rows included.  raw_action_dim: channels in use;
        the others, up to action_dim, are held at zero.
    cond_action: float [B, rows, raw_action_dim or action_dim], model units: the rows named by
        cond_action_indexes, or all of them.
    action_start_frame_offset: 1 when row 0 leads from frame 0 to frame 1, 0 when it is the state at
        frame 0, below 0 with rows from before.
    sound_frames: of the sound latent, where the engine has load_sound; None or 0 = no sound.
    Result: a mapping of ``action`` float32 [B, action_chunk, raw_action_dim], ``video_latents``
        [B, C, T, h, w], with sound ``sound_latents`` [B, channels, sound_frames], and, from an
        engine with decode_video, ``pixels`` [B, 3, F, H, W] in [0, 1].

    >>> import torch
    >>> from phyai.models.cosmos3 import Cosmos3ActionRequest
    >>> ids, latents = torch.tensor([[257, 5, 258]]), torch.zeros(1, 48, 9, 30, 52)
    >>> Cosmos3ActionRequest(
    ...     ids, video_shape=(9, 30, 52), cond_video_latents=latents, action_chunk=32,
    ...     domain_id=8, raw_action_dim=10, fps=15.0,
    ... ).mode
    'policy'
    """

    num_inference_steps: int = 30
    mode: str = "policy"
    domain_id: int | Sequence[int] | Tensor = 0
    action_chunk: int = 16
    raw_action_dim: int = 8
    action_dim: int | None = None
    cond_video_latents: Tensor | None = None
    cond_video_pixels: Tensor | None = None
    cond_action: Tensor | None = None
    cond_action_indexes: Sequence[int] | None = None
    action_start_frame_offset: int = 1
    sound_frames: int | None = None


def pixel_to_latent_shape(frames: int, height: int, width: int) -> tuple[int, int, int]:
    """Return frames, height and width of the latent of a clip.

    >>> pixel_to_latent_shape(33, 480, 832)
    (9, 30, 52)
    """
    return latent_shape(frames, height, width)


def has_media(request: Any) -> bool:
    """Return whether a request shows latents or pixels to start from."""
    names = ("cond_latents", "cond_video_latents", "cond_video_pixels")
    return any(getattr(request, name, None) is not None for name in names)
