"""Layer shapes of GR00T N1.7, MiniCPM-Robot and Cosmos3, and which kernel rows serve them.

    python benchmarks/shapes.py [--model groot] [--device cpu] [--dtype bfloat16] [--list]

Prints per shape the row that dispatch chooses, its time and its rate; --list only the choice. The
same table of rows serves every model: nothing here is known to a kernel.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

DEFAULT_MOST_GFLOP = 60.0
LINE = "{:<8} {:<20} {:<34} {:>5}  {:<24} {:>8} {:>8}"


@dataclass(frozen=True, slots=True)
class Shape:
    """One op at one size.

    facts: what a layer tells the op table (sizes, masked, bias).  layers: how many layers have it;
    passes: how often each runs per request.
    """

    model: str
    layer: str
    op: str
    facts: tuple[tuple[str, Any], ...]
    layers: int = 1
    passes: int = 1

    def __getitem__(self, name: str) -> Any:
        return dict(self.facts)[name]

    @property
    def flops(self) -> int:
        """Operations of one call; 0 for element-wise ops."""
        size = dict(self.facts)
        if self.op == "linear":
            return 2 * size["rows"] * size["in_features"] * size["out_features"]
        if self.op == "attention":
            return 4 * size["queries"] * size["keys"] * size["heads"] * size["head_dim"]
        return 0

    @property
    def weights(self) -> int:
        """Weights of all its layers."""
        if self.op != "linear":
            return 0
        return self.layers * int(self["in_features"]) * int(self["out_features"])

    @property
    def request_flops(self) -> int:
        """Operations of a whole request."""
        return self.flops * self.layers * self.passes


class Model:
    """Collects the shapes of one model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.shapes: list[Shape] = []

    def add(self, layer: str, op: str, layers: int, passes: int, **facts: Any) -> None:
        self.shapes.append(Shape(self.name, layer, op, tuple(facts.items()), layers, passes))

    def linear(
        self, layer: str, rows: int, sizes: tuple[int, int], layers: int, *, passes: int = 1,
        bias: bool = False,
    ) -> None:  # fmt: skip
        """sizes: (in_features, out_features)."""
        self.add(
            layer, "linear", layers, passes,
            rows=rows, in_features=sizes[0], out_features=sizes[1], bias=bias, packed=True,
        )  # fmt: skip

    def attention(
        self, layer: str, lengths: tuple[int, int], heads: tuple[int, int, int], layers: int, *,
        passes: int = 1, masked: bool = False,
    ) -> None:  # fmt: skip
        """lengths: (queries, keys).  heads: (heads, kv_heads, head_dim)."""
        self.add(
            layer, "attention", layers, passes, queries=lengths[0], keys=lengths[1],
            heads=heads[0], kv_heads=heads[1], head_dim=heads[2], masked=masked,
        )  # fmt: skip

    def norm(
        self, layer: str, op: str, rows: int, width: int, layers: int, passes: int = 1
    ) -> None:
        self.add(layer, op, layers, passes, rows=rows, width=width)


