"""Index lists of one batch: which frames are new, what fills the window, where tokens stand.

Made on the host from lengths and counts alone. With static shapes the lists are padded to their
buckets, and surplus entries write to a place nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phyai.models.minicpm_robot_track.config import MiniCPMRobotTrackConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """Capacities of one row of a cache: text tokens and new frames; whether it keeps sessions."""

    text: int
    frames: int
    session: bool = False


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What is known of a row before it runs.

    text: its text tokens.  frames: its new frames.  fresh: it has no frames from before.
    """

    text: int
    frames: int
    fresh: bool = True


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """CPU int64 lists of a batch.

    frame_at: new frames in the input [rows * capacity].  current_at [rows]: each row's newest among
        those computed.  window_at [rows * history]: history slots in cat(slots before, new frames),
        without the former where no session is kept.
    positions, slots: table rows and places of the packed tokens.  control_at [rows].
    order: packed tokens in cat(windows, embedded text); None = the windows as they are.
    past_slots [rows * text]: places of the text computed before; None = text is packed too.
    key_mask [rows, stride]: None = every place holds a token.  dense: packed tokens are the layout.
    """

    rows: int
    stride: int
    text: int
    frame_at: Tensor
    current_at: Tensor
    window_at: Tensor
    positions: Tensor
    slots: Tensor
    control_at: Tensor
    order: Tensor | None
    past_slots: Tensor | None
    key_mask: Tensor | None
    dense: bool

    def tensors(self) -> dict[str, Tensor]:
        """Return the lists there are, by name."""
        names = ("frame_at", "current_at", "window_at", "positions", "slots", "control_at",
                 "order", "past_slots", "key_mask")  # fmt: skip
        found = {name: getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if value is not None}


def plan_batch(
    rows: Sequence[RowFacts],
    shape: Shape,
    config: MiniCPMRobotTrackConfig,
    rope_start: Callable[[int], int],
    *,
    static: bool,
) -> WindowPlan:
    """Return the plan of a batch.

    rope_start: table row of position 0 for a sequence of so many tokens.
    """
    count, window = len(rows), config.window_tokens
    lens = [row.text for row in rows]
    text = shape.text if static else max(lens)
    stride = text + window
    uniform = not static and len(set(lens)) == 1
    nowhere = count * stride
    mask = torch.arange(stride)[None] < torch.tensor(lens)[:, None] + window
    starts = [rope_start(n + window) for n in lens]
    order, past_slots = None, None
    if shape.session:
        positions = torch.cat(
            [s + n + torch.arange(window) for s, n in zip(starts, lens, strict=True)]
        )
        slots = torch.cat([r * stride + n + torch.arange(window) for r, n in enumerate(lens)])
        control = torch.arange(1, count + 1) * window - 1
        place = torch.arange(text)
        past_slots = torch.cat(
            [torch.where(place < n, r * stride + place, nowhere) for r, n in enumerate(lens)]
        )
    else:
        order, positions, slots, control = _whole_rows(lens, starts, shape, stride, window, static)
    first, frame_at = _new_frames(rows, shape, static)
    return WindowPlan(
        rows=count,
        stride=stride,
        text=text,
        frame_at=frame_at,
        current_at=torch.tensor(
            [at + max(r.frames, 1) - 1 for at, r in zip(first, rows, strict=True)]
        ),
        window_at=_window(rows, first, config.history_frames, kept=shape.session),
        positions=positions,
        slots=slots,
        control_at=control,
        order=order,
        past_slots=past_slots,
        key_mask=None if uniform else mask,
        dense=uniform and not shape.session,
    )


def _whole_rows(
    lens: Sequence[int],
    starts: Sequence[int],
    shape: Shape,
    stride: int,
    window: int,
    static: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return order, positions, slots and control tokens of rows that hold their text, too."""
    count = len(lens)
    order, positions, slots, control, packed = [], [], [], [], 0
    for r, (n, start) in enumerate(zip(lens, starts, strict=True)):
        token = torch.arange(n + window)
        unused = shape.text - n if static else 0
        behind = torch.zeros(unused, dtype=torch.int64)
        text_at = count * window + r * shape.text + torch.arange(n)
        order += [text_at, r * window + torch.arange(window), behind]
        positions += [start + token, behind]
        slots += [r * stride + token, behind + count * stride]
        control.append(packed + n + window - 1)
        packed += n + window + unused
    return torch.cat(order), torch.cat(positions), torch.cat(slots), torch.tensor(control)


def _new_frames(rows: Sequence[RowFacts], shape: Shape, static: bool) -> tuple[list[int], Tensor]:
    """Return where each row's new frames begin among those computed, and those in the input."""
    if static:
        first = [r * shape.frames for r in range(len(rows))]
        return first, torch.arange(len(rows) * shape.frames)
    first, at, done = [], [], 0
    for r, row in enumerate(rows):
        first.append(done)
        at.append(r * shape.frames + torch.arange(row.frames))
        done += row.frames
    return first, torch.cat(at)


def _window(rows: Sequence[RowFacts], first: Sequence[int], history: int, *, kept: bool) -> Tensor:
    """Return what fills each history slot; the earliest frame fills those before it."""
    offset = len(rows) * history if kept else 0
    slot, filled = torch.arange(history), []
    for r, (row, at) in enumerate(zip(rows, first, strict=True)):
        new = offset + at + slot - (history - row.frames)
        if row.fresh:
            filled.append(new.clamp(min=offset + at))
        else:
            old = r * history + slot + row.frames
            filled.append(torch.where(slot + row.frames < history, old, new))
    return torch.cat(filled)
