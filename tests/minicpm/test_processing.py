"""From whole observations to model inputs and back; files, refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phyai.errors import CheckpointError, CheckpointNotFound, ConfigError, RequestError
from phyai.models.minicpm_robot.config import HeadSizes, MiniCPMRobotConfig, TextSizes
from phyai.models.minicpm_robot.presets.builders import sample_observation
from phyai.models.minicpm_robot.presets.tiny_checkpoint import write_released_inputs
from phyai.models.minicpm_robot.processing.contracts import find_contract
from phyai.models.minicpm_robot.processing.processor import MiniCPMRow, Processor
from phyai.types import Observation

CONFIG = MiniCPMRobotConfig()
"""Released sizes: only host work is done here, and no weights are made."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("released")
    write_released_inputs(made)
    return made


@pytest.fixture(scope="module")
def processor(folder: Path) -> Processor:
    return Processor.from_checkpoint(folder, CONFIG, "libero")


def observed(contract: str = "libero", **changes: Any) -> Observation:
    return replace(sample_observation({"contract": contract}), **changes)


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(("contract", "cameras"), [("libero", 2), ("calvin", 2), ("robotwin", 3)])
def test_rows_of_every_robot(processor: Processor, contract: str, cameras: int) -> None:
    made = processor.row(observed(contract, options={"contract": contract}))
    assert made.grids == ((32, 32),) * cameras
    assert made.pixel_values.shape == (cameras * 1024, 588)
    assert int((made.input_ids == CONFIG.image_token_id).sum()) == 64 * cameras
    assert made.embodiment_id == find_contract(contract).embodiment_id
    assert made.contract.name == made.info["contract"] == contract
    assert made.instruction.endswith("Task: put the red cup on the plate")
    assert made.state.shape == (80,)
    assert "state" not in made.info


def test_images_are_in_camera_order_whatever_the_mappings(processor: Processor) -> None:
    one = observed()
    other = replace(one, images=dict(reversed(list(one.images.items()))))
    made, again = processor.row(one), processor.row(other)
    assert torch.equal(made.pixel_values, again.pixel_values)
    swapped = dict(zip(one.images, reversed(list(one.images.values())), strict=True))
    halves = made.pixel_values.chunk(2)
    crossed = processor.row(replace(one, images=swapped)).pixel_values
    assert torch.equal(crossed, torch.cat([halves[1], halves[0]]))


