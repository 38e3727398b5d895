"""What `phyai run` is made of: precisions, options, observations, medians."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from phyai.cli import observation, plugin_list, run_report, run_setup
from phyai.cli.options import RunOptions
from phyai.errors import ConfigError
from phyai.manifest import AdapterManifest, Preset
from phyai.types import Observation


def manifest(**capabilities: Any) -> AdapterManifest:
    return AdapterManifest("toy", "a toy", "toy.main:Toy", "toy.main:Args",
                           capabilities=capabilities)  # fmt: skip


def test_precision_names_and_engine_dtypes() -> None:
    named = manifest(precisions={"fp32": ["float32"], "mixed": ["bf16"], "other": []})
    assert run_setup.choose_precision(named, "float32") == ("fp32", "float32")
    assert run_setup.choose_precision(named, "mixed") == ("mixed", "bfloat16")
    assert run_setup.choose_precision(named, "other") == ("other", "bfloat16")
    assert run_setup.choose_precision(named, None) == (None, None)
    assert run_setup.choose_precision(manifest(), "fp16") == (None, "float16")
    with pytest.raises(ConfigError, match="must be one of bf16, float32, fp32, mixed, other"):
        run_setup.choose_precision(named, "int8")


@pytest.mark.parametrize(
    ("known", "seed", "steps", "expected"),
    [
        (["seed", "num_steps"], 3, 2, {"seed": 3, "num_steps": 2}),
        (["seed"], None, None, {"seed": 0}),
        ([], None, None, {}),
    ],
)
def test_options_follow_the_capabilities(
    known: list[str], seed: int | None, steps: int | None, expected: Mapping[str, int]
) -> None:
    from phyai.cli.run import _request_options

    setup: Any = SimpleNamespace(
        manifest=manifest(options=known), args=SimpleNamespace(), record=SimpleNamespace(id="toy")
    )
    assert _request_options(setup, seed, steps)[1] == expected
    if not known:
        with pytest.raises(ConfigError, match="takes no --seed"):
            _request_options(setup, 1, None)
        with pytest.raises(ConfigError, match="takes no --steps"):
            _request_options(setup, None, 1)


def test_repetitions_are_the_frames_of_a_session() -> None:
    from phyai.cli.run import _frame

    request = Observation(prompt="go", options={"seed": 3})
    assert _frame(request, None, 2) is request
    frames = [_frame(request, "demo", seq) for seq in range(2)]
    assert [(f.session_id, f.seq, f.seed) for f in frames] == [("demo", 0, 3), ("demo", 1, 3)]
    assert request.options == {"seed": 3}


def test_needs_falls_back_to_capabilities() -> None:
    text = observation.needs({}, manifest(cameras=["front"], kind="vla"))
    assert text == "It takes --image front=FILE."
    some = observation.needs({"cameras": ["front"], "optional_cameras": True}, manifest())
    assert some == "It takes --image front=FILE (cameras may be left out, not all)."
    assert observation.needs({}, manifest()) == ""


def test_needs_speaks_of_what_lacks() -> None:
    expected = {"cameras": ["front", "top"], "state_dim": 2, "prompt": True}
    whole = Observation(images={"front": 0, "top": 0}, state=[0.0, 1.0], prompt="go")
    for changes, text in (
        ({}, ""),
        ({"images": {"front": 0}}, "It takes --image front=FILE --image top=FILE."),
        ({"images": {"composed": 0}}, ""),  # the plugin may know it
        ({"state": [0.0]}, "It takes --state with 2 numbers."),
        ({"state": [[0.0, 1.0]] * 3}, ""),
        ({"prompt": " "}, 'It takes --prompt "...".'),
    ):
        given = dataclasses.replace(whole, **changes)
        assert observation.needs(expected, manifest(), given) == text, changes


def test_images_turn_to_rgb_and_upright(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    Image.new("LA", (5, 3), (200, 10)).save(file)
    pixels = observation.read_image(file, "a")
    assert pixels.shape == (3, 5, 3)
    assert pixels.dtype == np.uint8


def test_median_leaves_out_the_first_repetition() -> None:
    timings = ({"total": 100.0}, {"total": 2.0}, {"total": 4.0})
    outcome = run_report.Outcome(None, None, timings, 0, 0.0, 0, "cpu", "fp32")  # type: ignore[arg-type]
    assert outcome.timing == {"total": 3.0}


def test_an_engine_gets_the_plugin_as_it_was_chosen() -> None:
    """``dist:id`` tells two packages of one id apart, in the engine too."""
    for chosen in ("pi05", "phyai-models-pi:pi05"):
        setup = run_setup.prepare(RunOptions(plugin=chosen))
        assert (setup.plugin, setup.record.id) == (chosen, "pi05")


@pytest.mark.parametrize(("cached", "text"), [(True, "checking preset p"), (False, "building it")])
def test_a_preset_is_built_in_words_only_when_it_is_built(
    cached: bool,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(_: Path, progress: Any) -> dict[str, Any]:
        if not cached:
            progress(0, 1, "building it")
        progress._show()  # as after a second
        return {"made": 1}

    monkeypatch.setattr(run_setup, "load_function", lambda *_: build)
    record: Any = SimpleNamespace(id="toy")
    assert run_setup.build_preset(record, Preset("p", "a preset", "toy:build")) == {"made": 1}
    assert capsys.readouterr().err == f"{text} ...\n"


def test_an_id_offered_twice_is_told_once() -> None:
    a, b = (
        {"id": "arm", "dist": dist, "status": "ok", "traceback": None, "conflicts_with": [other]}
        for dist, other in (("a", "b"), ("b", "a"))
    )
    [line] = plugin_list.problems([a, b])
    assert line == "arm is offered by a and b; choose a:arm or b:arm."
    assert plugin_list.problems([{**a, "status": "blocked"}, {**b, "conflicts_with": []}]) == []
