"""Our side counts what it computes, and refuses a run that computed something else."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.peers.base import Refused, Setup
from benchmarks.peers.engine_side import EngineSide
from benchmarks.peers.models import MODELS
from benchmarks.peers.weights import write_checkpoint
from safetensors.torch import save_file

from phyai.graph import GraphService
from tests.bench.small_sizes import SMALL

ROWS, CAMERAS, TOKENS = 2, 2, 7


def loaded(name: str, folder: Path, options: str = "", rows: int = ROWS) -> EngineSide:
    sizes = SMALL[name]
    write_checkpoint(folder, sizes, seed=0)
    inputs = sizes.inputs(CAMERAS, TOKENS, rows, torch.Generator().manual_seed(1))
    save_file(inputs, folder / "inputs.safetensors")
    side = MODELS[name].peer("phyai", options)
    assert isinstance(side, EngineSide)
    side.load(Setup(folder, "fp32", 1, CAMERAS, TOKENS, rows=rows, steps=2))
    found = side.inputs(folder / "inputs.safetensors", 2)
    assert found == {"prefix_positions": sizes.positions(CAMERAS, TOKENS)}
    return side


@pytest.mark.parametrize(
    "name",
    # One decodes videos, which takes a while even at this size.
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "cosmos3")) for name in MODELS],
)
def test_a_run_must_count_every_valid_position(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = loaded(name, tmp_path)
    engine, asked = side.engine, side.asked
    assert engine is not None
    assert asked is not None
    with engine:
        assert asked.valid == ROWS * SMALL[name].positions(CAMERAS, TOKENS)
        assert side.run()[0].shape[0] == ROWS
        side.asked = dataclasses.replace(asked, valid=asked.valid + 1)
        with pytest.raises(Refused, match=f"valid positions.*counted {asked.valid}\\."):
            side.run()
        side.asked = dataclasses.replace(asked, counter="nothing counts this")
        with pytest.raises(Refused, match=r"mode eager( \(.*\))?; it counted 0\."):
            side.run()
        whole = GraphService.report

        def replayed(graphs: GraphService) -> list[Any]:
            return [dataclasses.replace(row, mode="inductor") for row in whole(graphs)]

        monkeypatch.setattr(GraphService, "report", replayed)
        side.run()  # a replay runs no Python, so nothing is what it counts
        side.asked = asked
        with pytest.raises(Refused, match=rf"mode inductor( \(.*\))?; it counted {asked.valid}"):
            side.run()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "precision"), [("fp32", "bf16"), ("bf16", "float32")])
def test_precision_must_fit(name: str, dtype: Any, precision: str, tmp_path: Path) -> None:
    side = MODELS[name].peer("phyai", f"precision={precision}")
    with pytest.raises(Refused, match=f"must fit --dtype {dtype}; got '{precision}'"):
        side.load(Setup(tmp_path, dtype, 1, CAMERAS, TOKENS))


def test_runs_and_inputs_come_in_order(tmp_path: Path) -> None:
    side = MODELS["minicpm_robot"].peer("phyai")
    with pytest.raises(Refused, match="inputs must follow load"):
        side.inputs(tmp_path, 1)
    with pytest.raises(Refused, match="run must follow inputs"):
        side.run()


def test_nothing_is_remembered_unless_asked_for(tmp_path: Path) -> None:
    for options, tokens in (("", [17, 17]), ("remember=true", [0, 0])):
        side = loaded("cosmos3_policy", tmp_path, options, rows=1)
        assert side.engine is not None
        with side.engine:
            counters = side.engine.core.services.profile.counters
            found = []
            for _ in range(2):
                before = Counter(counters)
                side.run()
                assert counters["vae_encoded_frames"] == before["vae_encoded_frames"] + 1
                found.append(counters["und_tokens"] - before["und_tokens"])
            assert found == tokens


def test_given_features_are_counted_where_the_head_reads_them(tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "golden/minicpm"
    model = MODELS["minicpm_robot"]
    (case,) = model.golden_cases(golden / "case_action_b3.safetensors")
    save_file(dict(case.inputs), tmp_path / "inputs.safetensors")
    side = model.peer("phyai")
    assert isinstance(side, EngineSide)
    setup = Setup(golden, case.dtype, 1, case.cameras, case.tokens, rows=len(case.wanted))
    side.load(setup)
    side.inputs(tmp_path / "inputs.safetensors", case.steps)
    assert side.engine is not None
    assert side.asked is not None
    with side.engine:
        assert side.asked.valid == len(case.wanted) * case.tokens
        actions, _ = side.run()
    assert float((actions - case.wanted).abs().max()) <= case.limit
