"""Policy files: what they may say, how they decide, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phyai.config_yaml import parse_yaml_mapping
from phyai.errors import ConfigError, KernelUnavailable
from phyai.kernels import (
    OPTIMIZED,
    KernelPolicy,
    KernelRow,
    KernelTable,
    load_policy,
    parse_policy,
    reference,
)
from phyai.kernels.facts import FACTS

pytestmark = pytest.mark.usefixtures("without_native")

EXPERT = {"device": "cuda", "dtype": "bfloat16", "role": "expert"}
HOPPER = {"device.type": "cuda", "device.arch": "sm90", "model.family": "toy"}


def fake(name: str) -> Callable[..., Any]:
    def run(*args: Any, splits: int = 1, **kwargs: Any) -> tuple[str, int]:
        return name, splits

    return run


def row(op: str, name: str, **changes: Any) -> KernelRow:
    return KernelRow(op, name, fake(name), **changes)


def table(policy: Any = None, *, context: Any = None, rows: Any = ()) -> KernelTable:
    made = KernelTable(context=HOPPER if context is None else context)
    made.add(rows)
    made.use(None if policy is None else parse(policy))
    return made


def parse(policy: Any) -> KernelPolicy:
    return parse_policy({"schema": "phyai.kernel/v1", **policy})


def rule(name: str, match: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"id": name, "match": match, **changes}


ATTENTION = {"op": "attention"}
PREFER_EAGER = rule("eager", ATTENTION, prefer="eager.attention")


# ---------------------------------------------------------------- the two published shapes

QUANTISED = """
schema: phyai.kernel/v1
profile: static
quantization:
  method: rtn
  stage: load
  default: null
  rules:
    - match: {regex: 'layers\\.\\d+\\.(self_attn|mlp)\\.'}
      weight: {dtype: int8, granularity: block, block_shape: [1, 128], symmetric: true}
      input: {dtype: int8, granularity: per_channel, dynamic: true, symmetric: true}
rules:
  - id: packed-linear
    match: {op: gemm, quant.layout: humming}
    restrict_to: "humming.gemm.*"
  - id: expert-attention
    priority: 10
    match: {op: attention_paged, role: expert, model.family: toy, device.arch: sm90}
    restrict_to: flashinfer.attention_paged.fa2
"""

PINNED = """
schema: v1
defaults: {fallback: error}
overrides:
  - {id: attention, priority: 100, match: {op: attention, model.family: toy}, use: eager.attention}
  - id: gated
    match: {op: gelu_tanh_mul, attrs: {activation: gelu, gated: true}}
    use: fused.gelu
  - id: plain
    match: {op: gelu_tanh_mul, attrs: {activation: gelu, gated: false}}
    use: torch.gelu_tanh_mul
