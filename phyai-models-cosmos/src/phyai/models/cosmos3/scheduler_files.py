"""Reads ``scheduler/scheduler_config.json`` and names the noise schedule of a request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from phyai.errors import CheckpointError, ConfigError, RequestError, did_you_mean
from phyai.json_files import read_json_object
from phyai.models.cosmos3.processing.checks import check_number
from phyai.unipc import TRAIN_STEPS

FOLDER, FILE, INDEX = "scheduler", "scheduler_config.json", "model_index.json"
MODULAR_INDEX = "modular_model_index.json"
Schedule = Literal["native", "diffusers_flow", "karras"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
KARRAS_RHO = 7.0
_NEEDED: dict[str, Any] = {
    "_class_name": "UniPCMultistepScheduler",  # distilled checkpoints have another
    "prediction_type": "flow_prediction",
    "solver_order": 2,
    "solver_type": "bh2",
    "predict_x0": True,
    "lower_order_final": True,
    "use_flow_sigmas": True,
    "num_train_timesteps": TRAIN_STEPS,
    "final_sigmas_type": "zero",
}
# What changes the sampler where it is set; timestep_spacing does not, with these sigmas.
_UNKNOWN = (
    "thresholding",
    "use_dynamic_shifting",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "disable_corrector",
    "shift_terminal",
    "solver_p",
)


@dataclass(frozen=True, slots=True)
class SchedulerFile:
    """The schedule a checkpoint ships; its values are those of the released files by default.

    karras: whether the file asks for Karras levels, between sigma_min and sigma_max before they are
    mapped to flow.  flow_shift: of the file.  native: whether the checkpoint's index asks for the
    native levels where the file asks for no Karras ones.

    >>> SchedulerFile().grid("native", 5)
    'native:5.0'
    >>> SchedulerFile().grid()
    'karras:0.147:200.0:7.0'
    """

    karras: bool = True
    sigma_min: float = 0.147
    sigma_max: float = 200.0
    flow_shift: float = 1.0
    native: bool = False

    def schedule(self, use_karras: bool | None) -> Schedule:
        """Return the schedule of ``use_karras_sigmas``: None asks the file, False is native."""
        if use_karras is None:
            return "karras" if self.karras else "native" if self.native else "diffusers_flow"
        return "karras" if use_karras else "native"

    def grid(self, schedule: Any = None, flow_shift: Any = None) -> str:
        """Return the grid name of a request for ``phyai.unipc``.

        schedule: None = the file's own.  flow_shift: None = the file's; Karras levels have none.
        Raises: RequestError.
        """
        if schedule is None:
            schedule = self.schedule(None)
        if schedule not in SCHEDULES:
            raise RequestError(
                f"schedule must be one of {', '.join(SCHEDULES)}; got {schedule!r}."
                f"{did_you_mean(str(schedule), SCHEDULES)} Rename it."
            )
        if schedule == "karras":
            return f"karras:{self.sigma_min!r}:{self.sigma_max!r}:{KARRAS_RHO!r}"
        shift = self.flow_shift if flow_shift is None else flow_shift
        return f"{schedule}:{check_number('flow_shift', shift, 0.0, 1000.0)!r}"


def read_scheduler(folder: Path) -> SchedulerFile:
    """Return the schedule of a checkpoint folder, the released one when it has no scheduler file.

    Raises: CheckpointError for a broken file and for a sampler of another kind.
    """
    _check_not_distilled(folder)
    path = folder / FOLDER / FILE
    if not path.is_file():
        return SchedulerFile()
    data = read_json_object(path)
    for name, value in _NEEDED.items():
        if data.get(name, value) != value:
            raise CheckpointError(
                f"{path} must have {name} {value!r}; got {data[name]!r}. "
                "Use a checkpoint with the UniPC flow sampler."
            )
    if set_ones := [name for name in _UNKNOWN if data.get(name)]:
        raise CheckpointError(
            f"{path} must not set {', '.join(set_ones)}; got {data[set_ones[0]]!r}. "
            "Use a checkpoint with the UniPC flow sampler."
        )
    karras = data.get("use_karras_sigmas", False)
    if not isinstance(karras, bool):
        raise CheckpointError(
            f"{path} must have use_karras_sigmas true or false; got {karras!r}. Correct it."
        )
    found = SchedulerFile(
        karras,
        _number(path, data, "sigma_min", 0.147),
        _number(path, data, "sigma_max", 200.0),
        _number(path, data, "flow_shift", 1.0),
        _native(folder),
    )
    if found.sigma_min >= found.sigma_max:
        raise CheckpointError(
            f"{path} must have sigma_min below sigma_max; got {found.sigma_min} and "
            f"{found.sigma_max}. Correct it."
        )
    return found


def check_shift(value: Any) -> float:
    """Return ``flow_shift`` of a configuration.  Raises: ConfigError."""
    try:
        return check_number("flow_shift", value, 0.0, 1000.0)
    except RequestError as error:
        raise ConfigError(str(error)) from error


def _check_not_distilled(folder: Path) -> None:
    for path in (folder / INDEX, folder / MODULAR_INDEX):
        if path.is_file() and read_json_object(path).get("is_distilled"):
            raise CheckpointError(
                f"{path} must not set is_distilled: models made for a few fixed noise levels have "
                "a sampler of their own, which is not supported. Use the checkpoint they were "
                "distilled from."
            )


def _native(folder: Path) -> bool:
    if not (folder / INDEX).is_file():
        return False
    return read_json_object(folder / INDEX).get("use_native_flow_schedule") is True


def _number(path: Path, data: dict[str, Any], name: str, default: float) -> float:
    value = data.get(name)
    if value is None:
        return default
    try:
        return check_number(name, value, 0.0, 1e6)
    except RequestError as error:
        raise CheckpointError(f"{path}: {error}") from error
