"""Tensor parallelism of pi0 and pi0.5: the results of one rank, at a share of weights and cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phyai.engine_config import KernelConfig
from phyai.engine_core import EngineCore
from phyai.errors import ConfigError
from phyai.models.pi.config import PiConfig
from phyai.parallel import Mesh
from tests.core.process_ranks import on_processes
from tests.core.thread_ranks import on_all, services
from tests.pi.test_quantization import policy
from tests.pi.tiny_engines import GOLDEN, VOCAB
from tests.pi.tp_ranks import (
    LOOP,
    answers,
    core_of,
    expected_bytes,
    expected_traffic,
    tp_rank,
)

FORWARD_TOLERANCE, LOOP_TOLERANCE = 2e-5, 1e-4


@contextmanager
def opened(model: str, **changes: Any) -> Iterator[EngineCore]:
    core = core_of(model, **changes)
    try:
        yield core
    finally:
        core.close()


def check(model: str, size: int, ranks: list[dict[str, Any]], **changes: Any) -> None:
    """Compare what the ranks did with one rank alone and the formulas of docs/parallel.md."""
    with opened(model, **changes) as core:
        alone = answers(core)
        pi: Any = core.adapter.pi  # type: ignore[attr-defined]
        kv_heads, rank = pi.text.num_key_value_heads, ranks[0]
        for mine in ranks:
            for name, value in mine["answers"].items():
                limit = FORWARD_TOLERANCE if name == "forward" else LOOP_TOLERANCE
                np.testing.assert_allclose(value, alone[name], rtol=0, atol=limit, err_msg=name)
                np.testing.assert_array_equal(value, rank["answers"][name])  # all ranks agree
            assert mine["traffic"] == expected_traffic(core, rank["tokens"], rows=2, steps=LOOP)
            assert mine["cache"] == {(max(kv_heads // size, 1), pi.text.head_dim)}
    assert np.abs(alone["updated"] - alone["loop"]).max() > 10 * LOOP_TOLERANCE
    if "checkpoint_dir" not in changes:
        mine_bytes, shared = expected_bytes(GOLDEN / model, kv_heads, size)
        whole_bytes, _ = expected_bytes(GOLDEN / model, kv_heads, 1)
        assert [mine["bytes_read"] for mine in ranks] == [mine_bytes] * size
        assert mine_bytes < whole_bytes - shared * 0.9 * (1 - 1 / size)


def test_two_ranks_in_threads() -> None:
    ranks = services(Mesh(tp=2))
    found = on_all(2, lambda rank: tp_rank(ranks[rank], "pi05", {}))
    raised = [value for value in found if isinstance(value, BaseException)]
    assert not raised, raised
    check("pi05", 2, found)


def test_random_weights_and_split_key_heads_in_threads() -> None:
    """Without a checkpoint, ranks draw parts of one set of weights; here each has a key head."""
    pi = PiConfig.from_folder(GOLDEN / "pi05", "pi05")
    heads = {"num_key_value_heads": 2}
    changes = {
        "checkpoint_dir": None,
        "config": replace(pi, text=replace(pi.text, **heads), expert=replace(pi.expert, **heads)),
    }
    ranks = services(Mesh(tp=2))
    found = on_all(2, lambda rank: tp_rank(ranks[rank], "pi05", changes))
    check("pi05", 2, found, **changes)


@pytest.mark.slow
def test_embedding_in_file_is_shared_too() -> None:
    ranks = services(Mesh(tp=2))
    changes = {"embedding_in_file": True}
    found = on_all(2, lambda rank: tp_rank(ranks[rank], "pi05", changes))
    check("pi05", 2, found)
    assert VOCAB <= 512 // 2  # all test tokens are rank 0's; the layer's own test has the others


def test_heads_that_cannot_be_shared_are_refused() -> None:
    ranks = services(Mesh(tp=3))
    found = on_all(3, lambda rank: partial(core_of, "pi05", ranks[rank])())
    for error in found:
        assert isinstance(error, ConfigError), error
        assert "divide the 4 query heads" in str(error)
        assert "got 3. Sizes that work: 1, 2, 4." in str(error)


@pytest.mark.slow
def test_quantised_ranks_keep_the_error_of_the_format() -> None:
    kernel = KernelConfig(policy_config=policy(None))
    ranks = services(Mesh(tp=2))
    found = on_all(2, lambda rank: tp_rank(ranks[rank], "pi05", {"kernel": kernel}))
    with opened("pi05") as core:
        exact = answers(core)
    with opened("pi05", kernel=kernel) as core:
        rounded = answers(core)
    for mine in found:
        for name, value in mine["answers"].items():
            error = np.abs(rounded[name] - exact[name]).max()
            assert 0 < np.abs(value - exact[name]).max() < 2 * error, name


@pytest.mark.slow
@pytest.mark.parametrize(("model", "size"), [("pi05", 2), ("pi05", 4), ("pi0", 2)])
def test_ranks_in_processes(model: str, size: int, tmp_path: Path) -> None:
    found = on_processes("tests.pi.tp_ranks:tp_rank", (1, size), tmp_path, model, {})
    check(model, size, found)
