"""The adapter of MiniCPM-RobotTrack: load, prepare, and the parts core runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from phyai import hub
from phyai.adapter import Adapter, observations
from phyai.cache import Cache
from phyai.errors import ConfigError, RequestError
from phyai.layers import Placement
from phyai.models.minicpm.precision import choose_dtype
from phyai.models.minicpm.text import TOKENIZER
from phyai.models.minicpm_robot_track.args import MiniCPMRobotTrackArgs
from phyai.models.minicpm_robot_track.checkpoint import TrackWeights
from phyai.models.minicpm_robot_track.config import ACTION_NAMES, MiniCPMRobotTrackConfig
from phyai.models.minicpm_robot_track.network.head import TrajectoryHead
from phyai.models.minicpm_robot_track.network.plan import Shape
from phyai.models.minicpm_robot_track.network.policy import TrackPolicy
from phyai.models.minicpm_robot_track.observed import CAMERA, camera_frames, given_features
from phyai.models.minicpm_robot_track.prompts import PromptTokenizer
from phyai.models.minicpm_robot_track.request import (
    HostRow,
    MiniCPMRobotTrackRequest,
    assemble,
    request_rows,
    slot_times,
)
from phyai.models.minicpm_robot_track.vision import TowerSizes, VisionTowers
from phyai.sessions import session_rows
from phyai.solver import Direct
from phyai.types import (
    ActionChunk,
    BufferSpec,
    CacheSpec,
    Conditioning,
    Denoiser,
    Key,
    Observation,
    Output,
    Prepared,
    Solver,
)
from phyai.weights import update_tensors

if TYPE_CHECKING:
    from phyai.engine_config import EngineConfig
    from phyai.services import Services
    from phyai.types import Tensors
    from phyai.weights import LoadReport

OPTIONS = ("session_id", "seq", "stream_id", "frame_index", "coarse_tokens", "fine_tokens")
SESSION_NAMES = {"stream_id": "session_id", "frame_index": "seq"}
"""What robots of this model call a session and its requests -> core's names."""
UNITS = ("m", "m", "rad")
CONTROL_HZ = 10.0
"""Waypoints are 0.1 s apart."""
CONTROL_WAYPOINT = 1


@dataclass(frozen=True, slots=True)
class RowMeta:
    """What decoding a row needs: its instruction and how many frames it brought."""

    prompt: str
    frames: int


