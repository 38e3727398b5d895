"""A hook plugin that wraps every part and changes nothing, and counts when it is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from typing import Any

from phyai.hooks import hookimpl
from phyai.types import BufferSpec, Key


class Identity:
    """Wraps conditioning, cache, solver, output and the denoiser at both stages.

    bound: how often each hook was asked.  ran: how often each wrapped part was used.
    """

    def __init__(self) -> None:
        self.bound: Counter[str] = Counter()
        self.ran: Counter[str] = Counter()

    @hookimpl(wrapper=True)
    def phyai_conditioning(self) -> Generator[None, Any, Any]:
        return self._wrapped("conditioning", (yield), _Conditioning)

    @hookimpl(wrapper=True)
    def phyai_cache(self) -> Generator[None, Any, Any]:
        return self._wrapped("cache", (yield), _CacheSpec)

    @hookimpl(wrapper=True)
    def phyai_solver(self) -> Generator[None, Any, Any]:
        return self._wrapped("solver", (yield), _Solver)

    @hookimpl(wrapper=True)
    def phyai_output(self) -> Generator[None, Any, Any]:
        return self._wrapped("output", (yield), _Output)

    @hookimpl(wrapper=True)
    def phyai_denoiser(self, stage: str) -> Generator[None, Any, Any]:
        return self._wrapped(f"denoiser {stage}", (yield), _Denoiser)

    @hookimpl
    def phyai_validate_action(self, chunk: Any) -> str | None:
        self.ran["validator"] += 1
        return None

    @hookimpl
    def phyai_request_finished(self, info: Any) -> None:
        self.ran["observer"] += 1

    def _wrapped(self, name: str, inner: Any, wrapper: type[_Wrapper]) -> Any:
        self.bound[name] += 1

        def used() -> None:
            self.ran[name] += 1

        return wrapper(inner, used)


class _Wrapper:
    def __init__(self, inner: Any, used: Callable[[], None]) -> None:
        self.inner, self.used = inner, used


class _Conditioning(_Wrapper):
    def encode(self, cache: Any) -> None:
        self.used()
        self.inner.encode(cache)


class _CacheSpec(_Wrapper):
    def __call__(self, key: Key) -> Mapping[str, BufferSpec]:
        self.used()
        spec: Mapping[str, BufferSpec] = self.inner(key)
        return spec


class _Solver(_Wrapper):
    @property
    def accepts(self) -> Any:
        return self.inner.accepts

    def grid(self, key: Key) -> Any:
        return self.inner.grid(key)

    def solve(self, *args: Any, **kwargs: Any) -> Any:
        self.used()
        return self.inner.solve(*args, **kwargs)


class _Output(_Wrapper):
    def decode(self, x: Any, cache: Any, prepared: Any) -> Any:
        self.used()
        return self.inner.decode(x, cache, prepared)

    def tensors(self, x: Any, cache: Any, prepared: Any) -> Any:
        self.used()
        return self.inner.tensors(x, cache, prepared)


class _Denoiser(_Wrapper):
    @property
    def prediction(self) -> Any:
        return self.inner.prediction

    def __call__(self, x: Any, step: Any, cache: Any) -> Any:
        self.used()
        return self.inner(x, step, cache)
