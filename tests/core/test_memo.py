"""Memo: copies, the byte limit, and that nothing outlives the weights it was made with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from phyai.cuda_graph import recording_flag
from phyai.errors import ConfigError, CudaGraphError, WeightUpdateError
from phyai.memo import Memo
from tests.core.guided_adapter import Encoding, GuidedAdapter
from tests.core.test_guidance import request, same
from tests.core.toy_adapter import open_engine, registry


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


def ones(count: int, value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"k": torch.full((count,), value)}


def test_what_is_kept_is_a_copy() -> None:
    memo, source = Memo(), torch.zeros(4, 4)
    assert memo.put("a", {"k": source[:2]})
    source.fill_(7)
    (found,) = (memo.get("a") or {}).values()
    assert torch.equal(found, torch.zeros(2, 4))
    assert memo.nbytes == 2 * 4 * 4 == found.untyped_storage().nbytes()


def test_the_least_recently_used_leave_at_the_limit() -> None:
    memo = Memo(max_bytes=3 * 16)
    for name in "abc":
        memo.put(name, ones(4))
    memo.get("a")
    memo.put("d", ones(8))  # two leave: b and c
    assert [name for name in "abcd" if memo.get(name) is not None] == ["a", "d"]
    assert memo.nbytes == 48
    memo.put("a", ones(2))  # replaced, not added
    assert memo.nbytes == 40
    assert not memo.put("large", ones(13))
    assert len(memo) == 2
    assert memo.stats() == {
        "hits": 3,
        "misses": 2,
        "entries": 2,
        "bytes": 40,
        "max_bytes": 48,
    }


def test_zero_bytes_keep_nothing_and_less_is_refused() -> None:
    memo = Memo(0)
    assert not memo.put("a", {})
    assert memo.get("a") is None
    with pytest.raises(ConfigError, match="at least 0 bytes"):
        Memo(-1)


def test_what_old_weights_made_does_not_come_in() -> None:
    memo = Memo()
    before = memo.version
    memo.put("a", ones(1))
    memo.clear()
    assert memo.get("a") is None
    assert memo.nbytes == 0
    assert not memo.put("b", ones(1), version=before)
    assert memo.put("b", ones(1), version=memo.version)


def test_a_captured_region_must_not_use_it() -> None:
    memo = Memo()
    with recording_flag():
        for call in (lambda: memo.get("a"), lambda: memo.put("a", ones(1))):
            with pytest.raises(CudaGraphError, match="outside captured regions"):
                call()


# ---------------------------------------------------------------- in an engine


class Remembering(Encoding):
    """Keeps each row's prompt across requests."""

    capture_safe = False

    def encode(self, cache: Any) -> None:
        memo, tokens = self.adapter.services.memo, cache.inputs["tokens"]
        for row in range(cache.capacity):
            key = ("prompt", *tokens[row].tolist())
            found = memo.get(key)
            if found is None:
                self.adapter.args.log.append(key)
                found = {"prompt": self.network.words[tokens[row]]}
                memo.put(key, found)
            cache["prompt"][row].copy_(found["prompt"])


class RememberingAdapter(GuidedAdapter):
    name = "guided-remembering"

    def conditioning(self) -> Any:
        return Remembering(self)

    def update_weights(self, items: Any) -> None:
        super().update_weights(items)
        if self.args.reads:
            raise RuntimeError("half-way")


def test_a_hit_gives_the_same_bits_and_is_counted() -> None:
    with open_engine(GuidedAdapter) as engine:
        want = engine.step(request(2))
    with open_engine(RememberingAdapter) as engine:
        for _ in range(3):
            same(engine.step(request(2)), want)
        log = [e for e in engine.adapter.args.log if e[0] == "prompt"]  # type: ignore[attr-defined]
        assert len(log) == 4  # two rows of two branches, once
        (replica,) = engine.stats()["replicas"]
        assert replica["memo"]["hits"] == 8
        assert replica["memory"]["memo"] == replica["memo"]["bytes"] == 4 * 3 * (2 * 5 + 2 * 2)
        # A hit is copied: what a request writes into its cache is its own.
        (bound,) = engine.core.runner._bound.values()
        bound.cache["prompt"].fill_(9)
        same(engine.step(request(2)), want)


def test_a_weight_update_empties_it_also_one_that_fails() -> None:
    with open_engine(RememberingAdapter) as engine:
        adapter: Any = engine.adapter
        engine.step(request(2))
        words = adapter.network.words.detach() + 1.0
        engine.update_weights_all({"words": words})
        assert len(engine.core.services.memo) == 0
        changed = engine.step(request(2))
        adapter.args.reads = ""
        with open_engine(GuidedAdapter) as plain:
            plain.update_weights_all({"words": words})
            same(changed, plain.step(request(2)))
        adapter.args.reads = "fails"
        with pytest.raises(WeightUpdateError, match="half-way"):
            engine.update_weights_all({"words": words + 1.0})
        assert len(engine.core.services.memo) == 0


def test_the_size_is_configured() -> None:
    with open_engine(RememberingAdapter, runtime={"memo_bytes": 0}) as engine:
        want = engine.step(request(2))
        same(engine.step(request(2)), want)
        assert engine.core.services.memo.stats()["entries"] == 0
