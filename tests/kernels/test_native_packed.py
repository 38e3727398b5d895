"""Native kernels whatever torch's defaults are; packed weights, copied and pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from phyai.errors import CapacityError
from phyai.kernels import reference
from phyai.kernels.native import attention, elementwise, norm
from phyai.kernels.native.linear import PackedLinear, linear, pack
from phyai.kernels.native.quant_linear import WEIGHT, PackedInt8, linear_int8, pack_int8
from phyai.kernels.native.selfcheck import row_cases
from phyai.kernels.policy_quant import QuantScheme, TensorQuant
from phyai.kernels.quant import dequantize, quantize
from phyai.kernels.samples import sample
from tests.kernels.native_parity import DTYPES, draw, needs_native, tensors

pytestmark = needs_native

Case: TypeAlias = tuple[str, Callable[[], Any], tuple[Tensor, ...]]

W8A8 = QuantScheme(WEIGHT, TensorQuant("int8", "per_channel", dynamic=True))
PACKERS: dict[str, Callable[[Tensor], PackedLinear]] = {
    "plain": pack,
    "interleaved": lambda weight: pack(weight, interleave=True),
    "int8 weight": pack_int8,
    "int8 both": lambda weight: pack_int8(weight, "silu_mul", W8A8),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "meta": lambda: torch.device("meta"),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
}


def row_calls(dtype: torch.dtype) -> Iterator[Case]:
    """Yield name, call and tensors of every op but linear; the results and what they wrote to."""
    more: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    x, y, plane = draw(2, 3, 20, dtype=dtype), draw(2, 3, 20, dtype=dtype, seed=1), draw(20)
    more.append((norm.add_layer_norm, (x, y, plane, plane, 1e-6)))
    more.append((norm.ada_rms_norm, (x, plane, plane, 1e-6)))
    more.append((norm.ada_layer_norm, (x, plane, plane, 1e-6)))
    more.append((norm.gated_residual, (x, y, plane)))
    strided = draw(2, 20, 3, dtype=dtype).transpose(1, 2)
    more.append((norm.rms_norm, (strided, plane, 1e-6)))
    more.append((elementwise.bias_gelu_tanh, (strided, plane)))
    empty = draw(1, 0, 2, 4, dtype=dtype)
    more.append((attention.attention, (empty, empty, empty, 0.5)))
    for op, args in [*((op, args) for _, op, args in row_cases(dtype)), *more]:
        held = tuple(arg for arg in args if isinstance(arg, Tensor))
        yield op.__name__, (lambda op=op, args=args: op(*args)), held  # type: ignore[misc]


def packed_calls(dtype: torch.dtype) -> Iterator[Case]:
    """Yield name, call and tensors of pack, linear, unpack and repack in every format."""
    x, weight, bias = draw(5, 140, dtype=dtype), draw(18, 140, dtype=dtype), draw(18, dtype=dtype)
    for name, packer in PACKERS.items():

        def call(packer: Callable[[Tensor], PackedLinear] = packer) -> tuple[Tensor, ...]:
            packed = packer(weight)
            run: Callable[..., Tensor] = linear_int8 if isinstance(packed, PackedInt8) else linear
            first = run(x, packed, bias), packed.unpack(), packed.data.clone()
            packed.repack(-weight)
            return (*first, run(x, packed, bias), packed.unpack())

        yield name, call, (x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("defaults", DEFAULTS)
def test_defaults_of_torch_change_nothing(
    defaults: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [*row_calls(dtype), *packed_calls(dtype)]
    wanted = []
    for _, call, held in cases:
        before = [tensor.clone() for tensor in held]
        made = call()
        results = [] if made is None else tensors(made)
        wanted.append([tensor.clone() for tensor in (*results, *held)])
        for tensor, old in zip(held, before, strict=True):
            tensor.copy_(old)  # caches are written to
    for op, *_ in row_calls(dtype):  # what goes to the reference tests nothing
        monkeypatch.setattr(reference, op, None)
    got = []
    with DEFAULTS[defaults]():
        for _, call, held in cases:
            made = call()
            results = [] if made is None else tensors(made)
            got.append([tensor.clone() for tensor in (*results, *held)])
    for (name, *_), mine, theirs in zip(cases, got, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert (one.device.type, one.dtype) == ("cpu", other.dtype), name
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("defaults", DEFAULTS)
def test_defaults_of_torch_change_no_weight_and_no_sample(defaults: str) -> None:
    weight = draw(18, 64)
    specs = (WEIGHT, TensorQuant("nvfp4", "block", (1, 16), micro_scaled=True))
    facts = {"op": "linear", "device": "cpu", "dtype": "float32", "in_features": 8}
    facts |= {"out_features": 4, "bias": True}
    wanted = [dequantize(quantize(weight, spec)) for spec in specs]
    plain = sample(facts)
    with DEFAULTS[defaults]():
        made = [quantize(weight, spec) for spec in specs]
        drawn = sample(facts)
    assert plain is not None
    assert drawn is not None
    assert made[1].global_scale is not None
    assert made[1].global_scale.dtype == torch.float32
    for mine, theirs in zip(made, wanted, strict=True):
        assert torch.equal(dequantize(mine), theirs)
    for one, other in zip(drawn.args, plain.args, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_and_pickles_are_weights_of_their_own(name: str, dtype: torch.dtype) -> None:
    x, weight = draw(5, 140, dtype=dtype), draw(300, 140, dtype=dtype)
    packed = PACKERS[name](weight)
    wanted, plain = linear(x, packed), packed.unpack()
    copies = {"deepcopy": copy.deepcopy(packed), "pickle": pickle.loads(pickle.dumps(packed))}
    for how, made in copies.items():
        assert type(made) is type(packed), how
        assert (made.format, made.interleaved, made.dtype) == (
            packed.format,
            packed.interleaved,
            dtype,
        )
        assert made.data.data_ptr() != packed.data.data_ptr()
        assert torch.equal(made.unpack(), plain), how
        assert torch.equal(linear(x, made), wanted), how
        made.repack(-weight)
        assert torch.equal(linear(x, packed), wanted), how
        assert not torch.equal(linear(x, made), wanted), how
    packed.repack(torch.zeros_like(weight))  # and the copies do not see it
    assert all(bool(linear(x, made).any()) for made in copies.values())


def test_int8_in_chunks_is_pickled_with_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phyai.kernels.native.quant_linear._CHUNK", 1)
    packed = pack_int8(draw(600, 140), "silu_mul", W8A8)
    made = pickle.loads(pickle.dumps(packed))
    assert torch.equal(linear(draw(3, 140), made), linear(draw(3, 140), packed))
    assert torch.equal(made.data, packed.data)


def test_copies_share_storage_that_their_originals_shared() -> None:
    first = pack(draw(18, 20))
    second = copy.copy(first)
    pair = copy.deepcopy([first, first])
    assert pair[0] is pair[1]
    assert torch.equal(second.unpack(), first.unpack())


def test_no_memory_for_the_work_space_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(draw(6, 4))
    monkeypatch.setattr(packed._functions, "linear", lambda *args: 1)
    with pytest.raises(CapacityError, match=r"needs memory.*x \[2, 4\].*\[6, 4\]\. Free memory"):
        linear(draw(2, 4), packed)
