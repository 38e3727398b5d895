"""What pi0 and pi0.5 cost: stages by their sizes, requests of given sizes, published latencies."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from phyai import hub
from phyai.cost import Figure, Published, StageCost, Workload
from phyai.errors import ConfigError
from phyai.models.pi.config import Model, PiConfig
from phyai.models.pi.network.flops import stage_costs

if TYPE_CHECKING:
    from phyai.models.pi.adapter import PiArgs

PUBLISHED_FILE = "published.json"


class PiCost:
    """The cost of one checkpoint; reads its config, never its weights.

    request_cls: the model request to build.
    """

    def __init__(self, model: Model, args: PiArgs, request_cls: Callable[..., Any]) -> None:
        self.model, self.request_cls = model, request_cls
        if args.config is not None:
            self.config = args.config
        elif args.checkpoint_dir is not None:
            folder = hub.resolve(args.checkpoint_dir, revision=args.revision)
            self.config = PiConfig.from_folder(folder, model)
        else:
            self.config = PiConfig.default(model)

    def workload(self) -> Workload:
        config = self.config
        return Workload(
            cameras=config.num_cameras - config.empty_cameras,
            tokens=config.tokenizer_max_length,
            steps=config.num_inference_steps,
        )

    def stages(
        self, workload: Workload, *, published: bool = False, itemsize: int = 2
    ) -> Sequence[StageCost]:
        self._check(workload)
        return stage_costs(self.config, workload, published=published, itemsize=itemsize)

    def request(self, workload: Workload, seed: int = 0) -> Any:
        import torch

        self._check(workload)
        config, rows, size = self.config, workload.rows, self.config.vision.image_size
        random = torch.Generator().manual_seed(seed)
        images = (rows, workload.cameras, config.vision.num_channels, size, size)
        fields: dict[str, Any] = {
            "pixel_values": torch.rand(images, generator=random) * 2 - 1,
            "input_ids": torch.randint(
                1, config.text.vocab_size, (rows, workload.tokens), generator=random
            ),
            "lang_lens": torch.full((rows,), workload.tokens),
            "noise": torch.randn(rows, config.chunk_size, config.max_action_dim, generator=random),
            "num_steps": workload.steps,
        }
        if self.model == "pi0":
            fields["state"] = torch.randn(rows, config.max_state_dim, generator=random)
        return self.request_cls(**fields)

    def published(self) -> Published:
        text = resources.files("phyai.models.pi").joinpath(PUBLISHED_FILE).read_text("utf-8")
        data = json.loads(text)
        figures = [Figure(**row) for row in data["figures"]]
        mine = tuple(row for row in figures if self.model in row.model.split("/"))
        return Published(data["note"], mine)

    def _check(self, workload: Workload) -> None:
        limits = (
            ("cameras", workload.cameras, self.config.num_cameras),
            ("tokens", workload.tokens, self.config.tokenizer_max_length),
        )
        for name, value, most in limits:
            if not 1 <= value <= most:
                raise ConfigError(
                    f"workload {name} of this checkpoint must be in [1, {most}]; got {value}."
                )
