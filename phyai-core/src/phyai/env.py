"""The one registry of PHYAI_* environment variables, and how they override a config.

Nothing else in core reads PHYAI_* from the environment, except ``plugins.py`` for the two
variables listed here as its own: discovery must work without a config.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.config_fields import raw_value
from phyai.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from phyai.engine_config import EngineConfig

logger = logging.getLogger("phyai")

PREFIX = "PHYAI_"
TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")


def parse_bool(text: str) -> bool:
    """Return the boolean of 1/true/yes/on or 0/false/no/off, in any case."""
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError(f"must be one of {', '.join(TRUE_WORDS + FALSE_WORDS)}")


def parse_int(text: str) -> int:
    """Return the integer written in ``text``."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be an integer") from None


def parse_number(text: str) -> float:
    """Return the number written in ``text``."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("must be a number") from None


def parse_text(text: str) -> str:
    """Return ``text`` without surrounding blanks."""
    return text.strip()


def parse_patterns(text: str) -> tuple[str, ...]:
    """Return the regexes of a JSON list, or the whole text as one regex."""
    # A regex may start with a character class, so only a text that is JSON counts as a list.
    try:
        data = json.loads(text)
    except ValueError:
        return (text,)
    if not isinstance(data, list):
        return (text,)
    if not data or not all(isinstance(item, str) for item in data):
        raise ValueError("must be a non-empty JSON list of strings or one regex")
    return tuple(data)


def optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser that also reads ``none`` as None."""
    return lambda text: None if text.strip().lower() == "none" else parse(text)


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One environment variable.

    field: dotted EngineConfig field it overrides; "" when it belongs to ``read_by`` alone.
    clears: fields of the same section that exclude this one; reset to None with it.
    """

    name: str
    field: str
    parse: Callable[[str], Any]
    help: str
    read_by: str = "engine_config"
    clears: tuple[str, ...] = ()

    def read(self, text: str) -> Any:
        """Return the parsed value; ConfigError names the variable."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(f"{self.name} {error}; got {text!r}.") from None


def _var(
    name: str,
    field: str,
    parse: Callable[[str], Any],
    help: str,
    *,
    clears: tuple[str, ...] = (),
) -> EnvVar:
    return EnvVar(PREFIX + name, field, parse, help, clears=clears)


_maybe_text, _maybe_int = optional(parse_text), optional(parse_int)

REGISTRY: tuple[EnvVar, ...] = (
    _var("DEVICE", "device.target", parse_text, "device: cuda, cuda:N or cpu"),
    _var("PARAMS_DTYPE", "device.params_dtype", parse_text, "dtype of parameters, by name"),
    _var("ATTN_BACKEND", "backends.attn", parse_text, "attention back end"),
    _var("NORM_BACKEND", "backends.norm", parse_text, "normalisation back end"),
    _var("LINEAR_BACKEND", "backends.linear", _maybe_text, "linear back end"),
    _var("LINEAR_QUANT_BACKEND", "backends.linear_quant", _maybe_text, "quantised linear back end"),
    _var("VGPU_BACKEND", "backends.vgpu", _maybe_text, "SM partition back end"),
    _var("USE_CUDA_GRAPH", "runtime.use_cuda_graph", parse_bool, "capture and replay CUDA graphs"),
    _var("GRAPH_BACKEND", "runtime.graph_backend", parse_text, "auto, eager, inductor or cuda"),
    _var(
        "STATIC_SHAPES",
        "runtime.static_shapes",
        optional(parse_bool),
        "pad batches to full buckets without graphs too",
    ),
    _var("WARMUP", "runtime.warmup", parse_bool, "allocate and capture at start"),
    _var("NUM_THREADS", "runtime.num_threads", _maybe_int, "CPU threads of one process"),
    _var("SEED", "runtime.seed", _maybe_int, "seed of the process"),
    _var("MEMORY_BUDGET_BYTES", "runtime.memory_budget_bytes", _maybe_int, "limit of buffers"),
    _var("MEMO_BYTES", "runtime.memo_bytes", parse_int, "limit of what is kept across requests"),
    _var("MAX_LIVE_CACHES", "runtime.max_live_caches", parse_int, "caches kept alive (LRU)"),
    _var("MAX_SESSIONS", "runtime.max_sessions", parse_int, "sessions kept (LRU)"),
    _var(
        "SESSION_TTL_S",
        "runtime.session_ttl_s",
        optional(parse_number),
        "seconds until an unused session expires",
    ),
    _var(
        "BATCH_WAIT_MS",
        "runtime.batch_wait_ms",
        parse_number,
        "milliseconds to wait for requests that may share a batch; 0 = never join any",
    ),
    _var("WORLD_SIZE", "parallel.world_size", _maybe_int, "ranks of one replica"),
    _var("DP_SIZE", "parallel.dp_size", parse_int, "only 1; replicas belong to the deployment"),
    _var("CFG_SIZE", "parallel.cfg_size", parse_int, "ranks that share the guidance branches"),
    _var("EP_SIZE", "parallel.ep_size", parse_int, "only 1"),
    _var("SP_SIZE", "parallel.sp_size", parse_int, "only 1"),
    _var("CP_SIZE", "parallel.cp_size", parse_int, "only 1"),
    _var("TP_SIZE", "parallel.tp_size", parse_int, "tensor parallel ranks"),
    _var(
        "PARALLEL_TIMEOUT_S",
        "parallel.timeout_s",
        parse_number,
        "seconds a rank waits for the others of its replica",
    ),
    _var(
        "FLASHINFER_WORKSPACE_BYTES",
        "runtime.flashinfer_workspace_bytes",
        parse_int,
        "FlashInfer scratch bytes per device",
    ),
    _var(
        "FLASHINFER_PREFILL_BACKEND",
        "runtime.flashinfer_prefill_backend",
        _maybe_text,
        "FlashInfer prefill back end",
    ),
    _var(
        "FLASHINFER_BF16_BACKEND",
        "runtime.flashinfer_bf16_backend",
        parse_text,
        "FlashInfer bf16 GEMM back end",
    ),
    _var(
        "FLASHINFER_AUTOTUNE", "runtime.flashinfer_autotune", parse_bool, "let FlashInfer autotune"
    ),
    _var(
        "FLASHINFER_AUTOTUNE_CACHE",
        "runtime.flashinfer_autotune_cache",
        _maybe_text,
        "JSON file of FlashInfer's choices",
    ),
    _var(
        "FORCE_LINEAR_KERNEL",
        "runtime.force_linear_kernel",
        _maybe_text,
        "use one linear kernel everywhere",
    ),
    _var(
        "KERNEL_CONFIG",
        "kernel.config_path",
        _maybe_text,
        "kernel policy YAML file",
        clears=("policy_config",),
    ),
    _var("KERNEL_PROFILE", "kernel.profile", _maybe_text, "static or autotune"),
    _var(
        "DEBUG_TENSOR_DUMP_DIR",
        "runtime.debug_tensor_dump_dir",
        _maybe_text,
        "write module outputs below this folder",
    ),
    _var(
        "DEBUG_TENSOR_DUMP_FILTER",
        "runtime.debug_tensor_dump_filter",
        optional(parse_patterns),
        "JSON list of regexes, or one regex",
        clears=("debug_tensor_dump_filter_fn",),
    ),
    _var(
        "DEBUG_TENSOR_DUMP_FILTER_FN",
        "runtime.debug_tensor_dump_filter_fn",
        _maybe_text,
        "pkg.mod:func or /path/file.py:func",
        clears=("debug_tensor_dump_filter",),
    ),
    EnvVar("PHYAI_PLUGINS", "", parse_text, "plugins to allow, comma separated", "plugins"),
    EnvVar("PHYAI_PLUGINS_BLOCK", "", parse_text, "plugins to deny, comma separated", "plugins"),
    EnvVar("PHYAI_CACHE", "", parse_text, "folder of built presets; ~/.cache/phyai", "env"),
)
"""Every PHYAI_* variable that core knows."""

