"""Keys and values of a session's instruction: computed when it is new, then only read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phyai.cache import Cache
from phyai.models.minicpm_robot_track.config import MiniCPMRobotTrackConfig
from phyai.models.minicpm_robot_track.network.backbone import Backbone, Tokens, packed_rows
from phyai.models.minicpm_robot_track.network.rope import RopeTables
from phyai.timers import Profile
from phyai.types import BufferSpec


class PromptKeys:
    """Fills the session buffers ``session.prompt_*`` of rows whose instruction changed.

    The text stands first and attention is causal, so its keys and values hang on nothing else.
    """

    def __init__(
        self,
        backbone: Backbone,
        rope: RopeTables,
        profile: Profile,
        config: MiniCPMRobotTrackConfig,
        max_text: int,
    ) -> None:
        self.backbone, self.rope, self.profile = backbone, rope, profile
        self.window, self.max_text = config.window_tokens, max_text
        self.version = 1
        """Of the weights; a session's row holds the one its keys were computed with, 0 at first."""

    def session_buffers(self) -> Mapping[str, BufferSpec]:
        sizes = self.backbone.sizes
        shape = (
            sizes.num_hidden_layers,
            self.max_text,
            sizes.num_key_value_heads,
            sizes.head_dim,
        )
        keys = BufferSpec(shape, self.backbone.dtype, session=True)
        return {
            "session.prompt_k": keys,
            "session.prompt_v": keys,
            "session.prompt_ids": BufferSpec((self.max_text,), torch.int64, session=True),
            # text tokens, version of the weights
            "session.prompt_made": BufferSpec((2,), torch.int64, session=True),
        }

    def refresh_rows(self, cache: Cache, ids: Tensor, lens: Sequence[int]) -> None:
        """Compute the instructions that rows of a batch do not hold yet; host side.

        ids: CPU int64 [B, T], right padded.
        """
        rows = len(lens)
        kept = cache["session.prompt_ids"][:rows].cpu()
        made = cache["session.prompt_made"][:rows].tolist()
        stale = [
            r
            for r, n in enumerate(lens)
            if made[r] != [n, self.version] or not torch.equal(kept[r, :n], ids[r, :n])
        ]
        if stale:
            with self.profile.stage("prompt"):
                self._compute(cache, stale, [ids[r, : lens[r]] for r in stale])

    def _compute(self, cache: Cache, rows: Sequence[int], texts: Sequence[Tensor]) -> None:
        lens = [len(text) for text in texts]
        self.profile.count("prompt_tokens", sum(lens))
        stride, device = max(lens), cache.device
        at, slots = packed_rows(lens, [self.rope.start(n + self.window) for n in lens], stride)
        cos, sin = self.rope.at(at.to(device))
        dense = len(set(lens)) == 1
        tokens = Tokens(cos, sin, slots.to(device), len(rows), stride, dense)
        starts = [sum(lens[:i]) for i in range(len(lens))]

        def keep(layer: int, k: Tensor, v: Tensor) -> None:
            for row, start, n in zip(rows, starts, lens, strict=True):
                cache["session.prompt_k"][row, layer, :n].copy_(k[start : start + n])
                cache["session.prompt_v"][row, layer, :n].copy_(v[start : start + n])

        x = self.backbone.embed(torch.cat(list(texts)).to(device))
        self.backbone.keys_only(x, tokens, keep)
        for row, text, n in zip(rows, texts, lens, strict=True):
            cache["session.prompt_ids"][row, :n].copy_(text)
            cache["session.prompt_made"][row].copy_(torch.tensor([n, self.version]))
