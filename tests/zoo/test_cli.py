"""The command line beside a zoo of broken plugins, in this environment as a user has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phyai.testing.sandbox import Sandbox
from tests.native_cache import share_native
from tests.zoo.adapters import LISTED, STARTED, install

COMMANDS = """
from phyai.hooks import hookimpl

def odd(value: list[list[int]]): ...
def fine(): "Say so."; print("fine")

@hookimpl
def phyai_commands():
    print("chatty")
    return {}
"""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """Every broken adapter at once, and hook plugins that break the engine and the commands."""
    sandbox = Sandbox(tmp_path_factory.mktemp("zoo") / "site")
    install(sandbox, *(name for name in LISTED if name != "z_torch"), *STARTED)  # torch: seconds
    sandbox.hooks("h_broken", "import nothing_of_this_name\n")
    sandbox.hooks("h_raises", COMMANDS.replace("return {}", "return 1 / 0"))
    sandbox.hooks(
        "h_odd", COMMANDS.replace("return {}", "return {'odd': odd, 'fine': fine, 'run': fine}")
    )
    return sandbox


def test_help_answers_and_says_what_is_left_out(zoo: Sandbox) -> None:
    done = zoo.cli("--help")
    assert done.returncode == 0
    commands = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert {"run", "plugins", "fine"} <= commands
    assert "odd" not in commands
    assert "chatty" not in done.stdout
    for words in (
        "hook plugin 'h_broken' of h_broken-dist is broken (import-error): ModuleNotFoundError",
        "hook plugin 'h_raises' of h_raises-dist failed in phyai_commands: ZeroDivisionError",
        "command 'odd' of a hook plugin cannot be built",
        "command 'run' of a hook plugin is one of core's own",
    ):
        assert done.stderr.count(words) == 1, done.stderr


def test_a_good_command_beside_a_bad_one_runs_and_the_bad_one_is_unknown(zoo: Sandbox) -> None:
    done = zoo.cli("fine")
    assert (done.returncode, done.stdout) == (0, "fine\n")
    done = zoo.cli("odd")
    assert done.returncode == 2
    assert "No such command 'odd'" in done.stderr


def test_the_list_has_a_reason_for_each(zoo: Sandbox) -> None:
    done = zoo.cli("plugins", "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    broken = {r["id"]: r for r in listed["plugins"] if r["status"] not in ("ok", "blocked")}
    assert set(broken) == set(LISTED) - {"z_torch"}
    assert len({record["error"] for record in broken.values()}) == len(broken) >= 10
    assert all("Traceback" in record["traceback"] for record in broken.values())
    status = {record["id"]: record["status"] for record in listed["plugins"]}
    assert status["pi05"] == "ok"
    hooks = {record["id"]: record["status"] for record in listed["hooks"]}
    assert hooks.pop("serve") == "ok"  # of phyai-gateway, beside the zoo
    assert hooks == {"h_broken": "import-error", "h_odd": "ok", "h_raises": "ok"}


# ---------------------------------------------------------------- pi05 runs

GROOT = "phyai-models-groot"
RUN = """
import sys
from phyai.cli.app import main

class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("phyai.models.gr00t"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Gone())
codes = [main(["run", "--plugin", "gr00t_n17"]), main(["run", "--plugin", "pi05", "--json"])]
sys.exit(0 if codes in ([2, 0], [3, 0]) else f"exit codes {codes}")
"""


def run(sandbox: Sandbox, cache: Path, **env: str) -> tuple[int, str]:
    """Run gr00t_n17, in vain, and pi05; return the number of pi05's actions and stderr."""
    share_native(cache)
    done = sandbox.python(RUN, isolated=False, PHYAI_CACHE=str(cache), **env)
    assert done.returncode == 0, done.stderr
    return len(json.loads(done.stdout)["actions"]), done.stderr


@pytest.mark.slow
def test_pi05_runs_beside_the_zoo_and_a_broken_groot(zoo: Sandbox, tmp_path: Path) -> None:
    """A distribution of the same name earlier on the path shadows the one that is installed."""
    zoo.distribution(
        GROOT,
        {"groot_broken.plugin": "raise ImportError('no longer here')\n"},
        {"phyai.plugins": {"gr00t_n17": "groot_broken.plugin"}},
        version="99.0",
    )
    actions, said = run(zoo, tmp_path, PHYAI_PLUGINS_BLOCK="h_broken")
    assert actions == 50
    assert "of phyai-models-groot 99.0 cannot be used (import-error)" in said
    assert "ImportError: no longer here" in said


@pytest.mark.slow
def test_pi05_runs_without_groot(phyai_sandbox: Sandbox, tmp_path: Path) -> None:
    phyai_sandbox.distribution(GROOT, {}, {}, version="99.0")  # shadows it, and offers nothing
    actions, said = run(phyai_sandbox, tmp_path)
    assert actions == 50
    assert "Plugin 'gr00t_n17' is not installed" in said
    assert "Install it with `pip install phyai-models-groot`" in said
