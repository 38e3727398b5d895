"""Plain torch truth of every op: the formula and the rounding points the fast rows must match.

The rounding points are those of the published models (mixed bf16: activations and matmuls in the
activation dtype; norms, modulation, masks and softmax in fp32). With fp32 inputs nothing is
rounded below fp32. "Round" below means one cast to the activation dtype.

Dims: B rows, T queries, S keys, H query heads, K key/value heads, D head dim, W width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from phyai.errors import ConfigError

MASK_VALUE = -2.3819763e38
"""Added to a hidden score. Finite: a fully masked row becomes a uniform average, not NaN."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias.

    Shapes: x [..., W_in], weight [W_out, W_in], bias [W_out], one dtype for all three.
    Rounding: products accumulate in fp32, the result is rounded once.
    Raises: ConfigError when the dtypes differ; the caller decides where to cast.
    """
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        got = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        raise ConfigError(
            f"linear input, weight and bias must share one dtype; got {got!r}. "
            "Cast the input first."
        )
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 1.0) -> Tensor:
    """Return x * rsqrt(mean(x^2) + eps) * (offset + weight).

    Shapes: x [..., W], weight [W] fp32. offset 1: weights are stored as the distance from one;
    offset 0: plain weights.
    Rounding: all in fp32, the result is rounded once.
    """
    return (_normalised(x, eps) * (weight.float() + offset)).to(x.dtype)


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return s = x + y and ``rms_norm(s)``.

    Shapes: x, y [..., W], weight [W] fp32 -> two [..., W].
    Rounding: the sum is rounded, then as ``rms_norm``.
    """
    total = x + y
    return total, rms_norm(total, weight, eps, offset)


def ada_rms_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return x * rsqrt(mean(x^2) + eps) * (1 + scale) + shift.

    Shapes: x [B, T, W]; scale, shift fp32, broadcastable to x: [W], [B, 1, W] or [B, T, W].
    Rounding: all in fp32, the result is rounded once.
    """
    return (_normalised(x, eps) * (1.0 + scale.float()) + shift.float()).to(x.dtype)


def ada_layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * (1 + scale) + shift.

    Shapes: as ``ada_rms_norm``.
    Rounding: all in fp32, the result is rounded once.
    """
    normed = F.layer_norm(x.float(), (x.shape[-1],), eps=eps)
    return (normed * (1.0 + scale.float()) + shift.float()).to(x.dtype)


def _normalised(x: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)


def gated_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """Return x + gate * y.

    Shapes: x, y [B, T, W]; gate broadcastable to them, any dtype.
    Rounding: gate is rounded, then the product, then the sum.
    """
    return x + gate.to(x.dtype) * y