def test_the_prompt_is_the_official_turn(processor: Processor) -> None:
    made = processor.row(observed(prompt="open {it}"))
    assert processor.tokenizer is not None
    pads = "<|image_pad|>" * 64
    images = "".join(f"<image_id>{k}</image_id><image>{pads}</image>" for k in range(2))
    assert processor.tokenizer.decode(made.input_ids.tolist()) == (
        f"<|im_start|>user\n{images}{find_contract('libero').instruction('open {it}')}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_whole_prompts_pass(processor: Processor) -> None:
    whole = "A robot in the unified 80D layout. Task: go"
    assert processor.row(observed(prompt=whole)).instruction == whole


def test_raw_rows(folder: Path) -> None:
    raw = Processor.from_checkpoint(folder, CONFIG)
    assert raw.contract().name == "raw"
    fine = observed("raw")
    made = raw.row(replace(fine, state=None, prompt="go {x}"))
    assert made.instruction == "go {x}"
    assert not made.state.any()
    assert made.info == {"contract": "raw", "embodiment_id": 0, "state": "zeros"}
    sent = np.arange(80, dtype=np.float32)
    assert np.array_equal(raw.row(replace(fine, state=sent)).state, sent)
    one = raw.row(replace(fine, images={"any name": fine.images["front"]}))
    assert one.grids == ((32, 32),)
    with pytest.raises(RequestError, match="80 values"):
        raw.row(replace(fine, state=np.zeros(10)))
    with pytest.raises(RequestError, match="one or more"):
        raw.row(replace(fine, images={}))


def test_embodiments_are_chosen_by_option_then_argument_then_contract(folder: Path) -> None:
    made = Processor.from_checkpoint(folder, CONFIG, "robotwin", embodiment_id=7)
    fine = observed("robotwin")
    assert made.row(fine).embodiment_id == 7
    assert made.row(replace(fine, options={"embodiment_id": 31})).embodiment_id == 31
    for bad in (32, -1, "4", 1.0, True):
        with pytest.raises(RequestError, match="embodiment_id"):
            made.row(replace(fine, options={"embodiment_id": bad}))
    with pytest.raises(ConfigError, match=r"\[0, 32\)"):
        Processor.from_checkpoint(folder, CONFIG, embodiment_id=32)
    few = replace(CONFIG, head=HeadSizes(max_num_embodiments=3))
    with pytest.raises(ConfigError, match=r"\[0, 3\)"):
        Processor.from_checkpoint(folder, few, "robotwin")
    shared = replace(few, head=HeadSizes(max_num_embodiments=1, shared_head=True))
    assert Processor.from_checkpoint(folder, shared, "robotwin").row(fine).embodiment_id == 4


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"images": {}}, "agentview, wrist"),
        ({"images": None}, "NoneType"),
        ({"state": None}, "state must be sent"),
        ({"state": np.full(80, np.nan)}, "finite"),
        ({"state": np.zeros(8)}, r"shape \[8\]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "go " * 2000}, "must fit into"),
        ({"prompt": "go <|image_pad|>"}, "control token"),
        ({"options": {"contract": "libro"}}, "Did you mean 'libero'"),
        ({"options": {"contract": 3}}, "contract must be"),
    ],
)
def test_refused_observations(processor: Processor, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        processor.row(observed(**changes))


def test_wrong_cameras_are_named(processor: Processor) -> None:
    fine = observed()
    agent = fine.images["agentview"]
    with pytest.raises(RequestError, match="Did you mean 'wrist'"):
        processor.row(replace(fine, images={"agentview": agent, "wrst": agent}))
    with pytest.raises(RequestError, match="got no wrist"):
        processor.row(replace(fine, images={"agentview": agent}))
    with pytest.raises(RequestError, match="'wrist' must be RGB"):
        processor.row(replace(fine, images={"agentview": agent, "wrist": agent[..., :1]}))


def test_decoding(processor: Processor) -> None:
    made = processor.row(observed())
    actions = np.zeros((30, 80), np.float32)
    actions[:, 10:16] = [1, 0, 0, 0, 1, 0]
    actions[:, 7], actions[:, 16] = 0.5, 1.0
    commands, names, units = processor.decode(torch.from_numpy(actions), made)
    assert commands.shape == (30, 7)
    assert commands[3].tolist() == [0.5, 0, 0, 0, 0, 0, 1.0]
    assert names == ("x", "y", "z", "rx", "ry", "rz", "gripper")
    assert units == ("m", "m", "m", "rad", "rad", "rad", "")
    raw: MiniCPMRow = replace(made, contract=find_contract("raw"))
    commands, names, _ = processor.decode(actions, raw)
    assert commands.shape == (30, 80)
    assert len(names) == 80


def test_a_contract_of_ones_own(folder: Path) -> None:
    mine = replace(find_contract("libero"), name="mine", cameras=("eye",), embodiment_id=9)
    made = Processor.from_checkpoint(folder, CONFIG, mine)
    fine = observed()
    made_row = made.row(replace(fine, images={"eye": fine.images["wrist"]}))
    assert (made_row.embodiment_id, made_row.contract.name) == (9, "mine")
    assert made.expects()["contract"] == "mine"
    assert made.expects()["contracts"]["mine"]["cameras"] == ("eye",)


def test_expectations(processor: Processor) -> None:
    told = processor.expects()
    assert told["cameras"] == ("agentview", "wrist")
    assert told["contracts"]["robotwin"]["control_hz"] == 15.0
    assert any("rotate180" in note for note in told["contracts"]["libero"]["notes"])
    json.dumps(told)


# ---------------------------------------------------------------- files


def test_bare_checkpoints_serve_model_requests_only(folder: Path, tmp_path: Path) -> None:
    bare = Processor.from_checkpoint(tmp_path, CONFIG, "libero")
    assert "tokenizer.json and no chat template" in bare.warnings[0]
    with pytest.raises(RequestError, match="processor_dir"):
        bare.row(observed())
    assert Processor.from_checkpoint(None, CONFIG).warnings
    shutil.copy(folder / "tokenizer.json", tmp_path)
    half = Processor.from_checkpoint(tmp_path, CONFIG, "libero")
    assert "no chat template" in half.warnings[0]
    assert "tokenizer.json" not in half.warnings[0]


def test_files_may_be_elsewhere(folder: Path, tmp_path: Path) -> None:
    fine = observed()
    want = Processor.from_checkpoint(folder, CONFIG, "libero").row(fine).input_ids
    other = Processor.from_checkpoint(tmp_path, CONFIG, "libero", processor_dir=folder)
    assert other.warnings == ()
    assert np.array_equal(other.row(fine).input_ids, want)
    for tokenizer in (folder, folder / "tokenizer.json"):
        made = Processor.from_checkpoint(None, CONFIG, "libero", tokenizer=tokenizer)
        assert np.array_equal(made.row(fine).input_ids, want)
    with pytest.raises(CheckpointNotFound, match="processor_dir"):
        Processor.from_checkpoint(None, CONFIG, processor_dir=tmp_path / "none")
    with pytest.raises(CheckpointNotFound, match="tokenizer"):
        Processor.from_checkpoint(None, CONFIG, tokenizer=tmp_path / "none.json")


def test_files_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="image_token_id"):
        Processor.from_checkpoint(folder, replace(CONFIG, image_token_id=7))
    with pytest.raises(CheckpointError, match="downsample_mode"):
        Processor.from_checkpoint(folder, replace(CONFIG, downsample_mode="4x"))
    small = replace(CONFIG, head=HeadSizes(action_dim=12, state_dim=12))
    assert Processor.from_checkpoint(folder, small).expects()["state_dim"] == 12
    for contract, width in (("raw", 80), ("libero", 10), ("robotwin", 20)):
        made = Processor.from_checkpoint(folder, CONFIG, contract)
        assert made.expects()["state_dim"] == width
    with pytest.raises(ConfigError, match="80 state and action channels"):
        Processor.from_checkpoint(folder, small, "libero")
    with pytest.raises(ConfigError, match="contract must be one of"):
        Processor.from_checkpoint(folder, CONFIG, "droid")
    little = replace(CONFIG, text=TextSizes(vocab_size=248060))
    made = Processor.from_checkpoint(folder, little, "libero")
    with pytest.raises(RequestError, match="vocabulary"):
        made.row(observed())


def test_slices_reach_prompt_and_patches_when_the_resolution_asks_for_them(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    data = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
    data.update(scale_resolution=224, max_slice_nums=4)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(data), "utf-8")
    made = Processor.from_checkpoint(tmp_path, CONFIG, "libero").row(observed())
    assert made.grids == ((16, 16),) * 10  # per camera an overview and 2 x 2 slices
    assert int((made.input_ids == CONFIG.image_token_id).sum()) == 10 * 16
    assert len(made.pixel_values) == 10 * 256
