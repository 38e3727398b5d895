"""One evaluation of the network against the golden cases, and what must not change a row."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import cast

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError, PluginContractError, RequestError
from phyai.kernels import catalogue
from phyai.memo import Memo
from phyai.models.cosmos3.network import flops
from phyai.models.cosmos3.network.flops import MediaTokens
from phyai.models.cosmos3.network.layout import EVEN, plan_text
from phyai.models.cosmos3.network.positions import media_positions
from phyai.parallel import Group, Mesh
from phyai.profile.flops import count_flops
from phyai.step_unit import GraphStep
from phyai.types import Key, Prepared, Step
from phyai.unipc import UniPC
from tests.core.thread_ranks import on_all, services
from tests.cosmos.direct_network import (
    ROOT,
    Network,
    Row,
    key_of,
    masked,
    one_step,
    prepared,
    read_case,
    row_of,
)

CASES = sorted(path.stem for path in ROOT.glob("case_tr_*.safetensors"))
FORWARD = 2e-5
TEXT = 1e-5


@pytest.fixture(scope="module")
def network() -> Network:
    return Network()


def apart(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


def policy_row(seed: int = 0, tokens: int = 23, **changes: object) -> Row:
    """Return a random row like those of policy requests."""
    random = torch.Generator().manual_seed(seed)
    row = Row(
        torch.randint(0, 272, (tokens,), generator=random),
        {
            "video": torch.randn(8, 3, 5, 7, generator=random),
            "action": torch.randn(9, 16, generator=random),
        },
        {"video": [0], "action": [0]},
        15.0,
        0,
        8,
    )
    return replace(row, **changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the golden cases


@pytest.mark.parametrize("name", CASES)
def test_velocity_is_the_golden_one(name: str, network: Network) -> None:
    case = read_case(name)
    row = row_of(case)
    out = network.velocity([row], network.cache([row]), int(case[0]["timestep"]))
    assert set(out) == set(row.x)
    for leaf, velocity in masked([row], out).items():
        assert apart(velocity[0], case[0][f"velocity_{leaf}"]) < FORWARD


@pytest.mark.parametrize(
    ("name", "pad"), [("case_tr_policy_state", 0), ("case_tr_policy_state", 9), ("case_tr_t2v", 0)]
)
def test_recorded_tensors_are_the_golden_ones(name: str, pad: int) -> None:
    case = read_case(name)
    row, network = replace(row_of(case), pad=pad), Network(full_last=True, memo=Memo())
    with network.profile.recorder.recording() as told:
        network.velocity([row], network.cache([row]), int(case[0]["timestep"]))
        again = network.cache([row], branch="uncond")  # recorded although the memo has it
        network.velocity([row], again, int(case[0]["timestep"]))
    wanted = {key: value for key, value in case[0].items() if key.startswith("mid.")}
    assert {key for key in told if ".uncond." not in key} == set(wanted)
    assert {key.replace(".uncond.", ".") for key in told} == set(wanted)
    for key, value in wanted.items():
        packed = key.startswith("mid.und.")
        limit = TEXT if key.endswith((".k", ".v")) else FORWARD
        for name in (key, key.replace("mid.", "mid.uncond.")):
            (got,) = told[name]
            got = got if packed else got[0]
            if key == "mid.position_ids":
                assert torch.equal(got, value)
            else:
                assert apart(got, value) < limit, name


def test_time_embedding_is_the_golden_one(network: Network) -> None:
    tensors, _ = read_case("case_rope_time")
    assert apart(network.denoiser.time(tensors["time.t"]), tensors["time.embed"]) < 1e-5


# ---------------------------------------------------------------- rows do not mix


def test_rows_of_different_texts_are_each_as_alone(network: Network) -> None:
    rows = [
        policy_row(1, 23),
        policy_row(2, 9, domain=3, clean={"video": [0, 1, 2]}),
        policy_row(3, 17, domain=11, fps=30.0, action_start=1, clean={}),
    ]
    together = network.velocity(rows, network.cache(rows), 833)
    for number, row in enumerate(rows):
        alone = network.velocity([row], network.cache([row]), 833)
        for leaf, velocity in alone.items():
            assert apart(together[leaf][number], velocity[0]) < 5e-6


def test_equal_texts_are_bit_identical_alone_and_shared(network: Network) -> None:
    rows = [policy_row(seed) for seed in range(3)]
    together = network.velocity(rows, network.cache(rows), 500)
    for number, row in enumerate(rows):
        alone = network.velocity([row], network.cache([row]), 500)
        assert all(torch.equal(together[leaf][number], alone[leaf][0]) for leaf in alone)


@pytest.mark.parametrize("static", [False, True])
def test_padding_of_texts_and_of_rows_is_not_seen(static: bool, network: Network) -> None:
    rows = [policy_row(4, 12, pad=5), policy_row(5, 15)]
    padded = Network(static=static)
    cache = padded.cache(rows, capacity=4)
    assert not cache.plan.uniform
    for name in ("und.k", "und.v", "gen.k", "gen.v"):  # what earlier requests left there
        lens = [12, 15, 12, 12]
        for row, n in enumerate(lens):
            cache[name][row, ..., n:, :, :] = 1e4
    x = rows + rows[:1] * 2
    out = padded.velocity(x, cache, 250)
    for number, row in enumerate(rows):
        alone = network.velocity([row], network.cache([replace(row, pad=0)]), 250)
        for leaf, velocity in alone.items():
            assert apart(out[leaf][number], velocity[0]) < 5e-6


def test_nothing_an_earlier_request_left_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that multiply hidden values by zero make NaN of NaN."""
    rows = tuple(row for row in catalogue.CATALOGUE if row.reference)
    monkeypatch.setattr(catalogue, "CATALOGUE", rows)
    network = Network()
    ragged = [policy_row(4, 12), policy_row(5, 23)]
    cache = network.cache(ragged)
    want = network.velocity(ragged, cache, 250)
    for name in ("und.k", "und.v", "gen.k", "gen.v"):
        cache[name].fill_(torch.nan)
    network.encode(cache, prepared(ragged, network.config))
    got = network.velocity(ragged, cache, 250)
    assert all(torch.equal(got[leaf], want[leaf]) for leaf in want)


