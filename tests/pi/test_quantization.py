"""Quantised engines on the tiny checkpoints: which layers, how close, how small, updated, tuned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from torch import Tensor

from phyai import Engine, EngineArgs, EngineConfig
from phyai.engine_config import DeviceConfig, KernelConfig
from phyai.errors import KernelUnavailable
from phyai.layers import Linear
from tests.pi.tiny_engines import ARGS, GOLDEN, model_request

MODELS = ("pi05", "pi0")
INPUTS: dict[str, Any] = {"w8a8": {"dtype": "int8"}, "weight-only": None}
PROJECTIONS = re.compile(r"layers\.\d+\.(qkv|kv|out|gate_up|down)$")
PAGE = Path(__file__).parents[2] / "docs/kernels.md"


def policy(inputs: Any, weight: Any = None, **more: Any) -> dict[str, Any]:
    """Return the policy of the documentation with other formats."""
    text = PAGE.read_text(encoding="utf-8")
    block = text.split("### A policy for robot models", 1)[1].split("```yaml\n", 1)[1]
    found: dict[str, Any] = yaml.safe_load(block.split("```", 1)[0])
    for rule in found["quantization"]["rules"]:
        if "weight" in rule:
            rule["weight"], rule["input"] = weight or rule["weight"], inputs
    return {**found, **more}


def open_engine(model: str, kernel: KernelConfig | None = None) -> Engine:
    root = GOLDEN / model
    args = ARGS[model](
        checkpoint_dir=str(root),
        max_batch_size=4,
        precision="fp32",
        tokenizer=str(root / "tokenizer"),
        processor_dir=str(root / "processors_abs"),
    )
    device = DeviceConfig(target="cpu", params_dtype=torch.float32)
    config = EngineConfig(device=device, kernel=kernel or KernelConfig())
    return Engine(EngineArgs(model, args, config))


def quantised(model: str, inputs: Any, **changes: Any) -> Engine:
    return open_engine(model, KernelConfig(policy_config=policy(inputs, **changes)))


def linears(engine: Engine) -> dict[str, Linear]:
    adapter: Any = engine.adapter
    found = adapter.modules.named_modules()
    return {name: module for name, module in found if isinstance(module, Linear)}


def actions(engine: Engine, seeds: int = 4) -> Tensor:
    """Return the actions of some requests [seeds * rows, ...]."""
    return torch.cat([torch.as_tensor(engine.step(model_request(engine, s))) for s in range(seeds)])


def cosines(a: Tensor, b: Tensor) -> Tensor:
    return torch.cosine_similarity(a.double().flatten(1), b.double().flatten(1))


def held(layer: Linear) -> int:
    return layer.weight.nbytes if layer._packed is None else layer._packed.nbytes


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[Tensor, dict[str, int]]]:
    """Actions and bytes per layer of the engines without quantised layers."""
    found = {}
    for model in MODELS:
        with open_engine(model) as engine:
            found[model] = (actions(engine), {n: held(m) for n, m in linears(engine).items()})
    return found


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("model", MODELS)
def test_the_documented_policy_quantises_the_decoders_and_stays_close(
    model: str, inputs: str, plain: dict[str, tuple[Tensor, dict[str, int]]]
) -> None:
    exact, size = plain[model]
    with quantised(model, INPUTS[inputs]) as engine:
        layers = linears(engine)
        wanted = {name for name in layers if PROJECTIONS.search(name) and "vision" not in name}
        assert {name for name, layer in layers.items() if layer.scheme} == wanted
        assert {name.split(".")[0] for name in wanted} == {"prefix", "expert"}
        assert len(wanted) >= 2 * 3 * 4
        for name in wanted:
            scheme = layers[name].scheme
            assert scheme is not None
            assert (scheme.weight.dtype, scheme.input is not None) == ("int8", inputs == "w8a8")
            assert layers[name].weight.untyped_storage().nbytes() <= 4
        # one byte per weight and a scale per row and 128 inputs, of 4 bytes before
        assert sum(held(layers[n]) for n in wanted) < 0.32 * sum(size[n] for n in wanted)
        got = actions(engine)
    found = cosines(got, exact)
    assert float(found.min()) >= 0.995
    assert not torch.equal(got, exact)


@pytest.mark.parametrize("dtype", ["int4", "fp8_e4m3", "mxfp4", "nvfp4"])
def test_other_formats_run_too(dtype: str, plain: dict[str, tuple[Tensor, dict[str, int]]]) -> None:
    with quantised("pi05", None, weight={"dtype": dtype}) as engine:
        rows = {layer.kernel for layer in linears(engine).values() if layer.scheme}
        assert rows == {"dequant.linear"}
        assert float(cosines(actions(engine), plain["pi05"][0]).min()) >= 0.9


@pytest.mark.parametrize("inputs", INPUTS)
def test_updated_weights_are_rounded_and_others_keep_their_bits(inputs: str) -> None:
    key = "paligemma_with_expert.gemma_expert.model.layers.1.self_attn.k_proj.weight"
    with safe_open(GOLDEN / "pi05/model.safetensors", framework="pt") as file:
        name = next(n for n in file.keys() if n.endswith(key))  # noqa: SIM118
        old = file.get_tensor(name)
    with quantised("pi05", INPUTS[inputs]) as engine:
        adapter: Any = engine.adapter
        layer = linears(engine)["expert.expert.layers.1.qkv"]
        assert layer._packed is not None
        before, first = layer._packed.unpack(), actions(engine, 1)
        adapter.update_weights({name.removeprefix("model."): 2 * old})
        after = layer._packed.unpack()
        q, k, _ = layer.sizes
        mine = torch.zeros(len(after), dtype=torch.bool)
        mine[q : q + k] = True
        assert torch.equal(after[~mine], before[~mine])
        torch.testing.assert_close(after[mine], 2 * old, rtol=0, atol=float(old.abs().max()) / 100)
        assert layer.weight.untyped_storage().nbytes() <= 4
        assert not torch.equal(actions(engine, 1), first)
        adapter.update_weights({name.removeprefix("model."): old})
        torch.testing.assert_close(layer._packed.unpack(), before, rtol=1e-6, atol=0)


def test_quantised_layers_can_be_measured() -> None:
    """Their kernels run on samples of their format; where one row fits nothing is measured."""
    asked: set[tuple[str, str]] = set()

    def bench(candidate: Any) -> float:
        candidate()
        if "quant.weight" in candidate.facts:
            asked.add((candidate.op, candidate.kernel))
        return 1.0

    kernel = KernelConfig(
        policy_config=policy({"dtype": "int8"}), profile="autotune", benchmark=bench
    )
    with open_engine("pi05", kernel) as engine:
        table = engine.core.services.kernels
        chosen = [c for c in table.choices if dict(c.facts).get("quant.weight")]
        assert chosen
        for choice in chosen:
            assert not any("failed" in why for _, why in choice.refused), choice
            if choice.by == "measurement":
                assert ("linear", choice.row) in asked
        assert bool(actions(engine, 1).isfinite().all())


def test_a_layer_that_no_kernel_runs_is_named_with_its_format() -> None:
    only = {"id": "plain", "match": {"op": "linear"}, "use": "torch.linear"}
    with pytest.raises(KernelUnavailable, match=r"layer .*q_proj.*quantised to int8 block"):
        quantised("pi05", None, overrides=[only])
