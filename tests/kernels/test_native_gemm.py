"""Packed linear layers in C++ against the references, on vectors and on emulated tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from phyai import env
from phyai.errors import ConfigError, KernelUnavailable
from phyai.kernels import reference
from phyai.kernels.native import attention, elementwise, norm, rope
from phyai.kernels.native import build as build_module
from phyai.kernels.native.build import build
from phyai.kernels.native.library import Library, library
from phyai.kernels.native.linear import EPILOGUES, PackedLinear, linear, pack
from phyai.kernels.native.selfcheck import (
    check_int8,
    check_linear,
    check_row,
    close,
    expected_linear,
    row_cases,
)
from tests.kernels.native_parity import DTYPES, needs_native

pytestmark = needs_native

# (rows, K, N): ends of registers, panels, slices and blocks, on both sides
SHAPES = (
    (1, 1, 2),
    (1, 4304, 34),
    (3, 17, 2),
    (7, 33, 18),
    (17, 3, 130),
    (33, 257, 16),
    (50, 385, 66),
    (170, 130, 258),
    (530, 64, 48),
)


EMULATED = [pytest.param(name, marks=pytest.mark.slow) for name in ("AMX", "PAIRS")]


@pytest.fixture(scope="module", params=["default", *EMULATED])
def lib(request: pytest.FixtureRequest) -> Library:
    if request.param == "default":
        return library()
    defines = [f"PHYAI_{request.param}_EMULATED"]
    folder = env.cache_dir() / "native"
    try:
        return Library(build(folder, defines=defines, prefixes=("gemm", "isa")))
    except KernelUnavailable as error:  # the default one compiled, so this one must
        pytest.fail(str(error))


@pytest.fixture(scope="module")
def quick_tiles() -> Library:
    """Emulated tiles, compiled in seconds rather than for speed, and kept like the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "FLAGS", (*build_module.FLAGS, "-O0"))
        patch.setattr(build_module, "_check", lambda library: None)  # the tests are the check
        folder, defines = env.cache_dir() / "native", ["PHYAI_AMX_EMULATED"]
        return Library(build(folder, defines=defines, prefixes=("gemm", "isa")))


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


def test_the_variant_is_what_it_says(lib: Library) -> None:
    kinds = {"amx-emulated": 1, "pairs-emulated": 2, "avx2": 0, "avx512": 0, "generic": 0}
    if lib.isa in kinds:  # real tiles may be refused by the system
        assert lib.phyai_gemm_kind() == kinds[lib.isa]


@pytest.mark.parametrize(("rows", "k", "n"), [(1, 1, 2), (19, 33, 34), (50, 130, 66)])
def test_emulated_tiles_in_the_default_run(quick_tiles: Library, rows: int, k: int, n: int) -> None:
    assert quick_tiles.phyai_gemm_kind() == 1
    check_linear(quick_tiles, torch.bfloat16, rows, k, n)
    check_int8(quick_tiles, torch.bfloat16, rows, k, n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_every_epilogue_is_the_reference(
    lib: Library, dtype: torch.dtype, rows: int, k: int, n: int
) -> None:
    x, weight, bias = sample(rows, k, n, dtype)
    for interleave in (False, True):
        packed = pack(weight, interleave=interleave, lib=lib)
        for epilogue in EPILOGUES:
            if epilogue.endswith("_mul") and not interleave:
                continue
            for add in (None, bias):
                got = linear(x, packed, add, epilogue)
                assert close(got, expected_linear(x, weight, add, epilogue)), (epilogue, interleave)


@pytest.mark.parametrize("n", [1, 3, 17, 33])
def test_odd_numbers_of_columns(lib: Library, n: int) -> None:
    for dtype in DTYPES:
        x, weight, bias = sample(5, 40, n, dtype)
        got = linear(x, pack(weight, lib=lib), bias, "gelu_tanh")
        assert close(got, expected_linear(x, weight, bias, "gelu_tanh"))


def test_sum_and_bias_are_rounded_once(lib: Library) -> None:
    one = torch.ones(1, 2, dtype=torch.bfloat16)
    weight = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    bias = torch.ones(1, dtype=torch.bfloat16)
    # 257 alone would be rounded to 256, and 256 + 1 again
    assert linear(one, pack(weight, lib=lib), bias).item() == 258.0


@pytest.mark.parametrize("epilogue", ["gelu_tanh", "gelu_tanh_mul", "silu_mul"])
def test_activation_and_product_are_rounded_like_the_reference(lib: Library, epilogue: str) -> None:
    weight = sample(1, 1, 8192, torch.bfloat16)[1]
    x = torch.ones(1, 1, dtype=torch.bfloat16)  # the sums are the weights: nothing differs before
    got = linear(x, pack(weight, interleave=True, lib=lib), None, epilogue)
    wanted = getattr(reference, epilogue)(weight.T)
    # an activation next to a tie may round to the other side; a missing rounding moves a quarter
    assert (got != wanted).float().mean() < 0.005
    assert close(got, wanted)


def test_rows_and_threads_do_not_change_a_bit(lib: Library) -> None:
    x, weight, bias = sample(173, 700, 200, torch.bfloat16)
    packed = pack(weight, lib=lib)
    whole = linear(x, packed, bias)
    torch.set_num_threads(2)
    assert torch.equal(linear(x, packed, bias), whole)
    assert torch.equal(linear(x[41:42], packed, bias), whole[41:42])


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_in_parts_do_not_change_a_bit(lib: Library, dtype: torch.dtype) -> None:
    x, weight, bias = sample(470, 16400, 18, dtype)  # more than the work space takes at once
    packed = pack(weight, interleave=True, lib=lib)
    for epilogue in ("none", "silu_mul"):
        whole = linear(x, packed, bias, epilogue)
        for row in (0, 234, 235, 236, 469):
            assert torch.equal(linear(x[row : row + 1], packed, bias, epilogue)[0], whole[row])


def test_callers_in_several_threads_share_nothing(lib: Library) -> None:
    x, weight, bias = sample(60, 300, 130, torch.bfloat16)
    packed = pack(weight, lib=lib)
    inputs = [x * factor for factor in (1, 2, 3, 4)]
    wanted = [linear(one, packed, bias) for one in inputs]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda one: [linear(one, packed, bias) for _ in range(20)], inputs))
    for many, one in zip(got, wanted, strict=True):
        assert all(torch.equal(each, one) for each in many)


