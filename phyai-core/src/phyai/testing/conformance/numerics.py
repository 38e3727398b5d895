"""Level 2: results are right, repeatable, well formed, and depend on nothing but the request."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phyai.golden import Comparison
from phyai.testing.conformance.check import Failure, NotApplicable, checks_of
from phyai.testing.conformance.requests import another, changed, with_options
from phyai.testing.conformance.results import Arrays, arrays, not_finite, other_bits, too_far
from phyai.testing.conformance.subject import Subject, result_of, step
from phyai.testing.golden import case_files, golden_runner
from phyai.types import ActionChunk, Observation

SEEDED = "List 'seed' in capabilities['options'] and draw noise in prepare() from options['seed']."


def requests_succeed(subject: Subject) -> None:
    """Every sample request gives a result, and all of it is finite."""
    for number in range(len(subject.requests)):
        if name := not_finite(subject.solo(number)):
            raise Failure(
                f"result of sample request {number} must be finite; {name} holds NaN or infinity."
            )


def results_are_well_formed(subject: Subject) -> None:
    """Chunks are float32 [H, A] with a name (and unit) per action and a mask entry per step."""
    for number, request in enumerate(subject.requests):
        result = result_of(subject.exact, request, f"sample request {number}")
        if isinstance(request, Observation) and isinstance(result, list | tuple):
            raise Failure(
                f"one Observation must give one result; got a {type(result).__name__}. Return one "
                "result per row from Output.decode."
            )
        for chunk in result if isinstance(result, list) else [result]:
            if isinstance(chunk, ActionChunk):
                _check_chunk(chunk)


def goldens_are_kept(subject: Subject) -> None:
    """Every tensor of every golden case is within its tolerance."""
    folder = subject.given.golden_dir
    if folder is None:
        raise NotApplicable("no golden_dir was given")
    files = case_files(Path(folder))
    if not files:
        raise Failure(f"golden_dir must hold cases (case_*.safetensors); got none in {folder}.")
    with golden_runner(subject.plugin) as runner:
        for path in files:
            for result in runner.run(path, _case_root(path, Path(folder))):
                if not result.comparisons:
                    raise Failure(
                        f"every golden case must be compared; {path.name} ({result.label}) was "
                        "not. Return runs for its kind from the manifest's golden function, or "
                        "take it out of golden_dir."
                    )
                if over := [c for c in result.comparisons if not c.ok]:
                    raise Failure(f"golden case {path.name} ({result.label}): {_listed(over)}.")


def reference_is_matched(subject: Subject) -> None:
    """Results equal those of the author's reference on the same noise."""
    reference = subject.given.reference
    if reference is None:
        raise NotApplicable("no reference was given")
    for number, request in enumerate(subject.requests):
        prepared = subject.exact.adapter.prepare(request)
        want = _as_result(reference(request, _noise(prepared.tensors)))
        got = _comparable(subject.solo(number), want)
        if problem := too_far(got, want, subject.given.tolerance):
            raise Failure(
                f"sample request {number} must equal the reference; {problem}. Compare step by "
                "step: `phyai record` writes what the solver saw."
            )


def same_noise_gives_same_result(subject: Subject) -> None:
    """A request sent again, also on another engine, gives the same bits."""
    with subject.core() as other, torch.random.fork_rng(devices=[]):
        for number, request in enumerate(subject.requests):
            want = subject.expected[number]
            for where, core in (("again", subject.exact), ("to another engine", other)):
                # The process's own generator stands elsewhere each time: nobody may read it.
                torch.manual_seed(1000 + number)
                if problem := other_bits(step(core, request), want):
                    raise Failure(
                        f"sample request {number} sent {where} must give the same result; "
                        f"{problem}. {SEEDED}"
                    )


