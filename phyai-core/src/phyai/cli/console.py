"""What every command shares: how errors end a command, JSON, progress on stderr.

Exit codes: 0 done, 1 it went wrong, 2 a wrong option, setting or input of the command line,
3 something is missing or broken in the environment, 130 interrupted, 141 nobody reads the output.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from phyai.errors import (
    CheckpointNotFound,
    ConfigError,
    KernelUnavailable,
    PhyaiError,
    PluginError,
    RequestError,
    SessionLost,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

FAILED, USAGE, ENVIRONMENT, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 130, 141
SHOW_AFTER_S = 1.0
PLAIN_EVERY_S = 10.0


# ---------------------------------------------------------------- errors


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error that ends a command."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    if isinstance(error, (PluginError, KernelUnavailable, ImportError)):
        return ENVIRONMENT
    if isinstance(error, SessionLost):
        return FAILED
    if isinstance(error, (ConfigError, CheckpointNotFound, RequestError)):
        return USAGE
    # The base class of wrong options differs between versions of typer.
    code = getattr(error, "exit_code", FAILED)
    return code if isinstance(code, int) else FAILED


def report(error: BaseException, *, debug: bool) -> int:
    """Print an error on stderr, with its traceback when debugging; return the exit code."""
    code = exit_code(error)
    if code == BROKEN_PIPE:
        return code
    if debug and not _is_usage(error):
        traceback.print_exception(error, file=sys.stderr)
    else:
        print(message(error), file=sys.stderr)
    return code


def message(error: BaseException) -> str:
    """Return what a user reads of an error."""
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, PhyaiError):
        return f"{error}{notes}"
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted."
    if _is_usage(error):
        return _usage_message(error)
    name = type(error).__name__
    text = str(error).strip().rstrip(".")
    return f"{name}: {text or 'no message'}.{notes} Run again with --debug for the traceback."


def _is_usage(error: BaseException) -> bool:
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _usage_message(error: Any) -> str:
    text = str(error.format_message()).strip()
    context = getattr(error, "ctx", None)
    if context is None:
        return text
    stop = "" if text.endswith((".", "?", ")")) else "."
    return f"{text}{stop} See `{context.command_path} --help`."


# ---------------------------------------------------------------- output


def console(*, stderr: bool = False) -> Console:
    """Return a rich console on the stream of this moment."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def check_writable(option: str, path: Path, *, folder: bool = False) -> None:
    """Raise ConfigError unless ``path`` can be written or made, before anything is computed.

    Leaves everything as it was.  folder: it is to be one, not a file.
    """
    place = path
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        problem = _unwritable(path, place, folder)
    except OSError as error:
        problem = f"not writable ({error.strerror or error})"
    if problem:
        raise ConfigError(
            f"{option} must name a place to write to; got {str(path)!r}, and {str(place)!r} is "
            f"{problem}. Choose another place."
        )


def _unwritable(path: Path, place: Path, folder: bool) -> str:
    """Return why nothing can be written there, or ""; OSError too says that it cannot.

    place: what exists of ``path``.
    """
    if place.is_dir():
        if place == path and not folder:
            return "a folder"
    elif place != path or folder:
        return "a file"
    if not os.access(place, os.W_OK):
        return "not writable"
    # Root may write everywhere, by the mode; only an attempt tells of /proc and read-only disks.
    if place.is_dir():
        with tempfile.TemporaryFile(dir=place):
            pass
    elif place.is_file():  # opening a pipe would wait for its reader
        with open(place, "ab"):
            pass
    return ""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of equal length as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def print_json(data: Any) -> None:
    """Print one JSON object on stdout; numbers JSON cannot hold become text."""
    print(json_text(data))


def json_text(data: Any) -> str:
    """Return data as JSON; numbers it cannot hold become text."""
    import json

    return json.dumps(_json_ready(data), indent=2, ensure_ascii=False, allow_nan=False)


def _json_ready(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_ready(item) for item in value]
    return value


class Waiting:
    """Shows on stderr what takes longer than a second; call it as progress(done, total, name).

    On a terminal a bar appears, elsewhere a plain line now and then. Without calls the bar only
    moves to and fro.
    """

    def __init__(self, what: str, *, after_s: float = SHOW_AFTER_S) -> None:
        self.what, self.after_s = what, after_s
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._bar: Progress | None = None
        self._task: Any = None
        self._done, self._total, self._name = 0, 0, ""
        self._plain_at: float | None = None
        self._closed = False

    def __call__(self, done: int, total: int, name: str = "") -> None:
        with self._lock:
            self._done, self._total, self._name = done, total, name
            if self._bar is not None:
                self._bar.update(
                    self._task, completed=done, total=total or None, description=self._doing(name)
                )
            elif self._plain_at is not None and time.monotonic() >= self._plain_at:
                share = f" {done / total:.0%}" if total else ""
                self._plain(f"{self._doing(name)}{share}")

    def __enter__(self) -> Self:
        self._timer = threading.Timer(self.after_s, self._show)
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._bar is not None:
                self._bar.stop()

    def _doing(self, name: str) -> str:
        """Return a progress name that is a phrase; one word is a tensor, and of no interest."""
        return name if " " in name else self.what

    def _show(self) -> None:
        with self._lock:
            if self._closed:
                return
            screen = console(stderr=True)
            if not screen.is_terminal:
                self._plain(f"{self._doing(self._name)} ...")
                return
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn

            self._bar = Progress(
                "{task.description}",
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=screen,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task(
                self._doing(self._name), completed=self._done, total=self._total or None
            )
            self._bar.start()

    def _plain(self, text: str) -> None:
        self._plain_at = time.monotonic() + PLAIN_EVERY_S
        print(text, file=sys.stderr, flush=True)
