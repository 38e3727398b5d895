"""Host side of generation: prompts, images and clips to model requests, and media back."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phyai import hub
from phyai.errors import RequestError
from phyai.models.cosmos3.args import Cosmos3Args
from phyai.models.cosmos3.checkpoint_files import (
    SOUND_FOLDER,
    VAE_FOLDER,
    text_tokenizer,
    uses_system_prompt,
)
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.downloads import FILES
from phyai.models.cosmos3.processing.aspects import tell_aspect
from phyai.models.cosmos3.processing.canvas import aspect_label
from phyai.models.cosmos3.processing.checks import check_flag, check_fps
from phyai.models.cosmos3.processing.conditions import (
    Keep,
    check_indexes,
    check_keep,
    cover,
    given_frames,
)
from phyai.models.cosmos3.processing.frames import clip_of, frame_of, to_signed
from phyai.models.cosmos3.processing.generation import (
    DEFAULTS,
    Defaults,
    check_frames,
    check_size,
    latent_shape,
    mode_of,
    named_size,
    sound_frames,
    sound_samples,
)
from phyai.models.cosmos3.request import Cosmos3T2VRequest
from phyai.models.cosmos3.sound.config import SoundConfig
from phyai.models.cosmos3.text.prompts import (
    check_prompt,
    generation_prompt,
    negative_prompt,
    system_prompt,
)
from phyai.models.cosmos3.text.tokenizer import TextTokenizer
from phyai.models.cosmos3.vae.config import VAEConfig
from phyai.models.cosmos3.vae.pixels import as_bytes
from phyai.types import Media

IMAGE, VIDEO = "image", "video"
AUTO = "auto"
CUT = "cut at its edges. Ask for height and width of the picture's aspect ratio"


@dataclass(frozen=True, slots=True)
class SoundFormat:
    """Rates of a sound decoder: samples per second, and samples in one frame of its latent."""

    sampling_rate: int
    hop: int


@dataclass(frozen=True, slots=True)
class MediaRow:
    """What is kept of a prompt until its media are there.  fps: None for a still."""

    prompt: str
    frames: int
    fps: float | None
    sound: SoundFormat | None

    @property
    def samples(self) -> int:
        """Samples of the sound, as long as the video."""
        assert self.sound is not None
        assert self.fps is not None
        return sound_samples(self.frames, self.fps, self.sound.sampling_rate)


class Cosmos3Processor:
    """Turns prompts into Cosmos3T2VRequest. Host only, immutable, safe to share between threads.

    >>> Cosmos3Processor.from_checkpoint("DIR")("a robot stacks cups", num_frames=57)
    ... # doctest: +SKIP
    """

    def __init__(
        self,
        config: Cosmos3Config,
        tokenizer: TextTokenizer | None,
        args: Cosmos3Args,
        vae: VAEConfig | None = None,
        *,
        sound: SoundFormat | None = None,
        system: bool = True,
    ) -> None:
        self.config, self.tokenizer, self.args = config, tokenizer, args
        self.vae, self.sound = vae or VAEConfig(), sound
        self.system = system if args.system_prompt is None else args.system_prompt

    @classmethod
    def from_checkpoint(cls, checkpoint_dir: str | Path, **changes: Any) -> Cosmos3Processor:
        """Return the processor of a checkpoint's files; changes: fields of Cosmos3Args.

        Raises: CheckpointError and its kinds, ConfigError.
        """
        args = Cosmos3Args(checkpoint_dir=checkpoint_dir, **changes)
        folder = hub.resolve(checkpoint_dir, revision=args.revision, allow=FILES)
        config = args.config or Cosmos3Config.from_folder(folder)
        return cls(
            config,
            text_tokenizer(folder, config, args.max_text_tokens),
            args,
            VAEConfig.from_folder(folder / VAE_FOLDER),
            sound=sound_format(folder),
            system=uses_system_prompt(folder),
        )

    def __call__(self, prompt: str, **options: Any) -> Cosmos3T2VRequest:
        """Return the request of one prompt; options as in ``row``."""
        return self.row(prompt, **options)[0]

    def row(
        self,
        prompt: Any,
        *,
        negative_prompt: str | None = None,
        image: Any = None,
        video: Any = None,
        num_frames: int | None = None,
        fps: float | None = None,
        height: int | None = None,
        width: int | None = None,
        resolution: int | str | None = None,
        aspect_ratio: str | None = None,
        sound: bool | str = False,
        cond_frame_indexes: Any = None,
        condition_video_keep: str = "first",
        num_steps: int | None = None,
        guidance_scale: float | None = None,
        flow_shift: float | None = None,
        schedule: str | None = None,
        guidance_interval: tuple[int, int] | None = None,
        seed: int | None = None,
        noise: Mapping[str, Any] | None = None,
    ) -> tuple[Cosmos3T2VRequest, MediaRow]:
        """Return the request of one prompt, and what is needed to make media of its result.

        image: the first frame, uint8 [h, w, 3].  video: its beginning, uint8 [T, h, w, 3].
        num_frames: 1 + 4k; 1 is a still.  height, width: multiples of 16 pixels; or resolution, a
        tier such as 480, with aspect_ratio such as "16:9".  sound: also make its sound; "auto": of
        videos, where the checkpoint has sound.
        condition_video_keep: ``first`` or ``last`` frames of a longer video.
        What is None has the mode's default. Raises: RequestError.
        """
        temporal, side = self.vae.scale_factor_temporal, self.vae.scale_factor_spatial
        frames = self._default("num_frames", num_frames, DEFAULTS["t2v"].frames)
        frames = check_frames(frames, temporal)
        mode = mode_of(frames=frames, image=image is not None, video=video is not None)
        usual = DEFAULTS[mode]
        rate = None if frames == 1 else check_fps(usual.fps if fps is None else fps)
        sound, keep = self._with_sound(sound, frames), check_keep(condition_video_keep)
        size = check_size(*self._size(usual, height, width, resolution, aspect_ratio), side)
        facts: dict[str, Any] = {
            "frames": frames,
            "fps": rate,
            "height": size[0],
            "width": size[1],
        }
        text = generation_prompt(_required(prompt), **facts)
        shape = latent_shape(frames, *size, temporal=temporal, scale=side)
        indexes, pixels = self._given(image, video, size, shape[0], cond_frame_indexes, keep)
        scale = usual.guidance_scale if guidance_scale is None else guidance_scale
        scale = self._default("guidance_scale", guidance_scale, scale)
        request = Cosmos3T2VRequest(
            text_ids=self._ids(text, frames),
            neg_text_ids=self._ids(_negative(negative_prompt, facts), frames, "negative_prompt"),
            video_shape=shape,
            fps=rate,
            num_inference_steps=self._default("num_steps", num_steps, usual.num_steps),
            guidance_scale=scale,
            seed=seed,
            noise=noise,
            flow_shift=usual.flow_shift if flow_shift is None else flow_shift,
            schedule=self._default("schedule", schedule, "native"),
            guidance_interval=guidance_interval,
            cond_frame_indexes=indexes,
            cond_video_pixels=pixels,
            sound_frames=self._sound(frames, rate) if sound else None,
            sound_dim=self.config.sound_dim,
            sound_latent_fps=self.config.sound_latent_fps,
        )
        return request, MediaRow(text, frames, rate, self.sound if sound else None)

    def _size(self, usual: Defaults, height: Any, width: Any, *named: Any) -> tuple[Any, Any]:
        """Return height and width of the options, else the engine's, else the mode's."""
        if any(value is not None for value in (height, width, *named)):
            return _size(usual, height, width, *named)
        own = self.args.height, self.args.width
        return usual.size if own[0] is None else own

    def _default(self, name: str, given: Any, usual: Any) -> Any:
        """Return an option, else the engine's argument, else the mode's default."""
        if given is not None:
            return given
        own = getattr(self.args, name)
        return usual if own is None else own

    def _given(
        self,
        image: Any,
        video: Any,
        size: tuple[int, int],
        latents: int,
        wanted: Any,
        keep: Keep,
    ) -> tuple[tuple[int, ...], Tensor | None]:
        """Return the latent frames that are given and the pixels they are encoded from."""
        if image is not None:
            if wanted is not None and check_indexes(wanted, latents) != (0,):
                raise RequestError(
                    f"cond_frame_indexes must be [0] with an image; got {wanted!r}. Leave it out, "
                    "or send a video."
                )
            frame = frame_of(IMAGE, image)
            tell_aspect(f"image {IMAGE!r}", frame.shape[:2], size, CUT)
            return (0,), to_signed(cover(frame, size)[None])[None]
        if video is None:
            if wanted is not None and not (isinstance(wanted, Sized) and len(wanted) == 0):
                raise RequestError(
                    f"cond_frame_indexes must come with a video; got {wanted!r} alone. "
                    "Send the video."
                )
            return (), None
        indexes = check_indexes(wanted, latents)
        clip = given_frames(
            clip_of(VIDEO, video),
            indexes,
            keep=keep,
            temporal=self.vae.scale_factor_temporal,
        )
        return indexes, to_signed(cover(clip, size))[None]

    @property
    def has_sound(self) -> bool:
        return self.sound is not None and self.config.sound_gen

    def _with_sound(self, sound: Any, frames: int) -> bool:
        """Return whether a request is made with sound."""
        if isinstance(sound, str) and sound == AUTO:
            return self.has_sound and frames > 1
        if isinstance(sound, str):
            raise RequestError(
                f"sound must be true, false or {AUTO!r}; got {sound!r}. Send one of them."
            )
        return check_flag("sound", sound)

    def _sound(self, frames: int, fps: float | None) -> int:
        if self.sound is None or not self.has_sound:
            raise RequestError(
                "sound must be left out with this checkpoint, which has no sound_tokenizer or no "
                "sound head; got sound=True. Use a checkpoint with sound."
            )
        if fps is None:
            raise RequestError(
                "sound must be left out of a still; got sound=True. Ask for more frames."
            )
        rates = self.sound
        return sound_frames(frames, fps, sampling_rate=rates.sampling_rate, hop=rates.hop)

    def _ids(self, text: str, frames: int, name: str = "prompt") -> Tensor:
        if self.tokenizer is None:
            raise RequestError(
                "prompts need the checkpoint's text_tokenizer folder; got an engine without one. "
                "Send model requests with token ids."
            )
        system = system_prompt(frames) if self.system else None
        return torch.from_numpy(self.tokenizer.encode(text, system, name))[None]


class Cosmos3GenerationPostProcessor:
    """Turns decoded pixels and waveforms into Media.

    >>> make = Cosmos3GenerationPostProcessor()
    >>> [still] = make(torch.zeros(1, 3, 1, 16, 32))
    >>> still.kind, still.data.shape
    ('image', (16, 32, 3))
    """

    def __call__(
        self, result: Tensor | Mapping[str, Any], *, fps: float | None = None
    ) -> list[Media]:
        """Return one Media per row of what a Cosmos3T2VRequest gave."""
        parts = result if isinstance(result, Mapping) else {"video": result}
        rows = []
        for i, pixels in enumerate(parts["video"]):
            sound = None
            if "sound" in parts:
                sound = sound_media(parts["sound"][i], int(parts["sample_rate"]))
            frames = as_bytes(pixels * 2.0 - 1.0).permute(1, 2, 3, 0).contiguous()
            rows.append(video_media(frames.cpu().numpy(), fps, sound=sound))
        return rows


def video_media(
    frames: np.ndarray,
    fps: float | None,
    *,
    sound: Media | None = None,
    info: Mapping[str, Any] | None = None,
) -> Media:
    """Return frames uint8 [F, H, W, 3] as a video, a single one as an image."""
    if len(frames) == 1:
        return Media("image", frames[0], None, info=info or {})
    return Media("video", frames, fps, info=info or {}, sound=sound)


def sound_media(waveform: Tensor, rate: int, samples: int | None = None) -> Media:
    """Return a waveform [channels, samples] as a sound, cut to ``samples``."""
    cut = waveform[:, :samples].float().cpu().numpy().T
    return Media("sound", np.ascontiguousarray(cut), float(rate))


def sound_format(folder: Path) -> SoundFormat | None:
    """Return the rates of a checkpoint's sound decoder, None when it has none."""
    inner = folder / SOUND_FOLDER
    if not inner.is_dir():
        return None
    config = SoundConfig.from_folder(inner)
    return SoundFormat(config.sampling_rate, config.hop_size)


def _size(usual: Defaults, height: Any, width: Any, tier: Any, aspect: Any) -> tuple[Any, Any]:
    """Return height and width of the options, or the mode's."""
    if (height is None) != (width is None):
        raise RequestError(
            f"height and width must be given together; got {height!r} and {width!r}. Send both."
        )
    if height is not None:
        if tier is not None or aspect is not None:
            raise RequestError(
                "size must be height and width, or resolution and aspect_ratio; got both. "
                "Send one of them."
            )
        return height, width
    named = aspect_label(*usual.size) if aspect is None else aspect
    return named_size(720 if tier is None else tier, named)


def _negative(text: str | None, facts: Mapping[str, Any]) -> str:
    return negative_prompt(text, **facts)


def _required(prompt: Any) -> str:
    if prompt is None:
        raise RequestError("prompt must be sent; got none. Describe what should be seen.")
    return check_prompt(prompt)
