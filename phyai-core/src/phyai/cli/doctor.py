"""`phyai doctor`: what this machine and environment offer, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from phyai.cli import console, doctor_kernels
from phyai.cli.options import DebugOption, JsonOption
from phyai.errors import ConfigError

State = Literal["ok", "note", "broken"]
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16")
OPTIONAL = {
    "matplotlib": "--plot; pip install 'phyai-core[plots]'",
    "sentencepiece": "SentencePiece tokenizers; pip install sentencepiece",
    "av": "video files of --image and --out; pip install av",
}
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Fact:
    """One line of the report. ``broken`` means that engines cannot start."""

    section: str
    name: str
    value: str
    state: State = "ok"


def doctor(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Also print the kernel table and its choices here.")
    ] = False,
    policy: Annotated[
        Path | None,
        typer.Option(
            "--policy", metavar="FILE", help="With --kernels: let this kernel policy decide."
        ),
    ] = None,
    plugin: Annotated[
        str | None,
        typer.Option("--plugin", help="With --kernels: the plugin whose engine would choose."),
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show Python, torch, CPU, memory, devices, optional packages, hub settings and plugins.

    Exit code 3 when an engine could not start here.
    """
    if not kernels and (policy is not None or plugin is not None):
        raise ConfigError("--policy and --plugin belong to --kernels; got them without it.")
    with console.Waiting("looking around"):
        facts = list(examine())
        found = doctor_kernels.examine(policy, plugin) if kernels else None
    if json:
        report: dict[str, Any] = {"facts": [asdict(fact) for fact in facts]}
        if found is not None:
            report |= found
        console.print_json(report)
    else:
        _print_facts(facts)
        if found is not None:
            doctor_kernels.show(found)
    if any(fact.state == "broken" for fact in facts):
        raise typer.Exit(console.ENVIRONMENT)


def examine() -> Iterator[Fact]:
    """Yield every fact, section by section; nothing missing stops the rest."""
    yield Fact("system", "python", f"{platform.python_version()} ({sys.executable})")
    yield Fact("system", "platform", platform.platform())
    yield from _cpu()
    yield from _memory()
    yield from _torch()
    yield from _packages()
    yield from _hub()
    yield from _settings()
    yield from _plugins()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    found: dict[str, str] = {}
    for name, _, value in pairs:
        found.setdefault(name.strip(), value.strip())
    return found


def _cpu() -> Iterator[Fact]:
    info = _fields(_read("/proc/cpuinfo"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model = info.get("model name") or platform.processor() or platform.machine()
    yield Fact("cpu", "model", model)
    yield Fact("cpu", "cores", f"{cores} usable of {os.cpu_count()}")
    flags = set((info.get("flags") or info.get("Features") or "").split())
    if flags:
        there = [flag for flag in CPU_FLAGS if flag in flags]
        yield Fact("cpu", "features", ", ".join(there) or "none of interest")


def _memory() -> Iterator[Fact]:
    info = _fields(_read("/proc/meminfo"))
    for name, key in (("total", "MemTotal"), ("available", "MemAvailable")):
        if key in info:
            yield Fact("memory", name, gib(int(info[key].split()[0]) * 1024))
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        yield Fact("memory", "container limit", gib(int(limit)))


def gib(count: int) -> str:
    """Return bytes as GiB."""
    return f"{count / 2**30:.1f} GiB"


def _torch() -> Iterator[Fact]:
    try:
        import torch
    except Exception as error:
        problem = f"cannot be imported: {type(error).__name__}: {error}. Install it again."
        yield Fact("torch", "version", problem, "broken")
        return
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield Fact("torch", "version", f"{torch.__version__} ({built})")
    yield Fact("torch", "cpu path", str(torch.backends.cpu.get_cpu_capability()))
    threads = f"{torch.get_num_threads()} in an op, {torch.get_num_interop_threads()} between ops"
    yield Fact("torch", "threads", threads)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield Fact("torch", "cuda devices", "none; engines run on the CPU", "note")
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        text = f"{properties.name}, {gib(properties.total_memory)}, capability {capability}"
        yield Fact("torch", f"cuda:{index}", text)


def _packages() -> Iterator[Fact]:
    yield Fact("packages", "phyai-core", _version("phyai-core") or "not installed", "ok")
    triton = _version("triton")
    yield Fact("packages", "triton", triton or "not installed", "ok" if triton else "note")
    for name, use in OPTIONAL.items():
        if find_spec(name) is None:
            yield Fact("packages", name, f"not installed ({use})", "note")
        else:
            yield Fact("packages", name, _version(name) or "installed")
    names = [name for name in (os.environ.get("CXX", ""), *COMPILERS) if name]
    found = next((path for name in names if (path := shutil.which(name.split()[0]))), None)
    missing = "none (torch's inductor needs one; everything else runs without)"
    yield Fact("packages", "C++ compiler", found or missing, "ok" if found else "note")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _hub() -> Iterator[Fact]:
    try:
        from huggingface_hub import constants
    except Exception as error:
        yield Fact("hub", "huggingface-hub", f"broken: {type(error).__name__}: {error}", "note")
        return
    yield Fact("hub", "offline", "yes" if constants.HF_HUB_OFFLINE else "no")
    yield Fact("hub", "endpoint", str(constants.ENDPOINT))
    yield Fact("hub", "cache", str(constants.HF_HUB_CACHE))
    # Only whether there is one: its text is never read here.
    token = bool(os.environ.get("HF_TOKEN")) or Path(constants.HF_TOKEN_PATH).is_file()
    yield Fact("hub", "token", "present" if token else "none (gated repositories need one)")


def _settings() -> Iterator[Fact]:
    from phyai import env

    yield Fact("settings", "preset cache", str(env.cache_dir()))
    try:
        for var, value in env.settings().items():
            yield Fact("settings", var.name, f"{value!r} overrides {var.field}")
    except ValueError as error:
        yield Fact("settings", "environment", str(error), "broken")
    for name in env.unknown_names():
        yield Fact("settings", name, f"unknown variable.{env.suggestion(name)}", "note")


def _plugins() -> Iterator[Fact]:
    from phyai import plugins

    adapters = plugins.inspect_all()
    if not adapters:
        yield Fact("plugins", "adapters", "none; install a model package", "note")
    for record in adapters:
        yield _plugin_fact(record, "note")
    for record in plugins.inspect_hooks():
        # A broken hook plugin stops every engine: it may be the safety filter.
        yield _plugin_fact(record, "broken")


def _plugin_fact(record: Mapping[str, Any], when_broken: State) -> Fact:
    where = f"{record['dist']} {record['version']}"
    if record["status"] == "ok":
        if others := record.get("conflicts_with"):
            also = f"{where}; also offered by {' and '.join(others)}"
            return Fact("plugins", record["id"], also, "note")
        return Fact("plugins", record["id"], where)
    state: State = "note" if record["status"] == "blocked" else when_broken
    return Fact("plugins", record["id"], f"{where}: {record['status']}: {record['error']}", state)


def _print_facts(facts: list[Fact]) -> None:
    from rich.table import Table
    from rich.text import Text

    screen = console.console()
    styles = {"ok": "", "note": "yellow", "broken": "red"}
    for section in dict.fromkeys(fact.section for fact in facts):
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for fact in facts:
            if fact.section == section:
                mark = "" if fact.state != "broken" else "BROKEN "
                grid.add_row(f"  {fact.name}", Text(mark + fact.value, style=styles[fact.state]))
        screen.print(section, style="bold")
        screen.print(grid)
