"""`phyai new-adapter` and `phyai new-hook`: names, folders, and packages that work unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phyai.cli.app import main
from phyai.errors import ConfigError
from phyai.scaffold import HOOKS, KINDS, MAX_NAME, Name, write_adapter, write_hook
from tests.examples.installed import ROOT, run_installed
from tests.native_cache import share_native

LONGEST = Name("a" * MAX_NAME)


def test_every_hook_of_the_contract_has_a_template() -> None:
    from phyai import hooks

    specs = {name for name in vars(hooks) if name.startswith("phyai_")}
    assert set(HOOKS) == specs - {"phyai_adapter"}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("My-Policy", "lower-case"),
        ("2fast", "lower-case"),
        ("a b", "lower-case"),
        ("../up", "lower-case"),
        ("a" * (MAX_NAME + 1), "at most"),
        ("", "lower-case"),
        ("class", "word of Python"),
        ("match", "word of Python"),
        ("json", "already finds"),
        ("torch", "already finds"),
        ("phyai", "already finds"),
        ("pi05", "another plugin"),
        ("pi05-wn", "another plugin"),
        ("cosmos3", "another plugin"),
    ],
)
def test_unusable_names_are_refused(
    name: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-adapter", "--out", str(tmp_path / "new"), "--", name]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["new-adapter", "mine", "--kind", "vlaa"], "'vla'"),
        (["new-hook", "mine", "--hook", "solvr"], "'phyai_solver'"),
        (["new-hook", "mine", "--hook", "phyai_adapter"], "--hook must be one of"),
    ],
)
def test_unknown_choices_name_the_nearest(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "new")]) == 2
    assert told in capsys.readouterr().err


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="holds files"):
        write_adapter(Name("mine"), "vla", tmp_path)
    with pytest.raises(ConfigError, match="the file"):
        write_adapter(Name("mine"), "vla", tmp_path / "notes")
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    files = write_hook(Name("mine"), "output", tmp_path)
    assert tmp_path / "src/mine/plugin.py" in files
    assert all(path.is_file() for path in files)


@pytest.mark.parametrize("name", [Name("x"), LONGEST], ids=["short", "longest"])
def test_packages_pass_ruff_whatever_the_name(name: Name, tmp_path: Path) -> None:
    for kind in KINDS:
        write_adapter(name, kind, tmp_path / kind)
    for hook in HOOKS:
        write_hook(name, hook, tmp_path / hook)
    for command in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
    for path in tmp_path.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert "@@" not in text, path
            assert "phyai.models" not in text, path


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_plugin_module_imports_no_torch(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / kind
    write_adapter(Name("fresh_policy"), kind, folder)
    code = "import sys, fresh_policy.plugin; sys.exit('torch' in sys.modules)"
    assert run_installed(folder, tmp_path / "site", "-c", code).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_new_adapter_prints_a_chunk(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / kind
    write_adapter(Name("fresh_policy"), kind, folder)
    command = (
        "-c",
        "from phyai.cli.app import main; import sys; sys.exit(main(sys.argv[1:]))",
        "run",
        "--plugin",
        "fresh_policy",
        *({"tracker": ("--session", "demo", "--repeat", "3")}.get(kind, ())),
    )
    done = run_installed(folder, tmp_path / "site", *command, PHYAI_CACHE=_cache(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {"vla": "vx", "tracker": "yaw"}[kind] in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_edited_package_has_a_preset_of_its_own(kind: str, tmp_path: Path) -> None:
    """The checkpoint of the sources before the edit would not fit the model after it."""
    folder = tmp_path / "new"
    write_adapter(Name("fresh_policy"), kind, folder)
    code = (
        "import sys; from pathlib import Path; from fresh_policy.presets import tiny\n"
        "print(Path(tiny(Path(sys.argv[1]), None)['checkpoint_dir']).name)"
    )
    ask = ("-c", code, str(tmp_path / "cache"))
    names = []
    for edit in ("", "", "EDITED = True\n"):
        with (folder / "src/fresh_policy/network.py").open("a") as file:
            file.write(edit)
        done = run_installed(folder, tmp_path / f"site{len(names)}", *ask)
        assert done.returncode == 0, done.stderr
        names.append(done.stdout)
    assert names[0] == names[1] != names[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_new_adapter_passes_its_own_tests_and_mypy(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / kind
    write_adapter(Name("fresh_policy"), kind, folder)
    tests = run_installed(
        folder, tmp_path / "site", "-m", "pytest", "-q", PHYAI_CACHE=_cache(tmp_path)
    )
    assert tests.returncode == 0, tests.stdout
    types = run_installed(folder, tmp_path / "site2", "-m", "mypy", MYPY_CACHE_DIR=_types())
    assert types.returncode == 0, types.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_new_adapter_can_be_served(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / kind
    write_adapter(Name("fresh_policy"), kind, folder)
    kit = ("-m", "phyai.testing", "fresh_policy", "--level", "3")
    done = run_installed(folder, tmp_path / "site", *kit, PHYAI_CACHE=_cache(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_new_hooks_pass_their_own_tests_and_mypy(tmp_path: Path) -> None:
    for hook in HOOKS:
        folder = tmp_path / hook
        write_hook(Name("fresh_hook"), hook, folder)
        tests = run_installed(folder, tmp_path / f"{hook}.site", "-m", "pytest", "-q")
        assert tests.returncode == 0, f"{hook}\n{tests.stdout}"
        types = run_installed(
            folder, tmp_path / f"{hook}.types", "-m", "mypy", MYPY_CACHE_DIR=_types()
        )
        assert types.returncode == 0, f"{hook}\n{types.stdout}"


def _cache(tmp_path: Path) -> str:
    """Return a fresh cache folder with the compiled kernels in it."""
    share_native(tmp_path / "cache")
    return str(tmp_path / "cache")


def _types() -> str:
    return str(ROOT / ".mypy_cache")
