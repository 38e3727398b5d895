"""Quantised linear layers: the row that unpacks weights, its choice, and layers around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError, KernelUnavailable
from phyai.kernels import Autotuner, KernelTable, parse_policy, quant, quant_linear, quant_norm
from phyai.kernels.policy_quant import QuantScheme
from phyai.kernels.quant import (
    QuantizedActivations,
    dequantize,
    dequantize_tokens,
    quantize,
    quantize_per_token,
    scheme_of,
)
from phyai.kernels.quant_rows import FORMATS, NORMS
from phyai.layers import Linear, Placement, RMSNorm
from phyai.layers.norm import norm_op

INT8 = {"dtype": "int8"}
WEIGHTS = {
    "int4": {"dtype": "int4"},
    "int8": {"dtype": "int8"},
    "fp8_e4m3": {"dtype": "fp8_e4m3"},
    "fp8_e5m2": {"dtype": "fp8_e5m2"},
    "mxfp4": {"dtype": "mxfp4"},
    "nvfp4": {"dtype": "nvfp4"},
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def facts_of(form: str, granularity: str = "") -> dict[str, Any]:
    weight, _, taken = form.partition(":")
    blocks = granularity or ("per_channel" if weight.startswith("fp8") else "block")
    found = {"quant.weight": weight, "quant.format": weight, "quant.granularity": blocks}
    return {**found, "quant.input": taken} if taken else found


def scheme(form: str, granularity: str = "") -> QuantScheme:
    found = scheme_of(facts_of(form, granularity))
    assert found is not None
    return found


def place(
    *rules: dict[str, Any], dtype: torch.dtype = torch.float32, tuner: Any = None, **policy: Any
) -> Placement:
    table = KernelTable()
    section = {"method": "rtn", "rules": list(rules)}
    table.use(parse_policy({"schema": 1, "quantization": section, **policy}), tuner)
    return Placement(table, torch.device("cpu"), dtype)


def every(weight: Any, taken: Any = None) -> dict[str, Any]:
    return {"match": {"glob": "*"}, "weight": weight, "input": taken}


def filled(layer: Linear, seed: int = 0) -> Linear:
    """Give a layer random values and pack them, as loading does."""
    layer.unpack()
    layer.weight.data.copy_(draw(*layer.weight.shape, seed=seed) * 0.1)
    if layer.bias is not None:
        layer.bias.data.copy_(draw(*layer.bias.shape, seed=seed + 1))
    layer.pack()
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [*FORMATS, "fp8_e4m3:fp8_e4m3 block", "fp8_e5m2:fp8_e5m2 block"])
def test_the_product_is_that_of_the_rounded_values(
    form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, _, granularity = form.partition(" ")
    wanted = scheme(form, granularity)
    x, weight, bias = draw(2, 3, 150).to(dtype), (draw(260, 150) * 0.1).to(dtype), draw(260)
    bias = bias.to(dtype)
    packed = quant_linear.pack(weight, scheme=wanted)
    assert packed.nbytes < 0.75 * 2 * weight.numel()
    plain = dequantize(quantize(weight, wanted.weight)).double()
    taken = x.double()
    if wanted.input is not None:
        taken = dequantize_tokens(quantize_per_token(x, wanted.input.dtype)).double()
    for with_bias in (None, bias):
        exact = taken @ plain.T + (0.0 if with_bias is None else with_bias.double())
        out = quant_linear.linear(x, packed, with_bias)
        assert out.dtype == dtype
        eps = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
        torch.testing.assert_close(out.double(), exact, rtol=eps, atol=2e-6)
    monkeypatch.setattr(quant, "_CHUNK", 1)
    in_pieces = quant_linear.linear(x, packed, bias)
    torch.testing.assert_close(
        in_pieces, out, rtol=2e-3 if dtype != torch.float32 else 1e-6, atol=1e-6
    )
    assert quant_linear.linear(x[:0], packed).shape == (0, 3, 260)


def test_rounded_tokens_give_the_same_as_plain_ones() -> None:
    x, packed = draw(3, 40), quant_linear.pack(draw(8, 40), scheme=scheme("int8:int8"))
    assert torch.equal(
        quant_linear.linear(quantize_per_token(x), packed), quant_linear.linear(x, packed)
    )


def test_wrong_inputs_are_refused() -> None:
    plain, w8a8 = (quant_linear.pack(draw(8, 40), scheme=scheme(f)) for f in ("int8", "int8:int8"))
    with pytest.raises(ConfigError, match=r"takes x \[..., 40\] torch.float32"):
        quant_linear.linear(draw(3, 41), plain)
    with pytest.raises(ConfigError, match=r"got .* torch.bfloat16"):
        quant_linear.linear(draw(3, 40).bfloat16(), plain)
    with pytest.raises(ConfigError, match=r"rounded to nothing else; got .* torch.int8"):
        quant_linear.linear(quantize_per_token(draw(3, 40)), plain)
    with pytest.raises(ConfigError, match="rounded to int8"):
        quant_linear.linear(quantize_per_token(draw(3, 39)), w8a8)
    fp8 = quant_linear.pack(draw(8, 40), scheme=scheme("fp8_e4m3:fp8_e4m3"))
    for taken, weight in (("int8", fp8), ("fp8_e5m2", fp8), ("fp8_e4m3", w8a8)):
        with pytest.raises(ConfigError, match=f"rounded to {weight.input_format}; got"):
            quant_linear.linear(quantize_per_token(draw(3, 40), taken), weight)
    with pytest.raises(ConfigError, match="must have a scheme"):
        quant_linear.pack(draw(8, 40))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("device", "arch"), [("cpu", "x86_64"), ("cuda", "sm90"), ("cuda", "sm75")]
)
def test_every_format_has_a_row_on_every_device(form: str, device: str, arch: str) -> None:
    facts = {**facts_of(form), "device.arch": arch, "packed": True}
    for dtype in ("float32", "bfloat16", "float16"):
        row = KernelTable().explain_one("linear", device=device, dtype=dtype, **facts).row
        if device == "cuda" and arch == "sm90":
            fast = {"int8:int8": "triton.int8_linear", "int8": "triton.int8_weight_linear"}
            assert row == fast.get(form, "dequant.linear")
        elif device == "cuda":
            assert row == "dequant.linear"
        assert row not in (None, "torch.linear")


def test_layers_pack_in_the_format_of_the_policy() -> None:
    at = place({"match": {"glob": "head*"}, "scheme": None}, every(INT8, INT8))
    head = filled(Linear("head", 40, 8, at))
    fused = filled(Linear(["q", "k"], 40, [8, 4], at, bias=True))
    assert head.scheme is None
    assert str(fused.scheme) == "int8 block [1, 128], int8 inputs"
    assert fused.weight.untyped_storage().nbytes() <= 4  # its values are in the format only
    x = draw(3, 40)
    weight, bias = draw(12, 40) * 0.1, draw(12, seed=1)
    exact = x @ weight.T + bias
    assert 0 < float((fused(x) - exact).norm() / exact.norm()) < 0.02
    assert torch.equal(head(x), filled(Linear("head", 40, 8, place()))(x))


def test_an_updated_part_is_rounded_and_the_rest_keeps_its_bits() -> None:
    layer = filled(Linear(["q", "k"], 40, [8, 4], place(every(INT8))))
    x = draw(3, 40)
    before = layer(x)
    layer.unpack()
    layer.weight.data[8:] = draw(4, 40, seed=7)
    layer.pack()
    after = layer(x)
    assert torch.equal(after[:, :8], before[:, :8])
    exact = x @ draw(4, 40, seed=7).T
    assert float((after[:, 8:] - exact).norm() / exact.norm()) < 0.02


def test_a_gated_epilogue_follows_the_product() -> None:
    at = place(every(INT8, INT8))
    layer = filled(Linear(["gate", "up"], 40, [8, 8], at, epilogue="gelu_tanh_mul"))
    x = draw(3, 40)
    gate, up = (x @ (draw(16, 40) * 0.1).T).chunk(2, dim=-1)
    exact = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert float((layer(x) - exact).norm() / exact.norm()) < 0.05


@pytest.mark.usefixtures("without_native")
def test_a_layer_that_nothing_runs_is_named_with_its_format() -> None:
    only: dict[str, Any] = {"id": "plain", "match": {"op": "linear"}, "use": "torch.linear"}
    at = place(every({"dtype": "nvfp4"}), overrides=[only])
    with pytest.raises(
        KernelUnavailable,
        match=r"^layer a\.q, a\.k, quantised to nvfp4 block \[1, 16\], 16-bit inputs, must have a "
        r"kernel; .*torch\.linear: runs plain weights, not nvfp4 ones.*override 'plain'",
    ):
        Linear(["a.q", "a.k"], 8, [4, 4], at)
    only["match"] = {"op": "linear", "quant.format": None}  # the remedy of the documentation
    at = place({"match": {"name": "b"}, "scheme": None}, every(INT8), overrides=[only])
    assert (Linear("a", 8, 4, at).kernel, Linear("b", 8, 4, at).kernel) == (
        "dequant.linear",
        "torch.linear",
    )


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_quantised_rows_are_measured_in_their_format(weight: dict[str, Any]) -> None:
    asked: list[tuple[str, Any]] = []

    def bench(candidate: Any) -> float:
        candidate()
        asked.append((candidate.kernel, candidate.sample.args[1].tensor.spec.dtype))
        return 1.0

    table = KernelTable()
    again = next(row for row in table.rows("linear") if row.name == "dequant.linear")
    table.add([type(again)("linear", "again", again.fn, pack=again.pack, formats=again.formats)])
    only = {"id": "two", "match": {"op": "linear"}, "prefer": ["dequant.linear", "again"]}
    section = {"method": "rtn", "rules": [every(weight)]}
    policy = parse_policy({"schema": 1, "quantization": section, "rules": [only]})
    table.use(policy, Autotuner(bench))
    layer = Linear("a", 40, 8, Placement(table, torch.device("cpu"), torch.float32))
    assert asked == [("dequant.linear", weight["dtype"]), ("again", weight["dtype"])]
    assert layer.kernel in ("dequant.linear", "again")


# ---------------------------------------------------------------- norms that round for them


def test_norms_round_what_their_references_give() -> None:
    x, y, weight, scale, shift, gate = (draw(*s, seed=i) for i, s in enumerate(
        [(2, 3, 40), (2, 3, 40), (40,), (40,), (40,), (40,)]))  # fmt: skip
    calls = {
        "rms_norm": (x, weight, 1e-6),
        "add_rms_norm": (x, y, weight, 1e-6),
        "ada_rms_norm": (x, scale, shift, 1e-6),
        "gated_ada_rms_norm": (x, y, gate, scale, shift, 1e-6),
    }
    assert set(calls) == set(NORMS)
    for op, args in calls.items():
        rounded = getattr(quant_norm, f"{op}_quant")(*args)
        plain = getattr(quant_norm.reference, op)(*args)
        if isinstance(plain, tuple):
            assert torch.equal(rounded[0], plain[0])
            rounded, plain = rounded[1], plain[1]
        assert rounded.values.dtype == torch.int8
        error = (dequantize_tokens(rounded) - plain).abs()
        assert bool((error <= plain.abs().amax(dim=-1, keepdim=True) / 254 * 1.001).all())


@pytest.mark.usefixtures("without_native")
def test_a_norm_rounds_only_where_all_its_layers_take_that() -> None:
    w8a8 = place({"match": {"glob": "plain*"}, "scheme": None}, every(INT8, INT8))
    q, kv, plain = (filled(Linear(name, 40, 8, w8a8)) for name in ("q", "kv", "plain"))
    weight_only = Linear("a", 40, 8, place(every(INT8)))
    fp8 = {"dtype": "fp8_e4m3"}
    other = Linear("a", 40, 8, place(every(fp8, fp8)))
    assert (q.takes_rounded, plain.takes_rounded) == ("int8", None)
    assert (weight_only.takes_rounded, other.takes_rounded) == (None, "fp8_e4m3")
    assert norm_op("rms_norm", [q, kv]) == "rms_norm_quant"
    for layers in ((), (q, plain), (weight_only,), (other,), (q, other)):
        assert norm_op("rms_norm", layers) == "rms_norm"
    norm = RMSNorm("n", 40, 1e-6, w8a8)
    norm.weight.data.zero_()
    x, y = draw(2, 3, 40), draw(2, 3, 40, seed=1)
    before, (_, added) = norm(x), norm(x, y)
    wanted = q(before), kv(added)
    norm.feed(q, kv)
    assert isinstance(norm(x), QuantizedActivations)
    # a faster norm sums in another order: a value on a tie may fall on its other side
    torch.testing.assert_close(q(norm(x)), wanted[0], rtol=0, atol=5e-3)
    total, rounded = norm(x, y)
    torch.testing.assert_close(total, x + y)
    torch.testing.assert_close(kv(rounded), wanted[1], rtol=0, atol=5e-3)
