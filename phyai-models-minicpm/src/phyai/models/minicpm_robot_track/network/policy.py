"""From frames or features to the control state: window, decoder, and what sessions keep.

A session keeps the projected tokens of its history frames, and the keys and values of its
instruction. A step of it computes the new frames and the window; a request without a session
computes everything in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.layers import Placement
from phyai.models.minicpm_robot_track.config import MiniCPMRobotTrackConfig
from phyai.models.minicpm_robot_track.network.backbone import Backbone, Past, Record, Tokens
from phyai.models.minicpm_robot_track.network.plan import RowFacts, Shape, WindowPlan, plan_batch
from phyai.models.minicpm_robot_track.network.prompt import PromptKeys
from phyai.models.minicpm_robot_track.network.rope import RopeTables, inverse_frequencies
from phyai.models.minicpm_robot_track.network.vision_tokens import TemporalMarkers, VisionProjector
from phyai.timers import Profile
from phyai.types import BufferSpec, Prepared
from phyai.weights import claim

Towers: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Frames uint8 [F, 3, S, S] -> coarse and fine features, float32 [F, tokens, channels] each."""


class TrackPolicy(nn.Module):
    """Everything between vision features and the trajectory head.

    max_text: most text tokens of a row, also what a session has room for.
    """

    def __init__(
        self, config: MiniCPMRobotTrackConfig, at: Placement, profile: Profile, max_text: int
    ) -> None:
        super().__init__()
        self.config, self.profile, self.max_text = config, profile, max_text
        sizes, wide = config.backbone, at.with_dtype(torch.float32)
        width = sizes.hidden_size
        self.backbone = Backbone("backbone", sizes, at)
        features = config.vision_feature_dim
        self.projector = VisionProjector("vision_projector", features, width, wide)
        self.markers = TemporalMarkers("temporal_markers", config, wide)
        self.control_query = claim(wide.parameter(1, 1, width), "control_query")
        self.rope = RopeTables(sizes, max_text + config.window_tokens, at.device)
        self.prompts = PromptKeys(self.backbone, self.rope, profile, config, max_text)

    # ------------------------------------------------------------ host

    def cache_buffers(self, shape: Shape) -> Mapping[str, BufferSpec]:
        """Return the buffers of one cache; those of sessions are alike for every key."""
        config = self.config
        width, history = config.backbone.hidden_size, config.history_frames
        tokens = config.window_tokens + (0 if shape.session else shape.text)
        lists = {
            "frame_at": shape.frames,
            "current_at": 1,
            "window_at": history,
            "positions": tokens,
            "slots": tokens,
            "control_at": 1,
            "past_slots" if shape.session else "order": shape.text if shape.session else tokens,
        }
        places = (shape.text + config.window_tokens,)
        window = (history, config.coarse_tokens_per_frame, width)
        return {
            **{f"plan.{n}": BufferSpec((size,), torch.int64) for n, size in lists.items()},
            "plan.key_mask": BufferSpec(places, torch.bool),
            "control": BufferSpec((width,), torch.float32),
            "session.window": BufferSpec(window, torch.float32, session=True),
            "session.frames": BufferSpec((1,), torch.int64, session=True),
            **self.prompts.session_buffers(),
        }

    def load_plan(self, cache: Cache, batch: Prepared, shape: Shape, *, static: bool) -> None:
        """Put a batch's lists into the cache; compute instructions that are new to their session.

        Host side, before any captured region. What it writes into session buffers counts only when
        the whole request succeeds.
        """
        text, counts = batch.tensors["token_len"].tolist(), batch.tensors["frame_len"].tolist()
        seen = [0] * batch.rows
        if shape.session:
            seen = cache["session.frames"][: batch.rows, 0].tolist()
            cache["session.frames"][: batch.rows, 0] += torch.tensor(counts, device=cache.device)
            self.prompts.refresh_rows(cache, batch.tensors["token_ids"], text)
        rows = [RowFacts(n, new, not old) for n, new, old in zip(text, counts, seen, strict=True)]
        if static:  # rows behind the batch repeat its first inputs
            rows += [RowFacts(text[0], counts[0])] * (cache.capacity - batch.rows)
        plan = plan_batch(rows, shape, self.config, self.rope.start, static=static)
        for name, values in plan.tensors().items():
            self._view(cache, name, values.numel()).copy_(values.flatten())
        cache.plan = plan
        if self.profile.recorder.active:
            sizes = self.config.backbone
            long = rows[0].text + self.config.window_tokens > self.rope.original
            self.profile.record("rope_inv_freq", inverse_frequencies(sizes, long=long))

    def _view(self, cache: Cache, name: str, size: int) -> Tensor:
        return cache[f"plan.{name}"].view(-1)[:size]

    # ------------------------------------------------------------ device

    def encode(self, cache: Cache, towers: Towers | None) -> None:
        """Compute the control state of every row into buffer ``control``."""
        plan: WindowPlan = cache.plan
        with self.profile.stage("vision"):
            coarse, fine = self._features(cache, plan, towers)
        with self.profile.stage("project"):
            history, current = self._projected(cache, plan, coarse, fine)
            x = self._sequence(cache, plan, history, current)
        with self.profile.stage("backbone"):
            self.profile.count("backbone_tokens", x.shape[0])
            record = self._recorder(x, cache, plan)
            control = self.backbone(x, self._tokens(cache, plan), record)
            cache["control"][: plan.rows].copy_(control)
            if record is not None:
                record("control_state", control[: cache.rows])

    def _features(
        self, cache: Cache, plan: WindowPlan, towers: Towers | None
    ) -> tuple[Tensor, Tensor]:
        """Return coarse features of new frames [N, C, D], fine ones of the current [B, F, D]."""
        at = self._view(cache, "frame_at", plan.frame_at.numel())
        frames = cache.inputs.get("frames")
        if frames is None:
            coarse = cache.inputs["coarse"].flatten(0, 1).index_select(0, at)
            return coarse, cache.inputs["fine"][: plan.rows]
        assert towers is not None
        self.profile.count("vision_frames", len(at))
        coarse, fine = towers(frames.flatten(0, 1).index_select(0, at))
        return coarse, fine.index_select(0, self._view(cache, "current_at", plan.rows))

    def _projected(
        self, cache: Cache, plan: WindowPlan, coarse: Tensor, fine: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return tokens of all history slots [B, H, C, W] and of the current frame [B, F, W]."""
        history = self.config.history_frames
        if not history:
            coarse = coarse[:0]
        self.profile.count("projected_tokens", coarse.shape[:2].numel() + fine.shape[:2].numel())
        new = coarse.shape[:2].numel()
        tokens = self.projector(torch.cat([coarse.flatten(0, 1), fine.flatten(0, 1)]))
        width = tokens.shape[-1]
        source = tokens[:new].view(*coarse.shape[:2], width)
        kept = plan.past_slots is not None
        if kept:
            source = torch.cat([cache["session.window"][: plan.rows].flatten(0, 1), source])
        at = self._view(cache, "window_at", plan.rows * history)
        slots = source.index_select(0, at).view(plan.rows, history, *source.shape[1:])
        if kept:
            cache["session.window"][: plan.rows].copy_(slots)
        return slots, tokens[new:].view(plan.rows, -1, width)

    def _sequence(self, cache: Cache, plan: WindowPlan, history: Tensor, current: Tensor) -> Tensor:
        """Return the packed tokens [M, W] in the decoder's dtype."""
        times = cache.inputs["times"][: plan.rows]
        past = self.markers(times[:, :-1], 0).unsqueeze(2)
        now = self.markers(times[:, -1:], 1)
        control = self.control_query.expand(plan.rows, -1, -1)
        framed = torch.cat([past, history], dim=2).flatten(1, 2)
        window = torch.cat([framed, now, current, control], dim=1).flatten(0, 1)
        window = window.to(self.backbone.dtype)
        if plan.order is None:
            return window
        text = self.backbone.embed(cache.inputs["token_ids"][: plan.rows].flatten())
        self.profile.count("prompt_tokens", plan.order.numel() - len(window))
        order = self._view(cache, "order", plan.order.numel())
        return torch.cat([window, text]).index_select(0, order)

    def _tokens(self, cache: Cache, plan: WindowPlan) -> Tokens:
        cos, sin = self.rope.at(self._view(cache, "positions", plan.positions.numel()))
        past = None
        if plan.past_slots is not None:
            k, v = (cache[f"session.prompt_{part}"][: plan.rows, :, : plan.text] for part in "kv")
            past = Past(k, v, self._view(cache, "past_slots", plan.past_slots.numel()))
        mask = None
        if plan.key_mask is not None:
            mask = self._view(cache, "key_mask", plan.rows * plan.stride)
            mask = mask.view(plan.rows, plan.stride)
        return Tokens(
            cos,
            sin,
            self._view(cache, "slots", plan.slots.numel()),
            plan.rows,
            plan.stride,
            plan.dense,
            mask,
            self._view(cache, "control_at", plan.rows),
            past,
        )

    def _recorder(self, x: Tensor, cache: Cache, plan: WindowPlan) -> Record | None:
        """Return what listens to the decoder; None = nobody, and the last layer stays small."""
        recorder = self.profile.recorder
        if not recorder.inside:
            return None

        def see(name: str, value: Tensor) -> None:
            recorder.put(name if name == "control_state" else f"backbone.{name}", value)

        recorder.put("sequence", x)
        tokens = self._tokens(cache, plan)
        recorder.put("rope_cos", tokens.cos)
        recorder.put("rope_sin", tokens.sin)
        return see
