"""Checkpoints: from a hub id, folder or file into a model; all checks before the first copy."""

from phyai.weights.binding import (
    ClaimKey,
    DuplicateClaimError,
    Loader,
    claim,
    collect_claims,
    fused,
    mapped,
    replicated,
    sharded,
)
from phyai.weights.finite import FiniteSource
from phyai.weights.loading import (
    Progress,
    check_given,
    load_pretrained,
    run_post_load,
    update_tensors,
)
from phyai.weights.matching import Remap, remapper
from phyai.weights.opening import Source, merge_peft, open_source, tensor_index
from phyai.weights.packing import Packs, refuse_empty, unpacked
from phyai.weights.peft import AdapterConfig, PeftSource
from phyai.weights.random_init import Scheme, randomize
from phyai.weights.report import LoadReport
from phyai.weights.safetensors_files import SafetensorsSource
from phyai.weights.saving import save_safetensors, save_sharded
from phyai.weights.tensor_source import Region, TensorInfo, TensorSource

__all__ = [
    "AdapterConfig",
    "ClaimKey",
    "DuplicateClaimError",
    "FiniteSource",
    "LoadReport",
    "Loader",
    "Packs",
    "PeftSource",
    "Progress",
    "Region",
    "Remap",
    "SafetensorsSource",
    "Scheme",
    "Source",
    "TensorInfo",
    "TensorSource",
    "check_given",
    "claim",
    "collect_claims",
    "fused",
    "load_pretrained",
    "mapped",
    "merge_peft",
    "open_source",
    "randomize",
    "refuse_empty",
    "remapper",
    "replicated",
    "run_post_load",
    "save_safetensors",
    "save_sharded",
    "sharded",
    "tensor_index",
    "unpacked",
    "update_tensors",
]
