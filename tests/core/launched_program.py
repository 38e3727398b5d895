"""What a launcher starts on every rank: steps of one engine, told to a file per rank."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from phyai import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig, ParallelConfig, RuntimeConfig
from phyai.plugins import find
from tests.core.rank_adapter import PLUGIN_ID, ask, number


def told(call: Any) -> Any:
    try:
        found = call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return found if isinstance(found, int) else number(found)


def open_engine() -> Engine:
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        runtime=RuntimeConfig(num_threads=1),
        parallel=ParallelConfig(tp_size=2, timeout_s=20.0),
    )
    return Engine(EngineArgs(PLUGIN_ID, find(PLUGIN_ID).load_args()(), config))


def several(found: dict[str, Any]) -> None:
    """Open engines one after the other, and two at once, of which the first one closes first."""
    found["one by one"], found["open files"] = [], []
    for _ in range(5):
        with open_engine() as engine:
            found["one by one"].append(told(lambda: engine.step(ask("add", 2.0))))
        found["open files"].append(len(os.listdir("/proc/self/fd")))
    first, second = open_engine(), open_engine()
    found["both"] = [told(lambda one=one: one.step(ask("add", 1.0))) for one in (first, second)]
    first.close()
    found["second alone"] = told(lambda: second.step(ask("add", 3.0)))
    second.close()


def main(folder: str, scenario: str) -> None:
    rank = int(os.environ["RANK"])
    if scenario == "kill":  # the launcher ends the others, too: let them say first what they saw
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    found: dict[str, Any] = {"world": int(os.environ["WORLD_SIZE"])}
    if scenario == "several":
        several(found)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        return
    with open_engine() as engine:
        found["mode"] = engine.mode
        mine = [ask("add", value) for value in ((2.0, 5.0) if rank == 0 else (7.0, 7.0))]
        found["steps"] = [told(lambda one=one: engine.step(one)) for one in mine]
        found["bad"] = told(lambda: engine.step(ask("bad") if rank == 0 else mine[0]))
        futures = [engine.submit(one) for one in mine]
        found["futures"] = [told(future.result) for future in futures]
        weights = {"scale": torch.tensor([10.0 if rank == 0 else 99.0])}
        found["version"] = told(lambda: engine.update_weights_all(weights))
        found["updated"] = told(lambda: engine.step(mine[0]))
        if scenario == "kill":
            Path(folder, f"{rank}.json").write_text(json.dumps(found))
            found["killed"] = told(lambda: engine.step(ask("kill", 1.0)))
            found["after"] = told(lambda: engine.step(mine[0]))
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
