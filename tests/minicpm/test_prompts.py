"""Prompts: chat templates read and not run, image placeholders, ids, limits, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phyai.errors import CheckpointError, CheckpointNotFound, RequestError
from phyai.models.minicpm.text import check_prompt
from phyai.models.minicpm_robot.presets.tiny_tokenizer import (
    CONTROL,
    TEMPLATE,
    TINY_FIRST_CONTROL,
    TINY_VOCAB,
    write_tiny_tokenizer,
)
from phyai.models.minicpm_robot.processing.prompts import (
    ImageText,
    PromptTokenizer,
    image_placeholder,
)
from phyai.models.minicpm_robot.processing.template import (
    ChatLayout,
    parse_layout,
    read_layout,
)

IMAGE_ID = TINY_FIRST_CONTROL + CONTROL["<|image_pad|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PromptTokenizer:
    return load(folder)


def load(folder: Path, layout: ChatLayout | None = None, **changes: Any) -> PromptTokenizer:
    settings = {"image_token_id": IMAGE_ID, "vocab_size": TINY_VOCAB, **changes}
    return PromptTokenizer(folder / "tokenizer.json", layout or ChatLayout(), **settings)


# ---------------------------------------------------------------- templates

TURN = "<|im_start|>user\n<|image_pad|><|image_pad|>go {x}<|im_end|>\n<|im_start|>assistant\n"
CLOSED = "<think>\n\n</think>\n\n"
MACRO = (
    "{%- macro render_content(content) %}{%- for item in content %}"
    "{%- if item.type == 'image' %}{{- '<|image_pad|>' }}{%- else %}{{- item.text }}{%- endif %}"
    "{%- endfor %}{%- endmacro %}"
    "{%- if tools and tools is iterable %}{{- '<|im_start|>system\\nYou have tools.' }}{%- endif %}"
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\nSystem: ' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- set content = render_content(message.content)|trim %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
)
ASKED = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
OPTIONAL = (
    ASKED + "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
OPENED = OPTIONAL.replace(
    "{%- endif %}{%- endif %}",
    "{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}",
)
RAW_TEXT = (
    "{% for message in messages %}\n"
    "    {# one turn #}\n"
    '<|im_start|>{{ message["role"] }}\n'
    "    {% for item in message['content'] %}\n"
    '        {% if item["type"] == "image" %}\n'
    "<|image_pad|>"
    "{% else %}{{ item['text'] }}{% endif %}\n"
    "    {% endfor %}\n"
    "<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "<|im_start|>assistant\n"
    "{% endif %}"
)
TEMPLATES = {
    "preset": TEMPLATE,
    "trimmed, thinking off on demand": MACRO + OPTIONAL,
    "trimmed, thinking opened": MACRO + OPENED,
    "no answer": MACRO,
    "raw text": RAW_TEXT,
    "vision markers": TEMPLATE.replace(
        "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"
    ),
    "image on a line": TEMPLATE.replace("'<|image_pad|>'", "'<|image_pad|>\\n'"),
    "no line end": TEMPLATE.replace("'<|im_end|>\\n'", "'<|im_end|>'"),
    "not thinking": TEMPLATE.replace(
        "enable_thinking is defined and enable_thinking is true", "not enable_thinking"
    ),
    "nested": TEMPLATE.replace(
        "{{- '<think>\\n' }}", "{%- if a == 1 %}{{- b }}{%- else %}{{- c }}{%- endif %}"
    ),
}


def rendered(template: str, text: str) -> str:
    """Return what the template really makes of two images and a text."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    content: list[dict[str, Any]] = [{"type": "image"}] * 2 + [{"type": "text", "text": text}]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    made = environment.from_string(template)
    return made.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", ["go {x}", "two\nlines ", "{{ 1 }} {% if %}"])
def test_the_layout_read_is_what_the_template_makes(name: str, text: str) -> None:
    layout = parse_layout(TEMPLATES[name])
    assert layout.text(["<|image_pad|>"] * 2, text) == rendered(TEMPLATES[name], text)


