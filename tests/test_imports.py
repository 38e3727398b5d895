"""What an import costs and what it offers: torch-free modules, lazy names, old module paths."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module, util
from importlib.metadata import version

import pytest

import phyai

TORCH_FREE = [
    "phyai",
    "phyai.errors",
    "phyai.types",
    "phyai.manifest",
    "phyai.cost",
    "phyai.hooks",
    "phyai.plugins",
    "phyai.engine_config",
    "phyai.engine_builder",
    "phyai.deployment",
    "phyai.cli.app",
    "phyai.profile.roofline",
    "phyai.models.pi0.plugin",
    "phyai.models.pi05.plugin",
    "phyai.models.gr00t.plugin",
    "phyai.models.minicpm_robot.plugin",
    "phyai.models.minicpm_robot_track.plugin",
    "phyai_gateway.server.commands",
]
# Module paths that user code of earlier versions imports from, with a name of each.
COMPATIBLE = [
    ("phyai.engine", "Engine"),
    ("phyai.engine", "EngineArgs"),
    ("phyai.engine", "DeploymentConfig"),
    ("phyai.engine", "EngineUnavailableError"),
    ("phyai.engine", "Entry"),
    ("phyai.engine", "EntryArgs"),
    ("phyai.engine_config", "KernelConfig"),
    ("phyai.engine_builder", "build_engine"),
    ("phyai.engine_builder", "engine_args_from_mapping"),
    ("phyai.engine_builder", "load_yaml_mapping"),
    ("phyai.engine_builder", "ConfigError"),
    ("phyai.kernel.config", "KernelConfig"),
    ("phyai.runtime", "CudaGraph"),
    ("phyai.runtime", "CudaGraphRegistry"),
    ("phyai.runtime", "capture_on_stream"),
    ("phyai.server", "WorkerSupervisorConfig"),
    ("phyai.server.deployment", "DeploymentConfig"),
    ("phyai.server.lifecycle", "EngineUnavailableError"),
    ("phyai.models.pi05", "PI05Request"),
    ("phyai.models.pi05.main_pi05", "PI05Args"),
    ("phyai.models.pi05.main_pi05", "PI05Request"),
    ("phyai.models.pi05.scheduler_pi05", "PI05Request"),
    ("phyai.models.pi05.scheduler_ws1_pi05", "PI05Request"),
]


def run(code: str) -> str:
    """Run ``code`` in a fresh interpreter and return what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("module", TORCH_FREE)
def test_import_loads_no_torch(module: str) -> None:
    heavy = "{'torch', 'triton', 'numpy', 'matplotlib'}" if module == "phyai" else "{'torch'}"
    assert run(f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_help_loads_no_torch() -> None:
    code = (
        "import sys\nfrom phyai.cli.app import main\nsys.argv = ['phyai', '--help']\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
        "print('torch' in sys.modules)"
    )
    assert run(code).endswith("False")


@pytest.mark.parametrize("name", phyai.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(phyai, name) is not None
    assert name in dir(phyai)


def test_public_name_is_the_object_of_its_home() -> None:
    from phyai.errors import PhyaiError

    assert phyai.PhyaiError is PhyaiError
    assert phyai.__version__ == version("phyai-core")


def test_using_a_light_name_loads_no_torch() -> None:
    code = "import sys; from phyai import Observation, EngineConfig; print('torch' in sys.modules)"
    assert run(code) == "False"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'phyai' has no attribute 'Engin'$"):
        phyai.Engin  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Engin'"):
        from phyai import Engin  # noqa: F401


@pytest.mark.parametrize(("module", "name"), COMPATIBLE)
def test_compatible_path_offers_its_name(module: str, name: str) -> None:
    assert getattr(import_module(module), name) is not None


def test_models_is_a_folder_of_several_distributions() -> None:
    spec = util.find_spec("phyai.models")
    assert spec is not None
    assert spec.origin is None  # no __init__.py: other distributions may add to it
