"""Classes between processes: found by name, rebuilt without running their code."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by Python code or by PyErr_NewException


@functools.lru_cache(maxsize=512)
def reference(cls: type) -> str:
    """Return ``module:qualname``, by which ``locate`` finds the class in another process.

    The main module of a spawned process is ``__mp_main__``; both sides say ``__main__``.
    Raises: TypeError when it would find something else or nothing.
    """
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    name = f"{module}:{cls.__qualname__}"
    if module == "__main__" and not _is_a_file(sys.modules.get(module)):
        raise TypeError("whose class is of a main module that is no file (a notebook, python -c)")
    try:
        found: Any = locate(name)
    except (ImportError, LookupError, TypeError):
        found = None
    if found is not cls:
        raise TypeError("whose class is not found by its name (is it local to a function?)")
    return name


def _is_a_file(main: Any) -> bool:
    """Return whether other processes can import this main module."""
    by_name = getattr(main, "__spec__", None) is not None
    return by_name or os.path.isfile(getattr(main, "__file__", None) or "")


def locate(name: str) -> type:
    """Return the class called ``module:qualname``, importing its module.

    Raises: ImportError, KeyError, TypeError when there is no such class.
    """
    module_name, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module_name) or importlib.import_module(module_name)
    for part in qualname.split("."):
        if not isinstance(found, (types.ModuleType, type)):
            raise TypeError(f"{name!r} is no class")
        found = vars(found)[part]  # an attribute that must be computed is no class of a module
    if not isinstance(found, type):
        raise TypeError(f"{name!r} is no class")
    return found


# ---------------------------------------------------------------- dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class FieldPlan:
    """How the instances of one dataclass are read and rebuilt."""

    names: tuple[str, ...]
    name_set: frozenset[str]
    slots: bool  # no field lies in an instance __dict__


@functools.lru_cache(maxsize=512)
def field_plan(cls: type) -> FieldPlan:
    """Return the plan of a dataclass; TypeError when it holds more than its fields say."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError("whose class is no dataclass")
    if cls.__new__ is not object.__new__:
        raise TypeError("whose class has a __new__ of its own")
    names = tuple(field.name for field in dataclasses.fields(cls))
    static = {name: inspect.getattr_static(cls, name, None) for name in names}
    members = {name for name, value in static.items() if inspect.ismemberdescriptor(value)}
    for name in names:
        if name not in members and inspect.isdatadescriptor(static[name]):
            raise TypeError(f"whose field {name!r} is a property")
    return FieldPlan(names, frozenset(names), members == set(names))


def read_dataclass(instance: Any, plan: FieldPlan) -> dict[str, Any]:
    """Return the fields that are set, and what the instance carries beside them.

    Cached properties are left behind: they are computed anew.
    """
    own: dict[str, Any] = getattr(instance, "__dict__", {})
    if own.keys() == plan.name_set:
        return own
    found = {name: getattr(instance, name) for name in plan.names if hasattr(instance, name)}
    for name in own.keys() - plan.name_set:
        static = inspect.getattr_static(type(instance), name, None)
        if not isinstance(static, functools.cached_property):
            found[name] = own[name]
    return found


def build_dataclass(cls: type, attributes: Mapping[str, Any]) -> Any:
    """Return an instance with these attributes; neither __init__ nor __post_init__ runs."""
    plan = field_plan(cls)
    instance: Any = object.__new__(cls)
    set_field = object.__setattr__
    if attributes.keys() == plan.name_set:
        for name, value in attributes.items():
            set_field(instance, name, value)
        return instance
    own = None if plan.slots and len(plan.names) == len(attributes) else instance.__dict__
    for name, value in attributes.items():
        if name in plan.name_set:
            set_field(instance, name, value)
        elif own is not None and type(name) is str:
            own[name] = value
        else:
            raise TypeError(f"{cls.__qualname__} has no field {name!r}")
    return instance


def check_named_tuple(cls: type, size: int) -> None:
    """Raise TypeError unless the class is a named tuple of that many fields."""
    fields = getattr(cls, "_fields", None)
    if not issubclass(cls, tuple) or not isinstance(fields, tuple) or len(fields) != size:
        raise TypeError(f"whose class {cls.__qualname__} is no named tuple of {size} fields")


# ---------------------------------------------------------------- exceptions


def error_arguments(error: BaseException) -> tuple[Any, ...]:
    """Return what the built-in base of an error's class was made of."""
    args = error.args
    if isinstance(error, OSError) and len(args) == 2 and error.filename is not None:
        args = (*args, error.filename)  # OSError drops the file names from its args
        if error.filename2 is not None:
            args = (*args, None, error.filename2)
    return args


def build_error(
    cls: type[BaseException], args: Sequence[Any], attributes: Mapping[str, Any]
) -> BaseException:
    """Return an error by its built-in base alone; its class's own code does not run."""
    base: Any = next(c for c in cls.__mro__ if not c.__flags__ & _HEAP_TYPE)
    error: BaseException = base.__new__(cls, *args)
    base.__init__(error, *args)
    error.__dict__.update(attributes)
    return error


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, or what can be said when that fails."""
    try:
        return str(error)
    except Exception:
        return "(its text cannot be made)"
