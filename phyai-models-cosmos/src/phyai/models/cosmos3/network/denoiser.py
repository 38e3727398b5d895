"""The denoiser: velocity of video, action and sound from the text's keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.errors import ConfigError, PluginContractError
from phyai.known import mask_name
from phyai.layers import Placement
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.network.generator import Generator
from phyai.models.cosmos3.network.heads import ActionHead, Head, SoundHead, VideoHead
from phyai.models.cosmos3.network.layout import MediaLayout
from phyai.models.cosmos3.network.recording import first_step, record, records
from phyai.models.cosmos3.network.time_embedding import TimeEmbedding
from phyai.timers import Profile
from phyai.types import BufferSpec, Grid, Key, Prediction, Step
from phyai.unipc import timestep

if TYPE_CHECKING:
    from phyai.types import Tensors


class Cosmos3Denoiser(nn.Module):
    """Velocity (noise - data) of the leaves a key has, all float32, in one pass over their tokens.

    action, sound: whether these heads exist; None = as the config says.
    tables: per grid, the time embedding of each step, [N, W]: noisy tokens get it added, tokens of
    known frames and rows (``known.<leaf>.mask``) do not. Nothing else depends on time.
    """

    prediction: Prediction = "velocity"
    capture_safe = True
    approximate = False

    def __init__(
        self,
        config: Cosmos3Config,
        at: Placement,
        profile: Profile,
        *,
        action: bool | None = None,
        sound: bool | None = None,
    ) -> None:
        super().__init__()
        self.config, self.profile, self.dtype, self.device = config, profile, at.dtype, at.device
        heads = at.with_role("heads")
        self.video = VideoHead(config, heads)
        self.action = ActionHead(config, heads) if _wanted("action", action, config) else None
        self.sound = SoundHead(config, heads) if _wanted("sound", sound, config) else None
        self.time = TimeEmbedding(config, at)
        self.generator = Generator(config, at, profile)
        self.tables: dict[tuple[float, ...], Tensor] = {}

    @property
    def heads(self) -> Mapping[str, Head]:
        """The heads there are, by leaf."""
        found = {"video": self.video, "action": self.action, "sound": self.sound}
        return {leaf: head for leaf, head in found.items() if head is not None}

    # ------------------------------------------------------------ once per request

    def cache_buffers(self, key: Key) -> Mapping[str, BufferSpec]:
        """Return the buffers of a branch's cache, besides those of the text.

        Raises: ConfigError for a leaf whose head the checkpoint does not have.
        """
        layout = MediaLayout.of(key, self.config)
        specs = dict(self.generator.cache_buffers(key))
        specs["gen.noisy"] = BufferSpec((layout.tokens, 1), self.dtype)
        for leaf in layout.leaves:
            specs.update(self._head(leaf).cache_buffers())
        return specs

    def encode(self, cache: Cache) -> None:
        """Fill what every step reads besides the text: rotations, weights of domains, noisy tokens.

        Raises: PluginContractError when ``positions`` are not of the key's tokens.
        """
        layout = MediaLayout.of(cache.key, self.config)
        given = cache.inputs["positions"].shape[2]
        if given != layout.tokens:
            raise PluginContractError(
                f"positions must be of {layout.tokens} media tokens; got {given}. "
                "Make them with media_positions of the key's sizes."
            )
        self.generator.encode(cache)
        noisy = []
        for leaf, count in layout.leaves.items():
            head = self._head(leaf)
            head.encode(cache)
            mask = cache.inputs.get(mask_name(leaf))
            if mask is None:
                noisy.append(
                    torch.ones(cache.capacity, count, dtype=torch.bool, device=self.device)
                )
            else:
                noisy.append(~head.clean(mask, layout))
        cache["gen.noisy"].copy_(torch.cat(noisy, dim=1)[..., None])

    # ------------------------------------------------------------ tables

    def prepare_grid(self, grid: Grid) -> None:
        """Build the table of a new grid; several caches of one grid share it."""
        sigmas = grid[0].grid
        if sigmas not in self.tables:
            self.tables[sigmas] = self._fresh_table(sigmas)

    def release_grid(self, grid: Grid) -> None:
        """Drop the table of a grid: num_steps and shift are a request's choice."""
        self.tables.pop(grid[0].grid, None)

    def refresh(self) -> None:
        """Rewrite every grid's table in place, after a weight update."""
        for sigmas, table in self.tables.items():
            table.copy_(self._fresh_table(sigmas))

    def _fresh_table(self, sigmas: tuple[float, ...]) -> Tensor:
        steps = torch.tensor([timestep(sigma) for sigma in sigmas], device=self.device)
        self.profile.count("time_table_builds")
        self.profile.count("time_table_rows", len(sigmas))
        with torch.no_grad():
            table: Tensor = self.time(steps).to(self.dtype)
        return table

    # ------------------------------------------------------------ every step

    def forward(self, x: Tensors, step: Step, cache: Cache) -> Tensors:
        layout = MediaLayout.of(cache.key, self.config)
        tokens = torch.cat(
            [self._head(leaf).embed(x[leaf], cache) for leaf in layout.leaves], dim=1
        )
        time = step.row(self.tables[step.grid])
        g = torch.addcmul(tokens, cache["gen.noisy"], time)
        self.profile.count("gen_tokens", g.shape[0] * g.shape[1])
        if records(self.profile) and first_step(step):
            record(self.profile, cache, "gen_in", g[: cache.rows])
        parts = self.generator(g, step, cache).split(list(layout.leaves.values()), dim=1)
        return {
            leaf: self._head(leaf).velocity(part, x[leaf], cache)
            for leaf, part in zip(layout.leaves, parts, strict=True)
        }

    def _head(self, leaf: str) -> Head:
        head = self.heads.get(leaf)
        if head is None:
            raise ConfigError(
                f"requests with leaf {leaf!r} must have its head; this network has heads for "
                f"{', '.join(self.heads)}. Use a checkpoint that has it."
            )
        return head


def _wanted(leaf: str, wanted: bool | None, config: Cosmos3Config) -> bool:
    has = config.action_gen if leaf == "action" else config.sound_gen
    if wanted and not has:
        raise ConfigError(
            f"the {leaf} head must be in the checkpoint; its config says {leaf}_gen false. "
            "Use a checkpoint that has it."
        )
    return has if wanted is None else wanted
