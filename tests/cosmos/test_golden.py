"""Cosmos3 against the official implementation, on every golden case of the set.

Both plugins. Every tensor that is not an input has to be compared by one of the runs of its case,
under its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from phyai.testing.golden import GoldenRunner
from tests.golden_cases import GoldenCase
from tests.golden_results import check_results, runners

GOLDEN_SETS = ("cosmos3",)
NOT_BUILT: dict[str, str] = {}
# Kind -> what a case gives; everything else in it is a result.
INPUTS: dict[str, tuple[str, ...]] = {
    "cosmos_evaluation": ("input_ids", "video", "action", "sound", "domain_id", "timestep"),
    "cosmos_denoise": ("cond_ids", "uncond_ids", "x0_video", "state_action"),
    "cosmos_pipeline": (
        "in_image",
        "in_video",
        "in_action_image",
        "in_action_video",
        "in_raw_actions",
        "init_video",
        "init_action",
        "init_sound",
    ),
    "cosmos_droid_request": (),
    "cosmos_droid_preprocess": (),
    "cosmos_sampler": ("x_init",),
    "cosmos_vae": ("pixels", "rand_latent_raw"),
    "cosmos_sound": ("latent",),
    "cosmos_rope": ("position_ids", "time.t"),
}
# Kind -> metadata that are results too; those a case has must be compared.
FACTS: dict[str, tuple[str, ...]] = {
    "cosmos_pipeline": ("text_cond", "text_uncond"),
    "cosmos_droid_request": ("prompt",),
    "cosmos_droid_preprocess": (
        "composed_sha256",
        "canvas0_sha256",
        "canvas_shape",
        "prompt_plain",
        "prompt_json",
        "plan",
    ),
}
KINDS = frozenset(INPUTS)
POLICY = ("cosmos_denoise", "cosmos_droid_request", "cosmos_droid_preprocess")


@pytest.fixture(scope="module")
def runner_of() -> Iterator[Callable[[str], GoldenRunner]]:
    with runners() as made:
        yield made


def test_golden(golden_case: GoldenCase | None, runner_of: Callable[[str], GoldenRunner]) -> None:
    assert golden_case is not None, "the golden folder holds no case file"
    assert golden_case.kind in INPUTS, f"unknown kind: {golden_case.problem}"
    root = golden_case.set_root or golden_case.path.parent
    results = runner_of(plugin_of(golden_case)).run(golden_case.path, root)
    check_results(results, outputs(golden_case))


def test_every_golden_case_is_consumed(unconsumed_golden_cases: list[str]) -> None:
    assert not unconsumed_golden_cases, "\n".join(unconsumed_golden_cases)


def plugin_of(case: GoldenCase) -> str:
    """Return the plugin of a case: cases with actions are the policy's."""
    actions = "action" in case.names or "action" in case.metadata
    return "cosmos3_policy" if case.kind in POLICY or actions else "cosmos3"


def outputs(case: GoldenCase) -> list[str]:
    """Return the names of a case's results, metadata that are results among them."""
    facts = [name for name in FACTS.get(case.kind, ()) if name in case.metadata]
    return [name for name in case.names if name not in INPUTS[case.kind]] + facts
