"""Decides everything a Processor needs, once, from a checkpoint folder and the user's choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from phyai.errors import CheckpointError, CheckpointNotFound, ConfigError
from phyai.models.pi.config import PiConfig, short_camera_name
from phyai.models.pi.processing.images import INTERPOLATIONS, Interpolation
from phyai.models.pi.processing.norm_stats import (
    ACTION,
    STATE,
    Stats,
    find_openpi_stats,
    load_stats,
)
from phyai.models.pi.processing.normalize import make_bool_mask, needed_stats, relative_mask
from phyai.models.pi.processing.normalizers import LerobotNormalizer, Normalizer, OpenpiNormalizer
from phyai.models.pi.processing.openpi_configs import OpenpiConfig, get_openpi_config
from phyai.models.pi.processing.processor_files import (
    NormStep,
    ProcessorFiles,
    read_processor_files,
)
from phyai.models.pi.processing.robots import RobotContract, get_robot
from phyai.models.pi.processing.tokenizer import (
    DEFAULT_TOKENIZER,
    Overlong,
    PromptTokenizer,
    find_tokenizer_file,
)

_NO_STATS = (
    "this checkpoint has no statistics for {names}: values pass unchanged. Pass norm_stats with "
    "the statistics of your robot's data."
)


@dataclass(frozen=True)
class TokenizerSource:
    """Where the tokenizer comes from: a local path, else a hub repository."""

    path: Path | None = None
    hub_name: str = DEFAULT_TOKENIZER

    @property
    def label(self) -> str:
        """Where it is, for people."""
        return f"{self.hub_name} (hub)" if self.path is None else str(self.path)

    def load(self) -> PromptTokenizer:
        """Return the tokenizer.  Raises: CheckpointError, MissingDependency."""
        if self.path is not None:
            return PromptTokenizer.from_path(self.path)
        return PromptTokenizer.from_hub(self.hub_name)


@dataclass(frozen=True)
class ProcessorSettings:
    """The decided choices; relative_mask None = all actions absolute."""

    interpolation: Interpolation
    max_length: int
    normalizer: Normalizer
    action_dim: int
    action_names: tuple[str, ...]
    state_dim: int | None = None
    relative_mask: tuple[bool, ...] | None = None
    legacy_padding: bool = False
    state_in_prompt: bool = False
    state_prompt_dim: int | None = None
    default_prompt: str | None = None
    overlong: Overlong = "error"
    robot: RobotContract | None = None
    rename_map: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def camera_slots(config: PiConfig, settings: ProcessorSettings) -> dict[str, str]:
    """Return every accepted camera name -> the checkpoint's key."""
    real = config.cameras[: len(config.cameras) - config.empty_cameras]
    by_short = {short_camera_name(camera): camera for camera in real}
    slots = {**by_short, **{camera: camera for camera in real}}
    for source, target in settings.rename_map.items():
        camera = by_short.get(short_camera_name(target))
        if camera is not None:
            slots[source] = camera
            slots[short_camera_name(source)] = camera
    if settings.robot is not None:
        for source, slot in settings.robot.cameras.items():
            if slot in by_short:
                slots[source] = by_short[slot]
                slots[source.rpartition("/")[2]] = by_short[slot]
    return slots


def load_settings(
    folder: Path | None,
    config: PiConfig,
    *,
    tokenizer: str | Path | None,
    processor_dir: Path | None,
    norm_stats: str | Path | None,
    robot: str | None,
    openpi_config: str | None,
    asset_id: str | None,
    interpolation: str | None,
    legacy_padding: bool,
    state_prompt_dim: int | None,
    state_in_prompt: bool | None,
    default_prompt: str | None,
    overlong: Overlong,
) -> tuple[ProcessorSettings, TokenizerSource]:
    """Return the settings and the tokenizer's source; see ``Processor.from_checkpoint``."""
    _check_choices(config, interpolation, state_prompt_dim, state_in_prompt, overlong)
    openpi = _openpi_choice(config, openpi_config)
    contract = _robot_choice(robot, openpi)
    stats = None if norm_stats is None else load_stats(norm_stats)
    if config.family == "openpi":
        files = None
        settings = _openpi_settings(folder, config, openpi, contract, stats, asset_id)
    else:
        place = processor_dir or folder
        files = None if place is None else read_processor_files(place)
        if processor_dir is not None and files is None:
            raise CheckpointNotFound(
                f"processor_dir must hold policy_preprocessor.json; {str(processor_dir)!r} has "
                "none. Correct processor_dir."
            )
        settings = _lerobot_settings(config, files, contract, stats)
        if stats is None and processor_dir is None:
            _check_own_lengths(config, settings.normalizer)
    if state_in_prompt is None:
        state_in_prompt = settings.state_in_prompt
    if default_prompt is None and openpi is not None:
        default_prompt = openpi.default_prompt
    settings = replace(
        settings,
        interpolation=_interpolation(interpolation, config),
        legacy_padding=legacy_padding,
        state_in_prompt=state_in_prompt,
        state_prompt_dim=state_prompt_dim,
        default_prompt=default_prompt,
        overlong=overlong,
    )
    return settings, _tokenizer_source(tokenizer, (folder, processor_dir), files)


