"""Environment variables: parsing, precedence, log lines, one registry."""

from __future__ import annotations

import ast
import dataclasses
import logging
import re
from pathlib import Path

import pytest

import phyai
from phyai import env
from phyai.engine_config import (
    DeviceConfig,
    EngineConfig,
    KernelConfig,
    ParallelConfig,
    RuntimeConfig,
)
from phyai.errors import ConfigError

SPECIFIED = [
    "ATTN_BACKEND",
    "NORM_BACKEND",
    "LINEAR_BACKEND",
    "VGPU_BACKEND",
    "DEVICE",
    "PARAMS_DTYPE",
    "USE_CUDA_GRAPH",
    "WORLD_SIZE",
    "DP_SIZE",
    "CFG_SIZE",
    "EP_SIZE",
    "SP_SIZE",
    "CP_SIZE",
    "TP_SIZE",
    "FLASHINFER_WORKSPACE_BYTES",
    "FLASHINFER_PREFILL_BACKEND",
    "FLASHINFER_BF16_BACKEND",
    "FLASHINFER_AUTOTUNE",
    "FLASHINFER_AUTOTUNE_CACHE",
    "FORCE_LINEAR_KERNEL",
    "LINEAR_QUANT_BACKEND",
    "KERNEL_CONFIG",
    "KERNEL_PROFILE",
    "DEBUG_TENSOR_DUMP_DIR",
    "DEBUG_TENSOR_DUMP_FILTER",
    "DEBUG_TENSOR_DUMP_FILTER_FN",
    "PLUGINS",
    "PLUGINS_BLOCK",
]


def override(config: EngineConfig, **environ: str) -> EngineConfig:
    names = {f"PHYAI_{name}": text for name, text in environ.items()}
    return env.override(config, explicit=True, environ=names)


def test_registry_is_complete_and_names_real_fields() -> None:
    names = [var.name for var in env.REGISTRY]
    assert {f"PHYAI_{name}" for name in SPECIFIED} <= set(names)
    assert len(names) == len(set(names))
    config = EngineConfig()
    for var in env.REGISTRY:
        assert var.help
        if var.field:
            section, _, leaf = var.field.partition(".")
            fields = {f.name for f in dataclasses.fields(getattr(config, section))}
            assert {leaf, *var.clears} <= fields, var
        else:
            assert var.read_by in ("plugins", "env")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PHYAI_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, Path("/a/b")),
        ({"PHYAI_CACHE": " ", "XDG_CACHE_HOME": "/x"}, Path("/x/phyai")),
        ({"XDG_CACHE_HOME": "relative"}, Path("~/.cache/phyai").expanduser()),
        ({}, Path("~/.cache/phyai").expanduser()),
        ({"PHYAI_CACHE": "~/mine"}, Path("~/mine").expanduser()),
    ],
)
def test_cache_dir_follows_own_variable_then_xdg(environ: dict[str, str], expected: Path) -> None:
    assert env.cache_dir(environ) == expected


def test_only_the_registry_and_discovery_read_phyai_variables() -> None:
    readers = set()
    for root in phyai.__path__:
        for file in Path(root).rglob("*.py"):
            if "PHYAI_" not in (text := file.read_text(encoding="utf-8")):
                continue
            nodes = list(ast.walk(ast.parse(text)))
            reads = any(
                (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
                or (isinstance(node, ast.Name) and node.id in ("environ", "getenv"))
                for node in nodes
            )
            named = any(
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"PHYAI_[A-Z_]*", node.value)
                for node in nodes
            )
            if reads and named:
                readers.add(file.name)
    assert readers == {"env.py", "plugin_records.py"}


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_true_words(text: str) -> None:
    config = EngineConfig(runtime=RuntimeConfig(use_cuda_graph=False))
    assert override(config, USE_CUDA_GRAPH=text).runtime.use_cuda_graph is True


@pytest.mark.parametrize("text", ["0", "false", "No", "off"])
def test_false_words(text: str) -> None:
    assert override(EngineConfig(), USE_CUDA_GRAPH=text).runtime.use_cuda_graph is False


def test_every_section_is_overridden() -> None:
    config = override(
        EngineConfig(),
        DEVICE="cpu",
        PARAMS_DTYPE="fp32",
        ATTN_BACKEND="SDPA",
        SEED="7",
        FORCE_LINEAR_KERNEL="none",
        TP_SIZE="2",
        CFG_SIZE="2",
        WORLD_SIZE="4",
        KERNEL_PROFILE="autotune",
    )
    assert config.device == DeviceConfig("cpu", "float32")
    assert config.backends.attn == "sdpa"
    assert config.runtime.seed == 7
    assert config.runtime.force_linear_kernel is None
    assert config.parallel == ParallelConfig(tp_size=2, cfg_size=2, world_size=4)
    assert config.kernel.profile == "autotune"


