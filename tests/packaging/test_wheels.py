"""The distributions as users install them: disjoint wheels, every mix of regular and editable.

Each environment is a fresh one without pip. It sees the dependencies of the running interpreter
through a folder of links that leaves out PhyAI itself, so nothing is downloaded and nothing of the
development installation shows through.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CORE, MODEL = ROOT / "phyai-core", ROOT / "phyai-models-pi"
GROOT, MINICPM = ROOT / "phyai-models-groot", ROOT / "phyai-models-minicpm"
COSMOS = ROOT / "phyai-models-cosmos"
GATEWAY = ROOT / "phyai-gateway"
REPORT = """
import importlib.metadata as m, json
import phyai, phyai.errors
points = m.entry_points(group="phyai.plugins")
found = {"plugins": sorted(p.name for p in points), "core": phyai.__file__}
found["version"] = [phyai.__version__, m.version("phyai-core")]
try:
    import phyai.models.pi05
    found["model"] = list(phyai.models.pi05.__path__)[0]
    found["loaded"] = [p.load().__name__ for p in sorted(points, key=lambda p: p.name)]
except ModuleNotFoundError as error:
    found["model"] = error.name
print(json.dumps(found))
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return its output; its errors end the test."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST_"))}
    env |= {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@dataclass(frozen=True)
class Environment:
    """A fresh virtual environment with the dependencies of this one, but without PhyAI."""

    python: Path

    def pip(self, *arguments: str | Path) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, *arguments)

    def install(self, *what: str | Path) -> None:
        options = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
        self.pip("install", *options, *what)

    def report(self, cwd: Path) -> dict[str, object]:
        found: dict[str, object] = json.loads(run(self.python, "-I", "-c", REPORT, cwd=cwd))
        return found


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of links to everything installed here, except PhyAI."""
    folder = tmp_path_factory.mktemp("dependencies")
    for site in (Path(p) for p in sys.path if p.endswith(("site-packages", "dist-packages"))):
        for entry in site.iterdir():
            own = "phyai" in entry.name.lower()
            if not own and entry.suffix != ".pth" and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture
def environment(tmp_path: Path, dependencies: Path) -> Environment:
    folder = tmp_path / "env"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin/python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    return Environment(python)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build every wheel once."""
    folder = tmp_path_factory.mktemp("wheels")
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet", "-w", folder)
    run(
        sys.executable, "-m", "pip", "wheel", *options, CORE, MODEL, GROOT, MINICPM, COSMOS, GATEWAY
    )
    found = {path.name.split("-")[0]: path for path in folder.glob("*.whl")}
    names = ("cosmos", "groot", "minicpm", "pi")
    models = [f"phyai_models_{name}" for name in names]
    assert sorted(found) == ["phyai_core", "phyai_gateway", *models]
    return found


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheels_share_no_path(wheels: dict[str, Path]) -> None:
    inside = [contents(wheel) for wheel in wheels.values()]
    assert sum(map(len, inside)) == len(set().union(*inside))


def test_core_wheel_holds_the_whole_package_and_no_model(wheels: dict[str, Path]) -> None:
    names = contents(wheels["phyai_core"])
    assert [name for name in names if name.startswith("phyai/models")] == []
    own = [name for name in names if not name.startswith("phyai/scaffold/templates/")]
    assert not any("tests" in name or name.endswith(".pyc") for name in own)
    source = CORE / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "phyai").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert files <= names
    assert {"phyai/__init__.py", "phyai/py.typed"} <= files
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_gateway_wheel_holds_the_whole_package_and_nothing_else(wheels: dict[str, Path]) -> None:
    names = contents(wheels["phyai_gateway"])
    source = GATEWAY / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "phyai_gateway").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in names if not name.startswith("phyai_gateway-")} == files
    page = {
        f"phyai_gateway/status_page/{name}" for name in ("index.html", "status.js", "status.css")
    }
    protocol = {f"phyai_gateway/proto/{name}_v1.proto" for name in ("robot_inference", "contracts")}
    assert {"phyai_gateway/py.typed", *page, *protocol} <= files
    assert any(name.endswith("licenses/LICENSE") for name in names)


GATEWAY_REPORT = """
import importlib.metadata as m, json, sys
from phyai_gateway import running
from phyai_gateway.listeners import find_listener
from phyai_gateway.version import VERSION
kinds = [find_listener(name).name for name in sorted(running.protocols())]
print(json.dumps([kinds, VERSION == m.version("phyai-gateway"), "phyai" in sys.modules]))
"""


