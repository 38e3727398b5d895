"""Level 2: rows of a batch, declared precisions, real-time chunking."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from phyai.cli import run_setup
from phyai.engine_config import DeviceConfig
from phyai.errors import PhyaiError, RequestError
from phyai.testing import tolerances
from phyai.testing.conformance.check import Failure, NotApplicable, checks_of
from phyai.testing.conformance.requests import another, left_over_of, with_options, worded
from phyai.testing.conformance.results import (
    arrays,
    least_cosine,
    not_finite,
    other_bits,
    row_of,
    too_far,
)
from phyai.testing.conformance.subject import Subject, result_of, step
from phyai.types import Observation, RTCOptions


def rows_of_a_bucket_keep_their_bits(subject: Subject) -> None:
    """In one bucket a row has the same bits alone and beside any others."""
    subject.need_rows()
    core = subject.static
    row = subject.observation()
    alone = [row, row, row]  # what padding makes of a single row
    want = row_of(result_of(core, alone, "three equal rows"), 0)
    key = core.adapter.prepare(alone).key
    bucket = core.runner.scheduler.batch_bucket
    compared = 0
    for mates in _mates(subject, row):
        batch = [row, *mates]
        if core.adapter.prepare(batch).key != key or bucket(len(batch)) != bucket(3):
            continue
        got = row_of(result_of(core, batch, f"{len(batch)} rows"), 0)
        compared += 1
        if problem := other_bits(got, want):
            raise Failure(
                f"a row must not depend on the rows beside it; with {len(mates)} other rows in the "
                f"same bucket {problem}. Mask padding, and mix no rows in norms, softmax or sums."
            )
    if not compared:
        raise Failure(
            "rows that differ in seed alone must have equal keys; they have not. Put data such as "
            "lengths, masks and noise into Prepared.tensors, not into the Key."
        )


def rows_of_other_buckets_stay_close(subject: Subject) -> None:
    """A row alone and the row in a batch of any size agree within the batch tolerance."""
    subject.need_rows()
    rows = _distinct(subject)
    for core, name in ((subject.exact, "exact shapes"), (subject.static, "padded buckets")):
        alone = [step(core, row) for row in rows]
        for batch in (list(range(len(rows))), list(range(len(rows)))[::-1], [0, 1]):
            result = result_of(core, [rows[i] for i in batch], f"{len(batch)} rows")
            if len(result) != len(batch):
                raise Failure(f"{len(batch)} rows must give as many results; got {len(result)}.")
            for place, number in enumerate(batch):
                got = row_of(result, place)
                if problem := too_far(got, alone[number], subject.given.batch_tolerance):
                    raise Failure(
                        f"row {place} of {len(batch)} must be what it is alone ({name}); "
                        f"{problem}. Mask padding, and mix no rows in norms, softmax or sums."
                    )


def padded_buckets_change_nothing(subject: Subject) -> None:
    """With the shapes graphs need, every sample gives what it gives at its own size."""
    requests = {f"sample request {n}": request for n, request in enumerate(subject.requests)}
    if subject.observations and subject.max_rows > 3:
        requests["a request of 3 rows"] = _distinct(subject)  # padded to a bucket of 4
    for label, request in requests.items():
        want = step(subject.exact, request, label)
        got = step(subject.static, request, f"{label} in padded buckets")
        if problem := too_far(got, want, subject.given.batch_tolerance):
            raise Failure(
                f"{label} must give the same in padded buckets; {problem}. Mask "
                "what is past the valid tokens and rows."
            )


def declared_precisions_run(subject: Subject) -> None:
    """Every declared precision starts, is finite, and points where float32 points."""
    precisions = subject.capability("precisions")
    if not precisions:
        raise NotApplicable("capabilities declare no precisions")
    if not any(f.name == "precision" for f in dataclasses.fields(subject.args)):
        raise Failure(
            "capabilities declare precisions, so the arguments must have a field 'precision'; "
            "they have not. Add the field or drop the capability."
        )
    for name in precisions:
        args = dataclasses.replace(subject.args, precision=name)  # type: ignore[call-arg]
        _, dtype = run_setup.choose_precision(subject.manifest, name)
        config = subject.config().replace(
            device=DeviceConfig(target="cpu", params_dtype=dtype or "float32")
        )
        with subject.core(config, args) as core:
            for number, request in enumerate(subject.requests):
                got = step(core, request, f"sample request {number} in precision {name}")
                _check_precision(name, got, subject.expected[number])


def rtc_follows_the_left_over(subject: Subject) -> None:
    """With a left-over the new chunk starts nearer to it (guided) or with it (trained)."""
    modes = subject.capability("rtc")
    if not modes:
        raise NotApplicable("capabilities declare no rtc")
    row = subject.observation()
    plain = left_over_of(result_of(subject.exact, row))
    other = left_over_of(result_of(subject.exact, another(row, _seed(subject, 5))))
    if plain is None or other is None:
        raise NotApplicable("results are no ActionChunk")
    refused = []
    for mode in modes:
        delay = min(2, len(plain) - 1)
        options = RTCOptions(other, inference_delay=delay, mode=mode)
        try:
            result = subject.exact.step(with_options(row, rtc=options))
        except RequestError as error:  # this checkpoint was not trained for it
            refused.append(f"{mode}: {error}")
            continue
        except PhyaiError as error:
            raise Failure(f"rtc mode {mode} must work; got {error}") from error
        _check_rtc(mode, delay, arrays(result)["model_actions"], plain, other)
    if len(refused) == len(modes):
        raise Failure(f"capabilities declare rtc, but every mode was refused: {refused[0]}")
    if problem := other_bits(step(subject.exact, subject.requests[0]), subject.expected[0]):
        raise Failure(f"a request without rtc must not notice one with it; {problem}.")


# ---------------------------------------------------------------- internals


def _seed(subject: Subject, seed: int) -> int | None:
    return seed if subject.takes_option("seed") else None


def _mates(subject: Subject, row: Observation) -> list[list[Observation]]:
    """Return rows to put beside ``row``: other content, images alone, seed alone, other samples."""
    seeds = [_seed(subject, seed) for seed in (21, 22, 23)]
    strange = [another(row, seed) for seed in seeds]
    pictures = [dataclasses.replace(mate, state=row.state) for mate in strange]
    reseeded = [another(row, seed, inputs=False) for seed in seeds]
    samples = subject.observations[1:3]
    sets = [strange[:2], strange[1:], strange, pictures[:2], pictures, reseeded[:2], reseeded]
    if (other := _worded(subject, row)) is not None:
        sets.append([other, strange[0]])
    return sets + ([samples] if len(samples) == 2 else [])


def _worded(subject: Subject, row: Observation) -> Observation | None:
    """Return the row with a prompt of another length, None when the adapter takes no such one."""
    other = worded(row)
    if other is not None:
        try:
            subject.exact.adapter.prepare(other)
        except RequestError:
            return None
    return other


def _distinct(subject: Subject) -> list[Observation]:
    """Return three different rows: two samples or contents, and a prompt of another length."""
    row = subject.observation()
    rows = [*subject.observations[:2], another(row, _seed(subject, 31))][:2]
    seeded = another(row, 32, inputs=False) if subject.takes_option("seed") else row
    return [*rows, _worded(subject, seeded) or seeded]


def _check_precision(name: str, got: dict[str, Any], want: dict[str, Any]) -> None:
    if bad := not_finite(got):
        raise Failure(f"precision {name} must give finite results; {bad} holds NaN or infinity.")
    for key, expected in want.items():
        if expected.dtype.kind != "f":
            continue
        if got[key].shape != expected.shape:
            raise Failure(f"precision {name} must keep the shape of {key}; it did not.")
        cosine = least_cosine(got[key], expected)
        if not cosine >= tolerances.PRECISION_COSINE:
            raise Failure(
                f"precision {name} must stay near float32; {key} has cosine {cosine:.3f} to it "
                f"(at least {tolerances.PRECISION_COSINE}). Keep norms and softmax in float32."
            )


def _check_rtc(
    mode: str, delay: int, got: np.ndarray, plain: np.ndarray, other: np.ndarray
) -> None:
    if mode == "trained":
        error = float(np.abs(got[:delay] - other[:delay]).max(initial=0.0))
        if not error <= tolerances.KNOWN_ATOL:
            raise Failure(
                f"rtc mode trained must keep the first {delay} actions; they differ by {error:.3g}."
                " Declare them as known.action.mask and known.action.value."
            )
        return
    before = float(np.abs(plain[: delay + 1] - other[: delay + 1]).mean())
    after = float(np.abs(got[: delay + 1] - other[: delay + 1]).mean())
    if not after < before:
        raise Failure(
            f"rtc mode {mode} must pull the chunk to the left-over; the mean distance of the first "
            f"{delay + 1} actions is {after:.3g} with it and {before:.3g} without. Put rtc.w, "
            "rtc.prev and rtc.max into Prepared.tensors and rtc='guided' into the Key."
        )


_NEEDS = ("l0_can_be_selected", "l1_loads", "l2_requests_succeed")
CHECKS = checks_of(
    2,
    (
        rows_of_a_bucket_keep_their_bits,
        rows_of_other_buckets_stay_close,
        padded_buckets_change_nothing,
        declared_precisions_run,
        rtc_follows_the_left_over,
    ),
    _NEEDS,
)
