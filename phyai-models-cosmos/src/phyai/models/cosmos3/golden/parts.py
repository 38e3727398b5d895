"""Cases of single parts: sampler, autoencoder, sound decoder, rotary positions and time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phyai.adapter import Adapter
from phyai.golden import Comparison, GoldenRun, Records, absolute, exact, unknown
from phyai.kernels import KernelTable
from phyai.layers import Placement
from phyai.models.cosmos3.checkpoint_files import SOUND_FOLDER, VAE_FOLDER
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.golden.cases import (
    ROPE,
    SIGMAS,
    SOUND,
    SOUND_CLAMPED,
    TRAJECTORY,
    VAE,
    Case,
)
from phyai.models.cosmos3.network.positions import (
    action_positions,
    sound_positions,
    video_positions,
)
from phyai.models.cosmos3.network.rope import MRope
from phyai.models.cosmos3.network.time_embedding import time_features
from phyai.models.cosmos3.request import Cosmos3T2VRequest
from phyai.models.cosmos3.scheduler_files import read_scheduler
from phyai.models.cosmos3.sound import SoundConfig, SoundDecoder
from phyai.models.cosmos3.vae import SpatialTiling, VAEConfig, WanVAE
from phyai.types import Key, Prediction, Step
from phyai.unipc import UniPC, timestep

_SCHEDULE = re.compile(r"(nv_flow|df_flow|df_karras)_n(\d+)(?:_s([\d.]+))?\.(\w+)")
USUAL_FPS = 15.0
"""Of positions whose case names no other."""
_TILED = re.compile(r"decoded_tiled_(\d+)_(\d+)")


def _plain(case: Case, compare: Callable[[], list[Comparison]]) -> list[GoldenRun]:
    def run(adapter: Adapter | None, result: Any, records: Records) -> list[Comparison]:
        with torch.no_grad():
            return compare()

    return [GoldenRun(case.stem, run)]


def _cpu() -> Placement:
    return Placement(KernelTable(), torch.device("cpu"), torch.float32)


# ---------------------------------------------------------------- sampler


class _Analytic:
    """The stored trajectories' velocity: sin(1.3 x + 0.002 t) + 0.3 x cos(0.001 t)."""

    prediction: Prediction = "velocity"

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, x: dict[str, Tensor], step: Step, cache: Any) -> dict[str, Tensor]:
        state, time = x["x"], torch.tensor(float(timestep(step.sigma)))
        self.seen.append(state)
        wave = torch.sin(1.3 * state + 0.002 * time)
        return {"x": wave + 0.3 * state * torch.cos(0.001 * time)}


def sampler_runs(case: Case) -> list[GoldenRun]:
    """Return the run of a case: every schedule's levels, timesteps and trajectory."""
    return _plain(case, lambda: [_sampled(case, n) for n in case.tensors if n != "x_init"])


def _sampled(case: Case, name: str) -> Comparison:
    match = _SCHEDULE.fullmatch(name)
    if match is None:
        return unknown(name)
    kind, count, shift, part = match.groups()
    schedule = {"nv_flow": "native", "df_flow": "diffusers_flow", "df_karras": "karras"}[kind]
    grid_name = read_scheduler(case.root).grid(schedule, None if shift is None else float(shift))
    solver, want = UniPC(), case.tensors[name]
    grid = solver.grid(Key(num_steps=int(count), grid=grid_name))
    if part == "sigmas":
        return absolute(name, torch.tensor([*(s.sigma for s in grid), 0.0]), want, SIGMAS)
    if part == "timesteps":
        return exact(name, torch.tensor([timestep(s.sigma) for s in grid]), want)
    if part == "traj":
        network = _Analytic()
        cache: Any = None
        end = solver.solve(network, {"x": case.tensors["x_init"]}, cache, grid)
        got = torch.stack([*network.seen[1:], end["x"]])
        return absolute(name, got, want, TRAJECTORY)
    return unknown(name)


# ---------------------------------------------------------------- autoencoder, sound


def vae_runs(case: Case) -> list[GoldenRun]:
    """Return the run of a case: encode, normalise, decode whole and in tiles."""

    def compare() -> list[Comparison]:
        folder = case.root / VAE_FOLDER
        vae = WanVAE(VAEConfig.from_folder(folder), _cpu())
        vae.load(folder)
        pixels = case.tensors["pixels"]
        moments = vae.encode(pixels)
        names = [n for n in case.tensors if n not in ("pixels", "rand_latent_raw")]
        return [_coded(case, name, vae, moments) for name in names]

    return _plain(case, compare)


