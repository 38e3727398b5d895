"""The three precision policies: the dtype of every part, and the official mixed-precision run.

bf16_lerobot: vision tower and projector float32. bf16_openpi: bfloat16. In both the stacks, their
K/V and the token embedding are bfloat16; norms, adaRMS projections, heads and the solver variable
float32. The patch convolution and the position table are float32 always.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from phyai import Engine
from phyai.errors import ConfigError
from phyai.kernels.native import available
from phyai.models.pi.adapter import PiAdapter
from phyai.models.pi.network.precision import PRECISIONS, Precision, choose_precision
from phyai.testing.golden import golden_runner
from phyai.timers import Recorder
from tests.pi.tiny_requests import GOLDEN, LAYERS, MODELS, cpu_config, engine_of, random_request

F32, BF16 = torch.float32, torch.bfloat16
POLICIES = ("fp32", "bf16_lerobot", "bf16_openpi")
VISION = {"fp32": F32, "bf16_lerobot": F32, "bf16_openpi": BF16}
STACK = {"fp32": F32, "bf16_lerobot": BF16, "bf16_openpi": BF16}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[tuple[str, str], Engine]]:
    with ExitStack() as stack:
        yield {
            (model, policy): stack.enter_context(engine_of(model, precision=policy))
            for model in MODELS
            for policy in POLICIES
        }


def adapter_of(engine: Engine) -> PiAdapter:
    adapter = engine.adapter
    assert isinstance(adapter, PiAdapter)
    return adapter


def expected(name: str, policy: str) -> torch.dtype:
    """Return the dtype of one parameter by its module path."""
    vision, stack = VISION[policy], STACK[policy]
    if name.startswith("prefix.vision."):
        return F32 if ".patch_" in name or name.endswith(".positions") else vision
    if name.startswith("prefix.projector."):
        return vision
    if "norm" in name:  # RMS norms, and the adaRMS projections inside the norms
        return F32
    if name.startswith(("prefix.embed.", "prefix.layers.", "expert.expert.layers.")):
        return stack
    return F32  # state, action and time heads


# ---------------------------------------------------------------- dtypes in use


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_dtype_of_every_parameter(
    model: str, policy: str, engines: dict[tuple[str, str], Engine]
) -> None:
    params = dict(adapter_of(engines[model, policy]).modules.named_parameters())
    assert {n: p.dtype for n, p in params.items()} == {n: expected(n, policy) for n in params}
    groups = {
        "patches": "prefix.vision.patch_weight",
        "tower": "prefix.vision.layers.0.qkv.weight",
        "tower norm": "prefix.vision.norm.weight",
        "projector": "prefix.projector.weight",
        "embedding": "prefix.embed.weight",
        "language": "prefix.layers.0.gate_up.weight",
        "language norm": "prefix.layers.0.norm1.norm.weight",
        "expert": "expert.expert.layers.0.qkv.weight",
        "head": "expert.action_in.weight",
    }
    assert set(groups.values()) <= set(params)
    extra = (
        {"expert.state_in.weight", "expert.mix_in.weight", "expert.expert.norm.norm.weight"}
        if model == "pi0"
        else {"expert.time_in.weight", "expert.expert.norm.dense.weight"}
    )
    assert extra <= set(params)


class Seen:
    """dtypes of the tensors that go into and come out of the modules, and of recorded ones."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.into: dict[str, torch.dtype] = {}
        self.out: dict[str, torch.dtype] = {}
        self.recorded: dict[str, set[torch.dtype]] = {}
        self._engine, self._handles = engine, []
        for name, module in adapter_of(engine).modules.named_modules():
            if name and not isinstance(module, nn.ModuleList):
                self._handles.append(module.register_forward_hook(self._hook(name)))
        seen = self.recorded

        def put(recorder: Recorder, name: str, tensor: Tensor) -> None:
            seen.setdefault(name, set()).add(tensor.dtype)

        monkeypatch.setattr(Recorder, "put", put)

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            # a norm takes a Stream (x, what is still to be added) and gives x, n and a gate
            first = result[-2] if isinstance(result, tuple) else result
            given = args[0][0] if args and isinstance(args[0], tuple) else args and args[0]
            if isinstance(given, Tensor):
                self.into[name] = given.dtype
            if isinstance(first, Tensor):
                self.out[name] = first.dtype

        return hook

    def run(self, request: Any) -> Tensor:
        try:
            with self._engine.core.services.profile.recorder.recording():
                result: Tensor = self._engine.step(request)
            return result
        finally:
            for handle in self._handles:
                handle.remove()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_dtypes_of_a_running_request(
    model: str,
    policy: str,
    engines: dict[tuple[str, str], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, vision, stack = engines[model, policy], VISION[policy], STACK[policy]
    seen = Seen(engine, monkeypatch)
    actions = seen.run(random_request(model, [[True, True], [True, False]], [7, 4], num_steps=2))
    assert actions.dtype == F32
    # vision: images come in float32, everything behind the patch embedding in the tower's dtype
    assert seen.into["prefix.vision"] == F32
    assert seen.into["prefix.vision.layers.0"] == seen.out["prefix.vision"] == vision
    assert seen.out["prefix.projector"] == vision
    assert seen.out["prefix.embed"] == stack
    # the residual stream of both stacks, their norms' outputs and their linears
    for root in ("prefix.layers", "expert.expert.layers"):
        for layer in range(LAYERS - 1):
            name = f"{root}.{layer}"
            for part in ("norm1", "norm2"):
                assert seen.into[f"{name}.{part}"] == stack, f"residual stream at {name}.{part}"
                assert seen.out[f"{name}.{part}"] == stack
            for part in ("qkv", "out", "gate_up", "down"):
                assert seen.into[f"{name}.{part}"] == seen.out[f"{name}.{part}"] == stack
    assert seen.into["expert.expert.norm"] == stack
    # heads, solver variable and velocity
    for head in ("action_in", "action_out"):
        assert seen.into[f"expert.{head}"] == seen.out[f"expert.{head}"] == F32
    assert seen.recorded["steps.action.x"] == seen.recorded["steps.action.velocity"] == {F32}
    assert seen.recorded["step0.suffix_embs"] == seen.recorded["step0.suffix_hidden"] == {F32}
    assert seen.recorded["prefix.k.0"] == seen.recorded["prefix.v.0"] == {stack}
    joined = torch.promote_types(vision, stack)
    assert seen.recorded["prefix.embs"] == {joined}
    if model == "pi0":
        assert seen.into["expert.state_in"] == seen.out["expert.mix_out"] == F32


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_dtypes_of_cache_and_tables(
    model: str, policy: str, engines: dict[tuple[str, str], Engine]
) -> None:
    engine = engines[model, policy]
    engine.step(random_request(model, [[True]], [5], num_steps=3))
    adapter = adapter_of(engine)
    (bound, *_) = engine.core.runner._bound.values()
    for layer in range(LAYERS):
        assert bound.cache[f"k.{layer}"].dtype == STACK[policy]
        assert bound.cache[f"v.{layer}"].dtype == STACK[policy]
    assert bound.cache.inputs["images"].dtype == bound.cache.inputs["noise.action"].dtype == F32
    for tables in adapter.network.tables.values():
        assert {name: table.dtype for name, table in tables.items()} == dict.fromkeys(tables, F32)


# ---------------------------------------------------------------- choice


@pytest.mark.parametrize(
    ("name", "dtype", "vision", "want"),
    [
        (None, F32, None, "fp32"),
        (None, BF16, None, "bf16_openpi"),
        (None, BF16, F32, "bf16_lerobot"),
        (None, BF16, BF16, "bf16_openpi"),
        ("bf16", F32, None, "bf16_openpi"),
        ("bf16_lerobot", F32, None, "bf16_lerobot"),
        ("fp32", BF16, None, "fp32"),
    ],
)
def test_choice_of_policy(
    name: str | None, dtype: torch.dtype, vision: torch.dtype | None, want: str
) -> None:
    assert choose_precision(name, dtype, vision) is PRECISIONS[want]


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision must be one of .*; got 'bf61'.*Did you mean"):
        choose_precision("bf61", F32, None)
    with pytest.raises(ConfigError, match=r"params_dtype must be float32 or bfloat16"):
        choose_precision(None, torch.float16, None)


def test_only_one_policy_gives_up_the_official_rounding_points() -> None:
    rounding = {name: policy.rounding for name, policy in PRECISIONS.items()}
    assert rounding == {"fp32": "official", "bf16_lerobot": "official", "bf16_openpi": "free"}


def test_attention_of_each_policy_on_the_cpu(engines: dict[tuple[str, str], Engine]) -> None:
    """The C++ kernel keeps every rounding point; without it only free rounding may fuse."""

    def rows(policy: str) -> dict[str, set[str | None]]:
        found: dict[str, set[str | None]] = {}
        for choice in engines["pi05", policy].core.services.kernels.choices:
            if choice.op == "attention":
                found.setdefault(str(dict(choice.facts)["dtype"]), set()).add(choice.row)
        return found

    unit = torch.backends.cpu.get_cpu_capability()
    official = "upcast.attention" if unit in ("DEFAULT", "AVX2") else "eager.attention"
    fused = "sdpa.attention"
    if available() is True:
        official = fused = "native.attention"
    assert rows("fp32") == {"float32": {fused}}
    assert rows("bf16_lerobot") == {"float32": {fused}, "bfloat16": {official}}
    assert rows("bf16_openpi") == {"bfloat16": {fused}}


# ---------------------------------------------------------------- the official bf16 run


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The golden checkpoints as the bf16 case's generator had them: stacks rounded, stored fp32."""
    folders = {}
    for model in MODELS:
        folder = tmp_path_factory.mktemp(model)
        for name in ("config.json", "arch.json"):
            shutil.copy(GOLDEN / model / name, folder / name)
        tensors = {
            name: tensor.bfloat16().float() if "paligemma_with_expert." in name else tensor
            for name, tensor in load_file(GOLDEN / model / "model.safetensors").items()
        }
        save_file(tensors, folder / "model.safetensors")
        folders[model] = folder
    return folders


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("model", MODELS)
def test_bf16_lerobot_reproduces_the_official_bf16_run(
    model: str, rounded: dict[str, Path]
) -> None:
    with safe_open(GOLDEN / model / "case_bf16_b2_c2.safetensors", framework="pt") as file:
        steps = int(file.metadata()["num_steps"])
        golden = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    request = random_request(
        model,
        golden["in.image_masks"].tolist(),
        golden["in.token_mask"].sum(dim=1).tolist(),
        num_steps=steps,
        pixel_values=golden["in.images"],
        input_ids=golden["in.tokens"],
        noise=golden["in.noise"],
        **({"state": golden["in.state"]} if model == "pi0" else {}),
    )
    settings = cpu_config(torch.bfloat16)
    args = {"checkpoint_dir": rounded[model], "precision": "bf16_lerobot"}
    with (
        engine_of(model, settings, **args) as engine,
        engine.core.services.profile.recorder.recording() as records,
    ):
        actions = engine.step(request)
    valid = golden["prefix.pad_mask"]
    torch.testing.assert_close(
        records["prefix.embs"][0], golden["prefix.embs"][valid], atol=1e-5, rtol=0
    )
    for name in ("k.0", "v.0"):
        want = golden[f"prefix.{name}"].transpose(1, 2)[valid]
        assert relative(records[f"prefix.{name}"][0], want) < 1e-3
    # two bf16 runs that differ only in the order of float32 sums stay closer to each other than
    # either is to float32
    figure = relative(golden["actions"], golden["fp32.actions"])
    assert relative(actions, golden["actions"]) < 0.75 * figure


@pytest.mark.parametrize(("policy", "multiple"), [("bf16_lerobot", 1.0), ("bf16_openpi", 2.0)])
@pytest.mark.parametrize("model", MODELS)
def test_golden_case_holds_the_published_figure(model: str, policy: str, multiple: float) -> None:
    """Stricter than the tolerance for sets never seen, whose rounding noise is another draw."""
    path = GOLDEN / model / "case_bf16_b2_c2.safetensors"
    with golden_runner(model) as runner:
        (result,) = [r for r in runner.run(path, path.parent) if policy in r.label]
    errors = {c.name: c.error for c in result.comparisons}
    assert errors["fp32.actions"] <= multiple * 0.011
    assert errors["fp32.actions (max)"] <= multiple * 0.055


def test_policies_are_frozen() -> None:
    assert [p.name for p in PRECISIONS.values()] == list(POLICIES)
    assert Precision("x", F32, BF16).rope_freq == F32
