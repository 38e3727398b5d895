"""Discovery with real distributions in a fresh interpreter: one broken plugin breaks no other."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from phyai import plugins
from phyai.errors import PluginContractError, PluginError, PluginNotFound
from phyai.manifest import AdapterManifest
from phyai.plugin_rules import ADAPTER_METHODS, check_adapter_class
from tests.core.sandbox import ask, error_of, make_distribution, run_python

PLUGIN = """
from phyai.hooks import AdapterManifest, hookimpl

@hookimpl
def phyai_adapter():
    return AdapterManifest(id={id!r}, summary="A toy.", target={target!r}, args={args!r}{more})
"""

MODEL = """
from dataclasses import dataclass

@dataclass
class Args:
    size: int = 1

class Model:
    args_cls = Args
    def __init__(self, args, config, services): pass
""" + "".join(f"    def {name}(self, *a): pass\n" for name in ADAPTER_METHODS)


def source(plugin_id: str, package: str, more: str = "") -> str:
    return PLUGIN.format(
        id=plugin_id, target=f"{package}.model:Model", args=f"{package}.model:Args", more=more
    )


def install(
    folder: Path,
    plugin_id: str,
    code: str | None = None,
    *,
    dist: str | None = None,
    version: str = "1.0",
    more: str = "",
    model: str = MODEL,
) -> None:
    """Install distribution ``dist`` (default ``<id>-dist``) with one adapter plugin."""
    dist = dist or f"{plugin_id}-dist"
    package = dist.replace("-", "_")
    code = source(plugin_id, package, more) if code is None else code
    make_distribution(
        folder,
        dist,
        version,
        {f"{package}.plugin": code, f"{package}.model": model},
        {"phyai.plugins": {plugin_id: f"{package}.plugin"}},
    )


def install_hooks(folder: Path, name: str, code: str, *, dist: str | None = None) -> None:
    dist = dist or f"{name}-dist"
    package = dist.replace("-", "_")
    make_distribution(
        folder, dist, "1.0", {f"{package}.hooks": code}, {"phyai.hooks": {name: f"{package}.hooks"}}
    )


STATUS = """
from phyai import plugins
rows = plugins.inspect_all()
result = {row["id"]: [row["status"], row["error"]] for row in rows}
"""

DUE = "from phyai.hooks import hookimpl\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "site"


# ---------------------------------------------------------------- listing


def test_listing_imports_no_plugin(folder: Path) -> None:
    install(folder, "good")
    install(folder, "loud", "raise SystemExit('imported')")
    result = ask(
        folder,
        "import sys\nfrom phyai import plugins\n"
        "result = [[r.id, r.dist, r.version, r.value, r.status] for r in plugins.discover()]\n"
        "result += [list(plugins.registered())]\n"
        "result += [[n for n in sys.modules if n.startswith(('good', 'loud', 'torch'))]]",
    )
    assert result == [
        ["good", "good-dist", "1.0", "good_dist.plugin", "ok"],
        ["loud", "loud-dist", "1.0", "loud_dist.plugin", "ok"],
        ["good", "loud"],
        [],
    ]


def test_finding_one_imports_no_other_and_no_model(folder: Path) -> None:
    install(folder, "good")
    install(folder, "other")
    result = ask(
        folder,
        "import sys\nfrom phyai import plugins\nrecord = plugins.find('good')\n"
        "result = [record.manifest.summary, record.version,\n"
        "          sorted(n for n in sys.modules if n.startswith(('good', 'other')))]",
    )
    assert result == ["A toy.", "1.0", ["good_dist", "good_dist.plugin"]]


def test_classes_load_on_demand(folder: Path) -> None:
    install(folder, "good")
    code = (
        "from phyai import plugins\nrecord = plugins.find('good')\n"
        "result = [record.load_class().__name__, record.load_args().__name__]"
    )
    assert ask(folder, code) == ["Model", "Args"]


# ---------------------------------------------------------------- broken ones, side by side

BROKEN = {
    "absent": ("import no_such_module", "import-error", "ModuleNotFoundError"),
    "syntax": ("def broken(:", "import-error", "SyntaxError"),
    "quits": ("raise SystemExit(3)", "import-error", "SystemExit: 3"),
    "empty": ("", "invalid", "must implement phyai_adapter()"),
    "adapt0r": (
        DUE + "@hookimpl\ndef phyai_adaptor(): return None",
        "invalid",
        "Did you mean 'phyai_adapter'",
    ),
    "unmarked": ("def phyai_adapter(): return None", "invalid", "@hookimpl"),
    "nothing": (
        DUE + "@hookimpl\ndef phyai_adapter(): return {}",
        "invalid",
        "must return an AdapterManifest; got dict",
    ),
    "raises": (
        DUE + "@hookimpl\ndef phyai_adapter(): return 1 / 0",
        "invalid",
        "ZeroDivisionError",
    ),
    "badarg": (
        source("badarg", "badarg_dist") + "@hookimpl\ndef phyai_solver(adaptor): return None",
        "invalid",
        "no argument 'adaptor'. Did you mean 'adapter'",
    ),
    "misspelt": (
        source("misspelt", "misspelt_dist") + "@hookimpl\ndef phyai_solvr(adapter): return None",
        "invalid",
        "Did you mean 'phyai_solver'",
    ),
    "major": (source("major", "major_dist", ", api=(2, 0)"), "incompatible", "phyai-core"),
    "oldmajor": (source("oldmajor", "x", ", api=(0, 9)"), "incompatible", "Upgrade the plugin"),
    "minor": (source("minor", "minor_dist", ", api=(1, 99)"), "incompatible", "Upgrade phyai-core"),
    "renamed": (source("other_id", "renamed_dist"), "invalid", "id must equal"),
    "torchy": ("import torch\n" + source("torchy", "torchy_dist"), "invalid", "import torch"),
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All broken plugins, a good one, and a stand-in for torch."""
    folder = tmp_path_factory.mktemp("zoo") / "site"
    install(folder, "good")
    (folder / "torch.py").write_text("")
    for name, (code, _, _) in BROKEN.items():
        install(folder, name, code)
    make_distribution(
        folder,
        "attr-dist",
        "1.0",
        {"attr_dist": MODEL},
        {"phyai.plugins": {"attr": "attr_dist:Model"}},
    )
    damaged = make_distribution(folder, "damaged-dist", "1.0", {}, {"phyai.plugins": {}})
    (damaged / "entry_points.txt").write_text("[phyai.plugins]\nthis line has no value\n")
    return folder


