"""Leaving out what does not count changes nothing, and nothing that does not count is computed.

Equality is against ``full_reference``, which computes everything. Work is counted twice: by the
engine's own counters and by forward hooks that see the tensors each module really gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from phyai import Engine
from phyai.layers import Linear, TableLinear, VisionTower
from phyai.models.pi.adapter import PiAdapter, PiRequest
from phyai.models.pi.network.gemma import AdaptiveNorm, DecoderLayer
from tests.pi.full_reference import Batch, FullReference
from tests.pi.tiny_requests import (
    GOLDEN,
    LAYERS,
    MODELS,
    PATCHES,
    cpu_config,
    engine_of,
    random_request,
)

ATOL = 5e-5
KV_ATOL = 2e-5

# camera masks and prompt lengths per row, padded prompt width
CASES: dict[str, tuple[list[list[bool]], list[int], int]] = {
    "everything valid": ([[True, True, True]], [9], 9),
    "first camera masked": ([[False, True, True]], [9], 9),
    "middle camera masked": ([[True, False, True]], [7], 7),
    "last camera masked": ([[True, True, False]], [7], 7),
    "only the last camera": ([[False, False, True]], [5], 5),
    "padded prompt": ([[True, True]], [4], 24),
    "one token": ([[True]], [1], 24),
    "equal rows": ([[True, True], [True, True]], [8, 8], 12),
    "equal lengths, other cameras": ([[False, True], [True, False]], [8, 8], 24),
    "ragged prompts": ([[True], [True], [True]], [3, 11, 24], 24),
    "ragged everything": (
        [[True, False, True], [False, True, False], [True, True, True], [False, False, True]],
        [6, 24, 1, 13],
        24,
    ),
}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    with ExitStack() as stack:
        yield {model: stack.enter_context(engine_of(model)) for model in MODELS}


@pytest.fixture(scope="module")
def references() -> dict[str, FullReference]:
    return {model: FullReference(GOLDEN / model) for model in MODELS}


def full_batch(request: PiRequest) -> Batch:
    places = torch.arange(request.input_ids.shape[1])
    assert request.image_masks is not None
    assert request.noise is not None
    return Batch(
        images=request.pixel_values,
        image_mask=request.image_masks,
        tokens=request.input_ids,
        token_mask=places[None] < request.lang_lens[:, None],
        noise=request.noise,
        state=getattr(request, "state", None),
    )


def row_of(request: PiRequest, row: int) -> PiRequest:
    values: dict[str, Any] = {
        f.name: value[row : row + 1]
        for f in fields(request)
        if isinstance(value := getattr(request, f.name), Tensor)
    }
    return replace(request, **values)


# ---------------------------------------------------------------- the reference itself


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", ["case_b3_c3_s4", "case_b1_c3mask_s10"])
def test_the_full_reference_reproduces_the_official_results(
    model: str, case: str, references: dict[str, FullReference]
) -> None:
    with safe_open(GOLDEN / model / f"{case}.safetensors", framework="pt") as file:
        steps = int(file.metadata()["num_steps"])
        golden = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    batch = Batch(
        golden["in.images"],
        golden["in.image_masks"],
        golden["in.tokens"],
        golden["in.token_mask"],
        golden["in.noise"],
        golden.get("in.state"),
    )
    prefix = references[model].prefix(batch)
    assert torch.equal(prefix.valid, golden["prefix.pad_mask"])
    torch.testing.assert_close(prefix.embs, golden["prefix.embs"], atol=KV_ATOL, rtol=0)
    got = references[model].actions(batch, steps)
    torch.testing.assert_close(got, golden["actions"], atol=ATOL, rtol=0)


# ---------------------------------------------------------------- equality


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_actions_equal_the_full_computation(
    model: str, case: str, engines: dict[str, Engine], references: dict[str, FullReference]
) -> None:
    masks, lens, width = CASES[case]
    request = random_request(model, masks, lens, pad_to=width, num_steps=4, seed=7)
    want = references[model].actions(full_batch(request), 4)
    torch.testing.assert_close(engines[model].step(request), want, atol=ATOL, rtol=0)


@pytest.mark.parametrize("model", MODELS)
def test_prefix_tensors_equal_the_full_computation(
    model: str, engines: dict[str, Engine], references: dict[str, FullReference]
) -> None:
    masks, lens, width = CASES["ragged everything"]
    request = random_request(model, masks, lens, pad_to=width, num_steps=1, seed=8)
    full = references[model].prefix(full_batch(request))
    with engines[model].core.services.profile.recorder.recording() as records:
        engines[model].step(request)
    torch.testing.assert_close(records["prefix.embs"][0], full.embs[full.valid], atol=5e-6, rtol=0)
    for layer in range(LAYERS):
        for name, want in (("k", full.keys[layer]), ("v", full.values[layer])):
            got = records[f"prefix.{name}.{layer}"][0]
            torch.testing.assert_close(got, want[full.valid], atol=KV_ATOL, rtol=0)


@pytest.mark.parametrize("model", MODELS)
def test_ten_steps_equal_the_full_computation(
    model: str, engines: dict[str, Engine], references: dict[str, FullReference]
) -> None:
    """Ten steps use times that are not exact in binary."""
    masks, lens, width = CASES["ragged everything"]
    request = random_request(model, masks, lens, pad_to=width, num_steps=10, seed=9)
    want = references[model].actions(full_batch(request), 10)
    torch.testing.assert_close(engines[model].step(request), want, atol=ATOL, rtol=0)


@pytest.mark.parametrize("model", MODELS)
def test_masked_pixels_and_padded_tokens_are_never_read(
    model: str, engines: dict[str, Engine]
) -> None:
    masks, lens, width = CASES["ragged everything"]
    request = random_request(model, masks, lens, pad_to=width, seed=10)
    assert request.image_masks is not None
    pixels, tokens = request.pixel_values.clone(), request.input_ids.clone()
    pixels[~request.image_masks] = 1e6
    for row, length in enumerate(lens):
        tokens[row, length:] = 0
    other = replace(request, pixel_values=pixels, input_ids=tokens)
    assert torch.equal(engines[model].step(request), engines[model].step(other))


@pytest.mark.parametrize("model", MODELS)
def test_rows_of_a_ragged_batch_equal_the_row_alone(model: str, engines: dict[str, Engine]) -> None:
    masks, lens, width = CASES["ragged everything"]
    request = random_request(model, masks, lens, pad_to=width, seed=11)
    together = engines[model].step(request)
    for row in range(len(lens)):
        alone = engines[model].step(row_of(request, row))
        torch.testing.assert_close(together[row : row + 1], alone, atol=2e-5, rtol=0)


# ---------------------------------------------------------------- work done


class Work:
    """What the modules of one adapter were fed while it was listening."""

    def __init__(self, adapter: PiAdapter) -> None:
        self.images: list[int] = []
        self.rows: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._handles = []
        for name, module in adapter.modules.named_modules():
            if isinstance(module, VisionTower):
                self._handles.append(module.register_forward_pre_hook(self._see_images))
            elif isinstance(module, Linear | TableLinear):
                self._handles.append(module.register_forward_pre_hook(self._counter(name)))

    def _see_images(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.images.append(args[0].shape[0])

    def _counter(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.calls[name] += 1
            self.rows[name] += args[0].numel() // args[0].shape[-1]

        return hook

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def run(engine: Engine, request: PiRequest) -> tuple[Work, Counter[str]]:
    """Return what the modules saw and how the counters grew during one request."""
    adapter = engine.adapter
    assert isinstance(adapter, PiAdapter)
    before = Counter(engine.core.services.profile.counters)
    work = Work(adapter)
    try:
        engine.step(request)
    finally:
        work.close()
    grown = Counter(engine.core.services.profile.counters)
    grown.subtract(before)
    return work, +grown


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_no_image_and_no_token_too_many(model: str, case: str, engines: dict[str, Engine]) -> None:
    masks, lens, width = CASES[case]
    cameras = sum(map(sum, masks))
    tokens = cameras * PATCHES + sum(lens)
    work, counters = run(engines[model], random_request(model, masks, lens, pad_to=width))
    assert work.images == [cameras], "one call of the tower for the cameras of all rows"
    assert (counters["vision_calls"], counters["vision_images"]) == (1, cameras)
    assert counters["prompt_tokens"] == sum(lens)
    assert counters["prefix_tokens"] == tokens
    for layer in range(LAYERS):
        full = tokens if layer < LAYERS - 1 else 0
        assert counters[f"prefix_rows.layer{layer}.kv"] == tokens
        assert counters[f"prefix_rows.layer{layer}.full"] == full
        for part in ("out", "gate_up", "down"):
            assert work.rows[f"prefix.layers.{layer}.{part}"] == full
    assert work.calls["prefix.projector"] == 1
    assert work.rows["prefix.projector"] == cameras * PATCHES


@pytest.mark.parametrize("model", MODELS)
def test_last_prefix_layer_projects_keys_and_values_only(
    model: str, engines: dict[str, Engine]
) -> None:
    adapter = engines[model].adapter
    assert isinstance(adapter, PiAdapter)
    last = adapter.prefix.layers[-1]
    assert isinstance(last, DecoderLayer)
    widths: list[tuple[int, int]] = []

    def spy(module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        widths.append((out.shape[-2], out.shape[-1]))

    with ExitStack() as stack:
        for part in last.children():
            if isinstance(part, Linear):
                stack.enter_context(part.register_forward_hook(spy))
        engines[model].step(random_request(model, [[True, False]], [5], pad_to=9))
    assert widths == [(PATCHES + 5, 2 * last.kv_size)]


@pytest.mark.parametrize("model", MODELS)
def test_expert_rows_are_the_actions_of_each_step(model: str, engines: dict[str, Engine]) -> None:
    """pi0's state token is one more row, once per request and not per step."""
    masks, lens, width = CASES["ragged everything"]
    rows, steps, chunk = len(lens), 4, 10
    request = random_request(model, masks, lens, pad_to=width, num_steps=steps)
    work, counters = run(engines[model], request)
    state = rows if model == "pi0" else 0
    assert counters["state_tokens"] == state
    assert work.rows["expert.action_in"] == rows * steps * chunk
    assert work.rows["expert.action_out"] == rows * steps * chunk
    for layer in range(LAYERS):
        name = f"expert.expert.layers.{layer}"
        only_kv = layer == LAYERS - 1
        full = rows * steps * chunk + (0 if only_kv else state)
        assert {work.rows[f"{name}.{part}"] for part in ("qkv", "out", "gate_up", "down")} == {full}
    if model == "pi0":
        assert (work.calls["expert.state_in"], work.rows["expert.state_in"]) == (1, rows)


