"""Which files of a checkpoint on the hub are downloaded. Torch-free: plugin modules name them."""

from __future__ import annotations

FILES = (
    "*.json",
    "transformer/*",
    "vae/*",
    "scheduler/*",
    "text_tokenizer/*",
    "sound_tokenizer/*",
)
"""Everything but the vision encoder, which is of another model and belongs to no request."""
