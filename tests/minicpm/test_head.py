"""The action head: the golden cases, other sizes against plain formulas, and the work it does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from phyai.errors import CapacityError
from phyai.layers import Linear, TableLinear
from phyai.types import Key
from phyai.weights import update_tensors
from tests.minicpm.head_runs import (
    ROOT,
    SMALL,
    HeadRunner,
    PlainHead,
    Row,
    golden_config,
    golden_tensors,
    random_rows,
)

ATOL = 2e-5
CASES = ("case_action", "case_action_b3", "case_action_shared_head")
VARIANTS = {
    "banks": SMALL,
    "shared": replace(SMALL, shared_head=True),
    "no positions": replace(SMALL, add_pos_embed=False),
    "last block sees itself": replace(SMALL, num_layers=4),
}
LENS = {"one": [6], "equal": [5, 5, 5], "ragged": [9, 1, 4, 12]}


@pytest.fixture(scope="module", params=VARIANTS)
def runner(request: pytest.FixtureRequest) -> HeadRunner:
    return HeadRunner(VARIANTS[request.param])


def truth(runner: HeadRunner, rows: list[Row], steps: int) -> Tensor:
    head = PlainHead(runner.config, runner.tensors)
    return torch.stack([head.actions(row, steps) for row in rows])


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=ATOL, rtol=0)


# ---------------------------------------------------------------- golden


def golden_runner(shared: bool) -> HeadRunner:
    config, tensors = golden_config().head, golden_tensors(("action_head.",))
    if shared:
        config = replace(config, shared_head=True)
        parts = ("action_head.action_encoder.", "action_head.action_decoder.")
        tensors = {name: t for name, t in tensors.items() if not name.startswith(parts)}
        tensors |= load_file(ROOT / "shared_head_override.safetensors")
    return HeadRunner(config, tensors)


@pytest.mark.parametrize("case", CASES)
def test_golden_case_with_every_intermediate(case: str) -> None:
    want = load_file(ROOT / f"{case}.safetensors")
    runner = golden_runner("shared" in case)
    noise, state = want.pop("noise"), want.pop("state")[:, 0]
    features = want.pop("vl_embs")
    ids = want.pop("embodiment_id", torch.full((len(noise),), 2))
    rows = [Row(f, s, n, int(e)) for f, s, n, e in zip(features, state, noise, ids, strict=True)]
    with runner.profile.recorder.recording() as records:
        got = runner(rows)
    close(got, want.pop("actions"))
    for name, value in want.items():
        part = name.removeprefix("act.")
        step, _, rest = part.partition(".")
        number, part = (int(step[4:]), rest) if step.startswith("step") else (1, part)
        close(records[f"head.{part}"][number].to(value.dtype), value)


# ---------------------------------------------------------------- other sizes


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_actions_equal_the_formulas(runner: HeadRunner, lens: str, steps: int) -> None:
    rows = random_rows(runner.config, LENS[lens], seed=steps)
    want = truth(runner, rows, steps)
    close(runner(rows, steps), want)
    close(runner(rows, steps, static=(len(rows) + 1, 16)), want)


def test_steps_that_do_not_divide_a_thousand() -> None:
    """57 of 100 is time 570 or 569, depending on the order of operations: as in the official."""
    runner = HeadRunner(SMALL)
    rows = random_rows(SMALL, [3], seed=5)
    close(runner(rows, 7), truth(runner, rows, 7))
    for count in (7, 100):
        grid = runner.solver.grid(Key(num_steps=count))
        runner.network.prepare_grid(grid)
        times = runner.network.tables[grid[0].grid]["t_discretized"].tolist()
        assert times == [min(int(1000 * (k / count)), 999) for k in range(count, 0, -1)]


def test_a_row_alone_equals_the_row_in_a_batch(runner: HeadRunner) -> None:
    rows = random_rows(runner.config, LENS["ragged"])
    together = runner(rows)
    for i, row in enumerate(rows):
        close(together[i : i + 1], runner([row]))


def test_a_row_does_not_hang_on_its_neighbours_in_one_bucket(runner: HeadRunner) -> None:
    mine, other, third = random_rows(runner.config, [4, 7, 2], [1, 3, 0], seed=2)
    first = runner([mine, other], static=(4, 8))
    second = runner([mine, third], static=(4, 8))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_embodiments_may_stand_in_any_order() -> None:
    runner = HeadRunner(SMALL)
    (one,) = random_rows(SMALL, [6])
    rows = [replace(one, embodiment=e) for e in (2, 0, 3, 2)]
    order = [3, 1, 0, 2]
    got, turned = runner(rows), runner([rows[i] for i in order])
    close(turned, got[order])
    close(got[0], got[3])
    assert float((got[0] - got[1]).abs().max()) > 1e-2


def test_a_shared_head_does_not_look_at_embodiments() -> None:
    runner = HeadRunner(replace(SMALL, shared_head=True))
    (one,) = random_rows(SMALL, [6])
    got = runner([one, replace(one, embodiment=10**6)])
    close(got[0], got[1])
    assert not any(name.startswith("bank.") for name in runner.network.cache_buffers(4))


def test_a_head_in_bfloat16_stays_close() -> None:
    tensors = HeadRunner(SMALL).tensors
    runner = HeadRunner(SMALL, tensors, dtype=torch.bfloat16)
    rows = random_rows(SMALL, LENS["ragged"])
    got, want = runner(rows), truth(HeadRunner(SMALL, tensors), rows, 4)
    assert got.dtype == torch.float32
    cosine = torch.cosine_similarity(got.flatten(1), want.flatten(1))
    assert float(cosine.min()) > 0.999


def test_features_may_have_another_dtype() -> None:
    runner = HeadRunner(SMALL)
    rows = random_rows(SMALL, [5])
    halves = [replace(row, features=row.features.bfloat16()) for row in rows]
    back = [replace(row, features=row.features.float()) for row in halves]
    assert torch.equal(runner(halves), runner(back))


def test_rows_that_do_not_fit_are_refused() -> None:
    runner = HeadRunner(SMALL)
    with pytest.raises(CapacityError, match="2 rows of 4 tokens"):
        runner(random_rows(SMALL, [4, 5]), static=(2, 4))


# ---------------------------------------------------------------- work done


class Work:
    """How many rows each linear layer was fed, and how often, while a head ran."""

    def __init__(self, network: nn.Module) -> None:
        self.rows: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        for name, module in network.named_modules():
            if isinstance(module, Linear | TableLinear):
                module.register_forward_pre_hook(self._counter(name))

    def _counter(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.calls[name] += 1
            self.rows[name] += args[0].numel() // args[0].shape[-1]

        return hook


@pytest.mark.parametrize("layers", [4, 5])
def test_nothing_is_computed_twice_or_for_nobody(layers: int) -> None:
    config, steps = replace(SMALL, num_layers=layers), 3
    runner = HeadRunner(config)
    rows = random_rows(config, LENS["ragged"])
    runner(rows, steps)
    work, before = Work(runner.network), Counter(runner.profile.counters)
    runner(rows, steps)
    grown = Counter(runner.profile.counters)
    grown.subtract(before)
    batch, horizon = len(rows), config.action_horizon
    tokens = horizon + config.num_target_vision_tokens
    assert not [name for name in work.calls if "time" in name], "the time MLP ran again"
    assert grown["time_table_builds"] == 0
    assert (grown["cross_kv_calls"], grown["cross_kv_tokens"]) == (1, sum(LENS["ragged"]))
    assert (work.calls["cross.project"], work.rows["cross.project"]) == (1, sum(LENS["ragged"]))
    assert grown["state_projections"] == batch, "once per row, not per step"
    assert grown["decoded_tokens"] == work.rows["dit.proj_out"] == steps * batch * horizon
    for i in range(layers):
        seen = horizon if i == layers - 1 else tokens
        assert work.rows[f"dit.blocks.{i}.fc1"] == steps * batch * seen, "the future's last block"


def test_tables_are_built_once_per_grid_and_dropped_with_it() -> None:
    runner = HeadRunner(SMALL)
    rows = random_rows(SMALL, [3, 4])
    for steps, builds in ((4, 1), (4, 1), (2, 2)):
        runner(rows, steps)
        assert runner.profile.counters["time_table_builds"] == builds
    assert runner.profile.counters["time_table_rows"] == 6
    runner.network.release_grid(runner.solver.grid(Key(num_steps=2)))
    assert len(runner.network.tables) == 1


def test_listening_changes_no_action_and_tells_of_all_tokens(runner: HeadRunner) -> None:
    rows = random_rows(runner.config, LENS["ragged"])
    plain = runner(rows)
    with runner.profile.recorder.recording() as records:
        told = runner(rows, static=(5, 12))
    close(told, plain)
    tokens = runner.config.action_horizon + runner.config.num_target_vision_tokens
    last = f"head.dit.block.{runner.config.num_layers - 1}"
    assert [t.shape[:2] for t in records[last]] == [(len(rows), tokens)] * 4


# ---------------------------------------------------------------- weight updates


@pytest.mark.parametrize("shared", [False, True])
def test_refresh_rewrites_tables_in_place(shared: bool) -> None:
    config = replace(SMALL, shared_head=shared)
    runner = HeadRunner(config)
    rows = random_rows(config, LENS["ragged"])
    first = runner(rows)
    (tables,) = runner.network.tables.values()
    addresses = {name: table.data_ptr() for name, table in tables.items()}
    second = "layer2" if shared else "W2"
    names = (
        "action_head.model.timestep_encoder.timestep_embedder.linear_2.bias",
        "action_head.model.transformer_blocks.2.norm1.linear.weight",
        "action_head.model.proj_out_1.bias",
        f"action_head.action_encoder.{second}.{'weight' if shared else 'W'}",
        f"action_head.action_encoder.{second}.{'bias' if shared else 'b'}",
        "action_head.model.transformer_blocks.1.attn1.to_k.weight",
    )
    changed = {**runner.tensors, **{name: runner.tensors[name] + 0.3 for name in names}}
    update_tensors(runner.network, {name: changed[name] for name in names})
    runner.network.refresh()
    assert {name: table.data_ptr() for name, table in tables.items()} == addresses
    got = runner(rows)
    assert torch.equal(got, HeadRunner(config, changed)(rows))
    assert not torch.allclose(got, first, atol=1e-3)
    update_tensors(runner.network, {name: runner.tensors[name] for name in names})
    runner.network.refresh()
    assert torch.equal(runner(rows), first)