def gated_ada_rms_norm(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return s = ``gated_residual(x, y, gate)`` and ``ada_rms_norm(s, scale, shift)``.

    Shapes and rounding: as those two.
    """
    total = gated_residual(x, y, gate)
    return total, ada_rms_norm(total, scale, shift, eps)


def gated_ada_layer_norm(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return s = ``gated_residual(x, y, gate)`` and ``ada_layer_norm(s, scale, shift)``.

    Shapes and rounding: as those two.
    """
    total = gated_residual(x, y, gate)
    return total, ada_layer_norm(total, scale, shift, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias.

    Shapes: x [..., W], weight and bias [W]; their dtype may differ from that of x.
    Rounding: all in fp32, the result is rounded once.
    """
    normed = F.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps)
    return normed.to(x.dtype)


def add_layer_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return s = x + y and ``layer_norm(s)``.

    Shapes: x, y [..., W], weight and bias [W] -> two [..., W].
    Rounding: the sum is rounded, then as ``layer_norm``.
    """
    total = x + y
    return total, layer_norm(total, weight, bias, eps)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), rounded once."""
    return F.gelu(x, approximate="tanh")


def gelu_erf(x: Tensor) -> Tensor:
    """Return x Phi(x), Phi the normal distribution function, rounded once."""
    return F.gelu(x)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Return gelu_tanh(gate) * up.

    Shapes: gate_up [..., 2 I], gate the first half -> [..., I].
    Rounding: the activation is rounded, then the product.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def bias_gelu_tanh(x: Tensor, bias: Tensor) -> Tensor:
    """Return gelu_tanh(x + bias).

    Shapes: x [..., N], bias [N].
    Rounding: the sum is rounded, then the activation.
    """
    return F.gelu(x + bias.to(x.dtype), approximate="tanh")


def scale_bias(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return x * row_scale * scale + bias: the result of a product of quantised matrices.

    Shapes: x [..., N] int32 or float, scale [N], row_scale one value per row of x, bias [N].
    Rounding: all in fp32, the result is rounded once, to ``dtype``.
    """
    out = x.float()
    if row_scale is not None:
        out = out * row_scale.float().reshape(*x.shape[:-1], 1)
    out = out * scale.float()
    return (out if bias is None else out + bias.float()).to(dtype)


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), rounded once."""
    return F.silu(x)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up.

    Shapes: gate_up [..., 2 I], gate the first half -> [..., I].
    Rounding: the activation is rounded, then the product.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_cos_sin(
    positions: Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    freq_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position * theta^(-2 i / head_dim), i = 0 .. head_dim/2 - 1.

    Shapes: positions int64 [...] -> two [..., head_dim]; both halves hold the same angles.
    Rounding: angles, cos and sin in fp32, then rounded to ``dtype``. The frequencies are first
        rounded to ``freq_dtype``: some official code casts them along with the weights.
    """
    even = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    inv_freq = (1.0 / theta ** (even / head_dim)).to(freq_dtype).float()
    angles = positions.float().unsqueeze(-1) * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x rotated in the pairs (x_i, x_{i + D/2}): x * cos + (-x_hi, x_lo) * sin.

    Shapes: x [B, T, H, D]; cos, sin [B, T, D] from ``rope_cos_sin``.
    Rounding: each product and the sum, in the dtype of x.
    """
    low, high = x.chunk(2, dim=-1)
    rotated = torch.cat((-high, low), dim=-1)
    return x * cos.to(x.dtype).unsqueeze(-2) + rotated * sin.to(x.dtype).unsqueeze(-2)


def apply_rope_fp32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``apply_rope`` of x.

    Shapes: as ``apply_rope``.
    Rounding: all in fp32, the result is rounded once.
    """
    return apply_rope(x.float(), cos.float(), sin.float()).to(x.dtype)