@pytest.fixture(scope="module")
def zoo_status(zoo: Path) -> dict[str, list[str]]:
    statuses: dict[str, list[str]] = ask(zoo, STATUS)
    return statuses


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_has_its_status_and_reason(
    zoo_status: dict[str, list[str]], name: str
) -> None:
    _, status, words = BROKEN[name]
    assert zoo_status[name][0] == status
    assert words in zoo_status[name][1]


def test_a_good_plugin_beside_all_broken_ones_works(
    zoo: Path, zoo_status: dict[str, list[str]]
) -> None:
    assert zoo_status["good"] == ["ok", ""]
    code = "from phyai import plugins\nresult = plugins.find('good').load_class().__name__"
    assert ask(zoo, code) == "Model"


def test_an_entry_point_to_a_class_is_explained(zoo_status: dict[str, list[str]]) -> None:
    assert zoo_status["attr"][0] == "invalid"
    assert "must name a module" in zoo_status["attr"][1]


def test_damaged_metadata_of_one_distribution_is_reported(zoo_status: dict[str, list[str]]) -> None:
    assert zoo_status["damaged-dist"][0] == "invalid"


@pytest.mark.parametrize("name", ["absent", "quits", "raises", "badarg", "major", "torchy"])
def test_selecting_a_broken_plugin_fails_with_its_own_error(zoo: Path, name: str) -> None:
    error = error_of(zoo, f"plugins.find({name!r})")
    assert "PluginError" in error["types"]
    assert all(word in error["text"] for word in [repr(name), f"{name}-dist 1.0", BROKEN[name][2]])
    assert error["cause"] != "NoneType"


