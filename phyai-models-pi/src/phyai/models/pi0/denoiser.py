"""pi0: a state token and the actions in the suffix; the noise level is mixed into every action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phyai.cache import Cache
from phyai.layers import Linear, Placement
from phyai.models.pi.config import PiConfig
from phyai.models.pi.network.denoiser import PiDenoiser, Tables
from phyai.models.pi.network.precision import Precision
from phyai.models.pi.network.segment import Segment
from phyai.timers import Profile
from phyai.types import BufferSpec, Step

if TYPE_CHECKING:
    from phyai.types import Tensors


class PI0Denoiser(PiDenoiser):
    """h = action_time_mlp_out(silu(action_time_mlp_in([action_in(x), e(t)]))).

    The time half of ``action_time_mlp_in`` is a table over steps. The state token sees only the
    prefix and itself, so its K/V do not depend on the step and are computed in ``encode``.
    """

    state_tokens = 1

    def __init__(
        self, config: PiConfig, precision: Precision, at: Placement, profile: Profile
    ) -> None:
        super().__init__(config, precision, at, profile)
        width = config.expert.hidden_size
        stack = at.with_dtype(precision.stack)
        self.state_in = Linear("state_proj", config.max_state_dim, width, self.heads, bias=True)
        self.mix_in = Linear(
            "action_time_mlp_in", 2 * width, width, self.heads, bias=True, packed=False
        )
        self.mix_out = Linear("action_time_mlp_out", width, width, self.heads, bias=True)
        self.state = Segment("state", 0, 1, config.expert, stack, precision.rope_freq)
        self._linear = self.heads.select("linear", in_features=width, out_features=width)

    def cache_buffers(self, stride: int) -> Mapping[str, BufferSpec]:
        return {**super().cache_buffers(stride), **self.state.cache_buffers(stride)}

    def build_tables(self, embedding: Tensor) -> Tables:
        width = self.config.expert.hidden_size
        return {"time": self._linear(embedding, self.mix_in.weight[:, width:], self.mix_in.bias)}

    def encode(self, cache: Cache) -> None:
        super().encode(cache)
        self.state.encode(cache)
        with self.profile.stage("state"):
            self._encode_state(cache)

    def _encode_state(self, cache: Cache) -> None:
        recorder = self.profile.recorder
        token = self.state_in(cache.inputs["state"])[:, None]
        recorder.put("state.embs", token[: cache.rows])
        self.profile.count("state_tokens", token.shape[0])
        only_kv = not recorder.wants("state.hidden")
        hidden = self.expert(token, cache, self.state, only_kv=only_kv)
        if hidden is not None:
            recorder.put("state.hidden", hidden[: cache.rows])

    def forward(self, x: Tensors, step: Step, cache: Cache) -> Tensors:
        width = self.config.expert.hidden_size
        time = step.row(self.tables[step.grid]["time"])
        noisy = self.action_in(x["action"])
        mixed = self._linear(noisy, self.mix_in.weight[:, :width], None) + time
        embs = self.mix_out(self._silu(mixed))
        self.record_step("suffix_embs", step, embs, cache)
        hidden = self.expert(embs, cache, self.actions)
        assert hidden is not None
        self.record_step("suffix_hidden", step, hidden, cache)
        if self.profile.recorder.active:
            self.profile.recorder.put("steps.time", torch.tensor(step.sigma))
        return {"action": self.action_out(hidden)}
