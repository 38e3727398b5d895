"""What Cosmos3 costs: stages by their sizes, requests of given sizes, published latencies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from math import ceil
from typing import Any

from phyai import hub
from phyai.cost import Figure, Published, StageCost, Workload
from phyai.errors import ConfigError
from phyai.models.cosmos3.args import CheckpointArgs, Cosmos3PolicyArgs
from phyai.models.cosmos3.checkpoint_files import VAE_FOLDER
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.downloads import FILES
from phyai.models.cosmos3.network.flops import (
    MediaTokens,
    evaluation_flops,
    evaluation_weights,
    kv_values,
    text_flops,
    text_weights,
    time_table_flops,
)
from phyai.models.cosmos3.processing.canvas import canvas_of
from phyai.models.cosmos3.processing.generation import DEFAULTS, latent_shape
from phyai.models.cosmos3.request import Cosmos3ActionRequest, Cosmos3T2VRequest
from phyai.models.cosmos3.robots import robot_settings
from phyai.models.cosmos3.vae.config import VAEConfig
from phyai.models.cosmos3.vae.flops import (
    decode_flops,
    decoder_weights,
    encode_flops,
    encoder_weights,
)

PUBLISHED_FILE = "published.json"
PROMPT_TOKENS, EMPTY_TOKENS = 110, 10
"""Of a robot's whole prompt, and of the unconditional branch."""
BRANCHES = 2
PIXEL_BYTES = 4


@dataclass(frozen=True, slots=True)
class Clip:
    """Sizes of one request: pixels, the latent's frames, height and width, and action rows."""

    frames: int
    height: int
    width: int
    latent: tuple[int, int, int]
    actions: int


