"""The options that choose an engine are the same in every command that opens one."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from phyai.cli import bench, profile, run, verify
from phyai.cli.options import DebugOption, RunOptions, engine_options

ENGINE = [
    "plugin", "preset", "checkpoint", "revision", "dtype", "device", "tokenizer", "arg", "set_"
]  # fmt: skip


@pytest.mark.parametrize("command", [bench.bench, profile.profile, run.run, verify.verify])
def test_every_command_has_them_in_one_place(command: Any) -> None:
    names = list(inspect.signature(command).parameters)
    assert names[: len(ENGINE)] == ENGINE
    assert "wanted" not in names


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], RunOptions()),
        (
            ["--plugin", "a", "--arg", "x=1", "--arg", "y=2", "--set", "z=3", "--device", "cpu"],
            RunOptions(plugin="a", args=["x=1", "y=2"], settings=["z=3"], device="cpu"),
        ),
        (
            ["--preset", "p", "--checkpoint", "c", "--revision", "r", "--dtype", "bf16",
             "--tokenizer", "t"],
            RunOptions(preset="p", checkpoint="c", revision="r", dtype="bf16", tokenizer="t"),
        ),
    ],
)  # fmt: skip
def test_they_come_as_one_object(arguments: list[str], options: RunOptions) -> None:
    seen: list[Any] = []
    app = typer.Typer()

    @app.command()
    @engine_options
    def command(
        wanted: RunOptions,
        rows: Annotated[int, typer.Option("--rows")] = 1,
        debug: DebugOption = False,
    ) -> None:
        seen.append((wanted, rows, debug))

    done = CliRunner().invoke(app, [*arguments, "--rows", "3"])
    assert done.exit_code == 0, done.output
    assert seen == [(options, 3, False)]
