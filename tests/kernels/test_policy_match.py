"""Matches of a policy: facts, comparisons, combinators, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phyai.errors import ConfigError
from phyai.kernels.facts import FACTS, device_facts, dotted, fact_name, process_facts
from phyai.kernels.policy_match import arch_number, parse_match, version_tuple

HOPPER: dict[str, Any] = {
    "op": "linear",
    "role": "expert",
    "device.type": "cuda",
    "device.arch": "sm90",
    "device.features": ("avx2", "amx_bf16"),
    "model.family": "toy",
    "dtype.input": "bfloat16",
    "shape.rows": 50,
    "shape.in_features": 1024,
    "attrs.masked": False,
    "attrs.rounding": "official",
    "lib.torch": "2.13.0+cpu",
}


def fits(match: dict[str, Any], **changes: Any) -> bool:
    facts = {**HOPPER, **changes}
    return parse_match(match, "m").problem(facts) is None


@pytest.mark.parametrize(
    "match",
    [
        {"op": "linear"},
        {"op": ["attention", "linear"]},
        {"op": "gemm"},  # the earlier name
        {"device.arch": "sm90"},
        {"device.arch": "SM_90a"},
        {"device.arch": ">=sm80"},
        {"device.arch": ["sm80", "sm90"]},
        {"device": {"arch": "<sm100", "type": "cuda"}},
        {"device": "cuda"},
        {"device.features": "amx_bf16"},
        {"device.features": "!=avx512_fp16"},
        {"dtype": "bf16"},
        {"dtype.input": ["fp32", "bf16"]},
        {"shape.M": "<=64"},
        {"shape.M": 50},
        {"shape": {"K": [512, "> 1000"]}},
        {"attrs.masked": False},
        {"attrs.rounding": "official"},
        {"lib.torch": ">=2.9"},
        {"lib.torch": "2.13"},
        {"lib.torch": "<2.14.1"},
        {"lib.torch": "!=2"},
        {"lib.flashinfer": None},
        {"role": "!=vision"},
        {"all_of": [{"op": "linear"}, {"role": "expert"}]},
        {"op": "linear", "any_of": [{"role": "vision"}, {"shape.M": ">1"}]},
        {"op": "linear", "none_of": [{"role": "vision"}, {"shape.M": ">64"}]},
        {"when": {"if": {"role": "expert"}, "then": {"shape.M": "<=64"}}},
        {"when": {"if": {"role": "vision"}, "then": {"shape.M": ">64"}}},
    ],
)
def test_match_holds(match: dict[str, Any]) -> None:
    assert fits(match)


@pytest.mark.parametrize(
    ("match", "reason"),
    [
        ({"op": "attention"}, "op is linear; needs attention"),
        ({"op": "linear", "role": "vision"}, "role is expert; needs vision"),
        ({"device.arch": ">=sm100"}, "device.arch is sm90; needs >=sm100"),
        ({"device.arch": "x86_64"}, "needs x86_64"),
        ({"shape.M": ["<=16", 64]}, "shape.rows is 50; needs <=16 or 64"),
        ({"shape.heads": "!=4"}, "shape.heads is not known here; needs !=4"),
        ({"lib.torch": ">=2.14"}, "needs >=2.14"),
        ({"lib.torch": None}, "needs none"),
        ({"attrs.masked": 0}, "needs 0"),  # false is no number
        ({"dtype": "!=bf16"}, "dtype.input is bfloat16; needs !=bfloat16"),
        ({"device.features": "avx512_bf16"}, "needs avx512_bf16"),
        ({"all_of": [{"op": "linear"}, {"role": "vision"}]}, "role is expert"),
        ({"any_of": [{"role": "vision"}, {"shape.M": 1}]}, "nothing of any_of holds"),
        ({"none_of": [{"role": "vision"}, {"shape.M": ">1"}]}, r"none_of\[1\] holds"),
        ({"when": {"if": {"role": "expert"}, "then": {"shape.M": 1}}}, "shape.rows is 50"),
    ],
)
def test_match_fails_and_says_why(match: dict[str, Any], reason: str) -> None:
    problem = parse_match(match, "m").problem(HOPPER)
    assert problem is not None
    import re

    assert re.search(reason, problem), problem


def test_an_arch_of_another_vendor_never_satisfies_an_sm_number() -> None:
    assert not fits({"device.arch": ">=sm80"}, **{"device.arch": "x86_64"})
    assert fits({"device.arch": "X86_64"}, **{"device.arch": "x86_64"})
    assert fits({"device.arch": "!=sm90"}, **{"device.arch": "x86_64"})
    assert (arch_number("sm_100a"), arch_number("gfx942")) == (100, None)
    assert version_tuple("2.13.0+cpu") == (2, 13, 0)


@pytest.mark.parametrize(
    ("match", "message"),
    [
        ({}, r"^m must be a mapping of facts that is not empty"),
        ([], r"^m must be a mapping"),
        ({3: 1}, r"^m must have string keys"),
        ({"device.arhc": "sm90"}, r"^m\.device\.arhc must be a known fact.*'device\.arch'\?"),
        ({"device": {"arhc": "sm90"}}, r"^m\.device\.arhc must be a known fact"),
        ({"devise": {"arch": "sm90"}}, r"no namespace.*Did you mean 'device'\?"),
        ({"role": {"x": 1}}, r"'role' is no namespace"),
        ({"device": {}}, r"^m\.device must not be empty"),
        ({"device": {"arch": {"x": 1}}}, r"^m\.device\.arch must be a value"),
        ({"device.arch": "sm90", "device": {"arch": "sm80"}}, r"must be given once"),
        ({"shape.M": 64, "shape.rows": 64}, r"^m\.shape\.rows must be given once"),
        ({"shape.M": "64"}, r"^m\.shape\.M must be a number or a comparison"),
        ({"shape.M": "<=many"}, r"^m\.shape\.M must be a number or a comparison"),
        ({"shape.M": True}, r"must be a number"),
        ({"shape.M": []}, r"must not be an empty list"),
        ({"device.arch": ">=hopper"}, r"must compare with an arch such as sm90"),
        ({"device.arch": 90}, r"^m\.device\.arch must be text"),
        ({"lib.torch": ">=new"}, r"must be a version"),
        ({"lib.torch": 2.10}, r"must be text; got 2\.1\. Put quotes around the version"),
        ({"role": ">=expert"}, r"must be compared with == or != only"),
        ({"dtype.input": "bf61"}, r"must be a dtype.*Did you mean 'bf16'\?"),
        ({"op": ">=linear"}, r"must name ops"),
        ({"any_of": {"op": "linear"}}, r"^m\.any_of must be a list"),
        ({"any_of": []}, r"^m\.any_of must be a list of matches that is not empty"),
        ({"any_of": [{"none_of": [{"op": "linear"}]}]}, r"^m\.any_of\[0\]\.none_of must stand at"),
        ({"device": {"any_of": []}}, r"^m\.device\.any_of must stand at the top level"),
        ({"when": {"if": {"role": "x"}}}, r"^m\.when must be a mapping with `if` and `then`"),
        ({"when": {"if": {"role": "x"}, "then": {"rloe": 1}}}, r"^m\.when\.then\.rloe .*'role'"),
    ],
)
def test_a_wrong_match_is_refused_with_its_path(match: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_match(match, "m")


def test_a_plugin_declares_facts_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"attrs\.beam must be a known fact"):
        parse_match({"attrs.beam": 4}, "m")
    matcher = parse_match({"attrs.beam": ">=4"}, "m", facts={"attrs.beam"})
    assert matcher.problem({"attrs.beam": 8}) is None
    assert matcher.problem({"attrs.beam": "wide"}) is not None


def test_facts_of_layers_get_dotted_names() -> None:
    flat = {"op": "linear", "device": "cpu", "dtype": "float32", "in_features": 8, "bias": True,
            "weight_dtype": "int8", "quant.format": "int8", "role": "vision"}  # fmt: skip
    assert dotted(flat) == {
        "op": "linear",
        "device.type": "cpu",
        "dtype.input": "float32",
        "shape.in_features": 8,
        "attrs.bias": True,
        "dtype.weight": "int8",
        "quant.format": "int8",
        "role": "vision",
    }
    assert fact_name("width") == "shape.width"


def test_the_facts_of_this_process_are_known_ones() -> None:
    found = process_facts(torch.device("cpu"), "toy")
    assert set(found) <= set(FACTS)
    assert found["model.family"] == "toy"
    assert found["device.type"] == "cpu"
    assert found["lib.torch"] == torch.__version__.partition("+")[0] or "+" in found["lib.torch"]
    assert device_facts(torch.device("cpu"))["device.cores"] == torch.get_num_threads()
