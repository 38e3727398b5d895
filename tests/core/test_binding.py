"""Binding: who replaces a part, who wraps it in which order, and whose fault an error is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from phyai.binding import HookBinder
from phyai.errors import PluginContractError, PluginError
from phyai.hooks import hookimpl
from phyai.plugins import PluginRecord, add_hooks, create_manager

ADAPTER, SERVICES = object(), object()


class Out:
    """A toy Output that remembers its layers."""

    def __init__(self, label: str, inner: Any = None) -> None:
        self.label, self.inner = label, inner

    def decode(self, x: Any, cache: Any, prepared: Any) -> list[Any]:
        return [self.label, *(self.inner.decode(x, cache, prepared) if self.inner else [])]

    def tensors(self, x: Any, cache: Any, prepared: Any) -> Any:
        return x


class Net:
    """A toy denoiser."""

    prediction = "velocity"

    def __init__(self, inner: Any = None, approximate: bool = False) -> None:
        if inner is not None:
            self.inner = inner
        self.approximate = approximate

    def __call__(self, x: Any, step: Any, cache: Any) -> Any:
        return x


class Table(Net):
    def prepare_grid(self, grid: Any) -> None: ...


def replacing(label: str | None, hook: str = "phyai_output", **options: Any) -> SimpleNamespace:
    @hookimpl(specname=hook, **options)
    def replace(adapter: Any) -> Any:
        assert adapter is ADAPTER
        return None if label is None else Out(label)

    return SimpleNamespace(replace=replace)


def wrapping(label: str, **options: Any) -> SimpleNamespace:
    @hookimpl(specname="phyai_output", wrapper=True, **options)
    def wrap(services: Any) -> Any:
        assert services is SERVICES
        inner = yield
        return Out(label, inner)

    return SimpleNamespace(wrap=wrap)


def denoising(make: Callable[..., Any], *, wrapper: bool = True) -> SimpleNamespace:
    if not wrapper:

        @hookimpl
        def phyai_denoiser(stage: str, inner: Any) -> Any:
            return make(inner, stage)

        return SimpleNamespace(phyai_denoiser=phyai_denoiser)

    @hookimpl(specname="phyai_denoiser", wrapper=True)
    def wrap(stage: str) -> Any:
        inner = yield
        return make(inner, stage)

    return SimpleNamespace(wrap=wrap)


def binder(own: Any = None, **plugins: Any) -> HookBinder:
    manager = create_manager()
    for name, plugin in plugins.items():
        add_hooks(manager, plugin, name)
    return HookBinder(manager, own, ADAPTER, SERVICES)


def layers(part: Any) -> list[str]:
    labels: list[str] = part.decode(None, None, None)
    return labels


def own_module(*plugins: SimpleNamespace) -> ModuleType:
    module = ModuleType("own.plugin")
    for plugin in plugins:
        vars(module).update(vars(plugin))
    return module


# ---------------------------------------------------------------- replacing


def test_without_hooks_the_adapters_part_is_used() -> None:
    part = Out("own")
    assert binder().bind_part("phyai_output", part) is part


def test_a_plain_implementation_replaces_and_none_leaves_alone() -> None:
    bound = binder(a=replacing(None), b=replacing("b")).bind_part("phyai_output", Out("own"))
    assert layers(bound) == ["b"]


def test_two_replacements_are_an_error_naming_both() -> None:
    with pytest.raises(PluginContractError) as caught:
        binder(b=replacing("b"), a=replacing("a")).bind_part("phyai_output", Out("own"))
    assert "Part 'output'" in str(caught.value)
    assert "'a' and 'b'" in str(caught.value)


def test_each_replacement_is_asked_even_after_the_first_answer() -> None:
    # firstresult would stop at the first one and hide the conflict
    with pytest.raises(PluginContractError, match="one plugin only"):
        binder(a=replacing("a", tryfirst=True), b=replacing("b", trylast=True)).bind_part(
            "phyai_output", Out("own")
        )


def test_a_third_party_replaces_what_the_adapters_own_module_offers() -> None:
    own = own_module(replacing("module"))
    assert layers(binder(own).bind_part("phyai_output", Out("own"))) == ["module"]
    assert layers(binder(own, a=replacing("a")).bind_part("phyai_output", Out("own"))) == ["a"]


def test_the_own_module_may_come_as_a_record_and_leaves_the_manager_alone() -> None:
    manager = create_manager()
    record = PluginRecord("me", "me-dist", "1", "own.plugin", module=own_module(replacing("m")))
    bound = HookBinder(manager, record, ADAPTER, SERVICES).bind_part("phyai_output", Out("own"))
    assert layers(bound) == ["m"]
    assert manager.list_name_plugin() == []


# ---------------------------------------------------------------- wrapping


def test_wrappers_nest_by_name_the_first_outermost_around_a_replacement() -> None:
    bound = binder(
        c=wrapping("c"), a=wrapping("a"), b=wrapping("b"), r=replacing("replaced")
    ).bind_part("phyai_output", Out("own"))
    assert layers(bound) == ["a", "b", "c", "replaced"]


def test_priority_comes_before_the_name() -> None:
    bound = binder(
        a=wrapping("a", trylast=True), b=wrapping("b"), c=wrapping("c", tryfirst=True)
    ).bind_part("phyai_output", Out("own"))
    assert layers(bound) == ["c", "b", "a", "own"]


def test_the_own_modules_wrappers_take_part_by_name() -> None:
    bound = binder(own_module(wrapping("own")), a=wrapping("a"), z=wrapping("z")).bind_part(
        "phyai_output", Out("part")
    )
    assert layers(bound) == ["a", "own", "z", "part"]


def test_an_identity_wrapper_changes_nothing() -> None:
    @hookimpl(wrapper=True)
    def phyai_output() -> Any:
        return (yield)

    part = Out("own")
    assert (
        binder(a=SimpleNamespace(phyai_output=phyai_output)).bind_part("phyai_output", part) is part
    )


def test_an_optional_part_that_is_none_passes_through_wrappers() -> None:
    @hookimpl(wrapper=True)
    def phyai_rollout_solver() -> Any:
        return (yield)

    bound = binder(a=SimpleNamespace(phyai_rollout_solver=phyai_rollout_solver))
    assert bound.bind_part("phyai_rollout_solver", None) is None


def test_a_cache_wrapper_adds_buffers() -> None:
    @hookimpl(wrapper=True)
    def phyai_cache() -> Any:
        inner = yield
        return lambda key: {**inner(key), "mine": 2}

    spec = binder(a=SimpleNamespace(phyai_cache=phyai_cache)).bind_part(
        "phyai_cache", lambda key: {"own": 1}
    )
    assert spec(None) == {"own": 1, "mine": 2}


def generator(kind: str) -> SimpleNamespace:
    @hookimpl(specname="phyai_output", wrapper=True)
    def wrap() -> Any:
        if kind == "early":
            return None
        inner = yield
        if kind == "forgets":
            return None
        if kind == "twice":
            yield
        if kind == "raises":
            raise KeyError("lost")
        return inner if kind == "fine" else object()

    return SimpleNamespace(wrap=wrap)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("early", "returned before its yield"),
        ("forgets", "must return the part; got None"),
        ("twice", "yielded again"),
        ("wrong", "got object without decode, tensors"),
    ],
)
def test_a_wrapper_that_breaks_the_protocol_is_named(kind: str, words: str) -> None:
    with pytest.raises(PluginContractError, match=words) as caught:
        binder(bad=generator(kind), good=wrapping("good")).bind_part("phyai_output", Out("own"))
    assert "'phyai_output' of plugin 'bad'" in str(caught.value)


def test_a_replacement_that_is_no_such_part_is_named() -> None:
    with pytest.raises(
        PluginContractError, match=r"'bad' must return a solver part.*accepts, grid"
    ):
        binder(bad=replacing("x", hook="phyai_solver")).bind_part("phyai_solver", None)


# ---------------------------------------------------------------- blame


def test_an_exception_while_wrapping_names_plugin_and_hook() -> None:
    with pytest.raises(
        PluginError, match="'bad' failed in phyai_output: KeyError: 'lost'"
    ) as caught:
        binder(bad=generator("raises")).bind_part("phyai_output", Out("own"))
    assert isinstance(caught.value.__cause__, KeyError)
    assert not isinstance(caught.value, PluginContractError)


def test_an_exception_of_a_replacement_names_plugin_and_hook() -> None:
    @hookimpl
    def phyai_solver(adapter: Any) -> Any:
        return adapter.no_such_thing

    with pytest.raises(PluginError, match="'bad' failed in phyai_solver: AttributeError") as caught:
        binder(bad=SimpleNamespace(phyai_solver=phyai_solver)).bind_part("phyai_solver", None)
    assert isinstance(caught.value.__cause__, AttributeError)


def test_plugins_that_slipped_past_the_checks_are_refused() -> None:
    @hookimpl(hookwrapper=True)
    def phyai_output() -> Any:
        yield

    manager = create_manager()
    manager.register(SimpleNamespace(phyai_output=phyai_output), name="old")
    with pytest.raises(PluginContractError, match="'old' must use the new wrapper style"):
        HookBinder(manager, None, ADAPTER, SERVICES)


def test_only_part_hooks_are_bound_as_parts() -> None:
    with pytest.raises(PluginContractError, match="part hook must be one of"):
        binder().bind_part("phyai_kernels", None)
    with pytest.raises(PluginContractError, match="observer hook must be one of"):
        binder().observers("phyai_output")


# ---------------------------------------------------------------- denoisers


def test_a_denoiser_is_wrapped_for_its_stage_only() -> None:
    def network_only(inner: Any, stage: str) -> Any:
        return Net(inner) if stage == "network" else inner

    inner, bound = Net(), binder(a=denoising(network_only))
    assert bound.bind_denoiser("network", inner).inner is inner  # type: ignore[attr-defined]
    assert bound.bind_denoiser("prediction", inner) is inner


def test_each_binding_makes_its_own_wrapper() -> None:
    bound = binder(a=denoising(lambda inner, stage: Net(inner)))
    first, second = (bound.bind_denoiser("network", Net()) for _ in "ab")
    assert first is not second


def test_plain_wrapping_by_two_plugins_is_a_conflict() -> None:
    one = denoising(lambda inner, stage: Net(inner), wrapper=False)
    two = denoising(lambda inner, stage: Net(inner), wrapper=False)
    inner = Net()
    assert binder(a=one).bind_denoiser("network", inner).inner is inner  # type: ignore[attr-defined]
    with pytest.raises(PluginContractError, match=r"'a' and 'b'.*make it a wrapper"):
        binder(a=one, b=two).bind_denoiser("network", inner)


def test_exact_leaves_approximate_wrappers_out_and_keeps_the_others() -> None:
    bound = binder(
        a=denoising(lambda inner, stage: Net(inner)),
        b=denoising(lambda inner, stage: Net(inner, approximate=True)),
    )
    network = Net()
    assert bound.bind_denoiser("network", network).inner.inner is network  # type: ignore[attr-defined]
    assert bound.bind_denoiser("network", network, exact=True).inner is network  # type: ignore[attr-defined]


def test_exact_leaves_an_approximate_replacement_out() -> None:
    bound = binder(a=denoising(lambda inner, stage: Net(approximate=True), wrapper=False))
    network = Net()
    assert bound.bind_denoiser("network", network) is not network
    assert bound.bind_denoiser("network", network, exact=True) is network


def test_a_wrapper_must_not_hide_prepare_grid() -> None:
    hiding = denoising(lambda inner, stage: Net())
    keeping = denoising(lambda inner, stage: Net(inner))
    binder(a=keeping).bind_denoiser("network", Table())
    binder(a=hiding).bind_denoiser("network", Net())
    with pytest.raises(PluginContractError, match=r"'a' hides prepare_grid\(\)"):
        binder(a=hiding).bind_denoiser("network", Table())


# ---------------------------------------------------------------- validators


def validating(answer: Any, **options: Any) -> SimpleNamespace:
    @hookimpl(**options)
    def phyai_validate_action(chunk: Any, adapter: Any) -> Any:
        assert adapter is ADAPTER
        return answer(chunk)

    return SimpleNamespace(phyai_validate_action=phyai_validate_action)


def test_validators_are_plain_callables_in_order() -> None:
    validators = binder(
        own_module(validating(lambda chunk: None)),
        b=validating(lambda chunk: f"{chunk} is too fast"),
        a=validating(lambda chunk: None, trylast=True),
    ).validators()
    assert [name for name, _ in validators] == ["b", "own.plugin", "a"]
    assert [check(7) for _, check in validators] == ["7 is too fast", None, None]  # type: ignore[arg-type]


def test_a_validator_may_want_the_chunk_only() -> None:
    @hookimpl
    def phyai_validate_action(chunk: Any) -> str:
        return str(chunk)

    (validator,) = binder(
        a=SimpleNamespace(phyai_validate_action=phyai_validate_action)
    ).validators()
    assert validator.check(7) == "7"  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [True, False, "", 0, []])
def test_an_answer_that_is_neither_text_nor_none_blocks(answer: Any) -> None:
    (validator,) = binder(a=validating(lambda chunk: answer)).validators()
    assert validator.check(None)  # type: ignore[arg-type]


def test_a_validators_exception_reaches_the_runner_which_blocks() -> None:
    (validator,) = binder(a=validating(lambda chunk: 1 / 0)).validators()
    with pytest.raises(ZeroDivisionError):
        validator.check(None)  # type: ignore[arg-type]


def test_the_request_path_never_touches_the_plugin_manager() -> None:
    manager = create_manager()
    add_hooks(manager, validating(lambda chunk: "no"), "a")
    add_hooks(manager, observing(lambda info: None), "b")
    bound = HookBinder(manager, None, ADAPTER, SERVICES)
    (validator,), notify = bound.validators(), bound.observers("phyai_request_started")
    calls: list[str] = []
    manager.add_hookcall_monitoring(
        before=lambda name, impls, kwargs: calls.append(name),
        after=lambda outcome, name, impls, kwargs: None,
    )
    for name in ("a", "b"):
        manager.unregister(name=name)
    assert validator.check(None) == "no"  # type: ignore[arg-type]
    notify(1)
    assert not notify.failures
    assert calls == []


# ---------------------------------------------------------------- observers


def observing(call: Callable[[Any], Any]) -> SimpleNamespace:
    @hookimpl
    def phyai_request_started(info: Any) -> None:
        call(info)

    return SimpleNamespace(phyai_request_started=phyai_request_started)


def test_a_failing_observer_is_isolated_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[Any] = []
    notify = binder(a=observing(lambda info: 1 / 0), b=observing(seen.append)).observers(
        "phyai_request_started"
    )
    with caplog.at_level(logging.ERROR, logger="phyai"):
        notify("one")
        notify("two")
    assert seen == ["one", "two"]
    assert notify.failures == {"a": 2}
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert "plugin a failed" in caplog.text


def test_without_observers_notifying_does_nothing() -> None:
    notify = binder().observers("phyai_engine_ready")
    notify(object())
    assert notify.failures == {}
