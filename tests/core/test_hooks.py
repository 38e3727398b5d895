"""The hook table: names, arguments, kinds, and the rules an implementation must keep."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from phyai import hooks
from phyai.errors import PluginContractError
from phyai.hooks import hookimpl
from phyai.plugin_rules import OBSERVER_HOOKS, PART_HOOKS, check_hooks, hook_arguments
from phyai.plugins import add_hooks, create_manager

PART = ("adapter", "services")


def test_the_table_is_the_contract() -> None:
    assert hook_arguments() == {
        "phyai_adapter": (),
        "phyai_conditioning": PART,
        "phyai_cache": PART,
        "phyai_solver": PART,
        "phyai_rollout_solver": PART,
        "phyai_output": PART,
        "phyai_denoiser": ("adapter", "services", "stage", "inner"),
        "phyai_validate_action": ("chunk", "adapter"),
        "phyai_kernels": (),
        "phyai_commands": (),
        "phyai_engine_ready": ("info",),
        "phyai_request_started": ("info",),
        "phyai_request_finished": ("info",),
        "phyai_engine_closing": ("info",),
    }


def test_part_hooks_and_only_they_return_the_first_result() -> None:
    first = {n for n in hook_arguments() if getattr(hooks, n).phyai_spec["firstresult"]}
    assert first == set(PART_HOOKS)
    assert set(OBSERVER_HOOKS) <= set(hook_arguments())


def test_every_hook_says_what_it_is_for() -> None:
    assert all(getattr(hooks, name).__doc__ for name in hook_arguments())


def test_importing_hooks_and_plugins_imports_no_torch() -> None:
    code = "import sys, phyai.hooks, phyai.plugins, phyai.binding; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def plugin(**functions: object) -> SimpleNamespace:
    return SimpleNamespace(**functions)


@hookimpl
def phyai_solverr(adapter: object) -> None: ...


@hookimpl
def phyai_solver(adaptor: object) -> None: ...


@hookimpl
def phyai_output(*, adapter: object) -> None: ...


@hookimpl
def phyai_cache(**anything: object) -> None: ...


@hookimpl(wrapper=True)
def phyai_conditioning(adapter: object) -> None: ...


@hookimpl
def phyai_denoiser(inner: object):  # type: ignore[no-untyped-def]
    yield inner


@hookimpl(hookwrapper=True)
def phyai_rollout_solver():  # type: ignore[no-untyped-def]
    yield


@hookimpl(wrapper=True)
def phyai_validate_action():  # type: ignore[no-untyped-def]
    yield


@hookimpl
def phyai_adapter() -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (phyai_solverr, ["'phyai_solverr'", "'mine'", "Did you mean 'phyai_solver'"]),
        (phyai_solver, ["'phyai_solver'", "'adaptor'", "Did you mean 'adapter'", "services"]),
        (phyai_output, ["plain named arguments"]),
        (phyai_cache, ["'**anything", "plain named arguments"]),
        (phyai_conditioning, ["must yield once"]),
        (phyai_denoiser, ["not marked as a wrapper"]),
        (phyai_rollout_solver, ["new wrapper style", "wrapper=True"]),
        (phyai_validate_action, ["cannot be wrapped"]),
        (phyai_adapter, ["never called", "phyai.plugins"]),
    ],
)
def test_a_broken_hook_is_named_with_its_remedy(function, words) -> None:  # type: ignore[no-untyped-def]
    broken = plugin(**{function.__name__: function})
    with pytest.raises(PluginContractError) as caught:
        add_hooks(create_manager(), broken, "mine")
    assert all(word in str(caught.value) for word in ["'mine'", *words])


def test_commands_of_an_adapter_module_are_refused_because_nobody_calls_them() -> None:
    @hookimpl
    def phyai_commands() -> dict[str, object]:
        return {}

    with pytest.raises(PluginContractError, match=r"phyai\.hooks"):
        check_hooks(plugin(phyai_commands=phyai_commands), "mine", "adapter")


def test_a_specname_and_fewer_arguments_are_fine() -> None:
    @hookimpl(specname="phyai_validate_action")
    def speed_limit(chunk: object) -> str:
        return "too fast"

    manager = create_manager()
    add_hooks(manager, plugin(speed_limit=speed_limit), "mine")
    assert manager.hook.phyai_validate_action(chunk=1, adapter=None) == ["too fast"]


def test_an_optional_hook_of_a_newer_core_is_fine() -> None:
    @hookimpl(optionalhook=True)
    def phyai_of_tomorrow(anything: object) -> None: ...

    add_hooks(create_manager(), plugin(phyai_of_tomorrow=phyai_of_tomorrow), "mine")


def test_a_taken_name_is_refused() -> None:
    manager = create_manager()
    add_hooks(manager, plugin(), "mine")
    with pytest.raises(PluginContractError, match="'mine' is taken"):
        add_hooks(manager, plugin(), "mine")
