"""Named precision policies: which dtype each part of the network runs in.

Source: the two columns of the official mixed-precision rules. ``bf16_lerobot`` keeps the vision
tower and the projector in float32, ``bf16_openpi`` runs them in bfloat16. Norm parameters, adaRMS
projections, the state, action and time heads, the solver variable and the Euler update are float32
in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phyai.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Precision:
    """vision: tower and projector.  stack: token embedding, both decoder stacks, K/V.

    rope_freq: rounding of the rotary frequencies. LeRobot casts them to bfloat16 together with the
    module (seen in its outputs); the JAX original, which trained the weights, keeps float32.
    """

    name: str
    vision: torch.dtype
    stack: torch.dtype
    rope_freq: torch.dtype = torch.float32

    @property
    def rounding(self) -> str:
        """Return ``free`` where faster kernels may keep more bits than the official code.

        That is ``bf16_openpi``: its official result comes from a compiler that fuses already.
        ``bf16_lerobot`` reproduces an implementation.
        """
        return "free" if self.name == "bf16_openpi" else "official"


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp32", torch.float32, torch.float32),
        Precision("bf16_lerobot", torch.float32, torch.bfloat16, torch.bfloat16),
        Precision("bf16_openpi", torch.bfloat16, torch.bfloat16),
    )
}
ALIASES = {"bf16": "bf16_openpi", "float32": "fp32", "bfloat16": "bf16_openpi"}


def choose_precision(
    name: str | None, engine_dtype: torch.dtype, vision_dtype: torch.dtype | None
) -> Precision:
    """Return the policy by name, else the one the engine's and the vision tower's dtypes mean.

    Raises: ConfigError for an unknown name or a dtype no policy has.
    """
    if name is not None:
        policy = PRECISIONS.get(ALIASES.get(name, name))
        if policy is None:
            known = sorted([*PRECISIONS, *ALIASES])
            raise ConfigError(
                f"precision must be one of {', '.join(known)}; got {name!r}."
                + did_you_mean(name, known)
            )
        return policy
    if engine_dtype == torch.float32:
        return PRECISIONS["fp32"]
    if engine_dtype == torch.bfloat16:
        return PRECISIONS["bf16_lerobot" if vision_dtype == torch.float32 else "bf16_openpi"]
    raise ConfigError(
        f"params_dtype must be float32 or bfloat16 for this model; got {engine_dtype}. "
        "Set config.device.params_dtype or precision."
    )
