"""EngineConfig and its sections: how an engine runs, apart from which model it runs.

Frozen and validated at construction (ConfigError); torch-free until ``DeviceConfig.params_dtype``
is read, ``EngineConfig.auto`` or ``resolve_device`` is called.
"""

from __future__ import annotations

import copy
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from phyai import env
from phyai.config_fields import (
    Config,
    DTypeField,
    check_bool,
    check_choice,
    check_instance,
    check_int,
    check_seconds,
    check_text,
    dtype_field,
    fail,
)
from phyai.engine_config_parallel import AttentionParallelConfig as AttentionParallelConfig
from phyai.engine_config_parallel import DenseParallelConfig as DenseParallelConfig
from phyai.engine_config_parallel import ParallelConfig as ParallelConfig
from phyai.errors import ConfigError

if TYPE_CHECKING:
    import torch

GraphBackend = Literal["auto", "eager", "inductor", "cuda"]
KernelProfile = Literal["static", "autotune"]
PrefillBackend = Literal["auto", "fa2", "fa3", "cudnn", "trtllm-gen"]
Bf16Backend = Literal["auto", "cudnn", "cutlass", "tgv", "cublaslt", "tinygemm"]

ATTN_BACKENDS = ("eager", "flashinfer", "sdpa")
NORM_BACKENDS = ("flashinfer", "phyai-kernel", "torch")
LINEAR_BACKENDS = ("flashinfer", "humming", "torch")
VGPU_BACKENDS = ("flashinfer", "torch")

_TARGET = re.compile(r"cpu|cuda(:(0|[1-9]\d*))?")
_FUNCTION = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.+\.py):[A-Za-z_]\w*")


MAX_THREADS = 4096
"""Far more than a machine has cores; torch crashes when the system refuses it a thread."""


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True, slots=True)
class BackendConfig(Config):
    """Preferred back ends by name; lower-cased, ``_`` reads as ``-``.

    >>> from phyai.engine_config import BackendConfig
    >>> BackendConfig(norm="PHYAI_kernel").norm
    'phyai-kernel'
    """

    attn: str = field(default="flashinfer", metadata=_help(" | ".join(ATTN_BACKENDS)))
    norm: str = field(default="flashinfer", metadata=_help(" | ".join(NORM_BACKENDS)))
    linear: str | None = field(default=None, metadata=_help(" | ".join(LINEAR_BACKENDS)))
    linear_quant: str | None = field(default=None, metadata=_help(" | ".join(LINEAR_BACKENDS)))
    vgpu: str | None = field(default=None, metadata=_help(" | ".join(VGPU_BACKENDS)))

    def __post_init__(self) -> None:
        for name, choices, optional in (
            ("attn", ATTN_BACKENDS, False),
            ("norm", NORM_BACKENDS, False),
            ("linear", LINEAR_BACKENDS, True),
            ("linear_quant", LINEAR_BACKENDS, True),
            ("vgpu", VGPU_BACKENDS, True),
        ):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, value.strip().lower().replace("_", "-"))
            check_choice(self, name, choices, optional=optional)


@dataclass(frozen=True, eq=False, repr=False)  # no slots: DTypeField keeps its name in __dict__
class DeviceConfig(Config):
    """Where the model lives and the dtype of its parameters.

    ``params_dtype`` takes a ``torch.dtype`` or a name and reads as a ``torch.dtype``.

    >>> from phyai.engine_config import DeviceConfig
    >>> DeviceConfig(target="cpu", params_dtype="fp32")
    DeviceConfig(target='cpu', params_dtype='float32')
    """

    target: str = field(default="cuda", metadata=_help("cuda | cuda:N | cpu"))
    params_dtype: DTypeField = DTypeField(  # noqa: RUF009 - a descriptor, meant to be shared
        "bfloat16", help="dtype of new parameters, by name"
    )

    def __post_init__(self) -> None:
        if type(self.target) is not str or not _TARGET.fullmatch(self.target):
            fail(self, "target", "must be cuda, cuda:N or cpu")

    @property
    def dtype_name(self) -> str:
        """Canonical name of ``params_dtype``; imports no torch."""
        descriptor = dtype_field(type(self), "params_dtype")
        assert descriptor is not None
        return descriptor.name_of(self)

    def __repr__(self) -> str:
        return f"DeviceConfig(target={self.target!r}, params_dtype={self.dtype_name!r})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return (self.target, self.dtype_name) == (other.target, other.dtype_name)

    def __hash__(self) -> int:
        return hash((self.target, self.dtype_name))


