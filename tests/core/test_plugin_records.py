"""Listing and loading: each broken plugin has its status and breaks no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.core.sandbox import (
    DUE,
    MODEL,
    STATUS,
    ask,
    error_of,
    install,
    make_distribution,
    run_python,
    source,
)


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
    "unmarked_misspelt": (
        source("unmarked_misspelt", "unmarked_misspelt_dist") + "def phyai_solvr(): return None",
        "invalid",
        "not marked as a hook. Did you mean 'phyai_solver'",
    ),
    "newfield": (
        source("newfield", "newfield_dist", ", colour='red'"),
        "invalid",
        "has no field 'colour' in adapter API 1.0",
    ),
    "nocost": (
        source("nocost", "nocost_dist", ", cost='no path'"),
        "invalid",
        "cost must look like 'package.module:Name'",
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
    code = source("chatty", "chatty_dist")
    code = code.replace("    return", "    print('hello')\n    return")
    install(folder, "chatty", "print('hello')\n" + code)
    done = run_python(
        folder, "import json\nfrom phyai import plugins\nprint(json.dumps(plugins.inspect_all()))"
    )
    assert json.loads(done.stdout)[0]["status"] == "ok"
