"""The client's queue of actions: what the robot executes next, and what guides the next chunk.

Layer 1, torch-free: a robot client needs numpy and this file. Two parallel queues hold each chunk
in robot units (executed) and in model space (the left-over of real-time chunking).

A control loop pops; another thread asks for chunks::

    ticket = queue.begin_request()                      # what is left at this very moment
    delay = delay_from(latency.estimate() or 0.0, fps)
    rtc = ticket.rtc_options(inference_delay=delay)     # None for the first request
    chunk = engine.step(Observation(..., options={"rtc": rtc}))
    queue.merge(chunk, ticket=ticket, rtc=True)         # drops what was executed meanwhile
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phyai.errors import ConfigError, RequestError
from phyai.types import ActionChunk, RTCOptions

Rows = NDArray[np.float32]
Space = Literal["model", "robot"]


def delay_from(latency_s: float, fps: float) -> int:
    """Return how many control periods begin during a latency: ceil(latency * fps).

    >>> from phyai.action_queue import delay_from
    >>> delay_from(0.07, 100)
    7
    """
    if not (math.isfinite(latency_s) and latency_s >= 0):
        raise ConfigError(f"latency must be a number of seconds >= 0; got {latency_s!r}.")
    if not (math.isfinite(fps) and fps > 0):
        raise ConfigError(f"fps must be a number > 0; got {fps!r}. Pass the control rate.")
    # 0.07 * 100 is 7.000000000000001 in floats, which is not an eighth period.
    return math.ceil(round(latency_s * fps, 9))


class LatencyTracker:
    """Recent request latencies; the first ones are left out, they hold warm-up and compilation.

    >>> from phyai.action_queue import LatencyTracker
    >>> latency = LatencyTracker()
    >>> for seconds in (9.0, 0.1, 0.2):
    ...     latency.add(seconds)
    >>> latency.estimate()
    0.2
    """

    def __init__(self, window: int = 100, skip_first: int = 1) -> None:
        if window < 1 or skip_first < 0:
            raise ConfigError(
                f"window must be >= 1 and skip_first >= 0; got {window!r} and {skip_first!r}."
            )
        self._recent: deque[float] = deque(maxlen=window)
        self._skip_first, self._to_skip = skip_first, skip_first
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        """Note the latency of one request."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ConfigError(f"latency must be a number of seconds >= 0; got {seconds!r}.")
        with self._lock:
            if self._to_skip:
                self._to_skip -= 1
            else:
                self._recent.append(float(seconds))

    def estimate(self, quantile: float = 1.0) -> float | None:
        """Return a quantile of the recent latencies (1.0 = their maximum); None before any."""
        if not 0.0 < quantile <= 1.0:
            raise ConfigError(f"quantile must be in (0, 1]; got {quantile!r}. Use 0.95 or 1.0.")
        with self._lock:
            if not self._recent:
                return None
            return float(np.quantile(np.array(self._recent), quantile, method="higher"))

    def reset(self) -> None:
        """Forget everything; the next requests count as first ones again."""
        with self._lock:
            self._recent.clear()
            self._to_skip = self._skip_first


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """The queue at the moment a request began.

    number: counts the requests.  consumed: actions popped before it.
    model [N, A_model], robot [N, A]: the left-over at that moment.

    >>> from phyai.action_queue import ActionQueue
    >>> ticket = ActionQueue().begin_request()
    >>> ticket.number, ticket.rtc_options(inference_delay=2)
    (1, None)
    """

    number: int
    consumed: int
    generation: int
    model: Rows
    robot: Rows

    def left_over(self, space: Space = "model", *, length: int | None = None) -> Rows | None:
        """Return the not yet executed actions [N, A], or None when there are none.

        length: exactly so many rows, the last action repeated (zeros would pull the guided chunk
            to the middle of the action space) or the tail cut.
        """
        rows = _of_space(space, self.model, self.robot)
        if not len(rows):
            return None
        if length is None:
            return rows.copy()
        if length < 1:
            raise ConfigError(f"left-over length must be >= 1; got {length!r}. Use None for all.")
        return rows[np.minimum(np.arange(length), len(rows) - 1)]

    def rtc_options(
        self,
        *,
        inference_delay: int,
        space: Space = "model",
        length: int | None = None,
        **options: Any,
    ) -> RTCOptions | None:
        """Return the option ``rtc`` of the request, or None when nothing is left to guide it.

        space: "robot" for policies with relative actions: their model-space actions are relative to
            an old state, so the server must express absolute ones against the current state.
        options: further fields of RTCOptions.
        """
        rows = self.left_over(space, length=length)
        if rows is None:
            return None
        return RTCOptions(rows, inference_delay, space=space, **options)


