"""The source trees keep the rules of `source_rules`, and the rules catch what they should."""

from __future__ import annotations

import tomllib

import pytest

from phyai.kernels import CATALOGUE
from tests.source_rules import (
    ALL_TREES,
    CORE,
    ENV_READERS,
    GATEWAY,
    ROOT,
    SOURCE_TREES,
    Module,
    environment_reads,
    gateway_violations,
    kernel_modules,
    kernel_problems,
    layer_violations,
    model_names,
    module_names,
    modules,
    name_pattern,
    parse,
    plugin_folders,
    unsafe_uses,
)

MAX_LINES = 450
BANNED_FILES = {"utils.py", "helpers.py", "common.py"}
PHYAI_MODULES = [module for tree in SOURCE_TREES for module in modules(tree)]
GATEWAY_MODULES = modules(GATEWAY)
ALL_MODULES = [*PHYAI_MODULES, *GATEWAY_MODULES]
NAMES = module_names()
MODELS = plugin_folders()


# ---------------------------------------------------------------- the rules, on the repository


@pytest.mark.parametrize("module", PHYAI_MODULES, ids=lambda m: m.name)
def test_imports_point_downward(module: Module) -> None:
    assert layer_violations(module, NAMES, MODELS) == []


@pytest.mark.parametrize("module", GATEWAY_MODULES, ids=lambda m: m.name)
def test_the_gateway_stands_on_no_engine_and_no_pickle(module: Module) -> None:
    assert gateway_violations(module, NAMES) == []


@pytest.mark.parametrize("module", modules(CORE), ids=lambda m: m.name)
def test_core_contains_no_model_name(module: Module) -> None:
    assert model_names(module.text, name_pattern()) == []


@pytest.mark.parametrize("module", ALL_MODULES, ids=lambda m: m.name)
def test_nothing_is_unpickled_or_executed(module: Module) -> None:
    assert unsafe_uses(module.tree) == []


@pytest.mark.parametrize("module", ALL_MODULES, ids=lambda m: m.name)
def test_environment_is_read_in_one_place(module: Module) -> None:
    if module.name not in ENV_READERS:
        assert environment_reads(module.tree) == []


def test_every_kernel_file_is_named_by_a_row() -> None:
    found = modules(CORE)
    assert kernel_modules(found)
    assert kernel_problems(found, [row.fn for row in CATALOGUE]) == []


def test_files_are_short_and_not_called_a_drawer() -> None:
    folders = [*ALL_TREES, ROOT / "tests", ROOT / "examples"]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    lines = {p.relative_to(ROOT): p.read_text(encoding="utf-8").count("\n") for p in files}
    assert {str(path): count for path, count in lines.items() if count > MAX_LINES} == {}
    assert [str(path) for path in lines if path.name in BANNED_FILES] == []


def test_every_package_holds_the_licence_and_py_typed() -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    for tree in ALL_TREES:
        assert (tree.parent / "LICENSE").read_bytes() == licence
    assert (CORE / "phyai/py.typed").exists()
    assert (GATEWAY / "phyai_gateway/py.typed").exists()
    assert {path.name for path in GATEWAY.iterdir()} == {"phyai_gateway"}
    for tree in SOURCE_TREES[1:]:
        for folder in (tree / "phyai/models").iterdir():
            assert (folder / "py.typed").exists(), folder
        assert not (tree / "phyai/__init__.py").exists()
        assert not (tree / "phyai/models/__init__.py").exists()
    assert not (CORE / "phyai/models").exists()


def test_uv_and_pip_users_get_the_same_torch() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
    assert set(settings["tool"]["uv"]["constraint-dependencies"]) <= set(pins)