class MiniCPMRobotTrackAdapter(Adapter):
    """One MiniCPM-RobotTrack checkpoint and its vision towers behind the runtime."""

    name = "minicpm_robot_track"
    args_cls = MiniCPMRobotTrackArgs

    args: MiniCPMRobotTrackArgs

    def __init__(
        self, args: MiniCPMRobotTrackArgs, config: EngineConfig, services: Services
    ) -> None:
        super().__init__(args, config, services)
        self.dtype = choose_dtype(args.precision, services.dtype)

    # ------------------------------------------------------------ weights

    def load(self) -> LoadReport | None:
        args, services = self.args, self.services
        source = None
        if args.checkpoint_dir is not None:
            source = hub.resolve(args.checkpoint_dir, revision=args.revision)
        self.track = _config(args, source)
        self.max_text = args.max_text_tokens or self.track.max_text_tokens
        self.tokenizer = self._tokenizer(source)
        # In low precision faster kernels may keep more bits than the official code does.
        rounding = "official" if self.dtype == torch.float32 else "free"
        at = Placement(services.kernels, services.device, self.dtype, rounding)
        profile = services.profile
        self.policy = TrackPolicy(self.track, at.with_role("prefix"), profile, self.max_text)
        wide = at.with_dtype(torch.float32).with_role("expert")
        self.network = TrajectoryHead(self.track, wide, profile)
        self.towers = self._towers(at.with_role("vision"))
        owned = nn.ModuleDict({"prefix": self.policy, "expert": self.network})
        self.weights = TrackWeights(self.track, args, source)
        report = self.weights.load_into(owned, self.towers, self.dtype, services.progress)
        if self.towers is not None:
            owned["vision"] = self.towers
        self.modules = owned
        return report

    def _tokenizer(self, source: Path | None) -> PromptTokenizer | None:
        path: Path | None = None
        if self.args.tokenizer is not None:
            path = hub.resolve(self.args.tokenizer)
        elif source is not None and (source / TOKENIZER).is_file():
            path = source
        if path is None:
            return None
        return PromptTokenizer(path, self.track.backbone.vocab_size, self.max_text)

    def _towers(self, at: Placement) -> VisionTowers | None:
        args = self.args
        if args.dino_dir is not None and args.siglip_dir is not None:
            sizes = TowerSizes.from_folders(args.dino_dir, args.siglip_dir)
        elif args.towers_random:
            sizes = TowerSizes.released()
        else:
            return None
        if sizes.feature_dim != self.track.vision_feature_dim:
            raise ConfigError(
                "the vision towers' widths must add up to the checkpoint's vision_feature_dim, "
                f"{self.track.vision_feature_dim}; got {sizes.feature_dim}. Pass the towers it was "
                "trained with."
            )
        return VisionTowers(
            sizes,
            at,
            self.services.profile,
            coarse_tokens=self.track.coarse_tokens_per_frame,
            fine_tokens=self.track.fine_tokens_current_frame,
        )

    def refresh(self) -> None:
        # What sessions keep of their instruction was made with the old weights.
        self.policy.prompts.version += 1

    def update_weights(self, items: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        update_tensors(self.modules, self.weights.updates(items), remap=self.weights.updated_name)

    def dump_targets(self) -> Mapping[str, nn.Module]:
        return dict(self.modules.items())

    def expects(self) -> Mapping[str, Any]:
        return {
            "cameras": [CAMERA],
            "prompt": True,
            "tokenizer": str(self.tokenizer.path) if self.tokenizer is not None else "",
        }

    # ------------------------------------------------------------ a request

    def prepare(self, request: Any) -> Prepared:
        if isinstance(request, MiniCPMRobotTrackRequest):
            rows = request_rows(self.track, self.args.max_batch_size, request)
            return assemble(self.track, rows, max_text=self.max_text)
        try:
            seen = observations(request, max_rows=self.args.max_batch_size, options=OPTIONS)
        except TypeError as error:
            raise TypeError(
                f"plugin {self.name!r} takes an Observation, a list of them or "
                f"MiniCPMRobotTrackRequest; got {type(request).__name__}."
            ) from error
        named = [with_core_names(row) for row in seen]
        ids, seqs = session_rows(named)
        rows = [self._host_row(row) for row in named]
        meta = tuple(
            RowMeta(str(row.prompt), made.count) for row, made in zip(named, rows, strict=True)
        )
        return assemble(
            self.track, rows, max_text=self.max_text, meta=meta, session_ids=ids, seqs=seqs
        )

    def _host_row(self, observation: Observation) -> HostRow:
        if observation.state is not None:
            raise RequestError(
                "state must be left out: this model takes none; got one. Send state=None."
            )
        if self.tokenizer is None:
            raise RequestError(
                "an observation needs a tokenizer; this engine has none. Start it with tokenizer=, "
                "or send a MiniCPMRobotTrackRequest."
            )
        tokens, times = self.tokenizer.encode(observation.prompt), slot_times(self.track)
        if "coarse_tokens" in observation.options or "fine_tokens" in observation.options:
            coarse, fine = given_features(observation, self.track)
            return HostRow(tokens, times, coarse=coarse, fine=fine)
        if self.towers is None:
            raise RequestError(
                "images need the vision towers; this engine has none. Start it with dino_dir and "
                "siglip_dir, or send the options coarse_tokens and fine_tokens."
            )
        side = self.towers.sizes.image_size
        return HostRow(tokens, times, frames=camera_frames(observation, self.track, side))

    def start(self, cache: Cache) -> Tensors:
        """Return zeros: the head reads the control state alone."""
        control, config = cache["control"], self.track
        shape = (control.shape[0], config.num_waypoints, config.action_dim)
        return {"action": control.new_zeros(shape)}

    # ------------------------------------------------------------ parts

    def denoiser(self) -> Denoiser:
        return self.network

    def conditioning(self) -> Conditioning:
        return TrackConditioning(self)

    def cache(self) -> CacheSpec:
        return self._buffers

    def solver(self) -> Solver:
        return Direct()

    def output(self) -> Output:
        return TrackOutput(self.args)

    @staticmethod
    def row_shape(key: Key) -> Shape:
        """Return the capacities of one row of a key's cache."""
        return Shape(key.bucket("text"), key.bucket("frames"), bool(dict(key.extra)["session"]))

    def _buffers(self, key: Key) -> Mapping[str, BufferSpec]:
        return self.policy.cache_buffers(self.row_shape(key))


class TrackConditioning:
    """Makes a batch's lists and new instructions' keys on the host; then encodes the window."""

    def __init__(self, adapter: MiniCPMRobotTrackAdapter) -> None:
        self.adapter = adapter

    def plan(self, cache: Cache, batch: Prepared) -> None:
        adapter = self.adapter
        static = adapter.services.graphs.static_shapes
        adapter.policy.load_plan(cache, batch, adapter.row_shape(cache.key), static=static)

    def encode(self, cache: Cache) -> None:
        self.adapter.policy.encode(cache, self.adapter.towers)


class TrackOutput:
    """Waypoints as the head gives them, and the base velocity that follows from them."""

    def __init__(self, args: MiniCPMRobotTrackArgs) -> None:
        self.limits = args.velocity_limits

    def decode(self, x: Tensors, cache: Cache, prepared: Prepared) -> list[ActionChunk]:
        if prepared.meta is None:
            raise RequestError("a model request has no robot units; ask for its tensors.")
        model = x["action"].float().cpu().numpy()
        return [self._chunk(rows, meta) for rows, meta in zip(model, prepared.meta, strict=True)]

    def _chunk(self, waypoints: np.ndarray, meta: RowMeta) -> ActionChunk:
        return ActionChunk(
            actions=waypoints,
            names=ACTION_NAMES,
            mask=np.ones(len(waypoints), dtype=bool),
            model_actions=waypoints.copy(),
            control_hz=CONTROL_HZ,
            units=UNITS,
            info={
                "base_velocity": base_velocity(waypoints, self.limits),
                "prompt": meta.prompt,
                "frames": meta.frames,
            },
        )

    def tensors(self, x: Tensors, cache: Cache, prepared: Prepared) -> Tensor:
        return x["action"]


def base_velocity(waypoints: np.ndarray, limits: Sequence[float] | None = None) -> dict[str, float]:
    """Return the velocity towards waypoint 1: x, y in m/s and yaw in rad/s.

    limits: (m/s, rad/s) each component is clipped to; None = none.

    >>> base_velocity(np.array([[0.0, 0.0, 0.0], [0.05, 0.0, -0.5]]), (0.15, 0.3))
    {'x': 0.15, 'y': 0.0, 'yaw': -0.3}
    """
    dt = CONTROL_WAYPOINT / CONTROL_HZ
    speeds = [float(value) / dt for value in waypoints[CONTROL_WAYPOINT]]
    if limits is not None:
        most = (limits[0], limits[0], limits[1])
        speeds = [float(np.clip(v, -m, m)) for v, m in zip(speeds, most, strict=True)]
    return dict(zip(ACTION_NAMES, speeds, strict=True))


def with_core_names(observation: Observation) -> Observation:
    """Return the observation with ``stream_id`` and ``frame_index`` under core's names.

    Raises: RequestError when one is sent under both names.
    """
    if not SESSION_NAMES.keys() & observation.options.keys():
        return observation
    options = dict(observation.options)
    for name, core in SESSION_NAMES.items():
        if name not in options:
            continue
        if core in options:
            raise RequestError(
                f"option {name} must be left out beside {core}, which it is another name of; got "
                "both. Send one of them."
            )
        options[core] = options.pop(name)
    return replace(observation, options=options)


def _config(args: MiniCPMRobotTrackArgs, source: Path | None) -> MiniCPMRobotTrackConfig:
    if args.config is not None:
        return args.config
    if source is None:
        return MiniCPMRobotTrackConfig.released()
    if source.is_file():
        raise ConfigError(
            f"checkpoint_dir must be a folder or hub id when no config is given; got the file "
            f"{source}. Pass its folder, or config=."
        )
    return MiniCPMRobotTrackConfig.from_folder(source)
