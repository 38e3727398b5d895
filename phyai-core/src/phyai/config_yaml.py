"""YAML files as plain mappings: read strictly, override by dotted keys, write.

Nothing in a file is executed or looked up: no tags, no interpolations, no duplicate keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from phyai.errors import ConfigError

MAX_NODES = 100_000  # of a file with its aliases written out; a real one has some dozens


class _Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
    """SafeLoader that also reads ``1e-3`` as a number and leaves dates as text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regex) for tag, regex in rows if not tag.endswith(":timestamp")]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*)(?:\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def load_yaml_mapping(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises: ConfigError for an unreadable file, bad YAML, a non-mapping, duplicate or non-string
    keys, tags and ``${...}`` interpolations, with file, line and dotted path.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"config file must exist and must be readable UTF-8; got {str(file)!r}, which does not "
            "exist. Check the path."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"config file must be readable UTF-8; got {str(file)!r}: {error}."
        ) from error
    try:
        return parse_yaml_mapping(text)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def parse_yaml_mapping(text: str) -> dict[str, Any]:
    """Return the mapping in YAML text; see ``load_yaml_mapping``."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if not isinstance(node, yaml.MappingNode):
                raise ConfigError(
                    "config file must hold a mapping; got none. Start with `plugin:`."
                )
            return dict(_Plain(loader).value(node, ""))
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"config file must be valid YAML; {error}") from error


class _Plain:
    """Turns YAML nodes into plain data, path by path."""

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader
        self._open: set[int] = set()
        self._count = 0

    def value(self, node: yaml.Node, path: str) -> Any:
        where = f"{path or 'file'} (line {node.start_mark.line + 1})"
        self._count += 1
        if self._count > MAX_NODES:
            raise ConfigError(f"{where} must not expand to more than {MAX_NODES} values.")
        if id(node) in self._open:
            raise ConfigError(f"{where} must not contain itself; got a recursive alias.")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path, where)
        expected = "map" if isinstance(node, yaml.MappingNode) else "seq"
        if node.tag != f"tag:yaml.org,2002:{expected}":
            raise ConfigError(f"{where} must be plain data; got tag {node.tag!r}.")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return [self.value(item, f"{path}[{i}]") for i, item in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode, path: str, where: str) -> Any:
        try:
            value = self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{where} must be plain data; {error}") from error
        if value is not None and type(value) not in (bool, int, float, str):
            raise ConfigError(f"{where} must be plain data; got {value!r}.")
        _refuse_interpolation(value, path)
        return value

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag != "tag:yaml.org,2002:str":
                raise ConfigError(
                    f"{path or 'file'} (line {line}) must have string keys; got "
                    f"{getattr(key_node, 'value', key_node)!r}. Put quotes around it."
                )
            key = str(key_node.value)
            inner = f"{path}.{key}" if path else key
            if key in found:
                raise ConfigError(f"{inner} (line {line}) must be given once; got it twice.")
            _refuse_interpolation(key, inner)
            found[key] = self.value(value_node, inner)
        return found


def _refuse_interpolation(value: object, path: str) -> None:
    if isinstance(value, str) and "${" in value:
        raise ConfigError(
            f"{path} must not use ${{...}} interpolation; got {value!r}. Write the value itself."
        )


def _refuse_interpolations(value: object, path: str) -> None:
    _refuse_interpolation(value, path)
    if isinstance(value, Mapping):
        for key, item in value.items():
            inner = f"{path}.{key}" if path else str(key)
            _refuse_interpolation(key, inner)
            _refuse_interpolations(item, inner)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _refuse_interpolations(item, f"{path}[{i}]")


def apply_overrides(mapping: Mapping[str, Any], dotlist: Iterable[str]) -> dict[str, Any]:
    """Return a copy of ``mapping`` with ``a.b.c=value`` settings written over it, in order.

    A value is YAML (``true``, ``[1, 2]``, ``{target: cpu}``); a mapping merges.
    Raises: ConfigError for a setting without ``=`` or ``${...}`` in any key or value.
    """
    _refuse_interpolations(mapping, "")
    changes = list(dotlist)
    for change in changes:
        key, equals, _ = change.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override must look like key=value; got {change!r}.")
        _refuse_interpolation(change, key)
        if any(not part.strip() for part in re.split(r"[.\[]", key)):
            raise ConfigError(f"{key} must be a dotted path without empty parts; got {change!r}.")
    if not changes:
        return dict(mapping)
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.create(dict(mapping))
    except OmegaConfBaseException as error:
        raise ConfigError(f"config file must hold plain data; {error}.") from error
    for change in changes:
        try:
            config.merge_with_dotlist([change])
        except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, IndexError) as error:
            raise ConfigError(f"override {change!r} must fit the file; {error}.") from error
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def dump_yaml(data: Mapping[str, Any]) -> str:
    """Return plain data as YAML that ``load_yaml_mapping`` reads back."""
    return str(yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True))
