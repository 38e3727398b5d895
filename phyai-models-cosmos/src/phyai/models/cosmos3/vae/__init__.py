"""The Wan2.2 video autoencoder: encode, streamed and tiled decode."""

from phyai.models.cosmos3.vae.config import VAEConfig
from phyai.models.cosmos3.vae.model import Tiling, WanVAE
from phyai.models.cosmos3.vae.rank_tiling import RankTiling, Span
from phyai.models.cosmos3.vae.tiling import SpatialTiling

__all__ = ["RankTiling", "Span", "SpatialTiling", "Tiling", "VAEConfig", "WanVAE"]
