"""PI05Processor agrees with Processor and survives a save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phyai.errors import CheckpointNotFound, ConfigError, RequestError
from phyai.models.pi.config import PiConfig
from phyai.models.pi.processing.compat import PI05Processor
from phyai.models.pi.processing.processor import Processor
from phyai.types import Observation

FOLDER = Path(__file__).parents[1] / "golden" / "pi05"
FRAME = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
STATE = np.array([0.1, -0.2, 0.3, 0.4, 0.5], np.float32)


def _loaded(folder: Path = FOLDER / "processors_abs", **options: Any) -> PI05Processor:
    options.setdefault("tokenizer", FOLDER / "tokenizer")
    return PI05Processor.from_pretrained(
        folder, image_size=56, normalize_pixels=True, params_dtype=torch.float32, **options
    )


def _inputs(**changes: Any) -> dict[str, Any]:
    return {"images": [FRAME] * 3, "task": "pick_up the cup", "state": STATE, **changes}


def test_agrees_with_the_processor_and_keeps_nothing() -> None:
    compat = _loaded()
    whole = Processor.from_checkpoint(
        FOLDER, PiConfig.from_folder(FOLDER, "pi05"), processor_dir=FOLDER / "processors_abs"
    )
    names = whole.config.camera_names
    row = whole.row(Observation(dict.fromkeys(names, FRAME), STATE, "pick_up the cup"))
    before = dict(vars(compat))
    out = compat.preprocess(_inputs())
    assert vars(compat) == before
    assert out.pixel_values.shape == (1, 3, 3, 56, 56)
    assert torch.equal(out.pixel_values[0], row.images)
    assert torch.equal(out.input_ids[0], row.tokens)
    assert out.lang_lens.tolist() == [row.length]
    actions = np.random.default_rng(1).normal(size=(10, 8)).astype(np.float32)
    assert np.array_equal(compat.postprocess(actions).numpy(), whole.actions(actions, row))


def test_batch() -> None:
    batch = torch.from_numpy(np.stack([FRAME.transpose(2, 0, 1)] * 2))
    out = _loaded().preprocess(
        _inputs(images=[batch] * 3, task=["a", "b"], state=np.stack([STATE, STATE]))
    )
    assert out.pixel_values.shape == (2, 3, 3, 56, 56)
    assert out.input_ids.shape[0] == 2
    whole = torch.stack([batch] * 3, dim=1)
    same = _loaded().preprocess(
        _inputs(images=whole, task=["a", "b"], state=np.stack([STATE, STATE]))
    )
    assert torch.equal(same.pixel_values, out.pixel_values)


def test_pixels_pass_when_not_normalised() -> None:
    signed = np.linspace(-1, 1, 3 * 56 * 56, dtype=np.float32).reshape(3, 56, 56)
    processor = PI05Processor(
        image_size=56,
        num_images=1,
        tokenizer=FOLDER / "tokenizer",
        params_dtype=torch.float32,
    )
    out = processor.preprocess(_inputs(images=[signed]))
    assert np.array_equal(out.pixel_values[0, 0].numpy(), signed)
    assert torch.equal(processor.postprocess(torch.ones(2, 3, 4)), torch.ones(2, 3, 4))


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    _loaded().save_pretrained(tmp_path)
    again = _loaded(tmp_path)
    assert again.tokenizer_max_length == 64
    first, second = _loaded().preprocess(_inputs()), again.preprocess(_inputs())
    assert torch.equal(first.input_ids, second.input_ids)
    actions = np.random.default_rng(2).normal(size=(4, 7)).astype(np.float32)
    assert torch.equal(_loaded().postprocess(actions), again.postprocess(actions))
    # The full processor reads what was written.
    config = PiConfig.from_folder(FOLDER, "pi05")
    whole = Processor.from_checkpoint(FOLDER, config, processor_dir=tmp_path)
    assert whole.warnings == ()


def test_dataset_stats_and_save(tmp_path: Path) -> None:
    stats = {
        "observation.state": {"q01": [-1.0] * 5, "q99": [1.0] * 5},
        "action": {"q01": torch.zeros(7), "q99": torch.ones(7)},
    }
    processor = PI05Processor(
        image_size=56, tokenizer=FOLDER / "tokenizer", dataset_stats=stats, action_dim=7
    )
    assert torch.allclose(processor.postprocess(torch.zeros(3, 8)), torch.full((3, 7), 0.5))
    processor.save_pretrained(tmp_path)
    assert torch.allclose(_loaded(tmp_path).postprocess(torch.ones(3, 7)), torch.ones(3, 7))
    with pytest.raises(ConfigError, match="q99"):
        PI05Processor(tokenizer=FOLDER / "tokenizer", dataset_stats={"action": {"q01": [0.0]}})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"images": [FRAME]}, "3 arrays"),
        ({"images": [FRAME, FRAME, FRAME[..., 0]]}, "image 2"),
        ({"images": [FRAME, FRAME, np.full((3, 4, 4), np.nan, np.float32)]}, "finite"),
        ({"task": ["a", "b"]}, "batch size"),
    ],
)
def test_bad_inputs(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(RequestError, match=word):
        _loaded().preprocess(_inputs(**changes))


def test_missing_files_and_fields(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="policy_preprocessor"):
        _loaded(tmp_path)
    with pytest.raises(RequestError, match="state"):
        _loaded().preprocess({"images": [FRAME] * 3, "task": "x"})
