"""Replicas of a tiny pi0.5: the released snippet on CPUs, equal to inline bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phyai import DeploymentConfig, Engine, EngineArgs, EngineConfig
from phyai.engine_config import DeviceConfig, RuntimeConfig
from phyai.models.pi05.main_pi05 import PI05Args
from tests.pi.tiny_engines import GOLDEN, model_request, observation, open_engine

pytestmark = pytest.mark.slow

SNIPPET = """
import torch
from phyai import DeploymentConfig, Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.models.pi05.main_pi05 import PI05Args

CHECKPOINT, REPLICAS = {checkpoint!r}, {replicas}


def infer_many(requests):
    args = EngineArgs(
        plugin="pi05",
        plugin_args=PI05Args(checkpoint_dir=CHECKPOINT, max_batch_size=1),
        config=EngineConfig(device=DeviceConfig(target="cpu", params_dtype=torch.float32)),
    )
    deployment = DeploymentConfig.local(devices=("cpu",) * REPLICAS, replica_count=REPLICAS)
    with Engine(args, deployment=deployment) as engine:
        futures = [engine.submit(request) for request in requests]
        return [future.result().cpu() for future in futures]


if __name__ == "__main__":
    import sys
    from safetensors.torch import load_file, save_file
    from phyai.models.pi05.scheduler_pi05 import PI05Request

    given = load_file(sys.argv[1])
    requests = [
        PI05Request(**{{name: given[f"{{n}}.{{name}}"] for name in
                        ("pixel_values", "input_ids", "lang_lens", "noise")}})
        for n in range(6)
    ]
    results = infer_many(requests)
    save_file({{str(n): result for n, result in enumerate(results)}}, sys.argv[2])
"""


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_snippet_equals_inline(tmp_path: Path, replicas: int) -> None:
    from safetensors.torch import load_file, save_file

    root = GOLDEN / "pi05"
    config = EngineConfig(device=DeviceConfig(target="cpu", params_dtype=torch.float32))
    with Engine(EngineArgs("pi05", PI05Args(str(root), max_batch_size=1), config)) as engine:
        requests = [model_request(engine, seed, rows=1, num_steps=None) for seed in range(6)]
        inline = [engine.step(request) for request in requests]
    names = ("pixel_values", "input_ids", "lang_lens", "noise")
    save_file(
        {f"{n}.{name}": getattr(r, name) for n, r in enumerate(requests) for name in names},
        tmp_path / "requests.safetensors",
    )
    script = tmp_path / "infer.py"
    script.write_text(SNIPPET.format(checkpoint=str(root), replicas=replicas))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "requests.safetensors"),
         str(tmp_path / "results.safetensors")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = load_file(tmp_path / "results.safetensors")
    for n, wanted in enumerate(inline):
        assert torch.equal(results[str(n)], wanted), n


def local(replicas: int, **runtime: Any) -> Engine:
    root = GOLDEN / "pi05"
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        runtime=RuntimeConfig(num_threads=1, **runtime),
    )
    args = PI05Args(
        str(root),
        max_batch_size=4,
        precision="fp32",
        tokenizer=str(root / "tokenizer"),
        processor_dir=str(root / "processors_abs"),
    )
    deployment = DeploymentConfig.local(devices=("cpu",) * replicas, replica_count=replicas)
    return Engine(EngineArgs("pi05", args, config), deployment=deployment)


def test_observations_new_weights_and_warm_up() -> None:
    with open_engine("pi05", {"num_threads": 1}) as inline:
        rows = [observation(inline, seed) for seed in range(4)]
        batch = model_request(inline, rows=4)
        wanted = [inline.step(row).actions for row in rows]
        tensor = inline.step(batch)
        unseeded = replace(rows[0], options={"num_steps": 2})
        with local(2, warmup=True) as engine:
            futures = [engine.submit(row) for row in rows]
            for future, actions in zip(futures, wanted, strict=True):
                assert np.array_equal(future.result().actions, actions)
            assert torch.equal(engine.step(batch), tensor)
            drawn = [engine.step(unseeded).actions for _ in range(4)]
            assert len({actions.tobytes() for actions in drawn}) == 4
            name, value = next(iter(checkpoint_weights()))
            changed = [(name, value * 1.5)]
            inline.update_weights_all(changed)
            engine.update_weights_all(changed)
            again = inline.step(batch)
            assert not torch.equal(again, tensor)
            for _ in range(2):
                assert torch.equal(engine.step(batch), again)


def checkpoint_weights() -> Any:
    from safetensors.torch import load_file

    found = load_file(GOLDEN / "pi05" / "model.safetensors")
    return ((n, value) for n, value in sorted(found.items()) if n.endswith("out_proj.weight"))
