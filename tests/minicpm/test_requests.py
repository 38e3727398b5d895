"""Model requests: batches of unequal rows, padding on either side, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from phyai import Engine
from phyai.errors import ConfigError, RequestError
from phyai.models.minicpm_robot.main_minicpm_robot import (
    MiniCPMGR00TArgs,
    MiniCPMGR00TRequest,
    MiniCPMRobotArgs,
    MiniCPMRobotRequest,
)
from tests.minicpm.minicpm_engines import (
    ACTION_DIM,
    HORIZON,
    IMAGE_TOKEN,
    STATE_DIM,
    WIDTH,
    cpu_config,
    engine_of,
    random_rows,
    request_of,
)

ATOL = 2e-4
"""As published for actions end to end: random decoders amplify the order of sums."""
# image grids and text tokens per row
CASES: dict[str, tuple[list[list[tuple[int, int]]], list[int]]] = {
    "one image": ([[(4, 8)]], [5]),
    "odd sizes": ([[(4, 12), (8, 4)]], [9]),
    "equal rows": ([[(4, 4)], [(4, 4)]], [7, 7]),
    "ragged prompts": ([[(4, 4)], [(4, 4)], [(4, 4)]], [3, 40, 11]),
    "ragged everything": (
        [[(4, 4), (8, 8)], [(12, 4)], [(4, 4), (4, 8), (8, 4)]],
        [4, 70, 13],
    ),
    "a row without an image": ([[(4, 4)], []], [4, 6]),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_of() as made:
        yield made


@pytest.fixture(scope="module")
def static_engine() -> Iterator[Engine]:
    with engine_of(cpu_config(static_shapes=True)) as made:
        yield made


# ---------------------------------------------------------------- equality


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("static", [False, True], ids=["exact", "static"])
def test_rows_of_a_batch_equal_the_row_alone(
    case: str, static: bool, engine: Engine, static_engine: Engine
) -> None:
    one = static_engine if static else engine
    rows = random_rows(*CASES[case], seed=5)
    together = one.step(request_of(rows))
    assert together.shape == (len(rows), HORIZON, ACTION_DIM)
    for i, row in enumerate(rows):
        torch.testing.assert_close(
            together[i : i + 1], engine.step(request_of([row])), atol=ATOL, rtol=0
        )


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_padding_is_never_read(left: bool, engine: Engine) -> None:
    """Neither side's, nor what stands there: image tokens, or ids no vocabulary has."""
    rows = random_rows(*CASES["ragged everything"])
    want = engine.step(request_of(rows))
    for filler in (3, IMAGE_TOKEN, -5, 10**6):
        other = request_of(rows, pad_to=120, left=left)
        assert other.input_ids is not None
        ids = other.input_ids.clone()
        ids[other.attention_mask == 0] = filler
        assert torch.equal(engine.step(replace(other, input_ids=ids)), want)


def test_a_row_does_not_hang_on_its_neighbours_in_one_bucket(static_engine: Engine) -> None:
    """Bit for bit, whatever the other row holds: embodiment, prompt, pixels."""
    mine, other, third = random_rows([[(4, 4)]] * 3, [5, 9, 14], embodiments=[2, 0, 1])
    first = static_engine.step(request_of([mine, other]))
    second = static_engine.step(request_of([mine, third]))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_images_state_text_and_embodiment_all_count(engine: Engine) -> None:
    (row,) = random_rows([[(4, 4), (4, 4)]], [6])
    want = engine.step(request_of([row]))
    swapped = torch.cat([row.patches[16:], row.patches[:16]])
    ids = row.ids.clone()
    ids[-1] = (ids[-1] + 1) % 300
    for other in (
        replace(row, patches=swapped),
        replace(row, ids=ids),
        replace(row, state=row.state + 1),
        replace(row, embodiment=row.embodiment + 1),
        replace(row, noise=row.noise + 1),
    ):
        assert not torch.allclose(engine.step(request_of([other])), want, atol=1e-4)


def test_given_features_are_those_the_backbone_would_give(engine: Engine) -> None:
    rows = random_rows(*CASES["ragged everything"])
    request = request_of(rows)
    recorder = engine.core.services.profile.recorder
    with recorder.recording(["text.last_hidden_state"]) as records:
        want = engine.step(request)
    (packed,) = records["text.last_hidden_state"]
    lengths = [len(row.ids) for row in rows]
    longest = max(lengths)
    for left in (False, True):
        features = torch.full((len(rows), longest, WIDTH), 1e4)
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for i, part in enumerate(packed.split(lengths)):
            place = slice(longest - len(part), None) if left else slice(0, len(part))
            features[i, place], mask[i, place] = part, True
        got = engine.step(
            MiniCPMRobotRequest(
                vl_embs=features,
                attention_mask=mask,
                state=request.state,
                noise=request.noise,
                embodiment_id=request.embodiment_id,
                num_steps=request.num_steps,
            )
        )
        torch.testing.assert_close(got, want, atol=ATOL, rtol=0)


