"""ACT keeps the contract with nothing but load, prepare, denoiser, solver and an output."""

from pathlib import Path

import numpy as np
import pytest
from phyai import Engine, EngineArgs
from phyai.types import Observation

from act_policy.adapter import ACTAdapter, ACTArgs
from act_policy.presets import sample_observation, tiny


def test_nothing_else_is_implemented() -> None:
    own = {name for name in vars(ACTAdapter) if not name.startswith("_")}
    assert own == {"name", "args_cls", "load", "prepare", "denoiser", "solver", "output"}


def test_chunk_follows_image_and_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    args = ACTArgs(**tiny(Path(tmp_path_factory.mktemp("cache")), None))
    first = sample_observation({})
    with Engine(EngineArgs("act", args)) as engine:
        want = engine.step(first)
        dark = engine.step(Observation({"top": first.images["top"] // 2}, first.state))
        moved = engine.step(Observation(first.images, [0.5] * 7))
    assert want.actions.shape == (20, 7)
    assert want.units == ("rad",) * 7
    for other in (dark, moved):
        assert not np.allclose(other.actions, want.actions, atol=1e-4)
