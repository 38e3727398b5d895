"""What GR00T N1.7 costs: stages by their sizes, requests of given sizes, published latencies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from phyai import hub
from phyai.cost import Figure, Published, StageCost, Workload
from phyai.errors import ConfigError
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.network.flops import IMAGE_SIDE, stage_costs

if TYPE_CHECKING:
    from phyai.models.gr00t.args import GrootArgs

PUBLISHED_FILE = "published.json"
CAMERAS, TOKENS = 2, 28
"""A robot's usual request: a view from outside and one from the wrist, a short instruction."""


class GrootCost:
    """The cost of one checkpoint; reads its config, never its weights.

    A workload's images are 256 x 256 pixels, the size released checkpoints prepare; its tokens are
    text tokens, those of the prompt's frame included.
    """

    def __init__(self, args: GrootArgs) -> None:
        self.limit = args.max_text_tokens
        if args.config is not None:
            self.config = args.config
        elif args.checkpoint_dir is not None:
            folder = hub.resolve(args.checkpoint_dir, revision=args.revision)
            backbone = None if args.backbone_dir is None else hub.resolve(args.backbone_dir)
            self.config = GrootConfig.from_folder(folder, backbone)
        else:
            self.config = GrootConfig.released()

    def workload(self) -> Workload:
        return Workload(cameras=CAMERAS, tokens=TOKENS, steps=self.config.num_inference_timesteps)

    def stages(
        self, workload: Workload, *, published: bool = False, itemsize: int = 2
    ) -> Sequence[StageCost]:
        self._check(workload)
        return stage_costs(self.config, workload, published=published, itemsize=itemsize)

    def request(self, workload: Workload, seed: int = 0) -> Any:
        import torch

        from phyai.models.gr00t.request import GrootRequest

        self._check(workload)
        config, rows = self.config, workload.rows
        vision, text = config.backbone
        side = IMAGE_SIDE // vision.patch_size
        images = rows * workload.cameras
        random = torch.Generator().manual_seed(seed)
        image_tokens = workload.cameras * side * side // config.merge
        ids = torch.randint(
            0, text.vocab_size, (rows, image_tokens + workload.tokens), generator=random
        )
        ids[ids == config.image_token_id] = 0 if config.image_token_id else 1
        # One text token first, so that rows begin as prompts do; images follow one another.
        ids[:, 1 : 1 + image_tokens] = config.image_token_id
        state = (rows, config.state_history_length, config.max_state_dim)
        noise = (rows, config.action_horizon, config.max_action_dim)
        return GrootRequest(
            pixel_values=torch.rand(images * side * side, config.patch_values, generator=random) * 2
            - 1,
            image_grid_thw=torch.tensor([[1, side, side]] * images),
            input_ids=ids,
            state=torch.randn(state, generator=random),
            embodiment_id=torch.arange(rows) % config.max_num_embodiments,
            noise=torch.randn(noise, generator=random),
            num_steps=workload.steps,
        )

    def published(self) -> Published:
        text = resources.files("phyai.models.gr00t").joinpath(PUBLISHED_FILE).read_text("utf-8")
        data = json.loads(text)
        return Published(data["note"], tuple(Figure(**row) for row in data["figures"]))

    def _check(self, workload: Workload) -> None:
        limits = (("cameras", workload.cameras, 64), ("tokens", workload.tokens, self.limit))
        for name, value, most in limits:
            if not 1 <= value <= most:
                raise ConfigError(
                    f"workload {name} of this checkpoint must be in [1, {most}]; got {value}."
                )
