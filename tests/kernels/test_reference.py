"""reference.py against float64 formulations written another way, and the sdpa row against it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.kernels import MASK_VALUE, cpu, reference

# One rounding of the result costs half an ulp; ops with several rounding points get a few.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
DTYPES = tuple(TOLERANCE)
SHAPES = ((1, 1, 2), (2, 9, 14), (3, 7, 42))


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def check(got: Tensor, want: np.ndarray, dtype: torch.dtype, factor: float = 1.0) -> None:
    assert got.dtype == dtype
    want_tensor = torch.from_numpy(np.ascontiguousarray(want))
    assert got.shape == want_tensor.shape
    tol = TOLERANCE[dtype] * factor
    torch.testing.assert_close(got.double(), want_tensor.double(), rtol=tol, atol=tol)


def f64(tensor: Tensor) -> np.ndarray:
    return tensor.double().numpy()


# ---------------------------------------------------------------- linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_is_a_sum_of_products(dtype: torch.dtype, with_bias: bool) -> None:
    x, w = draw(2, 5, 7, dtype=dtype), draw(3, 7, dtype=dtype)
    b = draw(3, dtype=dtype) if with_bias else None
    want = np.einsum("bti,oi->bto", f64(x), f64(w)) + (0 if b is None else f64(b))
    check(reference.linear(x, w, b), want, dtype, 3)


def test_linear_refuses_mixed_dtypes() -> None:
    with pytest.raises(ConfigError, match=r"must share one dtype; got .*bfloat16"):
        reference.linear(draw(2, 4), draw(3, 4, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match="Cast the input first"):
        reference.linear(draw(2, 4), draw(3, 4), draw(3, dtype=torch.bfloat16))


# ---------------------------------------------------------------- norms


def numpy_rms(x: Tensor, eps: float) -> np.ndarray:
    wide = f64(x)
    root = np.sqrt(np.square(wide).sum(-1, keepdims=True) / wide.shape[-1] + eps)
    return np.asarray(wide / root)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w = draw(*shape, dtype=dtype), draw(shape[-1], seed=1)
    check(reference.rms_norm(x, w, 1e-6), numpy_rms(x, 1e-6) * (1 + f64(w)), dtype, 2)
    check(reference.rms_norm(x, w, 1e-6, offset=0.0), numpy_rms(x, 1e-6) * f64(w), dtype, 2)


def test_rms_norm_eps_is_inside_the_root() -> None:
    x = torch.full((1, 4), 1e-3)
    got = reference.rms_norm(x, torch.zeros(4), eps=1e-6)
    torch.testing.assert_close(got, torch.full((1, 4), 1 / math.sqrt(2)))


def test_rms_norm_keeps_fp32_until_the_last_cast() -> None:
    """Rounding to bf16 between norm and weight would show as another value."""
    x, w = draw(4, 64, dtype=torch.bfloat16), draw(64, seed=3)
    once = (torch.from_numpy(numpy_rms(x, 1e-6) * (1 + f64(w)))).to(torch.bfloat16)
    twice = torch.from_numpy(numpy_rms(x, 1e-6)).to(torch.bfloat16) * (1 + w).to(torch.bfloat16)
    got = reference.rms_norm(x, w, 1e-6)
    assert (got == once).float().mean() > 0.99
    assert (twice == once).float().mean() < 0.9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_ada_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype)
    per_row, per_token, shared = (shape[0], 1, shape[2]), shape, (shape[2],)
    for mod in (per_row, per_token, shared):
        scale, shift = draw(*mod, seed=1), draw(*mod, seed=2)
        want = numpy_rms(x, 1e-6) * (1 + f64(scale)) + f64(shift)
        check(reference.ada_rms_norm(x, scale, shift, 1e-6), want, dtype, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("param_dtype", [torch.float32, None])
def test_layer_norm(dtype: torch.dtype, param_dtype: torch.dtype | None) -> None:
    x = draw(2, 3, 42, dtype=dtype) + 1
    w, b = draw(42, dtype=param_dtype or dtype), draw(42, dtype=param_dtype or dtype, seed=9)
    wide = f64(x)
    centred = wide - wide.mean(-1, keepdims=True)
    want = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-6) * f64(w) + f64(b)
    check(reference.layer_norm(x, w, b, 1e-6), want, dtype, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_residual(dtype: torch.dtype) -> None:
    x, y, gate = draw(2, 3, 8, dtype=dtype), draw(2, 3, 8, dtype=dtype, seed=1), draw(2, 1, 8)
    got = reference.gated_residual(x, y, gate)
    check(got, f64(x) + f64(gate) * f64(y), dtype, 3)
    assert torch.equal(got, (x + (gate.to(dtype) * y)))


# ---------------------------------------------------------------- activations


def numpy_gelu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(dtype: torch.dtype) -> None:
    x = draw(2, 5, 14, dtype=dtype) * 3
    check(reference.gelu_tanh(x), numpy_gelu(f64(x)), dtype)
    check(reference.silu(x), f64(x) / (1 + np.exp(-f64(x))), dtype)
    gate, up = f64(x)[..., :7], f64(x)[..., 7:]
    check(reference.gelu_tanh_mul(x), numpy_gelu(gate) * up, dtype, 3)


def test_gelu_is_the_tanh_form() -> None:
    x = torch.linspace(-3, 3, 101)
    exact = torch.nn.functional.gelu(x)
    assert (reference.gelu_tanh(x) - exact).abs().max() > 1e-4


# ---------------------------------------------------------------- rope


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_rotates_complex_pairs(dtype: torch.dtype) -> None:
    """The pair (x_i, x_{i+D/2}) is one complex number, turned by position * theta^(-2i/D)."""
    positions = torch.tensor([[-1, 0, 3], [7, 900, 1017]])
    x = draw(2, 3, 4, 10, dtype=dtype)
    cos, sin = reference.rope_cos_sin(positions, 10, 10000.0, dtype)
    assert cos.shape == sin.shape == (2, 3, 10)
    assert cos.dtype == sin.dtype == dtype
    angle = positions.double().numpy()[..., None] * 10000.0 ** (-np.arange(0, 10, 2) / 10)
    pair = (f64(x)[..., :5] + 1j * f64(x)[..., 5:]) * np.exp(1j * angle)[:, :, None, :]
    want = np.concatenate((pair.real, pair.imag), axis=-1)
    # fp32 angles of ~1e3 rad carry ~6e-5 rad.
    check(reference.apply_rope(x, cos, sin), want, dtype, 100 if dtype == torch.float32 else 3)


def test_rope_angles_are_fp32_even_for_bf16() -> None:
    cos, _ = reference.rope_cos_sin(torch.tensor([1001]), 8, 10000.0, torch.bfloat16)
    assert cos[0, 0].item() == pytest.approx(math.cos(1001.0), abs=4e-3)


def test_rope_frequencies_may_be_rounded() -> None:
    positions = torch.tensor([1, 50])
    cos, sin = reference.rope_cos_sin(positions, 8, 1e4, torch.float32, torch.bfloat16)
    freq = torch.tensor([1e4 ** (-i / 4) for i in range(4)]).bfloat16().double().repeat(2)
    want = positions.double()[:, None] * freq
    torch.testing.assert_close(cos.double(), want.cos(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin.double(), want.sin(), rtol=1e-5, atol=1e-5)
    assert not torch.equal(sin, reference.rope_cos_sin(positions, 8, 1e4, torch.float32)[1])


def test_rope_depends_on_relative_position_only() -> None:
    q, k = draw(1, 1, 1, 16), draw(1, 1, 1, 16, seed=5)

    def score(a: int, b: int) -> float:
        turned = [
            reference.apply_rope(x, *reference.rope_cos_sin(torch.tensor([[p]]), 16, 1e4, x.dtype))
            for x, p in ((q, a), (k, b))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)


# ---------------------------------------------------------------- attention


def numpy_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    """Per row, head and query: a plain loop, keys repeated per query head."""
    rows, length, heads, dim = q.shape
    repeat = heads // k.shape[2]
    out = np.zeros((rows, length, heads, dim))
    for b in range(rows):
        for h in range(heads):
            keys, values = f64(k)[b, :, h // repeat], f64(v)[b, :, h // repeat]
            for t in range(length):
                logits = keys @ f64(q)[b, t, h] * scale + bias[b, h, t]
                logits = np.where(hidden[b], MASK_VALUE, logits)
                weights = np.exp(logits - logits.max())
                out[b, t, h] = weights @ values / weights.sum()
    return out


CASES = {  # B, T, S, H, K, D
    "mqa": (2, 5, 11, 8, 1, 6),
    "gqa": (2, 3, 7, 6, 2, 10),
    "mha": (1, 4, 4, 3, 3, 5),
    "one": (1, 1, 1, 1, 1, 2),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masks", ["none", "key", "bias", "both"])
@pytest.mark.parametrize("case", CASES)
def test_attention(case: str, masks: str, dtype: torch.dtype) -> None:
    b, t, s, h, kv, d = CASES[case]
    q, k, v = (
        draw(b, n, m, d, dtype=dtype, seed=i) for i, (n, m) in enumerate([(t, h), (s, kv), (s, kv)])
    )
    hidden, bias = np.zeros((b, s), bool), np.zeros((b, h, t, s))
    key_mask = bias_tensor = None
    if masks in ("key", "both"):
        key_mask = torch.arange(s)[None] < torch.tensor([[max(1, s - 1 - i)] for i in range(b)])
        hidden = ~key_mask.numpy()
    if masks in ("bias", "both"):
        bias_tensor = draw(h, t, s, seed=7)
        bias = np.broadcast_to(f64(bias_tensor), bias.shape)
    want = numpy_attention(q, k, v, d**-0.5, hidden, bias)
    got = reference.attention(q, k, v, d**-0.5, key_mask, bias_tensor)
    check(got, want, dtype, 4)
    fused = cpu.sdpa_attention(q, k, v, d**-0.5, key_mask, bias_tensor)
    check(fused, want, dtype, 4)
    if dtype == torch.float32:
        torch.testing.assert_close(fused, got, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shape", [(), (5,), (4, 5), (1, 4, 5), (6, 4, 5), (2, 1, 1, 5), (2, 6, 4, 5)]
)
def test_attention_bias_broadcasts(shape: tuple[int, ...]) -> None:
    q, k, v = draw(2, 4, 6, 8), draw(2, 5, 2, 8, seed=1), draw(2, 5, 2, 8, seed=2)
    bias = draw(*shape, seed=3) if shape else torch.tensor(0.5)
    wide = bias.expand(2, 6, 4, 5)
    want = numpy_attention(q, k, v, 0.3, np.zeros((2, 5), bool), f64(wide))
    for fn in (reference.attention, cpu.sdpa_attention):
        check(fn(q, k, v, 0.3, bias=bias), want, torch.float32, 4)


@pytest.mark.parametrize("fn", [reference.attention, cpu.sdpa_attention])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fully_masked_rows_stay_finite(fn: object, dtype: torch.dtype) -> None:
    assert callable(fn)
    q, k, v = (draw(2, n, m, 4, dtype=dtype) for n, m in ((3, 2), (5, 1), (5, 1)))
    mask = torch.tensor([[True] * 5, [False] * 5])
    for bias in (None, torch.full((3, 5), MASK_VALUE), torch.full((3, 5), -torch.inf)):
        out = fn(q, k, v, 0.5, mask, bias)
        assert torch.isfinite(out).all()
        if dtype != torch.float16:  # fp16 has no number low enough to drown a score
            mean = v[1].float().mean(0).expand(3, 2, 4)
            torch.testing.assert_close(out[1].float(), mean, rtol=0.02, atol=0.02)


def test_hidden_keys_have_no_influence() -> None:
    q, k, v = draw(1, 3, 4, 8), draw(1, 6, 1, 8, seed=1), draw(1, 6, 1, 8, seed=2)
    mask = torch.tensor([[True, False, True, True, False, False]])
    seen = mask[0].nonzero()[:, 0]
    for fn in (reference.attention, cpu.sdpa_attention):
        full, short = fn(q, k, v, 1.0, mask), fn(q, k[:, seen], v[:, seen], 1.0)
        torch.testing.assert_close(full, short, rtol=1e-6, atol=1e-6)


def test_folding_equals_repeated_keys() -> None:
    q, k, v = draw(2, 5, 8, 16), draw(2, 9, 2, 16, seed=1), draw(2, 9, 2, 16, seed=2)
    mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(0)) > 0.3
    bias = draw(2, 8, 5, 9, seed=3)
    wide_k, wide_v = k.repeat_interleave(4, 2), v.repeat_interleave(4, 2)
    want = reference.attention(q, wide_k, wide_v, 0.25, mask, bias)
    torch.testing.assert_close(reference.attention(q, k, v, 0.25, mask, bias), want)


def test_keys_may_be_strided_views() -> None:
    store = draw(2, 7, 3, 2, 8)  # [B, S, K, (key, value), D]
    k, v = store[:, 1:6, :, 0], store[:, 1:6, :, 1]
    assert not k.is_contiguous()
    q = draw(2, 4, 6, 8, seed=4)
    want = reference.attention(q, k.contiguous(), v.contiguous(), 0.4)
    for fn in (reference.attention, cpu.sdpa_attention):
        torch.testing.assert_close(fn(q, k, v, 0.4), want, rtol=1e-5, atol=1e-5)


def test_bf16_rounding_points() -> None:
    """Scores are rounded, rounded again after the scale, and probabilities before times V."""
    q, k, v = (draw(1, n, m, 32, dtype=torch.bfloat16, seed=n) for n, m in ((6, 2), (9, 1), (9, 1)))
    bias = draw(1, 1, 6, 9)
    got = reference.attention(q, k, v, 0.17, bias=bias)
    scores = torch.einsum("bthd,bsd->bhts", q.double(), k[:, :, 0].double()).bfloat16()
    scores = (scores.double() * 0.17).bfloat16().float() + bias
    probs = torch.softmax(scores.double(), -1).bfloat16()
    want = torch.einsum("bhts,bsd->bthd", probs.double(), v[:, :, 0].double()).bfloat16()
    assert (got == want).float().mean() > 0.98
    fused = cpu.sdpa_attention(q, k, v, 0.17, bias=bias.bfloat16().float())
    assert (fused == want).float().mean() < 0.9


def test_head_counts_must_divide() -> None:
    with pytest.raises(ConfigError, match=r"multiple of the key/value heads; got 4 and 3"):
        reference.attention(draw(1, 2, 4, 8), draw(1, 2, 3, 8), draw(1, 2, 3, 8), 1.0)


# ---------------------------------------------------------------- kv_write


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_kv_write_touches_only_its_slots(dtype: torch.dtype) -> None:
    cache = torch.zeros(7, 2, 3, dtype=dtype)
    values = torch.arange(1, 13).reshape(2, 2, 3).to(dtype)
    address = cache.data_ptr()
    reference.kv_write(cache, torch.tensor([5, 1]), values)
    assert cache.data_ptr() == address
    assert torch.equal(cache[5], values[0])
    assert torch.equal(cache[1], values[1])
    assert not cache[[0, 2, 3, 4, 6]].any()


# ---------------------------------------------------------------- fused ops


@pytest.mark.parametrize("dtype", DTYPES)
def test_ada_layer_norm(dtype: torch.dtype) -> None:
    x, scale, shift = draw(2, 3, 14, dtype=dtype) + 1, draw(2, 1, 14, seed=1), draw(14, seed=2)
    wide = f64(x)
    centred = wide - wide.mean(-1, keepdims=True)
    normed = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-6)
    want = normed * (1 + f64(scale)) + f64(shift)
    check(reference.ada_layer_norm(x, scale, shift, 1e-6), want, dtype, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_and_norm_are_the_two_ops_in_turn(dtype: torch.dtype) -> None:
    x, y, gate = draw(2, 3, 14, dtype=dtype), draw(2, 3, 14, dtype=dtype, seed=1), draw(2, 1, 14)
    a, b = draw(14, seed=2), draw(14, seed=3)
    total, gated = x + y, x + gate.to(dtype) * y
    for got, want in (
        (reference.add_rms_norm(x, y, a, 1e-6), reference.rms_norm(total, a, 1e-6)),
        (reference.add_rms_norm(x, y, a, 1e-6, 0.0), reference.rms_norm(total, a, 1e-6, 0.0)),
        (reference.add_layer_norm(x, y, a, b, 1e-6), reference.layer_norm(total, a, b, 1e-6)),
    ):
        assert torch.equal(got[0], total)
        assert torch.equal(got[1], want)
    for kind in ("rms", "layer"):
        fused = getattr(reference, f"gated_ada_{kind}_norm")(x, y, gate, a, b, 1e-6)
        assert torch.equal(fused[0], gated)
        assert torch.equal(fused[1], getattr(reference, f"ada_{kind}_norm")(gated, a, b, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_and_bias_gelu_tanh(dtype: torch.dtype) -> None:
    x, bias = draw(2, 3, 14, dtype=dtype), draw(14, dtype=dtype, seed=1)
    gate, up = np.split(f64(x), 2, axis=-1)
    check(reference.silu_mul(x), gate / (1 + np.exp(-gate)) * up, dtype, 3)
    wide = f64(x + bias)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    check(reference.bias_gelu_tanh(x, bias), 0.5 * wide * (1 + np.tanh(inner)), dtype, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_bias_undoes_a_quantised_product(dtype: torch.dtype) -> None:
    x = torch.arange(-6, 6, dtype=torch.int32).view(1, 2, 6) * 1000
    scale, rows, bias = draw(6), draw(1, 2), draw(6, dtype=dtype, seed=1)
    want = f64(x) * f64(rows)[..., None] * f64(scale) + f64(bias)
    check(reference.scale_bias(x, scale, dtype, rows, bias), want, dtype, 3)
    check(reference.scale_bias(x, scale, dtype), f64(x) * f64(scale), dtype, 3)


def test_rope_kv_write_fills_the_caches() -> None:
    q, k, v = draw(2, 3, 4, 6), draw(2, 3, 1, 6, seed=1), draw(2, 3, 1, 6, seed=2)
    cos, sin = reference.rope_cos_sin(torch.arange(3).expand(2, 3), 6, 100.0, torch.float32)
    slots = torch.tensor([7, 1, 5, 0, 3, 2])
    caches = [torch.zeros(8, 1, 6) for _ in range(2)]
    got = reference.rope_kv_write(q, k, v, cos, sin, *caches, slots)
    assert torch.equal(got, reference.apply_rope(q, cos, sin))
    assert torch.equal(caches[0][slots], reference.apply_rope(k, cos, sin).view(6, 1, 6))
    assert torch.equal(caches[1][slots], v.view(6, 1, 6))
    assert not caches[0][[4, 6]].any()