def seed_decides_the_noise(subject: Subject) -> None:
    """Equal seeds give equal noise and results, other seeds other ones."""
    if not subject.takes_option("seed"):
        raise NotApplicable("capabilities['options'] does not list 'seed'")
    core = subject.exact
    first = with_options(subject.observation(), seed=11, noise=None)
    other = with_options(first, seed=12)
    noises = [_noise(core.adapter.prepare(r).tensors) for r in (first, first, other)]
    if not noises[0]:
        raise Failure(
            f"prepare() must draw the noise (noise.<leaf> in Prepared.tensors); got none. {SEEDED}"
        )
    if _differ(noises[0], noises[1]):
        raise Failure(f"equal seeds must give equal noise; they gave different noise. {SEEDED}")
    if not _differ(noises[0], noises[2]):
        raise Failure(f"seeds 11 and 12 must give different noise; they gave the same. {SEEDED}")
    results = [step(core, r) for r in (first, first, other)]
    if problem := other_bits(results[1], results[0]):
        raise Failure(f"equal seeds must give equal results; {problem}. {SEEDED}")
    if not other_bits(results[2], results[0]):
        raise Failure(
            "other noise must give another result; seeds 11 and 12 gave the same. Start from the "
            "noise leaves, or leave 'seed' out of capabilities['options']."
        )


def given_noise_is_used(subject: Subject) -> None:
    """Noise sent in the request gives the result of the seed that draws it."""
    if not subject.takes_option("noise"):
        raise NotApplicable("capabilities['options'] does not list 'noise'")
    first = with_options(subject.observation(), seed=11, noise=None)
    noise = _noise(subject.exact.adapter.prepare(first).tensors)
    if len(noise) != 1:
        raise NotApplicable(f"the solver variable has {len(noise)} noise leaves, not one")
    (drawn,) = noise.values()
    given = with_options(first, seed=None, noise=drawn[0].clone())
    if problem := other_bits(step(subject.exact, given), step(subject.exact, first)):
        raise Failure(
            "option noise must be what the solver starts from; a request with the noise that seed "
            f"11 draws gives another result than seed 11: {problem}."
        )


def result_is_the_models(subject: Subject) -> None:
    """The result is not the noise the solver started from."""
    for number, request in enumerate(subject.requests):
        noise = _noise(subject.exact.adapter.prepare(request).tensors)
        for name, value in subject.expected[number].items():
            for leaf, drawn in noise.items():
                start = drawn.numpy()
                if _same_values(value, start):
                    raise Failure(
                        f"result {name} of sample request {number} must come from the model; it is "
                        f"the noise {leaf!r} itself. Let Solver.solve return the last x."
                    )


def nothing_stays_between_requests(subject: Subject) -> None:
    """A request gives the same bits whatever was sent before it."""
    first, want = subject.requests[0], subject.expected[0]
    for number, between in enumerate(_others(subject)):
        with subject.core() as core:
            step(core, between, f"request {number} in between")
            if problem := other_bits(step(core, first), want):
                raise Failure(
                    "a request must not depend on the one before it; after another request "
                    f"{problem}. Write every buffer in encode(), or declare it with zero=True."
                )
            for _ in range(2):
                if problem := other_bits(step(core, first), want):
                    raise Failure(
                        f"a request sent several times must give the same result; {problem}. "
                        "Write every buffer in encode(), or declare it with zero=True."
                    )


def results_keep_their_values(subject: Subject) -> None:
    """A result is not overwritten by the next request."""
    core, first = subject.exact, subject.requests[0]
    result = result_of(core, first)
    before = arrays(result)
    for between in _others(subject):
        step(core, between)
    if problem := other_bits(arrays(result), before):
        raise Failure(
            f"a result must keep its values when another request runs; {problem}. Copy what comes "
            "from a buffer before returning it."
        )


def inputs_are_not_changed(subject: Subject) -> None:
    """A request object is the same after it ran."""
    for number in range(len(subject.requests)):
        before = subject.pristine[number]
        request = copy.deepcopy(before)
        step(subject.exact, request)
        if path := changed(request, before):
            raise Failure(
                f"sample request {number} must not be changed by running it; {path} was. Copy an "
                "input before writing to it."
            )


# ---------------------------------------------------------------- internals


