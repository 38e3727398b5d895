"""Tiled decoding: diffusers' tiles by golden numbers, the tiles of ranks by what they promise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.models.cosmos3.vae import RankTiling, SpatialTiling, WanVAE
from phyai.parallel import Group, Mesh, ParallelService
from tests.core.thread_ranks import on_all, services
from tests.cosmos.direct_media import case, golden_vae, worst


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def vae() -> WanVAE:
    return golden_vae(encoder=False)


@pytest.fixture(scope="module")
def latents() -> Tensor:
    return torch.randn(1, 8, 2, 6, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def whole(vae: WanVAE, latents: Tensor) -> Tensor:
    with torch.no_grad():
        return vae.decode(latents)


def psnr(got: Tensor, wanted: Tensor) -> float:
    return (10 * torch.log10(4 / (got - wanted).square().mean())).item()


# ------------------------------------------------------------------ diffusers' tiles


def test_spatial_tiles_give_the_golden_pixels(vae: WanVAE) -> None:
    golden = case("case_vae")
    tiled = vae.decode(golden["latent_raw"], tiling=SpatialTiling(32, 16))
    assert worst(tiled, golden["decoded_tiled_32_16"]) <= 1e-4


def test_one_large_tile_is_the_whole_frame(vae: WanVAE, latents: Tensor, whole: Tensor) -> None:
    assert torch.equal(vae.decode(latents, tiling=SpatialTiling(256, 192)), whole)


def test_frames_of_a_video_file_can_be_tiled(vae: WanVAE) -> None:
    normal = vae.normalise(case("case_vae")["latent_raw"])
    frames = vae.decode_frames(normal, tiling=SpatialTiling(32, 16))
    wanted = (case("case_vae")["decoded_tiled_32_16"].permute(0, 2, 3, 4, 1) + 1) * 127.5
    assert (frames.float() - wanted).abs().max() <= 0.51


@pytest.mark.parametrize(("tile", "stride"), [(32, 0), (32, 48), (-16, -16)])
def test_impossible_tiles_are_refused(tile: int, stride: int) -> None:
    with pytest.raises(ConfigError, match="stride"):
        SpatialTiling(tile, stride)


def test_tiles_between_latents_are_refused(vae: WanVAE, latents: Tensor) -> None:
    with pytest.raises(ConfigError, match="multiples of 16"):
        vae.decode(latents, tiling=SpatialTiling(40, 24))


# ------------------------------------------------------------------ the tiles of ranks


def test_a_grid_of_one_is_the_whole_frame(vae: WanVAE, latents: Tensor, whole: Tensor) -> None:
    assert torch.equal(vae.decode(latents, tiling=RankTiling()), whole)


def test_tiles_that_see_everything_blend_to_the_whole(
    vae: WanVAE, latents: Tensor, whole: Tensor
) -> None:
    assert worst(vae.decode(latents, tiling=RankTiling(grid=(2, 2), halo=8)), whole) <= 1e-5


def test_the_halo_brings_tiles_closer_to_the_whole(
    vae: WanVAE, latents: Tensor, whole: Tensor
) -> None:
    found = [
        psnr(vae.decode(latents, tiling=RankTiling(grid=(1, 2), halo=h)), whole) for h in (0, 1, 2)
    ]
    assert found[0] + 2 < found[1] < found[2] - 1
    assert found[2] > 20


def test_seams_fade_linearly() -> None:
    """Tile i decodes to the constant i: across the overlap the result is a ramp."""
    config = golden_vae(encoder=False).config
    made: list[int] = []

    def decode(part: Tensor) -> Iterator[Tensor]:
        made.append(len(made))
        yield torch.full((1, 12, part.shape[-2] * 8, part.shape[-1] * 8), float(made[-1]))

    canvas = _Kept()
    RankTiling(grid=(1, 2)).draw(decode, torch.zeros(1, 8, 1, 1, 12), config, canvas)
    line = canvas.pixels[0, 0, 0]
    overlap = 4 * 16  # two latents of halo on both sides of the seam
    wanted = torch.arange(1, overlap + 1) / (overlap + 1)
    assert torch.equal(line[:64], torch.zeros(64))
    assert torch.equal(line[128:], torch.ones(64))
    assert worst(line[64:128], wanted) <= 1e-6


class _Kept:
    def put(self, pixels: Tensor, frame: int, top: int = 0, left: int = 0) -> None:
        assert (frame, top, left) == (0, 0, 0)
        self.pixels = pixels


@pytest.mark.parametrize(
    ("mesh", "grid"),
    [(Mesh(tp=3), (1, 3)), (Mesh(cfg=2, tp=2), (2, 2)), (Mesh(cfg=2), (1, 2))],
)
def test_ranks_agree_with_one_process(
    vae: WanVAE, latents: Tensor, mesh: Mesh, grid: tuple[int, int]
) -> None:
    alone = vae.decode(latents, tiling=RankTiling(grid=grid))
    ranks = services(mesh, timeout_s=60.0)
    for clip in _on_ranks(vae, latents, ranks):
        assert torch.equal(clip, alone)
    # Both axes gather once per latent frame: 1 frame, then 4, of the largest tile.
    rows, columns = RankTiling(grid=grid).spans(6, 8)
    tile = max(y.stop - y.start for y in rows) * max(x.stop - x.start for x in columns) * 16**2
    for rank in ranks:
        for group, sent in ((rank.tp, tile), (rank.cfg, tile * mesh.tp)):
            expected = (2, (1 + 4) * 3 * 4 * sent) if group.size > 1 else (0, 0)
            assert (group.traffic.collectives, group.traffic.payload_bytes) == expected


def test_more_ranks_than_latents_still_agree(vae: WanVAE) -> None:
    latents = torch.randn(2, 8, 1, 1, 2, generator=torch.Generator().manual_seed(1))
    alone = vae.decode(latents, tiling=RankTiling(grid=(1, 2)))
    for clip in _on_ranks(vae, latents, services(Mesh(tp=3), timeout_s=60.0)):
        assert torch.equal(clip, alone)


def _on_ranks(vae: WanVAE, latents: Tensor, ranks: Sequence[ParallelService]) -> list[Tensor]:
    def one(rank: int) -> Tensor:
        with torch.no_grad():
            return vae.decode(latents, tiling=RankTiling((ranks[rank].tp, ranks[rank].cfg)))

    clips = on_all(len(ranks), one)
    assert all(isinstance(clip, Tensor) for clip in clips), clips
    return clips


def test_every_latent_belongs_to_one_tile() -> None:
    for ranks, height, width in product((1, 2, 3, 4, 6, 8), (1, 5, 30), (1, 7, 52)):
        tiling = RankTiling((Group("tp", tuple(range(ranks))),), halo=0)
        for spans, length in zip(tiling.spans(height, width), (height, width), strict=True):
            covered = [i for span in spans for i in range(span.start, span.stop)]
            assert covered == list(range(length))


def test_impossible_grids_are_refused() -> None:
    with pytest.raises(ConfigError, match="grid"):
        RankTiling(grid=(0, 2))
    with pytest.raises(ConfigError, match="halo"):
        RankTiling(halo=-1)
    with pytest.raises(ConfigError, match="one tile per rank"):
        RankTiling((Group("tp", (0, 1)),), grid=(2, 2))