@pytest.mark.parametrize("model", MODELS)
def test_time_tables_are_built_once_per_grid(model: str) -> None:
    """Neither a request nor another batch size, camera count or prompt bucket builds them again."""
    with engine_of(model) as engine:
        one = random_request(model, [[True]], [5], num_steps=3)
        work, counters = run(engine, one)
        assert (counters["time_table_builds"], counters["time_table_rows"]) == (1, 3 + 1)
        if model == "pi05":
            assert work.rows["expert.time_in"] == work.rows["expert.time_out"] == 3 + 1
            adapter = engine.adapter
            assert isinstance(adapter, PiAdapter)
            norms = [
                name for name, m in adapter.modules.named_modules() if isinstance(m, AdaptiveNorm)
            ]
            assert len(norms) == adapter.network.expert.num_norms == 2 * LAYERS + 1
            assert {work.rows[f"{name}.dense"] for name in norms} == {3 + 1}
        again = [
            one,
            random_request(model, [[True, True]], [5], num_steps=3),
            random_request(model, [[True], [True]], [5, 20], num_steps=3),
        ]
        for request in again:
            work, counters = run(engine, request)
            assert counters["time_table_builds"] == 0
            assert not any("time_" in name or ".dense" in name for name in work.rows)
        _, counters = run(engine, replace(one, num_steps=2))
        assert (counters["time_table_builds"], counters["time_table_rows"]) == (1, 2 + 1)


