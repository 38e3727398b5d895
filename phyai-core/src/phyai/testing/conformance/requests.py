"""Requests of the kit: seeded samples, other rows that fit beside them, and malformed ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from phyai.types import ActionChunk, Observation


def seeded(request: Any, seed: int) -> Any:
    """Return the request with a seed in every Observation that has neither seed nor noise."""
    if isinstance(request, Observation):
        if "seed" in request.options or "noise" in request.options:
            return request
        return with_options(request, seed=seed)
    if isinstance(request, list | tuple):
        return [seeded(row, seed + number) for number, row in enumerate(request)]
    return request


def with_options(observation: Observation, **options: Any) -> Observation:
    """Return the observation with these options changed; None removes one."""
    merged = {**observation.options, **options}
    return replace(observation, options={k: v for k, v in merged.items() if v is not None})


def another(observation: Observation, seed: int | None, *, inputs: bool = True) -> Observation:
    """Return an observation of other content that fits wherever the given one does.

    inputs: False changes the seed alone.
    """
    changed = observation
    if inputs:
        images = {name: _inverted(image) for name, image in observation.images.items()}
        changed = replace(observation, images=images, state=_scaled(observation.state))
    if seed is None:
        return changed
    return with_options(changed, seed=seed, noise=None)


def worded(observation: Observation) -> Observation | None:
    """Return the observation with a prompt of another length; None when it has no prompt."""
    prompt = observation.prompt
    words = prompt.split() if isinstance(prompt, str) else []
    if not words:
        return None
    return replace(observation, prompt=words[0] if len(words) > 1 else f"{prompt} {prompt}")


def observations_of(requests: Sequence[Any]) -> list[Observation]:
    """Return every Observation of some requests."""
    found: list[Observation] = []
    for request in requests:
        rows = request if isinstance(request, list | tuple) else [request]
        found += [row for row in rows if isinstance(row, Observation)]
    return found


def malformed(
    observation: Observation | None, max_rows: int, options: Sequence[str] = ()
) -> Iterator[tuple[str, Any, bool]]:
    """Yield (what is wrong, request, whether it is of a foreign type).

    options: the ones the adapter takes; those the kit knows get values they cannot have.
    """
    yield "None", None, True
    yield "an object of a foreign type", object(), True
    yield "no rows", [], False
    if observation is None:
        return
    yield f"{max_rows + 1} rows", [observation] * (max_rows + 1), False
    yield "a row of a foreign type", [observation, "row"], True
    yield "an unknown option", with_options(observation, no_such_option=1), False
    yield "options that are no mapping", replace(observation, options=[("seed", 1)]), False  # type: ignore[arg-type]
    for name, values in _BAD_OPTIONS.items():
        for value in values if name in options else ():
            changed = with_options(observation, **{"seed": None, name: value})
            yield f"option {name} {value!r}", changed, False
    if observation.state is not None:
        yield from _bad_states(observation)
    if observation.images:
        yield from _bad_images(observation)
    if observation.prompt is not None:
        yield "a prompt that is no text", replace(observation, prompt=12345), False  # type: ignore[arg-type]


_BAD_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "seed": ("seven", [7]),
    "num_steps": (0, "ten", [10]),
    "noise": ("loud", np.zeros((1,), np.float32)),
}


def _bad_states(observation: Observation) -> Iterator[tuple[str, Any, bool]]:
    state = np.asarray(_host(observation.state), dtype=np.float32)
    wide = np.concatenate([state.ravel(), np.zeros(1000, np.float32)])
    poisoned = state.copy()
    poisoned.ravel()[0] = np.nan
    yield "a state of wrong width", replace(observation, state=wide), False
    yield "a state with NaN", replace(observation, state=poisoned), False
    yield "a state of text", replace(observation, state="upright"), False


def _bad_images(observation: Observation) -> Iterator[tuple[str, Any, bool]]:
    name, image = next(iter(observation.images.items()))
    flat = np.zeros((4,), np.uint8)
    others = {key: value for key, value in observation.images.items() if key != name}
    yield (
        "an image of wrong rank",
        replace(observation, images={**others, name: flat}),
        False,
    )
    yield (
        "an image that is no array",
        replace(observation, images={**others, name: "image.png"}),
        False,
    )
    yield (
        "an image of an unknown camera",
        replace(observation, images={**observation.images, "no_such_camera": image}),
        False,
    )


# ---------------------------------------------------------------- content


def changed(request: Any, before: Any, path: str = "request") -> str:
    """Return the path of the first part that is no longer what it was; empty when none is."""
    if isinstance(before, torch.Tensor):
        same = isinstance(request, torch.Tensor) and request.shape == before.shape
        return "" if same and _equal_tensors(request, before) else path
    if isinstance(before, np.ndarray):
        same = isinstance(request, np.ndarray) and request.shape == before.shape
        return "" if same and np.array_equal(request, before, equal_nan=_floats(before)) else path
    if is_dataclass(before):
        for field in fields(before):
            old, new = getattr(before, field.name), getattr(request, field.name)
            if found := changed(new, old, f"{path}.{field.name}"):
                return found
        return ""
    if isinstance(before, Mapping):
        if not isinstance(request, Mapping) or list(request) != list(before):
            return path
        pairs = [(request[k], before[k], f"{path}[{k!r}]") for k in before]
    elif isinstance(before, list | tuple):
        if not isinstance(request, list | tuple) or len(request) != len(before):
            return path
        pairs = [(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(request, before))]  # noqa: B905
    else:
        return "" if request == before else path
    return next((found for new, old, at in pairs if (found := changed(new, old, at))), "")


def left_over_of(chunk: Any) -> np.ndarray | None:
    """Return the model-space actions of a result, for RTC; None when it is no chunk."""
    return np.array(chunk.model_actions) if isinstance(chunk, ActionChunk) else None


def _equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def _floats(array: np.ndarray) -> bool:
    return array.dtype.kind in "fc"


def _host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _inverted(image: Any) -> Any:
    """Return the negative of an image; other objects as they are."""
    if isinstance(image, np.ndarray | torch.Tensor):
        unsigned = str(image.dtype).endswith("uint8")
        return 255 - image if unsigned else 1 - image
    return image


def _scaled(state: Any) -> Any:
    """Return half of a state, which is inside whatever limits the state is."""
    if state is None or isinstance(state, torch.Tensor):
        return None if state is None else 0.5 * state
    values = np.asarray(state)
    return (0.5 * values).astype(values.dtype) if values.dtype.kind == "f" else state
