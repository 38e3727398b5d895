"""Compiles the C++ kernels for this machine, once: one shared library per source, compiler and CPU.

Plain C functions behind ctypes, no headers of torch: that compiles in seconds. The result is
checked in a process of its own before anybody uses it, so a compiler or CPU that does not keep its
word costs the speed, not the run.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

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
NO_COMPILER = (
    f"native kernels need a C++ compiler; found none of {', '.join(COMPILERS)}. "
    "Install one (Debian, Ubuntu: apt-get install g++), or go on without."
)

Command: TypeAlias = tuple[str, ...]
"""A compiler's program and the arguments it always gets."""


def build(
    folder: Path,
    march: str = "native",
    defines: Sequence[str] = (),
    prefixes: tuple[str, ...] = ("",),
) -> Path:
    """Return the path of the compiled and checked library, compiling when it is not in ``folder``.

    march: the instruction set of the compiler's ``-march``.  defines: macros set for the compile.
        prefixes: only sources whose names start so; a library of some is checked for what it holds.
    Raises: KernelUnavailable when there is no compiler, the compile or the check fails with all of
        them, or others could have written what lies in the folder.
    """
    flags = compile_flags(march, defines)
    found = compilers(os.environ)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if ready := kept(folder, march, defines, prefixes):
            return ready
        problems = []
        for compiler in found:
            try:
                return _make(compiler, flags, folder, prefixes)
            except KernelUnavailable as error:
                problems.append(str(error))
    except OSError as error:
        raise KernelUnavailable(
            f"native kernels need a folder they can write to; got {folder}: {error}. "
            "Set PHYAI_CACHE."
        ) from error
    raise KernelUnavailable(" ".join(problems) or NO_COMPILER)


def kept(
    folder: Path,
    march: str = "native",
    defines: Sequence[str] = (),
    prefixes: tuple[str, ...] = ("",),
) -> Path | None:
    """Return the library that ``build`` has left in a folder, None when there is none.

    Without a compiler that of any compiler will do: it was made for this CPU and checked.
    Raises: KernelUnavailable when others could have written to it; OSError.
    """
    if not folder.is_dir():
        return None
    key, found = _key(compile_flags(march, defines), prefixes), compilers(os.environ)
    names = [f"native-{key}-{_version(compiler)}.so" for compiler in found]
    paths = [folder / name for name in names]
    if not found:
        paths = sorted(folder.glob(f"native-{key}-*.so"))
    refuse_foreign(folder)
    for path in paths:
        if os.path.lexists(path):
            refuse_foreign(path)
            if _is_whole(path):
                return path
    return None


def _is_whole(path: Path) -> bool:
    """Return whether a library is what was written: half a file would end the process, not fail."""
    try:
        return _digest_file(path).read_text(encoding="utf-8") == checked_line(path)
    except (OSError, UnicodeDecodeError):
        return False


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _make(compiler: Command, flags: Sequence[str], folder: Path, prefixes: tuple[str, ...]) -> Path:
    target = folder / f"native-{_key(flags, prefixes)}-{_version(compiler)}.so"
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = compile_library(compiler, flags, Path(work), prefixes)
        _check(made)
        made.chmod(0o700)
        with made.open("rb") as file:
            os.fsync(file.fileno())  # the name must not outlive a power loss without the content
        _digest_file(target).write_text(checked_line(made), encoding="utf-8")
        made.replace(target)  # whole or not at all, also when two processes build
    return target


def refuse_foreign(path: Path) -> None:
    """Raise KernelUnavailable when somebody else could have written a file or folder.

    Its code will be run. Folders above it count where anybody may replace what they hold.
    """
    found, safe = path.lstat(), (os.getuid(), 0)
    ours = found.st_uid in safe and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    kind = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    above = [parent.stat() for parent in path.resolve().parents]
    open_to_all = any(p.st_mode & stat.S_IWOTH and not p.st_mode & stat.S_ISVTX for p in above)
    if not ours or not kind or open_to_all:
        raise KernelUnavailable(
            f"native kernels are kept where nobody else can write; got {path}. "
            "Remove it, or set PHYAI_CACHE to a folder of your own."
        )


def compile_flags(march: str, defines: Sequence[str] = ()) -> list[str]:
    return [*FLAGS, f"-march={march}", *(f"-D{name}" for name in defines)]


def compile_library(
    compiler: Command, flags: Sequence[str], work: Path, prefixes: tuple[str, ...] = ("",)
) -> Path:
    """Return a library compiled into ``work``, unchecked: its code may be for another CPU.

    Raises: KernelUnavailable when the compiler refuses.
    """

    def compiled(source: Path) -> str:
        made = str(work / f"{source.stem}.o")
        _run([*compiler, *flags, "-c", str(source), "-o", made])
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources(prefixes)))
    library = work / "native.so"
    # Linked without -fopenmp: the OpenMP runtime is the one torch has loaded, with its threads.
    _run([*compiler, "-shared", *objects, "-o", str(library)])
    return library


def compilers(environ: Mapping[str, str]) -> list[Command]:
    """Return the C++ compilers to try: ``CXX`` with its arguments, then the usual names."""
    found: dict[Command, None] = {}
    for name in (environ.get("CXX", ""), *COMPILERS):
        program, *arguments = shlex.split(name) or [""]
        if program and (path := shutil.which(program)):
            found[(path, *arguments)] = None
    return list(found)


def find_compiler(environ: Mapping[str, str]) -> Command:
    """Return the first of ``compilers``.

    Raises: KernelUnavailable when there is none.
    """
    for compiler in compilers(environ):
        return compiler
    raise KernelUnavailable(NO_COMPILER)


def sources(prefixes: tuple[str, ...] = ("",)) -> list[Path]:
    return sorted(path for path in SOURCES.glob("*.cpp") if path.name.startswith(prefixes))


def _key(flags: Sequence[str], prefixes: tuple[str, ...]) -> str:
    """Return 16 hex digits over everything but the compiler that the machine code depends on."""
    digest = hashlib.sha256()
    for path in [*sources(prefixes), *sorted(SOURCES.glob("*.h"))]:
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(repr((flags, platform.machine(), _cpu(), metadata.version("torch"))).encode())
    return digest.hexdigest()[:16]


@functools.cache
def _version_text(compiler: Command, changed_ns: int) -> str:
    return _run([*compiler, "--version"])


def _version(compiler: Command) -> str:
    """Return 8 hex digits over a compiler's version."""
    text = _version_text(compiler, Path(compiler[0]).stat().st_mtime_ns)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _cpu() -> str:
    """Return model and features of the CPU, as Linux tells them; "" elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _check(library: Path) -> None:
    """Run the library's own check in another process: an illegal instruction ends only that.

    ``-P``: a module in the working directory must not take the place of one of ours.
    """
    told = _run([sys.executable, "-P", "-m", "phyai.kernels.native.selfcheck", str(library)])
    if checked_line(library) not in told.splitlines():
        raise KernelUnavailable(
            f"native kernels need the word of their check; got {told.strip()[-200:]!r}. "
            "Go on without, or repair the installation."
        )


def checked_line(library: Path) -> str:
    """Return the line with which the check of a library ends when all is well."""
    return f"checked {hashlib.sha256(library.read_bytes()).hexdigest()}"


def _run(command: Sequence[str]) -> str:
    plain = {**os.environ, "LC_ALL": "C"}  # messages that can be read back
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
            check=False, env=plain,
        )  # fmt: skip
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
