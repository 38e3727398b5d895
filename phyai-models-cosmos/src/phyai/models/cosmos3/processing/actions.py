"""Action modes: which frames and rows of a request are given, and where its rows start in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phyai.errors import RequestError, did_you_mean
from phyai.models.cosmos3.processing.checks import check_integer, float_rows

Mode = Literal["policy", "forward_dynamics", "inverse_dynamics"]
MODES: tuple[Mode, ...] = get_args(Mode)
MAX_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class ActionPlan:
    """What is given and what is made.

    chunk: actions asked for; the clip has one frame more.  rows: action rows of the network, first
    those of the history, the present state being its last.  raw_dim: channels in use.
    clean_frames, clean_rows: latent frames and action rows that are given.
    start: frame at which row 0 lies, 0 for a state at the first frame.

    >>> plan = action_plan("policy", chunk=32, raw_dim=8, history=1)
    >>> plan.rows, plan.clean_frames, plan.clean_rows, plan.start, plan.latent_frames
    (33, (0,), (0,), 0, 9)
    """

    mode: Mode
    chunk: int
    rows: int
    raw_dim: int
    clean_frames: tuple[int, ...]
    clean_rows: tuple[int, ...]
    start: int
    latent_frames: int

    @property
    def frames(self) -> int:
        """Return the pixel frames of the clip."""
        return self.chunk + 1

    @property
    def history(self) -> int:
        """Return the rows in front of the actions."""
        return self.rows - self.chunk


def check_mode(mode: Any) -> Mode:
    """Return the mode.  Raises: RequestError listing them."""
    for known in MODES:
        if isinstance(mode, str) and mode == known:
            return known
    raise RequestError(
        f"mode must be one of {', '.join(MODES)}; got {mode!r}."
        f"{did_you_mean(str(mode), MODES)} Rename it."
    )


def action_plan(
    mode: Any, *, chunk: Any, raw_dim: int, history: int = 0, temporal: int = 4
) -> ActionPlan:
    """Return the plan of a request.

    chunk: actions, a multiple of ``temporal``, the frames of one latent.
    history: clean rows in front of the actions, the present state being the last; policy only.
    Raises: RequestError.
    """
    mode = check_mode(mode)
    chunk = check_integer("action_chunk", chunk, 1, MAX_CHUNK)
    if chunk % temporal:
        raise RequestError(
            f"action_chunk must be a multiple of {temporal}, the frames of a latent; got {chunk}. "
            f"Take {max(temporal, round(chunk / temporal) * temporal)}."
        )
    history = check_integer("history_length", history, 0, 64)
    if history and mode != "policy":
        raise RequestError(
            f"history_length must be 0 in mode {mode}; got {history}. Only a policy sees a state."
        )
    rows, latents = history + chunk, chunk // temporal + 1
    return ActionPlan(
        mode,
        chunk,
        rows,
        raw_dim,
        tuple(range(latents)) if mode == "inverse_dynamics" else (0,),
        tuple(range(rows)) if mode == "forward_dynamics" else tuple(range(history)),
        1 - history,
        latents,
    )


def given_actions(raw_actions: Any, plan: ActionPlan) -> NDArray[np.float32]:
    """Return the actions that forward dynamics follows, float32 [chunk, raw_dim].

    Short sequences repeat their last row, long ones are cut.
    Raises: RequestError.
    """
    if raw_actions is None:
        raise RequestError(
            "raw_actions must be sent in mode forward_dynamics; got none. "
            f"Send [T, {plan.raw_dim}]."
        )
    rows = float_rows("raw_actions", raw_actions, plan.raw_dim)[: plan.chunk]
    missing = plan.chunk - len(rows)
    return np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)]) if missing else rows


def known_actions(
    rows: int,
    raw_dim: int,
    action_dim: int,
    clean_rows: Sequence[int] = (),
    given: Tensor | NDArray[np.float32] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return mask (bool) and values (float32) of the known action elements.

    given: of the clean rows, [..., len(clean_rows), >= raw_dim]; channels from raw_dim on are known
        zeros in every row.
    Shapes: mask [rows, action_dim], values [..., rows, action_dim].

    >>> mask, values = known_actions(3, 1, 2, (0,), torch.ones(1, 1))
    >>> mask.tolist(), values.tolist()
    ([[True, True], [False, True], [False, True]], [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    """
    mask = torch.zeros(rows, action_dim, dtype=torch.bool)
    mask[:, raw_dim:] = True
    if given is None:
        return mask, torch.zeros(rows, action_dim)
    clean = torch.as_tensor(given)
    mask[list(clean_rows)] = True
    values = torch.zeros(*clean.shape[:-2], rows, action_dim)
    values[..., list(clean_rows), :raw_dim] = clean[..., :raw_dim]
    return mask, values


def fill_clip(frames: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Return ``count`` frames: cut at the end, or with the last one repeated.

    >>> fill_clip(np.arange(2, dtype=np.uint8).reshape(2, 1, 1, 1), 3).ravel()
    array([0, 1, 1], dtype=uint8)
    """
    missing = count - len(frames)
    if missing <= 0:
        return frames[:count]
    return np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
