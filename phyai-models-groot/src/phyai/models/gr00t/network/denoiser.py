"""The denoiser: velocity of the actions from the keys and values in the cache.

Native time runs from noise (0) to data (1) and the native velocity is data - noise; core's sigma
runs the other way, so the sign turns here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.layers import Placement
from phyai.models.gr00t.checkpoint import HEAD
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.network.bank import CategoryLinear, Gathered
from phyai.models.gr00t.network.cross import CrossKeys, key_groups
from phyai.models.gr00t.network.dit import DiT
from phyai.models.gr00t.network.plan import RowShape
from phyai.models.gr00t.network.time_embedding import (
    TIME_CHANNELS,
    action_time,
    timestep_buckets,
    transformer_time,
)
from phyai.timers import Profile
from phyai.types import BufferSpec, Grid, Prediction, Step
from phyai.weights import claim

if TYPE_CHECKING:
    from phyai.types import Tensors

Tables = dict[str, Tensor]


class GrootDenoiser(nn.Module):
    """Velocity (noise - data) of the action leaf [B, T, A] float32.

    tables: per grid, everything that depends only on weights and time: both time embeddings, all
    modulations, and the time's part of the action encoder for every embodiment. Row k belongs to
    step k.
    """

    prediction: Prediction = "velocity"
    capture_safe = True
    approximate = False

    def __init__(self, config: GrootConfig, at: Placement, profile: Profile) -> None:
        super().__init__()
        self.config, self.profile, self.dtype = config, profile, at.dtype
        width, hidden = config.input_embedding_dim, config.hidden_size
        many, actions = config.max_num_embodiments, config.max_action_dim
        head = at.with_role("expert", 1 + config.action_horizon)

        def bank(name: str, inputs: int, outputs: int) -> CategoryLinear:
            return CategoryLinear(f"{HEAD}.{name}", many, inputs, outputs, head)

        self.state_in = bank("state_encoder.layer1", config.state_width, hidden)
        self.state_out = bank("state_encoder.layer2", hidden, width)
        self.action_in = bank("action_encoder.W1", actions, width)
        self.action_time = bank("action_encoder.W2", 2 * width, width)
        self.action_out = bank("action_encoder.W3", width, width)
        self.decode_in = bank("action_decoder.layer1", hidden, hidden)
        self.decode_out = bank("action_decoder.layer2", hidden, actions)
        self.positions: nn.Parameter | None = None
        if config.add_pos_embed:
            self.positions = claim(
                head.parameter(config.max_seq_len, width), f"{HEAD}.position_embedding.weight"
            )
        self.cross = nn.ModuleDict(
            {
                group: CrossKeys(group, blocks, config, at.with_role("prefix"), profile)
                for group, blocks in key_groups(config).items()
            }
        )
        readers = {
            block: keys.reader
            for keys in self.cross.values()
            if isinstance(keys, CrossKeys)
            for block in keys.blocks
        }
        self.dit = DiT(config, head, readers)
        self._banks = {
            "w1": Gathered("bank.w1", self.action_in),
            # the other half of the inputs is the time's: it is in the tables, with the bias
            "w2": Gathered("bank.w2", self.action_time, inputs=width, bias=False),
            "w3": Gathered("bank.w3", self.action_out),
            "d1": Gathered("bank.d1", self.decode_in),
            "d2": Gathered("bank.d2", self.decode_out),
        }
        self.tables: dict[tuple[float, ...], Tables] = {}
        self._silu = head.select("silu")

    # ------------------------------------------------------------ once per request

    def cache_buffers(self, shape: RowShape) -> Mapping[str, BufferSpec]:
        specs = {"state_token": BufferSpec((1, self.config.input_embedding_dim), self.dtype)}
        for keys in self.cross.values():
            assert isinstance(keys, CrossKeys)
            specs.update(keys.cache_buffers(shape))
        for gathered in self._banks.values():
            specs.update(gathered.buffers())
        return specs

    def load_plan(self, cache: Cache) -> None:
        """Put the lists of the cross-attending blocks into the cache; host side."""
        for group, keys in self.cross.items():
            assert isinstance(keys, CrossKeys)
            keys.load_plan(cache, cache.plan.batch.keys[group])

    def encode(self, cache: Cache, features: Tensor) -> None:
        """Fill what every step reads: keys and values, the state token, weights of the rows.

        features [N, W]: what the VL layers made of the backbone's tokens.
        """
        for keys in self.cross.values():
            assert isinstance(keys, CrossKeys)
            keys.encode(cache, features)
        embodiment, state = cache.inputs["embodiment"], cache.inputs["state"]
        self.profile.count("state_tokens", state.shape[0])
        hidden = torch.relu(self.state_in(state[:, None].to(self.dtype), embodiment))
        token = self.state_out(hidden, embodiment)
        cache["state_token"].copy_(token)
        self.profile.recorder.put("head.state_features", token[: cache.rows])
        for gathered in self._banks.values():
            gathered.gather(cache, embodiment)

    # ------------------------------------------------------------ tables

    def prepare_grid(self, grid: Grid) -> None:
        """Build the tables of a new grid; several caches of one grid share them."""
        sigmas = grid[0].grid
        if sigmas not in self.tables:
            self.tables[sigmas] = self._fresh_tables(sigmas)

    def release_grid(self, grid: Grid) -> None:
        """Drop the tables of a grid: num_steps is a request's choice, so they would pile up."""
        self.tables.pop(grid[0].grid, None)

    def refresh(self) -> None:
        """Rewrite every grid's tables in place, after a weight update."""
        for sigmas, tables in self.tables.items():
            for name, fresh in self._fresh_tables(sigmas).items():
                tables[name].copy_(fresh)

    def _fresh_tables(self, sigmas: tuple[float, ...]) -> Tables:
        device = self.action_in.weight.device
        times = timestep_buckets(sigmas, self.config.num_timestep_buckets)
        with torch.no_grad():
            self.profile.count("time_table_builds")
            self.profile.count("time_table_rows", len(times))
            embedding = transformer_time(times, TIME_CHANNELS).to(device)
            return {
                "timestep": torch.tensor(times, device=device),
                "action_time": self._action_time(times, device),
                **self.dit.time.tables(embedding),
            }

    def _action_time(self, times: list[int], device: torch.device) -> Tensor:
        """Return p W2_bottom[e] + b2[e] of every step and embodiment, [N, E, W]."""
        width = self.config.input_embedding_dim
        p = action_time(times, width).to(device)
        rows = [
            torch.addmm(bias.float(), p, weight[width:].float())
            for weight, bias in zip(self.action_time.weight, self.action_time.bias, strict=True)
        ]
        return torch.stack(rows, dim=1).to(self.dtype)

    # ------------------------------------------------------------ every step

    def forward(self, x: Tensors, step: Step, cache: Cache) -> Tensors:
        tables = self.tables[step.grid]
        actions = self._embed(x["action"], step.row(tables["action_time"]), step, cache)
        z = torch.cat([cache["state_token"], actions], dim=1)
        self._record(step, cache, first={"sa_embs": z})
        n = self.dit(
            z,
            step.row(tables["modulation"]),
            step.row(tables["last"]),
            cache,
            self._see(step, cache),
        )
        if self.profile.recorder.wants("steps.dit_out"):
            self._record(step, cache, every={"dit_out": self.dit.proj_out(n)})
        # Nobody reads what becomes of the state token.
        hidden = self.dit.proj_out(n[:, 1:].contiguous())
        self.profile.count("decoded_tokens", hidden.shape[0] * hidden.shape[1])
        banks = self._banks
        out = banks["d2"](torch.relu(banks["d1"](hidden, cache)), cache).float()
        self._record_step(step, cache, x["action"], out, tables)
        ramp = cache.inputs.get("rtc.ramp")
        return {"action": -out if ramp is None else -out * ramp[..., None]}

    def _embed(self, x: Tensor, time: Tensor, step: Step, cache: Cache) -> Tensor:
        """Return action tokens [B, T, W] of x [B, T, A]; time [E, W]: this step's table row."""
        banks, embodiment = self._banks, cache.inputs["embodiment"]
        a = banks["w1"](x.to(self.dtype), cache)
        mine = time.index_select(0, embodiment)[:, None]
        a = banks["w3"](self._silu(banks["w2"](a, cache, mine)), cache)
        self._record(step, cache, every={"action_features": a})
        return a if self.positions is None else a + self.positions[: a.shape[1]]

    # ------------------------------------------------------------ recording

    def _see(self, step: Step, cache: Cache) -> Callable[[str, Tensor], None] | None:
        if not self.profile.recorder.active or step.index:
            return None
        return lambda name, value: self._record(step, cache, first={name: value})

    def _record(
        self,
        step: Step,
        cache: Cache,
        *,
        first: Mapping[str, Tensor] | None = None,
        every: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Put tensors of the first step, or of every step, into the recorder."""
        recorder = self.profile.recorder
        if not recorder.active:
            return
        if step.index == 0:
            for name, value in (first or {}).items():
                recorder.put(f"step0.{name}", value[: cache.rows])
        for name, value in (every or {}).items():
            recorder.put(f"steps.{name}", value[: cache.rows])

    def _record_step(
        self, step: Step, cache: Cache, x: Tensor, velocity: Tensor, tables: Tables
    ) -> None:
        if not self.profile.recorder.active:
            return
        rows = cache.capacity
        every = {
            "actions_in": x,
            "native_velocity": velocity,
            "temb": step.row(tables["temb"]).expand(rows, -1),
            "timestep": step.row(tables["timestep"]).expand(rows),
        }
        self._record(step, cache, every=every)
