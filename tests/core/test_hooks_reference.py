"""docs/reference/hooks.md is what the hook specs say, and what it shows is true."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from phyai.plugin_rules import check_hooks, hook_arguments

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_hooks", REFERENCE / "make_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh(maker: ModuleType) -> None:
    assert (REFERENCE / "hooks.md").read_text(encoding="utf-8") == maker.render(), maker.COMMAND
    assert maker.main(["--check"]) == 0


def test_a_stale_page_is_noticed(
    maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maker, "PAGE", tmp_path / "hooks.md")
    maker.PAGE.write_text(maker.render().replace("phyai_cache", "phyai_cash"))
    assert maker.main(["--check"]) == 1
    assert maker.main([]) == 0
    assert maker.main(["--check"]) == 0


def test_every_hook_has_signature_kind_time_and_errors(maker: ModuleType) -> None:
    sections = maker.render().split("\n## ")[1:]
    assert [section.splitlines()[0] for section in sections] == list(hook_arguments())
    for section in sections:
        name = section.splitlines()[0]
        assert f"def {name}(" in section
        wanted = ["kind", "called", *hook_arguments()[name], "errors"]
        found = re.findall(r"^- \*\*(.+)\*\*: .+", section, flags=re.MULTILINE)
        assert [word for word in found if word not in ("returns", "must keep")] == wanted


def test_the_example_is_a_validator_that_works(maker: ModuleType) -> None:
    page = maker.render()
    (code,) = re.findall(r"```python\n(from .*?)```", page, flags=re.DOTALL)
    (toml,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    module: Any = ModuleType("speed_limit")
    exec(code, vars(module))
    check_hooks(module, "speed_limit", "hooks")
    fast, slow = (SimpleNamespace(actions=np.full((2, 2), v)) for v in (-1.5, 0.5))
    assert module.phyai_validate_action(fast) == "too fast"
    assert module.phyai_validate_action(slow) is None
    assert "phyai.hooks" in tomllib.loads(toml)["project"]["entry-points"]
