"""Linear layers on the CPU over weights packed once: y = x W^T, bias and epilogue in one pass."""

from __future__ import annotations

import copy
import ctypes
import functools
import threading
from typing import Any, Self

import torch
from torch import Tensor

from phyai.errors import CapacityError, ConfigError
from phyai.kernels.native.call import CODES, watched
from phyai.kernels.native.library import Library, library

EPILOGUES = {"none": 0, "gelu_tanh": 1, "gelu_tanh_mul": 2, "silu_mul": 3}
_GATED = 2  # epilogue codes from here on read gate and up
_REGISTERING = threading.Lock()  # engines may open on several threads at once


class _Packed(ctypes.Structure):
    """Mirrors ``phyai::Packed`` in gemm.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("interleave", ctypes.c_int32),
        ("format", ctypes.c_int32),
    )


class _Functions:
    """The typed functions of one library, looked up once."""

    def __init__(self, lib: Library) -> None:
        packed, pointer, wide, code = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self.kind: int = lib.phyai_gemm_kind()
        self.bytes = lib.phyai_gemm_bytes
        self.bytes.argtypes, self.bytes.restype = (packed,), wide
        rows = (packed, pointer, wide, pointer, wide, wide, code)
        self.pack = lib.phyai_gemm_pack
        self.pack.argtypes, self.pack.restype = rows, None
        self.unpack = lib.phyai_gemm_unpack
        self.unpack.argtypes, self.unpack.restype = rows, None
        self.linear = lib.phyai_linear
        self.linear.argtypes = (packed, pointer, wide, wide, pointer, pointer, code, code)


@functools.cache
def _functions(lib: Library) -> _Functions:
    with _REGISTERING:
        _register()  # before torch.compile traces a call: nothing can be registered meanwhile
    return _Functions(lib)


class PackedLinear:
    """A weight [out_features, in_features] in the layout of one library, in its own dtype.

    ``data`` (uint8) is as large as the weight, plus the padding of the last columns. With
    ``interleaved`` the first half of the rows (gate) alternates with the second (up), as the gated
    epilogues need it. ``dtype`` is that of the weight as it was given, of inputs and of results.
    """

    def __init__(
        self,
        data: Tensor | None,
        shape: tuple[int, int],
        dtype: torch.dtype,
        interleaved: bool,
        lib: Library,
        format: int = 0,
    ) -> None:
        """data: storage that another one filled; None takes new storage, without values yet.

        format: ``phyai::Format`` in gemm.h.
        """
        self._functions = _functions(lib)
        self._kind = self._functions.kind
        self.out_features, self.in_features = shape
        self.dtype = dtype
        self.interleaved = interleaved
        self.format = format
        self._describe(data)

    def _describe(self, data: Tensor | None) -> None:
        """Take a storage, and say in C's terms what lies where."""
        shape, code = (self.out_features, self.in_features), CODES[self.dtype]
        self._fields = _Packed(None, *shape, code, int(self.interleaved), self.format)
        self._address = ctypes.addressof(self._fields)
        if data is None:
            size = self._functions.bytes(self._address)
            data = torch.empty(size, dtype=torch.uint8, device="cpu")  # whatever the default is
        self.data = data
        self._fields.data = data.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the same weight in storage of its own; ``_fields`` points into it."""
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(self.__dict__)
        made._describe(copy.deepcopy(self.data, memo))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the weight without its layout: another process may have another library."""
        return (_packed_again, (self.unpack(), self.interleaved))

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def unpack(self) -> Tensor:
        """Return the weight [out_features, in_features], bit for bit."""
        weight = self._empty_weight()
        self._move(self._functions.unpack, weight, None, 0)
        return weight

    def repack(self, weight: Tensor) -> None:
        """Write another weight of the same shape and dtype into the same storage.

        Raises: ConfigError when shape or dtype differ.
        """
        weight = self._checked(weight)
        if weight.stride(1) != 1 and self.in_features > 1:
            weight = weight.contiguous()
        self._move(self._functions.pack, weight, None, 0)

    def _empty_weight(self) -> Tensor:
        return self.data.new_empty((self.out_features, self.in_features), dtype=self.dtype)

    def _checked(self, weight: Tensor) -> Tensor:
        shape = (self.out_features, self.in_features)
        if tuple(weight.shape) != shape or weight.dtype != self.dtype:
            raise ConfigError(
                f"repack takes a weight {list(shape)} {self.dtype}; "
                f"got {list(weight.shape)} {weight.dtype}. Pack it as a new layer."
            )
        _check_cpu("weight", weight)
        return weight.detach()

    def _move(self, function: Any, values: Tensor, scales: Tensor | None, first: int) -> None:
        """Pack or unpack rows from ``first`` on."""
        function(
            self._address,
            values.data_ptr(),
            values.stride(0),
            None if scales is None else scales.data_ptr(),
            first,
            values.shape[0],
            torch.get_num_threads(),
        )


def pack(weight: Tensor, *, interleave: bool = False, lib: Library | None = None) -> PackedLinear:
    """Return the weight in the layout of ``lib``, by default this process's library.

    Shapes: weight [N, K] bfloat16 or float32 on the CPU. interleave: the rows are gate, then up,
        N / 2 each.
    Raises: ConfigError for another dtype, device or shape; KernelUnavailable without a library.
    """
    check_weight(weight, interleave)
    shape = (weight.shape[0], weight.shape[1])
    packed = PackedLinear(None, shape, weight.dtype, interleave, library() if lib is None else lib)
    packed.repack(weight)
    return packed


def _packed_again(weight: Tensor, interleave: bool) -> PackedLinear:
    return pack(weight, interleave=interleave)


