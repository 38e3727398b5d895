"""Int8 linear layers in C++ against the plain torch ones, on vectors and on emulated tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from phyai import env
from phyai.errors import ConfigError, KernelUnavailable
from phyai.kernels import KernelTable, parse_policy, quant_linear
from phyai.kernels.native import quant_linear as native
from phyai.kernels.native.build import build
from phyai.kernels.native.library import Library, library
from phyai.kernels.native.linear import EPILOGUES
from phyai.kernels.native.quant_linear import WEIGHT, PackedInt8, linear_int8, pack_int8
from phyai.kernels.native.selfcheck import close, expected_int8
from phyai.kernels.policy_quant import QuantScheme, TensorQuant
from phyai.kernels.quant import dequantize, quantize, quantize_per_token
from phyai.layers import Linear, Placement
from tests.kernels.native_parity import DTYPES, needs_native

pytestmark = needs_native

TAKEN = TensorQuant("int8", "per_channel", dynamic=True)
SCHEMES = {"weight": QuantScheme(WEIGHT), "w8a8": QuantScheme(WEIGHT, TAKEN)}
NAMES = {"weight": "native.int8_weight", "w8a8": "native.int8_w8a8"}
# (rows, K, N): ends of registers, pairs, blocks of 128, panels, slices and blocks of rows
SHAPES = (
    (1, 1, 2),
    (1, 4304, 34),
    (3, 17, 2),
    (7, 129, 18),
    (17, 255, 130),
    (50, 900, 66),
    (170, 130, 258),
    (530, 64, 48),
)


@pytest.fixture(scope="module", params=["default", pytest.param("AMX", marks=pytest.mark.slow)])
def lib(request: pytest.FixtureRequest) -> Library:
    if request.param == "default":
        return library()
    folder = env.cache_dir() / "native"
    try:
        return Library(build(folder, defines=["PHYAI_AMX_EMULATED"], prefixes=("gemm", "isa")))
    except KernelUnavailable as error:  # the default one compiled, so this one must
        pytest.fail(str(error))


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> QuantScheme:
    return SCHEMES[request.param]


@pytest.fixture(autouse=True)
def _one_thread_after() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def sample(rows: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows + 1000 * k + n)
    x = torch.randn(rows, k, generator=random)
    weight = torch.randn(n, k, generator=random) / k**0.5
    bias = torch.randn(n, generator=random)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_every_epilogue_is_the_reference(
    lib: Library, scheme: QuantScheme, dtype: torch.dtype, rows: int, k: int, n: int
) -> None:
    x, weight, bias = sample(rows, k, n, dtype)
    truth = quant_linear.pack(weight, scheme=scheme)
    for layout in ("none", "silu_mul"):
        packed = pack_int8(weight, layout, scheme, lib=lib)
        for epilogue in EPILOGUES:
            if epilogue.endswith("_mul") and layout == "none":
                continue
            for add in (None, bias):
                got = linear_int8(x, packed, add, epilogue)
                assert close(got, expected_int8(x, truth, add, epilogue)), (epilogue, layout)


@pytest.mark.parametrize("n", [1, 3, 17, 33])
def test_odd_numbers_of_columns(lib: Library, scheme: QuantScheme, n: int) -> None:
    x, weight, bias = sample(5, 140, n, torch.float32)
    wanted = expected_int8(x, quant_linear.pack(weight, scheme=scheme), bias, "none")
    assert close(linear_int8(x, pack_int8(weight, "none", scheme, lib=lib), bias), wanted)


def test_inputs_are_rounded_like_the_reference_to_the_last_bit(lib: Library) -> None:
    for dtype in DTYPES:
        x = sample(40, 300, 1, torch.float32)[0]
        x[0], x[1], x[2] = 0.0, 1e-35, torch.arange(300) / 2.0  # half a step: ties
        x[2, -1], x[3] = 127.0, x[3] * 1e30
        x = x.to(dtype)
        values, scales = quantize_per_token(x)
        for k in (0, 127, 128, 299):
            weight = torch.zeros(1, 300)
            weight[0, k] = 127.0  # its scale is one: the sums are 127 times the rounded inputs
            packed = pack_int8(weight.to(dtype), "none", SCHEMES["w8a8"], lib=lib)
            wanted = (values[:, k].float() * 127.0 * scales[:, 0]).to(dtype)
            assert torch.equal(linear_int8(x, packed)[:, 0], wanted)


def test_extreme_values_do_not_overflow(lib: Library, scheme: QuantScheme) -> None:
    x, weight = torch.ones(7, 4096), torch.ones(18, 4096)
    weight[::2] = -1.0
    got = linear_int8(x, pack_int8(weight, "none", scheme, lib=lib))
    sign = torch.tensor([-1.0, 1.0]).repeat(9)
    torch.testing.assert_close(got, (4096.0 * sign).expand(7, 18), rtol=1e-5, atol=0)


def test_rows_threads_and_parts_do_not_change_a_bit(lib: Library, scheme: QuantScheme) -> None:
    x, weight, bias = sample(173, 700, 200, torch.bfloat16)
    packed = pack_int8(weight, "none", scheme, lib=lib)
    whole = linear_int8(x, packed, bias)
    torch.set_num_threads(2)
    assert torch.equal(linear_int8(x, packed, bias), whole)
    assert torch.equal(linear_int8(x[41:42], packed, bias), whole[41:42])
    x, weight, bias = sample(920, 16400, 2, torch.bfloat16)  # more than the work space takes
    packed = pack_int8(weight, "none", scheme, lib=lib)
    whole = linear_int8(x, packed, bias)
    for row in (0, 459, 460, 461, 919):
        assert torch.equal(linear_int8(x[row], packed, bias), whole[row])


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_row_stays_alone_and_visible(
    lib: Library, scheme: QuantScheme, broken: float
) -> None:
    x, weight, _ = sample(50, 164, 48, torch.bfloat16)
    packed = pack_int8(weight, "none", scheme, lib=lib)
    clean = linear_int8(x, packed)
    x[17, 5] = broken
    got = linear_int8(x, packed)
    assert not got[17].isfinite().any()
    assert torch.equal(got[:17], clean[:17])
    assert torch.equal(got[18:], clean[18:])


@pytest.mark.parametrize("epilogue", ["none", "silu_mul"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_values_are_those_of_the_quantiser(
    lib: Library,
    scheme: QuantScheme,
    dtype: torch.dtype,
    epilogue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = sample(1, 400, 600, dtype)[1]
    weight[5, 7] = float("nan")
    made = quantize(weight, WEIGHT)
    monkeypatch.setattr(native, "_CHUNK", 1)  # as few rows at a time as there can be
    packed = pack_int8(weight, epilogue, scheme, lib=lib)
    if epilogue == "none":  # else whole panels end at the half
        held = packed.rounded(slice(0, 600))
        assert torch.equal(held.values, made.values)
        torch.testing.assert_close(held.scales, made.scales, rtol=0, atol=0, equal_nan=True)
    wanted = dequantize(made, dtype)
    torch.testing.assert_close(packed.unpack(), wanted, rtol=0, atol=0, equal_nan=True)
    assert packed.nbytes <= (1.04 if not packed.rounds_inputs else 1.35) * weight.numel() + 40000
    assert packed.interleaved is (epilogue == "silu_mul")
    assert packed.dtype == dtype


@pytest.mark.parametrize("epilogue", ["none", "gelu_tanh_mul"])
def test_repack_changes_only_the_rows_that_differ(
    lib: Library, scheme: QuantScheme, epilogue: str
) -> None:
    weight = sample(4, 140, 300, torch.bfloat16)[1]
    packed = pack_int8(weight, epilogue, scheme, lib=lib)
    before, bits = packed.data.data_ptr(), packed.data.clone()
    packed.repack(packed.unpack())  # what an update of some rows starts from
    assert torch.equal(packed.data, bits)
    held = packed.unpack()
    held[100:140] = -weight[100:140]
    packed.repack(held)
    assert packed.data.data_ptr() == before
    fresh = weight.clone()
    fresh[100:140] = -weight[100:140]
    assert torch.equal(packed.data, pack_int8(fresh, epilogue, scheme, lib=lib).data)
    with pytest.raises(ConfigError, match=r"repack takes a weight \[300, 140\]"):
        packed.repack(weight[:33])


def test_weights_and_schemes_that_cannot_be_packed() -> None:
    fp8 = QuantScheme(TensorQuant("fp8_e4m3", "per_channel"))
    with pytest.raises(ConfigError, match=r"take weights of int8 block \[1, 128\].*got fp8_e4m3"):
        pack_int8(torch.zeros(4, 4), "none", fp8)
    other = QuantScheme(WEIGHT, TensorQuant("fp8_e4m3", "per_channel", dynamic=True))
    with pytest.raises(ConfigError, match="fp8_e4m3 inputs"):
        pack_int8(torch.zeros(4, 4), "none", other)
    with pytest.raises(ConfigError, match="bfloat16 or float32"):
        pack_int8(torch.zeros(4, 4).half())
    with pytest.raises(ConfigError, match="as many gate rows as up rows"):
        pack_int8(torch.zeros(3, 4), "silu_mul")


def test_calls_that_do_not_fit() -> None:
    packed = pack_int8(torch.zeros(6, 4))
    with pytest.raises(ConfigError, match=r"takes x \[..., 4\].*got x \[2, 5\]"):
        linear_int8(torch.zeros(2, 5), packed)
    with pytest.raises(ConfigError, match="bfloat16"):
        linear_int8(torch.zeros(2, 4).bfloat16(), packed)
    with pytest.raises(ConfigError, match="interleave"):
        linear_int8(torch.zeros(2, 4), packed, None, "silu_mul")


def test_compiled_functions_call_the_library(scheme: QuantScheme) -> None:
    x, weight, bias = sample(6, 20, 18, torch.bfloat16)
    packed = pack_int8(weight, "silu_mul", scheme)

    def gated(x: Tensor) -> Tensor:
        return linear_int8(torch.relu(x), packed, bias, "silu_mul") + 1

    compiled = torch.compile(gated, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(x), gated(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", SCHEMES)
def test_layers_choose_them_by_policy(form: str, dtype: torch.dtype) -> None:
    int8 = {"dtype": "int8"}
    rule: dict[str, Any] = {"match": {"glob": "*"}, "weight": int8}
    if form == "w8a8":
        rule["input"] = int8
    table = KernelTable()
    section = {"method": "rtn", "rules": [rule]}
    table.use(parse_policy({"schema": 1, "quantization": section}))
    at = Placement(table, torch.device("cpu"), dtype)
    layer = Linear(["gate", "up"], 140, [9, 9], at, bias=True, epilogue="gelu_tanh_mul")
    assert layer.kernel == NAMES[form]
    x, weight, bias = sample(5, 140, 18, dtype)
    assert layer.bias is not None
    layer.weight.data.copy_(weight)
    layer.bias.data.copy_(bias)
    layer.pack()
    assert isinstance(layer._packed, PackedInt8)
    assert layer._packed.rounds_inputs is (form == "w8a8")
    truth = quant_linear.pack(weight, scheme=SCHEMES[form])
    assert close(layer(x), expected_int8(x, truth, bias, "gelu_tanh_mul"))
    before = layer(x)
    layer.unpack()
    layer.pack()  # nothing was overwritten
    assert torch.equal(layer(x), before)
    half = KernelTable()
    facts = {"packed": True, **SCHEMES[form].facts()}
    assert (
        half.explain_one("linear", device="cpu", dtype="float16", **facts).row == "dequant.linear"
    )