def _check_choices(
    config: PiConfig,
    interpolation: str | None,
    state_prompt_dim: int | None,
    state_in_prompt: bool | None,
    overlong: str,
) -> None:
    if interpolation is not None and interpolation not in INTERPOLATIONS:
        raise ConfigError(
            f"interpolation must be one of {', '.join(INTERPOLATIONS)}; got {interpolation!r}. "
            "Leave it out to follow the checkpoint."
        )
    if state_prompt_dim is not None and state_prompt_dim < 1:
        raise ConfigError(
            f"state_prompt_dim must be None or positive; got {state_prompt_dim}. Leave it out "
            "unless the checkpoint was trained on a padded state."
        )
    if state_in_prompt and config.model == "pi0":
        raise ConfigError(
            "state_in_prompt must be false for pi0, which reads the state as a vector; got true. "
            "Leave it out."
        )
    if overlong not in ("error", "truncate"):
        raise ConfigError(
            f"overlong must be 'error' or 'truncate'; got {overlong!r}. Choose one of them."
        )


def _interpolation(choice: str | None, config: PiConfig) -> Interpolation:
    name = choice or config.family
    return "openpi" if name == "openpi" else "lerobot"


def _openpi_choice(config: PiConfig, name: str | None) -> OpenpiConfig | None:
    if name is None:
        return None
    if config.family != "openpi":
        raise ConfigError(
            f"openpi_config applies to openpi checkpoints only; got {name!r} for a LeRobot one. "
            "Leave it out."
        )
    return get_openpi_config(name, config.model)


def _robot_choice(name: str | None, openpi: OpenpiConfig | None) -> RobotContract | None:
    if name is None and openpi is not None:
        name = openpi.robot
    return None if name is None else get_robot(name)


def _tokenizer_source(
    explicit: str | Path | None, folders: tuple[Path | None, ...], files: ProcessorFiles | None
) -> TokenizerSource:
    if explicit is not None:
        path = Path(explicit)
        if not path.exists():
            raise CheckpointNotFound(
                f"tokenizer path must exist; got {str(path)!r}. Correct `--tokenizer PATH`."
            )
        return TokenizerSource(path=path)
    for folder in folders:
        found = None if folder is None else find_tokenizer_file(folder)
        if found is not None:
            return TokenizerSource(path=found)
    return TokenizerSource(hub_name=DEFAULT_TOKENIZER if files is None else files.tokenizer_name)


# ---------------------------------------------------------------- LeRobot


def _lerobot_settings(
    config: PiConfig,
    files: ProcessorFiles | None,
    robot: RobotContract | None,
    stats: Stats | None,
) -> ProcessorSettings:
    if files is None:
        in_prompt = config.model == "pi05"
        relative = config.use_relative_actions
        exclude, names = config.relative_exclude_joints, config.action_feature_names
        rename_map: Mapping[str, str] = {}
        max_length = config.tokenizer_max_length
    else:
        in_prompt = files.state_in_prompt
        relative = files.relative
        exclude = files.exclude_joints
        names = files.action_names or config.action_feature_names
        rename_map = files.rename_map
        max_length = files.max_length or config.tokenizer_max_length
    normalizer = _lerobot_normalizer(config, files, stats)
    _check_lerobot_stats(normalizer)
    action_dim = normalizer.action_dim or config.action_dim or config.max_action_dim
    if action_dim > config.max_action_dim:
        raise CheckpointError(
            f"action statistics must cover at most max_action_dim = {config.max_action_dim} "
            f"values; got {action_dim}. Use the statistics of this checkpoint."
        )
    mask = relative_mask(action_dim, names, exclude) if relative else None
    if robot is not None:
        action_dim = robot.action_dim
    return ProcessorSettings(
        interpolation="lerobot",
        max_length=max_length,
        normalizer=normalizer,
        action_dim=action_dim,
        action_names=_action_names(action_dim, robot, names),
        state_dim=normalizer.state_dim or (robot.state_dim if robot else config.state_dim),
        relative_mask=mask,
        state_in_prompt=in_prompt,
        robot=robot,
        rename_map=rename_map,
        warnings=_lerobot_warnings(config, files, normalizer),
    )


def _lerobot_normalizer(
    config: PiConfig, files: ProcessorFiles | None, stats: Stats | None
) -> LerobotNormalizer:
    if stats is None:
        if files is None:
            return LerobotNormalizer()
        return LerobotNormalizer(files.normalizer, files.unnormalizer)
    # Statistics of the caller: modes from the files, else from the config (base checkpoints
    # list no features).
    norm_map = config.normalization_mapping or {}
    eps = 1e-8
    if files is not None:
        norm_map = files.unnormalizer.norm_map or norm_map
        eps = files.unnormalizer.eps
    step = NormStep({STATE: "STATE", ACTION: "ACTION"}, norm_map, eps, stats)
    return LerobotNormalizer(step, step)


