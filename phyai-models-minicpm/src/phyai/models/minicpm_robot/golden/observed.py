"""What the engine recorded, beside a fixture's tensors of another layout."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from phyai.golden import Records
from phyai.models.minicpm_robot.golden.cases import Case
from phyai.models.minicpm_robot.network.text_cases import prefix_case

_STEP = re.compile(r"act\.step(\d+)\.(\w+)")
_LAYER = re.compile(r"act\.layers\.(\d+)")
_HEAD = re.compile(r"act\.(temb|time_proj|action_time_sinusoid|dit\..+)")
_TOWER = re.compile(r"act\.(embeddings|encoder\..+|vit_merger(?:\..+)?|post_layernorm)")
_PREFIX = re.compile(r"prefix_layer\d+_\w+")
_TOWER_LISTS = ("position_ids", "window_index", "window_cu_seqlens", "image_features")
_TEXT = ("inputs_embeds", "last_hidden_state")
INSIDE_STEP = 1
"""The step whose inner activations the fixtures hold."""


class Observed:
    """The records of one run."""

    def __init__(self, case: Case, records: Records, result: Any, adapter: Any) -> None:
        self.case, self.records = case, records
        self.actions: Tensor = result.float().cpu()
        self.adapter = adapter

    def pair(self, name: str, want: Tensor) -> tuple[Tensor, Tensor]:
        """Return the engine's tensor and the part of ``want`` it corresponds to.

        Raises: KeyError when the engine recorded nothing under that name.
        """
        if name == "actions":
            return self.actions, want
        if match := _STEP.fullmatch(name):
            return self._at(f"head.{match[2]}", int(match[1])), want
        if match := _HEAD.fullmatch(name):
            steps = len(self.records[f"head.{match[1]}"])
            return self._at(f"head.{match[1]}", min(INSIDE_STEP, steps - 1)), want
        if match := _LAYER.fullmatch(name):
            return self._at(f"text.layer_{match[1]}_out"), self._packed(want)
        if name in _TEXT:
            return self._at(f"text.{name}"), self._packed(want)
        if match := _TOWER.fullmatch(name):
            return self._at(f"vision.{match[1]}"), want.flatten(0, 1)
        if name in _TOWER_LISTS:
            return self._at(f"vision.{name}"), want
        if _PREFIX.fullmatch(name):
            return self._prefix()[name], want
        raise KeyError(name)

    def _at(self, name: str, step: int = 0) -> Tensor:
        values = self.records[name]
        if step >= len(values):
            raise KeyError(name)
        return values[step]

    def _packed(self, want: Tensor) -> Tensor:
        """Return the tokens of padded rows [B, S, W] that are none of padding, [M, W]."""
        mask = self.case.tensors.get("attention_mask")
        return want.flatten(0, 1) if mask is None else want[mask == 1]

    def _prefix(self) -> dict[str, Tensor]:
        """Return the states behind a prefix of the case's own first inputs."""
        tensors = self.case.tensors
        embeds = self._at("text.inputs_embeds").view(*tensors["input_ids"].shape, -1)
        decoder = self.adapter.prefix.text
        with torch.no_grad():
            found = prefix_case(
                decoder, embeds.to(decoder.embedding.device), int(tensors["prefix_len"])
            )
        return {name: value.cpu() for name, value in found.items()}
