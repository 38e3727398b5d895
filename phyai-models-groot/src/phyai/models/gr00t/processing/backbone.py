"""What the backbone's folder says about text and pixels: tokenizer, template, image settings."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from phyai import hub
from phyai.backbones.qwen3_vl import PixelSettings
from phyai.errors import CheckpointError
from phyai.models.gr00t.backbone_files import SUBFOLDER
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.processing.prompts import (
    TEMPLATE,
    TOKENIZER,
    PromptTokenizer,
    check_template,
)

PIXELS = "preprocessor_config.json"
_HUB_FILES = (TOKENIZER, "tokenizer_config.json", TEMPLATE, "chat_template.json", PIXELS)


@dataclass(frozen=True, slots=True)
class BackboneInputs:
    """Tokenizer and image-processor settings of one backbone."""

    tokenizer: PromptTokenizer
    pixels: PixelSettings


class BackboneSource:
    """Where those files are; a local folder is read at load, the hub only when first needed."""

    def __init__(self, config: GrootConfig, folder: Path | None) -> None:
        self.config, self.folder = config, folder
        self._loaded: BackboneInputs | None = None
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        """What messages and ``expects`` call it."""
        return self.config.model_name if self.folder is None else str(self.folder)

    def load(self) -> BackboneInputs:
        """Return the files' content, read once.

        Raises: CheckpointError and its kinds, for a gated hub repository too.
        """
        with self._lock:
            if self._loaded is None:
                self._loaded = self._read()
            return self._loaded

    def _read(self) -> BackboneInputs:
        folder = self.folder
        if folder is None:
            try:
                folder = hub.resolve(
                    self.config.model_name, allow=_HUB_FILES, purpose="backbone", progress=False
                )
            except CheckpointError as error:
                raise type(error)(
                    f"{error} A local folder with {TOKENIZER} and {PIXELS} works too: backbone_dir."
                ) from error
        check_template(folder)
        _, text = self.config.backbone
        tokenizer = PromptTokenizer(
            folder / TOKENIZER,
            image_token_id=self.config.image_token_id,
            vocab_size=text.vocab_size,
        )
        # Without the file: the released limits.
        has_pixels = (folder / PIXELS).is_file()
        pixels = PixelSettings.from_folder(folder) if has_pixels else PixelSettings()
        self._check_patches(folder, pixels)
        return BackboneInputs(tokenizer, pixels)

    def _check_patches(self, folder: Path, pixels: PixelSettings) -> None:
        vision, _ = self.config.backbone
        got = (pixels.patch_size, pixels.temporal_patch_size, pixels.merge_size)
        want = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
        if got != want:
            raise CheckpointError(
                f"{PIXELS} in {folder} must have patch, frame and merge sizes {want}, as the "
                f"backbone's config says; got {got}. Pass the files of one backbone."
            )


def find_backbone(folder: Path | None, backbone_dir: Path | None) -> Path | None:
    """Return the folder with the tokenizer: ``backbone_dir``, else in or below the checkpoint."""
    if backbone_dir is not None:
        return backbone_dir
    places = [] if folder is None else [folder, folder / SUBFOLDER]
    return next((place for place in places if (place / TOKENIZER).is_file()), None)
