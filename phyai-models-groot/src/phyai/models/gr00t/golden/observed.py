"""What the engine recorded, beside a fixture's tensors of another layout."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from phyai.golden import Records

_STEP = re.compile(r"step_(\d+)\.(\w+)")
_LATER_BLOCK = re.compile(r"vision\.block_[1-9]\d*")
"""A fixture has the first block and the last one, by its number; others fail the comparison."""
_EVERY_STEP = {
    "actions_in": "actions_in",
    "timestep": "timestep",
    "action_features": "action_features",
    "temb": "temb",
    "dit_out": "dit_out",
    "velocity": "native_velocity",
}
_RENAMED = {"out.backbone_features_processed": "head.features"}
_PER_ROW = ("head.state_features",)


class Observed:
    """The records of one run.

    mask: which places of the fixture's layout hold tokens, bool [B, S].
    padded: the VL layers ran on padded rows, padding on the left.
    """

    def __init__(self, records: Records, result: Any, mask: Tensor, *, padded: bool) -> None:
        self.records, self.mask, self.padded = records, mask, padded
        self.actions: Tensor = result.float().cpu()

    def one(self, name: str) -> Tensor:
        """Return what was recorded once; KeyError when nothing was."""
        return self.records[name][0]

    def pair(self, name: str, want: Tensor) -> tuple[Tensor, Tensor]:
        """Return the engine's tensor and the part of ``want`` it corresponds to.

        Raises: KeyError when the engine recorded nothing under that name.
        """
        if step := _STEP.fullmatch(name):
            number, part = int(step.group(1)), step.group(2)
            if part in _EVERY_STEP:
                values = self.records[f"steps.{_EVERY_STEP[part]}"]
                if number >= len(values):
                    raise KeyError(name)
                return values[number], want
            if number:
                raise KeyError(name)
            return self.one(f"step0.{part}"), want
        if name.startswith("vision.") or name in _PER_ROW:
            return self.one(_LATER_BLOCK.sub("vision.block_last", name)), want
        if name == "text.position_ids":
            return self.one(name), want[:, self.mask]
        got = self.one(_RENAMED.get(name, name))
        if self.padded and name.startswith(("head.", "out.")):
            return self._aligned(got), self._with_padding_left(want)
        if self.padded and name == "backbone.features":
            padding = self.one("backbone.padding").expand(int((~self.mask).sum()), -1)
            return torch.cat([got, padding]), torch.cat([want[self.mask], want[~self.mask]])
        return got, want[self.mask]

    def _aligned(self, got: Tensor) -> Tensor:
        return got.view(*self.mask.shape, -1)

    def _with_padding_left(self, want: Tensor) -> Tensor:
        """Return the fixture's rows with their padding first."""
        rows = [
            torch.cat([row[~mask], row[mask]]) for row, mask in zip(want, self.mask, strict=True)
        ]
        return torch.stack(rows)
