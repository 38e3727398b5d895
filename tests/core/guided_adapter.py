"""A small guided flow: two leaves, prompts of different lengths per branch, tables per step.

Tensor-parallel ranks share the words, and at each step the columns of the actions; what they add up
is zero on all but one of them, so that the sums are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phyai.adapter import Adapter, AdapterArgs
from phyai.errors import RequestError
from phyai.parallel import ParallelService
from phyai.types import BufferSpec, Key, Prepared

WIDTH, HORIZON, ACTIONS, PIXELS = 3, 2, 2, 5


@dataclass
class GuidedArgs(AdapterArgs):
    """unit: the graph unit.  reads: a value of the step the network reads, against the rules.

    refuses: words that ``plan`` refuses.  fail_at: (rank, n): there the n-th evaluation raises.
    """

    max_batch_size: int = 4
    unit: str = "loop"
    encode_safe: bool = True
    network_safe: bool = True
    reads: str = ""
    refuses: tuple[int, ...] = ()
    fail_at: tuple[int, int] | None = None
    log: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class GuidedRequest:
    """tokens [B, n] and uncond [B, m] int64; scale [B]; uncond=None: one branch."""

    tokens: Tensor
    uncond: Tensor | None = None
    scale: Tensor | None = None
    steps: int = 4
    interval: tuple[float, float] | None = None
    known: bool = False
    rtc: bool = False
    extra: Mapping[str, Tensor] = field(default_factory=dict)


class Network(torch.nn.Module):
    """v = table[step] * x + what the branch's prompt says, other numbers for each leaf."""

    prediction = "velocity"

    def __init__(self, args: GuidedArgs, parallel: ParallelService) -> None:
        super().__init__()
        self.tp, self.rank = parallel.tp, parallel.rank
        generator = torch.Generator().manual_seed(1)
        self.words = torch.nn.Parameter(torch.randn(16, WIDTH, generator=generator))
        self.gain = torch.nn.Parameter(torch.tensor(0.5))
        self.args, self.tables = args, {}  # type: ignore[var-annotated]
        self.capture_safe = args.network_safe
        self.branches: list[str] = []

    def prepare_grid(self, grid: Any) -> None:
        sigmas = grid[0].grid
        table = self.tables.setdefault(sigmas, torch.empty(len(sigmas)))
        table.copy_(self.gain.detach() + torch.tensor(sigmas))

    def release_grid(self, grid: Any) -> None:
        del self.tables[grid[0].grid]

    def forward(self, x: Any, step: Any, cache: Any) -> dict[str, Tensor]:
        if self.args.reads:
            getattr(step, self.args.reads)
        self.branches.append(cache.branch)
        level = step.row(self.tables[step.grid])
        prompt = cache["prompt"].mean(1)  # [B, WIDTH]
        own = torch.arange(ACTIONS) % self.tp.size == self.tp.rank
        action = self.tp.all_reduce((level * x["action"] + prompt[:, None, :ACTIONS]) * own)
        if self.args.fail_at == (self.rank, len(self.branches)):
            raise ValueError(f"rank {self.rank} cannot")
        return {"action": action, "video": torch.tanh(level * x["video"]) + prompt[:, 2:]}


class Encoding:
    """Words of the branch's prompt into its buffer, which has the branch's own length."""

    def __init__(self, adapter: GuidedAdapter) -> None:
        self.adapter, self.capture_safe = adapter, adapter.args.encode_safe
        self.network = adapter.network

    def plan(self, cache: Any, batch: Any) -> None:
        tokens = batch.tensors["tokens"]
        self.adapter.args.log.append(("plan", cache.branch, tuple(tokens.shape)))
        if word := set(tokens.flatten().tolist()) & set(self.adapter.args.refuses):
            raise RequestError(f"words must be known; got {sorted(word)}. Use others.")

    def encode(self, cache: Any) -> None:
        self.adapter.args.log.append(("encode", cache.branch, tuple(cache["prompt"].shape)))
        tokens, tp = cache.inputs["tokens"], self.network.tp
        words = torch.nn.functional.embedding(tokens, self.network.words)
        cache["prompt"].copy_(tp.all_reduce(words * (tokens % tp.size == tp.rank)[..., None]))


