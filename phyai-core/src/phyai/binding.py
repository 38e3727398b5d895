"""Hooks into bound parts: ask the replacements, apply the wrappers, once, at set-up.

Nothing here runs while a request runs: the runner keeps the parts, validators and observers
that come out as plain objects and callables.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from traceback import walk_tb
from types import ModuleType
from typing import Any, NamedTuple

import pluggy

from phyai.errors import PluginContractError, PluginError
from phyai.plugin_rules import OBSERVER_HOOKS, PART_HOOKS, check_hooks
from phyai.plugins import PluginRecord, create_manager
from phyai.types import ActionChunk, Denoiser

log = logging.getLogger("phyai")

# What core uses of each part; a cache part is a plain function.
PART_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "phyai_conditioning": ("encode",),
    "phyai_cache": ("__call__",),
    "phyai_solver": ("accepts", "grid", "solve"),
    "phyai_rollout_solver": ("accepts", "grid", "solve"),
    "phyai_output": ("decode", "tensors"),
    "phyai_denoiser": ("prediction", "__call__"),
}
# Optional methods that core looks for behind wrappers, by the attribute ``inner``. Were one hidden,
# tables or index lists would never be filled and every result would be silently wrong.
FOUND_BEHIND = {"phyai_denoiser": "prepare_grid", "phyai_conditioning": "plan"}


# What core reads of a kernel row first; it must not import their class, which imports torch.
_ROW_ATTRIBUTES = ("op", "name", "fn", "reference")


class Validator(NamedTuple):
    """A bound ``phyai_validate_action``: what is wrong with the chunk, or None."""

    name: str
    check: Callable[[ActionChunk], str | None]


class Observers:
    """The bound observers of one hook: call it with the facts; it never raises.

    failures: plugin name -> how often its observer raised.
    """

    def __init__(self, hook: str, calls: Iterable[tuple[str, Callable[[Any], Any]]]) -> None:
        self.hook = hook
        self.failures: Counter[str] = Counter()
        self._calls = tuple(calls)

    def __call__(self, info: Any) -> None:
        for name, call in self._calls:
            try:
                call(info)
            except (Exception, SystemExit):
                self.failures[name] += 1
                if self.failures[name] == 1:
                    log.exception(
                        "observer %s of plugin %s failed; it stays on, further failures are only "
                        "counted",
                        self.hook,
                        name,
                    )


class HookBinder:
    """Turns hook implementations into the parts of one adapter.

    manager: the loaded hook plugins.  plugin: the selected adapter's PluginRecord or plugin
    module; its own hooks take part, and a third party's replacement wins over its own.

    >>> from phyai.binding import HookBinder
    >>> from phyai.plugins import create_manager
    >>> HookBinder(create_manager(), None, None, None).bind_part("phyai_cache", dict)
    <class 'dict'>
    """

    def __init__(
        self,
        manager: pluggy.PluginManager,
        plugin: PluginRecord | ModuleType | None,
        adapter: Any,
        services: Any,
    ) -> None:
        module = plugin.module if isinstance(plugin, PluginRecord) else plugin
        self.adapter, self.services = adapter, services
        for name, loaded in manager.list_name_plugin():
            if loaded is not None:  # None: a blocked name
                check_hooks(loaded, name, "hooks")
        self._managers = [manager]
        self._found: dict[str, tuple[list[pluggy.HookImpl], list[pluggy.HookImpl]]] = {}
        self._own: str | None = None
        if module is not None and not manager.is_registered(module):
            # A manager of its own: the caller's one may serve several adapters.
            self._own = plugin.id if isinstance(plugin, PluginRecord) else module.__name__
            check_hooks(module, self._own, "adapter")
            own = create_manager()
            own.register(module, name=self._own)
            self._managers.append(own)

    # ------------------------------------------------------------ parts

    def bind_part(
        self,
        hook: str,
        default: Any,
        *,
        exact: bool = False,
        around: Callable[[Any], Any] | None = None,
        **extra: Any,
    ) -> Any:
        """Return the part of ``hook``: the replacement or ``default``, inside its wrappers.

        default: the adapter's own part.  exact: leave out parts that say ``approximate``.
        around: core's own wrapper, inside all others.
        extra: further arguments of the hook.
        Raises: PluginContractError for two replacements, a wrong object or a wrapper that does not
        yield once; PluginError, chained, naming plugin and hook, when an implementation raises.
        """
        if hook not in PART_HOOKS:
            raise PluginContractError(
                f"A part hook must be one of {', '.join(PART_HOOKS)}; got {hook!r}."
            )
        offered = {"adapter": self.adapter, "services": self.services, **extra}
        plain, wrappers = self._implementations(hook)
        part = self._replacement(hook, plain, offered, exact)
        part = default if part is None else part
        part = part if around is None else around(part)
        return self._wrap(hook, wrappers, offered, part, exact)

    def bind_denoiser(
        self,
        stage: str,
        inner: Denoiser,
        *,
        exact: bool = False,
        around: Callable[[Denoiser], Denoiser] | None = None,
    ) -> Denoiser:
        """Return ``inner`` with its replacement and wrappers for ``stage``; see ``bind_part``.

        stage: ``network`` or ``prediction``.  exact: True for rollout, which needs the network
        itself and leaves step caches out.
        """
        bound: Denoiser = self.bind_part(
            "phyai_denoiser", inner, exact=exact, around=around, stage=stage, inner=inner
        )
        return bound

    def _replacement(
        self, hook: str, plain: list[pluggy.HookImpl], offered: Mapping[str, Any], exact: bool
    ) -> Any:
        found: dict[str, Any] = {}
        own: Any = None
        for implementation in plain:
            name = implementation.plugin_name
            with _Blame(name, hook):
                part = _call(implementation, offered)
            if part is None or (exact and _approximate(part)):
                continue
            _check_part(hook, name, part, offered.get("inner"))
            if self._is_own(implementation):
                own = part
            else:
                found[name] = part
        if len(found) > 1:
            names = " and ".join(repr(name) for name in sorted(found))
            raise PluginContractError(
                f"Part {hook.removeprefix('phyai_')!r} may be replaced by one plugin only; got "
                f"{names}. Deny one of them in PHYAI_PLUGINS_BLOCK, or make it a wrapper."
            )
        return next(iter(found.values()), own)

    def _wrap(
        self,
        hook: str,
        wrappers: list[pluggy.HookImpl],
        offered: Mapping[str, Any],
        part: Any,
        exact: bool,
    ) -> Any:
        started: list[tuple[str, Generator[None, Any, Any]]] = []
        try:
            for implementation in wrappers:
                name = implementation.plugin_name
                with _Blame(name, hook):
                    generator = _call(implementation, offered)
                    started.append((name, generator))
                    _start(generator, hook, name)
            for name, generator in reversed(started):  # the first wrapper is the outermost
                with _Blame(name, hook):
                    wrapped = _finish(generator, hook, name, part)
                if wrapped is None and part is None:
                    continue
                if exact and wrapped is not part and _approximate(wrapped):
                    continue
                if wrapped is not part:
                    _check_part(hook, name, wrapped, part)
                part = wrapped
        finally:
            for _, generator in started:
                generator.close()
        return part

    # ------------------------------------------------------------ request path and life cycle

    def validators(self) -> list[Validator]:
        """Return the bound action validators in order; text, or an exception, blocks the chunk."""
        offered = {"adapter": self.adapter}
        return [
            Validator(i.plugin_name, _bind_validator(i, offered))
            for i in self._implementations("phyai_validate_action")[0]
        ]

    def observers(self, hook: str) -> Observers:
        """Return the bound observers of ``hook``; they are isolated from the engine and counted."""
        if hook not in OBSERVER_HOOKS:
            raise PluginContractError(
                f"An observer hook must be one of {', '.join(OBSERVER_HOOKS)}; got {hook!r}."
            )
        return Observers(
            hook,
            [(i.plugin_name, _bind_one(i, {}, "info")) for i in self._implementations(hook)[0]],
        )

    def kernel_rows(self) -> list[Any]:
        """Return the kernel rows of every plugin, the selected adapter's included."""
        rows: list[Any] = []
        for implementation in self._implementations("phyai_kernels")[0]:
            name = implementation.plugin_name
            with _Blame(name, "phyai_kernels"):
                offered = list(_call(implementation, {}) or ())
            for row in offered:
                if missing := [a for a in _ROW_ATTRIBUTES if not hasattr(row, a)]:
                    raise PluginContractError(
                        f"Hook 'phyai_kernels' of plugin {name!r} must return KernelRows; got "
                        f"{type(row).__name__} without {', '.join(missing)}. See phyai.kernels."
                    )
            rows += offered
        return rows

    def add_note(self, error: BaseException) -> None:
        """Note on the error of a request which hook plugin's code raised it, if one's did."""
        packages = {
            _package(implementation.function): implementation.plugin_name
            for hook in PART_HOOKS
            for implementations in self._implementations(hook)
            for implementation in implementations
            if not self._is_own(implementation)
        }
        adapter = _package(type(self.adapter))
        frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
        for module in reversed(frames):  # from where it was raised outwards
            if _inside(module, adapter):
                return
            name = next((n for package, n in packages.items() if _inside(module, package)), None)
            if name is not None:
                error.add_note(f"Raised by code of hook plugin {name!r}.")
                return

    # ------------------------------------------------------------ internals

    def _is_own(self, implementation: pluggy.HookImpl) -> bool:
        return len(self._managers) > 1 and self._managers[1].is_registered(implementation.plugin)

    def _implementations(self, hook: str) -> tuple[list[pluggy.HookImpl], list[pluggy.HookImpl]]:
        """Return plain and wrapper implementations in call order, as of the first look.

        A key that is first seen by a request binds its denoiser; pluggy is not asked again.
        """
        if hook not in self._found:
            self._found[hook] = self._look_up(hook)
        return self._found[hook]

    def _look_up(self, hook: str) -> tuple[list[pluggy.HookImpl], list[pluggy.HookImpl]]:
        found = [
            implementation
            for manager in self._managers
            for implementation in getattr(manager.hook, hook).get_hookimpls()
        ]
        found.sort(key=lambda i: (not i.tryfirst, i.trylast, i.plugin_name))
        return [i for i in found if not i.wrapper], [i for i in found if i.wrapper]


