"""What each tensor-parallel rank of a tiny pi engine does, and what one rank alone says."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phyai.adapter import Adapter
from phyai.engine_config import DeviceConfig, EngineConfig, KernelConfig, ParallelConfig
from phyai.engine_core import EngineCore
from phyai.parallel import ParallelService
from tests.pi.tiny_engines import ARGS, GOLDEN, REQUESTS, VOCAB

FORWARD, LOOP = 1, 10
UPDATED = "paligemma_with_expert.gemma_expert.model.layers.0.mlp.down_proj.weight"
STACKS = re.compile(r"\.(language_model|gemma_expert\.model)\.layers\.\d+\.(self_attn|mlp)\.")


def core_of(
    model: str,
    parallel: ParallelService | None = None,
    kernel: KernelConfig | None = None,
    **changes: Any,
) -> EngineCore:
    root, mesh = (
        GOLDEN / model,
        ParallelService.single().mesh if parallel is None else parallel.mesh,
    )
    args = ARGS[model](
        **{
            "checkpoint_dir": str(root),
            "max_batch_size": 2,
            "precision": "fp32",
            "tokenizer": str(root / "tokenizer"),
            "processor_dir": str(root / "processors_abs"),
            **changes,
        }
    )
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        parallel=ParallelConfig(tp_size=mesh.tp, cfg_size=mesh.cfg),
        kernel=kernel or KernelConfig(),
    )
    return EngineCore(model, args, config, parallel=parallel)


def request(core: EngineCore, steps: int, rows: int = 2, seed: int = 0) -> Any:
    pi: Any = core.adapter.pi  # type: ignore[attr-defined]
    random = torch.Generator().manual_seed(seed)
    size = pi.vision.image_size
    fields: dict[str, Any] = {
        "pixel_values": torch.rand(rows, 2, 3, size, size, generator=random) * 2 - 1,
        "input_ids": torch.randint(1, VOCAB, (rows, 12), generator=random),
        "lang_lens": torch.tensor([12, 7][:rows]),
        "noise": torch.randn(rows, pi.chunk_size, pi.max_action_dim, generator=random),
        "num_steps": steps,
    }
    if core.plugin == "pi0":
        fields["state"] = torch.randn(rows, pi.max_state_dim, generator=random)
    return REQUESTS[core.plugin](**fields)


def answers(core: EngineCore) -> dict[str, Any]:
    """Return results of one forward, of a loop, and after an update of a shared weight."""
    found = {"forward": core.step(request(core, FORWARD)), "loop": core.step(request(core, LOOP))}
    core.update_weights([(UPDATED, changed_weight(core))])
    found["updated"] = core.step(request(core, LOOP))
    return {name: np.asarray(value) for name, value in found.items()}


def changed_weight(core: EngineCore) -> torch.Tensor:
    config = core.adapter.pi.expert  # type: ignore[attr-defined]
    random = torch.Generator().manual_seed(9)
    return torch.randn(config.hidden_size, config.intermediate_size, generator=random) / 10


def tp_rank(parallel: ParallelService, model: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Run the requests of ``answers``; return them with what was read, held and exchanged."""
    core = core_of(model, parallel, **changes)
    report, profile, tp = core.load_report, core.services.profile, parallel.tp
    tp.traffic.reset()
    profile.counters.clear()
    core.step(request(core, LOOP))
    traffic = (tp.traffic.collectives, tp.traffic.payload_bytes)
    tokens = {name: profile.counters[name] for name in ("prefix_tokens", "prompt_tokens")}
    found = {
        "bytes_read": None if report is None else report.bytes_read,
        "traffic": traffic,
        "tokens": tokens,
        "cache": _cache_shapes(core),
        "held": _held(core.adapter),
        "answers": answers(core),
    }
    core.close()
    return found


def expected_exchange(
    adapter: Any, tokens: dict[str, int], rows: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return collectives and bytes to encode, and per step, by the formula of docs/parallel.md."""
    text, expert, itemsize = adapter.pi.text, adapter.pi.expert, 4
    language = 2 * (text.num_hidden_layers - 1)
    state = 2 * (expert.num_hidden_layers - 1) if adapter.pi.model == "pi0" else 0
    values = (tokens["prompt_tokens"] + language * tokens["prefix_tokens"]) * text.hidden_size
    values += state * rows * expert.hidden_size
    step = 2 * expert.num_hidden_layers
    of_step = step * adapter.pi.chunk_size * rows * expert.hidden_size
    return (1 + language + state, values * itemsize), (step, of_step * itemsize)


def expected_traffic(
    core: EngineCore, tokens: dict[str, int], rows: int, steps: int
) -> tuple[int, int]:
    """Return collectives and bytes of one whole request."""
    encode, step = expected_exchange(core.adapter, tokens, rows)
    return encode[0] + steps * step[0], encode[1] + steps * step[1]


def expected_bytes(folder: Path, kv_heads: int, tp: int, only: str = "") -> tuple[int, int]:
    """Return bytes one rank reads of a checkpoint, and those of the shared tensors in all.

    only: count those tensors alone whose names it is found in.
    """
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    mine = shared = 0
    for name, entry in header.items():
        size = 0 if name == "__metadata__" else entry["data_offsets"][1] - entry["data_offsets"][0]
        table = name.endswith(("embed_tokens.weight", "paligemma.lm_head.weight"))
        if name.endswith("gemma_expert.lm_head.weight"):
            continue  # nobody reads it
        if not re.search(only, name):
            continue
        if table or STACKS.search(name):
            shared += size
            size //= min(tp, kv_heads) if re.search(r"\.[kv]_proj\.", name) else tp
        mine += size
    return mine, shared


def _held(adapter: Adapter) -> int:
    """Elements of all parameters of this rank."""
    modules: Any = adapter.modules  # type: ignore[attr-defined]
    return sum(parameter.numel() for parameter in modules.parameters())


def _cache_shapes(core: EngineCore) -> set[tuple[int, ...]]:
    """Heads and head width of the key buffers of the live caches."""
    buffers = core.services.memory.buffers().items()
    return {tuple(t.shape[-2:]) for name, t in buffers if re.search(r"\bk\.\d+$", name)}