def test_one_key_serves_every_embodiment_and_state(engine: Engine) -> None:
    prepare = engine.adapter.prepare
    keys = {
        prepare(request_of(random_rows([[(4, 4)]], [5], seed=e, embodiments=[e]))).key
        for e in range(3)
    }
    assert len(keys) == 1


def test_defaults_and_forms_of_a_request(engine: Engine) -> None:
    (row,) = random_rows([[(4, 4)]], [5], embodiments=[2])
    request = request_of([row])
    want = engine.step(request)
    assert request.state is not None
    for other in (
        replace(request, embodiment_id=2),
        replace(request, attention_mask=None),
        replace(request, state=request.state[:, None]),
        replace(request, images_per_row=[1]),
        replace(request, target_sizes=torch.tensor([[4, 4]], dtype=torch.int32)),
    ):
        assert torch.equal(engine.step(other), want)
    zeros = engine.step(replace(request, state=torch.zeros(1, STATE_DIM)))
    assert torch.equal(engine.step(replace(request, state=None)), zeros)
    first = engine.step(replace(request, embodiment_id=0))
    assert torch.equal(engine.step(replace(request, embodiment_id=None)), first)
    four = engine.step(replace(request, num_steps=4))
    assert torch.equal(engine.step(replace(request, num_steps=None)), four)
    seeded = [engine.step(replace(request, noise=None, seed=s)) for s in (3, 3, 4)]
    assert torch.equal(seeded[0], seeded[1])
    assert not torch.equal(seeded[0], seeded[2])


def test_arguments_choose_defaults() -> None:
    (row,) = random_rows([[(4, 4)]], [5])
    request = replace(request_of([row]), num_steps=None, embodiment_id=None)
    with engine_of() as plain, engine_of(embodiment_id=1, num_steps=2) as chosen:
        want = plain.step(replace(request, num_steps=2, embodiment_id=1))
        assert torch.equal(chosen.step(request), want)


# ---------------------------------------------------------------- work done


@pytest.mark.parametrize("case", CASES)
def test_no_patch_and_no_token_too_many(case: str, engine: Engine) -> None:
    rows = random_rows(*CASES[case])
    counters = engine.core.services.profile.counters
    before = dict(counters)
    engine.step(request_of(rows))
    grown = {name: n - before.get(name, 0) for name, n in counters.items()}
    tokens = sum(len(row.ids) for row in rows)
    assert grown["vision_patches"] == sum(len(row.patches) for row in rows)
    assert grown["text_tokens"] == tokens
    assert (grown["cross_kv_calls"], grown["cross_kv_tokens"]) == (1, tokens)
    assert grown["decoded_tokens"] == 3 * len(rows) * HORIZON


# ---------------------------------------------------------------- what is refused


def one(**changes: Any) -> MiniCPMRobotRequest:
    return replace(request_of(random_rows([[(4, 4)]], [5])), **changes)


