"""The counter: formulas of each operator, attribution to stages, and what it cannot count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from phyai.cost import StageCost, flop_shares, total_flops
from phyai.profile.flops import FlopCounter, count_flops
from phyai.profile.probe import probe, stream_bytes_per_s
from phyai.timers import Timers


def test_products_convolution_and_attention() -> None:
    q, k = torch.rand(2, 4, 5, 8), torch.rand(2, 4, 7, 8)

    def run() -> None:
        torch.rand(3, 4) @ torch.rand(4, 5)
        F.linear(torch.rand(2, 3, 4), torch.rand(6, 4), torch.rand(6))
        torch.bmm(torch.rand(2, 3, 4), torch.rand(2, 4, 5))
        F.conv2d(torch.rand(1, 3, 8, 8), torch.rand(5, 3, 4, 4), stride=4)
        F.scaled_dot_product_attention(q, k, k)
        torch.rand(100).exp()

    counter = count_flops(Timers(), run)
    linear, conv, attention = 2 * 6 * 4 * 6, 2 * 5 * 4 * 48, 4 * 2 * 4 * 5 * 7 * 8
    assert counter.total == 2 * 60 + linear + 2 * 120 + conv + attention
    assert not counter.opaque


def test_prepacked_linear_is_counted() -> None:
    if not torch.backends.mkldnn.is_available():  # pragma: no cover
        pytest.skip("torch was built without oneDNN")
    x, weight = torch.rand(3, 16), torch.rand(32, 16)
    linear = torch.ops.mkldnn._linear_pointwise
    counter = count_flops(Timers(), lambda: linear(x, weight, None, "none", [], ""))
    assert counter.total == 2 * 3 * 16 * 32


def test_operations_belong_to_the_innermost_stage() -> None:
    timers = Timers()
    a, b = torch.rand(2, 3), torch.rand(3, 4)
    with FlopCounter(timers) as counter:
        a @ b
        with timers.stage("encode"):
            a @ b
            with timers.stage("vision"):
                a @ b
                a @ b
    assert dict(counter.flops) == {"": 48, "encode": 48, "encode/vision": 96}


def test_foreign_operators_are_named() -> None:
    with torch.library._scoped_library("phyaitest", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CPU")
        counter = count_flops(Timers(), lambda: torch.ops.phyaitest.twice(torch.ones(2)))
    assert counter.opaque == {"phyaitest.twice"}


def test_shares_of_stages() -> None:
    stages = [StageCost("a", "", 1.0, 0.0), StageCost("b", "", 3.0, 2.0)]
    assert total_flops(stages) == 4
    assert flop_shares(stages) == {"a": 0.25, "b": 0.75}
    assert flop_shares([StageCost("a", "", 0.0, 0.0)]) == {"a": 0.0}
    assert (stages[1].intensity, stages[0].intensity) == (1.5, float("inf"))


def test_probe_measures_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phyai.profile.probe.SIZES", (64,))
    monkeypatch.setattr("phyai.profile.probe.STREAM_BYTES", 2**20)
    (machine,) = probe(torch.device("cpu"), ["float32"])
    assert machine.dtype == "float32"
    assert machine.flops_per_s > 1e6
    assert stream_bytes_per_s(torch.device("cpu"), 2**20) > 1e6
    assert "1 thread" in machine.name
    with pytest.raises(ValueError, match="float8"):
        probe(torch.device("cpu"), ["float8"])
