"""The models that can be paired, by the name of their plugin."""

from __future__ import annotations

from benchmarks.peers.base import Refused
from benchmarks.peers.cosmos.model import COSMOS3, COSMOS3_POLICY
from benchmarks.peers.groot.model import GR00T_N17
from benchmarks.peers.minicpm.model import MINICPM_ROBOT
from benchmarks.peers.model import Model
from benchmarks.peers.pi.model import PI0, PI05

MODELS = {
    model.name: model for model in (PI05, PI0, GR00T_N17, MINICPM_ROBOT, COSMOS3_POLICY, COSMOS3)
}


def model_of(name: str) -> Model:
    """Return the model of this name.  Raises: Refused when there is none."""
    if name not in MODELS:
        raise Refused(f"model must be one of {', '.join(MODELS)}; got {name!r}.")
    return MODELS[name]
