"""Kernels of the package flashinfer-python, which is optional and imported at the first call.

Rows of these functions are refused where the package is not installed (``flashinfer_rows``).
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from phyai.errors import ConfigError


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(f"flashinfer.{name}")


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 1.0) -> Tensor:
    """Return ``reference.rms_norm``, fp16 and bf16.

    Shapes: x [..., W], weight [W] fp32 -> [..., W].
    Rounding: offset + weight is rounded to the dtype of x first, which the reference does not do.
    """
    scale = (weight.float() + offset).to(x.dtype)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out: Tensor = _module("norm").rmsnorm(rows, scale, eps=eps)
    return out.view(x.shape)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """Return ``reference.attention`` without a mask, a row of the batch at a time.

    Shapes: q [B, T, H, D]; k, v [B, S, K, D] with contiguous head vectors -> [B, T, H, D].
    backend: of the prefill kernel: auto, fa2, fa3, cudnn or trtllm-gen.
    Rounding: scores and softmax in fp32.
    Raises: ConfigError for a mask or bias: rows are chosen by ``masked`` at construction.
    """
    if key_mask is not None or bias is not None:
        raise ConfigError(
            "attention of FlashInfer must be without key_mask and bias; got one. Choose the kernel "
            "with masked=True."
        )
    run = _module("prefill").single_prefill_with_kv_cache
    settings = {"causal": False, "kv_layout": "NHD", "sm_scale": scale, "backend": backend}
    return torch.stack([run(q[i], k[i], v[i], **settings) for i in range(q.shape[0])])