def test_the_gateway_runs_without_core(
    environment: Environment, wheels: dict[str, Path], tmp_path: Path
) -> None:
    environment.install(wheels["phyai_gateway"])
    kinds, same_version, has_core = json.loads(
        run(environment.python, "-I", "-c", GATEWAY_REPORT, cwd=tmp_path)
    )
    own = ["gr00t", "kserve", "kserve-grpc", "lerobot", "native", "openpi", "rlinf", "robot"]
    assert kinds == own
    assert (same_version, has_core) == (True, False)
    command = environment.python.parent / "phyai-gateway"
    assert "native" in run(command, "--protocols", cwd=tmp_path)


@pytest.mark.parametrize(
    ("wheel", "portion"),
    [
        ("phyai_models_pi", ("pi", "pi0", "pi05")),
        ("phyai_models_groot", ("gr00t",)),
        ("phyai_models_cosmos", ("cosmos3",)),
        ("phyai_models_minicpm", ("minicpm", "minicpm_robot", "minicpm_robot_track")),
    ],
)
def test_model_wheel_holds_its_portion_only(
    wheels: dict[str, Path], wheel: str, portion: tuple[str, ...]
) -> None:
    names = contents(wheels[wheel])
    inside = {name for name in names if not name.startswith(f"{wheel}-")}
    assert {name.split("/")[2] for name in inside} == set(portion)
    assert all(name.startswith("phyai/models/") for name in inside)
    assert not {"phyai/__init__.py", "phyai/models/__init__.py"} & names
    assert {f"phyai/models/{name}/py.typed" for name in portion} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("core_editable", [False, True], ids=["core", "editable-core"])
@pytest.mark.parametrize("model_editable", [False, True], ids=["model", "editable-model"])
def test_every_mix_of_installations(
    environment: Environment,
    wheels: dict[str, Path],
    tmp_path: Path,
    core_editable: bool,
    model_editable: bool,
) -> None:
    # The model package first: the order of the path entries must not matter.
    environment.install(*(("-e", MODEL) if model_editable else (wheels["phyai_models_pi"],)))
    environment.install(*(("-e", CORE) if core_editable else (wheels["phyai_core"],)))
    found = environment.report(tmp_path)
    assert found["plugins"] == ["pi0", "pi05"]
    assert str(found["core"]).startswith(str(CORE)) is core_editable
    assert str(found["model"]).startswith(str(MODEL)) is model_editable
    assert found["loaded"] == ["phyai.models.pi0.plugin", "phyai.models.pi05.plugin"]
    versions = found["version"]
    assert isinstance(versions, list)
    assert versions[0] == versions[1]
    assert (environment.python.parent / "phyai").exists()


def test_core_works_after_the_models_are_uninstalled(
    environment: Environment, wheels: dict[str, Path], tmp_path: Path
) -> None:
    environment.install(*wheels.values())
    found = environment.report(tmp_path)
    others = ["cosmos3", "cosmos3_policy", "gr00t_n17", "minicpm_robot", "minicpm_robot_track"]
    assert found["plugins"] == [*others, "pi0", "pi05"]
    for name in ("phyai-models-cosmos", "phyai-models-groot", "phyai-models-minicpm"):
        environment.pip("uninstall", "--yes", "--quiet", name)
    found = environment.report(tmp_path)
    assert found["loaded"] == ["phyai.models.pi0.plugin", "phyai.models.pi05.plugin"]
    environment.pip("uninstall", "--yes", "--quiet", "phyai-models-pi")
    found = environment.report(tmp_path)
    assert found["plugins"] == []
    assert str(found["model"]).startswith("phyai.models")  # the module that was not found


def test_installed_wheels_are_typed(
    environment: Environment, wheels: dict[str, Path], tmp_path: Path
) -> None:
    environment.install(*wheels.values())
    code = tmp_path / "user.py"
    code.write_text(
        "from phyai import Observation, PhyaiError\n"
        "import phyai.models.pi05.plugin\n"
        "reveal_type(Observation().prompt)\n"
        "reveal_type(phyai.models.pi05.plugin.phyai_adapter().id)\n"
        "error: type[Exception] = PhyaiError\n"
    )
    options = ("--strict", "--follow-imports=silent", "--python-executable", environment.python)
    output = run(
        sys.executable, "-m", "mypy", *options, "--cache-dir", tmp_path, code, cwd=tmp_path
    )
    assert 'Revealed type is "str | None"' in output
    assert 'Revealed type is "str"' in output
    assert "Success" in output
