"""The cost model counts what the layers really multiply, and its requests run."""

from __future__ import annotations

import pytest

from phyai.cost import Workload, total_flops
from phyai.errors import ConfigError
from phyai.models.minicpm_robot.main_minicpm_robot import MiniCPMRobotArgs, cost
from tests.linear_flops import linear_flops
from tests.minicpm.minicpm_engines import engine_of, minicpm_args


def test_linear_layers_do_the_counted_work() -> None:
    """Each stage's operations are those of its linear layers, attention and recurrence."""
    model = cost(minicpm_args())
    workload = Workload(rows=2, cameras=1, tokens=9, steps=2)
    with engine_of() as engine, linear_flops(engine) as done:
        assert engine.step(model.request(workload)).shape[0] == 2
    stages = {stage.stage: stage.flops for stage in model.stages(workload)}
    assert 0.3 * stages["vision"] < done["vision"] <= stages["vision"]
    assert 0.5 * stages["text"] < done["text"] <= stages["text"]
    assert 0.8 * stages["head"] < done["cross"] <= stages["head"]
    assert 0.4 * stages["loop"] < done["dit"] <= stages["loop"]


def test_released_sizes_and_the_published_account() -> None:
    model = cost(MiniCPMRobotArgs())
    workload = model.workload()
    ours, theirs = model.stages(workload), model.stages(workload, published=True)
    assert [stage.stage for stage in ours] == ["vision", "text", "head", "loop"]
    assert [stage.stage for stage in theirs] == ["vision", "text", "loop"]
    assert total_flops(theirs) > total_flops(ours)
    by = {stage.stage: stage for stage in ours}
    # The tower, both mergers, and the layers without the embedding table.
    assert by["vision"].weight_bytes == pytest.approx(2 * 543e6, rel=2e-2)
    assert by["text"].weight_bytes == pytest.approx(2 * 498e6, rel=1e-2)
    assert by["loop"].weight_bytes == pytest.approx(4 * 2 * 101e6, rel=0.1)
    assert model.published().figures


@pytest.mark.parametrize(("cameras", "tokens"), [(0, 5), (65, 5), (1, 0), (1, 513)])
def test_workloads_it_cannot_have(cameras: int, tokens: int) -> None:
    model = cost(minicpm_args())
    with pytest.raises(ConfigError, match="workload"):
        model.stages(Workload(cameras=cameras, tokens=tokens))
