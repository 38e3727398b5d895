"""A worker that speaks the protocol and misbehaves on request; needs the standard library alone.

    python fake_worker.py NAME [KEY=VALUE ...]

log=FILE: append ``NAME op`` per request.  bytes=N: the estimate.  shift=X: added to the actions.
drop=FIELD: leave it out of every reply.  set=OP:FIELD=JSON: what that reply says instead.
scale=X: actions are the noise times it (default 2).  seconds=X: what a run claims to take.
fail=OP:HOW: at that request crash, hang, print garbage, answer with an error, or leave a child.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any


def misbehave(how: str) -> None:
    if how == "crash":
        print("the reason is here", file=sys.stderr, flush=True)
        sys.exit(7)
    if how == "hang":
        time.sleep(600)
    if how == "garbage":
        print("Loading checkpoint shards: 50%", flush=True)
    if how == "error":
        print(json.dumps({"ok": False, "error": "no such kernel"}), flush=True)
    if how == "list":
        print("[1, 2]", flush=True)
    if how == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", file=sys.stderr, flush=True)
        sys.exit(9)


def read_noise(path: Path) -> tuple[list[int], array[float]]:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entry = json.loads(data[8:start])["noise"]
    begin, end = entry["data_offsets"]
    return entry["shape"], array("f", data[start + begin : start + end])


def write_actions(path: Path, shape: list[int], values: list[float]) -> None:
    data = array("f", values).tobytes()
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}
    header = json.dumps({"actions": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def reply(op: str, message: dict[str, Any], options: dict[str, str], state: dict[str, Any]) -> Any:
    if op == "hello":
        return {"name": state["name"], "versions": {"fake": "1"}, "computes": "nothing much"}
    if op == "estimate":
        return {"bytes": int(options.get("bytes", 1000))}
    if op == "inputs":
        state["noise"] = read_noise(Path(message["path"]))
        return {"prefix_positions": 36}
    if op == "run":
        seconds = float(options.get("seconds", 0.5))
        return {"seconds": seconds, "stages": {"vision": seconds / 4}}
    if op == "result":
        scale, shift = (float(options.get(k, d)) for k, d in (("scale", 2), ("shift", 0)))
        shape, noise = state["noise"]
        write_actions(Path(message["path"]), shape, [x * scale + shift for x in noise])
        return {"peak_rss_bytes": 2_000_000, "first_call_s": 1.5}
    return {}


def main() -> None:
    state: dict[str, Any] = {"name": sys.argv[1]}
    options = dict(word.split("=", 1) for word in sys.argv[2:])
    at, _, how = options.get("fail", "").partition(":")
    wrong, _, field = options.get("set", "").partition(":")
    for line in sys.stdin:
        message = json.loads(line)
        op = message["op"]
        if "log" in options:
            with Path(options["log"]).open("a", encoding="utf-8") as log:
                log.write(f"{state['name']} {op}\n")
        if op == at:
            misbehave(how)
        fields = {"ok": True, **reply(op, message, options, state)}
        fields.pop(options.get("drop", ""), None)
        if op == wrong:
            name, _, value = field.partition("=")
            fields[name] = json.loads(value)
        print(json.dumps(fields), flush=True)
        if op == "quit":
            return


if __name__ == "__main__":
    main()