def test_leading_dims_strides_and_no_rows(lib: Library) -> None:
    x, weight, _ = sample(12, 20, 18, torch.bfloat16)
    packed = pack(weight, lib=lib)
    flat = linear(x, packed)
    assert torch.equal(linear(x.view(2, 3, 2, 20), packed), flat.view(2, 3, 2, 18))
    assert torch.equal(linear(x.T.contiguous().T, packed), flat)
    assert torch.equal(linear(x[3], packed), flat[3])
    assert linear(x[:0], packed).shape == (0, 18)
    wide = torch.zeros(18, 33, dtype=torch.bfloat16)
    wide[:, :20] = weight
    assert torch.equal(pack(wide[:, :20], lib=lib).unpack(), weight)
    assert torch.equal(pack(weight.T.contiguous().T, lib=lib).unpack(), weight)


def test_a_broken_row_stays_alone_and_visible(lib: Library) -> None:
    x, weight, _ = sample(50, 64, 48, torch.bfloat16)
    packed = pack(weight, lib=lib)
    clean = linear(x, packed)
    x[17, 5] = float("nan")
    got = linear(x, packed)
    assert got[17].isnan().all()
    assert torch.equal(got[:17], clean[:17])
    assert torch.equal(got[18:], clean[18:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleave", [False, True])
def test_packed_weights_keep_every_bit_and_the_size(
    lib: Library, dtype: torch.dtype, interleave: bool
) -> None:
    out = 256  # legs of 128: whole panels at every vector width
    weight = sample(1, 4304 // 16, out, dtype)[1]
    weight[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40])
    packed = pack(weight, interleave=interleave, lib=lib)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(packed.unpack().view(bits), weight.view(bits))
    assert packed.nbytes <= 1.1 * weight.numel() * weight.element_size()
    assert (packed.out_features, packed.in_features) == (out, 269)
    assert packed.interleaved is interleave


def test_repack_writes_into_the_same_storage(lib: Library) -> None:
    x, weight, _ = sample(4, 40, 34, torch.bfloat16)
    packed = pack(weight, lib=lib)
    before = packed.data.data_ptr()
    packed.repack(-weight)
    assert packed.data.data_ptr() == before
    assert torch.equal(linear(x, packed), linear(x, pack(-weight, lib=lib)))
    with pytest.raises(ConfigError, match=r"repack takes a weight \[34, 40\]"):
        packed.repack(weight[:33])
    with pytest.raises(ConfigError, match="repack takes"):
        packed.repack(weight.float())


@pytest.mark.parametrize(
    ("weight", "interleave", "message"),
    [
        (torch.zeros(4), False, r"is \[N, K\]"),
        (torch.zeros(0, 4), False, "not empty"),
        (torch.zeros(4, 4, dtype=torch.float16), False, "bfloat16 or float32"),
        (torch.zeros(4, 4, device="meta"), False, "CPU memory"),
        (torch.zeros(3, 4), True, "as many gate rows as up rows; got 3"),
    ],
)
def test_weights_that_cannot_be_packed(weight: Tensor, interleave: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pack(weight, interleave=interleave)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: linear(torch.zeros(2, 5), p), r"takes x \[..., 4\].*got x \[2, 5\]"),
        (lambda p: linear(torch.zeros(()), p), "takes x"),
        (lambda p: linear(torch.zeros(2, 4).bfloat16(), p), "bfloat16"),
        (lambda p: linear(torch.zeros(2, 4, device="meta"), p), "input lies in CPU memory|CPU"),
        (lambda p: linear(torch.zeros(2, 4), p, torch.zeros(5)), r"bias \[5\]"),
        (lambda p: linear(torch.zeros(2, 4), p, torch.zeros(6).bfloat16()), "bias"),
        (lambda p: linear(torch.zeros(2, 4), p, None, "relu"), "one of none, gelu_tanh"),
        (lambda p: linear(torch.zeros(2, 4), p, None, "silu_mul"), "interleave=True"),
    ],
)
def test_calls_that_do_not_fit(call: Callable[[PackedLinear], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(pack(torch.zeros(6, 4)))


def test_compiled_functions_call_the_library() -> None:
    x, weight, bias = sample(6, 20, 18, torch.bfloat16)
    packed = pack(weight, interleave=True)

    def gated(x: Tensor) -> Tensor:
        return linear(torch.relu(x), packed, bias, "silu_mul") + 1

    compiled = torch.compile(gated, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(x), gated(x))
    assert torch.equal(compiled(x[:4]), gated(x[:4]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_passes_good_kernels_and_finds_those_that_do_nothing(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _, op, args in row_cases(dtype):
        check_row(op, args, "here")
    for module in (attention, elementwise, norm, rope):
        monkeypatch.setattr(module, "entry", lambda name: lambda block: 0)
    for _, op, args in row_cases(dtype):
        with pytest.raises(SystemExit, match=f"{op.__name__} is wrong: here"):
            check_row(op, args, "here")