def test_a_step_of_a_graph_reads_its_row_of_the_table(network: Network) -> None:
    row = policy_row(6)
    cache, grid = network.cache([row]), UniPC().grid(Key(num_steps=4, grid="native:5"))
    network.denoiser.prepare_grid(grid)
    x = {leaf: tensor[None] for leaf, tensor in row.x.items()}
    seen = []
    with torch.no_grad():
        for step in grid:
            want = network.denoiser(x, step, cache)
            graph_step = GraphStep(step.grid, torch.tensor([step.index]))
            got = network.denoiser(x, cast(Step, graph_step), cache)
            assert all(torch.equal(got[leaf], want[leaf]) for leaf in want)
            seen.append(want["action"])
    assert all(apart(a, b) > 1e-3 for a, b in pairwise(seen))
    network.denoiser.release_grid(grid)
    assert grid[0].grid not in network.denoiser.tables


# ---------------------------------------------------------------- computed once


def test_each_text_is_computed_once_and_remembered() -> None:
    memo = Memo()
    network = Network(memo=memo)
    rows = [
        policy_row(1, 23),
        policy_row(2, 9),
        replace(policy_row(3, 9), ids=policy_row(2, 9).ids),
    ]
    first = network.cache(rows, capacity=4)
    assert (network.counters["und_rows"], network.counters["und_tokens"]) == (2, 32)
    second = network.cache(rows, capacity=4)
    assert (network.counters["und_rows"], network.counters["und_tokens"]) == (2, 32)
    assert torch.equal(first["und.k"], second["und.k"])
    assert torch.equal(first["und.v"], second["und.v"])
    assert (len(memo), memo.stats()["hits"]) == (2, 2)
    network.velocity(rows + rows[:1], second, 500)
    assert network.counters["und_rows"] == 2
    assert network.counters["gen_tokens"] == 4 * 45


