"""The command line without a model: help, plugins, config, doctor, errors, exit codes, progress."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phyai.cli import commands, console, quick_scan
from phyai.cli.app import main
from phyai.cli.commands import app
from phyai.config_yaml import parse_yaml_mapping
from phyai.errors import (
    CheckpointError,
    CheckpointNotFound,
    ConfigError,
    MissingDependency,
    PluginNotFound,
    RequestError,
    SessionLost,
)
from tests.core.sandbox import make_distribution
from tests.native_cache import share_native

PHYAI = Path(sys.executable).with_name("phyai")
HOOKS = """
from phyai.hooks import hookimpl
@hookimpl
def phyai_commands():
    return {"hello": hello, "run": hello, "bad": 3}
def hello(name: str = "you"):
    "Greet."
    print("hello", name)
"""


def shell(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PHYAI_")}
    return subprocess.run(
        [str(PHYAI), *arguments],
        env={**inherited, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# ---------------------------------------------------------------- start-up


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "--help"], ["--version"], ["plugins"], ["plugins", "--json"], ["config"],
     ["config", "--fields"], ["config", "config.runtime.num_threads=2"], ["serve", "--help"]],
)  # fmt: skip
def test_command_imports_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom phyai.cli.app import main\n"
        f"code = main({arguments!r})\n"
        "heavy = sorted({'torch', 'numpy', 'triton'} & set(sys.modules))\n"
        "print(code, heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "0 []"


def test_help_imports_neither_plugins_nor_rich() -> None:
    """Where no package with hooks is installed; such a package may add a command."""
    code = (
        "import sys\nfrom phyai.cli import commands\nfrom phyai.cli.app import main\n"
        "commands.may_have_hooks = lambda: False\nmain(['--help'])\n"
        "print(sorted({'phyai.plugins', 'pluggy', 'omegaconf', 'huggingface_hub', 'rich.console',"
        " 'pydantic', 'importlib.metadata'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
    for name in ("run", "plugins", "doctor", "config", "verify"):
        assert f"\n  {name} " in done.stdout


def test_the_app_runs_under_typers_own_runner() -> None:
    done = CliRunner().invoke(app, ["run", "--help"])
    assert done.exit_code == 0
    assert "--checkpoint" in done.output


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("phyai ")


def test_completion_script_is_offered() -> None:
    done = shell(_PHYAI_COMPLETE="source_bash")
    assert done.returncode == 0
    assert "_phyai_completion" in done.stdout
    done = shell(_PHYAI_COMPLETE="complete_bash", COMP_WORDS="phyai ver", COMP_CWORD="1")
    assert done.stdout.split() == ["verify"]


def test_completion_installs(tmp_path: Path) -> None:
    # The shell is named here; otherwise it is the one phyai was started from.
    done = shell("--install-completion", "bash", HOME=str(tmp_path),
                 _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "completion installed" in done.stdout
    assert "_phyai_completion" in (tmp_path / ".bash_completions/phyai.sh").read_text()


# ---------------------------------------------------------------- errors and exit codes


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (RequestError("x"), 2),
        (CheckpointNotFound("x"), 2),
        (PluginNotFound("x"), 3),
        (MissingDependency("x"), 3),
        (ImportError("x"), 3),
        (CheckpointError("x"), 1),
        (SessionLost("x"), 1),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
    ],
)
def test_exit_code(error: BaseException, code: int) -> None:
    assert console.exit_code(error) == code


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["runn"], 2, "No such command 'runn'"),
        (["run", "--sed", "1"], 2, "--seed"),
        (["run", "--steps", "0"], 2, "--steps"),
        (["run"], 2, "--plugin or --checkpoint must be given; installed plugins:"),
        (["run", "--plugin", "nope"], 3, "Plugin 'nope' is not installed; installed: "),
        (["run", "--plugin", "nope", "--image", "front"], 2, "--image must look like"),
        (["run", "--plugin", "nope", "--image", "a=nowhere.png"], 2, "no file 'nowhere.png'"),
        (["run", "--plugin", "nope", "--state", "1,x"], 2, "got 'x' in '1,x'"),
        (["run", "--plugin", "nope", "--state", "1,nan"], 2, "finite"),
        (["run", "--plugin", "nope", "--plot", "a.gif"], 2, ".png, .pdf, .svg"),
        (["run", "--plugin", "nope", "--force"], 2, "--force belongs to --record"),
        (["run", "--plugin", "a", "--preset", "b", "--checkpoint", "c"], 2, "excludes --preset"),
        (["run", "--plugin", "a", "--revision", "b"], 2, "--revision belongs to"),
        (["run", "--plugin", "a", "--device", "cdua"], 2, "Did you mean 'cuda'?"),
        (["run", "--checkpoint", "./nowhere"], 2, "no such file or folder"),
        (["run", "--checkpoint", __file__], 2, "must be a folder or a hub id; got the file"),
        (["bench", "--plugin", "nope", "--save", "/proc/a.json"], 2, "'/proc' is not writable"),
        (["verify", "--plugin", "nope", "--golden", "."], 3, "is not installed"),
        (["verify", "--golden", "."], 2, "--plugin"),
        (["config", "a.yaml", "b.yaml"], 2, "one FILE"),
        (
            ["config", "nowhere.yaml"],
            2,
            "must exist and must be readable UTF-8; got 'nowhere.yaml'",
        ),
        (["config", "config.devise.target=cpu"], 2, "Did you mean 'config.device'?"),
        (["config", "config.device.targt=cpu"], 2, "config.device.targt must be a known key"),
        (["config", "plugn=x"], 2, "Did you mean 'plugin'?"),
    ],
)
def test_wrong_use_is_one_message(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [["serve", "file.yaml", "--check"], ["server", "--help"]])
def test_a_command_of_another_package_names_it(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "may_have_hooks", lambda: False)  # as without phyai-gateway
    assert main(arguments) == 3
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.strip().splitlines()
    assert "pip install phyai-gateway" in line


@pytest.mark.parametrize("arguments", [["run", "--plugin", "nope", "--debug"],
                                       ["--debug", "run", "--plugin", "nope"]])  # fmt: skip
def test_debug_shows_the_traceback(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 3
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "PluginNotFound" in err


def test_a_bug_is_named_and_points_to_debug() -> None:
    text = console.message(KeyError("k"))
    assert text == "KeyError: 'k'. Run again with --debug for the traceback."


def test_interrupt_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("phyai.cli.run_setup.prepare", interrupted)
    assert main(["run", "--plugin", "x"]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [str(PHYAI), "config", "--fields"], stdout=writer, stderr=subprocess.PIPE, timeout=60
        )
    finally:
        os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 141


# ---------------------------------------------------------------- plugins


def test_plugins_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    table = capsys.readouterr().out
    assert main(["plugins", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"plugins", "hooks", "unmatched"}
    assert data["plugins"]
    assert data["unmatched"] == []
    for record in data["plugins"]:
        assert record["status"] == "ok"
        assert record["id"] in table
        assert record["version"] in table


@pytest.mark.slow
def test_plugins_with_every_plugin_broken(tmp_path: Path) -> None:
    make_distribution(
        tmp_path,
        "broken-pack",
        "1.2",
        {"broken_one": "raise RuntimeError('no luck')", "broken_two": "1/0"},
        {"phyai.plugins": {"brk": "broken_one"}, "phyai.hooks": {"brkhook": "broken_two"}},
    )
    env = {"PYTHONPATH": str(tmp_path)}
    done = shell("plugins", **env)
    assert done.returncode == 0
    assert "import-error" in done.stdout
    assert "brk of broken-pack: RuntimeError: no luck" in done.stderr
    data = json.loads(shell("plugins", "--json", **env).stdout)
    record = next(r for r in data["plugins"] if r["id"] == "brk")
    assert "Traceback" in record["traceback"]
    assert data["hooks"][0]["status"] == "import-error"
    helped = shell("--help", **env)
    assert helped.returncode == 0
    assert "hook plugin 'brkhook' of broken-pack is broken" in helped.stderr
    chosen = shell("run", "--plugin", "brk", **env)
    assert chosen.returncode == 3
    assert "no luck" in chosen.stderr
    assert shell("doctor", **env).returncode == 3  # a broken hook plugin stops every engine


def test_commands_of_hook_plugins(tmp_path: Path) -> None:
    make_distribution(
        tmp_path, "hello-pack", "1.0", {"hello_hooks": HOOKS}, {"phyai.hooks": {"h": "hello_hooks"}}
    )
    env = {"PYTHONPATH": str(tmp_path)}
    helped = shell("--help", **env)
    assert "hello" in helped.stdout
    assert "Greet." in helped.stdout
    assert "command 'run' of a hook plugin is one of core's own" in helped.stderr
    assert "'bad', which is not callable" in helped.stderr
    done = shell("hello", "--name", "robot", **env)
    assert done.stdout == "hello robot\n"
    assert shell("run", **env).stderr.startswith("--plugin or --checkpoint")


def test_quick_scan_sees_hooks_and_doubts_archives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "absent")])
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if isinstance(f, type)])
    assert not quick_scan.may_have_hooks()
    make_distribution(tmp_path, "adapters", "1", {"a": ""}, {"phyai.plugins": {"a": "a"}})
    assert not quick_scan.may_have_hooks()
    make_distribution(tmp_path, "hooks", "1", {"b": ""}, {"phyai.hooks": {"b": "b"}})
    assert quick_scan.may_have_hooks()
    archive = tmp_path / "pack.zip"
    archive.touch()
    monkeypatch.setattr(sys, "path", [str(archive)])
    assert quick_scan.may_have_hooks()


# ---------------------------------------------------------------- config


def test_config_prints_yaml_that_it_reads_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "config.device.target=cpu", "config.runtime.num_threads=3"]) == 0
    text = capsys.readouterr().out
    data = parse_yaml_mapping(text)
    assert data["config"]["device"]["target"] == "cpu"
    assert data["config"]["runtime"]["num_threads"] == 3
    file = tmp_path / "a.yaml"
    file.write_text(text)
    assert main(["config", str(file)]) == 0
    assert capsys.readouterr().out == text


def test_config_says_when_no_device_is_chosen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["config"]) == 0
    assert capsys.readouterr().out.startswith("# Without config.device")
    monkeypatch.setenv("PHYAI_DEVICE", "cpu")
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    assert not out.startswith("#")
    assert parse_yaml_mapping(out)["config"]["device"]["target"] == "cpu"


def test_config_keeps_the_other_keys_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("plugin: x\nplugin_args: {checkpoint_dir: ./c}\nserver: {port: 1}\n")
    assert main(["config", str(file), "deployment.replica_count=2"]) == 0
    data = parse_yaml_mapping(capsys.readouterr().out)
    assert data["plugin"] == "x"
    assert data["server"] == {"port": 1}
    assert data["deployment"]["replica_count"] == 2


def test_config_fields_lists_variables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--fields"]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "config.device.target" in line)
    assert "PHYAI_DEVICE" in line


def test_config_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("config: {kernel: {config_path: ./none.yaml}}\n")
    assert main(["config", str(file), "--check"]) == 2
    assert "config.kernel.config_path must exist" in capsys.readouterr().err
    file.write_text("config: {runtime: {num_threads: 1}}\n")
    assert main(["config", str(file), "--check"]) == 0
    assert capsys.readouterr().out == f"Configuration valid: {file}\n"


# ---------------------------------------------------------------- doctor


def test_doctor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    share_native(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret_words")
    monkeypatch.setenv("PHYAI_CACHE", str(tmp_path))
    monkeypatch.setenv("PHYAI_DEVCE", "cpu")
    assert main(["doctor", "--kernels", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "hf_secret_words" not in out + err
    data = json.loads(out)
    facts = {(fact["section"], fact["name"]): fact for fact in data["facts"]}
    assert facts["hub", "token"]["value"] == "present"
    assert facts["settings", "preset cache"]["value"] == str(tmp_path)
    assert "Did you mean 'PHYAI_DEVICE'?" in facts["settings", "PHYAI_DEVCE"]["value"]
    assert facts["torch", "version"]["state"] == "ok"
    assert {"matplotlib", "sentencepiece", "av"} <= {name for _, name in facts}
    attention = next(entry for entry in data["kernels"] if entry["op"] == "attention")
    assert attention["chosen"]["float32"] in [row["name"] for row in attention["rows"]]
    assert main(["doctor", "--kernels"]) == 0
    assert "eager.attention" in capsys.readouterr().out


def test_doctor_with_a_wrong_variable_is_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHYAI_NUM_THREADS", "many")
    assert main(["doctor"]) == 3
    assert "BROKEN PHYAI_NUM_THREADS must be an integer" in capsys.readouterr().out
