"""Views, patches and token ids against transformers' own processor of this model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.presets.builders import sample_observation
from phyai.models.minicpm_robot.presets.tiny_checkpoint import write_released_inputs
from phyai.models.minicpm_robot.processing.images import patch_rows, strip
from phyai.models.minicpm_robot.processing.processor import Processor
from phyai.models.minicpm_robot.processing.settings import ImageSettings
from phyai.models.minicpm_robot.processing.slicing import make_views, plan_views, slice_grid
from phyai.types import Observation

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def images() -> Any:
    """Return the official image processor's class, the one without torchvision."""
    try:
        from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
            MiniCPMV4_6ImageProcessorPil,
        )
    except ImportError as error:
        pytest.skip(f"the official image processor cannot be imported: {error}")
    return MiniCPMV4_6ImageProcessorPil


@pytest.mark.parametrize(
    "size",
    [(448, 448), (224, 224), (112, 400), (480, 640), (641, 333), (720, 1280), (97, 1000), (17, 13)],
)
@pytest.mark.parametrize("settings", [{}, {"max_slice_nums": 4, "downsample_mode": "4x"}])
def test_views_and_patches(images: Any, size: tuple[int, int], settings: dict[str, Any]) -> None:
    image = np.random.default_rng(sum(size)).integers(0, 256, (*size, 3), np.uint8)
    want = images(**settings)(images=[image], return_tensors="pt")
    mine = ImageSettings(**settings)
    views, slices = make_views(image, mine)
    rows, grids = patch_rows(views, mine)
    assert [list(grid) for grid in grids] == want["target_sizes"].tolist()
    assert [list(slices)] == [list(grid) for grid in want["grids"]]
    torch.testing.assert_close(strip(rows), want["pixel_values"].float(), atol=1e-6, rtol=0)


def test_slice_grids(images: Any) -> None:
    official, mine = images(), ImageSettings()
    for height in range(30, 2400, 107):
        for width in range(30, 2400, 131):
            want = official.get_sliced_grid((height, width), 9, 448)
            got = slice_grid(height, width, mine)
            assert got == (None if want is None else tuple(want)), (height, width)
            overview = official.find_best_resize((height, width), 448, 14, "16x", want is None)
            assert plan_views(height, width, mine).overview == overview


# ---------------------------------------------------------------- the whole processor


def official_processor(folder: Path, images: Any) -> Any:
    from transformers import PreTrainedTokenizerFast
    from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

    class WithoutVideos(MiniCPMV4_6Processor):  # type: ignore[misc]
        """Takes a stand-in for the video processor, which needs torchvision."""

        def check_argument_for_proper_class(self, name: str, arg: Any) -> type:
            return type(arg)

    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    marks = ("image", "video", "slice")
    named = {name: token for name, token in config.items() if name.startswith(marks)}
    settings = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
    del settings["image_processor_type"]
    return WithoutVideos(
        image_processor=images(**settings),
        video_processor=SimpleNamespace(slice_mode=True, downsample_mode="16x"),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            extra_special_tokens=named,
            pad_token=config["pad_token"],
            eos_token=config["eos_token"],
        ),
        chat_template=(folder / "chat_template.jinja").read_text("utf-8"),
    )


def official_inputs(processor: Any, observation: Observation, text: str) -> Any:
    """Return what the official wrapper feeds the model."""
    from PIL import Image

    views = [Image.fromarray(image).resize((448, 448)) for image in observation.images.values()]
    content = [{"type": "image", "image": np.asarray(view).copy()} for view in views]
    content.append({"type": "text", "text": text})
    return processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": False},
    )


@pytest.mark.parametrize("changes", [{}, {"scale_resolution": 224, "max_slice_nums": 4}])
@pytest.mark.parametrize("contract", ["libero", "robotwin"])
def test_a_whole_request(
    images: Any, tmp_path: Path, contract: str, changes: dict[str, Any]
) -> None:
    write_released_inputs(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **changes}), "utf-8")
    observation = sample_observation({"contract": contract})
    row = Processor.from_checkpoint(tmp_path, MiniCPMRobotConfig(), contract).row(observation)
    want = official_inputs(official_processor(tmp_path, images), observation, row.instruction)
    assert row.input_ids.tolist() == want["input_ids"][0].tolist()
    assert [list(grid) for grid in row.grids] == want["target_sizes"].tolist()
    torch.testing.assert_close(strip(row.pixel_values), want["pixel_values"], atol=1e-6, rtol=0)
