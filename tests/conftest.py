"""Settings of every test: Triton interpreter, one thread, golden folders, limit of one test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.golden_cases import UNKNOWN, GoldenCase, discover

# Read when triton and torch are imported; nothing above imports them.
os.environ["TRITON_INTERPRET"] = "1"
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

GOLDEN = Path(__file__).parent / "golden"
MAX_TEST_S = 300.0
NOT_BUILT_PROPERTY = "golden_not_built"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        metavar="DIR",
        help="run the golden tests on the cases of DIR alone: one set, or a folder of sets",
    )


def pytest_configure(config: pytest.Config) -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    given = config.getoption("golden_dir")
    if given is not None:
        folder = (config.invocation_params.dir / given).absolute()
        if not folder.is_dir():
            raise pytest.UsageError(f"--golden-dir must name a folder; got {given!r}.")
        config.option.golden_dir = str(folder)  # absolute, also for the processes of xdist


def golden_folders(config: pytest.Config, sets: tuple[str, ...]) -> list[Path]:
    """Return the folders whose cases run: DIR of --golden-dir alone, or the repository's sets."""
    given = config.getoption("golden_dir")
    return [Path(given)] if given is not None else [GOLDEN / name for name in sets]


def golden_cases(config: pytest.Config, sets: tuple[str, ...]) -> list[GoldenCase]:
    """Return every case of those folders."""
    return [case for folder in golden_folders(config, sets) for case in discover(folder)]


def _label(case: GoldenCase) -> str:
    root = case.set_root or case.path.parent
    return f"{root.name}/{case.path.relative_to(root).as_posix()}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test with a ``golden_case`` parameter every case of its module's ``GOLDEN_SETS``.

    The module's ``NOT_BUILT`` names the kinds that are listed instead of run. Without any case the
    test runs once with None, and has to fail.
    """
    if "golden_case" not in metafunc.fixturenames:
        return
    cases = [
        case
        for case in golden_cases(metafunc.config, metafunc.module.GOLDEN_SETS)
        if case.kind not in metafunc.module.NOT_BUILT
    ]
    params = [pytest.param(case, id=_label(case)) for case in cases]
    metafunc.parametrize("golden_case", params or [pytest.param(None, id="no case")])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    golden = "golden_case" in getattr(item, "fixturenames", ())
    if golden and (report.skipped or hasattr(report, "wasxfail")):
        report.outcome = "failed"
        report.longrepr = "A golden test must not be skipped or expected to fail."
        if hasattr(report, "wasxfail"):
            del report.wasxfail
    if report.passed and call.duration > MAX_TEST_S:
        report.outcome = "failed"
        report.longrepr = (
            f"One test must end within {MAX_TEST_S:.0f} s; took {call.duration:.0f} s."
        )
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the golden cases whose kind is not built yet; nothing else may stay unconsumed."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    listed = {
        str(value)
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == NOT_BUILT_PROPERTY
    }
    if listed:
        terminalreporter.section("golden cases of kinds that are not built yet")
        for line in sorted(listed):
            terminalreporter.line(line)


@pytest.fixture
def unconsumed_golden_cases(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> list[str]:
    """Return one line per case that no golden test of the module consumes; empty is right."""
    module = request.module
    config = request.config
    lines = []
    for folder in golden_folders(config, module.GOLDEN_SETS):
        if not discover(folder):
            lines.append(f"{folder.name}: holds no case file")
    for case in golden_cases(config, module.GOLDEN_SETS):
        if case.kind in module.NOT_BUILT:
            record_property(NOT_BUILT_PROPERTY, f"{_label(case)}: {module.NOT_BUILT[case.kind]}")
        elif case.kind == UNKNOWN:
            lines.append(f"{_label(case)}: unknown kind: {case.problem}")
        elif case.kind not in module.KINDS:
            lines.append(f"{_label(case)}: no test consumes kind {case.kind!r}")
    return lines
