"""Loading on cfg ranks, each with its own branch: what one cannot load fails all alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from phyai.errors import CapacityError, EngineUnavailableError, RequestError
from phyai.parallel import Mesh
from tests.core.guided_adapter import GuidedAdapter, GuidedRequest
from tests.core.guided_ranks import FOUR, guided_ranks
from tests.core.rank_engines import all_step
from tests.core.test_guidance import UNITS, request, same
from tests.core.toy_adapter import open_engine, registry

TWO = Mesh(cfg=2)


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


def asked(cond: int, uncond: int = 2) -> GuidedRequest:
    """A request with so many words per branch."""
    words = torch.arange(max(cond, uncond))[None] % 16
    return GuidedRequest(words[:, :cond], words[:, :uncond].flip(1), torch.tensor([2.5]))


def one_rank(unit: str, whole: GuidedRequest) -> Any:
    with open_engine(GuidedAdapter, unit=unit) as engine:
        return engine.step(whole)


def nbytes(unit: str, *requests: GuidedRequest) -> list[int]:
    """Return the bytes of buffers on each of two cfg ranks that keep those requests."""
    with guided_ranks(TWO, unit=unit) as engines:
        for one in requests:
            all_step(engines, one)
        return [engine.core.services.memory.nbytes for engine in engines]


def keys(engines: Any) -> list[Any]:
    return [list(engine.core.runner._bound) for engine in engines]


@pytest.mark.parametrize(("unit", "large"), [("loop", "cond"), ("step", "uncond")])
def test_a_prompt_without_room_on_one_branch_fails_all_ranks_alike(unit: str, large: str) -> None:
    whole, plain = asked(**{"cond": 2, "uncond": 2, large: 300}), asked(3)
    cond, uncond = nbytes(unit, whole)
    budget = (cond + uncond) // 2
    want = one_rank(unit, plain)
    with guided_ranks(FOUR, unit=unit, runtime={"memory_budget_bytes": budget}) as engines:
        for _ in range(2):
            errors = all_step(engines, whole)
            assert [type(error) for error in errors] == [CapacityError] * 4
            assert len({str(error) for error in errors}) == 1
            assert f"Rank {0 if large == 'cond' else 2} of 4 raised it." in errors[1].__notes__
            assert [engine.core.services.memory.nbytes for engine in engines] == [0] * 4
        for got in all_step(engines, plain):
            same(got, want)


@UNITS
def test_all_ranks_make_room_when_one_of_them_has_to(unit: str) -> None:
    first, second, large = asked(3), asked(4), asked(300)
    cond, _ = nbytes(unit, second, large)
    want = [one_rank(unit, one) for one in (large, first)]
    with guided_ranks(TWO, unit=unit, runtime={"memory_budget_bytes": cond}) as engines:
        for one in (first, second):
            all_step(engines, one)
        for got in all_step(engines, large):
            same(got, want[0])
        mine, others = keys(engines)
        assert mine == others
        assert [key.bucket("tokens") for key, _ in mine] == [4, 300]
        for got in all_step(engines, first):
            same(got, want[1])
        mine, others = keys(engines)
        assert mine == others


@pytest.mark.parametrize("branch", ["cond", "uncond"])
def test_what_planning_refuses_for_one_branch_is_refused_on_all_ranks(branch: str) -> None:
    plain, words = asked(3, 3), torch.full((1, 3), 99)
    changed: dict[str, Any] = {"tokens" if branch == "cond" else "uncond": words}
    refused = replace(plain, **changed)
    with guided_ranks(TWO, refuses=(99,)) as engines:
        want = all_step(engines, plain)
        for error in all_step(engines, refused):
            assert isinstance(error, RequestError)
            assert str(error) == "words must be known; got [99]. Use others."
        assert keys(engines) == [[], []]  # one key: the request's own cache went
        for got in all_step(engines, plain):
            same(got, want[0])


def test_an_error_whose_class_the_others_cannot_find_is_alike_too() -> None:
    class OwnError(Exception):
        pass

    class Own(GuidedAdapter):
        name = "guided-own"
        fails = True

        def cache(self) -> Any:
            inner = super().cache()

            def spec(key: Any) -> Any:
                if self.fails and key.bucket("tokens") == 2:
                    raise OwnError("of this function")
                return inner(key)

            return spec

    with guided_ranks(TWO, Own) as engines:
        for error in all_step(engines, asked(3)):
            assert type(error) is RuntimeError
            assert "OwnError: of this function" in str(error)
        for engine in engines:
            engine.core.adapter.fails = False  # type: ignore[attr-defined]
        one, two = all_step(engines, asked(3))
        same(one, two)


def test_ranks_agree_only_where_they_load_different_branches() -> None:
    with guided_ranks(Mesh(tp=2)) as engines:
        assert [engine.core.runner.agree for engine in engines] == [None, None]
        control = engines[0].core.services.parallel.control.traffic
        before = control.collectives
        all_step(engines, request(1))
        assert control.collectives - before == 2  # the batch, and the outcome


def test_a_rank_that_failed_before_it_loaded_is_found_at_once() -> None:
    with guided_ranks(TWO) as engines:
        runner: Any = engines[1].core.runner
        run = runner.run_joined

        def fails(*given: Any) -> Any:
            runner.run_joined = run
            raise ValueError("rank 1 cannot")

        runner.run_joined = fails
        for error in all_step(engines, asked(3)):
            assert isinstance(error, EngineUnavailableError)
            assert "rank 0: no error; rank 1: ValueError: rank 1 cannot" in str(error)