class _Blame:
    """Turns an exception of plugin code into a PluginError naming plugin and hook."""

    def __init__(self, name: str, hook: str) -> None:
        self.name, self.hook = name, hook

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        blamed = isinstance(error, (Exception, SystemExit))
        if blamed and not isinstance(error, _WrapperError):
            raise PluginError(
                f"Plugin {self.name!r} failed in {self.hook}: {type(error).__name__}: {error}"
            ) from error


class _WrapperError(PluginContractError):
    """A wrapper broke the protocol; already names its plugin and hook."""


def _package(thing: Any) -> str:
    """Return the package of a function or class, or its module where that has none."""
    module: str = thing.__module__
    return module.rpartition(".")[0] or module


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _call(implementation: pluggy.HookImpl, offered: Mapping[str, Any]) -> Any:
    return implementation.function(**{name: offered[name] for name in implementation.argnames})


def _start(generator: Generator[None, Any, Any], hook: str, name: str) -> None:
    try:
        next(generator)
    except StopIteration:
        raise _WrapperError(
            f"Wrapper {hook!r} of plugin {name!r} must yield exactly once; it returned before its "
            "yield."
        ) from None


def _finish(generator: Generator[None, Any, Any], hook: str, name: str, part: Any) -> Any:
    try:
        generator.send(part)
    except StopIteration as stop:
        if stop.value is None and part is not None:
            raise _WrapperError(
                f"Wrapper {hook!r} of plugin {name!r} must return the part; got None. End it with "
                "`return inner` or an object around it."
            ) from None
        return stop.value
    raise _WrapperError(
        f"Wrapper {hook!r} of plugin {name!r} must yield exactly once; it yielded again."
    )


