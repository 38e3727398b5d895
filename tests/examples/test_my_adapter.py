"""examples/my_adapter is the scaffold, grown; docs/write-an-adapter.md tells it as it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from phyai.scaffold import Name, write_adapter
from tests.examples.installed import ROOT
from tests.native_cache import share_native

PROJECT = ROOT / "examples" / "my_adapter"
PAGE = (ROOT / "docs" / "write-an-adapter.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"```console\n(.*?)```", PAGE, re.S) for line in block.splitlines()
]
MAX_COMMANDS = 8
GROWN = {"plugin.py", "presets.py"}
"""Sources that the example changed; all others are those of a new package."""


def test_example_is_the_scaffold_grown(tmp_path: Path) -> None:
    write_adapter(Name("my_policy"), "vla", tmp_path / "new")
    same = 0
    for path in sorted((tmp_path / "new/src/my_policy").iterdir()):
        ours = PROJECT / "src/my_policy" / path.name
        if path.name not in GROWN:
            assert ours.read_text() == path.read_text(), f"{path.name} differs from the template"
            same += 1
    assert same >= 6
    for name in ("pyproject.toml", ".github/workflows/test.yml", "tests/test_conformance.py"):
        assert (PROJECT / name).read_text() == (tmp_path / "new" / name).read_text(), name


def test_code_of_the_page_is_that_of_the_example() -> None:
    blocks = re.findall(r"<!-- (\S+) -->\n```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == PAGE.count("```python") >= 8
    for file, code in blocks:
        text = (PROJECT / file).read_text(encoding="utf-8")
        indented = (textwrap.indent(code, " " * depth) for depth in (0, 4))
        assert any(each in text for each in indented), f"{file} no longer holds:\n{code}"


def test_links_of_the_page_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (ROOT / "docs" / link.partition("#")[0]).exists(), link


def test_page_takes_few_commands() -> None:
    assert 5 <= len(COMMANDS) <= MAX_COMMANDS


@pytest.mark.slow
def test_commands_of_the_page_work(tmp_path: Path) -> None:
    """They run as written, in a throw-away environment without an index."""
    environment = _environment(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    ran = []
    for command in COMMANDS:
        if command == "python train.py":
            continue
        if command.startswith("cd "):
            work = work / command.removeprefix("cd ")
        else:
            out = _run(command, work, environment)
            if "phyai run" in command:
                assert "vx" in out
        ran.append(command)
    assert len(ran) == len(COMMANDS) - 1


@pytest.mark.slow
def test_training_makes_a_policy_that_does_its_task(tmp_path: Path) -> None:
    environment = _environment(tmp_path)
    project = tmp_path / "my_adapter"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("trained", "__pycache__"))
    _run("pip install -e .", project, environment)
    assert "python train.py" in COMMANDS
    _run("python train.py", project, environment)
    _run("pytest -q tests/test_policy.py", project, environment)


def _environment(tmp_path: Path) -> dict[str, str]:
    """Make a virtual environment over this one's packages; return variables that select it."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    below = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (site / "below.pth").write_text(below)
    for name, module in (("pip", "pip"), ("pytest", "pytest"), ("phyai", "phyai.cli.app")):
        start = "from phyai.cli.app import main" if name == "phyai" else ""
        call = "sys.exit(main())" if start else f"runpy.run_module({module!r}, run_name='__main__')"
        script = folder / "bin" / name
        script.write_text(f"#!{folder}/bin/python\nimport runpy, sys\n{start}\n{call}\n")
        script.chmod(0o755)
    share_native(tmp_path / "cache")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PHYAI_", "PYTHON"))}
    return {
        **inherited,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PHYAI_CACHE": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads "0" as: no isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def _run(command: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
