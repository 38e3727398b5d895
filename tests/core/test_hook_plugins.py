"""Hook plugins: a broken one stops the engine unless denied, never the CLI."""

from __future__ import annotations

from pathlib import Path

import pytest

from phyai import plugins
from phyai.errors import PluginContractError, PluginError
from tests.core.sandbox import (
    DUE,
    ask,
    error_of,
    install,
    install_hooks,
    make_distribution,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "site"


GUARD = DUE + "@hookimpl\ndef phyai_validate_action(chunk):\n    return 'too fast'\n"
LOADED = (
    "from phyai import plugins\n"
    "manager = plugins.load_hook_plugins()\n"
    "result = sorted(name for name, _ in manager.list_name_plugin())"
)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such_module", "ModuleNotFoundError"),
        (DUE + "@hookimpl\ndef phyai_validate_actions(chunk): pass", "phyai_validate_action'"),
        (DUE + "@hookimpl\ndef phyai_validate_action(chunks): pass", "Did you mean 'chunk'"),
        ("def phyai_validate_action(chunk): pass", "not marked as a hook"),
        ("import torch", "must not import torch"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("", "must implement a hook; its module 'bad_dist.hooks' has none"),
        (DUE + "def phyai_validate_actoin(chunk): pass", "Did you mean 'phyai_validate_action'"),
    ],
)
def test_a_broken_hook_plugin_stops_loading_unless_denied(
    folder: Path, code: str, words: str
) -> None:
    install_hooks(folder, "guard", GUARD)
    install_hooks(folder, "bad", code)
    (folder / "torch.py").write_text("")
    error = error_of(folder, "plugins.load_hook_plugins()")
    assert "PluginError" in error["types"]
    for part in ["'bad' of bad-dist 1.0", words, "PHYAI_PLUGINS_BLOCK=bad", "Traceback"]:
        assert part in error["text"]
    assert error["cause"] != "NoneType"
    assert ask(folder, LOADED, PHYAI_PLUGINS_BLOCK="bad") == ["guard"]


def test_the_allow_list_of_adapters_never_drops_a_hook_plugin(folder: Path) -> None:
    install_hooks(folder, "guard", GUARD)
    assert ask(folder, LOADED, PHYAI_PLUGINS="") == ["guard"]


def test_a_broken_hook_plugin_leaves_adapters_alone(folder: Path) -> None:
    install(folder, "good")
    install_hooks(folder, "bad", "import no_such_module")
    code = (
        "from phyai import plugins\n"
        "result = [plugins.find('good').status, [r['status'] for r in plugins.inspect_hooks()]]"
    )
    assert ask(folder, code) == ["ok", ["import-error"]]


def test_hook_plugins_of_one_name_are_an_error(folder: Path) -> None:
    install_hooks(folder, "guard", GUARD)
    install_hooks(folder, "guard", GUARD, dist="other-guard")
    error = error_of(folder, "plugins.load_hook_plugins()")
    assert "guard-dist and other-guard" in error["text"]
    assert ask(folder, LOADED, PHYAI_PLUGINS_BLOCK="other-guard:guard") == ["guard"]


def test_commands_come_from_good_hook_plugins_and_problems_are_told(folder: Path) -> None:
    command = "@hookimpl\ndef phyai_commands(): return {}"
    install_hooks(folder, "a", DUE + command.replace("{}", "{'hello': print, 'bad': 3}"))
    install_hooks(folder, "b", DUE + command.replace("{}", "{'hello': len}"))
    install_hooks(folder, "c", "import no_such_module")
    install_hooks(folder, "d", DUE + command.replace("{}", "1 / 0"))
    install_hooks(folder, "e", DUE + command.replace("{}", "{'blocked': print}"))
    install_hooks(folder, "f", DUE + command.replace("{}", "{3: print, '--help': print}"))
    install_hooks(folder, "g", DUE + command.replace("return {}", "raise SystemExit(5)"))
    code = (
        "from phyai import plugins\ncommands, problems = plugins.hook_commands()\n"
        "result = [{k: v.__name__ for k, v in commands.items()}, problems]"
    )
    commands, problems = ask(folder, code, PHYAI_PLUGINS_BLOCK="e")
    assert commands == {"hello": "print"}
    expected = [
        "'bad', which is not callable",
        "'hello', which is taken",
        "import-error",
        "ZeroDiv",
        "command 3, which is no name",
        "command '--help', which is no name",
        "SystemExit: 5",
    ]
    assert len(problems) == len(expected)
    assert all(words in line for words, line in zip(expected, problems, strict=True))


def test_errors_are_the_public_ones() -> None:
    assert issubclass(plugins.DuplicatePluginError, PluginContractError)
    assert issubclass(PluginContractError, PluginError)


def test_conflicting_distributions_are_told_apart_and_one_can_be_denied(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for name in ("fast", "slow"):
        code = (
            "from phyai.hooks import hookimpl\n"
            "class Part:\n    def encode(self, cache): pass\n"
            f"@hookimpl\ndef phyai_conditioning(adapter):\n    part = Part()\n"
            f"    part.label = '{name}'\n    return part\n"
        )
        make_distribution(
            site,
            f"{name}-cond",
            "1.0",
            {f"{name}_cond": code},
            {"phyai.hooks": {name: f"{name}_cond"}},
        )
    bind = (
        "binding.HookBinder(plugins.load_hook_plugins(), None, None, None)"
        ".bind_part('phyai_conditioning', None)"
    )
    error = error_of(site, f"from phyai import binding; {bind}")
    assert "PluginContractError" in error["types"]
    assert "'fast' and 'slow'" in error["text"]
    code = f"from phyai import binding, plugins\nresult = {bind}.label"
    assert ask(site, code, PHYAI_PLUGINS_BLOCK="fast") == "slow"
