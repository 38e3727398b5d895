"""Every bad input: the right error, before any compute, and the next request is untouched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Engine, Observation
from phyai.errors import RequestError
from phyai.models.pi.adapter import PiRequest
from phyai.types import RTCOptions
from tests.pi.tiny_engines import CAMERAS, REQUESTS, model_request, observation, open_engine

MODELS = ("pi05", "pi0")
NAN, INF = float("nan"), float("inf")
Change = Callable[[Engine], Any]


class Bench:
    """An engine, a good request of each form and what they give."""

    def __init__(self, model: str) -> None:
        self.engine = open_engine(model)
        self.good = (
            observation(self.engine, cameras=1, num_steps=1),
            model_request(self.engine, num_steps=1),
        )
        self.want = self.engine.step(self.good[0]).actions, self.engine.step(self.good[1])

    def refuses(self, request: Any, error: type[Exception] = RequestError) -> str:
        """Return the message of the error; check that nothing was computed or harmed.

        The good request of the same form follows the bad one.
        """
        counters = dict(self.engine.core.services.profile.counters)
        assert counters["prefix_tokens"] > 0
        with pytest.raises(error) as caught:
            self.engine.step(request)
        assert dict(self.engine.core.services.profile.counters) == counters
        if isinstance(request, PiRequest):
            assert torch.equal(self.engine.step(self.good[1]), self.want[1])
        else:
            assert np.array_equal(self.engine.step(self.good[0]).actions, self.want[0])
        return str(caught.value)


@pytest.fixture(scope="module", params=MODELS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(request.param)
    yield bench
    bench.engine.close()


def changed(bench: Bench, **changes: Any) -> Observation:
    return replace(bench.good[0], **changes)


def with_option(bench: Bench, name: str, value: Any) -> Observation:
    good = bench.good[0]
    return replace(good, options={**good.options, name: value})


def image(value: Any = 0, shape: tuple[int, ...] = (56, 56, 3), dtype: Any = np.uint8) -> Any:
    return np.full(shape, value, dtype=dtype)


# ---------------------------------------------------------------- observations


OBSERVATIONS: dict[str, tuple[Callable[[Bench], Any], str]] = {
    "wrong camera": (lambda b: changed(b, images={"base_1_rgb": image()}), "base_0_rgb, left_wr"),
    "one wrong camera": (
        lambda b: changed(b, images={"base_0_rgb": image(), "front": image()}),
        "'front'",
    ),
    "no camera": (lambda b: changed(b, images={}), "at least one camera"),
    "images no mapping": (lambda b: changed(b, images=[image()]), "must be a mapping"),
    "camera twice": (
        lambda b: changed(
            b, images={"base_0_rgb": image(), "observation.images.base_0_rgb": image()}
        ),
        "must be sent once",
    ),
    "NaN image": (
        lambda b: changed(b, images={CAMERAS[0]: image(NAN, dtype=np.float32)}),
        "finite",
    ),
    "Inf image": (
        lambda b: changed(b, images={CAMERAS[0]: image(INF, dtype=np.float32)}),
        "finite",
    ),
    "one Inf pixel": (
        lambda b: changed(
            b,
            images={
                CAMERAS[0]: np.where(np.arange(56 * 56 * 3) == 99, INF, 0.5).reshape(56, 56, 3)
            },
        ),
        "finite",
    ),
    "image out of range": (
        lambda b: changed(b, images={CAMERAS[0]: image(255.0, dtype=np.float32)}),
        r"\[0, 1\]",
    ),
    "image dtype": (
        lambda b: changed(b, images={CAMERAS[0]: image(dtype=np.int32)}),
        "got dtype int32",
    ),
    "image dtype bool": (lambda b: changed(b, images={CAMERAS[0]: image(dtype=bool)}), "bool"),
    "image rank": (lambda b: changed(b, images={CAMERAS[0]: image(shape=(56, 56))}), "RGB"),
    "image with alpha": (
        lambda b: changed(b, images={CAMERAS[0]: image(shape=(56, 56, 4))}),
        "RGB",
    ),
    "image batch axis": (
        lambda b: changed(b, images={CAMERAS[0]: image(shape=(1, 56, 56, 3))}),
        "batch axis",
    ),
    "empty image": (lambda b: changed(b, images={CAMERAS[0]: image(shape=(0, 56, 3))}), "empty"),
    "no image": (lambda b: changed(b, images={CAMERAS[0]: None}), "image of camera"),
    "image is text": (lambda b: changed(b, images={CAMERAS[0]: "a.png"}), "image of camera"),
    "state too short": (lambda b: changed(b, state=np.zeros(2)), r"state must .*2"),
    "state too long": (lambda b: changed(b, state=np.zeros(99)), r"state must .*99"),
    "state empty": (lambda b: changed(b, state=np.zeros(0)), "state must"),
    "state NaN": (lambda b: changed(b, state=np.full(b.good[0].state.shape, NAN)), "finite"),
    "state Inf": (lambda b: changed(b, state=np.full(b.good[0].state.shape, INF)), "finite"),
    "state overflows float32": (
        lambda b: changed(b, state=np.full(b.good[0].state.shape, 1e300)),
        "finite",
    ),
    "state text": (lambda b: changed(b, state="zero"), "vector of numbers"),
    "state ragged": (lambda b: changed(b, state=[[1.0], [1.0, 2.0]]), "vector of numbers"),
    "state missing": (lambda b: changed(b, state=None), "state must be sent"),
    "prompt empty": (lambda b: changed(b, prompt=""), "must not be empty"),
    "prompt blank": (lambda b: changed(b, prompt=" \n\t"), "must not be empty"),
    "prompt missing": (lambda b: changed(b, prompt=None), "must not be empty"),
    "prompt no text": (lambda b: changed(b, prompt=7), "must be a string"),
    "prompt too long": (lambda b: changed(b, prompt="pick it up " * 200), r"fit into \d+ tokens"),
    "too many rows": (lambda b: [b.good[0]] * 5, "at most 4 rows; got 5"),
    "no row": (lambda b: [], "at least one row"),
    "options no mapping": (lambda b: changed(b, options=None), "options must be a mapping"),
    "unknown option": (
        lambda b: with_option(b, "temperature", 1.0),
        "'temperature'.*noise, num_steps, rtc, seed",
    ),
    "guidance": (lambda b: with_option(b, "guidance_scale", 2.0), "'guidance_scale'"),
    "session": (lambda b: with_option(b, "session_id", "a"), "'session_id'"),
    "noise shape": (lambda b: with_option(b, "noise", np.zeros((3, 3))), r"expected shape \["),
    "noise batch axis": (
        lambda b: with_option(b, "noise", np.zeros((1, 10, 8), np.float32)),
        "expected shape",
    ),
    "noise NaN": (
        lambda b: with_option(b, "noise", np.full((10, 8), NAN, np.float32)),
        "noise must be finite",
    ),
    "noise integers": (lambda b: with_option(b, "noise", np.zeros((10, 8), int)), "float32"),
    "noise text": (lambda b: with_option(b, "noise", "normal"), "noise"),
    "steps 0": (lambda b: with_option(b, "num_steps", 0), r"\[1, 200\]"),
    "steps -1": (lambda b: with_option(b, "num_steps", -1), r"\[1, 200\]"),
    "steps huge": (lambda b: with_option(b, "num_steps", 10**9), r"\[1, 200\]"),
    "steps text": (lambda b: with_option(b, "num_steps", "10"), "integer; got '10'"),
    "steps float": (lambda b: with_option(b, "num_steps", 10.0), "integer"),
    "steps bool": (lambda b: with_option(b, "num_steps", True), "integer"),
    "steps array": (
        lambda b: [with_option(b, "num_steps", np.array([1, 2]))] * 2,
        "integer",
    ),
    "steps differ": (
        lambda b: [with_option(b, "num_steps", 1), with_option(b, "num_steps", 2)],
        r"equal in all rows .*\[1, 2\]",
    ),
    "seed text": (lambda b: with_option(b, "seed", "7"), "seed must be an integer"),
    "seed negative": (lambda b: with_option(b, "seed", -1), "seed must be"),
    "seed huge": (lambda b: with_option(b, "seed", 2**63), "seed must be"),
    "seed bool": (lambda b: with_option(b, "seed", True), "seed must be"),
    "seed float": (lambda b: with_option(b, "seed", 1.0), "seed must be"),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_a_bad_observation(bench: Bench, name: str) -> None:
    make, words = OBSERVATIONS[name]
    message = bench.refuses(make(bench))
    assert re.search(words, message), message


def test_one_bad_row_refuses_its_request_only(bench: Bench) -> None:
    bench.refuses([bench.good[0], changed(bench, state=np.zeros(1)), bench.good[0]])


@pytest.mark.parametrize("request_", [None, 7, "text", {"images": {}}, [1], object()])
def test_something_else_is_a_type_error(bench: Bench, request_: Any) -> None:
    model = bench.engine.args.plugin
    message = bench.refuses(request_, TypeError)
    assert f"{model!r} takes" in message
    assert REQUESTS[model].__name__ in message


# ---------------------------------------------------------------- real-time chunking


def chunk(shape: tuple[int, ...] = (6, 7), value: float = 0.1) -> np.ndarray:
    return np.full(shape, value, np.float32)


RTC: dict[str, tuple[Any, str]] = {
    "NaN": (RTCOptions(chunk(value=NAN)), "finite"),
    "Inf": (RTCOptions(chunk(value=INF)), "finite"),
    "too many dims": (RTCOptions(chunk((6, 9))), "at most 8 action dims; got 9"),
    "no rows": (RTCOptions(chunk((0, 7))), "T >= 1"),
    "one axis": (RTCOptions(chunk((7,))), r"\[T, A\]"),
    "text": (RTCOptions("abc"), "prev_chunk"),
    "ragged": (RTCOptions([[1.0], [1.0, 2.0]]), "prev_chunk"),
    "delay negative": (RTCOptions(chunk(), -1), "inference_delay"),
    "delay text": (RTCOptions(chunk(), "2"), "inference_delay"),  # type: ignore[arg-type]
    "horizon 0": (RTCOptions(chunk(), 0, 0), "execution_horizon"),
    "horizon float": (RTCOptions(chunk(), 0, 3.5), "execution_horizon"),  # type: ignore[arg-type]
    "schedule": (RTCOptions(chunk(), schedule="COSINE"), "EXP, LINEAR, ONES, ZEROS"),
    "weight 0": (RTCOptions(chunk(), max_guidance_weight=0.0), "max_guidance_weight"),
    "weight NaN": (RTCOptions(chunk(), max_guidance_weight=NAN), "max_guidance_weight"),
    "weight Inf": (RTCOptions(chunk(), max_guidance_weight=INF), "max_guidance_weight"),
    "weight text": (
        RTCOptions(chunk(), max_guidance_weight="5"),  # type: ignore[arg-type]
        "max_guidance_weight",
    ),
    "mode": (RTCOptions(chunk(), mode="magic"), "'guided' or 'trained'"),  # type: ignore[arg-type]
    "trained": (RTCOptions(chunk(), 1, mode="trained"), "checkpoint trained for it"),
    "space": (RTCOptions(chunk(), space="world"), "space must be"),  # type: ignore[arg-type]
    "robot NaN": (RTCOptions(chunk(value=NAN), space="robot"), "finite"),
    "robot dims": (RTCOptions(chunk((6, 3)), space="robot"), "must have 7 action dims"),
    "robot one axis": (RTCOptions(chunk((7,)), space="robot"), r"\[T, A\]"),
    "robot text": (RTCOptions("abc", space="robot"), "prev_chunk"),
    "unknown field": ({"prev_chunk": chunk(), "delay": 1}, "option rtc must be"),
    "no mapping": (7, "option rtc must be"),
    "no field": ({"inference_delay": 1}, "option rtc must be"),
}


@pytest.mark.parametrize("name", RTC)
def test_bad_rtc_of_an_observation(bench: Bench, name: str) -> None:
    rtc, words = RTC[name]
    message = bench.refuses(with_option(bench, "rtc", rtc))
    assert re.search(words, message), message


@pytest.mark.parametrize("name", [n for n in RTC if not n.startswith("robot")])
def test_bad_rtc_of_a_model_request(bench: Bench, name: str) -> None:
    rtc, words = RTC[name]
    message = bench.refuses(replace(bench.good[1], rtc=rtc))
    words = words.replace("option rtc", "rtc")
    assert re.search(words, message), message


@pytest.mark.parametrize(
    ("rtc", "words"),
    [
        (RTCOptions(chunk((3, 6, 7))), r"\[2, T, A\]"),
        ([RTCOptions(chunk())], "one entry per row"),
        (RTCOptions(chunk(), space="robot"), "model space"),
        ([RTCOptions(chunk(), mode="guided"), 7], "rtc must be"),
    ],
)
def test_rtc_rows_of_a_model_request(bench: Bench, rtc: Any, words: str) -> None:
    message = bench.refuses(replace(bench.good[1], rtc=rtc))
    assert re.search(words, message), message


def test_rtc_of_a_checkpoint_trained_for_it() -> None:
    from phyai.models.pi.config import PiConfig
    from tests.pi.tiny_engines import GOLDEN

    config = replace(PiConfig.from_folder(GOLDEN / "pi05", "pi05"), rtc_training_max_delay=3)
    with open_engine("pi05", config=config) as engine:
        good = model_request(engine)

        def step(*args: Any, **options: Any) -> Any:
            return engine.step(replace(good, rtc=RTCOptions(*args, mode="trained", **options)))

        assert torch.equal(step(chunk(), 2)[:, :2, :7], torch.full((2, 2, 7), 0.1))
        with pytest.raises(RequestError, match="at most 3 for this checkpoint; got 4"):
            step(chunk(), 4)
        with pytest.raises(RequestError, match="at least inference_delay=3 rows; got 2"):
            step(chunk((2, 7)), 3)
        pair = [RTCOptions(chunk(), 1, mode="trained"), RTCOptions(chunk(), mode="guided")]
        with pytest.raises(RequestError, match="equal in all rows"):
            engine.step(replace(good, rtc=pair))
        assert step(chunk((3, 7)), 3).shape == (2, 10, 8)


def test_a_row_without_a_left_over_is_as_without_rtc(bench: Bench) -> None:
    engine, good = bench.engine, bench.good[1]
    plain = bench.want[1]
    assert torch.equal(engine.step(replace(good, rtc=RTCOptions(None))), plain)
    mixed = engine.step(replace(good, rtc=[None, RTCOptions(chunk(), 1)]))
    torch.testing.assert_close(mixed[0], plain[0], atol=0, rtol=0)
    assert not torch.equal(mixed[1], plain[1])


# ---------------------------------------------------------------- model requests


def good_images(b: Bench) -> torch.Tensor:
    images: torch.Tensor = b.good[1].pixel_values
    return images


MODEL_REQUESTS: dict[str, tuple[Callable[[Bench], dict[str, Any]], str]] = {
    "images missing": (lambda b: {"pixel_values": None}, "pixel_values"),
    "images no camera axis": (lambda b: {"pixel_values": good_images(b)[:, 0]}, "expected shape"),
    "images size": (lambda b: {"pixel_values": good_images(b)[..., :50]}, "expected shape"),
    "images channels last": (
        lambda b: {"pixel_values": good_images(b).movedim(2, -1)},
        "expected shape",
    ),
    "images uint8": (lambda b: {"pixel_values": good_images(b).byte()}, "float32; got uint8"),
    "images NaN": (lambda b: {"pixel_values": good_images(b) * NAN}, "pixel_values must be finite"),
    "images Inf": (lambda b: {"pixel_values": good_images(b) / 0}, "pixel_values must be finite"),
    "too many cameras": (
        lambda b: {"pixel_values": good_images(b)[:, [0, 0, 1, 1]]},
        "1 to 3 cameras; got 4",
    ),
    "no cameras": (lambda b: {"pixel_values": good_images(b)[:, :0]}, "1 to 3 cameras; got 0"),
    "no rows": (lambda b: {"pixel_values": good_images(b)[:0]}, "at least one row"),
    "too many rows": (
        lambda b: {"pixel_values": good_images(b)[[0] * 5]},
        "at most 4 rows; got 5",
    ),
    "masks all off": (
        lambda b: {"image_masks": torch.zeros(2, 2, dtype=torch.bool)},
        "row 0 must have at least one camera",
    ),
    "masks of one row off": (
        lambda b: {"image_masks": torch.tensor([[True, False], [False, False]])},
        "row 1 must have at least one camera",
    ),
    "masks float": (lambda b: {"image_masks": torch.ones(2, 2)}, "bool; got float32"),
    "masks shape": (
        lambda b: {"image_masks": torch.ones(2, 3, dtype=torch.bool)},
        "image_masks expected shape",
    ),
    "tokens float": (lambda b: {"input_ids": b.good[1].input_ids.float()}, "int64; got float32"),
    "tokens bool": (lambda b: {"input_ids": b.good[1].input_ids.bool()}, "int64; got bool"),
    "tokens rows": (lambda b: {"input_ids": b.good[1].input_ids[:1]}, "input_ids expected shape"),
    "tokens flat": (lambda b: {"input_ids": b.good[1].input_ids[0]}, "input_ids expected shape"),
    "tokens none": (lambda b: {"input_ids": b.good[1].input_ids[:, :0]}, "1 to .* tokens per row"),
    "tokens too many": (
        lambda b: {"input_ids": torch.ones(2, 400, dtype=torch.int64)},
        "1 to .* tokens per row; got 400",
    ),
    "tokens negative": (lambda b: {"input_ids": b.good[1].input_ids - 100}, r"\[0, \d+\)"),
    "tokens out of vocabulary": (
        lambda b: {"input_ids": b.good[1].input_ids + 10**6},
        r"\[0, \d+\).*Check the tokenizer",
    ),
    "lengths 0": (lambda b: {"lang_lens": torch.tensor([3, 0])}, "lang_lens must be"),
    "lengths negative": (lambda b: {"lang_lens": torch.tensor([-1, 3])}, "lang_lens must be"),
    "lengths over the width": (lambda b: {"lang_lens": torch.tensor([3, 13])}, r"\[1, 12\]"),
    "lengths shape": (lambda b: {"lang_lens": torch.tensor([[3, 3]])}, "lang_lens expected"),
    "lengths float": (lambda b: {"lang_lens": torch.tensor([3.0, 3.0])}, "int64"),
    "noise shape": (lambda b: {"noise": torch.zeros(2, 9, 8)}, "noise expected shape"),
    "noise rows": (lambda b: {"noise": torch.zeros(1, 10, 8)}, "noise expected shape"),
    "noise NaN": (lambda b: {"noise": torch.full((2, 10, 8), NAN)}, "noise must be finite"),
    "noise overflows float32": (
        lambda b: {"noise": torch.full((2, 10, 8), 1e300, dtype=torch.float64)},
        "noise must be finite",
    ),
    "noise complex": (
        lambda b: {"noise": torch.zeros(2, 10, 8, dtype=torch.complex64)},
        "noise must be float32",
    ),
    "steps 0": (lambda b: {"num_steps": 0}, r"\[1, 200\]"),
    "steps text": (lambda b: {"num_steps": "ten"}, "integer"),
    "seed": (lambda b: {"noise": None, "seed": -3}, "seed must be"),
}


@pytest.mark.parametrize("name", MODEL_REQUESTS)
def test_a_bad_model_request(bench: Bench, name: str) -> None:
    make, words = MODEL_REQUESTS[name]
    message = bench.refuses(replace(bench.good[1], **make(bench)))
    assert re.search(words, message), message


def test_the_request_of_the_other_model_is_a_type_error_naming_both(bench: Bench) -> None:
    mine, other = (REQUESTS[m] for m in sorted(MODELS, key=lambda m: m != bench.engine.args.plugin))
    good = bench.good[1]
    fields = {n: getattr(good, n) for n in ("pixel_values", "input_ids", "lang_lens")}
    message = bench.refuses(other(**fields), TypeError)
    assert mine.__name__ in message
    assert other.__name__ in message


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (None, "state expected shape .* got none"),
        (torch.zeros(2, 5), "state expected shape"),
        (torch.full((2, 6), NAN), "state must be finite"),
        (torch.zeros(2, 6, dtype=torch.int64), "float32"),
    ],
)
def test_the_state_of_a_pi0_request(bench: Bench, state: Any, words: str) -> None:
    if bench.engine.args.plugin != "pi0":
        assert not hasattr(bench.good[1], "state")
        return
    message = bench.refuses(replace(bench.good[1], state=state))
    assert re.search(words, message), message


# ---------------------------------------------------------------- what is fine


def test_forms_that_mean_the_same_give_the_same_bits(bench: Bench) -> None:
    engine, good = bench.engine, bench.good[1]
    same = {
        "pixel_values": good.pixel_values.double(),
        "input_ids": good.input_ids.int(),
        "lang_lens": good.lang_lens.tolist(),
        "noise": good.noise.numpy(),
        "image_masks": torch.ones(2, 2, dtype=torch.bool),
    }
    for name, value in same.items():
        assert torch.equal(engine.step(replace(good, **{name: value})), bench.want[1]), name
    short = "observation.images."
    images = {short + name: value for name, value in bench.good[0].images.items()}
    again = engine.step(changed(bench, images=images, state=bench.good[0].state.tolist()))
    assert np.array_equal(again.actions, bench.want[0])


def test_padding_behind_the_prompt_and_masked_cameras_change_nothing(bench: Bench) -> None:
    engine, good = bench.engine, bench.good[1]
    ids = good.input_ids.clone()
    for row, length in enumerate(good.lang_lens.tolist()):
        ids[row, length:] = 3
    assert torch.equal(engine.step(replace(good, input_ids=ids)), bench.want[1])
    images = torch.cat([good.pixel_values, torch.full_like(good.pixel_values[:, :1], 0.5)], dim=1)
    masks = torch.tensor([[True, True, False]] * 2)
    masked = engine.step(replace(good, pixel_values=images, image_masks=masks))
    assert torch.equal(masked, bench.want[1])
