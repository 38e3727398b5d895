"""The text expert (UND): keys and values of every layer for each distinct text, once per request.

Nothing flows from media to text, so they hold for all steps, and for every later request with the
same text; those come out of the memo. Of the last layer only keys and values exist. Texts are
computed one by one: how a product of matrices is rounded may depend on its rows, and a text's bits
must not depend on the texts beside it, nor on which of these are remembered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.layers import Placement, VocabParallelEmbedding
from phyai.memo import Memo
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.network.layer import ExpertLayer, text_names
from phyai.models.cosmos3.network.layout import MediaLayout, Prompt, TextPlan
from phyai.models.cosmos3.network.positions import text_positions
from phyai.models.cosmos3.network.recording import record, records
from phyai.models.cosmos3.network.rope import MRope
from phyai.timers import Profile
from phyai.types import BufferSpec, Key


class TextKV(NamedTuple):
    """Keys (normed and rotated) and values of one text, [layers, tokens, K, D]."""

    k: Tensor
    v: Tensor


class Cosmos3Text(nn.Module):
    """Fills cache buffers ``und.k`` and ``und.v`` [B, layers, n, K, D] from texts.

    memo: None computes every text anew.
    full_last: also build, load and compute what no result depends on: the rest of the last layer,
        for recordings of its output.
    embedding_in_file: the token table stays in the checkpoint's file, where device and dtype fit.
    """

    def __init__(
        self,
        config: Cosmos3Config,
        at: Placement,
        profile: Profile,
        memo: Memo | None = None,
        *,
        full_last: bool = False,
        embedding_in_file: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.profile, self.memo = config, profile, memo
        stack = at.with_role("prefix")
        self.dtype, self.device, self._alone = stack.dtype, stack.device, stack.tp.size == 1
        self.embed = VocabParallelEmbedding(
            "embed_tokens.weight",
            config.vocab_size,
            config.hidden_size,
            stack,
            in_file=embedding_in_file,
        )
        last = config.num_hidden_layers - 1
        self.layers = nn.ModuleList(
            ExpertLayer(text_names(i), config, stack, only_kv=i == last and not full_last)
            for i in range(config.num_hidden_layers)
        )
        self.rope = MRope(config, stack)
        first = self.layers[0]
        assert isinstance(first, ExpertLayer)
        self.kv_heads, self.scale = first.shards.kv_heads, config.head_dim**-0.5
        self._attention = stack.select(
            "causal_attention",
            head_dim=config.head_dim,
            heads=first.shards.heads,
            kv_heads=self.kv_heads,
        )

    def cache_buffers(self, key: Key) -> Mapping[str, BufferSpec]:
        layers, text = self.config.num_hidden_layers, MediaLayout.of(key, self.config).text
        kv = BufferSpec((layers, text, self.kv_heads, self.config.head_dim), self.dtype)
        return {"und.k": kv, "und.v": kv}

    def encode(self, cache: Cache) -> None:
        """Fill the buffers of every row; ``cache.plan`` is the TextPlan of the batch."""
        plan: TextPlan = cache.plan
        found = self._recall(plan.prompts)
        absent = [prompt for prompt in plan.prompts if prompt not in found]
        if absent:
            found |= self._compute(absent, cache)
        for row, number in enumerate(plan.prompt_of):
            prompt = plan.prompts[number]
            for name, values in zip(("und.k", "und.v"), found[prompt], strict=True):
                cache[name][row, :, : len(prompt)].copy_(values)
                cache[name][row, :, len(prompt) :].zero_()  # hidden, but not from a NaN's product
        self._record_kv(cache, plan)

    def forward(self, prompt: Prompt, outs: list[Tensor] | None = None) -> TextKV:
        """Return keys and values of one text.

        outs: is given each layer's output, [tokens, W], where somebody wants to see them.
        """
        ids = torch.tensor(prompt, device=self.device)
        cos, sin = self.rope(text_positions(len(prompt)).to(self.device)[None])
        self.profile.count("und_tokens", len(prompt))
        self.profile.count("und_rows")
        x, y = self.embed(ids)[None], None
        keys, values = [], []
        for layer in self.layers:
            assert isinstance(layer, ExpertLayer)
            if layer.only_kv:
                k, v = layer.project_kv(x, y, cos, sin)
            else:
                x, q, k, v = layer.project(x, y, cos, sin)
            keys.append(k[0])
            values.append(v[0])
            if layer.only_kv:
                break
            x, y = layer.finish(x, self._attention(q, k, v, self.scale))
            if outs is not None:
                outs.append((x + y)[0])
        return TextKV(torch.stack(keys), torch.stack(values))

    def _recall(self, prompts: Sequence[Prompt]) -> dict[Prompt, TextKV]:
        """Return what the memo has; nothing while somebody wants to see how it is made."""
        # Ranks of which only one is listened to must still take one path: they share collectives.
        if self.memo is None or (self._alone and records(self.profile)):
            return {}
        held = {prompt: self.memo.get(("und", prompt)) for prompt in prompts}
        return {prompt: TextKV(kv["k"], kv["v"]) for prompt, kv in held.items() if kv is not None}

    def _compute(self, prompts: Sequence[Prompt], cache: Cache) -> dict[Prompt, TextKV]:
        outs: list[list[Tensor]] = [[] for _ in prompts]
        watched = records(self.profile)
        made = {
            prompt: self(prompt, out if watched else None)
            for prompt, out in zip(prompts, outs, strict=True)
        }
        for i, of_texts in enumerate(zip(*outs, strict=True)):
            record(self.profile, cache, f"und.{i}.out", torch.cat(of_texts))
        if self.memo is not None:
            for prompt, kv in made.items():
                self.memo.put(("und", prompt), kv._asdict())
        return made

    def _record_kv(self, cache: Cache, plan: TextPlan) -> None:
        if not records(self.profile):
            return
        lens = plan.lens[: cache.rows]
        for name in "kv":
            for i in range(len(self.layers)):
                rows = [cache[f"und.{name}"][row, i, :n] for row, n in enumerate(lens)]
                record(self.profile, cache, f"und.{i}.{name}", torch.cat(rows))