def check_weight(weight: Tensor, interleave: bool) -> None:
    """Raises: ConfigError when the kernels of this file cannot take the weight."""
    if weight.dim() != 2 or weight.dtype not in CODES or 0 in weight.shape:
        raise ConfigError(
            f"a packed weight is [N, K], bfloat16 or float32, not empty; "
            f"got {list(weight.shape)} {weight.dtype}. Cast it or use the plain linear."
        )
    if interleave and weight.shape[0] % 2:
        raise ConfigError(
            f"an interleaved weight has as many gate rows as up rows; got {weight.shape[0]} rows. "
            "Pack it without interleave."
        )
    _check_cpu("weight", weight)


def linear(
    x: Tensor, packed: PackedLinear, bias: Tensor | None = None, epilogue: str = "none"
) -> Tensor:
    """Return x @ weight.T + bias, through one of ``EPILOGUES``.

    Shapes: x [..., K], bias [N], both in the dtype of the weight -> [..., N], or [..., N / 2] for
        the epilogues that end in ``_mul``: they need an interleaved weight.
    Rounding: the fp32 sum with bias is rounded, then the activation, then its product with up:
        ``reference.linear`` followed by the reference of that name.
    Raises: ConfigError when dtype, shape, device or epilogue do not fit; CapacityError without
        memory for the work space.
    """
    if watched():
        shape, layout = (packed.out_features, packed.in_features), (packed._kind, packed.format)
        out: Tensor = torch.ops.phyai.native_linear(
            x, packed.data, bias, shape, packed.interleaved, layout, epilogue
        )
        return out
    return _run(x, packed, bias, epilogue)


def _run(x: Tensor, packed: PackedLinear, bias: Tensor | None, epilogue: str) -> Tensor:
    code = EPILOGUES.get(epilogue, -1)
    shape = x.shape
    k, n = packed.in_features, packed.out_features
    if (
        code < 0
        or (code >= _GATED and not packed.interleaved)
        or x.dtype is not packed.dtype
        or not shape
        or shape[-1] != k
        or not x.is_cpu
        or (bias is not None and (bias.dtype is not packed.dtype or bias.numel() != n))
    ):
        _refuse(x, packed, bias, epilogue)
    if not x.is_contiguous():
        x = x.contiguous()
    width = n // 2 if code >= _GATED else n
    out = x.new_empty((*shape[:-1], width))
    if bias is not None and not (bias.is_contiguous() and bias.is_cpu):
        bias = bias.cpu().contiguous()
    failed = packed._functions.linear(
        packed._address,
        x.data_ptr(),
        k,
        x.numel() // k,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        code,
        torch.get_num_threads(),
    )
    if failed:
        raise CapacityError(
            f"a linear layer needs memory for its work space; got none for x {list(shape)} beside "
            f"a weight [{n}, {k}]. Free memory of this machine, or give it fewer rows at a time."
        )
    return out


def _refuse(x: Tensor, packed: PackedLinear, bias: Tensor | None, epilogue: str) -> None:
    """Raise the ConfigError that says which rule was broken."""
    if epilogue not in EPILOGUES:
        raise ConfigError(
            f"the epilogue is one of {', '.join(EPILOGUES)}; got {epilogue!r}. Choose one of them."
        )
    if EPILOGUES[epilogue] >= _GATED and not packed.interleaved:
        raise ConfigError(
            f"the epilogue {epilogue} needs an interleaved weight; got a plain one. "
            "Pack it with interleave=True."
        )
    _check_cpu("input", x)
    wanted = f"x [..., {packed.in_features}] and bias [{packed.out_features}] in {packed.dtype}"
    got = f"x {list(x.shape)} {x.dtype}"
    if bias is not None:
        got += f", bias {list(bias.shape)} {bias.dtype}"
    raise ConfigError(f"this packed linear takes {wanted}; got {got}. Cast or reshape the input.")


@functools.cache
def _register() -> Any:
    """Register ``phyai::native_linear``: how a compiled graph calls this process's library."""
    untyped: Any = torch.library.Library
    operators = untyped("phyai", "FRAGMENT")  # per call a third of what a custom_op costs
    operators.define(
        "native_linear(Tensor x, Tensor data, Tensor? bias, SymInt[] shape, bool interleaved, "
        "int[] layout, str epilogue) -> Tensor"
    )
    operators.impl("native_linear", _run_operator, "CPU")
    torch.library.register_fake("phyai::native_linear", _fake_operator, lib=operators)
    return operators


def _run_operator(
    x: Tensor,
    data: Tensor,
    bias: Tensor | None,
    shape: list[int],
    interleaved: bool,
    layout: list[int],
    epilogue: str,
) -> Tensor:
    lib = library()
    kind, format = layout
    if kind != _functions(lib).kind:
        raise ConfigError(
            f"a compiled linear runs on this process's library; got a weight packed for another "
            f"(layout {kind}). Pack it again without lib."
        )
    packed = PackedLinear(data, (shape[0], shape[1]), x.dtype, interleaved, lib, format)
    return _run(x, packed, bias, epilogue)


def _fake_operator(
    x: Tensor,
    data: Tensor,
    bias: Tensor | None,
    shape: list[int],
    interleaved: bool,
    layout: list[int],
    epilogue: str,
) -> Tensor:
    width = shape[0] // 2 if EPILOGUES[epilogue] >= _GATED else shape[0]
    return x.new_empty((*x.shape[:-1], width))


def _check_cpu(name: str, tensor: Tensor) -> None:
    if not tensor.is_cpu:
        raise ConfigError(
            f"the {name} of a native linear lies in CPU memory; got {tensor.device}. Move it there."
        )
