"""Strict YAML files and dotlist overrides, before anything is built from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phyai.engine_builder import apply_overrides, load_yaml_mapping
from phyai.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "engine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------- reading YAML


def test_load_reads_plain_data(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "plugin: p\nplugin_args: &a {x: 1e-3, y: [1, 2.5, true, null, 2026-01-02]}\nother: *a\n",
    )
    plain = {"x": 1e-3, "y": [1, 2.5, True, None, "2026-01-02"]}
    assert load_yaml_mapping(path) == {"plugin": "p", "plugin_args": plain, "other": plain}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {b: 1, c: 2, b: 3}", r"a\.b \(line 1\) must be given once"),
        ("a:\n  - {}\n  - {1: x}", r"a\[1\] \(line 3\) must have string keys; got '1'"),
        ("a: {true: x}", "a .* must have string keys"),
        ("x: &x {k: 1}\na: {<<: *x}", "a .* must have string keys"),
        ("{[1, 2]: x}", "must have string keys"),
        ("a: {b: '${oc.env:HOME}'}", r"a\.b must not use \$"),
        ("a: {'${x}': 1}", "must not use"),
        ("a: !!python/object/apply:os.system ['true']", "a .* must be plain data; got tag"),
        ("a: !!python/name:os.system ''", "a .* must be plain data"),
        ("a: !!binary aGVsbG8=", "a .* must be plain data"),
        ("a: !!set {x}", "a .* must be plain data"),
        ("a: &a [*a]", r"a\[0\] .*must not contain itself"),
        ("- 1", "must hold a mapping"),
        ("", "must hold a mapping"),
        ("a: [1", "must be valid YAML"),
        ("a: 1\n---\nb: 2", "must be valid YAML"),
    ],
)
def test_load_refuses(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_yaml_mapping(path)
    assert str(path) in str(caught.value)


def test_load_bounds_alias_expansion(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="must not expand"):
        load_yaml_mapping(write(tmp_path, "\n".join(lines)))


def test_load_refuses_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be readable UTF-8"):
        load_yaml_mapping(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="must be readable UTF-8"):
        load_yaml_mapping(tmp_path / "bad.yaml")


# ---------------------------------------------------------------- overrides


def test_overrides_write_over_a_copy() -> None:
    data: dict[str, Any] = {
        "config": {"device": {"target": "cuda"}},
        "plugin_args": {"shapes": [[1, 2]]},
        "kernel_policy": {"rules": [{"match": {"device.arch": "sm90"}}]},
    }
    changed = apply_overrides(
        data,
        [
            "config.device.target=cpu",
            "plugin_args.shapes=[[3,4]]",
            "config.runtime={seed: 3}",
            "plugin_args.ratio=1e-3",
            "plugin_args.checkpoint_dir=org/model=1",
        ],
    )
    assert changed["config"] == {"device": {"target": "cpu"}, "runtime": {"seed": 3}}
    assert changed["plugin_args"] == {
        "shapes": [[3, 4]],
        "ratio": 1e-3,
        "checkpoint_dir": "org/model=1",
    }
    assert changed["kernel_policy"] == data["kernel_policy"]
    assert data["config"] == {"device": {"target": "cuda"}}
    assert apply_overrides(data, []) == data


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("config.device.target", "must look like key=value"),
        ("=1", "must look like key=value"),
        ("config..device=1", "without empty parts"),
        ("config.seed=${oc.env:HOME}", r"config\.seed must not use"),
        ("${x}=1", "must not use"),
        ("config.x=[1", "must fit the file"),
    ],
)
def test_overrides_refuse(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides({"config": {"device": {"target": "cuda"}}}, [override])


def test_overrides_do_not_resolve_what_the_mapping_holds() -> None:
    with pytest.raises(ConfigError, match=r"a\.b\[0\] must not use"):
        apply_overrides({"a": {"b": ["${oc.env:HOME}"]}}, ["c=1"])
    with pytest.raises(ConfigError, match="must hold plain data"):
        apply_overrides({"a": torch.zeros(1)}, ["c=1"])