def test_each_text_is_computed_by_itself() -> None:
    """Products of other sizes may round otherwise, and keys are kept for later requests."""
    network, sizes = Network(), []
    network.text.embed.register_forward_pre_hook(lambda _, ids: sizes.append(len(ids[0])))
    cache = network.cache([policy_row(1, 23), policy_row(2, 9), policy_row(3, 9)])
    assert sizes == [23, 9, 9]
    for row, one in enumerate([policy_row(1, 23), policy_row(2, 9), policy_row(3, 9)]):
        alone, tokens = network.cache([one]), len(one.ids)
        for name in ("und.k", "und.v"):
            assert torch.equal(cache[name][row, :, :tokens], alone[name][0])


def test_the_table_of_a_grid_has_a_row_per_step_and_is_rewritten_in_place() -> None:
    network = Network()
    grid = UniPC().grid(Key(num_steps=4, grid="native:5"))
    for _ in range(2):
        network.denoiser.prepare_grid(grid)
    assert network.counters["time_table_rows"] == 4
    table = network.denoiser.tables[grid[0].grid]
    assert apart(table, network.denoiser.time(torch.tensor([999, 937, 833, 624]))) == 0
    before, address = table.clone(), table.data_ptr()
    network.denoiser.time.linear_2.bias.data += 1
    network.denoiser.refresh()
    assert network.denoiser.tables[grid[0].grid].data_ptr() == address
    assert apart(table, before + 1) < 1e-6


# ---------------------------------------------------------------- tensor parallelism