def _check_lerobot_stats(normalizer: LerobotNormalizer) -> None:
    for step, feature in ((normalizer.state, STATE), (normalizer.action, ACTION)):
        table = (step.stats or {}).get(feature)
        mode = step.mode(feature)
        missing = [n for n in needed_stats(mode) if table is not None and n not in table]
        if missing:
            raise CheckpointError(
                f"statistics of {feature!r} must hold {', '.join(needed_stats(mode))} for "
                f"{mode}; {', '.join(missing)} missing. Use statistics computed for this mode."
            )


def _check_own_lengths(config: PiConfig, normalizer: Normalizer) -> None:
    """Statistics that come with a checkpoint are of the features its config lists."""
    for feature, stated, found in (
        (STATE, config.state_dim, normalizer.state_dim),
        (ACTION, config.action_dim, normalizer.action_dim),
    ):
        if stated is not None and found is not None and stated != found:
            raise CheckpointError(
                f"statistics of {feature!r} must have the {stated} values config.json lists; got "
                f"{found}. Use the processor files of this checkpoint, or pass norm_stats."
            )


def _lerobot_warnings(
    config: PiConfig, files: ProcessorFiles | None, normalizer: LerobotNormalizer
) -> tuple[str, ...]:
    wanted = config.normalization_mapping or {}
    missing = []
    for step, feature, kind in (
        (normalizer.state, STATE, "STATE"),
        (normalizer.action, ACTION, "ACTION"),
    ):
        lacks = feature not in (step.stats or {}) or feature not in step.features
        if lacks and wanted.get(kind, "IDENTITY") != "IDENTITY":
            missing.append(feature)
    warnings = []
    if files is None:
        warnings.append("this checkpoint has no policy_preprocessor.json: defaults are used.")
    if missing:
        warnings.append(_NO_STATS.format(names=" and ".join(missing)))
    return tuple(warnings)


def _action_names(
    action_dim: int, robot: RobotContract | None, names: tuple[str, ...] | None
) -> tuple[str, ...]:
    if robot is not None:
        return robot.action_names
    if names is not None and len(names) == action_dim:
        return names
    return tuple(f"action_{index}" for index in range(action_dim))


# ---------------------------------------------------------------- openpi


def _openpi_settings(
    folder: Path | None,
    config: PiConfig,
    openpi: OpenpiConfig | None,
    robot: RobotContract | None,
    stats: Stats | None,
    asset_id: str | None,
) -> ProcessorSettings:
    warnings = []
    if stats is None and folder is not None:
        path = _openpi_stats_path(folder, asset_id, openpi)
        stats = None if path is None else load_stats(path)
    missing = [name for name in (STATE, ACTION) if name not in (stats or {})]
    if missing:
        warnings.append(_NO_STATS.format(names=" and ".join(missing)))
    if openpi is not None and openpi.horizon != config.chunk_size:
        warnings.append(
            f"openpi config {openpi.name!r} has horizon {openpi.horizon}, the checkpoint "
            f"{config.chunk_size}: check that the checkpoint was trained with it."
        )
    normalizer = OpenpiNormalizer.from_stats(stats, use_quantiles=config.model == "pi05")
    if normalizer.use_quantiles:
        for part in (normalizer.state, normalizer.action):
            if part is not None:
                part.quantiles()
    state_dim: int | None = None
    if robot is not None:
        action_dim, state_dim = robot.action_dim, robot.state_dim
    else:
        # Statistics may be padded to the model's width, so they only bound the action dim.
        action_dim = min(normalizer.action_dim or config.max_action_dim, config.max_action_dim)
    if action_dim > config.max_action_dim:
        raise ConfigError(
            f"robot must have at most {config.max_action_dim} action dims for this checkpoint; "
            f"got {action_dim}. Choose the robot the checkpoint was trained for."
        )
    mask = None
    if openpi is not None and openpi.delta_mask is not None:
        mask = make_bool_mask(*openpi.delta_mask)
    return ProcessorSettings(
        interpolation="openpi",
        max_length=config.tokenizer_max_length,
        normalizer=normalizer,
        action_dim=action_dim,
        action_names=_action_names(action_dim, robot, None),
        state_dim=state_dim,
        relative_mask=mask,
        state_in_prompt=(config.model == "pi05" if openpi is None else openpi.state_in_prompt),
        robot=robot,
        warnings=tuple(warnings),
    )


def _openpi_stats_path(
    folder: Path, asset_id: str | None, openpi: OpenpiConfig | None
) -> Path | None:
    if asset_id is None and openpi is not None and openpi.asset_id is not None:
        known = folder / "assets" / openpi.asset_id / "norm_stats.json"
        if known.is_file():
            return known
    return find_openpi_stats(folder, asset_id)
