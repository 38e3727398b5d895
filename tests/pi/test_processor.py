"""Processor: every family's rules, and typed errors."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from phyai.errors import CheckpointError, CheckpointNotFound, ConfigError, RequestError
from phyai.models.pi.config import PiConfig
from phyai.models.pi.processing.images import model_image
from phyai.models.pi.processing.normalize import OPENPI_EPS
from phyai.models.pi.processing.processor import Processor
from phyai.models.pi.processing.processor_setup import TokenizerSource
from phyai.models.pi.processing.tokenizer import PromptTokenizer
from phyai.types import Observation

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENIZER = GOLDEN / "pi05" / "tokenizer"
FRAME = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
STATE = np.array([0.1, -0.2, 0.3, 0.4, 0.5], np.float32)
PROMPT = "pick up the cup"


def _golden(model: Any, **options: Any) -> Processor:
    folder = GOLDEN / model
    options.setdefault("processor_dir", folder / "processors_abs")
    return Processor.from_checkpoint(folder, PiConfig.from_folder(folder, model), **options)


def _obs(**changes: Any) -> Observation:
    fields = {"images": {"base_0_rgb": FRAME}, "state": STATE, "prompt": PROMPT}
    return Observation(**{**fields, **changes})


@pytest.fixture(scope="module")
def pi0() -> Processor:
    return _golden("pi0")


@pytest.fixture(scope="module")
def pi05() -> Processor:
    return _golden("pi05")


def test_row_layout(pi0: Processor) -> None:
    images = {"observation.images.right_wrist_0_rgb": FRAME, "base_0_rgb": FRAME}
    row = pi0.row(_obs(images=images))
    assert row.images.shape == (3, 3, 56, 56)
    assert row.images.dtype == torch.float32
    assert row.image_mask.tolist() == [True, False, True]
    assert (row.images[1] == -1).all()
    assert torch.equal(row.images[0], model_image(FRAME, (56, 56), "lerobot"))
    assert row.tokens.shape == (64,)
    assert row.tokens.dtype == torch.int64
    assert not row.tokens[row.length :].any()
    assert row.state.shape == (6,)
    assert row.state[5] == 0
    assert row.prompt_text == PROMPT + "\n"
    assert np.array_equal(row.raw_state, STATE)  # type: ignore[arg-type]
    assert pi0.warnings == ()
    assert pi0.action_dim == 7
    assert pi0.action_names == tuple(f"action_{i}" for i in range(7))
    assert pi0.control_hz is None


def test_pi05_prompt_holds_the_normalised_state(pi05: Processor) -> None:
    row = pi05.row(_obs())
    assert row.prompt_text.startswith("Task: pick up the cup, State: ")
    assert row.normalized_state is not None
    assert row.normalized_state.shape == (5,)
    other = pi05.row(_obs(state=STATE + 1))
    assert other.prompt_text != row.prompt_text


def test_prompt_switches() -> None:
    padded = _golden("pi05", state_prompt_dim=8).row(_obs())
    assert padded.prompt_text.endswith(" 128 128 128;\nAction: ")
    plain = _golden("pi05", state_in_prompt=False)
    assert plain.row(_obs(state=None)).prompt_text == "pick up the cup\n"
    with pytest.raises(ConfigError, match="state_in_prompt"):
        _golden("pi0", state_in_prompt=True)


def test_state_with_a_time_axis_and_torch_inputs(pi0: Processor) -> None:
    want = pi0.row(_obs()).state
    assert torch.equal(pi0.row(_obs(state=STATE[None])).state, want)
    assert torch.equal(pi0.row(_obs(state=torch.from_numpy(STATE))).state, want)
    assert torch.equal(pi0.row(_obs(state=STATE.astype(np.float64).tolist())).state, want)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": {}}, ["at least one camera", "base_0_rgb"]),
        ({"images": {"wrist": FRAME}}, ["'wrist'", "left_wrist_0_rgb"]),
        ({"images": {"base_0_rgb": FRAME, "observation.images.base_0_rgb": FRAME}}, ["once"]),
        ({"images": [FRAME]}, ["mapping"]),
        ({"images": {"base_0_rgb": FRAME[..., 0]}}, ["base_0_rgb", "RGB"]),
        ({"state": None}, ["state", "pi0"]),
        ({"state": STATE[:4]}, ["5 values", "4"]),
        ({"state": np.zeros(40)}, ["40"]),
        ({"state": np.zeros((2, 5))}, ["[2, 5]"]),
        ({"state": []}, ["state"]),
        ({"state": 0.5}, ["state"]),
        ({"state": [*STATE[:4].tolist(), float("nan")]}, ["finite"]),
        ({"state": [*STATE[:4].tolist(), float("inf")]}, ["finite"]),
        ({"state": ["a"] * 5}, ["numbers"]),
        ({"state": [[1], [2, 3]]}, ["numbers"]),
        ({"prompt": None}, ["prompt"]),
        ({"prompt": " \n"}, ["empty"]),
        ({"prompt": 7}, ["int"]),
        ({"prompt": "cup " * 100}, ["64 tokens"]),
    ],
)
def test_bad_requests_are_typed_and_leave_the_processor_usable(
    pi0: Processor, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        pi0.row(_obs(**changes))
    for word in words:
        assert word in str(caught.value)
    assert pi0.row(_obs()).length > 0


def test_long_prompt_can_be_cut_and_default_prompt_fills_in() -> None:
    processor = _golden("pi0", overlong="truncate", default_prompt="fold the towel")
    assert processor.row(_obs(prompt="cup " * 100)).length == 64
    assert processor.row(_obs(prompt=None)).prompt_text == "fold the towel\n"
    assert processor.row(_obs(prompt="  ")).prompt_text == "fold the towel\n"
    assert processor.row(_obs(prompt=np.array("go"))).prompt_text == "go\n"


def test_threads_share_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []
    original = TokenizerSource.load

    def counting(self: TokenizerSource) -> PromptTokenizer:
        loads.append(1)
        return original(self)

    monkeypatch.setattr(TokenizerSource, "load", counting)
    processor = _golden("pi05")
    assert loads == []  # model requests need no tokenizer
    barrier, rows = threading.Barrier(4), {}

    def work(index: int) -> None:
        barrier.wait()
        rows[index] = processor.row(_obs(state=STATE + index))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == [1]
    for index, row in rows.items():
        alone = processor.row(_obs(state=STATE + index))
        assert alone.prompt_text == row.prompt_text
        assert torch.equal(alone.tokens, row.tokens)


# ---------------------------------------------------------------- processor files


def _files(folder: Path, *, source: str = "pi0") -> tuple[dict[str, Any], dict[str, Any]]:
    for file in (GOLDEN / source / "processors_abs").iterdir():
        shutil.copyfile(file, folder / file.name)
    pre = json.loads((folder / "policy_preprocessor.json").read_text())
    post = json.loads((folder / "policy_postprocessor.json").read_text())
    return pre, post


def _save(folder: Path, pre: dict[str, Any], post: dict[str, Any]) -> None:
    (folder / "policy_preprocessor.json").write_text(json.dumps(pre))
    (folder / "policy_postprocessor.json").write_text(json.dumps(post))


def _step(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(step for step in data["steps"] if step["registry_name"] == name)


def test_state_file_name_is_read_from_the_json(tmp_path: Path, pi0: Processor) -> None:
    pre, post = _files(tmp_path)
    step = _step(pre, "normalizer_processor")
    (tmp_path / step["state_file"]).rename(tmp_path / "moved.safetensors")
    step["state_file"] = "moved.safetensors"
    _save(tmp_path, pre, post)
    row = _golden("pi0", processor_dir=tmp_path).row(_obs())
    assert torch.equal(row.state, pi0.row(_obs()).state)


def test_rename_map_and_files_without_relative_steps(tmp_path: Path) -> None:
    pre, post = _files(tmp_path)
    table = {"observation.images.front": "observation.images.base_0_rgb"}
    _step(pre, "rename_observations_processor")["config"]["rename_map"] = table
    pre["steps"] = [s for s in pre["steps"] if "relative" not in s["registry_name"]]
    post["steps"] = [s for s in post["steps"] if "absolute" not in s["registry_name"]]
    _save(tmp_path, pre, post)
    processor = _golden("pi0", processor_dir=tmp_path)
    for name in ("front", "observation.images.front", "base_0_rgb"):
        assert processor.row(_obs(images={name: FRAME})).image_mask.tolist() == [True, False, False]


def test_broken_processor_files(tmp_path: Path) -> None:
    def load() -> Processor:
        return _golden("pi0", processor_dir=tmp_path)

    with pytest.raises(CheckpointNotFound, match="processor_dir"):
        load()
    pre, post = _files(tmp_path)
    _save(tmp_path, {**pre, "steps": [*pre["steps"], {"registry_name": "blur_step"}]}, post)
    with pytest.raises(CheckpointError, match="blur_step"):
        load()
    _save(tmp_path, {"name": "x"}, post)
    with pytest.raises(CheckpointError, match="steps"):
        load()
    _step(pre, "normalizer_processor")["state_file"] = "../secret.safetensors"
    _save(tmp_path, pre, post)
    with pytest.raises(CheckpointError, match="state_file"):
        load()
    _step(pre, "normalizer_processor")["state_file"] = "gone.safetensors"
    _save(tmp_path, pre, post)
    with pytest.raises(CheckpointNotFound, match=r"gone\.safetensors"):
        load()
    pre, post = _files(tmp_path)
    _step(post, "unnormalizer_processor")["config"]["norm_map"]["ACTION"] = "ZSCORE"
    _save(tmp_path, pre, post)
    with pytest.raises(CheckpointError, match="ZSCORE"):
        load()
    (tmp_path / "policy_postprocessor.json").unlink()
    with pytest.raises(CheckpointError, match="policy_postprocessor"):
        load()


def test_base_checkpoint_is_identity_with_a_warning_and_takes_statistics(tmp_path: Path) -> None:
    pre, post = _files(tmp_path, source="pi05")
    for data, name in ((pre, "normalizer_processor"), (post, "unnormalizer_processor")):
        step = _step(data, name)
        step["config"]["features"] = {}
        del step["state_file"]
    _save(tmp_path, pre, post)
    base = _golden("pi05", processor_dir=tmp_path)
    assert "observation.state and action" in base.warnings[0]
    row = base.row(_obs())
    assert np.array_equal(row.state[:5].numpy(), STATE)
    actions = np.random.default_rng(1).normal(size=(10, 8)).astype(np.float32)
    assert np.array_equal(base.actions(actions, row), actions[:, :7])
    stats = GOLDEN / "pi05" / "processors_abs" / _stats_name("pi05")
    fixed = _golden("pi05", processor_dir=tmp_path, norm_stats=stats)
    full = _golden("pi05")
    assert fixed.warnings == ()
    assert torch.equal(fixed.row(_obs()).tokens, full.row(_obs()).tokens)
    assert np.array_equal(fixed.actions(actions, row), full.actions(actions, row))


def _stats_name(model: str) -> str:
    folder = GOLDEN / model / "processors_abs"
    data = json.loads((folder / "policy_postprocessor.json").read_text())
    return str(_step(data, "unnormalizer_processor")["state_file"])


def test_folder_without_any_processor_file_warns() -> None:
    processor = Processor.from_checkpoint(None, PiConfig.default("pi05"), tokenizer=TOKENIZER)
    assert any("policy_preprocessor.json" in line for line in processor.warnings)
    assert processor.row(_obs(state=np.zeros(32))).tokens.shape == (200,)


def test_statistics_must_fit_the_mode(tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    stats.write_text(json.dumps({"action": {"mean": [0.0] * 7, "std": [1.0] * 7}}))
    with pytest.raises(CheckpointError, match="q01"):
        _golden("pi05", norm_stats=stats)
    stats.write_text(json.dumps({"action": {"mean": [0.0] * 9, "std": [1.0] * 9}}))
    with pytest.raises(CheckpointError, match="max_action_dim"):
        _golden("pi0", norm_stats=stats)


def test_relative_actions_follow_the_state(tmp_path: Path) -> None:
    pre, post = _files(tmp_path)
    dims = 5
    names = ["j0", "j1", "j2", "j3", "Gripper.pos"]
    for data, name in ((pre, "normalizer_processor"), (post, "unnormalizer_processor")):
        step = _step(data, name)
        step["config"]["features"]["action"]["shape"] = [dims]
        tensors = {}
        for feature in ("observation.state", "action"):
            tensors[f"{feature}.mean"] = np.full(dims, 0.5, np.float32)
            tensors[f"{feature}.std"] = np.full(dims, 2.0, np.float32)
        save_file(tensors, tmp_path / step["state_file"])
    _step(pre, "relative_actions_processor")["config"].update(enabled=True, action_names=names)
    _step(post, "absolute_actions_processor")["config"]["enabled"] = True
    _save(tmp_path, pre, post)
    processor = _golden("pi0", processor_dir=tmp_path)
    assert processor.action_names == tuple(names)
    model = np.random.default_rng(2).normal(size=(10, 8)).astype(np.float32)
    row, moved = processor.row(_obs()), processor.row(_obs(state=STATE + 1))
    commands = processor.actions(model, row)
    want = model[:, :dims] * 2 + 0.5
    want[:, :4] += STATE[:4]
    assert np.allclose(commands, want, atol=1e-6)
    assert np.allclose((processor.actions(model, moved) - commands)[:, :4], 1.0, atol=1e-6)
    back = processor.model_space(commands, row)
    assert back.shape == (10, 8)
    assert np.allclose(back[:, :dims], model[:, :dims], atol=1e-5)
    assert not back[:, dims:].any()
    # Re-expressed against a new state, the same commands come out.
    again = processor.actions(processor.model_space(commands, moved), moved)
    assert np.allclose(again, commands, atol=1e-5)


# ---------------------------------------------------------------- tokenizer choice


def test_tokenizer_order_and_missing_path(tmp_path: Path) -> None:
    found = _golden("pi0").tokenizer_source
    assert found.path == GOLDEN / "pi0" / "tokenizer" / "tokenizer.json"
    assert _golden("pi0", tokenizer=TOKENIZER).tokenizer_source.path == TOKENIZER
    with pytest.raises(CheckpointNotFound, match="--tokenizer"):
        _golden("pi0", tokenizer=tmp_path / "none")
    hub = Processor.from_checkpoint(tmp_path, PiConfig.default("pi0"))
    assert hub.tokenizer_source == TokenizerSource(hub_name="google/paligemma-3b-pt-224")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"interpolation": "nearest"}, "interpolation"),
        ({"overlong": "drop"}, "overlong"),
        ({"state_prompt_dim": 0}, "state_prompt_dim"),
        ({"robot": "spot"}, "robot"),
        ({"openpi_config": "pi0_libero"}, "openpi_config"),
    ],
)
def test_bad_choices(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        _golden("pi0", **options)


# ---------------------------------------------------------------- openpi


def _openpi(folder: Path, model: Any = "pi05", *, assets: bool = True, **options: Any) -> Processor:
    data = {
        "action_dim": 32,
        "action_horizon": 10,
        "paligemma_variant": "dummy",
        "action_expert_variant": "dummy",
    }
    (folder / "config.json").write_text(json.dumps(data))
    if assets:
        place = folder / "assets" / "mine"
        place.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(
            GOLDEN / "pi0" / "preprocess_openpi" / "norm_stats.json", place / "norm_stats.json"
        )
    config = PiConfig.from_folder(folder, model)
    return Processor.from_checkpoint(folder, config, tokenizer=TOKENIZER, **options)


def _libero(**changes: Any) -> Observation:
    fields: dict[str, Any] = {
        "images": {"observation/image": FRAME, "wrist_image": FRAME},
        "state": np.linspace(-1, 1, 8),
        "prompt": "open_the drawer",
    }
    return Observation(**{**fields, **changes})


def test_openpi_pi0_libero_adds_the_state_before_slicing(tmp_path: Path) -> None:
    processor = _openpi(tmp_path, "pi0", openpi_config="pi0_libero")
    assert "horizon 50" in processor.warnings[0]
    assert (processor.action_dim, processor.control_hz) == (7, 20.0)
    row = processor.row(_libero())
    assert row.image_mask.tolist() == [True, True, False]
    assert row.prompt_text == "open the drawer\n"
    assert torch.equal(row.images[0], model_image(FRAME, (224, 224), "openpi"))
    stats = json.loads((tmp_path / "assets" / "mine" / "norm_stats.json").read_text())["norm_stats"]
    mean, std = (np.array(stats["actions"][name]) for name in ("mean", "std"))
    model = np.random.default_rng(3).normal(size=(10, 32)).astype(np.float32)
    want = model[:, :7] * (std + OPENPI_EPS) + mean
    want[:, :6] += np.linspace(-1, 1, 8)[:6]
    # The state went through float32 and statistics with a zero std, as in openpi.
    assert np.allclose(processor.actions(model, row), want, atol=1e-4)


def test_openpi_pi05_libero_needs_no_state_and_is_absolute(tmp_path: Path) -> None:
    processor = _openpi(tmp_path, "pi05", openpi_config="pi05_libero")
    assert processor.warnings == ()
    row = processor.row(_libero(state=None))
    assert row.prompt_text == "open the drawer\n"
    assert row.tokens.shape == (200,)
    model = np.random.default_rng(4).normal(size=(10, 32)).astype(np.float32)
    commands = processor.actions(model, row)
    assert commands.shape == (10, 7)
    back = processor.model_space(commands, row)
    assert np.allclose(back[:, :6], model[:, :6], atol=1e-4)


def test_openpi_pi05_prompt_uses_the_state(tmp_path: Path) -> None:
    row = _openpi(tmp_path, "pi05", robot="droid").row(
        _libero(images={"exterior_image_1_left": FRAME})
    )
    assert row.prompt_text.startswith("Task: open the drawer, State: ")
    assert row.image_mask.tolist() == [True, False, False]


def test_openpi_aloha_conventions(tmp_path: Path) -> None:
    processor = _openpi(tmp_path, "pi0", assets=False, robot="aloha")
    assert "no statistics" in processor.warnings[0]
    chw = FRAME.transpose(2, 0, 1)
    state = np.full(14, 0.5)
    row = processor.row(_libero(images={"cam_high": chw, "cam_low": chw}, state=state))
    assert row.image_mask.tolist() == [True, False, False]
    assert row.state[1] == -0.5
    commands = processor.actions(np.full((10, 32), 0.25, np.float32), row)
    assert commands.shape == (10, 14)
    assert commands[0, 1] == -0.25
    assert np.allclose(processor.model_space(commands, row)[:, :14], 0.25, atol=1e-6)


def test_openpi_assets_and_default_prompt(tmp_path: Path) -> None:
    other = tmp_path / "assets" / "other" / "norm_stats.json"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    with pytest.raises(ConfigError, match="mine, other"):
        _openpi(tmp_path)
    assert _openpi(tmp_path, asset_id="mine").warnings == ()
    processor = _openpi(tmp_path, "pi0", asset_id="mine", openpi_config="pi0_aloha_towel")
    assert processor.settings.default_prompt == "fold the towel"


def test_interpolation_follows_the_family_unless_told(tmp_path: Path) -> None:
    row = _openpi(tmp_path, "pi0", robot="libero", interpolation="lerobot").row(_libero())
    assert torch.equal(row.images[0], model_image(FRAME, (224, 224), "lerobot"))
    legacy = _golden("pi0", legacy_padding=True).row(_obs())
    assert (legacy.images[0, :, 0] == -3).all()
