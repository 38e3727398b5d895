"""pi0.5: actions only in the suffix; the noise level enters through adaRMS in every expert norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phyai.cache import Cache
from phyai.layers import Linear, Placement
from phyai.models.pi.config import PiConfig
from phyai.models.pi.network.denoiser import PiDenoiser, Tables
from phyai.models.pi.network.precision import Precision
from phyai.timers import Profile
from phyai.types import Step

if TYPE_CHECKING:
    from phyai.types import Tensors


class PI05Denoiser(PiDenoiser):
    """cond(t) = silu(time_mlp_out(silu(time_mlp_in(e(t))))); all modulations are tables over steps.

    Known action rows (training-time RTC) are at sigma 0: they take the tables' last row.
    """

    adaptive = True

    def __init__(
        self, config: PiConfig, precision: Precision, at: Placement, profile: Profile
    ) -> None:
        super().__init__(config, precision, at, profile)
        width = config.expert.hidden_size
        self.time_in = Linear("time_mlp_in", width, width, self.heads, bias=True)
        self.time_out = Linear("time_mlp_out", width, width, self.heads, bias=True)

    def build_tables(self, embedding: Tensor) -> Tables:
        cond = self._silu(self.time_out(self._silu(self.time_in(embedding))))
        return {"cond": cond, "modulation": self.expert.modulation_table(cond)}

    def forward(self, x: Tensors, step: Step, cache: Cache) -> Tensors:
        tables = self.tables[step.grid]
        noisy = self.action_in(x["action"])
        self.record_step("suffix_embs", step, noisy, cache)
        now, clean = step.row(tables["modulation"]), tables["modulation"][-1]
        known = cache.inputs.get("known.action.mask")
        if known is None:
            hidden = self.expert(noisy, cache, self.actions, now.__getitem__)
        else:
            token = known.all(dim=-1)[None, ..., None]

            def per_token(i: int) -> Tensor:
                return torch.where(token, clean[i][:, None, None], now[i][:, None, None])

            hidden = self.expert(noisy, cache, self.actions, per_token)
        assert hidden is not None
        self.record_step("suffix_hidden", step, hidden, cache)
        self._record_time(step, tables, known, cache)
        return {"action": self.action_out(hidden)}

    def _record_time(self, step: Step, tables: Tables, known: Tensor | None, cache: Cache) -> None:
        recorder = self.profile.recorder
        if not recorder.active:
            return
        cond, clean = step.row(tables["cond"]), tables["cond"][-1]
        if known is None:
            recorder.put("steps.time", torch.tensor(step.sigma))
            recorder.put("steps.adarms_cond", cond.expand(cache.rows, -1))
        else:
            token = known[: cache.rows].all(dim=-1)
            recorder.put("steps.time", torch.where(token, 0.0, step.sigma))
            recorder.put("steps.adarms_cond", torch.where(token[..., None], clean, cond))