@dataclass(frozen=True, slots=True)
class RuntimeConfig(Config):
    """Graphs, memory, threads and debugging of one process.

    >>> from phyai.engine_config import RuntimeConfig
    >>> RuntimeConfig(use_cuda_graph=False).graph_backend
    'auto'
    """

    use_cuda_graph: bool = field(default=True, metadata=_help("capture and replay CUDA graphs"))
    graph_backend: GraphBackend = field(
        default="auto", metadata=_help("auto = cuda on a CUDA device with use_cuda_graph, or eager")
    )
    static_shapes: bool | None = field(
        default=None,
        metadata=_help("pad batches to full buckets; null = with graphs only, true = eager too"),
    )
    memory_budget_bytes: int | None = field(
        default=None, metadata=_help("limit of static buffers; null = none")
    )
    memo_bytes: int = field(
        default=268435456, metadata=_help("limit of what is kept across requests; 0 = nothing")
    )
    max_live_caches: int = field(
        default=16, metadata=_help("caches (key, batch bucket) kept alive, least recent leaves")
    )
    max_sessions: int = field(
        default=8, metadata=_help("sessions kept by a plugin that has some, least recent leaves")
    )
    session_ttl_s: float | None = field(
        default=None,
        metadata=_help("seconds without a request until a session expires; null = never"),
    )
    batch_wait_ms: float = field(
        default=0.0,
        metadata=_help("wait so long for requests that may share a batch; 0 = never join any"),
    )
    warmup: bool = field(
        default=False,
        metadata=_help("at start, run the checkpoint's full request once per batch bucket"),
    )
    num_threads: int | None = field(default=None, metadata=_help("CPU threads; null = torch's"))
    seed: int | None = field(default=None, metadata=_help("seed of the process"))
    dist_timeout_s: float = field(
        default=600.0, metadata=_help("until every rank has loaded, seconds")
    )
    freeze_kernel_choices: bool = field(
        default=True, metadata=_help("no new kernel choice after start-up")
    )
    flashinfer_workspace_bytes: int = field(
        default=134217728, metadata=_help("scratch per device, lazily allocated")
    )
    flashinfer_prefill_backend: PrefillBackend | None = field(
        default=None, metadata=_help("null = auto")
    )
    flashinfer_bf16_backend: Bf16Backend = field(default="cudnn", metadata=_help("bf16 GEMM"))
    flashinfer_autotune: bool = field(default=False, metadata=_help("let FlashInfer autotune"))
    flashinfer_autotune_cache: str | None = field(default=None, metadata=_help("JSON file"))
    force_linear_kernel: str | None = field(
        default=None, metadata=_help("use one linear kernel everywhere, by name")
    )
    debug_tensor_dump_dir: str | None = field(
        default=None, metadata=_help("write module outputs below this folder")
    )
    debug_tensor_dump_filter: tuple[str, ...] | None = field(
        default=None, metadata=_help("regexes of module names")
    )
    debug_tensor_dump_filter_fn: str | None = field(
        default=None, metadata=_help("pkg.mod:func or /path/file.py:func")
    )

    def __post_init__(self) -> None:
        check_bool(self, "use_cuda_graph", "freeze_kernel_choices", "flashinfer_autotune", "warmup")
        if self.static_shapes is not None:
            check_bool(self, "static_shapes")
        check_choice(self, "graph_backend", get_args(GraphBackend))
        check_int(self, "max_live_caches", "max_sessions", "flashinfer_workspace_bytes", minimum=1)
        check_seconds(self, "session_ttl_s", optional=True)
        check_int(self, "memory_budget_bytes", minimum=1, optional=True)
        check_int(self, "memo_bytes", minimum=0)
        check_int(self, "num_threads", minimum=1, maximum=MAX_THREADS, optional=True)
        check_int(self, "seed", minimum=0, optional=True)
        check_seconds(self, "dist_timeout_s")
        check_seconds(self, "batch_wait_ms", zero_ok=True)
        check_choice(self, "flashinfer_prefill_backend", get_args(PrefillBackend), optional=True)
        check_choice(self, "flashinfer_bf16_backend", get_args(Bf16Backend))
        _paths_to_text(self, "flashinfer_autotune_cache", "debug_tensor_dump_dir")
        check_text(
            self,
            "flashinfer_autotune_cache",
            "force_linear_kernel",
            "debug_tensor_dump_dir",
            "debug_tensor_dump_filter_fn",
            optional=True,
        )
        self._check_dump_filters()

    def _check_dump_filters(self) -> None:
        patterns, function = self.debug_tensor_dump_filter, self.debug_tensor_dump_filter_fn
        if patterns is not None:
            if type(patterns) is not tuple or not patterns:
                fail(self, "debug_tensor_dump_filter", "must be a non-empty tuple of regexes")
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except (re.error, TypeError) as error:
                    fail(
                        self,
                        "debug_tensor_dump_filter",
                        f"must hold regexes; {pattern!r} is none ({error})",
                    )
        if function is not None and not _FUNCTION.fullmatch(function):
            fail(
                self,
                "debug_tensor_dump_filter_fn",
                "must look like pkg.mod:func or /path/file.py:func",
            )
        if patterns is not None and function is not None:
            fail(
                self,
                "debug_tensor_dump_filter",
                "excludes debug_tensor_dump_filter_fn",
                " Give one of the two.",
            )


