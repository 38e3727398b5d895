"""pi0.5 in replicas of several ranks that the engine starts: results, traffic and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phyai import DeploymentConfig, Engine, EngineArgs
from phyai.models.pi05.golden import golden_runs
from tests.pi.tiny_engines import ARGS, GOLDEN, model_request, observation
from tests.pi.tp_ranks import UPDATED, changed_weight, expected_bytes, expected_exchange
from tests.rank_probe import installed
from tests.rank_runs import Ask, Mesh, Run, config_of, golden_errors, probing, run_all

pytestmark = pytest.mark.slow
MODEL, FORWARD, LOOP = "pi05", 2e-5, 1e-4
ROOT = GOLDEN / MODEL
LONE, ROWS, TENSORS, ONE_STEP = "an observation", "two observations", "tensors", "one step"


@dataclass
class Alone:
    """What one process answers, the requests, and what it does after an update of its weights."""

    asks: list[Ask]
    run: Run
    adapter: Any
    weight: torch.Tensor
    updated: np.ndarray


@contextmanager
def opened(mesh: Mesh, folder: Path) -> Iterator[Engine]:
    args = ARGS[MODEL](
        checkpoint_dir=str(ROOT),
        max_batch_size=4,
        precision="fp32",
        tokenizer=str(ROOT / "tokenizer"),
        processor_dir=str(ROOT / "processors_abs"),
    )
    settings = EngineArgs(MODEL, args, config_of(mesh))
    with probing(folder), Engine(settings, deployment=DeploymentConfig()) as engine:
        yield engine


def golden_asks() -> list[Ask]:
    """Return the requests of all golden cases that run in float32, with weights as they are."""
    runs = [run for path in sorted(ROOT.glob("case_*")) for run in golden_runs(path, ROOT)]
    return [
        Ask(run.label, run.request, golden=run)
        for run in runs
        if run.args.precision == "fp32" and run.args.config is None  # type: ignore[union-attr]
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    folder = tmp_path_factory.mktemp("alone")
    with installed(tmp_path_factory.mktemp("probe") / "site"):
        with opened(Mesh(), folder) as engine:
            request = model_request(engine)
            asks = [
                *golden_asks(),
                Ask(LONE, observation(engine), record=False),
                Ask(ROWS, [observation(engine, seed) for seed in range(2)], record=False),
                Ask(TENSORS, request, record=False),
                Ask(ONE_STEP, model_request(engine, num_steps=1), record=False),
            ]
            run, adapter = run_all(engine, Mesh(), asks, folder), engine.adapter
            weight = changed_weight(engine.core)
            engine.update_weights_all({UPDATED: weight})
            updated = engine.step(request).numpy()
        yield Alone(asks, run, adapter, weight, updated)


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(tp=4)], ids=str)
def test_a_replica_of_several_ranks(alone: Alone, mesh: Mesh, tmp_path: Path) -> None:
    """All checks of one replica in one test: each starts as many processes as it has ranks."""
    run = shared(alone, mesh, tmp_path)
    check_golden(alone, run)
    check_answers(alone, run)
    check_traffic(alone, run)
    check_share(alone, run)


def shared(alone: Alone, mesh: Mesh, folder: Path) -> Run:
    with opened(mesh, folder) as engine:
        assert engine.mode == "local"
        (replica,) = engine.stats()["replicas"]
        assert replica["devices"] == ["cpu"] * mesh.tp
        assert len(set(replica["rank_pids"])) == mesh.tp
        assert replica["batches"]["count"] == 0
        done = run_all(engine, mesh, alone.asks, folder)
        engine.update_weights_all({UPDATED: alone.weight})
        request_again = next(ask.request for ask in alone.asks if ask.name == TENSORS)
        done.answers["updated"] = engine.step(request_again).numpy()
    return done


def check_golden(alone: Alone, run: Run) -> None:
    """Of inner tensors rank 0's: the only key head is on every rank."""
    cases = [ask for ask in alone.asks if ask.golden is not None]
    assert len(cases) >= 10
    for ask in cases:
        records = run.seen[ask.name][0].records if ask.name in run.seen else {}
        wrong = golden_errors(ask, alone.adapter, run.answers[ask.name], records)
        assert not wrong, f"{ask.name}: {wrong}"


def check_answers(alone: Alone, run: Run) -> None:
    for ask in alone.asks:
        mine, other = run.answers[ask.name], alone.run.answers[ask.name]
        for one, want in zip(values(mine), values(other), strict=True):
            limit = FORWARD if ask.name == ONE_STEP else LOOP
            np.testing.assert_allclose(one, want, rtol=0, atol=limit, err_msg=ask.name)
        seen = run.seen[ask.name]
        for name in (n for n in seen[0].records if n.startswith(("result.", "steps."))):
            for rank in seen[1:]:
                pairs = zip(rank.records[name], seen[0].records[name], strict=True)
                assert all(torch.equal(a, b) for a, b in pairs), f"ranks differ in {name}"
    np.testing.assert_allclose(run.answers["updated"], alone.updated, rtol=0, atol=LOOP)
    before = alone.run.answers[TENSORS].numpy()
    assert np.abs(alone.updated - before).max() > 10 * LOOP


def values(answer: Any) -> list[np.ndarray]:
    assert not isinstance(answer, BaseException), repr(answer)
    rows = answer if isinstance(answer, list) else [answer]
    return [np.asarray(getattr(row, "actions", row)) for row in rows]


def check_traffic(alone: Alone, run: Run) -> None:
    """Of requests nobody listens to: a recorder wants the last text layer's output, too."""
    for ask in (ask for ask in alone.asks if not ask.record):
        prepared = alone.adapter.prepare(ask.request)
        for seen in run.seen[ask.name]:
            encode, step = expected_exchange(alone.adapter, seen.encode, prepared.rows)
            assert encode[0] > 0 < step[0]
            assert (seen.encode["tp.collectives"], seen.encode["tp.bytes"]) == encode
            assert len(seen.steps) == prepared.key.num_steps
            for found in seen.steps:
                counts = (found["tp.collectives"], found["tp.bytes"])
                assert counts == step, ask.name
            assert "tp.collectives" not in seen.output
            for part in (seen.encode, *seen.steps, seen.output):
                assert not part.keys() & {"cfg.collectives", "world.collectives"}


def check_share(alone: Alone, run: Run) -> None:
    (one,) = alone.run.loads
    tp, kv_heads = run.mesh.tp, alone.adapter.pi.text.num_key_value_heads
    mine, shared = expected_bytes(ROOT, kv_heads, tp)
    everything, _ = expected_bytes(ROOT, kv_heads, 1)
    assert one["read"] == everything
    assert one["split"] == shared
    keys = expected_bytes(ROOT, kv_heads, 1, only=r"\.[kv]_proj\.")[1]
    for load in run.loads:
        assert load["read"] == mine
        assert load["split"] == (shared - keys) // tp + keys  # the one key head is on all ranks
        assert load["whole"] == one["whole"]
        assert load["read"] <= 1.1 * (load["split"] + load["whole"])
