"""Own kernels against reference ones: what `phyai verify --against reference` measures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phyai import Engine, engine_core
from phyai.cli.app import main
from phyai.errors import ConfigError, PluginContractError
from phyai.graph import GraphService
from phyai.hooks import hookimpl
from phyai.kernels import KernelRow, KernelTable
from phyai.testing.capture import RecordingCapturer
from phyai.testing.parity import against_reference, compare, reference_policy
from phyai.types import Key, Prepared
from tests.core.toy_adapter import FlowAdapter, ToyAdapter, ToyArgs, config, registry, use_hooks

STEPS = 3


class Curve(torch.nn.Module):
    """v = silu(x) by the kernel table."""

    prediction = "velocity"

    def __init__(self, kernels: KernelTable) -> None:
        super().__init__()
        self._silu = kernels.select("silu", device="cpu", dtype="float32")

    def forward(self, x: Any, step: Any, cache: Any) -> dict[str, Tensor]:
        return {"action": self._silu(x["action"])}


class CurveAdapter(FlowAdapter):
    """Model requests are noise [B, T, A]."""

    name = "toy-curve"

    def prepare(self, request: Tensor) -> Prepared:
        tensors = {"noise.action": request, "state": torch.zeros(len(request), 4)}
        return Prepared(tensors, len(request), Key(num_steps=STEPS))

    def denoiser(self) -> Any:
        return Curve(self.services.kernels)


def noise(seed: int) -> Tensor:
    return torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(seed))


def silu_with(error: float) -> SimpleNamespace:
    """Return a hook plugin whose silu is off by a factor."""
    row = KernelRow("silu", "mine.silu", lambda x: torch.nn.functional.silu(x) * (1 + error))

    @hookimpl
    def phyai_kernels() -> list[KernelRow]:
        return [row]

    return SimpleNamespace(phyai_kernels=phyai_kernels)


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        Engine.register(CurveAdapter)
        yield


def test_equal_kernels_are_equal_at_every_step() -> None:
    parity = against_reference("toy-curve", ToyArgs(), config(), noise, noises=2)
    assert [(s.leaf, s.step, s.max_abs, s.cosine) for s in parity.steps] == [
        ("action", step, 0.0, 1.0) for step in range(1, STEPS + 1)
    ]
    assert parity.own == parity.reference == {"silu": ("torch.silu",)}
    assert parity.ok(1.0, 0.0)


@pytest.mark.parametrize("static", [None, True])
def test_an_error_grows_over_the_steps_and_is_reported(
    static: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hooks(monkeypatch, mine=silu_with(0.05))
    settings = config(static_shapes=static)
    parity = against_reference("toy-curve", ToyArgs(), settings, noise, noises=4)
    assert parity.own == {"silu": ("mine.silu",)}
    assert parity.reference == {"silu": ("torch.silu",)}
    errors = [s.max_abs for s in parity.steps]
    assert errors == sorted(errors)
    x = noise(0)
    for _ in range(STEPS):
        x = x - torch.nn.functional.silu(x) / STEPS
    assert 0.005 < errors[-1] < 0.2
    (result,) = parity.results
    assert (result.step, result.max_abs) == (STEPS, errors[-1])
    assert parity.ok(0.9, errors[-1])
    assert not parity.ok(0.9, 0.9 * errors[-1])
    assert not parity.ok(1.0)


def test_results_are_those_of_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps come from eager runs, which a graph with a stale weight would not show."""
    made: list[GraphService] = []

    class Stale(RecordingCapturer):
        """Replays write too much."""

        def record(self, fn: Any) -> Any:
            replay, nbytes = super().record(fn)

            def wrong() -> None:
                replay()
                for name, tensor in made[0].arena.buffers().items():  # type: ignore[attr-defined]
                    if "/x." in name:
                        tensor.mul_(1.5)

            return wrong, nbytes

    def service(backend: Any, device: Any, **options: Any) -> GraphService:
        if backend == "eager":
            return GraphService(backend, device, **options)
        made.append(GraphService("cuda", device, capturer=Stale()))
        return made[-1]

    arena = engine_core.Arena

    def with_arena(*args: Any) -> Any:
        found = arena(*args)
        if made and not hasattr(made[0], "arena"):
            made[0].arena = found  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(engine_core, "GraphService", service)
    monkeypatch.setattr(engine_core, "Arena", with_arena)
    settings = config(graph_backend="inductor")
    parity = against_reference("toy-curve", ToyArgs(), settings, noise, noises=2)
    assert made[0].stats()["fallbacks"] == 0
    errors = [s.max_abs for s in parity.steps]
    assert errors[:-1] == [0.0] * (STEPS - 1)
    assert errors[-1] > 0.1


def test_the_worst_noise_and_row_count() -> None:
    """The median of the noises would hide it."""
    good = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    turned = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    own = [{"a": [good]}, {"a": [turned]}, {"a": [good]}]
    (step,) = compare(own, [{"a": [good]}] * 3)
    assert (step.cosine, step.median_cosine, step.noise, step.max_abs) == (0.0, 1.0, 1, 2.0)


def test_nan_never_passes() -> None:
    good, bad = torch.ones(1, 2), torch.full((1, 2), float("nan"))
    for position in range(2):
        traces = [{"a": [good]}, {"a": [good]}]
        traces[position] = {"a": [bad]}
        (step,) = compare(traces, [{"a": [good]}] * 2)
        assert step.noise == position
        assert step.max_abs != step.max_abs


def test_reference_policy_names_one_row_per_op() -> None:
    table = KernelTable()
    policy = reference_policy(table)
    assert [o["match"]["op"] for o in policy["overrides"]] == list(table.ops)
    names = {row.name for op in table.ops for row in table.rows(op) if row.reference}
    assert {o["use"] for o in policy["overrides"]} == names


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"noises must be at least 1; got 0\. Ask for one"):
        against_reference("toy-curve", ToyArgs(), config(), noise, noises=0)

    class Silent(ToyAdapter):
        name = "toy-silent"

        def prepare(self, request: Any) -> Prepared:
            return Prepared({"state": request}, 1, Key())

    Engine.register(Silent)
    with pytest.raises(PluginContractError, match="must draw its noise in prepare"):
        against_reference("toy-silent", ToyArgs(), config(), noise, noises=1)


# ---------------------------------------------------------------- command line


def test_the_command_compares_a_preset(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a variable forces a kernel: the reference engine does not obey it."""
    monkeypatch.setenv("PHYAI_FORCE_LINEAR_KERNEL", "torch.linear")
    command = ["verify", "--plugin", "pi05", "--against", "reference", "--noises", "2"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("ok: 2 noises, worst cosine 1.0000")
    assert main([*command, "--min-cosine", "1.0", "--max-abs", "0", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["ok"], data["noises"], len(data["steps"])) == (False, 2, 10)
    assert data["kernels"]["attention"]["reference"] == ["eager.attention"]
    assert "linear" not in data["kernels"]
    assert {"leaf", "step", "max_abs", "cosine", "median_cosine", "noise"} == set(data["steps"][0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one of --golden DIR and --against reference; got neither. Give exactly one"),
        (["--golden", ".", "--against", "reference"], "got both"),
        (
            ["--plugin", "pi05", "--against", "gpu"],
            "--against must be 'reference'; got 'gpu'. Use --against reference.",
        ),
        (["--golden", "."], "whose cases they are; got none. Add --plugin."),
        (["--plugin", "pi05", "--golden", ".", "--preset", "tiny"], "Drop them"),
    ],
)
def test_the_command_refuses(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *options]) == 2
    assert message in capsys.readouterr().err
