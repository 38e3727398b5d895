"""The cost model counts what the layers really multiply, and its requests run."""

from __future__ import annotations

import pytest

from phyai.cost import Workload, total_flops
from phyai.errors import ConfigError
from phyai.models.gr00t.main_gr00t import GrootArgs, cost
from tests.groot.groot_engines import engine_of, groot_args
from tests.linear_flops import linear_flops


def test_linear_layers_do_the_counted_work() -> None:
    """Each stage's operations are those of its linear layers plus attention, which is less."""
    model = cost(groot_args())
    workload = Workload(rows=2, cameras=1, tokens=9, steps=2)
    with engine_of() as engine, linear_flops(engine) as done:
        assert engine.step(model.request(workload)).shape[0] == 2
    stages = {stage.stage: stage.flops for stage in model.stages(workload)}
    # The rest is attention and, in the loop, the weights of the embodiments.
    assert 0.5 * stages["vision"] < done["vision"] <= stages["vision"]
    assert 0.5 * stages["text"] < done["text"] <= stages["text"]
    assert 0.5 * stages["vl"] < done["vl"] <= stages["vl"]
    assert 0.9 * stages["head"] < done["cross"] < stages["head"]
    assert 0.4 * stages["loop"] < done["dit"] < stages["loop"]


def test_released_sizes_and_the_published_account() -> None:
    model = cost(GrootArgs())
    workload = model.workload()
    ours, theirs = model.stages(workload), model.stages(workload, published=True)
    assert [stage.stage for stage in ours] == ["vision", "text", "vl", "head", "loop"]
    assert total_flops(theirs) > total_flops(ours)
    by = {stage.stage: stage for stage in ours}
    assert by["text"].weight_bytes == pytest.approx(2 * 805.4e6, rel=1e-2)
    assert by["vl"].weight_bytes == pytest.approx(2 * 201.4e6, rel=1e-2)
    assert by["vision"].weight_bytes == pytest.approx(2 * 407e6, rel=2e-2)
    assert model.published().figures


@pytest.mark.parametrize("changes", [{"cameras": 0}, {"tokens": 10**5}])
def test_a_workload_out_of_range_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be in"):
        cost(groot_args()).request(Workload(**{"cameras": 1, "tokens": 4, **changes}))
