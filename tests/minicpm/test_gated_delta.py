"""The gated delta rule: formula, chunks against steps, states, padding, hostile gates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.models.minicpm_robot.network.text_cases import delta_case
from phyai.models.minicpm_robot.ops import chunked, reference
from tests.minicpm.text_setup import case, close, place

ATOL = 2e-5
LENGTHS = (1, 63, 64, 65, 133, 200, 1000)
BOTH = pytest.mark.parametrize("op", [reference.gated_delta_rule, chunked.gated_delta_rule])


def drawn(
    tokens: int, rows: int = 2, heads: tuple[int, int] = (2, 2), dims: tuple[int, int] = (16, 24)
) -> list[Tensor]:
    """Return q, k, v, g and beta of correlated tokens."""
    generator = torch.Generator().manual_seed(tokens + heads[1])

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    key, value = heads
    q, k = (draw(rows, tokens, key, dims[0]) + draw(rows, 1, key, dims[0]) for _ in range(2))
    g = -torch.nn.functional.softplus(draw(rows, tokens, value)) * draw(value).exp()
    beta = draw(rows, tokens, value).sigmoid()
    return [q, k, draw(rows, tokens, value, dims[1]), g, beta]


def first(rows: int, heads: int, dims: tuple[int, int] = (16, 24)) -> Tensor:
    return torch.randn(rows, heads, *dims, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_chunks_equal_steps(tokens: int, with_state: bool) -> None:
    inputs = drawn(tokens)
    state = first(2, 2) if with_state else None
    got, want = (op(*inputs, state) for op in (chunked.gated_delta_rule,
                                               reference.gated_delta_rule))  # fmt: skip
    close(got[0], want[0], ATOL)
    close(got[1], want[1], ATOL)


@pytest.mark.parametrize("dims", [(128, 128), (5, 7)])
@pytest.mark.parametrize("heads", [(1, 1), (2, 6)])
def test_grouped_heads(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    inputs = drawn(70, 1, heads, dims)
    got, want = chunked.gated_delta_rule(*inputs), reference.gated_delta_rule(*inputs)
    close(got[0], want[0], ATOL)
    close(got[1], want[1], ATOL)
    each = [x.repeat_interleave(heads[1] // heads[0], dim=2) for x in inputs[:2]]
    close(reference.gated_delta_rule(*each, *inputs[2:])[0], want[0], 1e-6)


@BOTH
def test_the_formula_in_float64(op: object) -> None:
    q, k, v, g, beta = drawn(5, 1, (1, 1), (4, 3))
    wide = [x[0, :, 0].double() for x in (q, k, v, g, beta)]
    state, reads = torch.zeros(4, 3, dtype=torch.float64), []
    for q_t, k_t, v_t, g_t, b_t in zip(*wide, strict=True):
        q_t, k_t = (x / (x.square().sum() + 1e-6).sqrt() for x in (q_t, k_t))
        state = state * g_t.exp()
        state = state + torch.outer(k_t, b_t * (v_t - state.T @ k_t))
        reads.append(state.T @ q_t / 2)
    out, last = op(q, k, v, g, beta)  # type: ignore[operator]
    close(out[0, :, 0].double(), torch.stack(reads), 1e-6)
    close(last[0, 0].double(), state, 1e-6)


@pytest.mark.parametrize("strong", [-3.0, -20.0, -200.0, -1e5, -float("inf")])
def test_strong_and_sudden_decays(strong: float) -> None:
    """Sums of g grow large: exponents must be differences, taken where they are exact."""
    inputs = drawn(130)
    g = torch.full_like(inputs[3], -1e-3)
    g[:, ::3] = strong
    g[:, 40:] = -1e-3
    inputs[3] = g
    state = first(2, 2)
    got, want = chunked.gated_delta_rule(*inputs, state), reference.gated_delta_rule(*inputs, state)
    assert all(x.isfinite().all() for x in got)
    close(got[0], want[0], ATOL)
    close(got[1], want[1], ATOL)


def test_equal_keys_do_not_blow_up() -> None:
    inputs = drawn(200)
    inputs[1] = inputs[1][:, :1].expand_as(inputs[1]).contiguous()
    inputs[3], inputs[4] = torch.zeros_like(inputs[3]), torch.full_like(inputs[4], 0.999)
    got, want = chunked.gated_delta_rule(*inputs), reference.gated_delta_rule(*inputs)
    close(got[0], want[0], ATOL)


@BOTH
def test_a_state_continues(op: object) -> None:
    inputs = drawn(150)
    whole, last = op(*inputs)  # type: ignore[operator]
    head, middle = op(*(x[:, :71] for x in inputs))  # type: ignore[operator]
    kept = middle.clone()
    tail, end = op(*(x[:, 71:] for x in inputs), middle)  # type: ignore[operator]
    close(torch.cat([head, tail], dim=1), whole, ATOL)
    close(end, last, ATOL)
    assert torch.equal(middle, kept), "the given state was written"
    none = op(*inputs, None, False)  # type: ignore[operator]
    assert none[1] is None
    assert torch.equal(none[0], whole)


@BOTH
def test_no_token_leaves_the_state(op: object) -> None:
    inputs, state = drawn(3), first(2, 2)
    for given, want in ((state, state), (None, torch.zeros_like(state))):
        out, last = op(*(x[:, :0] for x in inputs), given)  # type: ignore[operator]
        assert out.shape == (2, 0, 2, 24)
        assert torch.equal(last, want)


@BOTH
def test_tokens_without_gates_leave_the_state(op: object) -> None:
    """Rows of unequal length, padded behind: each row's state is that of its own tokens."""
    inputs = drawn(100)
    lengths = (37, 100)
    for row, length in enumerate(lengths):
        for x in inputs[3:]:
            x[row, length:] = 0.0
    out, state = op(*inputs)  # type: ignore[operator]
    for row, length in enumerate(lengths):
        alone, last = op(*(x[row : row + 1, :length] for x in inputs))  # type: ignore[operator]
        close(out[row : row + 1, :length], alone, 1e-6)
        close(state[row : row + 1], last, 1e-6)


