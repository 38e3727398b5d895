"""Leaving out what does not count changes nothing, and nothing that does not count is computed.

Equality is against ``track_reference``: dense, row by row, in float64.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phyai import Engine
from phyai.models.minicpm_robot_track.network.backbone import DecoderLayer, LastLayer
from phyai.models.minicpm_robot_track.network.policy import TrackPolicy
from tests.minicpm.track_engines import (
    cpu_config,
    engine_of,
    expected,
    random_windows,
    reference_of,
    request_of,
    write_sized,
    write_tiny,
)

ATOL = 2e-5

SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "wide head": (
        {"history_frames": 3, "coarse_tokens_per_frame": 9, "fine_tokens_current_frame": 25,
         "vision_feature_dim": 33, "num_waypoints": 5, "xy_scale": 0.5,
         "trajectory_hidden_dims": [40, 20]},
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3,
         "intermediate_size": 72, "num_hidden_layers": 2, "vocab_size": 900,
         "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.2, 1.9, 3.0],
                          "long_factor": [1.5, 2.0, 2.5, 5.0],
                          "original_max_position_embeddings": 60},
         "max_position_embeddings": 240},
    ),
    "one layer, no history": (
        {"history_frames": 0, "fine_tokens_current_frame": 4, "use_tanh_actions": False},
        {"num_hidden_layers": 1},
    ),
    "one head": (
        {"history_frames": 12, "coarse_tokens_per_frame": 1, "fine_tokens_current_frame": 1},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 5,
         "scale_depth": 3.0,
         "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 32,
                          "long_factor": [1.0] * 32,
                          "original_max_position_embeddings": 512}},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with engine_of(tiny) as made:
        yield made


@pytest.fixture(scope="module")
def static_engine(tiny: Path) -> Iterator[Engine]:
    with engine_of(tiny, cpu_config(static_shapes=True)) as made:
        yield made


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


# ---------------------------------------------------------------- equality


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("static", [False, True])
def test_other_sizes_equal_the_full_computation(sizes: str, static: bool, tmp_path: Path) -> None:
    folder = write_sized(tmp_path, *SIZES[sizes])
    rows = random_windows(config_of(folder), [2, 17, 5])  # with 60 tokens: short, long, long
    with engine_of(folder, cpu_config(static_shapes=static)) as made:
        got = made.step(request_of(rows))
    want = expected(reference_of(folder), rows)
    assert want.std() > 0.05
    torch.testing.assert_close(got, want, atol=ATOL, rtol=0)


@pytest.mark.parametrize("text", [[1], [6, 6], [3, 30, 11], [32, 1]])
def test_any_instructions_equal_the_full_computation(
    text: list[int], tiny: Path, engine: Engine, static_engine: Engine
) -> None:
    rows = random_windows(config_of(tiny), text, seed=len(text))
    want = expected(reference_of(tiny), rows)
    for one in (engine, static_engine):
        torch.testing.assert_close(one.step(request_of(rows)), want, atol=ATOL, rtol=0)


def test_time_indices_are_the_callers(tiny: Path, engine: Engine) -> None:
    row = replace(
        random_windows(config_of(tiny), [4])[0], times=torch.tensor([9, 2, 3, 5, 40, 41, 6, 63])
    )
    torch.testing.assert_close(
        engine.step(request_of([row])), expected(reference_of(tiny), [row]), atol=ATOL, rtol=0
    )


def test_padding_is_never_read(tiny: Path, engine: Engine) -> None:
    rows = random_windows(config_of(tiny), [3, 9])
    request = request_of(rows)
    ids = request.input_ids.clone()
    ids[request.attention_mask == 0] = 77
    assert torch.equal(engine.step(request), engine.step(replace(request, input_ids=ids)))


def test_a_row_does_not_hang_on_its_neighbours_in_one_bucket(
    tiny: Path, static_engine: Engine
) -> None:
    mine, other, third = random_windows(config_of(tiny), [5, 9, 14])
    first = static_engine.step(request_of([mine, other]))
    second = static_engine.step(request_of([mine, third]))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_default_times_and_mask_are_the_plain_ones(tiny: Path, engine: Engine) -> None:
    rows = random_windows(config_of(tiny), [6])
    plain = dict.fromkeys(("attention_mask", "coarse_time_indices", "fine_time_indices"))
    assert torch.equal(engine.step(request_of(rows)), engine.step(request_of(rows, **plain)))


# ---------------------------------------------------------------- work


def test_the_last_layer_works_for_the_control_token_alone(tiny: Path, engine: Engine) -> None:
    seen: dict[str, list[int]] = {}
    policy = engine.adapter.policy  # type: ignore[attr-defined]
    assert isinstance(policy, TrackPolicy)
    hooks = []
    for i, layer in enumerate([*policy.backbone.layers, policy.backbone.last]):
        assert isinstance(layer, DecoderLayer | LastLayer)
        for leg in ("qkv", "q", "kv", "out", "gate_up", "down"):
            if hasattr(layer, leg):
                hooks.append(_listen(getattr(layer, leg), seen, f"{i}.{leg}"))
    rows = random_windows(config_of(tiny), [3, 9])
    before = dict(engine.core.services.profile.counters)
    engine.step(request_of(rows))
    for hook in hooks:
        hook.remove()
    counters = engine.core.services.profile.counters
    packed = 3 + 9 + 2 * policy.config.window_tokens
    assert counters["backbone_tokens"] - before.get("backbone_tokens", 0) == packed
    assert seen["0.qkv"] == seen["1.down"] == [packed]
    assert seen["2.kv"] == [packed]
    for leg in ("q", "out", "gate_up", "down"):
        assert seen[f"2.{leg}"] == [2]


def _listen(module: Any, seen: dict[str, list[int]], name: str) -> Any:
    def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        seen.setdefault(name, []).append(args[0].shape[:-1].numel())

    return module.register_forward_pre_hook(hook)
