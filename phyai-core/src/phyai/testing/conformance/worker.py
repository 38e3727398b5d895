"""What runs in a spawned process: the plugin resolved anew, one engine, the same requests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from phyai.engine_core import EngineCore
from phyai.errors import PluginError
from phyai.plugins import find
from phyai.testing.conformance.check import Failure
from phyai.testing.conformance.results import Arrays, arrays

TIMEOUT_S = 300.0


def results_of_a_worker(
    plugin: str, version: str, args: Any, config: Any, requests: Sequence[Any]
) -> tuple[list[Arrays], str]:
    """Return the results of a spawned process, and its error for another version of the plugin.

    Raises: Failure when the process cannot start, fails or ends.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(theirs, plugin, version, args, config, list(requests)), daemon=True
    )
    try:
        process.start()
    except Exception as error:
        raise Failure(
            f"arguments and requests must survive pickle to reach a worker; got "
            f"{type(error).__name__}: {error}. Use plain values and module-level functions."
        ) from error
    theirs.close()
    try:
        return _answer(ours, process)
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def _answer(connection: Connection, process: Any) -> tuple[list[Arrays], str]:
    try:
        if not connection.poll(TIMEOUT_S):
            raise Failure(f"a worker must answer within {TIMEOUT_S:.0f} s; it did not.")
        status, answer = connection.recv()
    except EOFError:
        process.join(10)
        raise Failure(
            f"a worker must answer; it ended with code {process.exitcode}. Run it with "
            "`python -m phyai.testing` to see what it printed."
        ) from None
    if status != "ok":
        raise Failure(
            f"a worker must find and run the plugin; got {answer}. Install the package where "
            "workers start, and keep what it needs out of the parent's memory."
        )
    results, refusal = answer
    return results, refusal


def _serve(
    connection: Connection,
    plugin: str,
    version: str,
    args: Any,
    config: Any,
    requests: Sequence[Any],
) -> None:
    try:
        torch.set_num_threads(config.runtime.num_threads)
        refusal = ""
        try:
            find(plugin, version=f"{version}+other")
        except PluginError as error:
            refusal = str(error)
        record = find(plugin, version=version)
        core = EngineCore(record.qualified_id, args, config)
        try:
            results = [arrays(core.step(request)) for request in requests]
        finally:
            core.close()
        connection.send(("ok", (results, refusal)))
    except BaseException as error:
        connection.send(("error", f"{type(error).__name__}: {error}"))
    finally:
        connection.close()