def rms_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Return ``apply_rope`` of ``rms_norm`` over each head, with plain weights (offset 0).

    Shapes: x [B, T, H, D], weight [D] fp32; cos, sin [B, T, D].
    Rounding: the norm is rounded, then as ``apply_rope``.
    """
    return apply_rope(rms_norm(x, weight, eps, 0.0), cos, sin)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T + mask) v per head.

    Shapes: q [B, T, H, D]; k, v [B, S, K, D], H a multiple of K -> [B, T, H, D]. k and v may be
        strided views.
        key_mask: bool [B, S], False where nobody may look.
        bias: additive, broadcastable to [B, H, T, S]; values below MASK_VALUE count as MASK_VALUE.
    The query heads of one key/value head are folded into its query dim; K and V are not expanded.
    Rounding: q k^T is rounded, then its product with scale; mask and softmax in fp32;
        probabilities are rounded to the dtype of v; the result is rounded once.
    Raises: ConfigError when H is no multiple of K.
    """
    return attention_by(torch.matmul, q, k, v, scale, key_mask, bias)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return ``attention`` in which query t sees keys 0 .. t.

    Shapes: q [B, T, H, D]; k, v [B, T, K, D], H a multiple of K -> [B, T, H, D].
    Rounding: as ``attention``.
    Raises: ConfigError when H is no multiple of K, or keys and queries differ in number.
    """
    check_causal(q, k)
    tokens = q.shape[1]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    hidden = torch.zeros(tokens, tokens, device=q.device).masked_fill(later, MASK_VALUE)
    return attention(q, k, v, scale, bias=hidden)


def check_causal(q: Tensor, k: Tensor) -> None:
    """Raise ConfigError unless there is a key for each query."""
    if q.shape[1] != k.shape[1]:
        raise ConfigError(
            "causal attention must have as many keys as queries; got "
            f"{k.shape[1]} and {q.shape[1]}. Pass keys and values of the same tokens."
        )


def attention_by(
    product: Callable[[Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    key_mask: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """``attention`` with another batched matrix product; all other roundings are the same."""
    folded = fold_queries(q, k.shape[2])
    rows, kv_heads, folded_len, _ = folded.shape
    scores = product(folded, k.permute(0, 2, 3, 1)) * scale
    mask = additive_mask(key_mask, bias)
    if mask is not None:
        group = q.shape[2] // kv_heads
        grouped = scores.float().view(rows, kv_heads, q.shape[1], group, -1)
        scores = (grouped + fold_mask(mask, kv_heads)).view(rows, kv_heads, folded_len, -1)
    probs = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return unfold_queries(product(probs, v.permute(0, 2, 1, 3)), q.shape[2])


def fold_queries(q: Tensor, kv_heads: int) -> Tensor:
    """Return q [B, T, H, D] as [B, K, T * H/K, D]; a view when K is 1."""
    rows, length, heads, dim = q.shape
    if heads % kv_heads:
        raise ConfigError(
            f"attention query heads must be a multiple of the key/value heads; got {heads} and "
            f"{kv_heads}. Check the head counts of the model config."
        )
    grouped = q.reshape(rows, length, kv_heads, heads // kv_heads, dim)
    return grouped.permute(0, 2, 1, 3, 4).reshape(rows, kv_heads, -1, dim)


def unfold_queries(out: Tensor, heads: int) -> Tensor:
    """Return [B, K, T * H/K, D] as [B, T, H, D]."""
    rows, kv_heads, folded_len, dim = out.shape
    group = heads // kv_heads
    grouped = out.reshape(rows, kv_heads, folded_len // group, group, dim)
    return grouped.permute(0, 2, 1, 3, 4).reshape(rows, -1, heads, dim)


def fold_mask(mask: Tensor, kv_heads: int) -> Tensor:
    """Return an additive mask over [B, H, T, S] as one over [B, K, T, H/K, S]."""
    if mask.shape[1] == 1:
        return mask.unsqueeze(3)
    rows, heads, length, keys = mask.shape
    return mask.reshape(rows, kv_heads, heads // kv_heads, length, keys).transpose(2, 3)


def additive_mask(key_mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return the fp32 mask broadcastable to [B, H, T, S], or None when everything is visible.

    A key that is hidden twice is hidden once: two MASK_VALUEs would add up to -inf.
    """
    mask = None
    if bias is not None:
        mask = bias.float().clamp(min=MASK_VALUE)
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if key_mask is not None:
        visible = key_mask[:, None, None, :]
        base = mask if mask is not None else torch.zeros((), device=key_mask.device)
        mask = torch.where(visible, base, MASK_VALUE)
    return mask


def kv_write(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write values[m] to cache[slots[m]] in place.

    Shapes: cache [N, K, D], slots int64 [M], values [M, K, D] in the dtype of the cache.
    Of several writes to one slot any may win (only the padding slot takes several).
    """
    cache.index_copy_(0, slots, values)


def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """Return q rotated; write k rotated, and v, to the slots of their caches.

    Shapes: q [B, T, H, D]; k, v [B, T, K, D]; cos, sin [B, T, D]; caches [N, K, D]; slots int64
        [B * T], tokens of a row side by side.
    Rounding: as ``apply_rope``.
    """
    kv_write(k_cache, slots, apply_rope(k, cos, sin).flatten(0, 1))
    kv_write(v_cache, slots, v.flatten(0, 1))
    return apply_rope(q, cos, sin)
