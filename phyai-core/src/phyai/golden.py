"""Golden cases: an official implementation's inputs and outputs, replayed through an adapter.

A model package turns a case file into GoldenRuns (manifest field ``golden``); ``phyai verify`` and
the tests run them through the engine and read the comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from phyai.adapter import Adapter, AdapterArgs

Records = Mapping[str, "list[Tensor]"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The largest error of one tensor (or the share of differing entries) and what is allowed.

    kind: ``abs`` largest absolute error, ``rel`` relative norm, ``exact`` 0 when equal, else 1.
    """

    name: str
    error: float
    tolerance: float
    kind: Literal["abs", "rel", "exact"] = "abs"

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


@dataclass(frozen=True)
class GoldenRun:
    """One way to run a case.

    args: adapter arguments (fp32 on CPU unless ``precision`` says otherwise).
    request: what the engine gets; None when nothing has to be run.
    records: names the recorder listens to; None = all, () = no recording.
    compare: (adapter, result, records) -> comparisons; without a request it gets Nones.
    """

    label: str
    compare: Callable[[Adapter | None, Any, Records], list[Comparison]]
    args: AdapterArgs | None = None
    request: Any = None
    records: tuple[str, ...] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


def absolute(name: str, got: Tensor, want: Tensor, tolerance: float) -> Comparison:
    """Return the largest |got - want|; infinity when the shapes differ."""
    if got.shape != want.shape:
        return _wrong_shape(name, got, want, tolerance, "abs")
    if not got.numel():
        return Comparison(name, 0.0, tolerance)
    return Comparison(name, float((got.double() - want.double()).abs().max()), tolerance)


def close(name: str, got: Tensor, want: Tensor, *, atol: float, rtol: float) -> Comparison:
    """Return |got - want| and what is allowed, atol + rtol |want|, at the entry furthest over it.

    Infinity when the shapes differ; NaN when any difference is NaN.
    """
    if got.shape != want.shape:
        return _wrong_shape(name, got, want, atol, "abs")
    if not got.numel():
        return Comparison(name, 0.0, atol)
    error = (got.double() - want.double()).abs().flatten()
    allowed = atol + rtol * want.double().abs().flatten()
    worst = int((error - allowed).argmax())  # a NaN counts as the largest
    return Comparison(name, float(error[worst]), float(allowed[worst]))


def relative(name: str, got: Tensor, want: Tensor, tolerance: float) -> Comparison:
    """Return ||got - want|| / ||want||; infinity when the shapes differ."""
    if got.shape != want.shape:
        return _wrong_shape(name, got, want, tolerance, "rel")
    norm = float(want.double().norm()) or 1.0
    return Comparison(name, float((got.double() - want.double()).norm()) / norm, tolerance, "rel")


def unknown(name: str) -> Comparison:
    """Return the infinite error of a stored result that nothing was computed for."""
    return Comparison(f"{name} (nothing to compare it with)", float("inf"), 0.0)


def _wrong_shape(
    name: str, got: Tensor, want: Tensor, tolerance: float, kind: Literal["abs", "rel"]
) -> Comparison:
    text = f"{name} {list(got.shape)} != {list(want.shape)}"
    return Comparison(text, float("inf"), tolerance, kind)


def exact(name: str, got: Any, want: Any) -> Comparison:
    """Return 0 when equal (tensors: shape and every entry), else 1."""
    import torch

    if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
        same = got.shape == want.shape and bool((got == want).all())
    else:
        same = got == want
    return Comparison(name, 0.0 if same else 1.0, 0.0, "exact")