class GuidedAdapter(Adapter):
    name = "guided"
    args_cls = GuidedArgs
    parallel = frozenset({"cfg", "tp"})
    args: GuidedArgs

    def __init__(self, args: Any, config: Any, services: Any) -> None:
        super().__init__(args, config, services)
        self.graph_unit = args.unit

    def load(self) -> None:
        self.network = Network(self.args, self.services.parallel)

    def update_weights(self, items: Any) -> None:
        with torch.no_grad():
            for name, value in items:
                getattr(self.network, name).copy_(value)

    def prepare(self, request: GuidedRequest) -> Prepared:
        return prepared(request)

    def denoiser(self) -> Any:
        return self.network

    def conditioning(self) -> Any:
        return Encoding(self)

    def cache(self) -> Any:
        return lambda key: {"prompt": BufferSpec((key.bucket("tokens"), WIDTH), torch.float32)}

    def output(self) -> Any:
        return Both()


class Both:
    """Every leaf, as it is."""

    def decode(self, x: Any, cache: Any, prepared: Any) -> Any:
        raise AssertionError("model requests only")

    def tensors(self, x: Any, cache: Any, prepared: Any) -> Any:
        return dict(x)


def prepared(request: GuidedRequest) -> Prepared:
    rows, length = request.tokens.shape
    buckets = [("tokens", length)]
    tensors = {"tokens": request.tokens, **noise(rows)}
    if request.uncond is not None:
        buckets.append(("uncond.tokens", request.uncond.shape[1]))
        tensors["uncond/tokens"] = request.uncond
        scale = torch.full((rows,), 3.0) if request.scale is None else request.scale
        tensors["guidance.scale"] = scale
    if request.known:
        mask = torch.zeros(rows, HORIZON, ACTIONS, dtype=torch.bool)
        mask[:, 0] = True
        tensors["known.action.mask"] = mask
        tensors["known.action.value"] = torch.full((rows, HORIZON, ACTIONS), 0.25)
    if request.rtc:
        tensors["rtc.w"] = torch.ones(rows, HORIZON)
        tensors["rtc.prev"] = torch.zeros(rows, HORIZON, ACTIONS)
        tensors["rtc.max"] = torch.full((rows,), 0.5)
    key = Key(
        num_steps=request.steps,
        buckets=tuple(buckets),
        branches=("cond",) if request.uncond is None else ("cond", "uncond"),
        guidance_interval=request.interval,
        rtc="guided" if request.rtc else "off",
    )
    return Prepared({**tensors, **request.extra}, rows, key)


def noise(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "noise.action": torch.randn(rows, HORIZON, ACTIONS, generator=generator),
        "noise.video": torch.randn(rows, 1, generator=generator),
    }


def by_hand(network: Network, request: GuidedRequest) -> dict[str, Tensor]:
    """The guided loop in plain Python."""
    batch = prepared(request)
    x = {leaf: batch.tensors[f"noise.{leaf}"] for leaf in ("action", "video")}
    scale = batch.tensors.get("guidance.scale")

    def predicted(tokens: Tensor, sigma: float) -> dict[str, Tensor]:
        level = network.gain.detach() + sigma
        prompt = network.words.detach()[tokens].mean(1)
        action = level * x["action"] + prompt[:, None, :ACTIONS]
        return {"action": action, "video": torch.tanh(level * x["video"]) + prompt[:, 2:]}

    for k in range(request.steps):
        sigma = 1.0 - k / request.steps
        if request.known:
            x["action"][:, 0] = 0.25
        v = predicted(request.tokens, sigma)
        inside = request.interval is None or request.interval[0] < sigma < request.interval[1]
        if request.uncond is not None and scale is not None and inside:
            other = predicted(request.uncond, sigma)
            v = {
                n: other[n] + scale.view(-1, *(1,) * (t.ndim - 1)) * (t - other[n])
                for n, t in v.items()
            }
        x = {n: t - v[n] / request.steps for n, t in x.items()}
    if request.known:
        x["action"][:, 0] = 0.25
    return x
