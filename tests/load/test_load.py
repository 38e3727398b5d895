"""The load of 100 robots for 10 s, and three times what the backends carry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from benchmarks import load

pytestmark = pytest.mark.slow
TRIES = 3  # a machine that does much else may be too slow for the load itself
STARVED = 0.3  # share of the time in which the gateway could run and had no processor


def held(one_try: Callable[[], tuple[dict[str, Any], list[str]]]) -> None:
    """Check that all rules hold in one of the tries, unless others have the processors."""
    starved: list[float] = []
    for _ in range(TRIES):
        figures, broken = one_try()
        starved.append(figures["starved"])
        if not broken:
            return
    said = "\n".join(broken)
    if min(starved) > STARVED:
        pytest.skip(f"others have the processors, the gateway waited {starved} of the time; {said}")
    pytest.fail(said)


def test_100_robots_and_200_requests_a_second() -> None:
    """No request fails, memory grows by less than 2 %; what the gateway adds is printed.

    A machine that stands still for a moment may have some refused, as full or too late; nothing
    else becomes of a request in any try.
    """

    def one_try() -> tuple[dict[str, Any], list[str]]:
        figures, broken = asyncio.run(load.steady(10.0, robots=100, rate=200.0))
        print(figures)
        assert figures["errors"] == figures["refused"], broken
        return figures, broken

    held(one_try)


def test_three_times_what_the_backends_carry() -> None:
    """Queues stay bounded, refusals are typed, and all is well within 5 s of its end."""

    def one_try() -> tuple[dict[str, Any], list[str]]:
        figures, broken = asyncio.run(load.overload(8.0, robots=100))
        print(figures)
        assert not [rule for rule in broken if "typed" in rule or "bounded" in rule], broken
        return figures, broken

    held(one_try)