@pytest.mark.parametrize("model", MODELS)
def test_refresh_rewrites_tables_in_place(model: str) -> None:
    with engine_of(model) as engine:
        request = random_request(model, [[True]], [5], num_steps=2)
        first = engine.step(request)
        adapter = engine.adapter
        assert isinstance(adapter, PiAdapter)
        (tables,) = adapter.network.tables.values()
        addresses = {name: table.data_ptr() for name, table in tables.items()}
        name = "action_time_mlp_in.bias" if model == "pi0" else "time_mlp_out.bias"
        with safe_open(GOLDEN / model / "model.safetensors", framework="pt") as file:
            old = file.get_tensor(f"model.{name}")
        adapter.update_weights([(name, old + 0.5)])
        engine.core.runner.refresh()
        assert {n: t.data_ptr() for n, t in tables.items()} == addresses
        changed = engine.step(request)
        assert not torch.allclose(first, changed, atol=1e-3)
        adapter.update_weights([(name, old)])
        engine.core.runner.refresh()
        assert torch.equal(engine.step(request), first)


@pytest.mark.parametrize("model", MODELS)
def test_projections_with_one_input_are_one_matrix(model: str, engines: dict[str, Engine]) -> None:
    adapter = engines[model].adapter
    assert isinstance(adapter, PiAdapter)
    shapes = {name: tuple(p.shape) for name, p in adapter.modules.named_parameters()}
    pi = adapter.pi
    for stack, root in ((pi.text, "prefix.layers"), (pi.expert, "expert.expert.layers")):
        heads = (stack.num_attention_heads + 2 * stack.num_key_value_heads) * stack.head_dim
        for layer in range(LAYERS):
            # where only K/V may be wanted, q stands alone
            parts = [shapes[f"{root}.{layer}.qkv.weight"]]
            if f"{root}.{layer}.kv.weight" in shapes:
                assert layer == LAYERS - 1
                parts.append(shapes[f"{root}.{layer}.kv.weight"])
            assert sum(rows for rows, _ in parts) == heads
            assert {columns for _, columns in parts} == {stack.hidden_size}
            assert shapes[f"{root}.{layer}.gate_up.weight"] == (
                2 * stack.intermediate_size,
                stack.hidden_size,
            )
    width = pi.vision.hidden_size
    for layer in range(pi.vision.num_hidden_layers):
        assert shapes[f"prefix.vision.layers.{layer}.qkv.weight"] == (3 * width, width)
        assert shapes[f"prefix.vision.layers.{layer}.qkv.bias"] == (3 * width,)
    leaves = {leaf for name in shapes for leaf in name.split(".")}
    assert not leaves & {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"}


def test_counters_notice_waste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding everything to its bucket shows up as waste in each of them."""
    with engine_of("pi05", cpu_config(static_shapes=True)) as engine:
        work, counters = run(engine, random_request("pi05", [[True, False], [True, True]], [3, 9]))
    assert work.images == [4]
    assert counters["vision_images"] == 4
    assert counters["prompt_tokens"] == 18
    assert counters["prefix_tokens"] == 2 * (2 * PATCHES + 9)
