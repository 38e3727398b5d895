"""The prefix: cameras and prompt through the vision tower and the language model, K/V kept.

Only valid tokens are computed (see ``plan``), the cameras of all rows go through the tower as one
batch, and the last layer computes K/V only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.layers import Linear, Placement, VisionConfig, VisionTower
from phyai.models.pi.config import PiConfig
from phyai.models.pi.network.gemma import (
    DecoderLayer,
    Embedding,
    PlainNorm,
    Rotation,
    Stream,
    Target,
    head_shards,
)
from phyai.models.pi.network.plan import PrefixPlan, PrefixShape
from phyai.models.pi.network.precision import Precision
from phyai.timers import Profile
from phyai.types import BufferSpec

PALIGEMMA = "paligemma_with_expert.paligemma"
VISION = f"{PALIGEMMA}.model.vision_tower.vision_model"
LANGUAGE = f"{PALIGEMMA}.model.language_model"
PLAN_LISTS = ("images", "token_ids", "order", "positions", "slots", "q_slots")


class Prefix(nn.Module):
    """Vision tower, projector, token embedding and language layers.

    Writes cache buffers ``k.<layer>``, ``v.<layer>`` [B, stride, K, D] (K after rotation), of this
    rank's key heads. Tensor parallel: embedding and language layers; the tower is on every rank.
    """

    def __init__(
        self,
        config: PiConfig,
        precision: Precision,
        at: Placement,
        profile: Profile,
        *,
        embedding_in_file: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.profile, self.stack = config, profile, precision.stack
        text, vision = config.text, config.vision
        # About how many tokens a request has; each layer serves any number.
        patches = vision.num_patches * max(len(config.cameras), 1)
        tokens = patches + config.tokenizer_max_length
        stack = at.with_dtype(precision.stack).with_role("prefix", tokens)
        tower = at.with_dtype(precision.vision).with_role("vision", patches)
        sizes = VisionConfig(
            vision.hidden_size,
            vision.num_hidden_layers,
            vision.num_attention_heads,
            vision.intermediate_size,
            vision.patch_size,
            vision.image_size,
            vision.num_channels,
            vision.layer_norm_eps,
        )
        self.vision = VisionTower(VISION, sizes, tower)
        self.projector = Linear(
            f"{PALIGEMMA}.model.multi_modal_projector.linear",
            vision.hidden_size,
            text.hidden_size,
            tower,
            bias=True,
        )
        self.embed = Embedding(
            (f"{LANGUAGE}.embed_tokens.weight", f"{PALIGEMMA}.lm_head.weight"),
            text,
            stack,
            rounded_scale=precision.name != "bf16_openpi",
            in_file=embedding_in_file,
        )
        self.layers = nn.ModuleList(
            DecoderLayer(
                f"{LANGUAGE}.layers.{i}",
                text,
                stack,
                PlainNorm,
                split_kv=i == text.num_hidden_layers - 1,
            )
            for i in range(text.num_hidden_layers)
        )
        self.norm = PlainNorm(f"{LANGUAGE}.norm", text.hidden_size, text.rms_norm_eps, stack)
        self.scale, self.rope_freq = text.head_dim**-0.5, precision.rope_freq
        self._rope = stack.select("rope_cos_sin")
        shards = head_shards(text, stack)
        self.kv_heads = shards.kv_heads
        facts = {"head_dim": text.head_dim, "heads": shards.heads, "kv_heads": shards.kv_heads}
        self._dense = stack.select("attention", masked=False, **facts)
        self._masked = stack.select("attention", masked=True, **facts)

    def cache_buffers(self, shape: PrefixShape) -> Mapping[str, BufferSpec]:
        """Return the cache buffers of one cache, per row."""
        text = self.config.text
        kv = BufferSpec((shape.stride, self.kv_heads, text.head_dim), self.stack, scratch=True)
        sizes = {"images": shape.cameras, "token_ids": shape.tokens}
        specs = {
            f"plan.{name}": BufferSpec((sizes.get(name, shape.prefix),), torch.int64)
            for name in PLAN_LISTS
        }
        specs["prefix.lens"] = BufferSpec((), torch.int64)
        specs["prefix.key_mask"] = BufferSpec((shape.prefix,), torch.bool)
        for layer in range(text.num_hidden_layers):
            specs[f"k.{layer}"] = specs[f"v.{layer}"] = kv
        return specs

    def load_plan(self, cache: Cache, plan: PrefixPlan) -> None:
        """Put a batch's index lists into the cache; host side, before any captured region."""
        cache.plan = plan
        for name in PLAN_LISTS:
            values: Tensor = getattr(plan, name)
            cache[f"plan.{name}"].view(-1)[: values.numel()].copy_(values)
        cache["prefix.lens"].copy_(plan.lens)
        places = torch.arange(cache["prefix.key_mask"].shape[1])
        cache["prefix.key_mask"].copy_(places[None] < plan.lens[:, None])

    def encode(self, cache: Cache) -> None:
        """Fill K/V of every layer; inputs ``images`` [B, C, 3, S, S], and the plan's lists."""
        index = {name: self._list(cache, name) for name in PLAN_LISTS}
        with self.profile.stage("vision"):
            x = self._embed(cache, index)
        with self.profile.stage("prefix"):
            self._language(cache, index, x)

    def _language(self, cache: Cache, index: Mapping[str, Tensor], x: Tensor) -> None:
        """Run the language layers on packed embeddings x [N, W], keeping K/V of every layer."""
        plan: PrefixPlan = cache.plan
        recorder = self.profile.recorder
        if recorder.active:
            recorder.put("prefix.lens", plan.lens[: cache.rows])
        self._record("prefix.embs", x, plan)
        self._record("prefix.positions", index["positions"], plan)
        rotation = Rotation(
            *self._rope(
                index["positions"][None],
                self.config.text.head_dim,
                self.config.text.rope_theta,
                self.stack,
                self.rope_freq,
            )
        )
        stream, last = Stream(x.to(self.stack)[None]), len(self.layers) - 1
        tokens = x.shape[0]
        self.profile.count("prefix_tokens", tokens)
        full = recorder.wants("prefix.last_hidden")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            x, n, _ = layer.norm1(stream)
            k, v = (cache[f"{name}.{i}"].flatten(0, 1) for name in "kv")
            target = Target(k, v, index["slots"])
            self.profile.count(f"prefix_rows.layer{i}.kv", tokens)
            if i == last and not full:
                layer.project_kv(n, rotation, target)
                self._record_kv(i, target, plan)
                return
            q = layer.project(n, rotation, target)
            self._record_kv(i, target, plan)
            self.profile.count(f"prefix_rows.layer{i}.full", tokens)
            mixed = self._attend(cache, i, q[0], index["q_slots"], plan)
            stream = layer.finish(x, mixed[None], None, None)
        self._record("prefix.last_hidden", self.norm(stream).n[0], plan)

    def _record_kv(self, layer: int, target: Target, plan: PrefixPlan) -> None:
        if self.profile.recorder.active:
            for name, buffer in (("k", target.k), ("v", target.v)):
                self._record(f"prefix.{name}.{layer}", buffer[target.slots], plan)

    def _embed(self, cache: Cache, index: Mapping[str, Tensor]) -> Tensor:
        """Return packed prefix embeddings [N, W]: image features unscaled, text times sqrt(W)."""
        parts = [self.embed(index["token_ids"])]
        self.profile.count("prompt_tokens", parts[0].shape[0])
        if index["images"].numel():
            images = cache.inputs["images"].flatten(0, 1).index_select(0, index["images"])
            self.profile.count("vision_calls")
            self.profile.count("vision_images", images.shape[0])
            features = self.projector(self.vision(images))
            parts.insert(0, features.flatten(0, 1))
        return torch.cat(parts).index_select(0, index["order"])

    def _attend(
        self, cache: Cache, layer: int, q: Tensor, q_slots: Tensor, plan: PrefixPlan
    ) -> Tensor:
        """Return attention [N, H, D] of packed queries, every row over its own valid tokens."""
        k, v = cache[f"k.{layer}"], cache[f"v.{layer}"]
        k, v = k[:, : plan.max_len], v[:, : plan.max_len]
        heads, head_dim = q.shape[1:]
        if plan.uniform is not None:
            rows = q.view(plan.rows, plan.uniform, heads, head_dim)
            out: Tensor = self._dense(rows, k, v, self.scale)
            return out.flatten(0, 1)
        padded = q.new_zeros(plan.rows * plan.max_len + 1, heads, head_dim)
        padded.index_copy_(0, q_slots, q)
        rows = padded[:-1].view(plan.rows, plan.max_len, heads, head_dim)
        mask = cache["prefix.key_mask"][:, : plan.max_len]
        mixed: Tensor = self._masked(rows, k, v, self.scale, key_mask=mask).flatten(0, 1)
        # the sentinel entry of a static plan reads row 0 again; nobody uses it
        return mixed.index_select(0, q_slots.clamp(max=mixed.shape[0] - 1))

    def _record(self, name: str, packed: Tensor, plan: PrefixPlan) -> None:
        """Put a packed tensor's valid tokens into the recorder.

        ``plan.valid`` is read only while somebody listens: a traced region must not depend on it.
        """
        if self.profile.recorder.active:
            self.profile.recorder.put(name, packed[: plan.valid])

    @staticmethod
    def _list(cache: Cache, name: str) -> Tensor:
        size = getattr(cache.plan, name).numel()
        return cache[f"plan.{name}"].view(-1)[:size]
