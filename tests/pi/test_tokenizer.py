"""Tokenizer: both file kinds agree, embedded truncation is off, and errors say what to do."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from phyai.errors import CheckpointError, CheckpointNotFound, MissingDependency, RequestError
from phyai.models.pi.processing.tokenizer import PromptTokenizer, find_tokenizer_file

FOLDER = Path(__file__).parents[1] / "golden" / "pi05" / "tokenizer"
LONG = "Task: " + "pick up the red bowl " * 20


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer.from_path(FOLDER)


def test_embedded_truncation_and_padding_are_off(tokenizer: PromptTokenizer) -> None:
    # The trap: the file itself asks for 40 tokens, cut and padded.
    assert json.loads((FOLDER / "tokenizer.json").read_text())["truncation"]["max_length"] == 40
    assert len(tokenizer.ids((LONG,))) > 48
    assert len(tokenizer.ids(("pick",))) < 10


def test_folder_prefers_json_and_both_kinds_agree(
    tokenizer: PromptTokenizer, tmp_path: Path
) -> None:
    assert tokenizer.source.endswith("tokenizer.json")
    (tmp_path / "tokenizer").mkdir()
    shutil.copy(FOLDER / "tokenizer.model", tmp_path / "tokenizer")
    assert find_tokenizer_file(tmp_path) == tmp_path / "tokenizer" / "tokenizer.model"
    other = PromptTokenizer.from_path(tmp_path / "tokenizer")
    assert other.source.endswith("tokenizer.model")
    for parts in (("pick up the cup", "\n"), ("naïve café — 拾う",), (LONG,), ("",)):
        assert other.ids(parts) == tokenizer.ids(parts)


def test_parts_are_encoded_one_by_one_after_bos(tokenizer: PromptTokenizer) -> None:
    alone = tokenizer.ids(("pick up",))
    newline = tokenizer.ids(("\n",))
    assert alone[0] == newline[0] == 2
    assert tokenizer.ids(("pick up", "\n")) == alone + newline[1:]
    assert tokenizer.ids(("", "\n")) == newline


def test_padding_and_the_limit(tokenizer: PromptTokenizer) -> None:
    ids, length = tokenizer.encode(("pick up the cup",), 48)
    assert ids.shape == (48,)
    assert not ids[length:].any()
    assert ids[:length].all()
    exact = tokenizer.encode(("pick up the cup",), length)
    assert exact[1] == length
    with pytest.raises(RequestError, match=rf"{length - 1} tokens; got {length}"):
        tokenizer.encode(("pick up the cup",), length - 1)
    cut, count = tokenizer.encode(("pick up the cup",), length - 1, overlong="truncate")
    assert count == length - 1
    assert cut.tolist() == ids[: length - 1].tolist()


def test_missing_and_broken_paths(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="--tokenizer"):
        PromptTokenizer.from_path(tmp_path / "none.json")
    with pytest.raises(CheckpointNotFound, match=r"tokenizer\.model"):
        PromptTokenizer.from_path(tmp_path)
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        PromptTokenizer.from_path(broken)
    model = tmp_path / "tokenizer.model"
    model.write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match="SentencePiece"):
        PromptTokenizer.from_path(model)


def test_without_sentencepiece_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingDependency, match=r"phyai-models-pi\[sentencepiece\]"):
        PromptTokenizer.from_path(FOLDER / "tokenizer.model")


def test_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_: Any, **__: Any) -> str:
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(CheckpointError) as caught:
        PromptTokenizer.from_hub("google/paligemma-3b-pt-224")
    for words in ("google/paligemma-3b-pt-224", "licence", "--tokenizer PATH"):
        assert words in str(caught.value)
