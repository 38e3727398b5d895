"""Actions leave within the limits, the others bit for bit; without clear limits nothing starts."""

import json
from pathlib import Path

import numpy as np
import pytest
from phyai import Engine, EngineArgs
from phyai.errors import ConfigError, PluginError
from phyai.models.pi.presets.builders import sample_observation, tiny_pi05
from phyai.models.pi05 import PI05Args

from action_clamp.plugin import VARIABLE, ClampedOutput, read_limits


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return tiny_pi05(Path(tmp_path_factory.mktemp("cache")), None)


def run(checkpoint, tmp_path, monkeypatch, limits):  # type: ignore[no-untyped-def]
    file = tmp_path / "limits.json"
    file.write_text(json.dumps(limits))
    monkeypatch.setenv(VARIABLE, str(file))
    with Engine(EngineArgs("pi05", PI05Args(**checkpoint))) as engine:
        return engine.step(sample_observation(checkpoint))


def test_named_actions_are_clamped_and_others_keep_their_bits(
    checkpoint: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = run(checkpoint, tmp_path, monkeypatch, {"pi05": {}, "pi0": {"x": [0, 0]}})
    assert "clamped" not in free.info
    low, high = np.quantile(free.actions[:, 0], [0.25, 0.75])
    name = free.names[0]
    got = run(checkpoint, tmp_path, monkeypatch, {"pi05": {name: [float(low), float(high)]}})
    inside = (free.actions[:, 0] >= np.float32(low)) & (free.actions[:, 0] <= np.float32(high))
    assert 0 < inside.sum() < len(inside)
    assert got.actions[:, 0].min() == np.float32(low)
    assert got.actions[:, 0].max() == np.float32(high)
    np.testing.assert_array_equal(got.actions[inside, 0], free.actions[inside, 0])
    np.testing.assert_array_equal(got.actions[:, 1:], free.actions[:, 1:])
    np.testing.assert_array_equal(got.model_actions, free.model_actions)
    assert got.info["clamped"] == int((~inside).sum())


def test_a_limit_of_an_unknown_action_is_refused(
    checkpoint: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="elbow"):
        run(checkpoint, tmp_path, monkeypatch, {"pi05": {"elbow": [0, 1]}})


def test_a_file_that_does_not_name_the_plugin_is_refused(
    checkpoint: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PluginError, match="limits of plugin 'pi05'; it has those of pi5"):
        run(checkpoint, tmp_path, monkeypatch, {"pi5": {"x": [0, 0]}})


def test_without_a_file_no_engine_starts(
    checkpoint: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(PluginError, match=VARIABLE):
        Engine(EngineArgs("pi05", PI05Args(**checkpoint)))


@pytest.mark.parametrize("pair", [[1, 0], [0, None], [0], "ab", [0, float("inf")]])
def test_unclear_limits_are_refused(tmp_path: Path, pair: object) -> None:
    file = tmp_path / "limits.json"
    file.write_text(json.dumps({"pi05": {"x": pair}}))
    with pytest.raises(ConfigError):
        read_limits(str(file))


def test_model_requests_are_left_in_model_space() -> None:
    class Inner:
        def tensors(self, x, cache, prepared):  # type: ignore[no-untyped-def]
            return x

    output = ClampedOutput(Inner(), {"x": (0.0, 0.0)})  # type: ignore[arg-type]
    assert output.tensors("x", None, None) == "x"  # type: ignore[arg-type]
