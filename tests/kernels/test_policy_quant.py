"""The quantization section: selectors, defaults, the table of combinations, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from phyai.errors import ConfigError
from phyai.kernels.policy_quant import COMBINATIONS, QuantScheme, TensorQuant, parse_quantization

INT8 = {"dtype": "int8", "block_shape": [1, 128]}


def section(*rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"method": "rtn", "rules": list(rules), **more}


def plan(*rules: dict[str, Any], **more: Any) -> Any:
    return parse_quantization(section(*rules, **more), "q")


def test_the_first_rule_that_selects_a_layer_wins() -> None:
    found = plan(
        {"match": {"name": "a.mlp.down"}, "scheme": None},
        {"match": {"glob": "*.mlp.*"}, "weight": INT8, "input": {"dtype": "int8"}},
        {"match": {"regex": r"attn\.[qk]_proj$"}, "weight": INT8, "input": None},
        {"match": {"module_cls": "Head"}, "weight": {"dtype": "nvfp4"}},
    )
    w8a8 = QuantScheme(
        TensorQuant("int8", "block", (1, 128)), TensorQuant("int8", "per_channel", dynamic=True)
    )
    assert found.applies
    assert found.scheme_for("a.mlp.down") is None
    assert found.scheme_for("a.mlp.up") == w8a8
    assert found.scheme_for("a.attn.q_proj") == QuantScheme(w8a8.weight)
    assert found.scheme_for("a.attn.o_proj") is None
    assert found.scheme_for("x", "Head").weight.micro_scaled
    assert found.scheme_for(["a.attn.q_proj", "a.attn.k_proj"]) == QuantScheme(w8a8.weight)
    with pytest.raises(ConfigError, match=r"fused into one alike; got a.attn.q_proj: int8 block"):
        found.scheme_for(["a.attn.q_proj", "a.attn.v_proj"])
    assert w8a8.facts() == {"quant.format": "int8", "quant.weight": "int8",
                            "quant.granularity": "block", "quant.input": "int8"}  # fmt: skip


def test_default_covers_the_rest_and_an_empty_plan_does_not_apply() -> None:
    found = plan({"match": {"glob": "head*"}, "scheme": None}, default={"weight": INT8})
    assert found.scheme_for("body") == QuantScheme(TensorQuant("int8", "block", (1, 128)))
    assert found.scheme_for("head") is None
    assert not parse_quantization(None, "q").applies
    assert not plan(default=None).applies
    assert not plan({"match": {"glob": "*"}, "scheme": None}).applies


@pytest.mark.parametrize(("key", "inputs"), COMBINATIONS.items(), ids=str)
def test_exactly_the_allowed_combinations_pass(
    key: tuple[str, str, tuple[int, int] | None], inputs: tuple[str | None, ...]
) -> None:
    dtype, granularity, block = key
    weight = {"dtype": dtype, "granularity": granularity, "symmetric": True, "dynamic": False}
    if block is not None:
        weight["block_shape"] = list(block)
    for given in (None, "int8", "int4", "fp8_e4m3", "fp8_e5m2", "bf16", "nvfp4", "mxfp4"):
        entry = {"dtype": given, "granularity": "per_channel", "dynamic": True, "symmetric": True}
        rule = {"match": {"glob": "*"}, "weight": weight, "input": entry if given else None}
        if given in inputs:
            scheme = plan(rule).scheme_for("x")
            assert (scheme.weight.dtype, scheme.weight.block_shape) == (dtype, block)
            assert (scheme.input.dtype if scheme.input else None) == given
        else:
            with pytest.raises(ConfigError, match=r"^q\.rules\[0\]\.input must be "):
                plan(rule)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (None, r"^q\.rules\[0\]\.weight must be given"),
        ({"dtype": "int9"}, r"weight\.dtype must be one of .*Did you mean 'int"),
        ({"dtype": "bf16"}, r"weight\.dtype must be a quantised format; got 'bf16'"),
        ({"dtype": "int4", "block_shape": [1, 64]}, r"int4 must be block \[1, 128\]; .*\[1, 64\]"),
        ({"dtype": "int8", "granularity": "per_channel"}, r"of dtype int8 must be block"),
        ({"dtype": "fp8_e4m3", "granularity": "per_tensor"}, r"per_channel or block \[128, 128\]"),
        ({"dtype": "int8", "granularity": "block", "symmetric": False}, r"symmetric must be true"),
        ({"dtype": "int8", "dynamic": True}, r"weight\.dynamic must be false"),
        ({"dtype": "int8", "micro_scaled": True}, r"micro_scaled must be false"),
        ({"dtype": "nvfp4", "micro_scaled": False}, r"micro_scaled must be true"),
        ({"dtype": "int8", "block_shape": [128]}, r"block_shape must be two positive numbers"),
        ({"dtype": "int8", "blok": 1}, r"weight\.blok must be a known key"),
        ({"dtype": "int8", "granularity": "blok"}, r"granularity must be one of .*'block'"),
    ],
)
def test_a_wrong_weight_is_refused(weight: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan({"match": {"glob": "*"}, "weight": weight})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"^q must be a mapping"),
        ({"rules": []}, r"^q\.method must be given"),
        ({"method": "gptq"}, r"^q\.method must be one of rtn; got 'gptq'"),
        (section(stage="run"), r"^q\.stage must be one of load"),
        (section(defaul=None), r"^q\.defaul must be a known key.*'q\.default'"),
        (section(default="int8"), r"^q\.default must be a mapping"),
        ({"method": "rtn", "rules": {}}, r"^q\.rules must be a list"),
        (section({"match": {"glob": "*"}}), r"^q\.rules\[0\]\.weight must be given"),
        (section({"weight": INT8}), r"^q\.rules\[0\]\.match must be a mapping"),
        (section({"match": {}, "weight": INT8}), r"exactly one of name, glob, regex, module_cls"),
        (section({"match": {"glob": "*", "name": "a"}, "weight": INT8}), r"exactly one of"),
        (section({"match": {"globb": "*"}, "weight": INT8}), r"globb must be a known key.*glob'"),
        (section({"match": {"regex": "("}, "weight": INT8}), r"must be a regular expression"),
        (section({"match": {"glob": 3}, "weight": INT8}), r"match\.glob must be text"),
        (section({"match": {"glob": "*"}, "scheme": "x"}), r"scheme must be null"),
        (section({"match": {"glob": "*"}, "scheme": None, "weight": INT8}), r"stand alone"),
        (
            section({"match": {"glob": "*"}, "weight": INT8,
                     "input": {"dtype": "int8", "dynamic": False}}),
            r"input\.dynamic must be true",
        ),
        (
            section({"match": {"glob": "*"}, "weight": INT8,
                     "input": {"dtype": "int8", "granularity": "per_tensor"}}),
            r"input must be quantised per token",
        ),
    ],
)  # fmt: skip
def test_a_wrong_section_is_refused_with_its_path(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_quantization(data, "q")