def test_dump_filter_is_a_json_list_or_one_regex() -> None:
    one = override(EngineConfig(), DEBUG_TENSOR_DUMP_FILTER="[0-9]+$")
    assert one.runtime.debug_tensor_dump_filter == ("[0-9]+$",)
    two = override(EngineConfig(), DEBUG_TENSOR_DUMP_FILTER='["a", "b"]')
    assert two.runtime.debug_tensor_dump_filter == ("a", "b")
    with pytest.raises(ConfigError, match="PHYAI_DEBUG_TENSOR_DUMP_FILTER must be a non-empty"):
        override(EngineConfig(), DEBUG_TENSOR_DUMP_FILTER="[1]")


def test_a_variable_clears_the_field_it_excludes() -> None:
    config = EngineConfig(kernel=KernelConfig(policy_config={"rules": []}))
    kernel = override(config, KERNEL_CONFIG="p.yaml").kernel
    assert (kernel.config_path, kernel.policy_config) == ("p.yaml", None)
    config = EngineConfig(runtime=RuntimeConfig(debug_tensor_dump_filter=("a",)))
    runtime = override(config, DEBUG_TENSOR_DUMP_FILTER_FN="m:f").runtime
    assert runtime.debug_tensor_dump_filter is None
    with pytest.raises(ConfigError, match="PHYAI_DEBUG_TENSOR_DUMP_FILTER"):
        override(config, DEBUG_TENSOR_DUMP_FILTER_FN="m:f", DEBUG_TENSOR_DUMP_FILTER="b")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("USE_CUDA_GRAPH", "maybe"),
        ("SEED", "1.5"),
        ("SEED", "-1"),
        ("DEVICE", "tpu"),
        ("PARAMS_DTYPE", "int8"),
        ("ATTN_BACKEND", "magic"),
        ("DP_SIZE", "2"),
        ("TP_SIZE", "0"),
        ("WORLD_SIZE", "3"),
        ("KERNEL_PROFILE", "fast"),
        ("FLASHINFER_WORKSPACE_BYTES", "128M"),
    ],
)
def test_a_refused_value_names_its_variable(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^PHYAI_{name}\b.*; got ") as caught:
        override(EngineConfig(), SEED="3", **{name: text}) if name != "SEED" else override(
            EngineConfig(), SEED=text
        )
    assert name == "SEED" or "PHYAI_SEED" not in str(caught.value)


def test_env_beats_an_explicit_config_and_says_so_once_per_field(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PHYAI_DEVICE", "cpu")
    monkeypatch.setenv("PHYAI_PARAMS_DTYPE", "fp32")
    monkeypatch.setenv("PHYAI_SEED", "5")
    base = EngineConfig(
        device=DeviceConfig("cuda:1", "bf16"), runtime=RuntimeConfig(seed=5, num_threads=2)
    )
    with caplog.at_level(logging.INFO, logger="phyai"):
        config = EngineConfig.from_env(base)
    assert config.device == DeviceConfig("cpu", "fp32")
    assert config.runtime == base.runtime
    assert [record.getMessage() for record in caplog.records] == [
        "PHYAI_DEVICE overrides the given config.device.target: 'cuda:1' -> 'cpu'",
        "PHYAI_PARAMS_DTYPE overrides the given config.device.params_dtype: "
        "'bfloat16' -> 'float32'",
    ]
    assert base.device.target == "cuda:1"


def test_from_env_without_a_config_is_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PHYAI_DEVICE", "cpu")
    monkeypatch.setenv("PHYAI_MAX_LIVE_CACHES", "3")
    with caplog.at_level(logging.INFO, logger="phyai"):
        config = EngineConfig.from_env()
    assert config.runtime.max_live_caches == 3
    assert not caplog.records
    with pytest.raises(ConfigError, match="base must be an EngineConfig"):
        EngineConfig.from_env({})  # type: ignore[arg-type]


def test_the_wait_for_others_of_a_batch() -> None:
    assert override(EngineConfig(), BATCH_WAIT_MS="2.5").runtime.batch_wait_ms == 2.5
    with pytest.raises(ConfigError, match="PHYAI_BATCH_WAIT_MS"):
        override(EngineConfig(), BATCH_WAIT_MS="-1")


def test_limits_of_sessions() -> None:
    config = override(EngineConfig(), MAX_SESSIONS="2", SESSION_TTL_S="1.5")
    assert (config.runtime.max_sessions, config.runtime.session_ttl_s) == (2, 1.5)
    assert override(config, SESSION_TTL_S="none").runtime.session_ttl_s is None
    for name, text in (("MAX_SESSIONS", "0"), ("SESSION_TTL_S", "soon"), ("SESSION_TTL_S", "nan")):
        with pytest.raises(ConfigError, match=f"PHYAI_{name}"):
            override(config, **{name: text})


def test_empty_is_unset_and_typing_mistakes_are_listed() -> None:
    base = EngineConfig()
    assert override(base, DEVICE="", SEED=" ") == base
    environ = {"PHYAI_DEVCE": "cpu", "PHYAI_DEVICE": "cpu", "PHYAI_PLUGINS": "a", "HOME": "/"}
    assert env.unknown_names(environ) == ("PHYAI_DEVCE",)
    assert env.suggestion("PHYAI_DEVCE") == " Did you mean 'PHYAI_DEVICE'?"
