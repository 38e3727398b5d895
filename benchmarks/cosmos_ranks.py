"""What Cosmos3 on 8 GPUs, 2 guidance ranks of 4, has to compute and to exchange, and a prediction.

python -m benchmarks.cosmos_ranks                 the tables of docs/parallel.md

Nothing is run: operations and bytes are counted from the sizes, by the formulas that the tests
compare with real ranks. Times follow from them and from the assumptions in ``Box``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.cost import EMPTY_TOKENS, PROMPT_TOKENS
from phyai.models.cosmos3.network.flops import (
    MediaTokens,
    evaluation_flops,
    text_flops,
)
from phyai.models.cosmos3.traffic import (
    Exchange,
    decode_exchange,
    evaluation_exchange,
    guidance_exchange,
    rank_weights,
    text_exchange,
)
from phyai.models.cosmos3.vae.config import VAEConfig
from phyai.models.cosmos3.vae.flops import decode_flops, encode_flops

TP, CFG, ITEMSIZE = 4, 2, 2
SIDE, HALO, TILES = 16, 2, (2, 4)
"""Pixels of a latent, what a tile reaches beyond its part, rows and columns of tiles of 8 ranks."""
NANO = Cosmos3Config(sound_gen=False)
SUPER = Cosmos3Config(
    hidden_size=5120,
    intermediate_size=25_600,
    num_hidden_layers=64,
    num_attention_heads=64,
    num_key_value_heads=8,
    sound_gen=False,
)


@dataclass(frozen=True, slots=True)
class Box:
    """One of 8 GPUs by its data sheet, and what is assumed to be reached of it.

    matrix, single: operations per second in bfloat16 and float32, of which a robot's request gets
    share ``use`` and a video ``use_video``.  link: bytes per second in one direction, of which
    ``link_use`` is had.  call_s: of a collective, whatever its size.
    """

    name: str
    matrix: float
    single: float
    use: float
    use_video: float
    link: float = 450e9
    link_use: float = 0.75
    call_s: float = 15e-6

    def computing(self, request: Request, matrix: float, single: float = 0.0) -> float:
        """Return the time of so many operations in bfloat16 and float32."""
        share = self.use_video if request.decoded else self.use
        return (matrix / self.matrix + single / self.single) / share

    def seconds(self, exchange: Exchange, moved: float) -> float:
        """Return the time of collectives that move so many bytes per byte handed in."""
        bytes_ = exchange.payload_bytes * moved
        return exchange.collectives * self.call_s + bytes_ / (self.link * self.link_use)


# Shares by what one GPU is published to take: 1.132 s for a robot's 456 TFLOP (Hopper), 202 s and
# 930 s for a video of Nano's 124 PFLOP (H100, H20). The robot's on the H20 is in proportion.
H20 = Box("H20", matrix=148e12, single=44e12, use=0.60, use_video=0.90)
H100 = Box("H100", matrix=989e12, single=67e12, use=0.41, use_video=0.62)


@dataclass(frozen=True, slots=True)
class Request:
    """latent: frames, rows and columns.  encoded: pixels of the frame that is encoded, or None."""

    name: str
    config: Cosmos3Config
    latent: tuple[int, int, int]
    actions: int
    steps: int
    encoded: tuple[int, int] | None
    decoded: bool

    @property
    def media(self) -> MediaTokens:
        frames, rows, columns = self.latent
        return MediaTokens(frames * -(-rows // 2) * -(-columns // 2), self.actions)

    @property
    def values(self) -> int:
        frames, rows, columns = self.latent
        video = self.config.latent_channel * frames * rows * columns
        return video + self.config.action_dim * self.actions


ROBOT = {"latent": (9, 33, 40), "actions": 33, "steps": 4, "encoded": (544, 736), "decoded": False}
VIDEO = {"latent": (48, 45, 80), "actions": 0, "steps": 35, "encoded": None, "decoded": True}
REQUESTS = (
    Request("Nano, DROID", NANO, **ROBOT),  # type: ignore[arg-type]
    Request("Super, DROID sizes", SUPER, **ROBOT),  # type: ignore[arg-type]
    Request("Nano, 189 frames 720p", NANO, **VIDEO),  # type: ignore[arg-type]
    Request("Super, 189 frames 720p", SUPER, **VIDEO),  # type: ignore[arg-type]
)


class Times(NamedTuple):
    """Seconds on one rank."""

    vae: float
    compute: float
    exchange: float

    @property
    def total(self) -> float:
        return sum(self)


def tile(request: Request) -> tuple[int, int]:
    """Return height and width in pixels of the largest tile of a shared decode."""
    _, rows, columns = request.latent
    ends = [2 if parts > 2 else 1 for parts in TILES]  # neighbours of a tile in the middle
    sizes = (-(-rows // TILES[0]), -(-columns // TILES[1]))
    return (SIDE * (sizes[0] + HALO * ends[0]), SIDE * (sizes[1] + HALO * ends[1]))


def vae_flops(request: Request, *, shared: bool) -> tuple[int, int]:
    """Return operations in float32 (encode) and bfloat16 (decode) of one rank."""
    vae = VAEConfig()
    encode = encode_flops(vae, 1, *request.encoded) if request.encoded else 0
    if not request.decoded:
        return encode, 0
    frames, rows, columns = request.latent
    size = tile(request) if shared else (SIDE * rows, SIDE * columns)
    return encode, decode_flops(vae, frames, *size)


def on_ranks(request: Request, box: Box) -> Times:
    """Return the predicted times of a rank of 8: the conditional branch's, whose text is longer."""
    config, media, steps = request.config, request.media, request.steps
    encode, decode = vae_flops(request, shared=True)
    text = text_flops(config, PROMPT_TOKENS)
    compute = (text + steps * evaluation_flops(config, media, PROMPT_TOKENS)) / TP
    along = text_exchange(config, PROMPT_TOKENS, ITEMSIZE)
    along += steps * evaluation_exchange(config, media, 1, ITEMSIZE)
    seconds = box.seconds(along, 2 * (TP - 1) / TP)
    seconds += box.seconds(steps * guidance_exchange(request.values, 1), CFG - 1)
    if request.decoded:
        tp, cfg = decode_exchange(request.latent[0], tile(request), ITEMSIZE, TP)
        seconds += box.seconds(tp, TP - 1) + box.seconds(cfg, CFG - 1)
    vae = box.computing(request, decode, encode)
    return Times(vae, box.computing(request, compute), seconds)


