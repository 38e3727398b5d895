"""What MiniCPM-Robot costs: stages by their sizes, requests of given sizes, published latencies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from phyai import hub
from phyai.cost import Figure, Published, StageCost, Workload
from phyai.errors import ConfigError
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.flops import stage_costs

if TYPE_CHECKING:
    from phyai.models.minicpm_robot.args import MiniCPMRobotArgs

PUBLISHED_FILE = "published.json"
CAMERAS, TOKENS = 3, 64
"""The request of public benchmarks: three views, 64 text tokens."""


class MiniCPMRobotCost:
    """The cost of one checkpoint; reads its config and headers, never its weights.

    A workload's images are ``image_size`` pixels a side; its tokens are text tokens, those of the
    prompt's frame included.
    """

    def __init__(self, args: MiniCPMRobotArgs) -> None:
        self.limit = args.max_text_tokens
        if args.config is not None:
            self.config = args.config
        elif args.checkpoint_dir is not None:
            folder = hub.resolve(args.checkpoint_dir, revision=args.revision)
            self.config = MiniCPMRobotConfig.from_folder(folder, args.weight_remap)
        else:
            self.config = MiniCPMRobotConfig()

    def workload(self) -> Workload:
        steps = self.config.head.num_inference_timesteps
        return Workload(cameras=CAMERAS, tokens=min(TOKENS, self.limit), steps=steps)

    def stages(
        self, workload: Workload, *, published: bool = False, itemsize: int = 2
    ) -> Sequence[StageCost]:
        self._check(workload)
        return stage_costs(self.config, workload, published=published, itemsize=itemsize)

    def request(self, workload: Workload, seed: int = 0) -> Any:
        import torch

        from phyai.models.minicpm_robot.request import MiniCPMRobotRequest

        self._check(workload)
        config, rows = self.config, workload.rows
        vision, head = config.vision, config.head
        side = config.image_size // vision.patch_size
        images = rows * workload.cameras
        random = torch.Generator().manual_seed(seed)
        image_tokens = workload.cameras * config.image_tokens(side, side)
        shape = (rows, image_tokens + workload.tokens)
        ids = torch.randint(0, config.text.vocab_size, shape, generator=random)
        ids[ids == config.image_token_id] = 0 if config.image_token_id else 1
        # One text token first, so that rows begin as prompts do; images follow one another.
        ids[:, 1 : 1 + image_tokens] = config.image_token_id
        columns = vision.patch_size * images * side * side
        strip = (1, vision.num_channels, vision.patch_size, columns)
        noise = (rows, head.action_horizon, head.action_dim)
        return MiniCPMRobotRequest(
            input_ids=ids,
            pixel_values=torch.rand(strip, generator=random) * 2 - 1,
            target_sizes=torch.tensor([[side, side]] * images),
            state=torch.randn(rows, head.state_dim, generator=random),
            embodiment_id=torch.arange(rows) % head.max_num_embodiments,
            noise=torch.randn(noise, generator=random),
            num_steps=workload.steps,
        )

    def published(self) -> Published:
        folder = resources.files("phyai.models.minicpm_robot")
        data = json.loads(folder.joinpath(PUBLISHED_FILE).read_text("utf-8"))
        return Published(data["note"], tuple(Figure(**row) for row in data["figures"]))

    def _check(self, workload: Workload) -> None:
        limits = (("cameras", workload.cameras, 64), ("tokens", workload.tokens, self.limit))
        for name, value, most in limits:
            if not 1 <= value <= most:
                raise ConfigError(
                    f"workload {name} of this checkpoint must be in [1, {most}]; got {value}."
                )
