"""One set of weights in every released layout gives one result, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phyai.errors import MissingTensors
from phyai.types import Observation
from phyai.weights import save_safetensors
from tests.pi.checkpoint_variants import (
    GOLDEN,
    MODELS,
    actions_of,
    golden_actions,
    golden_config,
    golden_request,
    golden_tensors,
    lerobot_folder,
    openpi_folder,
    run,
    write_json,
)
from tests.pi.preset_engines import open_engine

HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
TABLE = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"

LAYOUTS: dict[str, Callable[[Path, str], Path]] = {
    "lerobot, model. prefix": lambda folder, model: lerobot_folder(folder, model),
    "lerobot, no prefix": lambda folder, model: lerobot_folder(folder, model, prefix=""),
    "openpi": lambda folder, model: openpi_folder(folder, model),
    "sharded": lambda folder, model: lerobot_folder(folder, model, shard_bytes=300_000),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def expected(model: str) -> Tensor:
    """Return the actions of the golden folder itself, which match the official ones."""
    actions = run(model, GOLDEN / model)
    torch.testing.assert_close(actions, golden_actions(model), atol=5e-5, rtol=0)
    return actions


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_layouts_give_identical_chunks(
    model: str, expected: Tensor, layout: str, tmp_path: Path
) -> None:
    folder = LAYOUTS[layout](tmp_path / "checkpoint", model)
    if layout == "sharded":
        assert len(list(folder.glob("model-*.safetensors"))) > 2
        assert (folder / "model.safetensors.index.json").is_file()
    assert torch.equal(run(model, folder), expected)


def test_observations_give_identical_chunks_in_lerobot_layouts(model: str, tmp_path: Path) -> None:
    config = golden_config(model)
    camera = next(iter(config["input_features"])).rpartition(".")[2]
    image = np.random.default_rng(3).integers(0, 256, (48, 64, 3)).astype(np.uint8)
    state = np.linspace(-0.5, 0.5, config["input_features"]["observation.state"]["shape"][0])
    noise = torch.randn(
        config["chunk_size"], config["max_action_dim"], generator=torch.Generator().manual_seed(0)
    )
    observation = Observation(
        images={camera: image}, state=state, prompt="pick up the cup", options={"noise": noise}
    )
    chunks = []
    for index, name in enumerate(("lerobot, model. prefix", "lerobot, no prefix", "sharded")):
        folder = LAYOUTS[name](tmp_path / str(index), model)
        with open_engine(model, checkpoint_dir=folder) as engine:
            chunks.append(engine.step(observation))
    for other in chunks[1:]:
        np.testing.assert_array_equal(other.actions, chunks[0].actions)
        np.testing.assert_array_equal(other.model_actions, chunks[0].model_actions)


def test_openpi_layout_uses_its_statistics(model: str, tmp_path: Path) -> None:
    folder = openpi_folder(tmp_path / "openpi", model)
    config = golden_config(model)
    size = config["max_state_dim"]
    observation = Observation(
        images={"base_0_rgb": np.full((56, 56, 3), 90, dtype=np.uint8)},
        state=np.linspace(-0.5, 0.5, size),
        prompt="open",
        options={"seed": 3},
    )
    with open_engine(model, checkpoint_dir=folder) as engine:
        chunk = engine.step(observation)
        assert engine.adapter.processor.warnings == ()  # type: ignore[attr-defined]
    index = np.arange(config["max_action_dim"], dtype=np.float64)
    if model == "pi0":
        by_hand = chunk.model_actions * (1.0 + 0.1 * index + 1e-6) + 0.1 * index
    else:
        low, high = -1.0 - 0.1 * index, 1.0 + 0.2 * index
        by_hand = (chunk.model_actions + 1.0) / 2.0 * (high - low + 1e-6) + low
    np.testing.assert_allclose(chunk.actions, by_hand, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- the token embedding


def test_embed_tokens_wins_over_lm_head(model: str, expected: Tensor, tmp_path: Path) -> None:
    tensors = golden_tensors(model)
    table, other = tensors[HEAD], torch.zeros_like(tensors[HEAD])
    both = lerobot_folder(tmp_path / "a", model, tensors={**tensors, TABLE: table, HEAD: other})
    assert torch.equal(run(model, both), expected)
    swapped = lerobot_folder(tmp_path / "b", model, tensors={**tensors, TABLE: other, HEAD: table})
    assert not torch.equal(run(model, swapped), expected)


def test_embed_tokens_alone_is_enough(model: str, expected: Tensor, tmp_path: Path) -> None:
    tensors = golden_tensors(model)
    tensors[TABLE] = tensors.pop(HEAD)
    assert torch.equal(run(model, lerobot_folder(tmp_path, model, tensors=tensors)), expected)


def test_neither_embedding_is_missing_tensors(model: str, tmp_path: Path) -> None:
    tensors = golden_tensors(model)
    del tensors[HEAD]
    folder = lerobot_folder(tmp_path, model, tensors=tensors)
    with pytest.raises(MissingTensors, match=r"embed_tokens\.weight.*lm_head\.weight"):
        run(model, folder)


def test_tensors_of_training_are_ignored(model: str, expected: Tensor, tmp_path: Path) -> None:
    extra = {
        "value_head.mlp.0.weight": torch.ones(2, 2),
        "noise_head.weight": torch.ones(2),
        "normalize_inputs.buffer_observation_state.mean": torch.ones(2),
    }
    folder = lerobot_folder(tmp_path, model, tensors={**golden_tensors(model), **extra})
    assert torch.equal(run(model, folder), expected)


# ---------------------------------------------------------------- PEFT

ALPHA, RANK = 6.0, 3
TARGETS = (
    "paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj",
    "paligemma_with_expert.gemma_expert.model.layers.2.self_attn.v_proj",
    "action_out_proj",
)
SAVED = "action_in_proj.bias"


def _adapter(
    folder: Path, tensors: dict[str, Tensor], base: str, **config: Any
) -> dict[str, Tensor]:
    """Write a LoRA adapter; returns the weights with it merged in by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(11)
    merged, adapter = dict(tensors), {}
    for target in TARGETS:
        weight = tensors[f"{target}.weight"]
        down = torch.randn(RANK, weight.shape[1], generator=generator) * 0.1
        up = torch.randn(weight.shape[0], RANK, generator=generator) * 0.1
        adapter[f"base_model.model.model.{target}.lora_A.weight"] = down
        adapter[f"base_model.model.model.{target}.lora_B.weight"] = up
        merged[f"{target}.weight"] = weight + ALPHA / RANK * (up @ down)
    merged[SAVED] = torch.randn(tensors[SAVED].shape, generator=generator)
    adapter[f"base_model.model.model.{SAVED}"] = merged[SAVED]
    save_safetensors(adapter, folder / "adapter_model.safetensors")
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": ALPHA,
            "target_modules": list(TARGETS),
            "base_model_name_or_path": base,
            **config,
        },
    )
    return merged


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_peft_checkpoint_equals_merged_weights(
    model: str, expected: Tensor, prefix: str, tmp_path: Path
) -> None:
    """The adapter folder has config and processors; its base lies elsewhere, in either naming."""
    tensors = golden_tensors(model)
    base = lerobot_folder(tmp_path / "base", model, prefix=prefix)
    tuned = lerobot_folder(
        tmp_path / "tuned", model, config={**golden_config(model), "use_peft": True}
    )
    (tuned / "model.safetensors").unlink()
    merged = _adapter(tuned, tensors, str(base))
    plain = lerobot_folder(tmp_path / "merged", model, tensors=merged)
    actions = run(model, tuned)
    torch.testing.assert_close(actions, run(model, plain), atol=2e-5, rtol=0)
    assert (actions - expected).abs().max() > 1e-2


