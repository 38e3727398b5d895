"""MiniCPM-Robot against the official implementation, on every golden case of the set.

Both plugins. Every tensor that is not an input has to be compared by one of the runs of its case,
under its own name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from phyai.testing.golden import GoldenRunner
from tests.golden_cases import GoldenCase
from tests.golden_results import check_results, runners

GOLDEN_SETS = ("minicpm",)
NOT_BUILT: dict[str, str] = {}
PROMPT = ("input_ids", "pixel_values", "target_sizes", "attention_mask")
REQUEST = ("state", "noise", "embodiment_id", "num_steps")
# Kind -> what a case gives; everything else in it is a result.
INPUTS: dict[str, tuple[str, ...]] = {
    "minicpm_gdn_op": ("q", "k", "v", "g", "beta", "initial_state"),
    "minicpm_text_layers": ("x", "attn_layer_index", "mrope_positions"),
    "minicpm_vision": PROMPT,
    "minicpm_vlm": (*PROMPT, "prefix_len"),
    "minicpm_action": ("vl_embs", "attention_mask", *REQUEST),
    "minicpm_e2e": (*PROMPT, *REQUEST),
    "minicpm_preprocess": (),
    "minicpm_track_policy": (
        "input_ids",
        "attention_mask",
        "coarse_tokens",
        "fine_tokens",
        "coarse_time_indices",
        "fine_time_indices",
    ),
    "minicpm_track_pool": ("dino_tokens", "siglip_tokens"),
}
# Of .json cases: where the records are, and what a record gives.
RECORDS: dict[str, tuple[str, frozenset[str]]] = {
    "minicpm_preprocess_facts": ("images", frozenset({"index", "height", "width", "pattern_s"})),
    "minicpm_layout": (
        "cases",
        frozenset({"joint_state14", "endpose16_xyz_wxyz_gripperopen", "predicted_action80"}),
    ),
}
KINDS = frozenset({*INPUTS, *RECORDS})


@pytest.fixture(scope="module")
def runner_of() -> Iterator[Callable[[str], GoldenRunner]]:
    with runners() as made:
        yield made


def test_golden(golden_case: GoldenCase | None, runner_of: Callable[[str], GoldenRunner]) -> None:
    assert golden_case is not None, "the golden folder holds no case file"
    assert golden_case.kind in KINDS, f"unknown kind: {golden_case.problem}"
    root = golden_case.set_root or golden_case.path.parent
    results = runner_of(plugin_of(golden_case)).run(golden_case.path, root)
    check_results(results, outputs(golden_case))


def test_every_golden_case_is_consumed(unconsumed_golden_cases: list[str]) -> None:
    assert not unconsumed_golden_cases, "\n".join(unconsumed_golden_cases)


def plugin_of(case: GoldenCase) -> str:
    track = case.kind.startswith("minicpm_track_")
    return "minicpm_robot_track" if track else "minicpm_robot"


def outputs(case: GoldenCase) -> list[str]:
    """Return the names of a case's results, in records with the place and the inner keys."""
    if case.kind in INPUTS:
        return [name for name in case.names if name not in INPUTS[case.kind]]
    where, given = RECORDS[case.kind]
    found = []
    for number, record in enumerate(json.loads(case.path.read_text("utf-8"))[where]):
        for key in sorted(record.keys() - given):
            value = record[key]
            inner = [f".{name}" for name in value] if isinstance(value, dict) else [""]
            found += [f"{where}.{record.get('index', number)}.{key}{name}" for name in inner]
    return found
