"""The adapter class a manifest names: what it lacks is said in one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from phyai.errors import PluginContractError
from phyai.plugin_rules import ADAPTER_METHODS, check_adapter_class
from tests.core.sandbox import (
    MODEL,
    error_of,
    install,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "site"


@pytest.mark.parametrize(
    ("model", "what", "types", "words"),
    [
        ("import no_such_module", "load_class", "PluginError", "ModuleNotFoundError: No module"),
        ("class Modell: pass", "load_class", "PluginContractError", "Did you mean 'Modell'"),
        ("Model = 3", "load_class", "PluginContractError", "must be a class; got int"),
        (
            MODEL.replace("def denoiser", "def denoize").replace("def load(", "def lode("),
            "load_class",
            "PluginContractError",
            "lacks load(), denoiser()",
        ),
        (
            "class Model:\n    def setup(self, args): pass\n    def step(self, request): pass",
            "load_class",
            "PluginContractError",
            "is an Entry",
        ),
        (
            MODEL.replace("args, config, services", "args"),
            "load_class",
            "PluginContractError",
            "Model(args, config, services)",
        ),
        (
            MODEL.replace("args_cls = Args", "name = 'bett'"),
            "load_class",
            "PluginContractError",
            "name must equal the plugin id; got 'bett'",
        ),
        ("class Args: pass", "load_args", "PluginContractError", "must name a dataclass"),
    ],
)
def test_a_bad_target_is_explained(
    folder: Path, model: str, what: str, types: str, words: str
) -> None:
    install(folder, "beta", model=model)
    error = error_of(folder, f"plugins.find('beta').{what}()")
    assert types in error["types"]
    assert words in error["text"]
    assert "'beta'" in error["text"]


def test_an_abstract_method_counts_as_missing() -> None:
    import abc

    body = dict.fromkeys(ADAPTER_METHODS, lambda self: None)
    body["solver"] = abc.abstractmethod(lambda self: None)  # type: ignore[assignment]
    cls = abc.ABCMeta("Half", (), {**body, "__init__": lambda self, args, config, services: None})
    with pytest.raises(PluginContractError, match=r"lacks solver\(\)"):
        check_adapter_class(cls, "half")


def test_the_base_adapters_two_duties_must_be_overridden() -> None:
    from phyai.adapter import Adapter  # imports torch, which only this test needs

    class Half(Adapter):
        def prepare(self, request: object) -> None: ...

    class Whole(Half):
        def denoiser(self) -> None: ...

    with pytest.raises(PluginContractError, match=r"lacks denoiser\(\)\."):
        check_adapter_class(Half, "half")
    assert check_adapter_class(Whole, "whole") is Whole
