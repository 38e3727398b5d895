"""Bad requests get a clear error and the next request works; real-time chunking by both doors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from phyai import Engine
from phyai.errors import ConfigError, RequestError
from phyai.models.gr00t.main_gr00t import GrootArgs, GrootRequest
from phyai.models.gr00t.network.time_embedding import timestep_buckets
from phyai.models.gr00t.rtc_inputs import velocity_ramp
from phyai.types import Observation, RTCOptions
from tests.groot.groot_engines import cpu_config, engine_of, random_rows, request_of


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_of(max_text_tokens=40) as made:
        yield made


def good(**changes: Any) -> GrootRequest:
    return request_of(random_rows([[(1, 4, 4)], [(1, 2, 2)]], [5, 9]), **changes)


def edited(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[GrootRequest], Any]:
    return lambda request: replace(request, **{name: change(getattr(request, name).clone())})


def set_to(value: float, *place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = value
        return tensor

    return change


BAD: dict[str, tuple[Callable[[GrootRequest], Any], str]] = {
    "one dim of ids": (edited("input_ids", lambda t: t[0]), "input_ids expected shape"),
    "float ids": (edited("input_ids", lambda t: t.float()), "input_ids must be int64"),
    "id outside": (edited("input_ids", set_to(288, 0, -1)), r"input_ids must be in \[0, 288\)"),
    "negative id": (edited("input_ids", set_to(-1, 0, -1)), r"input_ids must be in \[0, 288\)"),
    "image token missing": (edited("input_ids", set_to(5, 1, -9)), "tokens for 1"),
    "image token too many": (
        lambda r: replace(edited("input_ids", set_to(261, 0, -1))(r), images_per_row=[1, 1]),
        "must hold one image token",
    ),
    "mask of twos": (edited("attention_mask", lambda t: t * 2), "must hold 0 and 1"),
    "empty row": (edited("attention_mask", set_to(0, 1)), "at least one token"),
    "state width": (edited("state", lambda t: t[..., :-1]), "state expected shape"),
    "state NaN": (edited("state", set_to(float("nan"), 0, 0, 0)), "state must be finite"),
    "unknown embodiment": (
        edited("embodiment_id", set_to(6, 1)),
        r"row 1: embodiment_id must be in \[0, 6\); got 6",
    ),
    "odd grid": (
        edited("image_grid_thw", lambda t: torch.tensor([[1, 5, 4], [1, 2, 2]])),
        "multiples of 2|patches",
    ),
    "video grid": (
        edited("image_grid_thw", lambda t: torch.tensor([[2, 4, 2], [1, 2, 2]])),
        "one frame",
    ),
    "zero grid": (edited("image_grid_thw", set_to(0, 0, 1)), "must be positive"),
    "patches missing": (edited("pixel_values", lambda t: t[:-1]), "pixel_values must hold the 20"),
    "patch width": (edited("pixel_values", lambda t: t[:, :-1]), "pixel_values expected shape"),
    "noise shape": (edited("noise", lambda t: t[:, :-1]), "noise expected shape"),
    "noise infinite": (edited("noise", set_to(float("inf"), 0, 0, 0)), "noise must be finite"),
    "no steps": (lambda r: replace(r, num_steps=0), r"num_steps must be in \[1, 200\]"),
    "float steps": (lambda r: replace(r, num_steps=2.0), "num_steps must be an integer"),
    "images per row": (lambda r: replace(r, images_per_row=[2, 1]), "images_per_row must hold"),
    "image in no row": (
        lambda r: replace(
            r,
            image_grid_thw=torch.cat([r.image_grid_thw, r.image_grid_thw]),
            pixel_values=torch.cat([r.pixel_values, r.pixel_values]),
        ),
        "tokens for 2",
    ),
    "too much text": (
        lambda r: request_of(random_rows([[(1, 4, 4)]], [41])),
        "1 to 40 text tokens; got 41",
    ),
    "no image": (
        lambda r: request_of(
            random_rows([[(1, 4, 4)], [(1, 2, 2)]], [5, 9]),
            images_per_row=[2, 0],
        ),
        "row 1: a row must have 1 to 64 images|one image token",
    ),
    "too many rows": (lambda r: request_of(random_rows([[(1, 2, 2)]] * 5, [4] * 5)), "at most 4"),
    "both forms of rtc": (
        lambda r: replace(
            r, rtc=RTCOptions(torch.zeros(2, 10)), prev_actions=torch.zeros(2, 8, 10)
        ),
        "in one form",
    ),
    "guided rtc": (
        lambda r: replace(r, rtc=RTCOptions(torch.zeros(2, 10), mode="guided")),
        "rtc mode must be left out",
    ),
    "complex left-over": (
        lambda r: replace(r, rtc=RTCOptions(torch.zeros(2, 10, dtype=torch.complex64))),
        "must be real numbers; got complex64",
    ),
    "rtc options as text": (
        lambda r: replace(r, prev_actions=torch.zeros(2, 8, 10), rtc_options="abc"),
        "rtc_options must be a mapping",
    ),
    "rtc options by number": (
        lambda r: replace(r, prev_actions=torch.zeros(2, 8, 10), rtc_options={1: 2, "a": 3}),
        "got unknown 1, a",
    ),
    "images per row as a number": (
        lambda r: replace(r, images_per_row=2),
        r"images_per_row expected shape \[2\]",
    ),
    "wide left-over": (lambda r: replace(r, rtc=RTCOptions(torch.zeros(2, 11))), "at most 10"),
    "rtc options missing": (
        lambda r: replace(r, prev_actions=torch.zeros(2, 8, 10)),
        "got no action_horizon",
    ),
    "rtc overlap too long": (
        lambda r: replace(
            r,
            prev_actions=torch.zeros(2, 8, 10),
            rtc_options={"action_horizon": 4, "rtc_overlap_steps": 5, "rtc_frozen_steps": 0},
        ),
        r"rtc_overlap_steps must be an integer in \[1, 4\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_and_the_next_one_works(case: str, engine: Engine) -> None:
    spoil, message = BAD[case]
    with pytest.raises(RequestError, match=message):
        engine.step(spoil(good()))
    assert engine.step(good()).shape == (2, 8, 10)


def test_an_unknown_option_and_a_foreign_request_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"'temperature'.*embodiment"):
        engine.step(Observation(options={"temperature": 1}))
    with pytest.raises(TypeError, match="Observation, a list of them or GrootRequest"):
        engine.step(42)


def test_an_observation_needs_the_processor_files(engine: Engine) -> None:
    with pytest.raises(RequestError, match="processor_config"):
        engine.step(Observation(images={}, state=[0.0], prompt="go"))
    assert engine.step(good()).shape == (2, 8, 10)


def test_seeds_give_the_same_noise_alone_and_again(engine: Engine) -> None:
    request = good(noise=None, seed=3)
    assert torch.equal(engine.step(request), engine.step(request))
    assert not torch.equal(engine.step(request), engine.step(replace(request, seed=4)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_batch_size", 0),
        ("max_text_tokens", 10**6),
        ("rtc_ramp_rate", 0.0),
        ("official_padding", 1),
        ("control_hz", -1),
    ],
)
def test_bad_arguments_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        GrootArgs(**{name: value})


def test_an_unknown_precision_is_refused_with_a_guess() -> None:
    with (
        pytest.raises(ConfigError, match=r"precision must be one of.*got 'bf61'"),
        engine_of(precision="bf61"),
    ):
        pass


# ---------------------------------------------------------------- real-time chunking


def test_frozen_steps_keep_the_left_over_and_later_ones_move(engine: Engine) -> None:
    rest = torch.linspace(-1, 1, 50).view(5, 10)
    got = engine.step(good(rtc=RTCOptions(rest, inference_delay=2, execution_horizon=4)))
    for row in got:
        assert torch.equal(row[:2], rest[:2])
        assert not torch.isclose(row[2:4], rest[2:4], atol=1e-4).all()


def test_a_left_over_and_the_official_tail_are_the_same(engine: Engine) -> None:
    """The left-over of a chunk of 8 after 3 steps is its tail of 5."""
    prev = torch.randn(2, 8, 10, generator=torch.Generator().manual_seed(1))
    options = {"action_horizon": 8, "rtc_overlap_steps": 5, "rtc_frozen_steps": 2}
    official = engine.step(good(prev_actions=prev, rtc_options=options))
    mine = [RTCOptions(row[3:], inference_delay=2) for row in prev]
    assert torch.equal(engine.step(good(rtc=mine)), official)


def test_mode_ramp_is_the_default(engine: Engine) -> None:
    rest = torch.linspace(-1, 1, 50).view(5, 10)
    named = engine.step(good(rtc=RTCOptions(rest, inference_delay=2, mode="ramp")))
    assert torch.equal(named, engine.step(good(rtc=RTCOptions(rest, inference_delay=2))))


def test_images_per_row_may_be_a_tensor(engine: Engine) -> None:
    counted = engine.step(good(images_per_row=torch.tensor([1, 1])))
    assert torch.equal(counted, engine.step(good()))


@pytest.mark.parametrize("static", [False, True])
def test_rows_without_rtc_are_not_touched_by_rows_with_it(static: bool) -> None:
    with engine_of(cpu_config(static_shapes=static)) as engine:
        rest = RTCOptions(torch.ones(4, 10), inference_delay=1)
        plain, mixed = engine.step(good()), engine.step(good(rtc=[None, rest]))
    assert torch.equal(plain[0], mixed[0])
    assert not torch.equal(plain[1], mixed[1])


def test_the_ramp_rises_from_the_frozen_steps_to_one() -> None:
    ramp = velocity_ramp(8, 5, 2, 6.0)
    assert ramp[:2].tolist() == [0.0, 0.0]
    assert ramp[5:].tolist() == [1.0] * 3
    assert (ramp[2:5].diff() > 0).all()
    assert 0 < float(ramp[2]) < float(ramp[4]) < 1
    assert float(ramp[2]) == pytest.approx((1 - 2.718281828 ** (-1.5)) / (1 - 2.718281828**-6))


def test_time_buckets_are_the_official_truncations() -> None:
    for steps in (1, 3, 4, 7, 10, 50):
        sigmas = [1.0 - k / steps for k in range(steps)]
        assert timestep_buckets(sigmas, 1000) == [int(k / steps * 1000) for k in range(steps)]
    assert timestep_buckets([1.0, 0.9, 0.2], 1000) == [0, 100, 800]
