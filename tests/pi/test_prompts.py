"""Prompt text: cleaning, state bins at the edges, and the form of each family."""

from __future__ import annotations

import numpy as np
import pytest

from phyai.models.pi.processing.prompts import (
    clean,
    discretise_state,
    pad_state,
    prompt_parts,
    state_prompt,
)


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        ("  pick_up the cup\n", "pick up the cup"),
        ("a\nb", "a b"),
        ("cup_", "cup "),
        ("Turn ON", "Turn ON"),
        ("", ""),
    ],
)
def test_clean(prompt: str, want: str) -> None:
    assert clean(prompt) == want


def test_bins_at_the_edges_are_not_clipped() -> None:
    state = np.array([-1.1, -1.0, 0.0, 0.9921875, 1.0, 7.0], np.float32)
    assert discretise_state(state).tolist() == [-1, 0, 128, 255, 255, 255]
    below = np.nextafter(np.float32(0.9921875), np.float32(0))
    assert discretise_state([below])[0] == 254


def test_state_prompt_dim_pads_with_zeros_only_when_asked() -> None:
    plain = state_prompt("go", np.zeros(2, np.float32))
    padded = state_prompt("go", np.zeros(2, np.float32), state_prompt_dim=32)
    assert plain == "Task: go, State: 128 128;\nAction: "
    assert padded.count("128") == 32
    assert pad_state(np.zeros(40), 32).shape == (40,)


@pytest.mark.parametrize(
    ("family", "model", "in_prompt", "want"),
    [
        ("lerobot", "pi0", False, ("a_b \n",)),
        ("openpi", "pi0", False, ("a b", "\n")),
        ("openpi", "pi05", False, ("a b", "\n")),
        ("lerobot", "pi05", False, ("a b", "\n")),
        ("lerobot", "pi05", True, ("Task: a b, State: 128;\nAction: ",)),
        ("openpi", "pi05", True, ("Task: a b, State: 128;\nAction: ",)),
    ],
)
def test_form_of_each_family(
    family: str, model: str, in_prompt: bool, want: tuple[str, ...]
) -> None:
    parts = prompt_parts("a_b ", family=family, model=model, state_in_prompt=in_prompt, state=[0.0])
    assert parts == want


def test_newline_is_not_doubled() -> None:
    parts = prompt_parts("go\n", family="lerobot", model="pi0", state_in_prompt=False)
    assert parts == ("go\n",)
