"""Qwen3-VL: pixels to patch rows, vision tower with deepstack taps, decoder with 3-axis positions.

The host side (``patch_rows``, ``vision_layout``, ``text_layout``) turns images and token ids into
rows and index lists; the modules compute over packed tokens and never look at values on the host.
"""

from phyai.backbones.qwen3_vl.config import Qwen3VLTextConfig, Qwen3VLVisionConfig
from phyai.backbones.qwen3_vl.pixels import PixelSettings, image_size, patch_rows
from phyai.backbones.qwen3_vl.positions import Grid, image_tokens, rope_tables, text_positions
from phyai.backbones.qwen3_vl.text import TextStack
from phyai.backbones.qwen3_vl.text_layout import TextLayout, text_layout
from phyai.backbones.qwen3_vl.vision import VisionTower
from phyai.backbones.qwen3_vl.vision_layout import VisionLayout, vision_layout

__all__ = [
    "Grid",
    "PixelSettings",
    "Qwen3VLTextConfig",
    "Qwen3VLVisionConfig",
    "TextLayout",
    "TextStack",
    "VisionLayout",
    "VisionTower",
    "image_size",
    "image_tokens",
    "patch_rows",
    "rope_tables",
    "text_layout",
    "text_positions",
    "vision_layout",
]