@BOTH
def test_parts_of_a_fused_tensor(op: object) -> None:
    rows, tokens, heads, dim = 2, 9, 2, 8
    random = torch.Generator().manual_seed(5)
    joined = torch.randn(rows, tokens, 3 * heads * dim + 5, generator=random)
    q, k, v = (
        joined[..., i * heads * dim : (i + 1) * heads * dim].unflatten(-1, (heads, dim))
        for i in range(3)
    )
    beta = torch.rand(rows, tokens, heads, generator=random)
    g = -torch.rand(rows, tokens, heads, generator=random)
    kept = joined.clone()
    got = op(q, k, v, g, beta)  # type: ignore[operator]
    want = reference.gated_delta_rule(*(x.contiguous() for x in (q, k, v)), g, beta)
    close(got[0], want[0], 1e-6)
    assert got[0].is_contiguous()
    assert torch.equal(joined, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_computed_in_fp32(dtype: torch.dtype) -> None:
    q, k, v, g, beta = drawn(70)
    narrow = [x.to(dtype) for x in (q, k, v)]
    want, state = reference.gated_delta_rule(*(x.float() for x in narrow), g, beta)
    for op in (reference.gated_delta_rule, chunked.gated_delta_rule):
        got, last = op(*narrow, g, beta)
        assert got.dtype == dtype
        assert last is not None
        assert last.dtype == torch.float32
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(got.float(), want, rtol=step, atol=ATOL)
        close(last, state, ATOL)


@BOTH
def test_heads_that_do_not_fit_are_refused(op: object) -> None:
    q, k, v, g, beta = drawn(3, 1, (2, 3))
    with pytest.raises(ConfigError, match="multiple of the key heads; got 3 and 2"):
        op(q, k, v, g, beta)  # type: ignore[operator]


@pytest.mark.parametrize("row", ["torch.gated_delta_rule", "chunked.gated_delta_rule"])
def test_golden_case(row: str) -> None:
    given = case("case_gdn_op")
    at = place()
    at.kernels._force["gated_delta_rule"] = row
    found = delta_case(at, given)
    assert found.keys() == {name for name in given if name.startswith(("out_", "state_"))}
    for name, value in found.items():
        close(value, given[name], ATOL)
