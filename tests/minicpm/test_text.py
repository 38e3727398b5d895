"""The hybrid decoder: recorded tensors, layouts, padding, states, captured regions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phyai.errors import CapacityError, ConfigError
from phyai.graph import GraphService
from phyai.models.minicpm_robot.network.mixers import MixerState
from phyai.models.minicpm_robot.network.text import HybridDecoder
from phyai.models.minicpm_robot.network.text_cases import layers_case, prefix_case
from phyai.models.minicpm_robot.network.text_layout import (
    from_places,
    row_lengths,
    static_layout,
    text_layout,
    to_places,
)
from phyai.testing.capture import RecordingCapturer
from tests.minicpm.text_setup import (
    IMAGE,
    SMALL,
    case,
    close,
    decoder,
    golden_decoder,
    golden_sizes,
    ids,
)

SAME = 5e-6
"""Between two ways to run the same tokens; the norms enlarge what other chunk sizes round."""


@pytest.fixture(scope="module")
def golden() -> HybridDecoder:
    return golden_decoder()


@pytest.fixture(scope="module")
def small() -> HybridDecoder:
    return decoder()


# ---------------------------------------------------------------- recorded tensors


def test_single_layers(golden: HybridDecoder) -> None:
    given = case("case_text_layers")
    found = layers_case(golden, given)
    assert found.keys() == given.keys() - {"x", "attn_layer_index", "mrope_positions"}
    for name, value in found.items():
        close(value, given[name], 2e-5)


def test_every_layer_of_a_prompt(golden: HybridDecoder) -> None:
    given = case("case_vlm")
    layout = text_layout([given["input_ids"][0]], golden.config, IMAGE)
    embeds = given["inputs_embeds"][0]
    seen: dict[str, Tensor] = {}
    out = golden(embeds, layout, record=seen.__setitem__)
    close(out, given["last_hidden_state"][0], 2e-4)
    layers = len(golden.layers)
    assert list(seen) == [f"layer_{i}_out" for i in range(layers)]
    for i in range(layers):
        close(seen[f"layer_{i}_out"], given[f"act.layers.{i}"][0], 2e-4)


def test_inputs_take_images_in_order(golden: HybridDecoder) -> None:
    given = case("case_vlm")
    row = given["input_ids"][0]
    layout = text_layout([row, row[:5]], golden.config, IMAGE)
    images = given["inputs_embeds"][0][row == IMAGE]
    more = int((row[:5] == IMAGE).sum())
    got = golden.inputs(layout, torch.cat([images, images[:more]]))
    close(got, torch.cat([given["inputs_embeds"][0], given["inputs_embeds"][0, :5]]), SAME)
    assert layout.image_tokens == len(images) + more


def test_states_behind_a_prefix(golden: HybridDecoder) -> None:
    given = case("case_vlm")
    found = prefix_case(golden, given["inputs_embeds"], int(given["prefix_len"]))
    assert found.keys() == {name for name in given if name.startswith("prefix_layer0")}
    for name, value in found.items():
        close(value, given[name], 2e-5)


# ---------------------------------------------------------------- layouts


def test_layout_of_rows() -> None:
    layout = text_layout([torch.tensor([4, 9, 9]), torch.tensor([9])], SMALL, 9)
    assert layout.token_ids.tolist() == [4, 9, 9, 9]
    assert layout.order.tolist() == [3, 0, 1, 2]
    assert layout.slots.tolist() == [0, 1, 2, 3]
    assert (layout.rows, layout.longest, layout.image_tokens) == (2, 3, 3)
    assert not layout.dense
    assert row_lengths(layout).tolist() == [3, 1]
    assert torch.equal(layout.cos[0], layout.cos[3])
    later = text_layout([torch.tensor([4])], SMALL, 9, start=2)
    assert torch.equal(later.cos[0], layout.cos[2])
    empty = text_layout([], SMALL, 9)
    assert (empty.rows, empty.longest, empty.tokens) == (0, 0, 0)


def test_a_bucket_says_what_is_padding_by_place() -> None:
    layout = text_layout(ids(3, 1), SMALL, 9)
    static = static_layout(layout, 12, 2, 3, 4)
    assert static.slots.tolist() == [0, 1, 2, 4, *[12] * 8]
    assert not static.dense
    assert row_lengths(static).tolist() == [3, 1, 0]
    single = static_layout(text_layout(ids(3), SMALL, 9), 4, 0, 1, 4)
    assert single.slots.tolist() == [0, 1, 2, 4]
    assert single.dense
    assert row_lengths(single).tolist() == [3]
    full = static_layout(text_layout(ids(4, 4), SMALL, 9), 8, 0, 2, 4)
    assert not full.dense, "the path must not hang on the lengths of a batch"
    with pytest.raises(CapacityError, match="must fit the bucket"):
        static_layout(layout, 3, 0, 2, 3)


def test_places() -> None:
    layout = text_layout(ids(3, 1), SMALL, 9)
    packed = torch.arange(1.0, 5.0)[:, None]
    rows = to_places(packed, layout)
    assert rows[..., 0].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert torch.equal(from_places(rows, layout), packed)


# ---------------------------------------------------------------- batches, padding


@pytest.mark.parametrize("lengths", [(5, 5), (3, 70, 1), (130, 64)])
def test_rows_of_a_batch_equal_their_solo_results(
    small: HybridDecoder, lengths: tuple[int, ...]
) -> None:
    rows = ids(*lengths)
    got = _run(small, rows)
    for row, mine in zip(rows, got, strict=True):
        even = len(set(lengths)) == 1
        close(mine, _run(small, [row])[0], 1e-6 if even else SAME)


def _run(model: HybridDecoder, rows: list[Tensor]) -> list[Tensor]:
    layout = text_layout(rows, model.config, IMAGE)
    out = model(model.inputs(layout), layout)
    return list(out.split([len(row) for row in rows]))


@pytest.mark.parametrize(
    ("lengths", "bucket"),
    [((5,), (16, 0, 1, 16)), ((3, 9), (40, 0, 4, 10)), ((70,), (80, 0, 1, 80))],
)
def test_padding_reaches_nothing(
    small: HybridDecoder, lengths: tuple[int, ...], bucket: tuple[int, int, int, int]
) -> None:
    """A bucket gives what the exact layout gives; padding tokens may hold anything."""
    exact = text_layout(ids(*lengths), SMALL, IMAGE)
    static = static_layout(exact, *bucket)
    states: list[MixerState] = []
    want = small(small.inputs(exact), exact, states=states)
    x = small.inputs(static)
    x[exact.tokens :] = float("nan")
    kept: list[MixerState] = []
    got = small(x, static, states=kept)
    close(got[: exact.tokens], want, SAME)
    rows = len(lengths)
    for i, kind in enumerate(SMALL.layer_types):
        if kind == "linear_attention":
            for mine, theirs in zip(kept[i], states[i], strict=True):
                close(mine[:rows], theirs, SAME)
                assert mine.isfinite().all()


def test_states_of_unequal_rows_are_those_behind_their_last_tokens(small: HybridDecoder) -> None:
    rows = ids(2, 67, 9)
    layout = text_layout(rows, SMALL, IMAGE)
    states: list[MixerState] = []
    small(small.inputs(layout), layout, states=states)
    for number, row in enumerate(rows):
        alone, solo = text_layout([row], SMALL, IMAGE), list[MixerState]()
        small(small.inputs(alone), alone, states=solo)
        for i, kind in enumerate(SMALL.layer_types):
            for mine, theirs in zip(states[i], solo[i], strict=True):
                part = mine[number] if kind == "linear_attention" else mine[number, : len(row)]
                close(part, theirs[0], SAME)
    columns = states[0][0]
    assert columns.shape == (3, SMALL.linear_conv_kernel_dim, columns.shape[2])
    assert not columns[0, 0].any(), "in front of the first token there is nothing"


@pytest.mark.parametrize(("prefix", "rest"), [(1, 4), (65, 30), (40, 1)])
def test_prefix_and_continuation_equal_the_whole(
    small: HybridDecoder, prefix: int, rest: int
) -> None:
    rows = ids(prefix + rest, prefix + rest)
    whole = text_layout(rows, SMALL, IMAGE)
    want = small(small.inputs(whole), whole).unflatten(0, (2, -1))
    head = text_layout([row[:prefix] for row in rows], SMALL, IMAGE)
    tail = text_layout([row[prefix:] for row in rows], SMALL, IMAGE, start=prefix)
    states: list[MixerState] = []
    first = small(small.inputs(head), head, states=states)
    more: list[MixerState] = []
    second = small(small.inputs(tail), tail, before=states, states=more)
    got = torch.cat([part.unflatten(0, (2, -1)) for part in (first, second)], dim=1)
    close(got, want, 1e-5)
    last: list[MixerState] = []
    small(small.inputs(whole), whole, states=last)
    for mine, theirs in zip(more, last, strict=True):
        close(mine[0], theirs[0], 1e-5)
        close(mine[1], theirs[1], 1e-5)


def test_later_tokens_change_nothing(small: HybridDecoder) -> None:
    (row,) = ids(90)
    close(_run(small, [row[:80]])[0], _run(small, [row])[0][:80], SAME)


# ---------------------------------------------------------------- captured regions


@pytest.mark.parametrize("rows", [1, 3])
def test_a_recorded_region_serves_other_batches(small: HybridDecoder, rows: int) -> None:
    """Captured with a full bucket, replayed with shorter rows."""
    longest = 70
    bucket = (rows * longest, 4, rows, longest)
    first = static_layout(text_layout(ids(*[longest] * rows, images=4), SMALL, IMAGE), *bucket)
    buffers = {name: tensor.clone() for name, tensor in first.tensors().items()}
    held = first.on(buffers)
    random = torch.Generator().manual_seed(0)
    images = torch.randn(4, SMALL.hidden_size, generator=random)
    out = torch.zeros(bucket[0], SMALL.hidden_size)
    graphs = GraphService("cuda", "cpu", capturer=RecordingCapturer())
    with torch.no_grad():
        region = graphs.capture("t", lambda: out.copy_(small(small.inputs(held, images), held)))
        region()
        for images_in, lengths in ((4, [longest] * rows), (2, [5] * rows), (0, [1] * rows)):
            exact = text_layout(ids(*lengths, images=images_in), SMALL, IMAGE)
            for name, tensor in static_layout(exact, *bucket).tensors().items():
                buffers[name].copy_(tensor)
            region()
            want = small(small.inputs(exact, images[: exact.image_tokens]), exact)
            close(out[: exact.tokens], want, SAME)


# ---------------------------------------------------------------- construction


def test_work_is_counted(small: HybridDecoder) -> None:
    before = small.profile.counters["text_places"]
    _run(small, ids(3, 7))
    assert small.profile.counters["text_places"] - before == 2 * 7


def test_precision_of_what_stays_wide() -> None:
    model = decoder(dtype=torch.bfloat16)
    mixer = model.layers[0].mixer
    wide = {"decay", "decay_bias", "norm"}
    assert {n for n, p in mixer.named_parameters() if p.dtype == torch.float32} == wide
    layout = text_layout(ids(4), SMALL, IMAGE)
    states: list[MixerState] = []
    out = model(model.inputs(layout), layout, states=states)
    assert out.dtype == torch.bfloat16
    assert states[0][1].dtype == torch.float32


def test_unknown_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="layer_types must be"):
        decoder(replace(SMALL, layer_types=("mamba",)))


def test_golden_sizes_are_not_the_small_ones() -> None:
    """Both decoders take other code paths: grouped heads, kernel width, rotated share."""
    assert golden_sizes().linear_conv_kernel_dim != SMALL.linear_conv_kernel_dim
