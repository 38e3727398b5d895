"""Cosmos3 on several ranks: engines, golden requests, and whole tensors out of the ranks' parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phyai import DeploymentConfig, Engine, EngineArgs
from phyai.models.cosmos3.golden import generation_runs, policy_runs
from phyai.parallel import HeadShards
from tests.cosmos.cosmos_engines import POLICY, ROOT, generation_args, policy_args
from tests.rank_runs import Ask, Mesh, Seen, config_of

_OF_HEADS = re.compile(
    r"mid\.(?:uncond\.)?(?:und\.\d+\.(?P<kv>[kv])|gen\.0\.(?P<gen>q|k_all|attn_out))"
)


def args_of(plugin: str, **changes: Any) -> Any:
    """Return arguments that fit the golden requests of a plugin."""
    return policy_args(**changes) if plugin == POLICY else generation_args(**changes)


@contextmanager
def opened(plugin: str, mesh: Mesh, /, deployment: Any = None, **changes: Any) -> Iterator[Engine]:
    args = EngineArgs(plugin, args_of(plugin, **changes), config_of(mesh))
    with Engine(args, deployment=deployment or DeploymentConfig()) as engine:
        yield engine


def joined_records(ranks: Sequence[Seen], mesh: Mesh, kv_heads: int) -> Mapping[str, list[Tensor]]:
    """Return the records of a whole replica: both branches, and all heads of what is split.

    What is not split must be alike, bit for bit, on all tensor-parallel ranks.
    """
    whole: dict[str, list[Tensor]] = {}
    for cfg in reversed(range(mesh.cfg)):
        members = ranks[cfg * mesh.tp : (cfg + 1) * mesh.tp]
        for name, first in members[0].records.items():
            parts = [member.records[name] for member in members]
            split = _OF_HEADS.fullmatch(name)
            if split is None:
                for part in parts:
                    assert all(map(torch.equal, part, first)), f"ranks differ in {name}"
                whole[name] = first
                continue
            of_keys = split["kv"] is not None or split["gen"] == "k_all"
            every = max(mesh.tp // kv_heads, 1) if of_keys else 1
            own = parts[::every]
            whole[name] = [torch.cat(tensors, dim=-2) for tensors in zip(*own, strict=True)]
    return whole


def golden_asks(plugin: str) -> list[Ask]:
    """Return the requests of every golden case of a plugin; those with inner tensors first.

    Later ones of the same text have it from the memo, so that it is not computed for them.
    """
    runs_of = policy_runs if plugin == POLICY else generation_runs
    found: list[tuple[bool, Ask]] = []
    for path in sorted(ROOT.glob("case_*.safetensors")):
        inner = b"mid.und.0.out" in path.read_bytes()[: 1 << 16]
        for run in runs_of(path, ROOT):
            if run.request is not None:
                found.append((not inner, Ask(run.label, run.request, golden=run)))
    return [ask for _, ask in sorted(found, key=lambda pair: pair[0])]


def with_key_heads(folder: Path, heads: int) -> Path:
    """Write the golden checkpoint with fewer key heads, the first ones; return its folder."""
    folder.mkdir()
    for part in ROOT.iterdir():
        if part.name != "transformer" and not part.name.startswith("case_"):
            (folder / part.name).symlink_to(part)
    inner = folder / "transformer"
    inner.mkdir()
    config = json.loads((ROOT / "transformer" / "config.json").read_text("utf-8"))
    HeadShards.of(config["num_attention_heads"], heads, 1, 0)
    rows = heads * config["head_dim"]
    for source in (ROOT / "transformer").iterdir():
        if source.suffix == ".safetensors":
            tensors = load_file(source)
            for name in tensors:
                if re.search(r"\.(to_k|to_v|add_k_proj|add_v_proj)\.weight$", name):
                    tensors[name] = tensors[name][:rows].contiguous()
            save_file(tensors, inner / source.name, {"format": "pt"})
        elif source.name != "config.json":
            (inner / source.name).symlink_to(source)
    text = json.dumps({**config, "num_key_value_heads": heads})
    (inner / "config.json").write_text(text, encoding="utf-8")
    return folder