GOOD = one()
IDS, PIXELS = GOOD.input_ids, GOOD.pixel_values
assert IDS is not None
assert PIXELS is not None
FEATURES = torch.zeros(1, 3, WIDTH)

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"input_ids": None}, "input_ids"),
    "no pixels": ({"pixel_values": None}, "pixel_values"),
    "ids of one dim": ({"input_ids": IDS[0]}, "input_ids"),
    "float ids": ({"input_ids": IDS.float()}, "input_ids"),
    "id too large": ({"input_ids": torch.where(IDS.eq(IDS[0, -1]), 320, IDS)}, r"\[0, 320\)"),
    "negative id": ({"input_ids": torch.where(IDS.eq(IDS[0, -1]), -1, IDS)}, r"\[0, 320\)"),
    "no image token": ({"input_ids": torch.where(IDS == IMAGE_TOKEN, 1, IDS)}, "target_sizes"),
    "token too many": (
        {"input_ids": torch.cat([IDS, IDS[:, 1:2]], 1), "attention_mask": None},
        "one image token",
    ),
    "only image tokens": ({"input_ids": IDS[:, 1:2], "attention_mask": None}, "text tokens"),
    "mask of another shape": ({"attention_mask": torch.ones(1, 2)}, "attention_mask"),
    "mask of other values": ({"attention_mask": torch.full(IDS.shape, 2)}, "attention_mask"),
    "mask without a token": ({"attention_mask": torch.zeros_like(IDS)}, "at least one token"),
    "strip of another shape": ({"pixel_values": PIXELS[:, :2]}, "pixel_values"),
    "strip cut in a patch": ({"pixel_values": PIXELS[..., :-3]}, "strip of patches"),
    "strip of more": ({"pixel_values": torch.cat([PIXELS, PIXELS], 3)}, "32"),
    "NaN pixels": ({"pixel_values": PIXELS * float("nan")}, "pixel_values must be finite"),
    "grid no multiple": ({"target_sizes": torch.tensor([[2, 8]])}, "multiples of 4"),
    "grid of zero": ({"target_sizes": torch.tensor([[0, 4]])}, "target_sizes must be positive"),
    "huge grid": ({"target_sizes": torch.tensor([[2**40, 4]])}, "target_sizes"),
    "grid of three": ({"target_sizes": torch.tensor([[1, 4, 4]])}, "target_sizes"),
    "images of no row": ({"images_per_row": [2]}, "images_per_row"),
    "state of another width": ({"state": torch.zeros(1, 13)}, "state"),
    "state of two": ({"state": torch.zeros(1, 2, 12)}, "state"),
    "infinite state": ({"state": torch.full((1, 12), float("inf"))}, "state must be finite"),
    "embodiment too large": ({"embodiment_id": torch.tensor([3])}, r"embodiment_id.*\[0, 3\)"),
    "negative embodiment": ({"embodiment_id": -1}, "embodiment_id"),
    "float embodiment": ({"embodiment_id": 1.5}, "embodiment_id"),
    "embodiments of two": ({"embodiment_id": torch.tensor([0, 1])}, "embodiment_id"),
    "noise of another shape": ({"noise": torch.zeros(1, 5, 12)}, "noise"),
    "NaN noise": ({"noise": torch.full((1, 6, 12), float("nan"))}, "noise must be finite"),
    "no steps": ({"num_steps": 0}, "num_steps"),
    "too many steps": ({"num_steps": 201}, "num_steps"),
    "seed of text": ({"noise": None, "seed": "x"}, "seed"),
    "features and ids": ({"vl_embs": FEATURES}, "vl_embs replaces"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_is_refused_and_the_next_one_works(what: str, engine: Engine) -> None:
    changes, said = BAD[what]
    want = engine.step(GOOD)
    with pytest.raises(RequestError, match=said):
        engine.step(replace(GOOD, **changes))
    assert torch.equal(engine.step(GOOD), want)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vl_embs": torch.zeros(1, 3, WIDTH + 1)}, "vl_embs"),
        ({"vl_embs": FEATURES * float("nan")}, "vl_embs must be finite"),
        ({"vl_embs": FEATURES[:, :0]}, "at least one token"),
        ({"vl_embs": FEATURES, "images_per_row": [0]}, "images_per_row"),
        ({}, "input_ids"),
        ({"vl_embs": torch.zeros(5, 3, WIDTH)}, "at most 4 rows"),
    ],
)
def test_a_bad_request_of_the_head_alone(
    changes: dict[str, Any], said: str, engine: Engine
) -> None:
    with pytest.raises(RequestError, match=said):
        engine.step(MiniCPMRobotRequest(**changes))


def test_the_longest_prompt_is_the_arguments() -> None:
    rows = random_rows([[(4, 4)]], [9])
    with engine_of(max_text_tokens=8) as engine, pytest.raises(RequestError, match="1 to 8"):
        engine.step(request_of(rows))


# ---------------------------------------------------------------- arguments


def test_names_of_earlier_versions() -> None:
    assert MiniCPMGR00TArgs is MiniCPMRobotArgs
    assert MiniCPMGR00TRequest is MiniCPMRobotRequest
    args = MiniCPMGR00TArgs(checkpoint="a/b", gdn_backend="fla", norm_backend="phyai-kernel")
    assert (args.checkpoint_dir, args.checkpoint) == ("a/b", None)
    assert replace(args, checkpoint_dir="c").checkpoint_dir == "c"
    assert replace(args, checkpoint="d", checkpoint_dir=None).checkpoint_dir == "d"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkpoint": "a", "checkpoint_dir": "b"}, "another name"),
        ({"gdn_backend": "cuda"}, "gdn_backend.*auto, fla"),
        ({"norm_backend": "fla"}, "norm_backend"),
        ({"action_params_dtype": torch.float16}, "action_params_dtype"),
        ({"action_params_dtype": "int8"}, "action_params_dtype"),
        ({"embodiment_id": -1}, "embodiment_id"),
        ({"embodiment_id": True}, "embodiment_id"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_text_tokens": 10**6}, "max_text_tokens"),
        ({"num_steps": 0}, "num_steps"),
        ({"control_hz": float("nan")}, "control_hz"),
        ({"embedding_in_file": "yes"}, "embedding_in_file"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MiniCPMRobotArgs(**changes)


@pytest.mark.parametrize("changes", [{"precision": "fp16"}, {"contract": "no_such"}])
def test_arguments_no_checkpoint_can_fulfil(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        engine_of(**changes).__enter__()


def test_an_embodiment_the_checkpoint_lacks_fails_at_start() -> None:
    with pytest.raises(ConfigError, match="embodiment_id"):
        engine_of(embodiment_id=7).__enter__()