BY_FIELD: Mapping[str, EnvVar] = {var.field: var for var in REGISTRY if var.field}


def settings(environ: Mapping[str, str] | None = None) -> dict[EnvVar, Any]:
    """Return the parsed value of every config variable that is set; an empty one is not set.

    Raises: ConfigError naming the variable whose value does not parse.
    """
    source = os.environ if environ is None else environ
    return {
        var: var.read(source[var.name])
        for var in REGISTRY
        if var.field and source.get(var.name, "").strip()
    }


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of what PhyAI builds itself: PHYAI_CACHE, XDG_CACHE_HOME/phyai or
    ~/.cache/phyai. It may not exist yet.
    """
    source = os.environ if environ is None else environ
    if own := source.get("PHYAI_CACHE", "").strip():
        return Path(own).expanduser()
    base = source.get("XDG_CACHE_HOME", "").strip()
    # The XDG rules say that a relative path there counts as unset.
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "phyai"


def unknown_names(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the set PHYAI_* variables that nothing reads (typing mistakes), sorted."""
    source = os.environ if environ is None else environ
    known = {var.name for var in REGISTRY}
    return tuple(sorted(n for n in source if n.startswith(PREFIX) and n not in known))


def given(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return every PHYAI_* variable that is set, for a process that starts elsewhere."""
    source = os.environ if environ is None else environ
    return {name: text for name, text in source.items() if name.startswith(PREFIX)}


def override(
    config: EngineConfig, *, explicit: bool, environ: Mapping[str, str] | None = None
) -> EngineConfig:
    """Return ``config`` with every set variable written over its field.

    explicit: the user gave ``config``; each field that changes is then logged once.
    Raises: ConfigError naming the variable, for text that does not parse or a refused value.
    """
    found = settings(environ)
    for section in ("backends", "device", "parallel", "runtime", "kernel"):
        chosen = {v: x for v, x in found.items() if v.field.startswith(f"{section}.")}
        if not chosen:
            continue
        old = getattr(config, section)
        values = {var.field.partition(".")[2]: value for var, value in chosen.items()}
        cleared = {
            name: None
            for var, value in chosen.items()
            if value is not None
            for name in var.clears
            if name not in values
        }
        try:
            new = old.replace(**(cleared | values))
        except ConfigError as error:
            raise ConfigError(f"{_blamed(chosen, str(error))}: {error}") from error
        config = config.replace(**{section: new})
        if explicit:
            _log_changes(chosen, old, new)
    return config


def _log_changes(chosen: Mapping[EnvVar, Any], old: object, new: object) -> None:
    for var in chosen:
        leaf = var.field.partition(".")[2]
        before, after = raw_value(old, leaf), raw_value(new, leaf)
        if before != after:
            logger.warning(
                "%s overrides the given config.%s: %r -> %r", var.name, var.field, before, after
            )


def _blamed(chosen: Mapping[EnvVar, Any], message: str) -> str:
    """Return the variables a refused section goes back to, by the field its error names."""
    named = [v.name for v in chosen if f".{v.field.partition('.')[2]} " in message]
    return ", ".join(named or [v.name for v in chosen])


def suggestion(name: str) -> str:
    """Return `` Did you mean 'PHYAI_X'?`` for a mistyped variable, or an empty string."""
    return did_you_mean(name, (var.name for var in REGISTRY))
