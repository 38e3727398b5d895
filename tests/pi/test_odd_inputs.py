"""Arrays and text of unusual form: taken when their values are plain, else a typed error."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Engine, Observation
from phyai.adapter import DefaultOutput
from phyai.errors import CheckpointError, RequestError
from phyai.models.pi.config import PiConfig
from phyai.models.pi.processing.processor import Processor
from phyai.models.pi.processing.processor_files import read_processor_files
from phyai.models.pi.processing.tokenizer import MAX_TOKEN_CHARS, PromptTokenizer
from phyai.request_values import host_tensor
from phyai.types import ActionChunk, RTCOptions
from tests.pi.tiny_engines import CAMERAS, GOLDEN, observation, open_engine

SPARSE, META = torch.eye(3).to_sparse(), torch.empty(3, device="meta")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine("pi05") as engine:
        yield engine


def good(engine: Engine, **options: Any) -> Observation:
    return observation(engine, cameras=1, num_steps=1, **options)


@pytest.mark.parametrize("layout", ["negative strides", "big endian", "read only", "broadcast"])
def test_noise_and_left_over_of_any_layout(engine: Engine, layout: str) -> None:
    pi = engine.adapter.pi  # type: ignore[attr-defined]
    plain = np.random.default_rng(0).normal(size=(pi.chunk_size, pi.max_action_dim))
    plain = np.broadcast_to(plain[:1], plain.shape) if layout == "broadcast" else plain
    odd = {
        "negative strides": plain[::-1].copy()[::-1],
        "big endian": plain.astype(">f8"),
        "read only": plain.copy(),
        "broadcast": plain,
    }[layout]
    if layout == "read only":
        odd.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = engine.step(good(engine, noise=odd, rtc=RTCOptions(odd, 2)))
    want = engine.step(good(engine, noise=plain.copy(), rtc=RTCOptions(plain.tolist(), 2)))
    assert np.array_equal(got.model_actions, want.model_actions)


@pytest.mark.parametrize("value", [SPARSE, META, "text", np.array([None]), [[1], [2, 3]]])
def test_what_holds_no_plain_numbers(value: Any) -> None:
    with pytest.raises(RequestError, match="noise must be a dense tensor or array of numbers"):
        host_tensor("noise", value)


@pytest.mark.parametrize("value", [SPARSE, META])
def test_images_and_states_without_plain_data(engine: Engine, value: torch.Tensor) -> None:
    for changes in ({"images": {CAMERAS[0]: value}}, {"state": value}):
        with pytest.raises(RequestError, match="dense tensor"):
            engine.step(replace(good(engine), **changes))


def test_image_tensor_of_a_small_float_type(engine: Engine) -> None:
    image = torch.zeros(20, 30, 3, dtype=torch.float8_e4m3fn)
    want = engine.step(replace(good(engine), images={CAMERAS[0]: image.float().numpy()}))
    got = engine.step(replace(good(engine), images={CAMERAS[0]: image}))
    assert np.array_equal(got.actions, want.actions)


def test_image_out_of_float32_warns_nobody(engine: Engine) -> None:
    image = np.full((4, 4, 3), 1e300)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RequestError, match="finite"):
            engine.step(replace(good(engine), images={CAMERAS[0]: image}))


def test_prompt_with_a_lone_surrogate(engine: Engine) -> None:
    with pytest.raises(RequestError, match="valid Unicode"):
        engine.step(replace(good(engine), prompt="pick \ud800 up"))


def test_left_over_without_action_dims(engine: Engine) -> None:
    with pytest.raises(RequestError, match="and A >= 1"):
        engine.step(good(engine, rtc=RTCOptions(np.zeros((3, 0)))))


def test_guidance_weight_of_numpy(engine: Engine) -> None:
    chunk = np.zeros((4, 2))
    want = engine.step(good(engine, rtc=RTCOptions(chunk, max_guidance_weight=3.0)))
    got = engine.step(good(engine, rtc=RTCOptions(chunk, max_guidance_weight=np.float32(3))))  # type: ignore[arg-type]
    assert np.array_equal(got.actions, want.actions)


def test_a_text_that_cannot_fit_is_not_tokenised() -> None:
    seen: list[int] = []

    def encode(text: str) -> list[int]:
        seen.append(len(text))
        return [7] * len(text)

    tokenizer = PromptTokenizer(encode, "test")
    with pytest.raises(RequestError, match="must fit into 4 tokens; got 1,000,000 characters"):
        tokenizer.encode(["a" * 1_000_000], 4)
    assert not seen
    tokens, length = tokenizer.encode(["a" * 1_000_000], 4, overlong="truncate")
    assert (tokens.tolist(), length, seen) == ([2, 7, 7, 7], 4, [4 * MAX_TOKEN_CHARS])


def test_actions_share_no_memory_with_model_actions() -> None:
    processor = Processor.from_checkpoint(None, PiConfig.default("pi05"))
    model = np.zeros((50, processor.action_dim), np.float32)
    row: Any = None  # absolute actions do not read it
    assert not np.shares_memory(processor.actions(model, row), model)
    x, unused = {"action": torch.zeros(1, 3, 4)}, Any
    (chunk,) = DefaultOutput().decode(x, unused, unused)  # type: ignore[arg-type]
    assert isinstance(chunk, ActionChunk)
    assert not np.shares_memory(chunk.actions, chunk.model_actions)


@pytest.mark.parametrize(("length", "ok"), [(64, True), (None, True), (0, False), (10**9, False)])
def test_token_budget_of_the_processor_file(tmp_path: Path, length: int | None, ok: bool) -> None:
    shutil.copytree(GOLDEN / "pi05" / "processors_abs", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "policy_preprocessor.json"
    data = json.loads(file.read_text())
    step = next(s for s in data["steps"] if s["registry_name"] == "tokenizer_processor")
    step["config"]["max_length"] = length
    file.write_text(json.dumps(data))
    if ok:
        files = read_processor_files(tmp_path)
        assert files is not None
        assert files.max_length == length
    else:
        with pytest.raises(CheckpointError, match="'max_length' must be between 1 and"):
            read_processor_files(tmp_path)


def test_tokenizer_of_another_vocabulary_is_noticed_before_any_compute(tmp_path: Path) -> None:
    data = json.loads((GOLDEN / "pi05" / "tokenizer" / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    data["model"]["vocab"] = {k: n + 1000 if n >= 260 else n for k, n in vocab.items()}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(data))
    with open_engine("pi05", tokenizer=str(file)) as engine:
        with pytest.raises(RequestError, match=r"prompt tokens must be in \[0, 512\)"):
            engine.step(good(engine))
        assert engine.core.services.profile.counters["prefix_tokens"] == 0


def test_tokenizer_that_cannot_encode(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(RequestError, match="text the tokenizer can encode"):
        PromptTokenizer.from_path(file).ids(["b"])
