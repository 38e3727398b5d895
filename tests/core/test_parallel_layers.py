"""Tensor-parallel layers: each rank's share, what it reads, and that the shares add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.kernels import KernelTable, parse_policy
from phyai.layers import ColumnLinear, Linear, RowLinear, VocabParallelEmbedding
from phyai.parallel import HeadShards
from phyai.weights import randomize, unpacked, update_tensors
from tests.core.shared_layers import (
    HEAD,
    HEADS,
    KV_HEADS,
    VOCAB,
    WIDTH,
    Layers,
    Played,
    loaded,
    placement,
    summed,
    tensors,
    write,
)

SIZES = (2, 4, 8)
IDS = torch.tensor([[0, 7, 24], [25, 49, 12]])
QUANTISED = parse_policy(
    {
        "schema": "phyai.kernel/v1",
        "quantization": {
            "method": "rtn",
            "stage": "load",
            "rules": [
                {"match": {"module_cls": "Linear"}, "weight": {"dtype": "int8"}, "input": None}
            ],
        },
    }
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path, tensors())


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------- heads


def test_each_query_head_finds_the_key_head_it_reads() -> None:
    for heads, kv_heads in ((8, 1), (8, 2), (8, 8), (12, 3), (16, 4), (6, 6), (12, 2)):
        for tp in HeadShards.sizes(heads, kv_heads):
            for rank in range(tp):
                share = HeadShards.of(heads, kv_heads, tp, rank)
                first_kv = rank // share.kv_replicas * share.kv_heads
                for head in range(share.heads):
                    whole = (rank * share.heads + head) // (heads // kv_heads)
                    local = head // (share.heads // share.kv_heads)
                    assert first_kv + local == whole, (heads, kv_heads, tp, rank, head)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sizes"),
    [
        (8, 1, (1, 2, 4, 8)),
        (8, 2, (1, 2, 4, 8)),
        (12, 3, (1, 3, 6, 12)),
        (32, 8, (1, 2, 4, 8, 16, 32)),
        (6, 2, (1, 2, 6)),
        (5, 5, (1, 5)),
    ],
)
def test_sizes_that_work(heads: int, kv_heads: int, sizes: tuple[int, ...]) -> None:
    assert HeadShards.sizes(heads, kv_heads) == sizes
    for tp in set(range(1, heads + 2)) - set(sizes):
        with pytest.raises(ConfigError, match=f"got {tp}. Sizes that work: 1, "):
            HeadShards.of(heads, kv_heads, tp, 0)


def test_heads_that_are_no_multiple_of_kv_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of kv_heads; got 8 and 3"):
        HeadShards.of(8, 3, 1, 0)
    with pytest.raises(ConfigError, match=r"in \[0, 2\); got 2"):
        HeadShards.of(8, 2, 2, 2)


# ---------------------------------------------------------------- one rank


def test_one_rank_computes_what_plain_layers_do(file: Path) -> None:
    layers, _ = loaded(placement(), file)
    found, x = tensors(), drawn(3, WIDTH)
    plain = Linear(["q", "k", "v"], WIDTH, [64, 16, 16], placement(), bias=True)
    update_tensors(plain, {n: t for n, t in found.items() if n[0] in "qkv"})
    assert torch.equal(layers.qkv(x), plain(x))
    assert (layers.qkv.sizes, layers.qkv.kernel) == (plain.sizes, plain.kernel)
    out = Linear("out", 64, WIDTH, placement(), bias=True)
    update_tensors(out, {n: t for n, t in found.items() if n.startswith("out")})
    assert torch.equal(layers.out(drawn(3, 64)), out(drawn(3, 64)))
    assert torch.equal(layers.embed(IDS), found["head.weight"][IDS])


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize("size", SIZES)
def test_columns_of_all_ranks_are_those_of_one(size: int, file: Path) -> None:
    whole, x = loaded(placement(), file)[0], drawn(3, WIDTH)
    parts = [loaded(placement(rank, size), file)[0] for rank in range(size)]
    gated = torch.cat([layers.gate_up(x) for layers in parts], dim=-1)
    torch.testing.assert_close(gated, whole.gate_up(x), rtol=1e-5, atol=1e-6)

    q, k, v = whole.qkv(x).split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], dim=-1)
    ours = [layers.qkv(x).split(layers.qkv.sizes, dim=-1) for layers in parts]
    torch.testing.assert_close(torch.cat([own[0] for own in ours], dim=-1), q)
    copies = max(size // KV_HEADS, 1)
    for place, value in ((1, k), (2, v)):
        torch.testing.assert_close(torch.cat([own[place] for own in ours[::copies]], -1), value)
        for rank, own in enumerate(ours):  # neighbours that share a head have the same one
            assert torch.equal(own[place], ours[rank // copies * copies][place])


@pytest.mark.parametrize("size", SIZES)
def test_rows_add_up_with_the_bias_once(size: int, file: Path) -> None:
    whole, x = loaded(placement(), file)[0], drawn(3, 64)
    mine = [x[:, rank * 64 // size : (rank + 1) * 64 // size] for rank in range(size)]
    total = summed(size, lambda at: loaded(at, file)[0].down(mine[at.tp.rank]))
    torch.testing.assert_close(total + tensors()["down.bias"], whole.down(x), rtol=1e-5, atol=1e-5)
    at = placement(0, size)
    y, group = loaded(at, file)[0].down(mine[0]), at.tp
    assert isinstance(group, Played)
    assert torch.equal(y, group.parts[0] + tensors()["down.bias"])
    assert (group.traffic.collectives, group.traffic.payload_bytes) == (1, 3 * WIDTH * 4)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_embedding_rows_of_any_split_add_up_exactly(size: int) -> None:
    table = drawn(VOCAB, WIDTH)

    def look_up(at: Any) -> Tensor:
        embed = VocabParallelEmbedding("embed.weight", VOCAB, WIDTH, at)
        update_tensors(embed, {"embed.weight": table})
        rows: Tensor = embed(IDS)
        return rows

    assert torch.equal(summed(size, look_up), table[IDS])


def test_embedding_stays_in_its_file(file: Path) -> None:
    found = tensors()["head.weight"]

    def look_up(at: Any) -> Tensor:
        layers, _ = loaded(at, file, in_file=True)
        assert layers.embed.weight.shape == (25, WIDTH)
        assert layers.embed.weight.untyped_storage().nbytes() == found.nbytes  # a view of it
        rows: Tensor = layers.embed(IDS)
        return rows

    assert torch.equal(summed(2, look_up), found[IDS])


# ---------------------------------------------------------------- loading


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_reads_its_slices_only(size: int, file: Path) -> None:
    found = tensors()
    shared = sum(t.nbytes for n, t in found.items() if n[0] not in "kvh" and n not in ROW_BIASES)
    heads = sum(t.nbytes for n, t in found.items() if n[0] in "kv") // min(size, KV_HEADS)
    rows = -(-VOCAB // size)
    for rank in range(size):
        _, report = loaded(placement(rank, size), file)
        table = 4 * WIDTH * min(rows, VOCAB - rank * rows)
        biases = sum(found[name].nbytes for name in ROW_BIASES)
        assert report.bytes_read == shared // size + heads + table + biases
        assert len(report.loaded) == len(found)


ROW_BIASES = ("out.bias", "down.bias")


@pytest.mark.parametrize("size", [2, 4])
def test_an_update_takes_whole_tensors_and_copies_its_region(size: int, file: Path) -> None:
    fresh = tensors(seed=5)
    for rank in range(size):
        updated, _ = loaded(placement(rank, size), file)
        assert set(update_tensors(updated, fresh)) == set(fresh)
        expected = Layers(placement(rank, size))
        update_tensors(expected, fresh)
        with unpacked(updated), unpacked(expected):
            pairs = zip(updated.named_parameters(), expected.named_parameters(), strict=True)
            assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    part = tensors()["down.weight"][:, :5]
    with pytest.raises(Exception, match=r"shape \[24, 64\]; got \[24, 5\]. Send the full tensor"):
        update_tensors(updated, {"down.weight": part})


@pytest.mark.parametrize("size", [2, 4])
def test_random_weights_are_parts_of_what_one_rank_has(size: int, tmp_path: Path) -> None:
    whole = Layers(placement())
    randomize(whole, 3)
    with unpacked(whole):
        w = {name: value.clone() for name, value in whole.named_parameters()}
    named = {"head.weight": w["embed.weight"], "out.weight": w["out.weight"],
             "out.bias": w["out.bias"], "down.weight": w["down.weight"],
             "down.bias": w["down.bias"]}  # fmt: skip
    legs = {"qkv": (["q", "k", "v"], [64, 16, 16]), "gate_up": (["gate", "up"], [64, 64])}
    for owner, (names, sizes) in legs.items():
        for kind in ("weight", "bias"):
            parts = torch.split(w[f"{owner}.{kind}"], sizes)
            named |= {f"{n}.{kind}": part for n, part in zip(names, parts, strict=True)}
    file = write(tmp_path, named)
    for rank in range(size):
        mine, _ = loaded(placement(rank, size), file)
        drawn_here = Layers(placement(rank, size))
        randomize(drawn_here, 3)
        with unpacked(mine), unpacked(drawn_here):
            pairs = zip(mine.named_parameters(), drawn_here.named_parameters(), strict=True)
            assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)


# ---------------------------------------------------------------- formats and refusals


def test_a_policy_names_shared_layers_like_others(file: Path) -> None:
    """A quantised layer is rounded per rank; the sum stays as close as rounding is."""
    table = KernelTable()
    table.use(QUANTISED)
    x = drawn(3, 64)
    whole, _ = loaded(placement(kernels=table), file)
    assert whole.down.scheme is not None
    exact = loaded(placement(), file)[0].down(x)
    error = (whole.down(x) - exact).abs().max()
    total = torch.zeros_like(exact)
    for rank in range(2):
        at = placement(rank, 2, kernels=table)
        layers, _ = loaded(at, file)
        assert layers.down.scheme is not None
        assert layers.qkv.scheme is not None
        layers.down(x[:, rank * 32 : (rank + 1) * 32])
        total += at.tp.parts[-1]  # type: ignore[attr-defined]
    assert 0 < (total + tensors()["down.bias"] - exact).abs().max() < 2 * error


def test_sizes_that_do_not_divide_are_refused() -> None:
    at = placement(0, 4)
    with pytest.raises(
        ConfigError, match="layer up must have outputs that divide by tp_size; got 6"
    ):
        ColumnLinear("up", 8, 6, at)
    with pytest.raises(
        ConfigError, match="layer down must have inputs that divide by tp_size; got 6"
    ):
        RowLinear("down", 6, 8, at)
    with pytest.raises(ConfigError, match="an embedding of 3 rows must have some for each of 4"):
        VocabParallelEmbedding("embed", 3, 8, placement(3, 4))
