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


NAME = "google/paligemma-3b-pt-224"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "words"),
    [("LocalEntryNotFoundError", "no connection"), ("GatedRepoError", "Accept the licence")],
)
def test_the_hub_says_what_is_wrong(
    kind: str, words: str, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def refuse(*_: Any, **__: Any) -> str:
        error = getattr(errors, kind)
        raise error.__new__(error)  # the constructors take a response of the HTTP library

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=words) as caught:
        PromptTokenizer.from_hub(NAME)
    for part in (f"tokenizer {NAME!r}", "--tokenizer PATH"):
        assert part in str(caught.value)
    assert words == "Accept the licence" or "licence" not in str(caught.value)


def test_a_cached_tokenizer_needs_no_network(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = hub_cache / f"models--{NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0" * 40)
    shutil.copy(FOLDER / "tokenizer.json", snapshot)
    monkeypatch.setattr("phyai.hub.resolve", lambda *_, **__: pytest.fail("went to the network"))
    assert PromptTokenizer.from_hub(NAME).ids(("pick",))


def test_a_name_that_is_no_hub_id(hub_cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer '/no/such/folder' must exist"):
        PromptTokenizer.from_hub("/no/such/folder")
