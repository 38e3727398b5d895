"""Selecting a plugin with real distributions in a fresh interpreter, and registering one here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from phyai import plugins
from phyai.errors import PluginContractError, PluginNotFound
from phyai.manifest import AdapterManifest
from phyai.plugin_rules import ADAPTER_METHODS
from tests.core.sandbox import (
    MODEL,
    STATUS,
    ask,
    error_of,
    install,
    make_distribution,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "site"


# ---------------------------------------------------------------- selection


def test_two_distributions_of_one_id_must_be_told_apart(folder: Path) -> None:
    install(folder, "pick", dist="alpha-pack")
    install(folder, "pick", dist="beta-pack", version="2.0")
    error = error_of(folder, "plugins.find('pick')")
    assert "PluginError" in error["types"]
    for words in ["alpha-pack 1.0", "beta-pack 2.0", "'alpha-pack:pick'", "'beta-pack:pick'"]:
        assert words in error["text"]
    code = (
        "from phyai import plugins\n"
        "result = [plugins.find(n).dist for n in ('alpha-pack:pick', 'Beta_Pack:pick')]\n"
        "result += [r['conflicts_with'] for r in plugins.inspect_all()]"
    )
    assert ask(folder, code) == ["alpha-pack", "beta-pack", ["beta-pack"], ["alpha-pack"]]


def test_blocking_one_of_two_makes_the_other_the_only_one(folder: Path) -> None:
    install(folder, "pick", dist="alpha-pack")
    install(folder, "pick", dist="beta-pack")
    code = "from phyai import plugins\nresult = plugins.find('pick').dist"
    assert ask(folder, code, PHYAI_PLUGINS_BLOCK="alpha-pack:pick") == "beta-pack"


def test_the_first_folder_of_the_path_shadows_the_second(folder: Path) -> None:
    install(folder, "twice", version="1.0")
    install(folder / "later", "twice", version="2.0")
    code = (
        "import sys\nsys.path.append(sys.path[1] + '/later')\nfrom phyai import plugins\n"
        "result = [r.version for r in plugins.discover()]"
    )
    assert ask(folder, code) == ["1.0"]


def test_a_folder_without_plugins_shadows_too(folder: Path) -> None:
    make_distribution(folder, "twice-dist", "9.0", {}, {})
    install(folder / "later", "twice", dist="twice-dist")
    install(folder / "later", "other")
    code = (
        "import sys\nsys.path.append(sys.path[1] + '/later')\nfrom phyai import plugins\n"
        "result = [r.id for r in plugins.discover()]"
    )
    assert ask(folder, code) == ["other"]


@pytest.mark.parametrize(
    ("env", "usable"),
    [
        ({}, ["a", "b", "c"]),
        ({"PHYAI_PLUGINS": "a, c"}, ["a", "c"]),
        ({"PHYAI_PLUGINS": ""}, []),
        ({"PHYAI_PLUGINS": "b-dist:b"}, ["b"]),
        ({"PHYAI_PLUGINS_BLOCK": "a,b"}, ["c"]),
        ({"PHYAI_PLUGINS": "a,b", "PHYAI_PLUGINS_BLOCK": "b"}, ["a"]),
    ],
)
def test_allow_and_block_lists(folder: Path, env: dict[str, str], usable: list[str]) -> None:
    for name in "abc":
        install(folder, name)
    code = (
        "from phyai import plugins\n"
        "result = [list(plugins.registered()), [r.id for r in plugins.discover()]]"
    )
    assert ask(folder, code, **env) == [usable, ["a", "b", "c"]]


def test_names_in_the_lists_that_match_nothing_are_told(folder: Path) -> None:
    install(folder, "arm")
    code = "from phyai import plugins; result = plugins.unmatched()"
    assert ask(folder, code, PHYAI_PLUGINS="arm", PHYAI_PLUGINS_BLOCK="arm-dist:arm") == []
    [allow, deny] = ask(folder, code, PHYAI_PLUGINS="arm,leg", PHYAI_PLUGINS_BLOCK="amr")
    assert "PHYAI_PLUGINS must hold ids of installed plugins; got 'leg'" in allow
    for part in ("PHYAI_PLUGINS_BLOCK", "'amr'", "Did you mean 'arm'?"):
        assert part in deny
    code = (
        "import logging\nfrom phyai import plugins\nheard = []\n"
        "class Ear(logging.Handler):\n"
        "    def emit(self, record): heard.append(record.getMessage())\n"
        "logging.getLogger('phyai').addHandler(Ear())\n"
        "plugins.load_hook_plugins()\nresult = heard"
    )
    [told] = ask(folder, code, PHYAI_PLUGINS_BLOCK="amr")
    assert "'amr'" in told


def test_a_blocked_plugin_is_not_imported_and_says_why(folder: Path) -> None:
    install(folder, "loud", "raise RuntimeError('imported')")
    error = error_of(folder, "plugins.find('loud')", PHYAI_PLUGINS_BLOCK="loud")
    assert "(blocked): named in PHYAI_PLUGINS_BLOCK" in error["text"]
    error = error_of(folder, "plugins.find('loud')", PHYAI_PLUGINS="pi")
    assert "not in PHYAI_PLUGINS='pi'" in error["text"]
    assert ask(folder, STATUS, PHYAI_PLUGINS="")["loud"][0] == "blocked"


def test_an_unknown_id_lists_the_installed_ones_and_guesses(folder: Path) -> None:
    install(folder, "zeta")
    install(folder, "alpha")
    error = error_of(folder, "plugins.find('alfa')")
    assert {"PluginNotFound", "ValueError"} <= set(error["types"])
    assert "'alfa' is not installed; installed: alpha, zeta. Did you mean 'alpha'?" in error["text"]


@pytest.mark.parametrize(
    ("asked", "package"),
    [
        ("pi05", "phyai-models-pi"),
        ("pi0", "phyai-models-pi"),
        ("pi05_wn", "phyai-models-pi"),
        ("gr00t_n17", "phyai-models-groot"),
        ("gr00t_n1", "phyai-models-groot"),
        ("cosmos3_policy", "phyai-models-cosmos"),
        ("cosmos3_wn", "phyai-models-cosmos"),
        ("minicpm_gr00t", "phyai-models-minicpm"),
        ("minicpm_robot_track", "phyai-models-minicpm"),
    ],
)
def test_a_known_plugin_that_is_absent_names_the_package(
    monkeypatch: pytest.MonkeyPatch, asked: str, package: str
) -> None:
    monkeypatch.setattr(plugins, "discover", list)
    with pytest.raises(PluginNotFound, match="installed: none") as caught:
        plugins.find(asked)
    assert f"`pip install {package}`" in str(caught.value)


def test_an_unknown_id_is_sought_among_aliases_and_breaks_on_none(folder: Path) -> None:
    install(folder, "good", more=', aliases=("old_name",)')
    install(folder, "broken", "import no_such_module")
    code = "from phyai import plugins\nresult = plugins.find('old_name').id"
    assert ask(folder, code) == "good"


def test_an_alias_of_a_known_plugin_imports_that_one_only(folder: Path) -> None:
    install(folder, "pi05")
    install(folder, "loud", "raise SystemExit('imported')")
    code = (
        "import sys\nfrom phyai import plugins\n"
        "result = [plugins.find('pi05_wn').id, 'loud_dist' in sys.modules]"
    )
    assert ask(folder, code) == ["pi05", False]


def test_an_id_wins_over_an_alias(folder: Path) -> None:
    install(folder, "pi05")
    install(folder, "pi05_wn")
    assert (
        ask(folder, "from phyai import plugins\nresult = plugins.find('pi05_wn').id") == "pi05_wn"
    )


def test_a_worker_refuses_another_version(folder: Path) -> None:
    install(folder, "good")
    code = (
        "from phyai import plugins\nresult = plugins.find('good-dist:good', version='1.0').version"
    )
    assert ask(folder, code) == "1.0"
    error = error_of(folder, "plugins.find('good', version='1.1')")
    assert all(word in error["text"] for word in ["'1.1'", "'1.0'", "same version"])


def test_checkpoints_are_recognised_by_config_then_by_tensors(folder: Path) -> None:
    install(folder, "by_type", more=', architectures=("act",)')
    install(folder, "by_key", more=', key_probes=("head.bias",)')
    install(folder, "broken", "import no_such_module")
    code = (
        "from phyai.plugins import recognise\n"
        "result = [recognise({'type': 'act'}, []), recognise({'model_type': 'act'}, []),\n"
        "          recognise({'architectures': ['X', 'act']}, ['m.head.bias']),\n"
        "          recognise({}, ['m.head.bias']), recognise({'type': 'x'}, ['head.bias.x'])]"
    )
    assert ask(folder, code) == [
        ["by_type"],
        ["by_type"],
        ["by_type", "by_key"],
        ["by_key"],
        [],
    ]


# ---------------------------------------------------------------- in-process registration


@dataclasses.dataclass
class ToyArgs:
    size: int = 1


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, plugins.PluginRecord]:
    fresh: dict[str, plugins.PluginRecord] = {}
    monkeypatch.setattr(plugins, "_registered", fresh)
    monkeypatch.setattr(plugins, "discover", list)
    return fresh


def toy(name: object = "toy", args_cls: object = ToyArgs) -> type:
    body = {method: lambda self, *a: None for method in ADAPTER_METHODS}
    init = {"__init__": lambda self, args, config, services: None}
    return type("Toy", (), {**body, **init, "name": name, "args_cls": args_cls, "__doc__": "Toy."})


def test_a_registered_class_is_found_like_an_installed_one(registry: object) -> None:
    cls = toy()
    assert plugins.register(cls) is cls
    plugins.register(cls)
    record = plugins.find("toy")
    assert plugins.registered() == ("toy",)
    assert record.load_class() is cls
    assert record.load_args() is ToyArgs
    assert record.manifest is not None
    assert record.manifest.summary == "Toy."
    assert plugins.inspect_all()[0]["dist"] == "in-process"


def test_a_manifest_may_come_with_the_class(registry: object) -> None:
    manifest = AdapterManifest("toy", "A toy.", "x:Toy", "x:Args", aliases=("plaything",))
    plugins.register(toy(), manifest)
    assert plugins.find("plaything").manifest == manifest
    with pytest.raises(PluginContractError, match="id must equal"):
        plugins.register(toy("other"), manifest)


def test_a_taken_id_is_refused(registry: object) -> None:
    plugins.register(toy())
    with pytest.raises(PluginContractError, match="'toy' is taken") as caught:
        plugins.register(toy())
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (3, "must be a class"),
        (toy(name=""), "name must be a non-empty string"),
        (toy(name=None), "name must be a non-empty string"),
        (toy(args_cls=None), "args_cls must be a dataclass"),
        (toy(args_cls=int), "args_cls must be a dataclass"),
        (type("Bare", (), {}), "Bare.name"),
    ],
)
def test_a_class_that_cannot_be_an_adapter_is_a_type_error(
    registry: dict[str, object], cls: type, words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        plugins.register(cls)
    assert registry == {}


def test_a_registered_copy_of_an_installed_target_is_no_duplicate(folder: Path) -> None:
    install(
        folder, "good", model=MODEL.replace("args_cls = Args", "args_cls = Args; name = 'good'")
    )
    code = (
        "from phyai import plugins\nfrom good_dist.model import Model\nplugins.register(Model)\n"
        "result = [plugins.find('good').dist, list(plugins.registered())]"
    )
    assert ask(folder, code) == ["good-dist", ["good"]]


def test_a_registered_stranger_of_an_installed_id_must_be_told_apart(folder: Path) -> None:
    install(folder, "good")
    code = (
        "from phyai import plugins\nfrom good_dist.model import Model, Args\n"
        "Mine = type('Mine', (Model,), {'name': 'good', 'args_cls': Args})\n"
        "plugins.register(Mine)\n"
        "result = [plugins.find('in-process:good').load_class().__name__]\n"
        "try:\n    plugins.find('good')\nexcept plugins.PluginError as exc:\n"
        "    result.append(str(exc))"
    )
    name, text = ask(folder, code)
    assert name == "Mine"
    assert "'in-process:good'" in text
    assert "'good-dist:good'" in text
