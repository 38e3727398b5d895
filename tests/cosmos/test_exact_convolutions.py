"""Float32 convolutions are told to keep all bits, and the process's setting comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from phyai.models.cosmos3.exact_convolutions import exact_convolutions
from phyai.models.cosmos3.sound.layers import SoundConv, StretchConv
from phyai.models.cosmos3.vae.convs import CausalConv, FrameConv, HalvingConv
from tests.cosmos.direct_media import case, golden_sound, golden_vae

CONVOLUTIONS = (CausalConv, FrameConv, HalvingConv, SoundConv, StretchConv)


@pytest.fixture(autouse=True)
def setting() -> Iterator[Callable[[], str]]:
    """Start from cuDNN's default, whatever this build has."""
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision
    conv.fp32_precision = "tf32"
    with torch.no_grad():
        yield lambda: conv.fp32_precision
    conv.fp32_precision = before


def seen_by(module: nn.Module, run: Callable[[], object]) -> list[str]:
    """Return what the setting was in each convolution of a module."""
    seen: list[str] = []

    def look(*_: object) -> None:
        seen.append(torch.backends.cudnn.conv.fp32_precision)

    hooks = [
        part.register_forward_pre_hook(look)
        for part in module.modules()
        if isinstance(part, CONVOLUTIONS)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def test_all_convolutions_of_pictures_and_sound_are_exact(setting: Callable[[], str]) -> None:
    vae, sound, golden = golden_vae(), golden_sound(), case("case_vae")
    latent = case("case_sound_decode")["latent"]
    for module, run in (
        (vae, lambda: vae.encode(golden["pixels"])),
        (vae, lambda: vae.decode(golden["latent_raw"])),
        (sound, lambda: sound.decode(latent)),
    ):
        seen = seen_by(module, run)
        assert seen
        assert set(seen) == {"ieee"}
        assert setting() == "tf32"


def test_the_last_thread_puts_the_setting_back(setting: Callable[[], str]) -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with exact_convolutions():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with exact_convolutions():
        thread.start()
        assert inside.wait(30)
    assert setting() == "ieee"  # the other one still computes
    leave.set()
    thread.join(30)
    assert setting() == "tf32"


def test_an_error_puts_the_setting_back(setting: Callable[[], str]) -> None:
    with pytest.raises(RuntimeError, match="broken"), exact_convolutions():
        raise RuntimeError("broken")
    assert setting() == "tf32"
