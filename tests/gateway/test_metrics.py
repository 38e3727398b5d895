"""What is counted aside is there whenever somebody reads."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from phyai_gateway import metrics as module
from phyai_gateway.metrics import FOLD_AT, Metrics


def test_counts_are_whole_when_read_before_and_after_they_are_folded() -> None:
    metrics = Metrics("1")
    for number in (1, FOLD_AT + 3):
        for _ in range(number):
            metrics.answered("m", "native", "ok", 0.003)
            metrics.waited(0.001)
            metrics.asked(0.002)
            metrics.inferred(0.5)
            metrics.transferred("in", 10)
    for _ in range(2):  # reading adds nothing
        text = generate_latest(metrics.registry).decode()
        total = FOLD_AT + 4
        for line in (
            f'phyai_requests_total{{model="m",outcome="ok",protocol="native"}} {total:.1f}',
            f'phyai_request_duration_seconds_count{{model="m",protocol="native"}} {total:.1f}',
            f"phyai_queue_time_seconds_count {total:.1f}",
            f'phyai_stage_duration_seconds_count{{stage="queue"}} {total:.1f}',
            f'phyai_stage_duration_seconds_count{{stage="backend"}} {total:.1f}',
            f"phyai_inference_duration_seconds_count {total:.1f}",
            f'phyai_bytes_total{{direction="in"}} {10 * total:.1f}',
        ):
            assert line in text


def test_nothing_piles_up_while_nobody_reads() -> None:
    metrics = Metrics("1")
    for _ in range(3 * FOLD_AT):
        metrics.answered("m", "native", "ok", 0.003)
        metrics.waited(0.001)
    assert len(metrics._answered) < FOLD_AT
    assert len(metrics._times) < FOLD_AT


def test_ever_new_models_do_not_make_ever_new_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_MODELS", 3)
    metrics = Metrics("1")
    for number in range(10):
        metrics.answered(f"m{number}", "native", "ok", 0.003)
        metrics.text()
    metrics.answered("m0", "native", "ok", 0.003)
    lines = metrics.text().decode().splitlines()
    found = [line for line in lines if line.startswith("phyai_requests_total{")]
    assert len(found) == 4
    assert 'phyai_requests_total{model="m0",outcome="ok",protocol="native"} 2.0' in found
    assert 'phyai_requests_total{model="other",outcome="ok",protocol="native"} 7.0' in found
