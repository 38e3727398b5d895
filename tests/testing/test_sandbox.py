"""What the sandbox installs is what a fresh interpreter, the command and this process see."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from phyai import plugins
from phyai.testing.sandbox import Sandbox


def test_isolated_sees_the_sandbox_alone(phyai_sandbox: Sandbox) -> None:
    phyai_sandbox.adapter("mine", version="2.1")
    phyai_sandbox.hooks("guard", "from phyai.hooks import hookimpl\n")
    code = (
        "import importlib.util\nfrom phyai import plugins\n"
        "result = [[r.id, r.dist, r.version] for r in plugins.discover()]\n"
        "result += [[r.id for r in plugins.discover_hooks()]]\n"
        "result += [importlib.util.find_spec('torch') is None]"
    )
    assert phyai_sandbox.ask(code) == [["mine", "mine-dist", "2.1"], ["guard"], True]


def test_beside_this_environment(phyai_sandbox: Sandbox) -> None:
    phyai_sandbox.adapter("mine")
    code = (
        "import importlib.util\nfrom phyai import plugins\n"
        "result = [plugins.registered(), importlib.util.find_spec('torch') is not None]"
    )
    ids, torch_is_there = phyai_sandbox.ask(code, isolated=False)
    assert "mine" in ids
    assert torch_is_there
    done = phyai_sandbox.cli("plugins", "--json")
    assert done.returncode == 0, done.stderr
    assert "mine" in {row["id"] for row in json.loads(done.stdout)["plugins"]}


def test_environment_variables(phyai_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    phyai_sandbox.adapter("mine")
    monkeypatch.setenv("PHYAI_PLUGINS_BLOCK", "mine")  # of this process: dropped
    code = "from phyai import plugins\nresult = plugins.registered()"
    assert phyai_sandbox.ask(code) == ["mine"]
    assert phyai_sandbox.ask(code, PHYAI_PLUGINS="") == []


def test_errors_are_told(phyai_sandbox: Sandbox) -> None:
    phyai_sandbox.adapter("broken", "import nothing_of_this_name\n")
    error = phyai_sandbox.error_of("plugins.find('broken')")
    assert "PluginError" in error["types"]
    assert "nothing_of_this_name" in error["text"]
    assert error["cause"] == "ModuleNotFoundError"
    assert phyai_sandbox.error_of("plugins.discover()") is None
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        phyai_sandbox.ask("result = 1 / 0")


def test_visible_in_this_process_and_gone_afterwards(
    phyai_sandbox: Sandbox, tmp_path: Path
) -> None:
    phyai_sandbox.adapter("fleeting", dist="fleeting-pack")
    other = Sandbox(tmp_path / "other")
    other.adapter("fleeting", dist="fleeting-pack", version="3.0")
    path = list(sys.path)
    for sandbox, version in ((phyai_sandbox, "1.0"), (other, "3.0")):
        with sandbox.visible():
            record = plugins.find("fleeting")
            assert record.version == version
            module = importlib.import_module("fleeting_pack.model")
            assert Path(str(module.__file__)).is_relative_to(sandbox.folder)
        assert "fleeting_pack" not in sys.modules
        assert "fleeting" not in plugins.registered()
    assert sys.path == path