"""


def test_quantised_restriction_beside_an_attention_rule(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(QUANTISED)
    policy = load_policy(tmp_path / "p.yaml")
    scheme = policy.quantization.scheme_for("model.layers.3.mlp.down_proj")
    assert str(scheme) == "int8 block [1, 128], int8 inputs"
    assert policy.quantization.scheme_for("embed") is None
    made = KernelTable(context=HOPPER)
    paged = "attention_paged"
    made.add(
        [
            row("linear", "humming.gemm.w8a16", predicate=lambda f: f["quant.input"] == "none"),
            row("linear", "humming.gemm.int8_a8", priority=OPTIMIZED, formats=("", "int8:int8")),
            row(paged, "torch.attention_paged", reference=True, priority=0),
            row(paged, "flashinfer.attention_paged", priority=OPTIMIZED),
            row(paged, "flashinfer.attention_paged.fa2"),
        ]
    )
    made.use(policy)
    plain = made.explain_one("linear", **EXPERT)
    assert (plain.row, plain.by) == ("humming.gemm.int8_a8", "")  # the catalogue's order
    packed = {"quant.layout": "humming", **(scheme.facts() if scheme else {})}
    choice = made.explain_one("linear", **EXPERT, **packed)
    assert (choice.row, choice.by) == ("humming.gemm.int8_a8", "rule 'packed-linear'")
    assert made.explain_one(paged, **EXPERT).row == "flashinfer.attention_paged.fa2"
    other = made.explain_one(paged, **{**EXPERT, "role": "prefix"})
    assert other.row == "flashinfer.attention_paged"


def test_three_overrides_without_a_fallback(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(PINNED)
    policy = load_policy(tmp_path / "p.yaml")
    assert (policy.fallback, len(policy.overrides), policy.rules) == ("error", 3, ())
    made = KernelTable(context=HOPPER)
    made.add([row("gelu_tanh_mul", "fused.gelu", dtypes=("bfloat16",), priority=OPTIMIZED)])
    made.use(policy)
    attrs = {"activation": "gelu", "gated": True}
    assert made.select("attention", **EXPERT, queries=8, head_dim=64) is reference.attention
    assert made.explain_one("gelu_tanh_mul", **EXPERT, **attrs).row == "fused.gelu"
    attrs["gated"] = False
    assert made.explain_one("gelu_tanh_mul", **EXPERT, **attrs).row == "torch.gelu_tanh_mul"
    attrs["gated"] = True
    with pytest.raises(KernelUnavailable, match=r"dtype float32 .*Change override 'gated' of the"):
        made.select("gelu_tanh_mul", **{**EXPERT, "dtype": "float32"}, **attrs)
    # ops that no entry is about keep the catalogue's order, references included
    assert made.explain_one("silu", **EXPERT).row == "torch.silu"


# ---------------------------------------------------------------- decisions


def test_override_beats_rule_beats_catalogue() -> None:
    cpu = {"device": "cpu", "dtype": "float32"}
    assert table().explain_one("attention", **cpu).row == "sdpa.attention"
    chosen = table({"rules": [PREFER_EAGER]}).explain_one("attention", **cpu)
    assert (chosen.row, chosen.by) == ("eager.attention", "rule 'eager'")
    assert "attention -> eager.attention by rule 'eager'  [device=cpu" in str(chosen)
    use = rule("sdpa", ATTENTION, use="sdpa.attention", priority=-5)
    both = {"rules": [{**PREFER_EAGER, "priority": 99}], "overrides": [use]}
    assert table(both).explain_one("attention", **cpu).by == "override 'sdpa'"


def test_priority_decides_and_a_tie_is_an_error() -> None:
    cpu = {"device": "cpu", "dtype": "float32"}
    other = rule("sdpa", {**ATTENTION, "dtype": "fp32"}, prefer="sdpa.attention", priority=1)
    assert table({"rules": [PREFER_EAGER, other]}).explain_one("attention", **cpu).row == (
        "sdpa.attention"
    )
    made = table({"rules": [PREFER_EAGER, {**other, "priority": 0}]})
    with pytest.raises(ConfigError, match=r"op 'attention'; got 'eager' and 'sdpa', both of prio"):
        made.select("attention", **cpu)
    assert made.explain_one("attention", device="cpu", dtype="bfloat16").by == "rule 'eager'"


def test_prefer_keeps_order_and_excludes_other_kernels_but_the_reference() -> None:
    rows = [
        row("silu", "a", dtypes=("float32",)),
        row("silu", "b"),
        row("silu", "fast", priority=OPTIMIZED),
    ]
    prefer = rule("order", {"op": "silu"}, prefer=["a", "b"])
    made = table({"rules": [prefer]}, rows=rows)
    assert made.explain_one("silu", device="cpu", dtype="float32").row == "a"
    assert made.explain_one("silu", device="cpu", dtype="float16").row == "b"
    only = rule("only", {"op": "silu"}, prefer="a")
    made = table({"rules": [only]}, rows=rows)
    choice = made.explain_one("silu", device="cpu", dtype="float16")
    assert (choice.row, choice.by) == ("torch.silu", "the fallback of rule 'only'")
    assert dict(choice.refused) == {"a": "dtype float16 is not one of float32"}
    made = table({"rules": [only], "defaults": {"fallback": "error"}}, rows=rows)
    with pytest.raises(KernelUnavailable, match="Change rule 'only' of the kernel policy"):
        made.select("silu", device="cpu", dtype="float16")


def test_restrict_to_keeps_the_catalogues_order_and_an_override_is_strict() -> None:
    rows = [
        row("silu", "x.slow", priority=1),
        row("silu", "x.fast", priority=2, devices=("cuda",)),
        row("silu", "y", priority=OPTIMIZED),
    ]
    glob = rule("x", {"op": "silu"}, restrict_to="x.*")
    made = table({"rules": [glob]}, rows=rows)
    assert made.explain_one("silu", device="cuda", dtype="float32").row == "x.fast"
    assert made.explain_one("silu", device="cpu", dtype="float32").row == "x.slow"
    strict = table({"overrides": [{**glob, "restrict_to": "x.fast"}]}, rows=rows)
    assert strict.explain_one("silu", device="cpu", dtype="float32").row is None


def test_a_rule_without_op_is_about_the_ops_of_its_kernels() -> None:
    made = table({"rules": [rule("all-eager", {"device": "cpu"}, restrict_to="eager.*")]})
    assert made.explain_one("attention", device="cpu", dtype="float32").by == "rule 'all-eager'"
    assert made.explain_one("linear", device="cpu", dtype="float32").by == ""


def test_params_are_bound_to_the_kernel_and_never_merged() -> None:
    rows = [row("silu", "split", params=("splits",), priority=OPTIMIZED)]
    low = rule("low", {"op": "silu"}, prefer="split", params={"splits": 4})
    high = rule("high", {"op": "silu", "role": "vision"}, prefer="split", priority=1)
    made = table({"rules": [low, high]}, rows=rows)
    cpu = {"device": "cpu", "dtype": "float32"}
    assert made.select("silu", **cpu)(0) == ("split", 4)
    assert made.select("silu", **cpu, role="vision")(0) == ("split", 1)
    with pytest.raises(
        ConfigError, match=r"params of kernel|parameters of kernel 'split' \(splits"
    ):
        table({"rules": [{**low, "params": {"split": 4}}]}, rows=rows)
    with pytest.raises(ConfigError, match=r"kernel 'torch.silu' \(none\); got 'splits'"):
        table({"rules": [{**low, "prefer": ["split", "torch.silu"]}]}, rows=rows)


def test_facts_of_another_device_are_left_out() -> None:
    made = table({"rules": [rule("h", {**ATTENTION, "device.arch": "sm90"},
                                 prefer="eager.attention")]})  # fmt: skip
    assert made.explain_one("attention", device="cuda", dtype="float32").by == "rule 'h'"
    assert made.explain_one("attention", device="cpu", dtype="float32").by == ""


def test_context_reaches_predicates_but_not_the_log() -> None:
    seen = row("silu", "hopper", predicate=lambda f: f["device.arch"] == "sm90", priority=150)
    made = table(rows=[seen])
    made.select("silu", device="cuda", dtype="float32")
    assert made.choices[0].row == "hopper"
    assert "sm90" not in made.explain()


def test_rows_added_later_are_checked_with_the_policy_again() -> None:
    made = table({"rules": [rule("x", {"op": "silu"}, prefer="torch.silu")]})
    made.add([row("silu", "late", priority=OPTIMIZED)])
    assert made.explain_one("silu", device="cpu", dtype="float32").row == "torch.silu"
    made.use(None)
    assert made.explain_one("silu", device="cpu", dtype="float32").row == "late"


# ---------------------------------------------------------------- fingerprints


def test_fingerprints_follow_the_meaning() -> None:
    one = parse({"rules": [rule("a", {"op": "silu", "role": "x"}, prefer="torch.silu")]})
    same = parse_policy(
        {"profile": "static", "schema": 1, "defaults": {},
         "rules": [{"prefer": ["torch.silu"], "match": {"role": "x", "op": "silu"}, "id": "a"}]}
    )  # fmt: skip
    assert len(one.fingerprint) == 16
    assert int(one.fingerprint, 16) >= 0
    assert one.fingerprint == same.fingerprint
    for change in ({"profile": "autotune"}, {"defaults": {"fallback": "error"}}, {"rules": []},
                   {"quantization": {"method": "rtn"}}):  # fmt: skip
        other = parse({"rules": [rule("a", {"op": "silu"}, prefer="torch.silu")], **change})
        assert other.fingerprint != one.fingerprint
    plain = KernelTable()
    assert plain.fingerprint == KernelTable().fingerprint
    plain.add([row("silu", "mine")])
    assert plain.fingerprint != KernelTable().fingerprint


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"^policy must be a mapping"),
        ({}, r"^policy\.schema must be 'phyai\.kernel/v1'; got None"),
        ({"schema": "phyai.kernel/v2"}, r"Did you mean 'phyai\.kernel/v1'\?"),
        ({"schema": True}, r"^policy\.schema must be"),
        ({"schema": 1, "profil": "static"}, r"^policy\.profil .*Did you mean 'policy\.profile'\?"),
        ({"schema": 1, "profile": "autotuned"}, r"^policy\.profile must be .*'autotune'\?"),
        ({"schema": 1, "defaults": 3}, r"^policy\.defaults must be a mapping"),
        ({"schema": 1, "defaults": {"fallbak": 1}}, r"^policy\.defaults\.fallbak must be a known"),
        ({"schema": 1, "defaults": {"fallback": "ref"}}, r"^policy\.defaults\.fallback must be"),
        ({"schema": 1, "rules": {}}, r"^policy\.rules must be a list"),
        ({"schema": 1, "quantization": {"method": "x"}}, r"^policy\.quantization\.method must be"),
    ],
)
def test_a_wrong_file_is_refused_with_its_path(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_policy(data)


@pytest.mark.parametrize(
    ("section", "entry", "message"),
    [
        ("rules", 3, r"^policy\.rules\[0\] must be a mapping"),
        ("rules", {"match": ATTENTION, "prefer": "x"}, r"rules\[0\]\.id must be text"),
        ("rules", rule("a", ATTENTION), r"exactly one of prefer and restrict_to; got neither"),
        ("rules", rule("a", ATTENTION, prefer="x", restrict_to="y"), r"got prefer and restrict_to"),
        ("rules", rule("a", ATTENTION, use="x"), r"^policy\.rules\[0\]\.use must be a known key"),
        ("overrides", rule("a", ATTENTION, prefer="x"), r"overrides\[0\]\.prefer must be a known"),
        ("overrides", rule("a", ATTENTION, use=["x"]), r"use must be one kernel id"),
        ("rules", rule("a", ATTENTION, prefer=[]), r"prefer must be a kernel id or a list"),
        ("rules", rule("a", ATTENTION, prefer=["x", "x"]), r"name each kernel once"),
        ("rules", rule("a", ATTENTION, restrict_to=3), r"restrict_to must be a kernel id or glob"),
        ("rules", rule("a", ATTENTION, prefer="x", priority="1"), r"priority must be an integer"),
        ("rules", rule("a", ATTENTION, prefer="x", params=[1]), r"params must be a mapping"),
        ("rules", {"id": "a", "prefer": "x"}, r"rules\[0\]\.match must be a mapping of facts"),
        ("rules", rule("a", {"opp": "x"}, prefer="x"), r"match\.opp must be a known fact"),
    ],
)
def test_a_wrong_entry_is_refused_with_its_path(section: str, entry: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse({section: [entry]})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (rule("a", {"op": "atention"}, prefer="eager.attention"),
         r"rules\[0\]\.match\.op must be a known op; got 'atention'.*'attention'\?"),
        (rule("a", {"none_of": [{"op": "silo"}]}, prefer="eager.attention"),
         r"match\.op must be a known op; got 'silo'"),
        (rule("a", ATTENTION, prefer="eager.atention"),
         r"rules\[0\]\.prefer must name a kernel of the table.*'eager\.attention'\?"),
        (rule("a", ATTENTION, restrict_to="spda.*"), r"restrict_to must match a kernel of attent"),
        (rule("a", ATTENTION, prefer=["eager.attention", "torch.silu"]),
         r"kernels of the matched op; got 'torch\.silu' of silu"),
        (rule("a", {"op": ["attention", "silu"]}, prefer="torch.silu"),
         r"ops that have one of the kernels; got attention without"),
    ],
)  # fmt: skip
def test_what_the_table_does_not_hold_is_refused(entry: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table({"rules": [entry]})


def test_ids_are_unique_across_both_lists() -> None:
    twice = rule("eager", ATTENTION, use="sdpa.attention")
    with pytest.raises(ConfigError, match=r"overrides\[0\]\.id must be unique.*policy\.rules\[0\]"):
        parse({"rules": [PREFER_EAGER], "overrides": [twice]})


def test_errors_of_a_file_name_it(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("schema: v1\nrules: 3\n")
    with pytest.raises(ConfigError, match=r"p\.yaml: policy\.rules must be a list; got 3"):
        load_policy(path)


@pytest.mark.parametrize("schema", ["phyai.kernel/v1", "v1", "1", 1])
def test_every_spelling_of_the_schema(schema: Any) -> None:
    assert parse_policy({"schema": schema}) == parse({})


def test_the_examples_of_the_documentation_hold() -> None:
    text = (Path(__file__).parents[2] / "docs/kernels.md").read_text(encoding="utf-8")
    examples = [part.partition("```")[0] for part in text.split("```yaml\n")[1:]]
    assert len(examples) == 3
    for example in examples:
        KernelTable().use(parse_policy(parse_yaml_mapping(example)))
    table_rows = [line for line in text.splitlines() if line.startswith(("| `", "| int", "| fp"))]
    assert all(name.partition(".")[2] in "".join(table_rows) for name in FACTS)