def on_one(request: Request, box: Box) -> float:
    """Return the predicted seconds of one GPU that has room for the weights."""
    config, steps = request.config, request.steps
    encode, decode = vae_flops(request, shared=False)
    texts = (PROMPT_TOKENS, EMPTY_TOKENS)
    flops = sum(
        text_flops(config, n) + steps * evaluation_flops(config, request.media, n) for n in texts
    )
    return box.computing(request, flops + decode, encode)


def weights() -> str:
    """Return the table of what one rank holds of the transformers."""
    lines = [
        "| tp_size | Nano: split per rank | Nano: the rest | Super: split per rank | "
        "Super: the rest |",
        "|---|---:|---:|---:|---:|",
    ]
    for tp in (1, 2, 4, 8):
        held = [rank_weights(config, tp, sound=False) for config in (NANO, SUPER)]
        shown = " | ".join(
            f"{part * ITEMSIZE / 1e9:.2f} GB" for own in held for part in (own.split, own.whole)
        )
        lines.append(f"| {tp} | {shown} |")
    return "\n".join(lines)


def counted() -> str:
    """Return the table of what one rank has, computes and hands in."""
    lines = [
        "| request | weights per rank | TFLOP per step and rank | along tp per step | "
        "along cfg per step |",
        "|---|---:|---:|---:|---:|",
    ]
    for request in REQUESTS:
        config = request.config
        own = rank_weights(config, TP, sound=False)
        held = (own.split + own.whole) * ITEMSIZE / 1e9
        flops = evaluation_flops(config, request.media, PROMPT_TOKENS) / TP / 1e12
        tp = evaluation_exchange(config, request.media, 1, ITEMSIZE)
        cfg = guidance_exchange(request.values, 1)
        lines.append(
            f"| {request.name} | {held:.1f} GB | {flops:.1f} | {tp.collectives} x "
            f"{tp.payload_bytes / tp.collectives / 1e6:.1f} MB | {cfg.collectives} x "
            f"{cfg.payload_bytes / 1e6:.1f} MB |"
        )
    return "\n".join(lines)


def predicted(boxes: Sequence[Box] = (H20, H100)) -> str:
    """Return the table of predicted times."""
    lines = [
        "| request | GPUs | autoencoder | network | exchange | together | one GPU | ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for request in REQUESTS:
        for box in boxes:
            times, one = on_ranks(request, box), on_one(request, box)
            shown = " | ".join(_seconds(value) for value in (*times, times.total, one))
            lines.append(f"| {request.name} | 8 x {box.name} | {shown} | {one / times.total:.1f} |")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


if __name__ == "__main__":
    print(weights(), counted(), predicted(), sep="\n\n")
