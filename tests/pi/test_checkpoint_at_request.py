"""Checkpoints whose fault shows at a request: it is refused, nothing leaves, the engine lives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Engine
from phyai.errors import ActionRejected, CheckpointError, RequestError
from phyai.types import Observation
from tests.pi.checkpoint_variants import (
    GOLDEN,
    MODELS,
    actions_of,
    golden_actions,
    golden_config,
    golden_request,
    golden_tensors,
    lerobot_folder,
)
from tests.pi.preset_engines import open_engine

LAYER = "paligemma_with_expert.paligemma.model.language_model.layers.1.mlp.up_proj.weight"


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def _observation(model: str) -> Observation:
    size = golden_config(model)["input_features"]["observation.state"]["shape"][0]
    return Observation(
        images={"base_0_rgb": np.full((56, 56, 3), 90, dtype=np.uint8)},
        state=np.zeros(size),
        prompt="open",
        options={"seed": 0},
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_weights_are_rejected_and_the_engine_lives(
    model: str, bad: float, tmp_path: Path
) -> None:
    """The action never leaves; after the weights are repaired the same engine works."""
    tensors = golden_tensors(model)
    whole = tensors[LAYER].clone()
    tensors[LAYER][0, 0] = bad
    folder = lerobot_folder(tmp_path, model, tensors=tensors)
    with open_engine(model, checkpoint_dir=folder, max_batch_size=4) as engine:
        for request in (golden_request(model), _observation(model), golden_request(model)):
            with pytest.raises(ActionRejected, match="finite"):
                engine.step(request)
        assert engine.stats()["replicas"][0]["state"] == "ready"
        update: Any = engine.adapter.update_weights
        update({LAYER: whole})
        torch.testing.assert_close(
            actions_of(engine, model), golden_actions(model), atol=5e-5, rtol=0
        )
    _good(model)


def test_unreadable_tokenizer_is_named(model: str, tmp_path: Path) -> None:
    """Model requests need no tokenizer; an observation says which file is broken."""
    folder = lerobot_folder(tmp_path, model)
    (folder / "tokenizer" / "tokenizer.json").write_text("{")
    with open_engine(model, checkpoint_dir=folder, max_batch_size=4) as engine:
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            engine.step(_observation(model))
        torch.testing.assert_close(
            actions_of(engine, model), golden_actions(model), atol=5e-5, rtol=0
        )


def test_wrong_state_length_names_the_length(model: str) -> None:
    folder = GOLDEN / model
    with open_engine(
        model,
        checkpoint_dir=folder,
        max_batch_size=4,
        processor_dir=folder / "processors_abs",
    ) as engine:
        good = _observation(model)
        bad = Observation(good.images, np.zeros(4), good.prompt)
        with pytest.raises(RequestError, match=r"state must have 5 values; got 4"):
            engine.step(bad)
        assert np.isfinite(engine.step(good).actions).all()


def _good(model: str) -> None:
    engine: Engine = open_engine(model, checkpoint_dir=GOLDEN / model, max_batch_size=4)
    with engine:
        torch.testing.assert_close(
            actions_of(engine, model), golden_actions(model), atol=5e-5, rtol=0
        )
