"""Once per branch of a request: the text's keys and values, and what every step reads."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from phyai.cache import Cache
from phyai.errors import RequestError
from phyai.models.cosmos3.network.denoiser import Cosmos3Denoiser
from phyai.models.cosmos3.network.layout import EVEN, plan_text
from phyai.models.cosmos3.network.text import Cosmos3Text
from phyai.timers import Profile
from phyai.types import BufferSpec, Key, Prepared


class Cosmos3Conditioning:
    """plan() reads the batch's texts on the host, encode() runs them or recalls them.

    Inputs: ``tokens`` [B, n] int64, right padded, ``token_len`` [B], ``positions`` [B, 3, N]
    float32, ``domain`` [B] with actions, ``known.<leaf>.mask``.
    static: shapes are a captured graph's (``services.graphs.static_shapes``): media attend without
        a mask only where the key says that all rows' texts fill the bucket, with
        ``("even", branches)`` in ``Key.extra``.
    Not capture-safe: which texts are in the memo is known on the host alone.
    """

    capture_safe = False

    def __init__(
        self, text: Cosmos3Text, denoiser: Cosmos3Denoiser, profile: Profile, *, static: bool
    ) -> None:
        self.text, self.denoiser, self.profile, self.static = text, denoiser, profile, static

    def cache_buffers(self, key: Key) -> Mapping[str, BufferSpec]:
        """Return all buffers of a branch's cache; the adapter's CacheSpec."""
        return {**self.text.cache_buffers(key), **self.denoiser.cache_buffers(key)}

    def plan(self, cache: Cache, batch: Prepared) -> None:
        """Put the TextPlan of the batch into the cache.

        Raises: RequestError for a token or a domain that the checkpoint does not have.
        """
        even: bool | None = None
        if self.static:
            even = cache.branch in dict(cache.key.extra).get(EVEN, ())
        vocab, domains = self.text.config.vocab_size, self.text.config.num_embodiment_domains
        cache.plan = plan_text(batch, cache.branch, cache.capacity, vocab, even=even)
        domain = batch.tensors.get("domain")
        if domain is not None and bool(((domain < 0) | (domain >= domains)).any()):
            raise RequestError(
                f"domain ids must be in [0, {domains}); got {domain.tolist()}. "
                "Use a domain of this checkpoint."
            )

    def encode(self, cache: Cache) -> None:
        with self.profile.stage("text"):
            self.text.encode(cache)
        with self.profile.stage("layout"):
            self.denoiser.encode(cache)

    def modules(self) -> nn.ModuleDict:
        """Return what a checkpoint fills."""
        return nn.ModuleDict({"text": self.text, "denoiser": self.denoiser})