def _coded(case: Case, name: str, vae: WanVAE, moments: Tensor) -> Comparison:
    tensors = case.tensors
    raw, mean = tensors["latent_raw"], moments[:, : vae.config.z_dim]
    made: dict[str, Callable[[], Tensor]] = {
        "enc_moments": lambda: moments,
        "latent_raw": lambda: mean,
        "latent_norm": lambda: vae.normalise(mean),
        "latent_raw_first_frame": lambda: vae.encode_mean(tensors["pixels"][:, :, :1]),
        "decoded_unclamped": lambda: vae.decode(raw, clamp=False),
        "decoded": lambda: vae.decode(raw),
        "rand_decoded": lambda: vae.decode(tensors["rand_latent_raw"]),
    }
    if match := _TILED.fullmatch(name):
        tiling = SpatialTiling(tile=int(match[1]), stride=int(match[2]))
        return absolute(name, vae.decode(raw, tiling=tiling), tensors[name], VAE)
    if name not in made:
        return unknown(name)
    return absolute(name, made[name](), tensors[name], VAE)


def sound_decoder(case: Case) -> SoundDecoder:
    """Return the checkpoint's sound decoder, float32 on the CPU."""
    folder = case.root / SOUND_FOLDER
    decoder = SoundDecoder(SoundConfig.from_folder(folder), _cpu())
    decoder.load(folder)
    return decoder


def sound_runs(case: Case) -> list[GoldenRun]:
    """Return the run of a case: the waveform, before and after it is clamped."""

    def compare() -> list[Comparison]:
        raw = sound_decoder(case).decode(case.tensors["latent"], clamp=False)
        found = []
        for name, want in case.tensors.items():
            if name == "waveform":
                found.append(absolute(name, raw.clamp(-1.0, 1.0), want, SOUND_CLAMPED))
            elif name == "waveform_unclamped":
                found.append(absolute(name, raw, want, SOUND * float(want.abs().max())))
            elif name != "latent":
                found.append(unknown(name))
        return found

    return _plain(case, compare)


# ---------------------------------------------------------------- positions and time


def rope_runs(case: Case) -> list[GoldenRun]:
    """Return the run of a case; a small request opens the network whose time weights count."""
    config = Cosmos3Config.from_folder(case.root)
    side = config.latent_patch_size
    request = Cosmos3T2VRequest(
        text_ids=torch.zeros(1, 1, dtype=torch.int64),
        video_shape=(1, side, side),
        fps=None,
        num_inference_steps=1,
        guidance_scale=1.0,
        seed=0,
    )

    def compare(adapter: Any, result: Any, records: Records) -> list[Comparison]:
        inputs = ("position_ids", "time.t")
        with torch.no_grad():
            return [
                _placed(case, name, config, adapter) for name in case.tensors if name not in inputs
            ]

    return [GoldenRun(case.stem, compare, case.generation_args(), request, records=())]


def _placed(case: Case, name: str, config: Cosmos3Config, adapter: Any) -> Comparison:
    tensors, want = case.tensors, case.tensors[name]
    if name in ("cos", "sin"):
        cos, sin = MRope(config, _cpu())(tensors["position_ids"])
        return absolute(name, cos if name == "cos" else sin, want, ROPE)
    if name == "time.freq":
        return absolute(name, time_features(tensors["time.t"], config.timestep_scale), want, ROPE)
    if name == "time.embed":
        return absolute(name, adapter.network.time(tensors["time.t"].long()), want, ROPE)
    built = _ids(name, config, want, float(case.facts.get("fps") or USUAL_FPS))
    if built is None:
        return unknown(name)
    built[0] += _behind_text(case, config)
    return exact(name, built, want)


def _behind_text(case: Case, config: Cosmos3Config) -> int:
    """Return where media begin in time, which the stored positions all share.

    Frames and sound begin there; actions do not, those from before even lie in front of it. A whole
    number, being that of the text's tokens.
    """
    names = sorted((name for name in case.tensors if name.startswith("ids.")), key=_is_action)
    for name in names:
        want = case.tensors[name]
        built = _ids(name, config, want, float(case.facts.get("fps") or USUAL_FPS))
        if built is not None:
            return round(float(want[0, 0]) - float(built[0, 0]))
    return 0


def _is_action(name: str) -> bool:
    return name.startswith("ids.action")


def _ids(name: str, config: Cosmos3Config, want: Tensor, fps: float) -> Tensor | None:
    """Return what the builder of this name makes at the sizes of ``want``; None = no builder."""
    rows, columns = (int(want[axis].max()) + 1 for axis in (1, 2))
    grid = (want.shape[1] // (rows * columns), rows, columns)
    count = want.shape[1]
    if name == "ids.image":
        return video_positions(config, (1, rows, columns), None)
    if match := re.fullmatch(r"ids\.video(\d+(?:\.\d+)?)?", name):
        return video_positions(config, grid, float(match[1] or fps))
    if match := re.fullmatch(r"ids\.action_off(-?\d+)", name):
        return action_positions(config, count, fps, int(match[1]))
    if name == "ids.sound":
        return sound_positions(config, count)
    return None
