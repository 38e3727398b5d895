"""Upper bounds of what a client may send; each is checked before memory is taken for it."""

from __future__ import annotations

from phyai_gateway.messages import Fault

MIB = 1024 * 1024

MAX_PAYLOAD_BYTES = 64 * MIB
"""One request, all parts together."""
MAX_TEXT_BYTES = 64 * 1024
"""One prompt, name or other text."""
MAX_TEXTS_BYTES = 1024 * 1024
"""All texts of one request: a text takes up to four times its bytes once it is read."""
MAX_RANK = 6
MAX_DIM = 1 << 20
MAX_IMAGE_PIXELS = 4096 * 4096
MAX_CAMERAS = 16
MAX_STATE_VALUES = 4096
MAX_REORDERED_SLICES = 1 << 16
"""Copies that turning one column-major array into row-major order may take."""
MAX_MSGPACK_DEPTH = 16
MAX_MSGPACK_ITEMS = 4096
"""Entries of one map or list."""
MAX_MSGPACK_NODES = 10_000
MAX_PICKLE_OPS = 10_000
"""A robot with 100 joints and 8 cameras needs about 1,000."""
MAX_PICKLE_STACK = 4096
MAX_PICKLE_MARKS = 64
MAX_PICKLE_MEMO = 10_000
MAX_NPY_HEADER_BYTES = 4096


class DecodeError(Fault):
    """Bytes that can't be read, or may not be: ``invalid_argument`` with the rule they break.

    >>> DecodeError("payload is empty. Send an observation.").status
    'invalid_argument'
    """

    def __init__(self, message: str) -> None:
        super().__init__("invalid_argument", message)


class ByteBudget:
    """Bytes of requests that a listener holds at one time.

    >>> budget = ByteBudget(10)
    >>> with budget.hold(8):
    ...     budget.used
    8
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.used = limit_bytes, 0

    def hold(self, num_bytes: int) -> _Held:
        """Return a context manager that counts the bytes while it is open.

        Raises: Fault ``resource_exhausted`` when they would pass the limit.
        """
        if self.used + num_bytes > self.limit_bytes:
            raise Fault(
                "resource_exhausted",
                f"requests under way may hold {self.limit_bytes} bytes; {self.used} are held. "
                "Try again.",
                retry_after=0.1,
            )
        self.used += num_bytes
        return _Held(self, num_bytes)


class _Held:
    def __init__(self, budget: ByteBudget, num_bytes: int) -> None:
        self._budget, self._num_bytes = budget, num_bytes

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._budget.used -= self._num_bytes
        self._num_bytes = 0