@pytest.mark.parametrize("size", [2, 8])
def test_ranks_compute_what_one_does(size: int) -> None:
    """With 8 ranks each of the 4 key heads is kept by two of them."""
    case = read_case("case_tr_policy_state")
    row = row_of(case)

    def work(group: Group) -> tuple[dict[str, Tensor], Network, int]:
        network = Network(tp=group)
        cache = network.cache([row])
        encoded = group.traffic.collectives
        return network.velocity([row], cache, 833), network, encoded

    layers = 3
    read = Network().report
    assert read is not None
    ranks = services(Mesh(tp=size), 60.0)
    for done in on_all(size, lambda rank: work(ranks[rank].tp)):
        if isinstance(done, BaseException):
            raise done
        out, network, encoded = done
        for leaf, velocity in masked([row], out).items():
            assert apart(velocity[0], case[0][f"velocity_{leaf}"]) < FORWARD
        tp = network.text.layers[0].shards  # type: ignore[union-attr]
        assert (tp.heads, tp.kv_heads) == (8 // size, max(4 // size, 1))
        assert encoded == 1 + 2 * (layers - 1)  # the embedding, and two per text layer
        assert network.denoiser.generator.layers[0].out.weight.shape == (64, 128 // size)  # type: ignore[union-attr]
        group = network.text.embed._group
        assert group.traffic.collectives - encoded == 2 * layers
        assert network.report is not None
        assert network.report.bytes_read < 0.8 * read.bytes_read


# ---------------------------------------------------------------- captured graphs


def test_static_shapes_mask_unless_the_key_says_even() -> None:
    even, uneven = [policy_row(1), policy_row(2)], [policy_row(1), policy_row(2, 9)]
    config = Network.__dataclass_fields__["config"].default_factory()  # type: ignore[misc]

    def plan(rows: list[Row], said: bool | None) -> bool:
        return plan_text(prepared(rows, config), "cond", 2, 272, even=said).uniform

    assert [plan(even, None), plan(even, False), plan(even, True)] == [True, False, True]
    assert [plan(uneven, None), plan(uneven, False)] == [False, False]
    with pytest.raises(PluginContractError, match=r"must have 23 text tokens.*branch 'cond'"):
        plan(uneven, True)
    network = Network(static=True)
    assert not network.cache(even[:1]).plan.uniform
    cache = network.cache(even)
    assert not cache.plan.uniform
    masked_out = network.velocity(even, cache, 500)
    batch = prepared(even, network.config)
    cache.key = replace(cache.key, extra=((EVEN, ("cond", "uncond")),))
    network.encode(cache, batch)
    assert cache.plan.uniform
    dense = network.velocity(even, cache, 500)
    assert all(apart(dense[leaf], masked_out[leaf]) < 5e-6 for leaf in dense)


def test_the_other_branch_has_a_text_of_its_own(network: Network) -> None:
    cond, uncond = policy_row(1, 23), policy_row(1, 11)
    batch, other = prepared([cond], network.config), prepared([uncond], network.config)
    both = {f"uncond/{name}": other.tensors[name] for name in ("tokens", "token_len")}
    key = replace(
        batch.key,
        branches=("cond", "uncond"),
        buckets=(*batch.key.buckets, ("uncond.tokens", 11)),
    )
    joined = Prepared({**batch.tensors, **both}, 1, key)
    for branch, n in (("cond", 23), ("uncond", 11)):
        own = joined.for_branch(branch)
        assert plan_text(own, branch, 1, 272, even=None).lens == (n,)
        assert network.conditioning.cache_buffers(own.key)["und.k"].shape == (3, n, 4, 16)


# ---------------------------------------------------------------- precision and cost


def test_bfloat16_stays_close() -> None:
    case = read_case("case_tr_policy_state")
    row, network = row_of(case), Network(dtype=torch.bfloat16)
    out = network.velocity([row], network.cache([row]), 833)
    for leaf, velocity in masked([row], out).items():
        want = case[0][f"velocity_{leaf}"]
        assert velocity.dtype == torch.float32
        assert apart(velocity[0], want) < 2e-2 * float(want.abs().max())


def test_counted_operations_are_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(row for row in catalogue.CATALOGUE if row.reference)
    monkeypatch.setattr(catalogue, "CATALOGUE", rows)
    network = Network()
    row = policy_row(1)
    batch, cache = prepared([row], network.config), network.cache([row])
    timers = network.profile.timers
    counted = count_flops(timers, lambda: network.encode(cache, batch))
    assert counted.total == flops.text_flops(network.config, 23)
    full = Network(full_last=True)
    counted = count_flops(full.profile.timers, lambda: full.encode(cache, batch))
    assert counted.total == flops.text_flops(full.config, 23, full_last=True)
    network.denoiser.prepare_grid(one_step(833))
    counted = count_flops(timers, lambda: network.velocity([row], cache, 833))
    media = MediaTokens(video=36, action=9)
    assert counted.total == flops.evaluation_flops(network.config, media, 23)
    counted = count_flops(
        timers, lambda: network.denoiser.prepare_grid(UniPC().grid(Key(num_steps=4)))
    )
    assert counted.total == flops.time_table_flops(network.config, 4)


def test_released_sizes_cost_what_was_published() -> None:
    """About 49 TFLOP per evaluation of a DROID request of Nano, 6.95e9 weights per expert."""
    config = type(Network().config)()
    assert flops.text_weights(config, full_last=True) == pytest.approx(6.946e9, rel=1e-3)
    media = MediaTokens(video=3060, action=33)
    assert flops.evaluation_flops(config, media, 150) / 1e12 == pytest.approx(49, abs=0.7)


# ---------------------------------------------------------------- what is refused


def test_what_the_checkpoint_lacks_is_refused(network: Network) -> None:
    row = policy_row(1)
    silent = Network(heads={"sound": False, "action": False})
    with pytest.raises(ConfigError, match=r"leaf 'action' must have its head.*video"):
        silent.cache([row])
    none = replace(network.config, sound_gen=False)
    assert set(Network(config=none).denoiser.heads) == {"video", "action"}
    with pytest.raises(ConfigError, match="sound_gen false"):
        Network(config=none, heads={"sound": True})
    with pytest.raises(RequestError, match=r"token ids.*\[0, 272\).*\[272\]"):
        network.cache([replace(row, ids=torch.tensor([1, 272]))])
    with pytest.raises(RequestError, match=r"domain ids must be in \[0, 12\); got \[12\]"):
        network.cache([replace(row, domain=12)])


def test_wrong_inputs_of_an_adapter_are_told(network: Network) -> None:
    row = policy_row(1)
    batch = prepared([row], network.config)
    cache = network.cache([row])
    cache.inputs.tensors["positions"] = media_positions(
        network.config, frames=2, rows=3, columns=4, fps=24.0
    )[None]
    with pytest.raises(PluginContractError, match="positions must be of 45 media tokens; got 24"):
        network.encode(cache, batch)
    short = Prepared({**batch.tensors, "token_len": torch.tensor([0])}, 1, key_of([row]))
    with pytest.raises(PluginContractError, match=r"token_len must be in \[1, 23\]"):
        plan_text(short, "cond", 1, 272, even=None)