# ---------------------------------------------------------------- the rules catch what they should


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("phyai.solver", "from phyai.engine import Engine"),
        ("phyai.solver", "from phyai import engine"),
        ("phyai.solver", "from phyai import Engine"),
        ("phyai.solver", "import phyai.runner as r"),
        ("phyai.solver", "from .cache import Cache"),
        ("phyai.solver", "def f():\n    from phyai.cache import Cache"),
        ("phyai.solver", "def f():\n    importlib.import_module('phyai.engine')"),
        ("phyai.solver", "if TYPE_CHECKING:\n    pass\nelse:\n    import phyai.engine"),
        ("phyai.cache", "from phyai.engine_config import EngineConfig"),
        ("phyai.engine_config", "from phyai.hub import resolve"),
        ("phyai.runner", "import phyai.models.pi05.plugin"),
        ("phyai.runner", "import phyai.not_in_the_table"),
        ("phyai.not_in_the_table", ""),
        ("phyai.models.pi05.model", "from phyai.runner import run"),
        ("phyai.models.pi05.model", "from phyai.testing import tiny"),
        ("phyai.models.pi05.model", "from phyai import Engine"),
        ("phyai.models.pi05.model", "from phyai.models.pi0 import plugin"),
        ("phyai.models.pi05.model", "from ..pi0 import plugin"),
        ("phyai.models.pi.network.gemma", "from phyai.models.pi05 import plugin"),
    ],
)
def test_violation_is_found(name: str, text: str) -> None:
    assert len(layer_violations(parse(name, text), NAMES, MODELS)) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("phyai.runner", "from phyai.cache import Cache\nimport torch"),
        ("phyai.solver", "if TYPE_CHECKING:\n    from phyai.engine import Engine"),
        ("phyai.adapter", "from phyai.engine_config import EngineConfig"),
        ("phyai.engine_config", "from phyai.env import read\nimport phyai.engine_config_parallel"),
        ("phyai.cli.app", "from phyai import Engine, __version__"),
        ("phyai.solver", "from phyai import __version__"),
        (
            "phyai.models.pi05.model",
            "from phyai.models.pi.network import gemma\nimport phyai.cache",
        ),
        ("phyai.models.pi05.model", "from ..pi import gemma"),
        ("phyai.models.pi05.model", "from . import plugin"),
    ],
)
def test_downward_import_is_fine(name: str, text: str) -> None:
    assert layer_violations(parse(name, text), NAMES, MODELS) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("phyai_gateway.router", "import torch"),
        ("phyai_gateway.router", "import torch.nn as nn"),
        ("phyai_gateway.router", "from phyai import Engine"),
        ("phyai_gateway.router", "def f():\n    from phyai.errors import ConfigError"),
        ("phyai_gateway.protocols.native", "import numpy as np"),
        ("phyai_gateway.protocols.native", "from phyai_gateway.server import local"),
        ("phyai_gateway.protocols.native", "from ..client import Client"),
        ("phyai_gateway.cli", "from phyai_gateway import server"),
        ("phyai_gateway.client.blocking", "import phyai"),
        ("phyai_gateway.server.policy", "import pickle"),
        ("phyai_gateway.decode.npy", "from pickle import loads"),
        ("phyai_gateway.decode.npy", "def f():\n    importlib.import_module('marshal')"),
    ],
)
def test_import_the_gateway_may_not_have_is_found(name: str, text: str) -> None:
    assert len(gateway_violations(parse(name, text), NAMES)) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("phyai_gateway.server.policy", "import torch\nimport numpy\nfrom phyai import Engine"),
        ("phyai_gateway.client.blocking", "import numpy\nfrom phyai_gateway.client import errors"),
        ("phyai_gateway.router", "import pickletools\nfrom phyai_gateway.messages import Fault"),
        ("phyai_gateway.router", "if TYPE_CHECKING:\n    import numpy"),
    ],
)
def test_import_the_gateway_may_have_is_fine(name: str, text: str) -> None:
    assert gateway_violations(parse(name, text), NAMES) == []


@pytest.mark.parametrize(
    "text",
    ["class PI05Args", "load_pi05", "GemmaBlock", "'openpi'", "# as LeRobot does", "pi_0",
     "loadPI0", "SigLIP", "minicpm_robot", "π0"],
)  # fmt: skip
def test_model_name_is_found(text: str) -> None:
    assert model_names(f"x = 1\n{text}\n", name_pattern())[0].startswith("2: ")


@pytest.mark.parametrize("text", ["math.pi * 0.5", "api0 = 1", "api05", "position", "math.pi"])
def test_other_words_are_no_model_names(text: str) -> None:
    assert model_names(text, name_pattern()) == []


@pytest.mark.parametrize(
    "text",
    ["torch.load(p)", "torch.load(p, weights_only=False)", "torch.load(p, weights_only=safe)",
     "torch.load(p, **safe)", "pickle.loads(b)", "from pickle import loads", "eval('1')",
     "exec(code)",
     "f(trust_remote_code=True)", "f(**{'trust_remote_code': 1})", "np.load(p, allow_pickle=True)",
     "yaml.load(t)"],
)  # fmt: skip
def test_unsafe_use_is_found(text: str) -> None:
    assert len(unsafe_uses(parse("x", text).tree)) == 1


@pytest.mark.parametrize(
    "text",
    ["model.eval()", "json.loads(t)", "np.load(p, allow_pickle=False)", "yaml.safe_load(t)",
     "torch.load(p, weights_only=True)"],
)  # fmt: skip
def test_safe_use_is_fine(text: str) -> None:
    assert unsafe_uses(parse("x", text).tree) == []


@pytest.mark.parametrize(
    "text",
    ["os.environ['PHYAI_X']", "os.environ.get('PHYAI_X', '')", "os.getenv(name)",
     "'PHYAI_X' in os.environ", "environ[KEY]"],
)  # fmt: skip
def test_environment_read_is_found(text: str) -> None:
    assert len(environment_reads(parse("x", text).tree)) == 1


@pytest.mark.parametrize(
    "text", ["os.environ['WORLD_SIZE']", "dict(os.environ)", "os.environ['PHYAI_X'] = '1'"]
)
def test_other_environment_use_is_fine(text: str) -> None:
    assert environment_reads(parse("x", text).tree) == []


def test_kernel_file_without_a_row_is_found() -> None:
    text = "import triton\n\n@triton.jit\ndef k(x):\n    pass\n\ndef f(x):\n    pass\n"
    found = [parse("phyai.kernels.triton.new", text), parse("phyai.kernels.cpu", "import triton")]
    assert kernel_modules(found) == {"phyai.kernels.triton.new"}
    assert kernel_problems(found, ["phyai.kernels.triton.new:f", len]) == []
    (orphan,) = kernel_problems(found, ["other.package:f"])
    assert orphan.startswith("phyai.kernels.triton.new: no row")
    (gone,) = kernel_problems(found, ["phyai.kernels.triton.new:g"])
    assert gone == "phyai.kernels.triton.new:g: a row names it, but it is not there"
    assert len(kernel_problems([], ["phyai.kernels.triton.new:f"])) == 1
