"""The prediction of docs/parallel.md is what benchmarks/cosmos_ranks.py counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks import cosmos_ranks
from benchmarks.cosmos_ranks import H20, H100, NANO, REQUESTS, SIDE, SUPER

from phyai.models.cosmos3.cost import EMPTY_TOKENS, PROMPT_TOKENS
from phyai.models.cosmos3.network.flops import evaluation_flops
from phyai.models.cosmos3.traffic import evaluation_exchange, guidance_exchange, text_exchange
from phyai.models.cosmos3.vae.rank_tiling import RankTiling, grid_of

PAGE = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text("utf-8")
TEXT = re.sub(r"\s+", " ", PAGE)


@pytest.mark.parametrize("name", ["weights", "counted", "predicted"])
def test_the_pages_tables_are_made_by_the_program(name: str) -> None:
    (shown,) = re.findall(rf"<!-- {name} of cosmos3 -->\n((?:\|.*\n)+)", PAGE)
    assert shown.strip() == getattr(cosmos_ranks, name)()


def test_the_pages_assumptions_are_those_of_the_program() -> None:
    for text in (
        f"at {H20.matrix / 1e12:.0f} (H20) and {H100.matrix / 1e12:.0f} (H100) TFLOP/s",
        f"{H20.single / 1e12:.0f} and {H100.single / 1e12:.0f} in float32",
        f"gets {H20.use * 100:.0f} and {H100.use * 100:.0f} % of them",
        f"a video {H20.use_video * 100:.0f} and {H100.use_video * 100:.0f} %",
        f"{H20.link / 1e9:.0f} GB/s",
        f"of which {H20.link_use * 100:.0f} % are had",
        f"costs {H20.call_s * 1e6:.0f} us",
        f"{PROMPT_TOKENS} text tokens",
        "This was not run on GPUs.",
    ):
        assert text in TEXT, text
    assert (H20.link, H20.link_use, H20.call_s) == (H100.link, H100.link_use, H100.call_s)


def test_the_pages_sentences_are_counted() -> None:
    robot, video = REQUESTS[0], REQUESTS[2]
    assert (robot.media.video, robot.media.action, video.media.video) == (3060, 33, 44_160)
    branches = (PROMPT_TOKENS, EMPTY_TOKENS)
    whole = video.steps * sum(evaluation_flops(NANO, video.media, n) for n in branches)
    assert f"the {whole / 1e15:.0f} PFLOP" in TEXT
    along = text_exchange(NANO, PROMPT_TOKENS, 2) + robot.steps * (
        evaluation_exchange(NANO, robot.media, 1, 2) + guidance_exchange(robot.values, 1)
    )
    cost = along.collectives * H20.call_s
    assert f"{along.collectives} collectives per request, {cost * 1e3:.0f} ms" in TEXT
    times = cosmos_ranks.on_ranks(robot, H100)
    assert times.exchange / times.total == pytest.approx(1 / 5, abs=0.03)  # "about a fifth"
    # What is published, in seconds: the prediction lies below all of it.
    assert cosmos_ranks.on_ranks(robot, H20).total < 1.18
    assert cosmos_ranks.on_ranks(video, H20).total < 148.5
    assert cosmos_ranks.on_ranks(video, H100).total < 37.8


def test_sizes_are_the_released_ones() -> None:
    assert (NANO.hidden_size, NANO.num_hidden_layers, NANO.num_attention_heads) == (4096, 36, 32)
    assert (SUPER.hidden_size, SUPER.num_hidden_layers) == (5120, 64)
    assert (SUPER.num_attention_heads, SUPER.num_key_value_heads) == (64, 8)
    for request in REQUESTS[2:]:
        _, rows, columns = request.latent
        spans = RankTiling(grid=grid_of(8, rows, columns)).spans(rows, columns)
        largest = tuple(SIDE * max(span.stop - span.start for span in along) for along in spans)
        assert cosmos_ranks.tile(request) == largest
