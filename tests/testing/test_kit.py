"""The correct policy passes everything, by the class and by the command; reports read well."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phyai import binding, plugins
from phyai.testing import AdapterConformance
from phyai.testing.__main__ import main
from phyai.testing.conformance import CHECKS, report
from phyai.testing.conformance.check import Check, Failure, NotApplicable, run_check
from phyai.testing.conformance.subject import Given, Subject
from phyai.testing.sandbox import Sandbox
from tests.core.toy_adapter import ToyAdapter, registry
from tests.native_cache import share_native
from tests.testing import mutants_sessions, policies

DECLARED_NOWHERE = {
    "l0_hook_modules_import_no_torch",
    "l2_compiled_regions_equal_eager",
    "l2_cuda_graphs_equal_eager",
    *mutants_sessions.ALL,
}
"""Checks that do not apply to the correct policy on a machine without a GPU."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    sandbox = Sandbox(tmp_path_factory.mktemp("kit") / "site")
    policies.install(sandbox)
    with sandbox.visible():
        yield sandbox


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    policies.checkpoint(folder)
    return policies.golden_set(folder, policies.reference(folder))


# ---------------------------------------------------------------- the correct policy


@pytest.mark.usefixtures("site")
class TestCorrectPolicy(AdapterConformance):
    """As an author would write it, with everything given."""

    manifest = policies.PLUGIN

    @pytest.fixture
    def tiny_checkpoint(self, site: Sandbox, weights: Path) -> Path:
        return weights

    @pytest.fixture
    def sample_requests(self) -> list[Any]:
        return policies.requests()

    @pytest.fixture
    def golden_dir(self, weights: Path) -> Path:
        return weights

    @pytest.fixture
    def reference(self, weights: Path) -> Any:
        return policies.reference(weights)


