"""One captured region serves all images and prompts of its bucket."""

from __future__ import annotations

import torch
from torch import Tensor

from phyai.backbones.qwen3_vl import TextLayout, VisionLayout
from phyai.graph import GraphService
from phyai.testing.capture import RecordingCapturer
from tests.backbones.golden_backbone import CASES, Backbone, backbone, case, layouts

PATCHES, FRAMES, LONGEST, TOKENS, ROWS = 256, 4, 100, 300, 2


class Static:
    """Buffers of one bucket, and the region over them."""

    def __init__(self, model: Backbone) -> None:
        first = self.inputs(model, 0)
        self.model = model
        self.patches, self.vision, self.text = (
            first[0].clone(),
            first[1].on({n: t.clone() for n, t in first[1].tensors().items()}),
            first[2].on({n: t.clone() for n, t in first[2].tensors().items()}),
        )
        self.out = torch.zeros(TOKENS, model.text_config.hidden_size)

    @staticmethod
    def inputs(model: Backbone, number: int) -> tuple[Tensor, VisionLayout, TextLayout]:
        found = case(CASES[number], model)
        vision, text = layouts(found, model)
        own = found.tensors["in.pixel_values"]
        patches = torch.cat([own, own.new_zeros(PATCHES - len(own), own.shape[1])])
        wide = vision.padded(PATCHES, FRAMES, LONGEST)
        return patches, wide, text.padded(TOKENS, PATCHES // 4, ROWS, TOKENS // ROWS)

    def load(self, number: int) -> int:
        patches, vision, text = self.inputs(self.model, number)
        self.patches.copy_(patches)
        for mine, new in ((self.vision, vision), (self.text, text)):
            for name, tensor in mine.tensors().items():
                tensor.copy_(new.tensors()[name])
        return text.tokens

    @torch.no_grad()
    def run(self) -> None:
        merged, taps = self.model.vision(self.patches, self.vision)
        x = self.model.text.inputs(self.text, merged)
        self.out.copy_(self.model.text(x, self.text, taps))


def test_a_region_serves_every_request_of_its_bucket() -> None:
    model = backbone()
    static = Static(model)
    static.run()  # weights are packed before anything is captured
    graphs = GraphService("cuda", "cpu", capturer=RecordingCapturer())
    region = graphs.capture("backbone", static.run, reads=static)
    for number in range(len(CASES)):
        tokens = static.load(number)
        region()
        want = case(CASES[number], model).packed("backbone.features")
        torch.testing.assert_close(static.out[:tokens], want, rtol=0, atol=5e-5)
    stats = graphs.stats()
    assert (stats["captures"], stats["replays"], stats["fallbacks"]) == (1, len(CASES), 0)
