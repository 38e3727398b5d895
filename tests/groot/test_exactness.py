"""Leaving out what does not count changes nothing, and nothing that does not count is computed.

Equality is against ``full_reference``, which computes every row alone and keeps nothing. Work is
counted twice: by the engine's counters and by hooks that see the tensors each layer really gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from phyai import Engine
from phyai.layers import Linear, TableLinear
from phyai.models.gr00t.adapter import GrootAdapter
from phyai.models.gr00t.main_gr00t import GrootRequest
from tests.groot.full_reference import FullReference, RowInputs
from tests.groot.groot_engines import ROOT, cpu_config, engine_of, random_rows, request_of

ATOL = 2e-5
BLOCKS = 8

# image grids and text tokens per row
CASES: dict[str, tuple[list[list[tuple[int, int, int]]], list[int]]] = {
    "one image": ([[(1, 4, 4)]], [5]),
    "odd sizes": ([[(1, 2, 6), (1, 4, 2)]], [9]),
    "equal rows": ([[(1, 4, 4)], [(1, 4, 4)]], [7, 7]),
    "ragged prompts": ([[(1, 4, 4)], [(1, 4, 4)], [(1, 4, 4)]], [3, 30, 11]),
    "ragged everything": (
        [[(1, 4, 4), (1, 2, 2)], [(1, 6, 2)], [(1, 2, 2), (1, 2, 4), (1, 4, 4)]],
        [4, 21, 13],
    ),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_of() as made:
        yield made


@pytest.fixture(scope="module")
def static_engine() -> Iterator[Engine]:
    with engine_of(cpu_config(static_shapes=True)) as made:
        yield made


@pytest.fixture(scope="module")
def reference() -> FullReference:
    return FullReference(ROOT)


def rows_of(case: str, seed: int = 0) -> list[RowInputs]:
    grids, text = CASES[case]
    return random_rows(grids, text, seed=seed)


# ---------------------------------------------------------------- equality


@pytest.mark.parametrize("case", CASES)
def test_actions_equal_the_full_computation(
    case: str, engine: Engine, static_engine: Engine, reference: FullReference
) -> None:
    rows = rows_of(case)
    want = reference.actions(rows, 3)
    for one in (engine, static_engine):
        torch.testing.assert_close(one.step(request_of(rows)), want, atol=ATOL, rtol=0)


def test_ten_steps_equal_the_full_computation(engine: Engine, reference: FullReference) -> None:
    """Step 7 of 10 is bucket 700: truncation of a float32 time would say 699."""
    rows = rows_of("ragged everything", seed=3)
    want = reference.actions(rows, 10)
    got = engine.step(request_of(rows, num_steps=10))
    torch.testing.assert_close(got, want, atol=ATOL, rtol=0)


def test_padding_is_never_read(engine: Engine) -> None:
    rows = rows_of("ragged everything")
    request = request_of(rows)
    other = request_of(rows, pad_to=90)
    ids = other.input_ids.clone()
    ids[other.attention_mask == 0] = 3
    assert torch.equal(engine.step(request), engine.step(replace(other, input_ids=ids)))


@pytest.mark.parametrize("static", [False, True])
def test_rows_of_a_batch_equal_the_row_alone(
    static: bool, engine: Engine, static_engine: Engine
) -> None:
    one = static_engine if static else engine
    rows = rows_of("ragged everything", seed=5)
    together = one.step(request_of(rows))
    for i, row in enumerate(rows):
        alone = one.step(request_of([row]))
        torch.testing.assert_close(together[i : i + 1], alone, atol=ATOL, rtol=0)


def test_a_row_does_not_hang_on_its_neighbours_in_one_bucket(static_engine: Engine) -> None:
    """Bit for bit, whatever the other row holds: embodiment, prompt, pixels."""
    mine, other, third = random_rows([[(1, 4, 4)]] * 3, [5, 9, 14], embodiments=[2, 4, 1])
    first = static_engine.step(request_of([mine, other]))
    second = static_engine.step(request_of([mine, third]))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_official_padding_changes_shorter_rows_only(engine: Engine) -> None:
    rows = rows_of("ragged prompts")
    with engine_of(official_padding=True) as official:
        padded, alone = official.step(request_of(rows)), engine.step(request_of(rows))
        longest = max(range(3), key=lambda i: len(rows[i].ids))
        for i in range(3):
            error = float((padded[i] - alone[i]).abs().max())
            assert (error < ATOL) is (i == longest)
        wider = official.step(request_of(rows, pad_to=60))
        assert not torch.allclose(wider, padded, atol=1e-3)


def test_requests_padded_differently_never_join() -> None:
    with engine_of(official_padding=True) as official:
        prepare = official.adapter.prepare
        rows = random_rows([[(1, 4, 4)]], [5])
        keys = [prepare(request_of(rows, pad_to=n)).key for n in (20, 20, 24)]
    assert keys[0] == keys[1] != keys[2]


# ---------------------------------------------------------------- work done


class Work:
    """How many rows each linear layer of an adapter was fed while it was listening."""

    def __init__(self, adapter: GrootAdapter) -> None:
        self.rows: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._handles = [
            module.register_forward_pre_hook(self._counter(name))
            for name, module in adapter.modules.named_modules()
            if isinstance(module, Linear | TableLinear)
        ]

    def _counter(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.calls[name] += 1
            self.rows[name] += args[0].numel() // args[0].shape[-1]

        return hook

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def run(engine: Engine, request: GrootRequest) -> tuple[Work, Counter[str]]:
    """Return what the layers saw and how the counters grew during one request."""
    adapter = engine.adapter
    assert isinstance(adapter, GrootAdapter)
    before = Counter(engine.core.services.profile.counters)
    work = Work(adapter)
    try:
        engine.step(request)
    finally:
        work.close()
    grown = Counter(engine.core.services.profile.counters)
    grown.subtract(before)
    return work, +grown


@pytest.mark.parametrize("case", CASES)
def test_no_patch_and_no_token_too_many(case: str, engine: Engine) -> None:
    rows = rows_of(case)
    steps, chunk = 3, 8
    work, counters = run(engine, request_of(rows))
    patches = sum(len(row.pixels) for row in rows)
    tokens = sum(len(row.ids) for row in rows)
    text = tokens - patches // 4
    assert (counters["vision_calls"], counters["vision_patches"]) == (1, patches)
    assert counters["text_tokens"] == counters["vl_tokens"] == tokens
    assert counters["cross_kv_tokens.text"] == text
    assert counters["cross_kv_tokens.image"] == patches // 4
    assert work.rows["prefix.vision.merger.fc1"] == patches // 4
    assert work.calls["prefix.vision.taps.0.fc1"] == 1, "deepstack features once"
    assert work.rows["prefix.text.layers.4.down"] == tokens
    assert "prefix.text.layers.5.down" not in work.rows, "layers behind select_layer do not exist"
    for group, seen in (("text", text), ("image", patches // 4)):
        name = f"expert.cross.{group}.project"
        assert (work.calls[name], work.rows[name]) == (1, seen), "once per request, not per step"
    for block in range(BLOCKS):
        name = f"expert.dit.blocks.{block}.project"
        assert work.rows[name] == steps * len(rows) * (1 + chunk)
    assert work.rows["expert.dit.proj_out"] == steps * len(rows) * chunk, "no state token"
    assert counters["decoded_tokens"] == steps * len(rows) * chunk
    assert counters["state_tokens"] == len(rows)


def test_tables_are_built_once_per_grid() -> None:
    """Neither a request nor another batch, embodiment or prompt builds them again."""
    with engine_of() as engine:
        first = request_of(rows_of("one image"))
        work, counters = run(engine, first)
        assert (counters["time_table_builds"], counters["time_table_rows"]) == (1, 3)
        tables = [name for name in work.rows if ".dit.time." in name]
        assert len(tables) == BLOCKS + 3
        assert {work.rows[name] for name in tables} == {3}
        for request in (
            first,
            request_of(rows_of("ragged everything")),
            request_of(random_rows([[(1, 4, 4)]], [5], embodiments=[5])),
        ):
            work, counters = run(engine, request)
            assert counters["time_table_builds"] == 0
            assert not any(".dit.time." in name for name in work.rows)
        _, counters = run(engine, replace(first, num_steps=2))
        assert (counters["time_table_builds"], counters["time_table_rows"]) == (1, 2)


def test_one_graph_key_serves_every_embodiment(engine: Engine) -> None:
    prepare = engine.adapter.prepare
    keys = {
        prepare(request_of(random_rows([[(1, 4, 4)]], [5], embodiments=[e]))).key for e in range(6)
    }
    assert len(keys) == 1


def test_blocks_with_one_input_share_a_matrix(engine: Engine) -> None:
    adapter = engine.adapter
    assert isinstance(adapter, GrootAdapter)
    shapes = {name: tuple(p.shape) for name, p in adapter.modules.named_parameters()}
    assert shapes["expert.cross.text.project.weight"] == (2 * 2 * 48, 64)
    assert shapes["expert.dit.blocks.1.project.weight"] == (3 * 48, 48)
    assert shapes["prefix.vl.blocks.0.qkv.weight"] == (3 * 64, 64)


def test_counters_notice_waste(static_engine: Engine) -> None:
    """Padding everything to its bucket shows up as waste."""
    rows = rows_of("ragged prompts")
    _, counters = run(static_engine, request_of(rows))
    assert counters["text_tokens"] == 4 * (32 + 4) > sum(len(row.ids) for row in rows)


def test_refresh_rewrites_tables_in_place() -> None:
    with engine_of() as engine:
        request = request_of(rows_of("one image"))
        first = engine.step(request)
        adapter = engine.adapter
        assert isinstance(adapter, GrootAdapter)
        (tables,) = adapter.network.tables.values()
        addresses = {name: table.data_ptr() for name, table in tables.items()}
        w = FullReference(ROOT).w
        names = (
            "action_head.model.timestep_encoder.timestep_embedder.linear_2.bias",
            "action_head.action_encoder.W2.b",
        )
        for name in names:
            adapter.update_weights([(name, w[name] + 0.5)])
            engine.core.runner.refresh()
            assert {n: t.data_ptr() for n, t in tables.items()} == addresses
            assert not torch.allclose(first, engine.step(request), atol=1e-3), name
            adapter.update_weights([(name, w[name])])
            engine.core.runner.refresh()
            assert torch.equal(engine.step(request), first)
        adapter.update_weights([("backbone.model.lm_head.weight", torch.zeros(1))])
