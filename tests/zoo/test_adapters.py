"""Every broken adapter: shown with its reason, refused with it, and caught by the kit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phyai import plugins
from phyai.errors import PluginError
from phyai.testing.conformance.report import run_checks
from phyai.testing.conformance.subject import Given, Subject
from phyai.testing.sandbox import Sandbox
from tests.zoo.adapters import LISTED, STARTED, install

EVERY = {**LISTED, **STARTED}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """Every broken plugin at once, a good one, and a stand-in for torch."""
    sandbox = Sandbox(tmp_path_factory.mktemp("zoo") / "site")
    install(sandbox, *EVERY)
    sandbox.adapter("good")
    sandbox.adapter("twin", dist="twin-one")
    sandbox.adapter("twin", dist="twin-two")
    sandbox.folder.joinpath("torch.py").touch()
    return sandbox


@pytest.fixture(scope="module")
def listed(zoo: Sandbox) -> dict[str, Any]:
    """What `phyai plugins --json` prints, by plugin id."""
    done = zoo.python("from phyai.cli.app import main\nmain(['plugins', '--json'])")
    assert done.returncode == 0, done.stderr
    return {record["id"]: record for record in json.loads(done.stdout)["plugins"]}


@pytest.fixture(scope="module")
def here(zoo: Sandbox) -> Iterator[None]:
    """This process sees the zoo."""
    with zoo.visible():
        yield


@pytest.mark.parametrize("name", EVERY)
def test_the_list_has_its_status_and_reason(name: str, listed: dict[str, Any]) -> None:
    broken, record = EVERY[name], listed[name]
    assert record["status"] == broken.status
    if broken.status == "ok":
        assert (record["error"], record["traceback"]) == ("", "")
    else:
        assert broken.words in record["error"]
        assert "Traceback" in record["traceback"]
        assert record["error"].splitlines()[0].split(" (")[0] in record["traceback"]


def test_the_good_one_beside_them_is_ok(listed: dict[str, Any]) -> None:
    assert listed["good"]["status"] == "ok"
    assert listed["twin"]["conflicts_with"] in (["twin-one"], ["twin-two"])
    reasons = {record["error"] for record in listed.values() if record["error"]}
    assert len(reasons) == len(LISTED) >= 10


def select(name: str) -> None:
    record = plugins.find(name)
    record.load_class()
    record.load_args()


@pytest.mark.parametrize("name", sorted(set(EVERY) - {"z_torch"}))
@pytest.mark.usefixtures("here")
def test_selecting_it_fails_with_its_own_error(name: str) -> None:
    with pytest.raises(PluginError) as caught:
        select(name)
    assert EVERY[name].words in str(caught.value)
    assert name in str(caught.value) or EVERY[name].status == "ok"


@pytest.mark.usefixtures("here")
def test_the_good_one_can_be_selected_and_the_twins_must_be_told_apart() -> None:
    assert plugins.find("good").load_class().__name__ == "Model"
    assert plugins.find("twin-two:twin").dist == "twin-two"
    with pytest.raises(PluginError, match=r"twin-one 1\.0 and twin-two 1\.0"):
        plugins.find("twin")


KIT = ("l0_can_be_selected", "l0_adapter_class_keeps_the_contract", "l0_manifest_imports_no_torch")


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.usefixtures("here")
def test_the_kit_catches_it(name: str) -> None:
    only = KIT if name == "z_torch" else KIT[:1] if EVERY[name].status != "ok" else KIT[:2]
    outcomes = run_checks(Subject(Given(name, tiny_checkpoint={})), only=only)
    failed = [o for o in outcomes if o.status == "failed"]
    assert len(failed) == 1
    assert EVERY[name].words in failed[0].message


@pytest.mark.usefixtures("here")
def test_the_kit_names_both_twins() -> None:
    (outcome,) = run_checks(Subject(Given("twin")), only=KIT[:1])
    assert outcome.status == "failed"
    assert "twin-one 1.0 and twin-two 1.0" in outcome.message


def test_no_word_is_shared_with_another(tmp_path: Path) -> None:
    """A message is proof of the right reason only when no other plugin's would pass as well."""
    words = [broken.words for broken in EVERY.values()]
    assert len(set(words)) == len(words)
