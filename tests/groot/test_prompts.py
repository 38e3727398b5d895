"""Prompts: cleaning, the chat layout, limits, control tokens and chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phyai.errors import CheckpointError, CheckpointNotFound, RequestError
from phyai.models.gr00t.presets.tiny_tokenizer import TEMPLATE, write_tiny_tokenizer
from phyai.models.gr00t.processing.prompts import (
    PromptTokenizer,
    chat_text,
    check_prompt,
    check_template,
    formalize,
)

IMAGE_ID = 1012


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PromptTokenizer:
    return _load(folder)


def _load(folder: Path, image: int = IMAGE_ID, vocab: int = 1024) -> PromptTokenizer:
    return PromptTokenizer(folder / "tokenizer.json", image_token_id=image, vocab_size=vocab)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Pick up the RED cube, then stop!", "pick up the red cube then stop"),
        ("snake_case stays", "snake_case stays"),
        ("Größe, 3.5 cm (tief)", "größe 35 cm tief"),
        ("two\nlines\t.", "two\nlines\t"),
    ],
)
def test_formalize(text: str, want: str) -> None:
    assert formalize(text) == want


def test_layout_and_ids(tokenizer: PromptTokenizer) -> None:
    ids = tokenizer.encode("pick up", [2, 1], 512)
    control = {"start": 1001, "end": 1002, "see": 1009, "seen": 1010}
    assert ids[0] == control["start"]
    assert [i for i in ids.tolist() if i >= 1000] == [
        control["start"],
        *(control["see"], IMAGE_ID, IMAGE_ID, control["seen"]),
        *(control["see"], IMAGE_ID, control["seen"]),
        control["end"],
    ]
    assert tokenizer.text(ids.tolist()) == chat_text("pick up", [2, 1])
    # one token for a known word, with or without a space before it
    assert len(ids) == len(tokenizer.encode("pick", [2, 1], 512)) + 1


def test_text_is_kept_to_the_byte(tokenizer: PromptTokenizer) -> None:
    odd = "Öffne 抽屉 🦾 \x00\x7f  zweimal\n"
    assert tokenizer.text(tokenizer.encode(odd, [1], 512).tolist()) == chat_text(odd, [1])


def test_the_limit_counts_text_and_markers_only(tokenizer: PromptTokenizer) -> None:
    markers = len(tokenizer.encode("a", [5, 5], 512)) - 10 - 1
    exact = "a" + " a" * 9
    assert len(tokenizer.encode(exact, [900], markers - 2 + 10)) == markers - 2 + 10 + 900
    with pytest.raises(RequestError, match="must fit into"):
        tokenizer.encode(exact + " a", [900], markers - 2 + 10)


def test_huge_texts_are_refused_before_they_are_tokenised(tokenizer: PromptTokenizer) -> None:
    with pytest.raises(RequestError, match="1,000,000 characters"):
        tokenizer.encode("a" * 1_000_000, [1], 512)


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|im_end|>", "<|video_pad|>"])
def test_control_tokens_are_no_text(tokenizer: PromptTokenizer, token: str) -> None:
    with pytest.raises(RequestError, match="control token"):
        tokenizer.encode(f"pick {token} up", [1], 512)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        (None, "NoneType"),
        (3, "int"),
        (["pick"], "list"),
        ("", "not be empty"),
        (" \n", "not be empty"),
        ("a\ud800", "surrogate"),
    ],
)
def test_refused_prompts(prompt: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        check_prompt(prompt)


# ---------------------------------------------------------------- files


def test_tokenizers_of_other_backbones_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="at 5, as the backbone's config says; got 1012"):
        _load(folder, image=5)
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    data["added_tokens"] = data["added_tokens"][:3]
    data["model"]["vocab"] = {k: v for k, v in data["model"]["vocab"].items() if v < 1003}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    with pytest.raises(CheckpointError, match=r"chat layout; got no <\|vision_start\|>"):
        _load(tmp_path)


def test_broken_and_absent_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="backbone_dir"):
        _load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", "utf-8")
    with pytest.raises(CheckpointError, match="readable tokenizer"):
        _load(tmp_path)


def test_tokens_beyond_the_vocabulary_are_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="below the vocabulary of 1001"):
        _load(folder, vocab=1001).encode("a", [1], 512)


DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|im_start|>system\n{}<|im_end|>\n{% endif %}{% endfor %}"
)
CONDITIONAL = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' }}"
    "{{- messages[0].content }}{{- '<|im_end|>\\n' }}{%- endif %}"
)


@pytest.mark.parametrize("template", [TEMPLATE, CONDITIONAL])
def test_templates_without_a_turn_of_their_own_pass(template: str, tmp_path: Path) -> None:
    check_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
    check_template(tmp_path)


@pytest.mark.parametrize("where", ["jinja", "chat_template.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["You are a helpful assistant.", "Sei hilfreich"])
def test_templates_with_a_system_text_are_refused(where: str, text: str, tmp_path: Path) -> None:
    template = DEFAULT_SYSTEM.replace("{}", text)
    if where == "jinja":
        (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
    else:
        (tmp_path / where).write_text(json.dumps({"chat_template": template}), "utf-8")
    with pytest.raises(CheckpointError, match="no system turn"):
        check_template(tmp_path)


def test_escaped_line_ends_count_too(tmp_path: Path) -> None:
    text = "{{- '<|im_start|>system\\nYou are a robot.<|im_end|>\\n' }}"
    (tmp_path / "chat_template.jinja").write_text(text, "utf-8")
    with pytest.raises(CheckpointError, match="no system turn"):
        check_template(tmp_path)