def _check_part(hook: str, name: str, part: Any, inner: Any) -> None:
    missing = [a for a in PART_ATTRIBUTES[hook] if not hasattr(part, a)]
    if missing:
        raise PluginContractError(
            f"Hook {hook!r} of plugin {name!r} must return a {hook.removeprefix('phyai_')} part; "
            f"got {type(part).__name__} without {', '.join(missing)}. See phyai.types."
        )
    method = FOUND_BEHIND.get(hook)
    if method is not None and _reaches(inner, method) and not _reaches(part, method):
        raise PluginContractError(
            f"Hook {hook!r} of plugin {name!r} hides {method}() of the wrapped part. Keep it in "
            f"attribute 'inner', or implement {method}()."
        )


def _reaches(part: Any, attribute: str) -> bool:
    while part is not None:
        if hasattr(part, attribute):
            return True
        part = getattr(part, "inner", None)
    return False


def _approximate(part: Any) -> bool:
    return bool(getattr(part, "approximate", False))


def _bind_one(
    implementation: pluggy.HookImpl, offered: Mapping[str, Any], free: str
) -> Callable[[Any], Any]:
    """Return a function of one argument, ``free``, with the other arguments filled in."""
    function = implementation.function
    fixed = {name: offered[name] for name in implementation.argnames if name != free}
    if free not in implementation.argnames:
        return lambda value: function(**fixed)
    return lambda value: function(**{free: value}, **fixed)


def _bind_validator(
    implementation: pluggy.HookImpl, offered: Mapping[str, Any]
) -> Callable[[ActionChunk], str | None]:
    call = _bind_one(implementation, offered, "chunk")

    def check(chunk: ActionChunk) -> str | None:
        problem = call(chunk)
        if problem is None:
            return None
        if isinstance(problem, str):
            return problem or "no reason given"
        # Neither "fine" nor a reason: blocking is the safe reading.
        return f"a validator must return a text or None; got {problem!r}"

    return check
