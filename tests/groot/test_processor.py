"""What the processor makes of observations and of actions, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from phyai.errors import RequestError
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.presets.builders import tiny_gr00t
from phyai.models.gr00t.presets.robots import DROID, GR1, LIBERO
from phyai.models.gr00t.processing.processor import Processor
from tests.groot.tiny_observations import observation_of


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_gr00t(tmp_path_factory.mktemp("presets"))


@pytest.fixture(scope="module")
def config(args: dict[str, Any]) -> GrootConfig:
    return GrootConfig.from_folder(args["checkpoint_dir"], args["backbone_dir"])


@pytest.fixture(scope="module")
def processor(args: dict[str, Any], config: GrootConfig) -> Processor:
    return Processor.from_checkpoint(args["checkpoint_dir"], config)


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("tag", "images", "number", "width"), [(LIBERO, 2, 2, 8), (DROID, 4, 24, 17), (GR1, 1, 10, 58)]
)
def test_row(
    processor: Processor, args: dict[str, Any], tag: str, images: int, number: int, width: int
) -> None:
    row = processor.row(observation_of(args, tag))
    assert (row.embodiment, row.embodiment_id) == (tag, number)
    assert row.instruction == "pick up the red cube"
    # 240 x 320 -> 64 x 85 -> crop -> 64 x 85; the backbone rounds to whole blocks: 64 x 96
    assert [image.shape for image in row.images] == [(64, 85, 3)] * images
    assert row.grids == ((1, 4, 6),) * images
    assert row.pixel_values.shape == (24 * images, 1536)
    assert int((row.input_ids == processor.config.image_token_id).sum()) == 6 * images
    assert row.state.shape == (1, 64)
    assert row.state.dtype == np.float32
    assert np.any(row.state[:, :width] != 0)
    assert not row.state[:, width:].any()
    assert np.abs(row.state).max() <= 1.0


def test_frames_are_time_major(processor: Processor, args: dict[str, Any]) -> None:
    shades = {"exterior_image_1_left": (10, 20), "wrist_image_left": (30, 40)}
    images = {
        camera: np.stack([np.full((64, 64, 3), shade, np.uint8) for shade in pair])
        for camera, pair in reversed(shades.items())
    }
    row = processor.row(observation_of(args, DROID, images=images))
    assert [int(image[0, 0, 0]) for image in row.images] == [10, 30, 20, 40]


def test_a_flat_state_is_its_keys_in_order(processor: Processor, args: dict[str, Any]) -> None:
    flat = observation_of(args)
    widths = processor.robot(LIBERO).state_widths
    ends = np.cumsum(list(widths.values()))
    parts = dict(zip(widths, np.split(flat.state, ends[:-1]), strict=True))
    want = processor.row(flat)
    for state in (parts, {k: v.tolist() for k, v in parts.items()}, flat.state[None],
                  torch.from_numpy(flat.state)):  # fmt: skip
        got = processor.row(replace(flat, state=state))
        assert np.array_equal(got.state, want.state)
    assert list(want.raw_state) == list(widths)


@pytest.mark.parametrize(
    "convert",
    [
        lambda image: image.astype(np.float32) / 255,
        lambda image: np.moveaxis(image, -1, 0).astype(np.float32) / 255,
        lambda image: torch.from_numpy(image.copy()),
        lambda image: image[None],
        lambda image: np.ascontiguousarray(image[:, ::-1])[:, ::-1],
        lambda image: image.tolist() and np.asfortranarray(image),
    ],
)
def test_images_of_every_accepted_form_are_equal(
    processor: Processor, args: dict[str, Any], convert: Any
) -> None:
    observation = observation_of(args)
    images = {name: convert(image) for name, image in observation.images.items()}
    want, got = processor.row(observation), processor.row(replace(observation, images=images))
    assert torch.equal(got.pixel_values, want.pixel_values)


def test_rows_share_no_memory_with_theobservation_of(
    processor: Processor, args: dict[str, Any]
) -> None:
    observation = observation_of(args, images={
        name: np.full((64, 64, 3), 50, np.uint8) for name in processor.camera_names(LIBERO)
    })  # fmt: skip
    row = processor.row(observation)
    state, pixels = row.raw_state["x"].copy(), row.images[0].copy()
    observation.state[:] = 9.0
    for image in observation.images.values():
        image[:] = 0
    assert np.array_equal(row.raw_state["x"], state)
    assert np.array_equal(row.images[0], pixels)


def test_cameras_may_differ_in_size(processor: Processor, args: dict[str, Any]) -> None:
    sizes = {"image": (48, 64), "wrist_image": (90, 50)}
    images = {name: np.zeros((*size, 3), np.uint8) for name, size in sizes.items()}
    row = processor.row(observation_of(args, images=images))
    assert row.grids[0] != row.grids[1]
    assert len(row.pixel_values) == sum(h * w for _, h, w in row.grids)


# ---------------------------------------------------------------- actions


def _model_actions(config: GrootConfig) -> Any:
    shape = (config.action_horizon, config.max_action_dim)
    return np.random.default_rng(5).uniform(-0.95, 0.95, shape).astype(np.float32)


@pytest.mark.parametrize(
    ("tag", "steps", "width"), [(LIBERO, 16, 7), (DROID, 16, 17), (GR1, 8, 29)]
)
def test_decode(
    processor: Processor, args: dict[str, Any], tag: str, steps: int, width: int
) -> None:
    row = processor.row(observation_of(args, tag))
    actions, names = processor.decode(torch.from_numpy(_model_actions(processor.config)), row)
    assert actions.shape == (steps, width)
    assert actions.dtype == np.float32
    assert len(names) == len(set(names)) == width
    columns = processor.robot(tag).columns()
    assert sum(place.stop - place.start for place in columns.values()) == width


@pytest.mark.parametrize("tag", [LIBERO, GR1])
def test_model_space_is_the_inverse(processor: Processor, args: dict[str, Any], tag: str) -> None:
    row = processor.row(observation_of(args, tag))
    model = _model_actions(processor.config)
    commands, names = processor.decode(model, row)
    back = processor.model_space(commands[3:], row)
    again = np.zeros_like(model)[: len(commands) - 3]
    again[:, : len(names)] = back[:, : len(names)]
    assert back.shape == (len(commands) - 3, processor.config.max_action_dim)
    if tag == LIBERO:  # absolute: any part of a chunk means the same
        assert np.allclose(back[:, : len(names)], model[3 : len(commands), : len(names)], atol=1e-5)
    # relative: the first step's reach is the smallest, so a later command saturates
    whole = processor.model_space(commands, row)
    assert np.allclose(whole[:, : len(names)], model[: len(commands), : len(names)], atol=1e-4)
    assert not whole[:, len(names) :].any()


def test_relative_poses_come_back_as_the_same_commands(
    processor: Processor, args: dict[str, Any]
) -> None:
    """Numbers of a rotation are not unique, the commands are."""
    row = processor.row(observation_of(args, DROID))
    model = np.zeros((16, 32), np.float32)
    model[:, :3] = 0.5
    commands, _ = processor.decode(model, row)
    again, _ = processor.decode(processor.model_space(commands, row), row)
    assert np.allclose(again, commands, atol=1e-5)
    assert np.allclose(commands[0, :3] - row.raw_state["eef_9d"][0, :3], 0.01, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 6), (17, 7), (7,)])
def test_commands_of_another_shape_are_refused(
    processor: Processor, args: dict[str, Any], shape: Any
) -> None:
    row = processor.row(observation_of(args))
    with pytest.raises(RequestError, match="at most 16 steps of 7 values"):
        processor.model_space(np.zeros(shape, np.float32), row)


# ---------------------------------------------------------------- refused observations

_IMAGE = np.zeros((64, 64, 3), np.uint8)


def _images(**changes: Any) -> dict[str, Any]:
    images = {"image": _IMAGE, "wrist_image": _IMAGE, **changes}
    return {name: image for name, image in images.items() if image is not None}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"options": {"embodiment": "unitree_g1"}}, f"{LIBERO}, {DROID}, {GR1}"),
        ({"images": _images(wrist_image=None)}, "got no wrist_image"),
        ({"images": _images(wrist_imag=_IMAGE)}, "Did you mean 'wrist_image'"),
        ({"images": [_IMAGE]}, "mapping of camera name"),
        ({"images": _images(image=np.zeros((1, 64, 3), np.uint8))}, r"sides in \[2, 8192\]"),
        ({"images": _images(image=np.zeros((0, 64, 3), np.uint8))}, "got 0 x 64"),
        ({"images": _images(image=np.zeros((2, 500, 3), np.uint8))}, "at most 200 times"),
        ({"images": _images(image=np.zeros((64, 64, 4), np.uint8))}, "without alpha"),
        ({"images": _images(image=np.zeros((64, 64), np.uint8))}, r"must be \[height, width, 3\]"),
        ({"images": _images(image=np.zeros((3, 64, 64), np.uint8))}, "channels last"),
        ({"images": _images(image=np.zeros((2, 64, 64, 3), np.uint8))}, "got shape"),
        ({"images": _images(image=np.zeros((64, 64, 3), np.int64))}, "dtype int64"),
        ({"images": _images(image="front.png")}, "must be uint8"),
        ({"images": _images(image=[_IMAGE, _IMAGE[:3]])}, "one shape"),
        ({"images": _images(image=np.full((64, 64, 3), 255.0))}, r"lie in \[0, 1\]"),
        ({"images": _images(image=np.full((64, 64, 3), np.nan))}, "finite"),
        ({"state": None}, "state must be sent"),
        ({"state": np.zeros(7)}, r"8 values: x \(1\).*got shape \[7\]"),
        ({"state": np.zeros((2, 8))}, "1 steps"),
        ({"state": ["a"] * 8}, "must be numbers"),
        ({"state": np.full(8, np.inf)}, "finite"),
        ({"state": np.full(8, 1e300)}, "finite"),
        ({"state": {"x": 0.0}}, "got no y, z"),
        ({"state": {"grip": 0.0}}, "Did you mean 'gripper'"),
        ({"prompt": None}, "prompt must be a string"),
        ({"prompt": "a " * 600}, "must fit into 512 tokens"),
    ],
)
def test_refused_observations(
    processor: Processor, args: dict[str, Any], changes: dict[str, Any], match: str
) -> None:
    good = observation_of(args)
    known = {"options": {"embodiment": LIBERO}}
    with pytest.raises(RequestError, match=match):
        processor.row(replace(good, **{**known, **changes}))
    assert processor.row(good).embodiment == LIBERO  # the next one works


def test_every_frame_is_asked_for(processor: Processor, args: dict[str, Any]) -> None:
    good = observation_of(args, DROID)
    one = {name: frames[-1] for name, frames in good.images.items()}
    with pytest.raises(RequestError, match=r"\[2, height, width, 3\].*\[-15, 0\].*oldest first"):
        processor.row(replace(good, images=one))


def test_an_embodiment_has_to_be_chosen(processor: Processor, args: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f'{LIBERO}, {DROID}, {GR1}; got none. Send option "emb'):
        processor.row(replace(observation_of(args), options={}))
