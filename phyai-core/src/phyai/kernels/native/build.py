"""Compiles the C++ kernels for this machine, once: one shared library per source, compiler and CPU.

Plain C functions behind ctypes, no headers of torch: that compiles in seconds. The result is
checked in a process of its own before anybody uses it, so a compiler or CPU that does not keep its
word costs the speed, not the run.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from phyai.errors import KernelUnavailable

SOURCES = Path(__file__).parent / "src"
# no -ffast-math: inf and NaN keep their meaning, so that a broken result can be seen
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",  # two libraries in one process share nothing
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fopenmp",
)
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300


def build(
    folder: Path,
    march: str = "native",
    defines: Sequence[str] = (),
    prefixes: tuple[str, ...] = ("",),
) -> Path:
    """Return the path of the compiled and checked library, compiling when it is not in ``folder``.

    march: the instruction set of the compiler's ``-march``.  defines: macros set for the compile.
        prefixes: only sources whose names start so; a library of some is checked for what it holds.
    Raises: KernelUnavailable when there is no compiler, or the compile or the check fails.
    """
    compiler = find_compiler(os.environ)
    flags = compile_flags(march, defines)
    target = path_of(folder, march, defines, prefixes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not only_ours(folder):
            raise KernelUnavailable(
                f"native kernels need a folder that nobody else can write to; got {folder}. "
                "Set PHYAI_CACHE."
            )
        if target.is_file():
            return target
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = compile_library(compiler, flags, Path(work), prefixes)
            _check(made)
            made.replace(target)  # whole or not at all, also when two processes build
    except OSError as error:
        raise KernelUnavailable(
            f"native kernels need a folder they can write to; got {folder}: {error}. "
            "Set PHYAI_CACHE."
        ) from error
    return target


def path_of(
    folder: Path,
    march: str = "native",
    defines: Sequence[str] = (),
    prefixes: tuple[str, ...] = ("",),
) -> Path:
    """Return where ``build`` keeps the library of these arguments.

    Raises: KernelUnavailable when there is no compiler.
    """
    key = _key(find_compiler(os.environ), compile_flags(march, defines), prefixes)
    return folder / f"native-{key}.so"


def only_ours(folder: Path) -> bool:
    """Return whether only this user, or root, can put files there: their code will be run."""
    found = folder.stat()
    return found.st_uid in (os.getuid(), 0) and not found.st_mode & stat.S_IWOTH


def compile_flags(march: str, defines: Sequence[str] = ()) -> list[str]:
    return [*FLAGS, f"-march={march}", *(f"-D{name}" for name in defines)]


def compile_library(
    compiler: str, flags: Sequence[str], work: Path, prefixes: tuple[str, ...] = ("",)
) -> Path:
    """Return a library compiled into ``work``, unchecked: its code may be for another CPU.

    Raises: KernelUnavailable when the compiler refuses.
    """

    def compiled(source: Path) -> str:
        made = str(work / f"{source.stem}.o")
        _run([compiler, *flags, "-c", str(source), "-o", made])
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources(prefixes)))
    library = work / "native.so"
    # Linked without -fopenmp: the OpenMP runtime is the one torch has loaded, with its threads.
    _run([compiler, "-shared", *objects, "-o", str(library)])
    return library


def find_compiler(environ: Mapping[str, str]) -> str:
    """Return the C++ compiler: ``CXX``, else the first of the usual names.

    Raises: KernelUnavailable when there is none.
    """
    for name in filter(None, (environ.get("CXX", "").strip(), *COMPILERS)):
        if found := shutil.which(name):
            return found
    raise KernelUnavailable(
        f"native kernels need a C++ compiler; found none of {', '.join(COMPILERS)}. "
        "Install one (Debian, Ubuntu: apt-get install g++), or go on without."
    )


def sources(prefixes: tuple[str, ...] = ("",)) -> list[Path]:
    return sorted(path for path in SOURCES.glob("*.cpp") if path.name.startswith(prefixes))


def _key(compiler: str, flags: Sequence[str], prefixes: tuple[str, ...]) -> str:
    """Return 16 hex digits over everything the machine code depends on."""
    digest = hashlib.sha256()
    for path in [*sources(prefixes), *sorted(SOURCES.glob("*.h"))]:
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(_run([compiler, "--version"]).encode())
    digest.update(repr((flags, platform.machine(), _cpu())).encode())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    """Return model and features of the CPU, as Linux tells them; "" elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _check(library: Path) -> None:
    """Run the library's own check in another process: an illegal instruction ends only that."""
    _run([sys.executable, "-m", "phyai.kernels.native.selfcheck", str(library)])


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(
            f"native kernels need {Path(command[0]).name} to work; got {error}. Go on without."
        ) from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise KernelUnavailable(
            f"native kernels need {Path(command[0]).name} to work; it ended with "
            f"{done.returncode}: {' / '.join(last[-3:])}. Go on without, or repair it."
        )
    return done.stdout
