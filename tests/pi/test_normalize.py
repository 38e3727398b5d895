"""Normalisation: inverses, the quirks of each family, relative actions and statistics files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from phyai.errors import CheckpointError, CheckpointNotFound, ConfigError
from phyai.models.pi.processing.norm_stats import (
    ACTION,
    STATE,
    feature_dim,
    find_openpi_stats,
    load_stats,
    openpi_stats,
)
from phyai.models.pi.processing.normalize import (
    OpenpiStats,
    lerobot_normalize,
    lerobot_unnormalize,
    make_bool_mask,
    needed_stats,
    openpi_normalize,
    openpi_unnormalize,
    relative_mask,
    to_absolute,
    to_relative,
)

STATS: dict[str, Any] = {
    "mean": np.array([1.0, -2.0], np.float32),
    "std": np.array([2.0, 0.5], np.float32),
    "min": np.array([-1.0, -3.0], np.float32),
    "max": np.array([3.0, -1.0], np.float32),
    "q01": np.array([-0.5, -2.5], np.float32),
    "q99": np.array([2.5, -1.5], np.float32),
    "q10": np.array([0.0, -2.2], np.float32),
    "q90": np.array([2.0, -1.8], np.float32),
}
OPENPI = OpenpiStats(STATS["mean"], STATS["std"], STATS["q01"], STATS["q99"])
X = np.array([[0.3, -1.7], [4.0, 9.0]], np.float32)


@pytest.mark.parametrize("mode", ["MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10", "IDENTITY"])
def test_lerobot_modes_invert(mode: str) -> None:
    normalized = lerobot_normalize(X, STATS, mode)
    assert normalized.dtype == np.float32
    assert np.allclose(lerobot_unnormalize(normalized, STATS, mode), X, atol=1e-5)
    assert np.array_equal(lerobot_normalize(X, None, mode), X)


def test_nothing_is_clipped_and_equal_bounds_use_eps() -> None:
    assert lerobot_normalize(X, STATS, "QUANTILES")[1, 1] > 20
    flat = {"q01": np.zeros(2), "q99": np.zeros(2)}
    assert lerobot_normalize(np.array([1e-8, 0.0]), flat, "QUANTILES").tolist() == [1.0, -1.0]


def test_missing_statistics_are_named() -> None:
    with pytest.raises(CheckpointError, match="q99"):
        lerobot_normalize(X, {"q01": STATS["q01"]}, "QUANTILES")
    with pytest.raises(CheckpointError, match="ZSCORE"):
        needed_stats("ZSCORE")


@pytest.mark.parametrize("quantiles", [False, True])
def test_openpi_inverts_in_float64(quantiles: bool) -> None:
    normalized = openpi_normalize(X, OPENPI, use_quantiles=quantiles)
    assert normalized.dtype == np.float64
    back = openpi_unnormalize(normalized, OPENPI, use_quantiles=quantiles)
    assert np.allclose(back, X, atol=1e-12)


def test_openpi_slices_long_and_pads_short_statistics() -> None:
    one = X[:, :1]
    assert np.array_equal(
        openpi_normalize(one, OPENPI, use_quantiles=False),
        openpi_normalize(X, OPENPI, use_quantiles=False)[:, :1],
    )
    wide = np.concatenate([X, np.full((2, 2), 0.25, np.float32)], axis=-1)
    zscore = openpi_unnormalize(wide, OPENPI, use_quantiles=False)
    assert np.allclose(zscore[:, 2:], 0.25 * (1 + 1e-6), rtol=1e-12)
    assert np.array_equal(openpi_unnormalize(wide, OPENPI, use_quantiles=True)[:, 2:], wide[:, 2:])
    with pytest.raises(CheckpointError, match="cover the 4 values"):
        openpi_normalize(wide, OPENPI, use_quantiles=False)


def test_masks() -> None:
    assert make_bool_mask(2, -1, 1) == (True, True, False, True)
    names = ("left.pos", "Left_GRIPPER.pos", "right.pos")
    assert relative_mask(3, names, ("gripper",)) == (True, False, True)
    assert relative_mask(3, None, ("gripper",)) == (True, True, True)
    assert relative_mask(3, names, ()) == (True, True, True)
    with pytest.raises(ConfigError, match="3"):
        relative_mask(4, names, ("gripper",))


def test_relative_actions_keep_masked_dims_and_inputs() -> None:
    actions = np.arange(6, dtype=np.float32).reshape(2, 3)
    before = actions.copy()
    state = np.array([10.0, 20.0, 30.0, 40.0], np.float32)
    absolute = to_absolute(actions, state, (True, False))
    assert absolute.tolist() == [[10, 1, 2], [13, 4, 5]]
    assert np.array_equal(to_relative(absolute, state, (True, False)), actions)
    assert np.array_equal(actions, before)
    with pytest.raises(ConfigError, match="4"):
        to_absolute(actions, state, (True,) * 4)


def test_load_stats_of_every_kind(tmp_path: Path) -> None:
    table = {"mean": [1.0, 2.0], "std": [1.0, 1.0], "q01": None, "count": [5]}
    openpi = tmp_path / "norm_stats.json"
    openpi.write_text(json.dumps({"norm_stats": {"state": table, "actions": table}}))
    lerobot = tmp_path / "stats.json"
    lerobot.write_text(json.dumps({STATE: table, ACTION: table}))
    tensors = tmp_path / "step.safetensors"
    save_file(
        {
            "observation.state.mean": np.array([1.0, 2.0], np.float32),
            "observation.state.std": np.array([1.0, 1.0], np.float32),
            "observation.state.count": np.array([5.0], np.float32),
        },
        tensors,
    )
    for path in (openpi, lerobot, tensors):
        stats = load_stats(path)
        assert stats[STATE]["mean"].tolist() == [1.0, 2.0]
        assert set(stats[STATE]) == {"mean", "std"}
        assert feature_dim(stats, STATE) == 2
    assert feature_dim(None, STATE) is None
    assert openpi_stats(load_stats(tensors), ACTION) is None


def test_bad_statistics_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        load_stats(tmp_path / "none.json")
    path = tmp_path / "s.json"
    for content, word in (
        ({"norm_stats": []}, "by feature"),
        ({STATE: {"mean": ["x"]}}, "mean"),
        ({STATE: {"mean": [float("nan")]}}, "finite"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=word):
            load_stats(path)
    broken = tmp_path / "s.safetensors"
    broken.write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="safetensors"):
        load_stats(broken)
    path.write_text(json.dumps({"norm_stats": {"state": {"mean": [1.0]}}}))
    with pytest.raises(CheckpointError, match="std"):
        openpi_stats(load_stats(path), STATE)
    path.write_text(json.dumps({"norm_stats": {"state": {"mean": [1.0], "std": [1.0]}}}))
    stats = openpi_stats(load_stats(path), STATE)
    assert stats is not None
    with pytest.raises(CheckpointError, match="q01"):
        stats.quantiles()


@pytest.mark.parametrize("shape", [(), (0,), (1, 2), (3, 1, 1)])
def test_statistics_of_another_rank(tmp_path: Path, shape: tuple[int, ...]) -> None:
    file = tmp_path / "stats.safetensors"
    tensors = {"observation.images.top.mean": torch.zeros(3, 1, 1)}
    save_torch_file(tensors, file)
    assert load_stats(file)
    save_torch_file({**tensors, f"{STATE}.mean": torch.zeros(shape)}, file)
    with pytest.raises(CheckpointError, match="one per value; got shape"):
        load_stats(file)


def test_statistics_in_bfloat16(tmp_path: Path) -> None:
    file = tmp_path / "stats.safetensors"
    save_torch_file({f"{STATE}.mean": torch.tensor([0.5, 2.0], dtype=torch.bfloat16)}, file)
    assert load_stats(file)[STATE]["mean"].tolist() == [0.5, 2.0]


def test_openpi_assets(tmp_path: Path) -> None:
    assert find_openpi_stats(tmp_path, None) is None
    for asset in ("physical-intelligence/libero", "droid"):
        file = tmp_path / "assets" / asset / "norm_stats.json"
        file.parent.mkdir(parents=True)
        file.write_text("{}")
        if asset != "droid":
            assert find_openpi_stats(tmp_path, None) == file
    with pytest.raises(ConfigError, match="droid, physical-intelligence/libero"):
        find_openpi_stats(tmp_path, None)
    found = find_openpi_stats(tmp_path, "physical-intelligence/libero")
    assert found == tmp_path / "assets" / "physical-intelligence" / "libero" / "norm_stats.json"
    with pytest.raises(ConfigError, match="'trossen'"):
        find_openpi_stats(tmp_path, "trossen")
