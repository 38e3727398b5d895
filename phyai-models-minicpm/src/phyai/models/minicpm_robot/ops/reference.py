"""Plain torch truth of the ops: the formula and the rounding points the fast rows must match.

Dims: B rows, T tokens, K key heads, H value heads (a multiple of K; key head i serves the value
heads i * H/K and following), D dims of a key head, E dims of a value head, C channels. "Round"
means one cast to the activation dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from phyai.errors import ConfigError

NORM_EPS = 1e-6
"""Added to the squared length of a query or key."""


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    final: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return what each token reads, and the state S after the last one (None unless ``final``).

    Per head and token, q and k scaled to length one, q also by D^-0.5:
        S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  out = S^T q
    Shapes: q, k [B, T, K, D]; v [B, T, H, E]; g (at most 0), beta float32 [B, T, H]; state float32
        [B, H, D, E], None = zeros -> [B, T, H, E] of v's dtype, float32 [B, H, D, E].
    A token with g = 0 and beta = 0 leaves the state as it is: that is how padding is skipped.
    Rounding: all in fp32, the result is rounded once.
    Raises: ConfigError when H is no multiple of K.
    """
    check_heads(k, v)
    group = v.shape[2] // k.shape[2]
    queries = _unit(q.float()).repeat_interleave(group, 2) * q.shape[3] ** -0.5
    keys = _unit(k.float()).repeat_interleave(group, 2)
    values, decays = v.float(), g.float().exp()
    held = first_state(k, v) if state is None else state.float()
    out = torch.empty_like(v)
    for t in range(v.shape[1]):
        key = keys[:, t, :, :, None]
        held = held * decays[:, t, :, None, None]
        known = (held * key).sum(dim=2)
        added = beta[:, t, :, None] * (values[:, t] - known)
        held = held + key * added[:, :, None]
        out[:, t] = (held * queries[:, t, :, :, None]).sum(dim=2).to(v.dtype)
    return out, held if final else None


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + NORM_EPS)


def first_state(k: Tensor, v: Tensor) -> Tensor:
    """Return the zero state [B, H, D, E]."""
    return v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)


def check_heads(k: Tensor, v: Tensor) -> None:
    """Raise ConfigError unless each key head serves a whole number of value heads."""
    if v.shape[2] % k.shape[2]:
        raise ConfigError(
            "gated delta value heads must be a multiple of the key heads; got "
            f"{v.shape[2]} and {k.shape[2]}. Check the head counts of the model config."
        )


def short_conv(x: Tensor, weight: Tensor, before: Tensor | None = None) -> Tensor:
    """Return silu of each channel's causal convolution over the tokens.

    Shapes: x [B, T, C]; weight [taps, C], the last tap is the token's own; before: the inputs in
        front of x [B, N, C], at least taps - 1 of them, None = zeros -> [B, T, C].
    Rounding: the sum is in fp32 and rounded, then the activation.
    """
    taps, width = weight.shape
    joined = torch.cat([history(x, taps, before), x], dim=1).float()
    mixed = functional.conv1d(joined.transpose(1, 2), weight.float().t().unsqueeze(1), groups=width)
    return functional.silu(mixed.transpose(1, 2).to(x.dtype))


def history(x: Tensor, taps: int, before: Tensor | None) -> Tensor:
    """Return the taps - 1 inputs in front of x.

    Raises: ConfigError when ``before`` holds fewer.
    """
    rows, _, width = x.shape
    if before is None:
        return x.new_zeros(rows, taps - 1, width)
    if before.shape[1] < taps - 1:
        raise ConfigError(
            f"short convolution of {taps} taps must have {taps - 1} inputs in front; got "
            f"{before.shape[1]}. Keep as many columns as the kernel is wide."
        )
    return before[:, before.shape[1] - (taps - 1) :]


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x * rsqrt(mean(x^2) + eps) * weight * silu(z) over each head.

    Shapes: x, z [..., H, E], weight [E] fp32, plain (no offset).
    Rounding: all in fp32, the result is rounded once.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.float() * functional.silu(z.float())).to(x.dtype)