@pytest.mark.parametrize("level", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_command_runs_every_check(
    level: int, site: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_native(tmp_path / "cache")
    monkeypatch.setenv("PHYAI_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "report.json"
    assert main([policies.PLUGIN, "--level", str(level), "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert {k: written[k] for k in ("plugin", "dist", "version", "level", "ok")} == {
        "plugin": "toy_policy",
        "dist": "toy-policy",
        "version": "1.0",
        "level": level,
        "ok": True,
    }
    names = [check.name for check in CHECKS if check.level <= level]
    assert [row["name"] for row in written["checks"]] == names
    left_out = {row["name"] for row in written["checks"] if row["status"] != "passed"}
    given_nowhere = {"l2_goldens_are_kept", "l2_reference_is_matched"}
    gpu = {"l2_cuda_graphs_equal_eager"}
    assert left_out - gpu == (DECLARED_NOWHERE | given_nowhere) & set(names) - gpu
    for row in written["checks"]:
        assert set(row) == {"level", "name", "status", "message", "seconds"}
        assert bool(row["message"]) == (row["status"] != "passed")


def test_the_class_has_a_method_per_check_and_leaves_out_higher_levels() -> None:
    class Low(AdapterConformance):
        manifest = "x"
        level = 1

    class High(Low):
        level = 3

    for check in CHECKS:
        method = getattr(Low, f"test_{check.name}")
        assert (method is None) == (check.level > 1)
        whole = getattr(AdapterConformance, f"test_{check.name}")
        assert whole.__doc__ == check.run.__doc__
        assert getattr(High, f"test_{check.name}") is whole
        assert check.summary.endswith(".")


AUTHORS = """
import pytest
from phyai.testing import AdapterConformance

def constant(request, noise):
    return 0.0 * noise["action"]

class TestOne(AdapterConformance):
    manifest = {plugin!r}
    reference = constant

class TestTwo(AdapterConformance):
    manifest = {plugin!r}
    tiny_checkpoint = {empty!r}

@pytest.fixture
def golden_dir(tmp_path):
    return tmp_path  # without cases
"""


@pytest.mark.slow
def test_what_the_class_leaves_out_is_asked_of_its_module(
    phyai_sandbox: Sandbox, tmp_path: Path
) -> None:
    """A function is taken as it is, a fixture of the module is found, and -k hides no failure."""
    policies.install(phyai_sandbox)
    (tmp_path / "empty").mkdir()
    file = tmp_path / "test_it.py"
    file.write_text(AUTHORS.format(plugin=policies.PLUGIN, empty=str(tmp_path / "empty")))
    names = "reference_is or goldens_are or results_are_well"
    share_native(tmp_path / "cache")
    done = phyai_sandbox.python(
        "import sys, pytest\n"
        f"sys.exit(pytest.main(['-q', '-rA', '-p', 'no:cacheprovider', '-k', {names!r}, "
        f"'--rootdir', {str(tmp_path)!r}, '--import-mode=importlib', {str(file)!r}]))",
        isolated=False, PHYAI_CACHE=str(tmp_path / "cache"), OMP_NUM_THREADS="1",
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines()]
    ends = [(words[1].partition("::")[2], words[0]) for words in lines if "::" in "".join(words)]
    assert dict(ends) == {
        "TestOne::test_l2_results_are_well_formed": "PASSED",
        "TestOne::test_l2_goldens_are_kept": "FAILED",
        "TestOne::test_l2_reference_is_matched": "FAILED",
        "TestTwo::test_l2_results_are_well_formed": "FAILED",
        "TestTwo::test_l2_goldens_are_kept": "FAILED",
        "TestTwo::test_l2_reference_is_matched": "FAILED",
    }, done.stdout
    # The summary repeats the messages where it is not cut to a terminal's width.
    told = "\n".join(x for x in done.stdout.splitlines() if not x.startswith("FAILED"))
    assert told.count("golden_dir must hold cases") == 1
    assert told.count("must equal the reference") == 1
    assert told.count("\nthe engine must start") == 3  # what -k left out, thrice


# ---------------------------------------------------------------- what the author sees


def test_a_failure_says_why_and_what_to_do(
    site: Sandbox, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "case_nothing.safetensors").write_bytes(
        (weights / "case_one.safetensors").read_bytes()
    )
    file = tmp_path / "report.json"
    arguments = ["--checkpoint", str(weights), "--golden-dir", str(tmp_path), "--json", str(file)]
    code = main([policies.PLUGIN, *arguments, "--only", "l2_goldens*", "--only", "l1_loads"])
    assert code == 1  # the golden root has no weights beside its case
    shown = capsys.readouterr().out
    assert "pass     l1_loads" in shown
    assert "FAIL     l2_goldens_are_kept" in shown
    assert "2 checks: 1 passed, 1 failed." in shown
    found = json.loads(file.read_text())
    assert not found["ok"]
    assert found["checks"][1]["status"] == "failed"


def test_a_golden_case_that_nothing_compares_is_a_failure(site: Sandbox, weights: Path) -> None:
    other = weights / "preprocess_other.json"
    other.write_text("{}")
    try:
        subject = Subject(Given(policies.PLUGIN, tiny_checkpoint=weights, golden_dir=weights))
        (outcome,) = report.run_checks(subject, only=["l2_goldens_are_kept"])
        subject.close()
    finally:
        other.unlink()
    assert outcome.status == "failed"
    assert "must be compared; preprocess_other.json" in outcome.message


def test_a_check_that_is_not_run_is_told_with_its_cause(site: Sandbox, tmp_path: Path) -> None:
    subject = Subject(Given(policies.PLUGIN, tiny_checkpoint=tmp_path))
    outcomes = report.run_checks(subject, only=["l2_requests_succeed", "l2_goldens*"])
    assert [(o.name, o.status) for o in outcomes] == [
        ("l1_loads", "failed"),
        ("l2_requests_succeed", "not-run"),
        ("l2_goldens_are_kept", "not-run"),
    ]


def test_two_eager_runs_are_no_comparison_of_graphs(
    site: Sandbox, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from correct_policy.model import Features, Network

    for part in (Features, Network):
        monkeypatch.setattr(part, "capture_safe", False, raising=False)
    subject = Subject(
        Given(policies.PLUGIN, tiny_checkpoint=weights, sample_requests=policies.requests())
    )
    outcomes = report.run_checks(subject, only=["l2_recorded*"])
    subject.close()
    assert [o.status for o in outcomes] == ["not-applicable"]
    assert "capture_safe = False" in outcomes[0].message


def test_wrong_usage_is_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["toy_policy", "--checkpoint", str(tmp_path / "nowhere")]) == 2
    assert "--checkpoint must name a folder" in capsys.readouterr().err
    assert main(["toy_policy", "--only", "l9_*"]) == 2
    assert "must match a check" in capsys.readouterr().err
    assert main(["toy_policy", "--json", str(tmp_path / "nowhere" / "report.json")]) == 2
    assert "--json must be in a folder" in capsys.readouterr().err


def test_an_unknown_plugin_fails_once_and_nothing_else_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert main(["no_such_plugin", "--json", str(file)]) == 1
    found = json.loads(file.read_text())
    assert found["dist"] is None
    statuses = {row["name"]: row["status"] for row in found["checks"]}
    assert statuses["l0_can_be_selected"] == "failed"
    assert "'no_such_plugin' is not installed" in capsys.readouterr().out
    rest = {status for name, status in statuses.items() if not name.startswith("l0_")}
    assert rest == {"not-run"}


def test_a_class_of_this_process_is_no_package() -> None:
    with registry():
        plugins.register(ToyAdapter)
        subject = Subject(Given("toy"))
        outcomes = {o.name: o for o in report.run_checks(subject, level=0)}
    assert outcomes["l0_can_be_selected"].status == "passed"
    installed = outcomes["l0_entry_point_is_installed"]
    assert installed.status == "failed"
    assert 'entry-points."phyai.plugins"' in installed.message


def test_another_manifest_than_the_installed_one(site: Sandbox) -> None:
    from dataclasses import replace

    manifest = plugins.find(policies.PLUGIN).manifest
    assert manifest is not None
    for given, status in ((manifest, "passed"), (replace(manifest, summary="other"), "failed")):
        (outcome,) = report.run_checks(Subject(Given(given)), only=["l0_can_be_selected"])
        assert outcome.status == status


def test_hook_modules_of_the_distribution_are_looked_at(phyai_sandbox: Sandbox) -> None:
    hook = "from phyai.hooks import hookimpl\n@hookimpl\ndef phyai_engine_ready(): pass\n"
    for name, source, status in (
        ("fine", hook, "passed"),
        ("heavy", "import torch\n", "failed"),
    ):
        sandbox = Sandbox(phyai_sandbox.folder / name)
        sandbox.distribution(
            "two-things",
            {
                "two_things.plugin": "from phyai.hooks import AdapterManifest, hookimpl\n"
                "@hookimpl\ndef phyai_adapter():\n"
                "    return AdapterManifest('two', 'A toy.', 'two_things.model:M', "
                "'two_things.model:A')\n",
                "two_things.hooks": source,
            },
            {
                "phyai.plugins": {"two": "two_things.plugin"},
                "phyai.hooks": {"two-hooks": "two_things.hooks"},
            },
        )
        (sandbox.folder / "torch.py").touch()  # what a fresh interpreter imports, at once
        with sandbox.visible():
            (outcome,) = report.run_checks(
                Subject(Given("two")), only=["l0_hook_modules_import_no_torch"]
            )
        assert outcome.status == status, outcome.message
    assert "must not import torch" in outcome.message


def test_a_broken_checkpoint_folder_stops_at_load(site: Sandbox, tmp_path: Path) -> None:
    subject = Subject(Given(policies.PLUGIN, tiny_checkpoint=tmp_path))
    outcomes = {o.name: o for o in report.run_checks(subject, only=["l1_*", "l2_*"])}
    assert outcomes.pop("l1_loads").status == "failed"
    assert {o.status for o in outcomes.values()} == {"not-run"}


def test_pluggy_on_the_request_path_is_noticed(
    site: Sandbox, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core that asks the hooks again during a request."""
    bind = binding.HookBinder.validators

    def asking(self: binding.HookBinder) -> list[Any]:
        manager = self._managers[0]

        def ask(chunk: Any) -> None:
            manager.hook.phyai_validate_action(chunk=chunk, adapter=self.adapter)

        return [*bind(self), binding.Validator("asking", ask)]

    monkeypatch.setattr(binding.HookBinder, "validators", asking)
    subject = Subject(
        Given(policies.PLUGIN, tiny_checkpoint=weights, sample_requests=policies.requests())
    )
    (outcome,) = report.run_checks(subject, only=["l2_requests_pass_by_pluggy"])
    subject.close()
    assert outcome.status == "failed"
    assert "must not go through pluggy" in outcome.message


# ---------------------------------------------------------------- checks and runs


def test_how_a_check_ends() -> None:
    def fails(subject: Any) -> None:
        raise Failure("a rule")

    def leaves(subject: Any) -> None:
        raise NotApplicable("nothing declared")

    def breaks(subject: Any) -> None:
        raise KeyError("x")

    checks = [Check(0, f.__name__, f) for f in (fails, leaves, breaks, lambda s: None)]
    subject: Any = SimpleNamespace()
    outcomes = [run_check(check, subject) for check in checks]
    assert [o.status for o in outcomes] == ["failed", "not-applicable", "failed", "passed"]
    assert [o.message for o in outcomes] == ["a rule", "nothing declared", "KeyError: 'x'", ""]
    assert "breaks" in outcomes[2].traceback
    assert not report.all_passed(outcomes)
    assert not report.all_passed(outcomes[1:2])
    assert report.all_passed(outcomes[3:])


def test_names_and_needs_are_known() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert {need for check in CHECKS for need in check.needs} <= set(names)


@pytest.mark.slow
def test_the_pytest_plugin_is_light_and_gives_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n\n"
        "def test_sandbox(phyai_sandbox):\n"
        "    assert 'torch' not in sys.modules\n"
        "    phyai_sandbox.adapter('toy')\n"
        "    answer = phyai_sandbox.ask('from phyai import plugins\\n'\n"
        "                               'result = plugins.registered()')\n"
        "    assert answer == ['toy']\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "phyai.testing.pytest_plugin",
         "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_distribution_offers_the_pytest_plugin() -> None:
    import tomllib

    text = (Path(__file__).parents[2] / "phyai-core/pyproject.toml").read_text()
    points = tomllib.loads(text)["project"]["entry-points"]["pytest11"]
    assert set(points) == set(points.values()) == {"phyai.testing.pytest_plugin"}