class ActionQueue:
    """Actions of the current chunk and how many of them were consumed; safe for two threads.

    n_action_steps: rows of a chunk that are executed when chunks are appended; None = all.

    >>> import numpy as np
    >>> from phyai.action_queue import ActionQueue
    >>> rows = np.arange(4, dtype=np.float32).reshape(2, 2)
    >>> queue = ActionQueue()
    >>> chunk = ActionChunk(rows, ("x", "y"), np.ones(2, bool), model_actions=rows)
    >>> queue.merge(chunk, ticket=queue.begin_request()), queue.pop().tolist(), len(queue)
    (True, [0.0, 1.0], 1)
    """

    def __init__(self, n_action_steps: int | None = None) -> None:
        if n_action_steps is not None and n_action_steps < 1:
            raise ConfigError(f"n_action_steps must be >= 1; got {n_action_steps!r}.")
        self.n_action_steps = n_action_steps
        self._lock = threading.Lock()
        self._model: Rows = np.zeros((0, 0), np.float32)
        self._robot: Rows = np.zeros((0, 0), np.float32)
        self._index = 0
        self._consumed = 0
        self._generation = 0
        self._requests = 0
        self._answered = 0

    def __len__(self) -> int:
        """Return how many actions are left."""
        with self._lock:
            return len(self._robot) - self._index

    @property
    def consumed(self) -> int:
        """Actions popped since construction or ``reset``."""
        with self._lock:
            return self._consumed

    def pop(self) -> Rows | None:
        """Return the next action [A] in robot units; None when the queue is empty."""
        with self._lock:
            if self._index >= len(self._robot):
                return None
            action: Rows = self._robot[self._index].copy()
            self._index += 1
            self._consumed += 1
            return action

    def left_over(self, space: Space = "model", *, length: int | None = None) -> Rows | None:
        """Return what is left now; see ``Ticket.left_over``, which belongs to a request."""
        return self.begin_request().left_over(space, length=length)

    def begin_request(self) -> Ticket:
        """Return the queue as it is now; call it when the observation is taken."""
        with self._lock:
            model, robot = self._model[self._index :], self._robot[self._index :]
            self._requests += 1
            return Ticket(
                self._requests, self._consumed, self._generation, model.copy(), robot.copy()
            )

    def merge(
        self,
        chunk: ActionChunk,
        *,
        ticket: Ticket,
        real_delay: int | None = None,
        rtc: bool = True,
    ) -> bool:
        """Take in the chunk that answers ``ticket``'s request.

        rtc: replace both queues by the chunk without its first ``real_delay`` rows, whose time has
            passed. False: append the chunk to what is left.
        real_delay: control periods since the request began, such as ``delay_from`` its latency;
            never more than were consumed meanwhile (an idle robot must not skip actions). None =
            as many as were consumed, which neither skips nor repeats one.

        Returns False, and changes nothing, when the queue was reset after the request began or
        already holds the answer to a later request.
        Raises: RequestError for a chunk whose rows do not fit.
        """
        model, robot = _rows_of(chunk)
        if real_delay is not None and real_delay < 0:
            raise RequestError(f"real_delay must be >= 0; got {real_delay!r}.")
        with self._lock:
            stale = rtc and ticket.number < self._answered
            if ticket.generation != self._generation or stale:
                return False
            if rtc:
                passed = self._consumed - ticket.consumed
                delay = passed if real_delay is None else min(real_delay, passed)
                self._model, self._robot = model[delay:].copy(), robot[delay:].copy()
                self._answered = ticket.number
            else:
                kept = slice(self.n_action_steps)
                self._model = self._joined(self._model, model[kept])
                self._robot = self._joined(self._robot, robot[kept])
            self._index = 0
            return True

    def reset(self) -> None:
        """Empty the queue, for a new episode; answers to earlier requests are ignored."""
        with self._lock:
            self._model, self._robot = self._model[:0], self._robot[:0]
            self._index = self._consumed = 0
            self._generation += 1

    def _joined(self, old: Rows, new: Rows) -> Rows:
        left = old[self._index :]
        if not len(left):
            return new.copy()
        if left.shape[1] != new.shape[1]:
            raise RequestError(
                f"chunk must have {left.shape[1]} action dims like the queue; got {new.shape[1]}. "
                "Call reset() between policies."
            )
        return np.concatenate([left, new])


def _of_space(space: Space, model: Rows, robot: Rows) -> Rows:
    if space not in ("model", "robot"):
        raise ConfigError(f"space must be 'model' or 'robot'; got {space!r}.")
    return model if space == "model" else robot


def _rows_of(chunk: ActionChunk) -> tuple[Rows, Rows]:
    """Return (model, robot) rows up to the first one that must not be executed."""
    model = np.asarray(chunk.model_actions, dtype=np.float32)
    robot = np.asarray(chunk.actions, dtype=np.float32)
    mask = np.asarray(chunk.mask, dtype=bool)
    if model.ndim != 2 or robot.ndim != 2 or not len(model) == len(robot) == len(mask):
        raise RequestError(
            "chunk must hold actions [H, A], model_actions [H, A_model] and mask [H]; got "
            f"{list(robot.shape)}, {list(model.shape)} and {list(mask.shape)}."
        )
    count = len(mask) if mask.all() else int(np.argmin(mask))
    return model[:count], robot[:count]
