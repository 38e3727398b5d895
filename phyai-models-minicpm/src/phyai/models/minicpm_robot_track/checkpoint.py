"""Loads the weights of a MiniCPM-RobotTrack checkpoint: released names, or those before them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from phyai.errors import CheckpointError, WeightUpdateError
from phyai.models.minicpm_robot_track.config import MiniCPMRobotTrackConfig
from phyai.models.minicpm_robot_track.vision import (
    VisionTowers,
    load_towers,
    tower_update_name,
)
from phyai.services import Progress
from phyai.weights import (
    FiniteSource,
    LoadReport,
    TensorSource,
    load_pretrained,
    open_source,
    randomize,
    remapper,
)

if TYPE_CHECKING:
    from phyai.models.minicpm_robot_track.args import MiniCPMRobotTrackArgs

SCALE = "output_scale"
_WRAPPERS = ("model.", "module.")
_LEGACY_PREFIXES = (
    ("llm.", "backbone."),
    ("proj.net.", "vision_projector.layers."),
    ("tvi.time_emb.", "temporal_markers.time_embedding."),
    ("tvi.view_emb.", "temporal_markers.camera_embedding."),
    ("tvi.kind_emb.", "temporal_markers.stream_embedding."),
    ("planner.mlp.", "trajectory_head.layers."),
)
_LEGACY_NAMES = {"act_token": "control_query", "alpha_task": SCALE}
_DROPPED = ("tvi.angle_proj.", "tvi.bbox_proj.")
_TABLES = ".rotary_emb."
"""Rotary frequencies that older files store; they follow from the config."""


def released_name(stored: str) -> str | None:
    """Return the released name of a stored tensor; None for one that nothing reads.

    >>> released_name("model.llm.norm.weight"), released_name("act_token")
    ('backbone.norm.weight', 'control_query')
    >>> released_name("tvi.bbox_proj.weight") is None
    True
    """
    name = stored
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    if name.startswith(_DROPPED) or (_TABLES in name and name.startswith(("backbone.", "llm."))):
        return None
    for old, new in _LEGACY_PREFIXES:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return _LEGACY_NAMES.get(name, name)


class TrackWeights:
    """Where one adapter's weights come from."""

    def __init__(
        self, config: MiniCPMRobotTrackConfig, args: MiniCPMRobotTrackArgs, source: Path | None
    ) -> None:
        self.config, self.args, self.source = config, args, source
        self._before = remapper(args.weight_remap)

    def name(self, stored: str) -> str | None:
        """Return the claimed name of a stored tensor, None for one nobody reads."""
        renamed = self._before(stored)
        name = None if renamed is None else released_name(renamed)
        return None if name == SCALE else name

    def load_into(
        self,
        policy: nn.Module,
        towers: VisionTowers | None,
        stored: torch.dtype,
        progress: Progress,
    ) -> LoadReport | None:
        """Fill the modules strictly from their folders, or with random weights where there is none.

        stored: dtype of the checkpoint that random weights stand for.
        Raises: CheckpointError and its kinds; also for NaN or infinity in a tensor, and for an
            output scale that is not the config's.
        """
        args = self.args
        report = None
        if self.source is None:
            randomize(policy, args.seed, stored=stored, progress=progress)
        else:
            source = FiniteSource(open_source(self.source, remap=self.name))
            self._check_scale(source)
            report = load_pretrained(
                policy, source, remap=self.name, strict=args.weight_strict, progress=progress
            )
        if towers is None:
            return report
        if args.dino_dir is None or args.siglip_dir is None:
            randomize(towers, args.seed + 1, stored=stored, progress=progress)
        else:
            load_towers(
                towers,
                args.dino_dir,
                args.siglip_dir,
                strict=args.weight_strict,
                progress=progress,
            )
        return report

    def updated_name(self, name: str) -> str | None:
        """Return the claimed name of an updated tensor; the towers' start with their tower's."""
        if name.startswith(("dino.", "siglip.")):
            return tower_update_name(name)
        return self.name(name)

    def updates(
        self, items: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
    ) -> Mapping[str, Tensor] | Iterator[tuple[str, Tensor]]:
        """Return the items of an update; WeightUpdateError for another output scale."""
        if not isinstance(items, Mapping):
            return ((name, self._update(name, tensor)) for name, tensor in items)
        return {name: self._update(name, tensor) for name, tensor in items.items()}

    def _update(self, name: str, tensor: Tensor) -> Tensor:
        problem = self._scale_problem(name, tensor, "the update")
        if problem:
            raise WeightUpdateError(problem)
        return tensor

    def _check_scale(self, source: TensorSource) -> None:
        for stored in source.infos():
            if self._is_scale(stored):
                problem = self._scale_problem(stored, source.read(stored), source.label)
                if problem:
                    raise CheckpointError(problem)

    def _is_scale(self, stored: str) -> bool:
        renamed = self._before(stored)
        return renamed is not None and released_name(renamed) == SCALE

    def _scale_problem(self, stored: str, tensor: Tensor, where: str) -> str:
        """Return what is wrong with a stored output scale, which must be the config's; or ""."""
        if not self._is_scale(stored):
            return ""
        # a file in low precision holds the rounded scale
        stored_as = tensor.dtype if tensor.is_floating_point() else torch.float32
        want = torch.tensor(self.config.output_scale).to(stored_as).float()
        got = tensor.detach().float().cpu().flatten()
        if torch.equal(got, want):
            return ""
        return (
            f"{stored!r} of {where} must be {want.tolist()}, as xy_scale of the config says; got "
            f"{got.tolist()[:8]}. Correct the config."
        )
