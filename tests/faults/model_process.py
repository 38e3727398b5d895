"""A model server as a process, real but for its engine: that sleeps, and answers with a number.

    python -m tests.faults.model_process NUMBER DELAY_S [--port P] [--workers N] [--queue N]

Prints its port when it is ready. Each line on stdin is a new delay in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from phyai_gateway.contract import MAX_IN_FLIGHT, ModelContract
from phyai_gateway.messages import Call, InferReply, InferRequest, TensorData
from phyai_gateway.proto.encoded import decoded
from phyai_gateway.server.config import ObservationOptions, ServerConfig, ServerOptions
from phyai_gateway.server.dispatcher import Dispatcher, Done
from phyai_gateway.server.faults import fault_of
from phyai_gateway.server.model_server import ModelServer, serve

HORIZON, ACTION_DIM, STATE_DIM = 10, 3, 3
CAMERAS = ("main_images", "wrist_images")
EMBODIMENT = {
    "cameras": list(CAMERAS),
    "frames": [0],
    "state": {"arm": STATE_DIM},
    "actions": {"arm": ACTION_DIM},
    "horizon": HORIZON,
}
CONTRACT = ModelContract(
    "stub",
    cameras=dict.fromkeys(CAMERAS),
    state_dim=STATE_DIM,
    action_dim=ACTION_DIM,
    horizon=HORIZON,
    max_rows=4,
    extra={"embodiment": "arm", "embodiments": {"arm": EMBODIMENT}},
)


class SleepingHost:
    """What the model server asks of an engine's host."""

    def __init__(self, number: float, delay_s: float, options: ServerOptions) -> None:
        self.delay_s, self._number = delay_s, number
        self._workers, self._queue = options.workers or 1, options.max_queue or 0
        self._threads = ThreadPoolExecutor(self._workers)
        self._served = 0
        most = self._workers + self._queue
        self.contract = ModelContract(
            **{
                name: getattr(CONTRACT, name)
                for name in CONTRACT.__dataclass_fields__
                if name != "extra"
            },
            extra={**CONTRACT.extra, MAX_IN_FLIGHT: most},
        )

    def open(self) -> None:
        self.dispatcher = Dispatcher(self._submit, workers=self._workers, max_queue=self._queue)

    def _submit(self, _: Any) -> Future[Any]:
        return self._threads.submit(time.sleep, self.delay_s)

    async def infer(self, request: InferRequest, call: Call) -> tuple[InferReply, Done]:
        whole = decoded(request)
        until = time.monotonic() + call.remaining(10.0)
        try:
            done = await self.dispatcher.run(lambda: None, until)
        except Exception as error:
            raise fault_of(error, request.request_id) from error
        rows = len(whole.instructions) or (
            whole.state.shape[0] if whole.state is not None and len(whole.state.shape) == 2 else 0
        )
        shape = (rows, HORIZON, ACTION_DIM) if rows else (HORIZON, ACTION_DIM)
        data = struct.pack("<f", self._number) * (max(rows, 1) * HORIZON * ACTION_DIM)
        actions = TensorData(data, shape, "float32")
        self._served += 1
        return InferReply(request.request_id, actions, inference_time_us=1000), done

    def stats(self, **_: Any) -> dict[str, Any]:
        return {"replicas": [{"id": 0, "state": "ready", "done": self._served, "failed": 0}]}

    def not_ready(self) -> str | None:
        return "draining" if self.dispatcher.draining else None

    def close(self) -> None:
        self.dispatcher.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("number", type=float)
    parser.add_argument("delay", type=float)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--queue", type=int, default=32)
    args = parser.parse_args()
    options = ServerOptions(
        "stub",
        port=args.port,
        http_port=None,
        workers=args.workers,
        max_queue=args.queue,
        grace_seconds=10.0,
    )
    unused: Any = None
    config = ServerConfig(Path("stub.yaml"), unused, None, options, ObservationOptions())
    host: Any = SleepingHost(args.number, args.delay, options)
    server = ModelServer(config, lambda _: host)

    def announce(text: str) -> None:
        print(server.ports["native"] if "ready" in text else text, flush=True)

    def obey() -> None:
        for line in sys.stdin:
            host.delay_s = float(line)

    threading.Thread(target=obey, daemon=True).start()
    return asyncio.run(serve(server, announce=announce))


if __name__ == "__main__":
    sys.exit(main())
