"""The tables of benchmarks/cosmos_batches.py: what they count, and that they time what they say."""

from __future__ import annotations

import re

import pytest
from benchmarks import cosmos_batches
from benchmarks.cosmos_batches import H100, counted, pipeline_stages, timed, timed_table

from phyai.cost import Workload
from phyai.models.cosmos3 import Cosmos3Config
from phyai.models.cosmos3.cost import PROMPT_TOKENS

PUBLISHED = cosmos_batches.cost_of(Cosmos3Config(), cosmos_batches.PUBLISHED_CLIP)
REQUEST = Workload(tokens=PROMPT_TOKENS, steps=cosmos_batches.STEPS)


def numbers(row: str) -> list[float]:
    return [float(text) for text in re.findall(r"[-+]?[\d.]+", row)]


def test_the_published_request_has_its_tokens() -> None:
    assert (PUBLISHED.media.video, PUBLISHED.media.action) == (3510, 32)


def test_a_batch_shares_weights_and_no_operations() -> None:
    rows = [numbers(line) for line in counted((1, 4, 16)).splitlines()[2:5]]
    assert [row[0] for row in rows] == [1, 4, 16]
    assert len({row[1] for row in rows}) == 1
    assert rows[0][2] / rows[2][2] == pytest.approx(16, rel=0.02)
    # Rows of an H100 are bound by arithmetic from the first one on.
    assert all(row[3] > H100.ridge for row in rows)
    assert 0 <= rows[2][5] < 3


def test_the_pipeline_s_account_holds_what_it_does_over() -> None:
    ours = {stage.stage: stage.flops for stage in PUBLISHED.stages(REQUEST)}
    theirs = pipeline_stages(PUBLISHED)
    assert theirs["loop"] == pytest.approx(ours["loop"], rel=1e-4)
    assert theirs["text"] > REQUEST.steps * ours["text"]
    assert theirs["vae"] > 33 * ours["vae"] / 4  # later frames pass fewer levels whole
    # 8 evaluations, 8 of 9 frames and all actions, (256 + 4096) x 4096 weights.
    assert theirs["time"] == 8 * (3510 * 8 // 9 + 32) * 2 * 4096 * (256 + 4096)
    assert 1.05 < sum(theirs.values()) / sum(ours.values()) < 1.2


def test_throughput_is_relative_to_the_first_batch_of_the_round() -> None:
    lines = timed_table({1: [1.0, 2.0, 1.0], 4: [2.0, 2.0, 1.0]}).splitlines()
    assert lines[2] == "| 1 | 1000.0 | 1.0 | 1.00x | 1.00 to 1.00 |"
    assert lines[3] == "| 4 | 2000.0 | 2.0 | 4.00x | 2.00 to 4.00 |"


@pytest.mark.slow
def test_every_batch_is_timed_once_a_round() -> None:
    ticks = iter(range(100))
    found = timed((1, 2), rounds=2, threads=1, clock=lambda: float(next(ticks)))
    assert found == {1: [1.0, 1.0], 2: [1.0, 1.0]}
