"""Shapes of models to come: they add up to published sizes, and the same rows serve them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from phyai.kernels import KernelTable
from phyai.kernels.samples import packed, sample

FILE = Path(__file__).parents[2] / "benchmarks" / "shapes.py"


@pytest.fixture(scope="module")
def shapes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("phyai_benchmark_shapes", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def weights(shapes: ModuleType, model: str, *prefixes: str) -> float:
    """Return millions of weights of the layers whose names start so."""
    found = shapes.MODELS[model]()
    return sum(s.weights for s in found if s.layer.startswith(prefixes)) / 1e6


def test_they_add_up_to_the_published_parameters(shapes: ModuleType) -> None:
    assert weights(shapes, "groot", "text") == pytest.approx(805.4, rel=1e-3)
    assert weights(shapes, "groot", "vision", "merger") == pytest.approx(407.0, rel=0.015)
    assert weights(shapes, "groot", "vl") == pytest.approx(201.4, rel=1e-3)
    assert weights(shapes, "minicpm", "vision") == pytest.approx(411.07, rel=1e-3)
    assert weights(shapes, "cosmos3", "gen.qkv", "gen.out", "gen.gate", "gen.down") == (
        pytest.approx(6946, rel=1e-3)
    )


def test_a_policy_request_has_the_published_operations(shapes: ModuleType) -> None:
    gen = [s for s in shapes.cosmos3() if s.layer.startswith("gen")]
    assert sum(s.request_flops for s in gen) / 1e15 == pytest.approx(0.39, abs=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_shape_has_a_row(shapes: ModuleType, dtype: str) -> None:
    table = KernelTable()
    for shape in shapes.all_shapes():
        for device in ("cpu", "cuda"):
            choice = table.explain_one(shape.op, device=device, dtype=dtype, **dict(shape.facts))
            assert choice.row, (shape.model, shape.layer)


def test_small_shapes_run_through_their_row(shapes: ModuleType) -> None:
    table = KernelTable()
    ran = set()
    for shape in shapes.all_shapes():
        facts = dict(shape.facts)
        if shape.flops > 3e7 or shape.op in ran or shape.facts[0][1] > 200:
            continue
        ran.add(shape.op)
        made = sample({"op": shape.op, "device": "cpu", "dtype": "float32", **facts})
        assert made is not None
        kernel = table.choose(shape.op, device="cpu", dtype="float32", **facts)
        made, run = packed(made, kernel, facts), kernel.fn
        assert torch.isfinite(run(*made.args, **made.kwargs)).all()
    assert {"linear", "attention", "rms_norm", "ada_layer_norm"} <= ran
