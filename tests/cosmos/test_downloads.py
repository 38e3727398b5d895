"""What `phyai run` fetches of a checkpoint on the hub, and what a manifest says of options."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from phyai import hub, plugins
from phyai.cli import run_setup
from phyai.cli.options import RunOptions
from phyai.errors import CheckpointNotFound, ConfigError
from phyai.models.cosmos3.downloads import FILES
from phyai.models.cosmos3.generation_adapter import OPTIONS as GENERATION_OPTIONS
from phyai.models.cosmos3.policy_adapter import OPTIONS as POLICY_OPTIONS
from tests.conftest import GOLDEN
from tests.cosmos.cosmos_engines import GENERATION, POLICY, ROOT

VISION = "vision_encoder/model-00001-of-00002.safetensors"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Return the patterns of every download; a hub id's last part is a golden checkpoint."""
    seen: list[tuple[str, ...]] = []

    def resolve(source: str, *, allow: Any = hub.DEFAULT_ALLOW, **_: Any) -> Path:
        seen.append(tuple(allow))
        folder = GOLDEN / str(source).partition("/")[2]
        if source == "org/bare" and tuple(allow) == ("*.json",):
            raise CheckpointNotFound("checkpoint 'org/bare' must hold files that match; got none.")
        return GOLDEN / "pi05" if source == "org/bare" else folder

    monkeypatch.setattr(hub, "resolve", resolve)
    return seen


def test_the_vision_encoder_is_not_fetched(fetched: list[tuple[str, ...]]) -> None:
    setup = run_setup.prepare(RunOptions(plugin=POLICY, checkpoint="org/cosmos3"))
    assert setup.args.checkpoint_dir == str(ROOT)
    assert fetched == [FILES]
    assert not any(fnmatch(VISION, pattern) for pattern in FILES)
    read = ("transformer/a.safetensors", "vae/a.safetensors", "sound_tokenizer/a.safetensors")
    for name in (*read, "text_tokenizer/chat_template.jinja", "model_index.json"):
        assert any(fnmatch(name, pattern) for pattern in FILES), name


def test_a_plugin_is_told_from_configs_before_weights_are_fetched(
    fetched: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "cosmos3_omni"}')
    monkeypatch.setitem(globals(), "GOLDEN", tmp_path)
    with pytest.raises(ConfigError, match="recognised by cosmos3 and cosmos3_policy"):
        run_setup.choose_plugin(RunOptions(checkpoint="org/"))
    assert fetched == [("*.json",)]


def test_other_checkpoints_are_fetched_as_before(fetched: list[tuple[str, ...]]) -> None:
    record, _ = run_setup.choose_plugin(RunOptions(checkpoint="org/bare"))
    assert record.id == "pi05"
    assert fetched == [("*.json",), hub.DEFAULT_ALLOW]


@pytest.mark.parametrize(
    ("plugin", "options"), [(POLICY, POLICY_OPTIONS), (GENERATION, GENERATION_OPTIONS)]
)
def test_the_manifest_lists_every_option(plugin: str, options: tuple[str, ...]) -> None:
    record = plugins.load(plugins.find(plugin))
    assert record.manifest is not None
    listed = record.manifest.capabilities
    assert sorted([*listed["options"], *listed["own_options"]]) == sorted(options)