class Cosmos3Cost:
    """The cost of one checkpoint, of a robot's request or of a video; reads configs, no weights.

    Both guidance branches are counted: each has its text, and two evaluations make a step. A
    workload's tokens are those of the prompt; cameras are composed into one image.
    """

    def __init__(self, args: CheckpointArgs) -> None:
        self.args = args
        self.policy = isinstance(args, Cosmos3PolicyArgs)
        self.vae = VAEConfig()
        if args.checkpoint_dir is None:
            self.config = args.config or Cosmos3Config()
        else:
            folder = hub.resolve(args.checkpoint_dir, revision=args.revision, allow=FILES)
            self.config = args.config or Cosmos3Config.from_folder(folder)
            if (folder / VAE_FOLDER).is_dir():
                self.vae = VAEConfig.from_folder(folder / VAE_FOLDER)
        self.clip = self._robot_clip(args) if isinstance(args, Cosmos3PolicyArgs) else self._video()

    def _robot_clip(self, args: Cosmos3PolicyArgs) -> Clip:
        robot = robot_settings(args.robot)
        chunk = args.chunk_size or robot.chunk_size
        canvas = canvas_of(*robot.image_size, args.resolution or robot.resolution)
        frames = chunk // self.vae.scale_factor_temporal + 1
        latent = (frames, *canvas.latent_size(self.vae.scale_factor_spatial))
        return Clip(chunk + 1, canvas.height, canvas.width, latent, chunk + args.history_length)

    def _video(self) -> Clip:
        usual, args = DEFAULTS["t2v"], self.args
        frames = getattr(args, "num_frames", None) or usual.frames
        height = getattr(args, "height", None) or usual.size[0]
        width = getattr(args, "width", None) or usual.size[1]
        return Clip(frames, height, width, latent_shape(frames, height, width), 0)

    @property
    def media(self) -> MediaTokens:
        """Media tokens of one row."""
        frames, height, width = self.clip.latent
        patch = self.config.latent_patch_size
        return MediaTokens(
            video=frames * ceil(height / patch) * ceil(width / patch), action=self.clip.actions
        )

    def workload(self) -> Workload:
        steps = self.args.num_steps
        if isinstance(self.args, Cosmos3PolicyArgs):
            robot = robot_settings(self.args.robot)
            steps = steps or robot.num_steps
            return Workload(cameras=len(robot.cameras), tokens=PROMPT_TOKENS, steps=steps)
        return Workload(tokens=PROMPT_TOKENS, steps=steps or DEFAULTS["t2v"].num_steps)

    def stages(
        self, workload: Workload, *, published: bool = False, itemsize: int = 2
    ) -> Sequence[StageCost]:
        self._check(workload)
        config, rows, media = self.config, workload.rows, self.media
        texts = (workload.tokens, EMPTY_TOKENS)
        full = published  # publications describe the whole last text layer, and the time network
        text = StageCost(
            "text",
            "encode/text",
            float(rows * sum(text_flops(config, n, full_last=full) for n in texts)),
            float(BRANCHES * text_weights(config, full_last=full) * itemsize),
            float(rows * sum(kv_values(config, n) for n in texts) * itemsize),
        )
        step = sum(evaluation_flops(config, media, n) for n in texts) * rows
        time = time_table_flops(config, workload.steps) if published else 0
        loop = StageCost(
            "loop",
            "solve",
            float(workload.steps * step + time),
            float(workload.steps * BRANCHES * evaluation_weights(config, media) * itemsize),
            float(workload.steps * rows * sum(kv_values(config, n) for n in texts) * itemsize),
            note="both guidance branches",
        )
        return [*self._encode(rows, published), text, loop, *self._decode(rows, itemsize)]

    def _encode(self, rows: int, published: bool) -> list[StageCost]:
        """Return the encoding of what a robot sees: one frame; published accounts: all of them."""
        if not self.policy:
            return []
        clip = self.clip
        frames = clip.frames if published else 1
        return [
            StageCost(
                "vae",
                "encode/vae",
                float(rows * encode_flops(self.vae, frames, clip.height, clip.width)),
                float(encoder_weights(self.vae) * PIXEL_BYTES),
                float(rows * 3 * frames * clip.height * clip.width * PIXEL_BYTES),
            )
        ]

    def _decode(self, rows: int, itemsize: int) -> list[StageCost]:
        if isinstance(self.args, Cosmos3PolicyArgs) and not self.args.decode_video:
            return []
        clip, side = self.clip, self.vae.scale_factor_spatial
        height, width = clip.latent[1] * side, clip.latent[2] * side
        return [
            StageCost(
                "decode",
                "output/vae",
                float(rows * decode_flops(self.vae, clip.latent[0], height, width)),
                float(clip.latent[0] * decoder_weights(self.vae) * itemsize),
                float(rows * 3 * clip.frames * height * width),
            )
        ]

    def request(self, workload: Workload, seed: int = 0) -> Any:
        import torch

        self._check(workload)
        config, rows, clip = self.config, workload.rows, self.clip
        random = torch.Generator().manual_seed(seed)

        def ids(count: int) -> Any:
            return torch.randint(0, config.vocab_size, (rows, count), generator=random)

        common: dict[str, Any] = {
            "text_ids": ids(workload.tokens),
            "neg_text_ids": ids(EMPTY_TOKENS),
            "video_shape": clip.latent,
            "num_inference_steps": workload.steps,
            "seed": seed,
        }
        if not isinstance(self.args, Cosmos3PolicyArgs):
            return Cosmos3T2VRequest(**common)
        robot, history = robot_settings(self.args.robot), self.args.history_length
        raw = robot.raw_dim
        frame = (rows, 3, 1, clip.height, clip.width)
        first = (rows, config.latent_channel, 1, *clip.latent[1:])
        given: dict[str, Any] = {"cond_video_pixels": torch.rand(frame, generator=random) * 2 - 1}
        if self.args.checkpoint_dir is None:  # random weights have no autoencoder
            given = {"cond_video_latents": torch.randn(first, generator=random)}
        return Cosmos3ActionRequest(
            **common,
            **given,
            fps=robot.fps,
            guidance_scale=robot.guidance_scale,
            flow_shift=robot.flow_shift,
            schedule="native",
            domain_id=torch.arange(rows) % config.num_embodiment_domains,
            action_chunk=clip.actions,
            raw_action_dim=min(raw, config.action_dim),
            cond_action=torch.randn(rows, history, raw, generator=random) if history else None,
            cond_action_indexes=tuple(range(history)),
            action_start_frame_offset=1 - history,
        )

    def published(self) -> Published:
        text = resources.files("phyai.models.cosmos3").joinpath(PUBLISHED_FILE).read_text("utf-8")
        data = json.loads(text)
        return Published(data["note"], tuple(Figure(**row) for row in data["figures"]))

    def _check(self, workload: Workload) -> None:
        if not 1 <= workload.tokens <= self.args.max_text_tokens:
            raise ConfigError(
                f"workload tokens of this checkpoint must be in [1, {self.args.max_text_tokens}]; "
                f"got {workload.tokens}. Choose another number."
            )
