"""Peer ``openvino``: the same network as one IR, compiled for latency by OpenVINO's CPU plug-in.

The export runs in a process of its own and its IR is kept in the cache folder, so that this
process holds, and its peak RSS counts, the compiled network alone.

    python -m benchmarks.peers.pi.openvino CHECKPOINT IR DTYPE CAMERAS TOKENS ROWS STEPS PADDED
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov  # type: ignore[import-not-found]
import torch
from benchmarks.peers.base import Refused, Setup
from benchmarks.peers.pi import hf_network, openvino_graph
from benchmarks.peers.pi.batch import Batch, activation_bytes, weight_bytes
from benchmarks.peers.pi.hf_load import load
from benchmarks.peers.pi.hf_network import OfficialPi05
from benchmarks.peers.pi.openvino_graph import OneGraph
from benchmarks.peers.pi.sizes import PiSizes
from safetensors import safe_open
from torch import Tensor

EXPORT_LIMIT_S = 3600.0
HINTS = {"bf16": "bf16", "fp32": "f32"}


def peer(model: str, name: str, options: str) -> OpenVinoPeer:
    return OpenVinoPeer()


class OpenVinoPeer:
    """One compiled graph for one shape; compiled when the inputs are known to be padded or not."""

    def __init__(self) -> None:
        self.setup: Setup | None = None
        self.request: Any = None
        self.feeds: list[np.ndarray[Any, Any]] = []
        self.padded: bool | None = None

    def describe(self) -> dict[str, Any]:
        return {
            "name": "openvino",
            "versions": {"openvino": ov.__version__},
            "computes": "official wiring as one OpenVINO graph, steps unrolled, latency mode",
        }

    def estimate(self, setup: Setup) -> int:
        # The IR and what the plug-in packs of it are both alive while it compiles, and after.
        weights = weight_bytes(
            PiSizes.from_folder(setup.checkpoint), setup.dtype, float32_vision=False
        )
        return 2 * weights + activation_bytes(setup)

    def load(self, setup: Setup) -> dict[str, Any]:
        core = ov.Core()
        able = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if setup.dtype == "bf16" and "BF16" not in able:
            raise Refused(
                "openvino in bf16 needs a CPU with bfloat16 instructions, or it would compute in "
                f"float32 and not be compared with like; got capabilities {', '.join(able)}. "
                "Use --dtype fp32."
            )
        self.setup = setup
        return {"capabilities": list(able)}

    def inputs(self, path: Path, steps: int) -> dict[str, Any]:
        setup = self.setup
        assert setup is not None
        batch = Batch.from_file(path, steps).padded(setup.cameras, setup.tokens)
        if batch.steps != setup.steps or batch.images.shape[0] != setup.rows:
            raise Refused(
                f"openvino is compiled for {setup.rows} rows and {setup.steps} steps; "
                f"got {batch.images.shape[0]} and {batch.steps}."
            )
        facts: dict[str, Any] = {}
        if self.request is None or self.padded != (not batch.unpadded):
            self.padded = not batch.unpadded
            facts = self._compile(setup, self.padded)
        tensors = [batch.images, batch.tokens, batch.noise]
        if self.padded:
            tensors += [batch.image_masks, batch.token_mask]
        self.feeds = [tensor.numpy() for tensor in tensors]
        positions = PiSizes.from_folder(setup.checkpoint).positions(setup.cameras, setup.tokens)
        return {"prefix_positions": positions, **facts}

    def _compile(self, setup: Setup, padded: bool) -> dict[str, Any]:
        ir = exported(setup, padded)
        began = time.perf_counter()
        compiled = ov.Core().compile_model(
            ir,
            "CPU",
            {
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": setup.threads,
                "INFERENCE_PRECISION_HINT": HINTS[setup.dtype],
                "NUM_STREAMS": 1,
            },
        )
        got = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        kinds = execution_types(compiled)
        narrow = sum(kinds.get(kind, 0) for kind in ("bf16", "bf16_bf16"))
        if setup.dtype == "bf16" and (got != "bf16" or not narrow):
            raise Refused(
                f"openvino must compute in bf16; the compiled graph says {got} and runs its "
                f"matrix products as {kinds}. Use --dtype fp32 on this machine."
            )
        self.request = compiled.create_infer_request()
        seconds = time.perf_counter() - began
        return {"precision": got, "matrix_products": kinds, "compile_s": seconds}

    def run(self) -> tuple[Tensor, dict[str, float]]:
        if self.request is None:
            raise Refused("run must follow inputs.")
        results = self.request.infer(self.feeds, share_inputs=True, share_outputs=True)
        return torch.from_numpy(np.array(results[0])), {}


def execution_types(compiled: Any) -> dict[str, int]:
    """Return how many matrix products run in each precision, as the compiled graph reports."""
    counts: dict[str, int] = {}
    for op in compiled.get_runtime_model().get_ops():
        info = op.get_rt_info()
        if str(info["layerType"].astype(str)) in ("FullyConnected", "MatMul"):
            kind = str(info["runtimePrecision"].astype(str)).lower()
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def exported(setup: Setup, padded: bool) -> Path:
    """Return the IR of this shape, exported by another process when it is not there yet."""
    source = b"".join(Path(str(m.__file__)).read_bytes() for m in (hf_network, openvino_graph))
    weights = (setup.checkpoint / "model.safetensors").resolve()
    facts = f"{weights} {weights.stat().st_size} {weights.stat().st_mtime_ns} {ov.__version__}"
    version = hashlib.sha256(source + facts.encode()).hexdigest()[:12]
    shape = [setup.cameras, setup.tokens, setup.rows, setup.steps, int(padded)]
    name = f"openvino-{setup.dtype}-{'-'.join(map(str, shape))}-{version}.xml"
    ir = (setup.cache or setup.checkpoint) / name
    if not ir.is_file():
        command = [sys.executable, "-m", "benchmarks.peers.pi.openvino", setup.checkpoint, ir]
        command += [setup.dtype, *shape]
        done = subprocess.run(
            list(map(str, command)), stdout=sys.stderr, timeout=EXPORT_LIMIT_S, check=False
        )
        if done.returncode or not ir.is_file():
            raise Refused(f"openvino export must succeed; it ended with {done.returncode}.")
    return ir


def export(
    checkpoint: Path, ir: Path, dtype: str, cameras: int, tokens: int, rows: int, steps: int, *,
    padded: bool,
) -> None:  # fmt: skip
    """Trace the network in float32 and save it; at full size this holds about 16 GiB.

    For bf16 all constants become float16: the weights, being bfloat16, keep their values, and the
    computed tables three bits more than bfloat16 has. For fp32 nothing is rounded.
    """
    sizes = PiSizes.from_folder(checkpoint)
    model = load(checkpoint, "fp32", attention="sdpa")
    assert isinstance(model, OfficialPi05)
    graph = OneGraph(model, steps, sizes.positions(cameras, tokens), padded=padded).eval()
    size = sizes.vision.image_size
    example: tuple[Tensor, ...] = (
        torch.zeros(rows, cameras, sizes.vision.num_channels, size, size),
        torch.ones(rows, tokens, dtype=torch.int64),
        torch.zeros(rows, sizes.chunk, sizes.action_dim),
    )
    if padded:
        example += (
            torch.ones(rows, cameras, dtype=torch.bool),
            torch.ones(rows, tokens, dtype=torch.bool),
        )
    with torch.no_grad():
        shapes = [(list(t.shape), ov.Type.boolean if t.dtype is torch.bool else None)
                  for t in example]  # fmt: skip
        converted = ov.convert_model(
            graph, example_input=example, input=[tuple(s for s in pair if s) for pair in shapes]
        )
    scratch = ir.with_name(f".{ir.stem}.{os.getpid()}.xml")
    narrow = dtype == "bf16" and stored_as_bf16(checkpoint)
    ov.save_model(converted, scratch, compress_to_fp16=narrow)
    os.replace(scratch.with_suffix(".bin"), ir.with_suffix(".bin"))
    os.replace(scratch, ir)


def stored_as_bf16(checkpoint: Path) -> bool:
    """Return whether every weight in the file is bfloat16."""
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        return all(file.get_slice(key).get_dtype() == "BF16" for key in file.keys())  # noqa: SIM118


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[4:8]]
    export(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], *numbers, padded=sys.argv[8] == "1")
