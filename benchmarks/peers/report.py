"""The report of one paired measurement, as a mapping for JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.pairing import Measured, Pair, medians, spread

SHARE_TOLERANCE = 0.10
INNER = ("prefix", "loop")
"""Stages of the network itself; the others turn pixels into its inputs and back."""


def share_problems(stages: Mapping[str, float], official: Mapping[str, float]) -> list[str]:
    """Return one line per stage whose share is over 10 points from the official code's."""
    total = sum(stages.values())
    if not total:
        return ["the peer reports no stages"]
    return [
        f"{name} takes {100 * stages.get(name, 0.0) / total:.0f} % of the stages, not "
        f"{100 * share:.0f} %"
        for name, share in official.items()
        if abs(stages.get(name, 0.0) / total - share) > SHARE_TOLERANCE
    ]


def summary(measured: Measured) -> dict[str, Any]:
    """Return ratio, times and stages of the kept pairs, and what was dropped.

    ratio.median is the median of the pairs' ratios; None everywhere without a kept pair.
    inner_ratio: the same for the stages of the network itself.
    """
    kept = measured.kept
    inner = inner_ratios(kept)
    return {
        "pairs": len(kept),
        "dropped": dict(measured.dropped),
        "ratio": spread([pair.ratio for pair in kept]) if kept else None,
        "inner_ratio": spread(inner) if inner else None,
        "ours_s": spread([pair.ours_s for pair in kept]) if kept else None,
        "peer_s": spread([pair.peer_s for pair in kept]) if kept else None,
        "ours_stages_s": medians([pair.ours_stages for pair in kept]),
        "peer_stages_s": medians([pair.peer_stages for pair in kept]),
        "all_pairs": [
            {
                "ours_s": pair.ours_s,
                "peer_s": pair.peer_s,
                "drift": round(pair.drift, 4),
                "foreign_cores": round(pair.foreign_cores, 4),
                "dropped": pair.dropped,
            }
            for pair in measured.pairs
        ],
        "probes": measured.probes,
    }


def inner_ratios(pairs: Sequence[Pair]) -> list[float]:
    """Return each pair's ratio of the time in the network itself; none where a side times none."""
    times = [
        [sum(side.get(name, 0.0) for name in INNER) for side in (p.ours_stages, p.peer_stages)]
        for p in pairs
    ]
    return [peer / ours for ours, peer in times] if times and all(map(all, times)) else []


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as one page: conditions first, then the tables."""
    ask, ours, peer = report["request"], report["ours"], report["peer"]
    result, machine = report["result"], report["conditions"]
    ratio = result["ratio"]
    lines = [
        f"# {ask['model']}: {ours['name']} against {peer['name']}",
        "",
        f"{machine['date']}; {machine['cpu']}, {machine['cores']} cores "
        f"({', '.join(machine['cpu_features']) or 'no vector extensions we look for'}), "
        f"{ask['threads']} threads per side; load {machine['load_1min']} at the start.",
        "",
        f"{ask['dtype']}, {ask['layers']} decoder and {ask['vision_layers']} vision layers, batch "
        f"{ask['rows']}, {ask['steps']} steps, {ask['cameras']} cameras and {ask['tokens']} tokens "
        f"valid. Prefix positions computed: ours {ours['prefix_positions']}, peer "
        f"{peer['prefix_positions']}.",
        "",
        f"Actions agree to {report['equality']['relative']:.2e} "
        f"(limit {report['equality']['tolerance']:g}).",
        "",
    ]
    if ratio is None:
        lines += ["No pair was kept, so there is no ratio."]
    else:
        lines += [
            f"**Ratio {ratio['median']:.2f}x** ({ratio['min']:.2f} to {ratio['max']:.2f}), median "
            f"of {result['pairs']} pairs."
        ]
        if inner := result.get("inner_ratio"):
            lines += [
                f"Of {' and '.join(INNER)} alone: {inner['median']:.2f}x "
                f"({inner['min']:.2f} to {inner['max']:.2f})."
            ]
    lines += [f"**Void:** {problem}." for problem in report["void"]]
    lines += ["", *_times(report), "", *_dropped(result), "", *_computes(report)]
    return "\n".join(lines) + "\n"


def _times(report: Mapping[str, Any]) -> list[str]:
    result = report["result"]
    lines = ["| | ours | peer |", "|---|---:|---:|"]
    for name, value in (("median", "median"), ("shortest", "min"), ("longest", "max")):
        cells = [result[f"{side}_s"] for side in ("ours", "peer")]
        lines.append(_row(f"{name}, s", [cell[value] if cell else None for cell in cells]))
    for stage in dict.fromkeys([*result["ours_stages_s"], *result["peer_stages_s"]]):
        cells = [result[f"{side}_stages_s"].get(stage) for side in ("ours", "peer")]
        lines.append(_row(f"{stage}, median s", cells))
    lines.append(_row("first call, s", [report[s]["first_call_s"] for s in ("ours", "peer")]))
    lines.append(_row("load, s", [report[s]["load_s"] for s in ("ours", "peer")]))
    rss = [report[side]["peak_rss_bytes"] / 1e9 for side in ("ours", "peer")]
    lines.append(_row("peak RSS, GB", rss))
    return lines


def _row(name: str, values: list[float | None]) -> str:
    return f"| {name} | " + " | ".join("" if v is None else f"{v:.3f}" for v in values) + " |"


def _dropped(result: Mapping[str, Any]) -> list[str]:
    if not result["dropped"]:
        return ["No pair was dropped."]
    return ["Dropped pairs: " + "; ".join(f"{n} ({why})" for why, n in result["dropped"].items())]


def _computes(report: Mapping[str, Any]) -> list[str]:
    lines = []
    for side in ("ours", "peer"):
        about = report[side]
        versions = ", ".join(f"{name} {text}" for name, text in about["versions"].items())
        lines.append(f"- {side}: {about['computes']} ({versions})")
    return lines