def test_peft_checkpoint_beside_its_base_weights(model: str, tmp_path: Path) -> None:
    tuned = lerobot_folder(
        tmp_path / "tuned", model, config={**golden_config(model), "use_peft": True}
    )
    merged = _adapter(tuned, golden_tensors(model), "")
    plain = lerobot_folder(tmp_path / "merged", model, tensors=merged)
    torch.testing.assert_close(run(model, tuned), run(model, plain), atol=2e-5, rtol=0)


# ---------------------------------------------------------------- base checkpoints


def test_base_checkpoint_without_statistics_warns_and_passes_values(
    model: str, tmp_path: Path
) -> None:
    folder = lerobot_folder(tmp_path, model)
    config = golden_config(model)
    mapping = config["normalization_mapping"]
    for name in list(folder.glob("policy_*")):
        name.unlink()
    pre = [
        {"registry_name": "normalizer_processor", "config": {"features": {}, "norm_map": mapping}}
    ]
    post = [
        {"registry_name": "unnormalizer_processor", "config": {"features": {}, "norm_map": mapping}}
    ]
    if model == "pi05":
        pre.append({"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {}})
    # room for the state in the prompt of the small model
    pre.append({"registry_name": "tokenizer_processor", "config": {"max_length": 64}})
    write_json(folder / "policy_preprocessor.json", {"name": "x", "steps": pre})
    write_json(folder / "policy_postprocessor.json", {"name": "x", "steps": post})
    size = config["input_features"]["observation.state"]["shape"][0]
    observation = Observation(
        images={"base_0_rgb": np.zeros((56, 56, 3), dtype=np.uint8)},
        state=np.full(size, 0.25),
        prompt="open",
        options={"seed": 1},
    )
    with open_engine(model, checkpoint_dir=folder) as engine:
        warnings = " ".join(engine.adapter.processor.warnings)  # type: ignore[attr-defined]
        chunk = engine.step(observation)
    assert "observation.state and action" in warnings
    assert "norm_stats" in warnings
    width = chunk.actions.shape[1]
    np.testing.assert_array_equal(chunk.actions, chunk.model_actions[:, :width])


def test_one_engine_repeats_itself(model: str, expected: Tensor) -> None:
    with open_engine(model, checkpoint_dir=GOLDEN / model, max_batch_size=4) as engine:
        assert torch.equal(actions_of(engine, model), expected)
        assert torch.equal(engine.step(golden_request(model)), expected)