def test_a_torch_importer_stays_invalid_when_asked_again(zoo: Path) -> None:
    code = (
        "from phyai import plugins\n"
        "record = next(r for r in plugins.discover() if r.id == 'torchy')\n"
        "result = [plugins.load(record).status, plugins.load(record).status]"
    )
    assert ask(zoo, code) == ["invalid", "invalid"]


def test_a_process_that_has_torch_already_accuses_nobody(zoo: Path) -> None:
    assert ask(zoo, "import torch" + STATUS)["good"] == ["ok", ""]


def test_inspect_all_is_json_with_manifest_and_traceback(zoo: Path) -> None:
    rows = {
        row["id"]: row
        for row in ask(zoo, "from phyai import plugins\nresult = plugins.inspect_all()")
    }
    assert rows["good"]["manifest"]["target"] == "good_dist.model:Model"
    assert rows["good"]["manifest"]["api"] == [1, 0]
    assert rows["good"]["traceback"] == ""
    assert rows["absent"]["manifest"] is None
    assert "import no_such_module" in rows["absent"]["traceback"]
    assert rows["absent"]["dist"] == "absent-dist"


def test_output_of_a_chatty_plugin_does_not_spoil_json(folder: Path) -> None:
    install(folder, "chatty", "print('hello')\n" + source("chatty", "chatty_dist"))
    done = run_python(
        folder, "import json\nfrom phyai import plugins\nprint(json.dumps(plugins.inspect_all()))"
    )
    assert json.loads(done.stdout)[0]["status"] == "ok"


# ---------------------------------------------------------------- the adapter class


@pytest.mark.parametrize(
    ("model", "what", "types", "words"),
    [
        ("import no_such_module", "load_class", "PluginError", "ModuleNotFoundError: No module"),
        ("class Modell: pass", "load_class", "PluginContractError", "Did you mean 'Modell'"),
        ("Model = 3", "load_class", "PluginContractError", "must be a class; got int"),
        (
            MODEL.replace("def denoiser", "def denoize").replace("def load(", "def lode("),
            "load_class",
            "PluginContractError",
            "lacks load(), denoiser()",
        ),
        (
            "class Model:\n    def setup(self, args): pass\n    def step(self, request): pass",
            "load_class",
            "PluginContractError",
            "is an Entry",
        ),
        (
            MODEL.replace("args, config, services", "args"),
            "load_class",
            "PluginContractError",
            "Model(args, config, services)",
        ),
        (
            MODEL.replace("args_cls = Args", "name = 'bett'"),
            "load_class",
            "PluginContractError",
            "name must equal the plugin id; got 'bett'",
        ),
        ("class Args: pass", "load_args", "PluginContractError", "must name a dataclass"),
    ],
)
def test_a_bad_target_is_explained(
    folder: Path, model: str, what: str, types: str, words: str
) -> None:
    install(folder, "beta", model=model)
    error = error_of(folder, f"plugins.find('beta').{what}()")
    assert types in error["types"]
    assert words in error["text"]
    assert "'beta'" in error["text"]


def test_an_abstract_method_counts_as_missing() -> None:
    import abc

    body = dict.fromkeys(ADAPTER_METHODS, lambda self: None)
    body["solver"] = abc.abstractmethod(lambda self: None)  # type: ignore[assignment]
    cls = abc.ABCMeta("Half", (), {**body, "__init__": lambda self, args, config, services: None})
    with pytest.raises(PluginContractError, match=r"lacks solver\(\)"):
        check_adapter_class(cls, "half")


def test_the_base_adapters_two_duties_must_be_overridden() -> None:
    from phyai.adapter import Adapter  # imports torch, which only this test needs

    class Half(Adapter):
        def prepare(self, request: object) -> None: ...

    class Whole(Half):
        def denoiser(self) -> None: ...

    with pytest.raises(PluginContractError, match=r"lacks denoiser\(\)\."):
        check_adapter_class(Half, "half")
    assert check_adapter_class(Whole, "whole") is Whole


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


# ---------------------------------------------------------------- hook plugins

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
    ]
    assert len(problems) == len(expected)
    assert all(words in line for words, line in zip(expected, problems, strict=True))


def test_errors_are_the_public_ones() -> None:
    assert issubclass(plugins.DuplicatePluginError, PluginContractError)
    assert issubclass(PluginContractError, PluginError)
