"""Writes the text a checkpoint was trained on: cleaned task, and for pi0.5 the state as bins.

Family and model decide (Source: LeRobot 0.6.1 processors, openpi tokenizer):

    openpi pi0, and any checkpoint without state in its prompt   clean(task) and a newline
    pi0.5, both families     Task: {clean(task)}, State: {bins};\nAction:
    LeRobot pi0              task as it is, newline appended when absent
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 256
# float64 edges: rounding them to float32 would move values that sit on an edge.
_BIN_EDGES = np.linspace(-1.0, 1.0, NUM_BINS + 1)[:-1]


def clean(prompt: str) -> str:
    """Return the prompt stripped, with underscores and newlines as spaces, case kept.

    Stripping comes first, so a trailing underscore becomes a trailing space, as in openpi.
    """
    return prompt.strip().replace("_", " ").replace("\n", " ")


def discretise_state(state: Any) -> NDArray[np.int64]:
    """Return the bin of every normalised state value, from -1 (below -1) to 255.

    Shapes: state [D] float, compared in its own precision -> int64 [D].
    bin = (number of edges <= s) - 1 with edges -1 + k / 128, k = 0..255; nothing is clipped.
    """
    bins = np.digitize(np.asarray(state), bins=_BIN_EDGES) - 1
    return np.asarray(bins, dtype=np.int64)


def pad_state(state: NDArray[Any], dim: int | None) -> NDArray[Any]:
    """Return the state right-padded with zeros to ``dim`` values; None leaves it as it is."""
    if dim is None or state.shape[-1] >= dim:
        return state
    return np.concatenate([state, np.zeros(dim - state.shape[-1], dtype=state.dtype)])


def state_prompt(prompt: str, state: Any, *, state_prompt_dim: int | None = None) -> str:
    """Return the pi0.5 text: task and state bins.

    state: [D] normalised, in robot dims.
    state_prompt_dim: None, or 32 for checkpoints trained when LeRobot (up to 0.4) padded the
    state before discretising; the files do not record which.

    >>> from phyai.models.pi.processing.prompts import state_prompt
    >>> state_prompt("pick_up the cup", [0.0, -1.0])
    'Task: pick up the cup, State: 128 0;\\nAction: '
    """
    values = pad_state(np.asarray(state), state_prompt_dim)
    bins = " ".join(str(value) for value in discretise_state(values))
    return f"Task: {clean(prompt)}, State: {bins};\nAction: "


def newline_prompt(prompt: str) -> str:
    """Return the LeRobot pi0 text: the task as it is, ending in a newline."""
    return prompt if prompt.endswith("\n") else prompt + "\n"


def prompt_parts(
    prompt: str,
    *,
    family: str,
    model: str,
    state_in_prompt: bool,
    state: Any = None,
    state_prompt_dim: int | None = None,
) -> tuple[str, ...]:
    """Return the strings to encode one after another; joined they are the prompt's text.

    openpi encodes the newline of the plain form in a call of its own, which can give other
    token ids than encoding the joined text.
    """
    if state_in_prompt:
        return (state_prompt(prompt, state, state_prompt_dim=state_prompt_dim),)
    if family == "lerobot" and model == "pi0":
        return (newline_prompt(prompt),)
    return (clean(prompt), "\n")