def groot() -> list[Shape]:
    """GR00T N1.7: two 256x256 cameras, 156 prompt tokens, 41 action tokens, 4 steps."""
    m, patches, cameras, tokens, actions, steps = Model("groot"), 256, 2, 156, 41, 4
    pixels = patches * cameras
    m.norm("vision.norm", "layer_norm", pixels, 1024, 48)
    m.linear("vision.qkv", pixels, (1024, 3072), 24, bias=True)
    m.attention("vision.attention", (patches, patches), (16, 16, 64), 24, passes=cameras)
    m.linear("vision.out", pixels, (1024, 1024), 24, bias=True)
    m.linear("vision.fc1", pixels, (1024, 4096), 24, bias=True)
    m.linear("vision.fc2", pixels, (4096, 1024), 24, bias=True)
    m.linear("mergers.fc1", pixels // 4, (4096, 4096), 4, bias=True)
    m.linear("mergers.fc2", pixels // 4, (4096, 2048), 4, bias=True)
    m.norm("text.norm", "rms_norm", tokens, 2048, 32)
    m.linear("text.qkv", tokens, (2048, 4096), 16)
    m.norm("text.qk_norm", "rms_norm", tokens * 24, 128, 16)
    m.attention("text.attention", (tokens, tokens), (16, 8, 128), 16, masked=True)
    m.linear("text.out", tokens, (2048, 2048), 16)
    m.linear("text.gate_up", tokens, (2048, 12288), 16)
    m.linear("text.down", tokens, (6144, 2048), 16)
    m.linear("vl.qkv", tokens, (2048, 6144), 4, bias=True)
    m.attention("vl.attention", (tokens, tokens), (32, 32, 64), 4)
    m.linear("vl.out", tokens, (2048, 2048), 4, bias=True)
    m.linear("vl.fc1", tokens, (2048, 8192), 4, bias=True)
    m.linear("vl.fc2", tokens, (8192, 2048), 4, bias=True)
    m.norm("dit.norm", "ada_layer_norm", actions, 1536, 32, steps)
    m.linear("dit.cross_kv", tokens, (2048, 3072), 16, bias=True)
    m.linear("dit.cross_q", actions, (1536, 1536), 16, passes=steps, bias=True)
    m.linear("dit.self_qkv", actions, (1536, 4608), 16, passes=steps, bias=True)
    m.attention("dit.image_attention", (actions, 128), (32, 32, 48), 8, passes=steps)
    m.attention("dit.text_attention", (actions, 28), (32, 32, 48), 8, passes=steps)
    m.attention("dit.self_attention", (actions, actions), (32, 32, 48), 16, passes=steps)
    m.linear("dit.out", actions, (1536, 1536), 32, passes=steps, bias=True)
    m.linear("dit.fc1", actions, (1536, 6144), 32, passes=steps, bias=True)
    m.linear("dit.fc2", actions, (6144, 1536), 32, passes=steps, bias=True)
    m.linear("action.w1", actions - 1, (132, 1536), 1, passes=steps, bias=True)
    m.linear("action.w2", actions - 1, (1536, 1536), 1, passes=steps, bias=True)
    m.linear("action.w3", actions - 1, (1536, 1536), 1, passes=steps, bias=True)
    m.linear("decoder.1", actions - 1, (1024, 1024), 1, passes=steps, bias=True)
    m.linear("decoder.2", actions - 1, (1024, 132), 1, passes=steps, bias=True)
    return m.shapes


def minicpm() -> list[Shape]:
    """MiniCPM-RobotManip: two 448x448 cameras, 160 tokens, 62 head tokens, 4 steps.

    The recurrence of the 18 linear-attention layers is no op of the table yet.
    """
    m, cameras, tokens, head, steps = Model("minicpm"), 2, 160, 62, 4
    for stage, patches, layers in (("vision_a", 1024, 7), ("vision_b", 256, 20)):
        pixels = patches * cameras
        m.norm(f"{stage}.norm", "layer_norm", pixels, 1152, 2 * layers)
        m.linear(f"{stage}.qkv", pixels, (1152, 3456), layers, bias=True)
        m.attention(f"{stage}.attention", (patches, patches), (16, 16, 72), layers, passes=cameras)
        m.linear(f"{stage}.out", pixels, (1152, 1152), layers, bias=True)
        m.linear(f"{stage}.fc1", pixels, (1152, 4304), layers, bias=True)
        m.linear(f"{stage}.fc2", pixels, (4304, 1152), layers, bias=True)
    m.attention("window.attention", (4, 4), (16, 16, 72), 1, passes=256 * cameras)
    m.linear("window.fc1", 256 * cameras, (4608, 17216), 1, bias=True)
    m.linear("window.fc2", 256 * cameras, (17216, 1152), 1, bias=True)
    m.linear("merger.fc1", 64 * cameras, (4608, 4608), 1, bias=True)
    m.linear("merger.fc2", 64 * cameras, (4608, 1024), 1, bias=True)
    m.norm("text.norm", "rms_norm", tokens, 1024, 48)
    m.linear("text.qkv", tokens, (1024, 5120), 6)
    m.attention("text.attention", (tokens, tokens), (8, 2, 256), 6, masked=True)
    m.linear("text.out", tokens, (2048, 1024), 24)
    m.linear("text.in_qkvz", tokens, (1024, 8192), 18)
    m.linear("text.in_ab", tokens, (1024, 32), 18)
    m.linear("text.gate_up", tokens, (1024, 7168), 24)
    m.linear("text.down", tokens, (3584, 1024), 24)
    m.norm("dit.norm", "ada_layer_norm", head, 768, 16, steps)
    m.linear("dit.cross_kv", tokens, (1024, 1536), 8, bias=True)
    m.linear("dit.cross_q", head, (768, 768), 8, passes=steps, bias=True)
    m.linear("dit.self_qkv", head, (768, 2304), 8, passes=steps, bias=True)
    m.attention("dit.cross_attention", (head, tokens), (12, 12, 64), 8, passes=steps)
    m.attention("dit.self_attention", (head, head), (12, 12, 64), 8, passes=steps)
    m.linear("dit.out", head, (768, 768), 16, passes=steps, bias=True)
    m.linear("dit.fc1", head, (768, 3072), 16, passes=steps, bias=True)
    m.linear("dit.fc2", head, (3072, 768), 16, passes=steps, bias=True)
    m.linear("action.w1", 30, (160, 768), 1, passes=steps, bias=True)
    m.linear("action.w2", 30, (1536, 768), 1, passes=steps, bias=True)
    m.linear("action.w3", 30, (768, 768), 1, passes=steps, bias=True)
    m.linear("decoder.1", 30, (1024, 1024), 1, passes=steps, bias=True)
    m.linear("decoder.2", 30, (1024, 80), 1, passes=steps, bias=True)
    return m.shapes


def cosmos3() -> list[Shape]:
    """Cosmos3-Nano policy: 150 prompt tokens, 3060 video and 33 action tokens, 2 branches x 4."""
    m, text, media, branches, layers = Model("cosmos3"), 150, 3093, 2, 36
    for tower, rows, keys, passes in (("und", text, text, branches),
                                      ("gen", media, text + media, 4 * branches)):  # fmt: skip
        m.norm(f"{tower}.norm", "rms_norm", rows, 4096, 2 * layers, passes)
        m.linear(f"{tower}.qkv", rows, (4096, 6144), layers, passes=passes)
        m.norm(f"{tower}.qk_norm", "rms_norm", rows * 40, 128, layers, passes)
        m.attention(
            f"{tower}.attention", (rows, keys), (32, 8, 128), layers, passes=passes,
            masked=tower == "und",
        )  # fmt: skip
        m.linear(f"{tower}.out", rows, (4096, 4096), layers, passes=passes)
        m.linear(f"{tower}.gate_up", rows, (4096, 24576), layers, passes=passes)
        m.linear(f"{tower}.down", rows, (12288, 4096), layers, passes=passes)
    m.linear("gen.proj_in", media - 33, (192, 4096), 1, passes=4 * branches, bias=True)
    m.linear("gen.proj_out", media - 33, (4096, 192), 1, passes=4 * branches, bias=True)
    m.linear("gen.action_in", 33, (64, 4096), 1, passes=4 * branches, bias=True)
    m.linear("gen.action_out", 33, (4096, 64), 1, passes=4 * branches, bias=True)
    return m.shapes


MODELS: dict[str, Callable[[], list[Shape]]] = {
    "groot": groot,
    "minicpm": minicpm,
    "cosmos3": cosmos3,
}


def all_shapes() -> Iterator[Shape]:
    for model in MODELS.values():
        yield from model()


def time_ms(shape: Shape, device: str, dtype: str, table: Any, repeat: int) -> float:
    """Return the median milliseconds of one call of the chosen row."""
    import torch

    from phyai.kernels.samples import packed, sample

    facts = dict(shape.facts)
    made = sample({"op": shape.op, "device": device, "dtype": dtype, **facts})
    if made is None:
        raise SystemExit(f"op {shape.op!r} has no sample inputs.")
    kernel = table.choose(shape.op, device=device, dtype=dtype, **facts)
    made, run = packed(made, kernel, facts), kernel.fn
    times = []
    with torch.no_grad():
        for _ in range(repeat + 1):
            _wait(device)
            began = time.perf_counter()
            run(*made.args, **made.kwargs)
            _wait(device)
            times.append(1e3 * (time.perf_counter() - began))
    return median(times[1:])


def _wait(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), action="append")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--arch", help="with --list: choose as on this GPU, such as sm90")
    parser.add_argument("--list", action="store_true", help="only the choices, no times")
    parser.add_argument(
        "--most", type=float, default=DEFAULT_MOST_GFLOP, help="largest call to time, in GFLOP"
    )
    args = parser.parse_args()
    from phyai.kernels import KernelTable

    table = KernelTable(context={"device.arch": args.arch} if args.arch else None)
    print(LINE.format("model", "layer", "shape", "calls", "row", "ms", "GFLOP/s"))
    for shape in all_shapes():
        if args.model and shape.model not in args.model:
            continue
        facts = dict(shape.facts)
        choice = table.explain_one(shape.op, device=args.device, dtype=args.dtype, **facts)
        ms = rate = ""
        if not args.list and shape.flops <= 1e9 * args.most:
            took = time_ms(shape, args.device, args.dtype, table, args.repeat)
            ms, rate = f"{took:.3f}", f"{shape.flops / took / 1e6:.1f}" if shape.flops else ""
        calls, row = shape.layers * shape.passes, choice.row or "none"
        print(LINE.format(shape.model, shape.layer, describe(shape), calls, row, ms, rate).rstrip())


def describe(shape: Shape) -> str:
    """Return the sizes in a few characters."""
    f = dict(shape.facts)
    if shape.op == "linear":
        return f"{f['rows']} x {f['in_features']} -> {f['out_features']}" + (
            " + bias" if f["bias"] else ""
        )
    if shape.op == "attention":
        return (
            f"{f['queries']} q, {f['keys']} k, {f['heads']}/{f['kv_heads']} x {f['head_dim']}"
            + (" masked" if f["masked"] else "")
        )
    return f"{shape.op} {f['rows']} x {f['width']}"


if __name__ == "__main__":
    main()
