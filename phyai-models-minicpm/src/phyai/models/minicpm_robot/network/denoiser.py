"""The denoiser: clean actions out of noisy ones, from the keys and values in the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.layers import Placement
from phyai.models.minicpm_robot.config import HeadSizes
from phyai.models.minicpm_robot.network.banks import Bank, RowBank
from phyai.models.minicpm_robot.network.cross import HEAD, CrossKeys, CrossPlan
from phyai.models.minicpm_robot.network.head import DiT
from phyai.models.minicpm_robot.network.time_codes import (
    action_code,
    discretized,
    step_times,
    transformer_code,
)
from phyai.timers import Profile
from phyai.types import BufferSpec, Grid, Prediction, Step
from phyai.weights import claim

if TYPE_CHECKING:
    from phyai.types import Tensors

Tables = dict[str, Tensor]


class MiniCPMDenoiser(nn.Module):
    """Clean prediction of the action leaf [B, H, A] float32.

    at.dtype is the head's own dtype, float32 by default in every precision.

    Reads ``cache.inputs``: ``state`` [B, state_dim] float32, ``embodiment`` int64 [B] (of a shared
    head nobody looks at its values), and ``cache.plan.cross``, the ``CrossPlan`` that
    ``load_plan`` returned.

    tables: per grid, everything that depends only on weights and time: both time codes, all
    modulations, and the time's part of the action encoder for every embodiment. Row k belongs to
    step k.

    Records, one entry per step, of the batch's own rows: ``head.noisy``, ``head.pred`` [B, H, A];
    ``head.t``, ``head.t_discretized`` []; ``head.temb`` [B, W], ``head.time_proj`` [B, 256],
    ``head.action_time_sinusoid``, ``head.action_features`` [B, H, W]; ``head.dit_in``,
    ``head.dit.block.<i>`` [B, F + H, W], ``head.dit.out`` [B, F + H, output_dim].
    Golden ``act.step<k>.<name>`` is entry k of ``head.<name>``, other ``act.<name>`` entry 1.
    Counts ``time_table_builds``, ``time_table_rows``, ``state_projections``, ``cross_kv_calls``,
    ``cross_kv_tokens``, ``denoised_tokens``, ``decoded_tokens``.
    """

    prediction: Prediction = "clean"
    capture_safe = True
    approximate = False

    def __init__(self, config: HeadSizes, at: Placement, profile: Profile) -> None:
        super().__init__()
        self.config, self.profile, self.dtype = config, profile, at.dtype
        width, actions = config.width, config.action_dim
        head = at.with_role("expert", config.num_target_vision_tokens + config.action_horizon)
        many = None if config.shared_head else config.max_num_embodiments
        first = "layer" if config.shared_head else "W"

        def bank(name: str, inputs: int, outputs: int) -> Bank:
            return Bank(f"{HEAD}.{name}", many, inputs, outputs, head)

        self.action_in = bank(f"action_encoder.{first}1", actions + config.state_dim, width)
        self.action_time = bank(f"action_encoder.{first}2", 2 * width, width)
        self.action_out = bank(f"action_encoder.{first}3", width, width)
        self.decode_in = bank("action_decoder.layer1", config.output_dim, config.hidden_size)
        self.decode_out = bank("action_decoder.layer2", config.hidden_size, actions)
        future = head.parameter(config.num_target_vision_tokens, width)
        self.future = claim(future, f"{HEAD}.future_tokens.weight")
        self.positions: nn.Parameter | None = None
        if config.add_pos_embed:
            table = head.parameter(config.max_seq_len, width)
            self.positions = claim(table, f"{HEAD}.position_embedding.weight")
        self.cross = CrossKeys(config, at.with_role("prefix"), profile)
        self.dit = DiT(config, head)
        # What the other inputs of W1 and W2 add is known before the first step: the state's part
        # is a buffer, the time's part a table, each with the bias in it.
        self._banks = {
            "w1": RowBank("bank.w1", self.action_in, inputs=actions, bias=False),
            "w2": RowBank("bank.w2", self.action_time, inputs=width, bias=False),
            "w3": RowBank("bank.w3", self.action_out),
            "d1": RowBank("bank.d1", self.decode_in),
            "d2": RowBank("bank.d2", self.decode_out),
        }
        self.tables: dict[tuple[float, ...], Tables] = {}
        self._silu = head.select("silu")

    # ------------------------------------------------------------ once per request

    def cache_buffers(self, tokens: int) -> Mapping[str, BufferSpec]:
        """Return the buffers of rows with at most so many prefix tokens."""
        specs = {"head.state": BufferSpec((1, self.config.width), self.dtype)}
        specs.update(self.cross.cache_buffers(tokens))
        for bank in self._banks.values():
            specs.update(bank.buffers())
        return specs

    def load_plan(self, cache: Cache, lens: Sequence[int], *, static: bool) -> CrossPlan:
        """Put the places of a batch's prefix tokens into the cache; host side.

        lens: tokens of each row, in the order of the packed features.  static: shapes must not
        depend on them, so every row may see the whole bucket, behind a mask.
        Returns what must lie in ``cache.plan.cross`` while the batch runs.
        Raises: CapacityError when the rows do not fit the cache.
        """
        return self.cross.load_plan(cache, lens, static=static)

    def encode(self, cache: Cache, features: Tensor) -> None:
        """Fill what every step reads: keys and values, the state's part, weights of the rows.

        features [M, cross_attention_dim]: the prefix tokens packed row by row, in any float dtype;
        behind the rows' own tokens anything may follow, up to the cache's capacity.
        """
        self.cross.encode(cache, features)
        embodiment, state = cache.inputs["embodiment"], cache.inputs["state"]
        self.profile.count("state_projections", state.shape[0])
        bank, actions = self.action_in, self.config.action_dim
        weight = bank.of_rows(bank.weight[:, actions:], embodiment)
        bias = bank.of_rows(bank.bias[:, None], embodiment)
        x = state.to(self.dtype)[:, None]
        part = torch.baddbmm(bias, x, weight.expand(len(x), -1, -1))
        cache["head.state"].copy_(part)
        for rows in self._banks.values():
            rows.gather(cache, embodiment)

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
        device = self.future.device
        t = step_times(sigmas)
        times = discretized(t, self.config.num_timestep_buckets)
        with torch.no_grad():
            self.profile.count("time_table_builds")
            self.profile.count("time_table_rows", len(times))
            action = action_code(times, self.config.width).to(device)
            transformer = transformer_code(times).to(device)
            return {
                "t": torch.tensor(t, dtype=torch.float32, device=device),
                "t_discretized": torch.tensor(times, device=device),
                "action_time_sinusoid": action,
                "time_proj": transformer,
                "action_time": self._action_time(action),
                **self.dit.time.tables(transformer),
            }

    def _action_time(self, code: Tensor) -> Tensor:
        """Return code W2_bottom[e] + b2[e] of every step and embodiment, [N, E, W]."""
        bank, width = self.action_time, self.config.width
        rows = [
            torch.addmm(bias.float(), code, weight[width:].float())
            for weight, bias in zip(bank.weight, bank.bias, strict=True)
        ]
        return torch.stack(rows, dim=1).to(self.dtype)

    # ------------------------------------------------------------ every step

    def forward(self, x: Tensors, step: Step, cache: Cache) -> Tensors:
        tables, horizon = self.tables[step.grid], x["action"].shape[1]
        features = self._embed(x["action"], step.row(tables["action_time"]), cache)
        tokens = features
        if self.positions is not None:
            tokens = features + self.positions[:horizon]
        z = torch.cat([self.future.expand(len(tokens), -1, -1), tokens], dim=1)
        self.profile.count("denoised_tokens", z.shape[0] * z.shape[1])
        whole = self._wants_future()
        n = self.dit(
            z,
            step.row(tables["modulation"]),
            step.row(tables["last"]),
            cache,
            None if whole else horizon,
            self._see(cache),
        )
        # Nobody reads what becomes of the future tokens.
        hidden = self.dit.proj_out(n[:, -horizon:])
        self.profile.count("decoded_tokens", hidden.shape[0] * hidden.shape[1])
        banks = self._banks
        out = banks["d2"](torch.relu_(banks["d1"](hidden, cache)), cache).float()
        if self.profile.recorder.active:
            seen = {"noisy": x["action"], "pred": out, "action_features": features, "dit_in": z}
            if whole:
                seen["dit.out"] = self.dit.proj_out(n)
            self._record(step, cache, seen)
        return {"action": out}

    def _embed(self, x: Tensor, time: Tensor, cache: Cache) -> Tensor:
        """Return action features [B, H, W] of x [B, H, A]; time [E, W]: this step's table row."""
        banks = self._banks
        mine = self.action_time.of_rows(time, cache.inputs["embodiment"])[:, None]
        a = banks["w1"](x.to(self.dtype), cache, cache["head.state"])
        return banks["w3"](self._silu(banks["w2"](a, cache, mine)), cache)

    # ------------------------------------------------------------ recording

    def _wants_future(self) -> bool:
        """Whether somebody listens to what the last block makes of the future tokens."""
        recorder = self.profile.recorder
        last = self.config.num_layers - 1
        return any(recorder.wants(f"head.dit.{name}") for name in (f"block.{last}", "out"))

    def _see(self, cache: Cache) -> Callable[[str, Tensor], None] | None:
        recorder = self.profile.recorder
        if not recorder.active:
            return None
        return lambda name, value: recorder.put(f"head.{name}", value[: cache.rows])

    def _record(self, step: Step, cache: Cache, seen: Mapping[str, Tensor]) -> None:
        recorder, tables, rows = self.profile.recorder, self.tables[step.grid], cache.rows
        for name, value in seen.items():
            recorder.put(f"head.{name}", value[:rows])
        for name in ("t", "t_discretized"):
            recorder.put(f"head.{name}", step.row(tables[name]))
        for name in ("temb", "time_proj"):
            recorder.put(f"head.{name}", step.row(tables[name]).expand(rows, -1))
        code, horizon = step.row(tables["action_time_sinusoid"]), seen["noisy"].shape[1]
        recorder.put("head.action_time_sinusoid", code.expand(rows, horizon, -1))
