"""Kind of a case -> its runs."""

from __future__ import annotations

from collections.abc import Callable

from phyai.golden import GoldenRun
from phyai.models.cosmos3.golden.cases import Case
from phyai.models.cosmos3.golden.denoise import denoise_runs
from phyai.models.cosmos3.golden.droid import preprocess_runs, request_runs
from phyai.models.cosmos3.golden.evaluation import evaluation_runs
from phyai.models.cosmos3.golden.parts import rope_runs, sampler_runs, sound_runs, vae_runs
from phyai.models.cosmos3.golden.pipeline import pipeline_runs

_RUNS: dict[str, Callable[[Case], list[GoldenRun]]] = {
    "evaluation": evaluation_runs,
    "denoise": denoise_runs,
    "pipeline": pipeline_runs,
    "droid_request": request_runs,
    "droid_preprocess": preprocess_runs,
    "sampler": sampler_runs,
    "vae": vae_runs,
    "sound": sound_runs,
    "rope": rope_runs,
}


def runs_of(case: Case) -> list[GoldenRun]:
    """Return the runs of a case."""
    return _RUNS[case.kind](case)
