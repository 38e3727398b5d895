"""The parent's side of one worker: start it, ask it, bound every wait, end all it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.replies import problem

MAX_LINE_BYTES = 2**20
CLOSE_S = 5.0
_SHOWN_LINES = 12
_LOOK_S = 1.0  # how often to see whether a silent worker still lives


class WorkerFailed(Exception):
    """A worker crashed, hung, broke the protocol, or said what it cannot do."""


class Declined(WorkerFailed):
    """A worker said that it cannot do this here; nothing is broken."""


class Worker:
    """A child process, in a session of its own, that answers JSON lines.

    label: how messages call it.  environment: added to ours.  Always ``close`` it, or use ``with``.
    """

    def __init__(
        self, label: str, command: Sequence[str], *, environment: Mapping[str, str], cwd: Path
    ) -> None:
        self.label = label
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._unread = b""
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=cwd,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise WorkerFailed(
                f"worker {label} must start; {command[0]!r} gave {error}. Check its command."
            ) from error

    @property
    def session(self) -> int:
        """Id of the session that holds the worker and whatever it starts."""
        return self._process.pid

    def ask(self, op: str, limit_s: float, **fields: Any) -> dict[str, Any]:
        """Return the reply to one request.

        Raises: Declined when it says ``"refused": true``; WorkerFailed when it does not come within
        ``limit_s``, is no JSON object, says ``"ok": false``, breaks a rule of ``replies``, or
        when the worker ends.
        """
        line = json.dumps({"op": op, **fields}) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed(f"must take {op!r}; it ended{self._exit()}") from error
        reply = self._parse(op, self._read_line(op, limit_s))
        if reply.get("ok") is not True:
            error_text = str(reply.get("error", "no reason given"))
            kind = Declined if reply.get("refused") is True else WorkerFailed
            raise kind(f"worker {self.label} cannot {op}: {error_text}")
        del reply["ok"]
        if wrong := problem(op, reply):
            raise self._failed(f"must answer {op!r} with {wrong}")
        return reply

    def _read_line(self, op: str, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        out, deadline = self._process.stdout.fileno(), time.monotonic() + limit_s
        while b"\n" not in self._unread:
            if len(self._unread) > MAX_LINE_BYTES:
                raise self._failed(f"must answer {op!r} within {MAX_LINE_BYTES} bytes")
            # Looked at first: a child of an ended worker may hold the pipe open.
            ended = self._process.poll() is not None
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._failed(f"must answer {op!r} within {limit_s:g} s; it did not")
            if not ended and not select.select([out], [], [], min(left, _LOOK_S))[0]:
                continue
            ready = select.select([out], [], [], 0)[0]
            part = os.read(out, 65536) if ready else b""
            if not part:
                raise self._failed(f"must answer {op!r}; it ended{self._exit()}")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _parse(self, op: str, line: bytes) -> dict[str, Any]:
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise self._failed(f"must answer {op!r} with one JSON object a line; got {line[:80]!r}")
        return reply

    def _exit(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f" with exit code {self._process.wait(timeout=2)}"
        return ""

    def _failed(self, what: str) -> WorkerFailed:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        text = "".join(f"\n    {line}" for line in lines[-_SHOWN_LINES:])
        return WorkerFailed(
            f"worker {self.label} {what}." + (f" It last wrote:{text}" if text else "")
        )

    def close(self) -> None:
        """End the worker and everything in its session; idempotent."""
        process = self._process
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)  # the end of its input tells it to go
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=CLOSE_S)
                if not _group_lives(process.pid):
                    break
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