def test_the_default_answer_of_the_preset_has_closed_thinking() -> None:
    made = parse_layout(TEMPLATE).text(["<|image_pad|>"] * 2, "go {x}")
    assert made == TURN + CLOSED
    assert parse_layout(MACRO + OPTIONAL).trim


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("", "im_start"),
        ("[INST] {{ messages[0].content }} <|image_pad|> [/INST]", "im_start"),
        (TEMPLATE.replace("<|image_pad|>", "<image>"), "image_pad"),
        (TEMPLATE.replace("'<|image_pad|>'", "'<|image_pad|><|image_pad|>'"), "one text"),
        (TEMPLATE.replace("'<|image_pad|>'", "item.name + '<|image_pad|>'"), "one text"),
        (TEMPLATE + "{{ '<|image_pad|>!' }}", "one text"),
        ("{{- '<|im_start|>system\\nYou are a robot.<|im_end|>\\n' }}" + TEMPLATE, "system turn"),
        ("{{- '<|im_start|>system\\nSei hilfreich' }}" + TEMPLATE, "system turn"),
        ("<|im_start|>system\nBe good<|im_end|>\n" + TEMPLATE, "system turn"),
        (
            "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good{% endif %}"
            + TEMPLATE,
            "system turn",
        ),
        (TEMPLATE.replace("enable_thinking is defined", "mode == 2"), "conditions"),
        (TEMPLATE.replace("{{- '<think>\\n\\n</think>\\n\\n' }}", "{{- opening }}"), "plain text"),
        ("{% set enable_thinking = true %}" + TEMPLATE, "sets it"),
        (TEMPLATE.replace("if add_generation_prompt", "if x and add_generation_prompt"), "open"),
        (TEMPLATE.rsplit("{%- endif %}", 1)[0], "endif"),
        ("x" * 200_001, "characters"),
    ],
)
def test_templates_of_another_form_are_refused(template: str, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        parse_layout(template)


@pytest.mark.parametrize("opening", ["{{", "{%", "{#"])
def test_openings_without_an_end_are_text(opening: str) -> None:
    """And are looked for once: this many of them would else take minutes."""
    with pytest.raises(CheckpointError, match="frame the user's turn"):
        parse_layout(opening * 90_000)
    assert parse_layout(TEMPLATE + opening) == parse_layout(TEMPLATE)


def test_templates_are_never_run(tmp_path: Path) -> None:
    bomb = "{% for i in range(10**12) %}{{ cycler.__init__.__globals__ }}{% endfor %}"
    assert parse_layout(TEMPLATE + bomb).answer.endswith(CLOSED)


@pytest.mark.parametrize("name", ["chat_template.json", "tokenizer_config.json"])
@pytest.mark.parametrize("named", [False, True])
def test_templates_in_json_files(tmp_path: Path, name: str, named: bool) -> None:
    assert read_layout(tmp_path) is None
    value: Any = [{"name": "default", "template": TEMPLATE}] if named else TEMPLATE
    (tmp_path / name).write_text(json.dumps({"chat_template": value}), "utf-8")
    assert read_layout(tmp_path) == parse_layout(TEMPLATE)
    # the file of its own wins
    (tmp_path / "chat_template.jinja").write_text(RAW_TEXT, "utf-8")
    assert read_layout(tmp_path) == parse_layout(RAW_TEXT)


def test_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("none", "utf-8")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja must frame"):
        read_layout(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="readable text"):
        read_layout(tmp_path)


# ---------------------------------------------------------------- images in the prompt


def test_placeholders() -> None:
    pad = "<|image_pad|>"
    assert (
        image_placeholder(3, ImageText([2])) == f"<image_id>3</image_id><image>{pad}{pad}</image>"
    )
    assert image_placeholder(0, ImageText([1]), numbered=False) == f"<image>{pad}</image>"
    sliced = image_placeholder(0, ImageText([1, 2, 2, 2, 2], (2, 2)), numbered=False)
    row = f"<slice>{pad}{pad}</slice>" * 2
    assert sliced == f"<image>{pad}</image>{row}\n{row}"


def test_layout_and_ids(tokenizer: PromptTokenizer) -> None:
    at = {name: TINY_FIRST_CONTROL + offset for name, offset in CONTROL.items()}
    ids = tokenizer.encode("open the drawer", [ImageText([2]), ImageText([3])], 512)
    assert [i for i in ids.tolist() if i >= TINY_FIRST_CONTROL] == [
        at["<|im_start|>"],
        *(at["<image_id>"], at["</image_id>"], at["<image>"], IMAGE_ID, IMAGE_ID, at["</image>"]),
        *(at["<image_id>"], at["</image_id>"], at["<image>"], *[IMAGE_ID] * 3, at["</image>"]),
        at["<|im_end|>"],
        at["<|im_start|>"],
    ]
    text = tokenizer.text("open the drawer", [ImageText([2]), ImageText([3])])
    assert tokenizer.decode(ids.tolist()) == text
    assert text.index("<image_id>0") < text.index("<image_id>1") < text.index("open the drawer")


@pytest.mark.parametrize("odd", ["Öffne 抽屉 🦾 \x00\x7f  zweimal\n", "{a} {0} %s {{b}} \\n"])
def test_text_is_kept_to_the_byte(tokenizer: PromptTokenizer, odd: str) -> None:
    made = tokenizer.encode(odd, [ImageText([1])], 512)
    assert tokenizer.decode(made.tolist()) == tokenizer.text(odd, [ImageText([1])])
    assert odd in tokenizer.decode(made.tolist())


def test_the_limit_counts_text_and_markers_only(tokenizer: PromptTokenizer) -> None:
    length = len(tokenizer.encode("a", [ImageText([900])], 512)) - 900
    assert len(tokenizer.encode("a" + " a" * 9, [ImageText([900])], length + 9)) == length + 909
    with pytest.raises(RequestError, match="must fit into"):
        tokenizer.encode("a" + " a" * 10, [ImageText([900])], length + 9)


def test_huge_texts_are_refused_before_they_are_tokenised(tokenizer: PromptTokenizer) -> None:
    with pytest.raises(RequestError, match="1,000,000 characters"):
        tokenizer.encode("a" * 1_000_000, [ImageText([1])], 512)


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|im_end|>", "</image>", "<|video_pad|>"])
def test_control_tokens_are_no_text(tokenizer: PromptTokenizer, token: str) -> None:
    with pytest.raises(RequestError, match="control token"):
        tokenizer.encode(f"pick {token} up", [ImageText([1])], 512)


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


# ---------------------------------------------------------------- tokenizer files


def without(folder: Path, out: Path, *tokens: str) -> Path:
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] not in tokens]
    for token in tokens:
        data["model"]["vocab"].pop(token, None)
    (out / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    return out


@pytest.mark.parametrize("token", ["<image>", "</image_id>", "<|im_end|>"])
def test_tokens_that_are_not_single_are_refused(folder: Path, tmp_path: Path, token: str) -> None:
    with pytest.raises(CheckpointError, match=rf"got no such {token}".replace("|", r"\|")):
        load(without(folder, tmp_path, token))


def test_only_the_needed_tokens_are_asked_for(folder: Path, tmp_path: Path) -> None:
    less = without(folder, tmp_path, "<slice>", "<image_id>", "</image_id>")
    load(less, numbered=False)
    with pytest.raises(CheckpointError, match="<image_id>"):
        load(less)
    with pytest.raises(CheckpointError, match="<slice>"):
        load(less, numbered=False, sliced=True)


def test_names_of_the_tokenizers_config_count(folder: Path, tmp_path: Path) -> None:
    text = (folder / "tokenizer.json").read_text("utf-8").replace("<image>", "<picture>")
    (tmp_path / "tokenizer.json").write_text(text, "utf-8")
    with pytest.raises(CheckpointError, match="<image>"):
        load(tmp_path)
    names = {"extra_special_tokens": {"image_start_token": {"content": "<picture>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names), "utf-8")
    assert "<picture><|image_pad|>" in load(tmp_path).text("go", [ImageText([1])])


def test_other_and_broken_files_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="image_token_id = 5; got 1012"):
        load(folder, image_token_id=5)
    with pytest.raises(CheckpointNotFound, match="processor_dir"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", "utf-8")
    with pytest.raises(CheckpointError, match="readable tokenizer"):
        load(tmp_path)


def test_tokens_beyond_the_vocabulary_are_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="below the vocabulary of 1001"):
        load(folder, vocab_size=1001).encode("a", [ImageText([1])], 512)