def _check_chunk(chunk: ActionChunk) -> None:
    actions = chunk.actions
    if not isinstance(actions, np.ndarray) or actions.dtype != np.float32 or actions.ndim != 2:
        raise Failure(f"actions must be a float32 array [H, A]; got {_kind(actions)}.")
    horizon, width = actions.shape
    if len(chunk.names) != width or not all(isinstance(n, str) for n in chunk.names):
        raise Failure(f"names must hold one text per action ({width}); got {chunk.names!r}.")
    if len(set(chunk.names)) != width:
        raise Failure(f"names must be distinct; got {chunk.names!r}.")
    if len(chunk.units) not in (0, width):
        raise Failure(
            f"units must hold one text per action ({width}), or none at all; got {chunk.units!r}."
        )
    mask = chunk.mask
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (horizon,):
        raise Failure(f"mask must be a bool array [{horizon}]; got {_kind(mask)}.")
    if not mask.any():
        raise Failure("mask must let at least one step be executed; all are False.")
    model = chunk.model_actions
    if not isinstance(model, np.ndarray) or model.dtype != np.float32 or model.ndim != 2:
        raise Failure(f"model_actions must be a float32 array [H, A_model]; got {_kind(model)}.")
    rate = chunk.control_hz
    if rate is not None and not rate > 0:
        raise Failure(f"control_hz must be positive, or None when unknown; got {rate!r}.")


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray | Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def _case_root(path: Path, folder: Path) -> Path:
    """Return the nearest folder above a case, within ``folder``, that holds config.json."""
    root = path.parent
    while root != folder and not (root / "config.json").is_file():
        root = root.parent
    return root


def _listed(over: list[Comparison]) -> str:
    texts = [f"{c.name} {c.error:.3g} > {c.tolerance:.3g}" for c in over[:5]]
    more = f" and {len(over) - 5} more" if len(over) > 5 else ""
    return f"{', '.join(texts)}{more} ({len(over)} tensors over)"


def _noise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the noise a request starts from, by leaf."""
    return {
        name.removeprefix("noise."): tensor.detach().cpu().clone()
        for name, tensor in tensors.items()
        if name.startswith("noise.")
    }


def _differ(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() != b.keys() or any(not torch.equal(a[leaf], b[leaf]) for leaf in a)


def _same_values(value: Any, start: Any) -> bool:
    """Return whether an array, with or without the row dim, holds exactly the noise."""
    start = start[0] if start.shape[:1] == (1,) and value.ndim == start.ndim - 1 else start
    return bool(value.dtype == start.dtype and np.array_equal(value, start))


def _others(subject: Subject) -> list[Any]:
    """Return requests unlike the first one: the other samples, and another content of it."""
    others = list(subject.requests[1:])
    first = subject.requests[0]
    seed = 77 if subject.takes_option("seed") else None
    if isinstance(first, Observation):
        others.append(another(first, seed))
    return others or [first]


def _as_result(expected: Any) -> Arrays:
    """Return the expected arrays under the names results have; plain arrays are ``actions``."""
    if isinstance(expected, ActionChunk | Mapping):
        return arrays(expected)
    if isinstance(expected, list | tuple) and all(isinstance(e, ActionChunk) for e in expected):
        return arrays(list(expected))
    return {"actions": np.asarray(arrays(expected).popitem()[1])}


def _comparable(got: Arrays, want: Arrays) -> Arrays:
    """Return a result under the names of the expectation: a plain array is compared as one."""
    if set(want) != {"actions"}:
        return got
    rows = [value for name, value in got.items() if name.split(" ")[-1] in ("actions", "tensor")]
    value = rows[0] if len(rows) == 1 else np.stack(rows)
    shape = want["actions"].shape
    if value.shape != shape and value.size == want["actions"].size:
        value = value.reshape(shape)  # one row, with or without its dim
    return {"actions": value}


_NEEDS = ("l0_can_be_selected", "l1_loads")
CHECKS = (
    *checks_of(2, (requests_succeed,), _NEEDS),
    *checks_of(
        2,
        (
            results_are_well_formed,
            goldens_are_kept,
            reference_is_matched,
            result_is_the_models,
            same_noise_gives_same_result,
            seed_decides_the_noise,
            given_noise_is_used,
            nothing_stays_between_requests,
            results_keep_their_values,
            inputs_are_not_changed,
        ),
        (*_NEEDS, "l2_requests_succeed"),
    ),
)