@dataclass(frozen=True, slots=True)
class KernelConfig(Config):
    """How kernels are chosen: a policy file or an inline policy.

    benchmark: takes a ``kernels.Candidate`` and returns its cost; None with autotune means the
    built-in timer.

    >>> from phyai.engine_config import KernelConfig
    >>> KernelConfig(policy_config={"schema": "phyai.kernel/v1"}).profile is None
    True
    """

    profile: KernelProfile | None = field(
        default=None, metadata=_help("overrides the policy's profile")
    )
    config_path: str | None = field(default=None, metadata=_help("policy YAML file"))
    autotune_cache: str | None = field(default=None, metadata=_help("file of measured choices"))
    benchmark: Callable[..., float] | None = field(
        default=None, metadata=_help("Python only: returns the cost of one candidate")
    )
    policy_config: Mapping[str, Any] | None = field(
        default=None, hash=False, metadata=_help("inline policy; excludes config_path")
    )

    def __post_init__(self) -> None:
        check_choice(self, "profile", get_args(KernelProfile), optional=True)
        _paths_to_text(self, "config_path", "autotune_cache")
        check_text(self, "config_path", "autotune_cache", optional=True)
        if self.benchmark is not None and not callable(self.benchmark):
            fail(self, "benchmark", "must be callable or None")
        if self.policy_config is not None:
            check_instance(self, "policy_config", Mapping)
            if self.config_path is not None:
                fail(self, "config_path", "excludes policy_config", " Give one of the two.")
            # A private copy: the caller may change its dict later, a frozen config may not.
            object.__setattr__(self, "policy_config", copy.deepcopy(dict(self.policy_config)))


@dataclass(frozen=True, slots=True)
class EngineConfig(Config):
    """Everything about an engine but its model.

    >>> from phyai.engine_config import DeviceConfig, EngineConfig
    >>> EngineConfig(device=DeviceConfig(target="cpu")).device.target
    'cpu'
    """

    backends: BackendConfig = field(default_factory=BackendConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)

    def __post_init__(self) -> None:
        check_instance(self, "backends", BackendConfig)
        check_instance(self, "device", DeviceConfig)
        check_instance(self, "parallel", ParallelConfig)
        check_instance(self, "runtime", RuntimeConfig)
        check_instance(self, "kernel", KernelConfig)

    @classmethod
    def auto(cls, target: str | None = None) -> EngineConfig:
        """Return the settings that suit a device: ``target``, or what this machine has.

        Without ``target`` this imports torch to look for CUDA.
        """
        if target is None:
            import torch

            target = "cuda" if torch.cuda.is_available() else "cpu"
        if target != "cpu":
            return cls(device=DeviceConfig(target=target))
        return cls(
            backends=BackendConfig(attn="sdpa", norm="torch"),
            device=DeviceConfig(target="cpu", params_dtype="float32"),
            runtime=RuntimeConfig(use_cuda_graph=False),
        )

    @classmethod
    def from_env(cls, base: EngineConfig | None = None) -> EngineConfig:
        """Return ``base`` or ``auto()`` with every set ``PHYAI_*`` variable written over it.

        A field of an explicit ``base`` that changes is logged. Raises: ConfigError naming the
        variable whose value is refused.
        """
        if base is not None and not isinstance(base, EngineConfig):
            raise ConfigError(f"base must be an EngineConfig or None; got {base!r}.")
        return env.override(base if base is not None else cls.auto(), explicit=base is not None)


def _paths_to_text(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, os.PathLike):
            object.__setattr__(config, name, os.fspath(value))


def resolve_device(config: EngineConfig | DeviceConfig) -> torch.device:
    """Return the ``torch.device`` of a config. Imports torch.

    Raises: ConfigError when CUDA is asked for and there is none, or not that many.
    """
    import torch

    target = (config.device if isinstance(config, EngineConfig) else config).target
    device = torch.device(target)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device.target must be a device of this machine, which has no usable CUDA; got "
            f'{target!r}. Pass target="cpu" (PHYAI_DEVICE=cpu).'
        )
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise ConfigError(
            f"device.target must be one of the {count} visible CUDA devices; got {target!r}. "
            f"Use cuda:0 to cuda:{count - 1}."
        )
    return device


# The process singleton of earlier versions. Kept for callers that still ask for it; core never
# reads it, an engine holds its own config.
_singleton_lock = threading.Lock()
_singleton: EngineConfig | None = None


def get_engine_config() -> EngineConfig:
    """Return the process-wide config; the first call fixes it to ``EngineConfig.from_env()``."""
    global _singleton
    with _singleton_lock:
        if _singleton is None:
            _singleton = EngineConfig.from_env()
        return _singleton


def set_engine_config(config: EngineConfig) -> None:
    """Set the process-wide config. Engines that exist keep their own."""
    global _singleton
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config must be an EngineConfig; got {config!r}.")
    with _singleton_lock:
        _singleton = config


def init_engine_config(config: EngineConfig) -> EngineConfig:
    """Set the process-wide config and return it."""
    set_engine_config(config)
    return config
