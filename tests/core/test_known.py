"""Known parts: imposed at both ends, held in between, for every kind of prediction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phyai.cache import CacheInputs
from phyai.errors import PluginContractError
from phyai.known import Hold, impose, known_part, mask_name, value_name
from phyai.solver import Euler, ToVelocity, uniform_grid
from phyai.types import Step

MASK = torch.tensor([[[True, False], [False, False]]])
VALUE = torch.full((1, 2, 2), 0.7)
STEP = Step(0, 0.5, -0.5, (0.5,))


def cache(*leaves: str) -> Any:
    tensors = {}
    for leaf in leaves:
        tensors |= {mask_name(leaf): MASK, value_name(leaf): VALUE}
    return SimpleNamespace(inputs=CacheInputs(tensors))


class Network:
    def __init__(self, prediction: Any, value: float = 3.0) -> None:
        self.prediction, self.value = prediction, value

    def __call__(self, x: Any, step: Any, cache: Any) -> Any:
        return {leaf: torch.full_like(t, self.value) for leaf, t in x.items()}


def test_names_are_the_reserved_ones() -> None:
    assert (mask_name("action"), value_name("action")) == (
        "known.action.mask",
        "known.action.value",
    )


def test_a_part_needs_mask_and_value() -> None:
    assert known_part(cache(), "action") is None
    assert known_part(cache("action"), "video") is None
    part = known_part(cache("action"), "action")
    assert part is not None
    assert part[0] is MASK
    for given, absent in ((mask_name, "value"), (value_name, "mask")):
        half: Any = SimpleNamespace(inputs=CacheInputs({given("action"): MASK}))
        with pytest.raises(PluginContractError, match=f"no 'known.action.{absent}'"):
            known_part(half, "action")


def test_impose_sets_known_elements_of_known_leaves_only() -> None:
    x = {"action": torch.zeros(1, 2, 2), "video": torch.ones(1, 3)}
    out = impose(x, cache("action"))
    assert out["action"].flatten().tolist() == pytest.approx([0.7, 0, 0, 0])
    assert out["video"] is x["video"]
    assert torch.equal(x["action"], torch.zeros(1, 2, 2))
    half = impose({"action": torch.zeros(1, 2, 2, dtype=torch.float16)}, cache("action"))
    assert half["action"].dtype == torch.float16


@pytest.mark.parametrize(
    ("prediction", "held"), [("velocity", 0.0), ("clean", 0.7), ("noise", -1.5)]
)
def test_hold_predicts_what_does_not_move(prediction: Any, held: float) -> None:
    hold = Hold(Network(prediction))
    assert hold.prediction == prediction
    x = {"action": torch.full((1, 2, 2), -1.5), "video": torch.zeros(1, 3)}
    out = hold(x, STEP, cache("action"))
    assert out["action"].flatten().tolist() == pytest.approx([held, 3, 3, 3])
    assert torch.equal(out["video"], torch.full((1, 3), 3.0))
    assert torch.equal(hold(x, STEP, cache())["action"], torch.full((1, 2, 2), 3.0))


@pytest.mark.parametrize("order", ["hold outside", "hold inside"])
@pytest.mark.parametrize("prediction", ["velocity", "clean"])
def test_held_elements_keep_every_bit_through_a_solve(prediction: Any, order: str) -> None:
    network: Any = Network(prediction)
    if order == "hold inside":
        network = Hold(network)
    if prediction == "clean":
        network = ToVelocity(network)
    if order == "hold outside":
        network = Hold(network)
    where = cache("action")
    x = impose({"action": torch.randn(1, 2, 2, generator=torch.manual_seed(0))}, where)
    out = Euler().solve(network, x, where, uniform_grid(10))["action"]
    assert torch.equal(out[MASK], VALUE[MASK])
    assert not torch.equal(out[~MASK], x["action"][~MASK])
