"""Golden model cases in the static buckets graphs use: padding and sentinels change nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from phyai.engine_config import DeviceConfig, EngineConfig, RuntimeConfig
from phyai.testing.golden import GoldenRunner
from tests.conftest import GOLDEN
from tests.golden_cases import GoldenCase, discover

KINDS = ("base", "policy", "rtc_guided", "rtc_trained")
CASES = [c for name in ("pi0", "pi05") for c in discover(GOLDEN / name) if c.kind in KINDS]


@pytest.fixture(scope="module")
def runners() -> Iterator[dict[str, GoldenRunner]]:
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        runtime=RuntimeConfig(static_shapes=True),
    )
    made = {name: GoldenRunner(name, config) for name in ("pi0", "pi05")}
    yield made
    for runner in made.values():
        runner.close()


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.set_root.name}-{c.path.stem}")
def test_static_buckets_keep_every_golden_tensor(
    case: GoldenCase, runners: dict[str, GoldenRunner]
) -> None:
    assert case.set_root is not None
    for result in runners[case.set_root.name].run(case.path, case.set_root):
        assert result.comparisons
        assert [c for c in result.comparisons if not c.ok] == []
