"""Compiling the native kernels: a failure costs the speed, not the run; nothing is half kept."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from phyai.errors import KernelUnavailable
from phyai.kernels.native import build, library

# the package's attribute of that name is the function
library_module = importlib.import_module("phyai.kernels.native.library")

# Understands --version and -o FILE, and writes every call to LOG.
FAKE_COMPILER = """#!/bin/sh
echo "$*" >> "{log}"
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
{before}
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then echo code > "$2"; fi
  shift
done
"""


class Compiler:
    """A compiler made of a shell script, found through CXX."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = folder / "calls"
        self.path = folder / "c++"
        monkeypatch.setenv("CXX", str(self.path))
        self.write()

    def write(self, version: str = "1", before: str = "") -> None:
        text = FAKE_COMPILER.format(log=self.log, version=version, before=before)
        self.path.write_text(text)
        self.path.chmod(0o755)

    def calls(self) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line != "--version"]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(tmp_path, monkeypatch)


def only_this_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILERS", ())


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_check", lambda library: None)


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(KernelUnavailable, match=r"C\+\+ compiler; found none of .*apt-get install"):
        build.build(tmp_path / "cache")


def test_cxx_comes_before_the_usual_names(compiler: Compiler) -> None:
    assert build.find_compiler(os.environ) == (str(compiler.path),)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_this_compiler(monkeypatch)
    compiler.write(before='echo "unknown architecture" >&2; exit 3')
    with pytest.raises(KernelUnavailable, match=r"ended with 3: unknown architecture"):
        build.build(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("unchecked")
def test_the_second_build_compiles_nothing(compiler: Compiler, tmp_path: Path) -> None:
    first = build.build(tmp_path / "cache")
    assert first.read_text() == "code\n"
    assert len(compiler.calls()) == len(build.sources()) + 1
    assert build.build(tmp_path / "cache") == first
    assert len(compiler.calls()) == len(build.sources()) + 1


@pytest.mark.usefixtures("unchecked")
def test_compiler_architecture_and_macros_make_another_library(
    compiler: Compiler, tmp_path: Path
) -> None:
    made = {
        build.build(tmp_path / "cache"),
        build.build(tmp_path / "cache", march="other"),
        build.build(tmp_path / "cache", defines=["PHYAI_AMX_EMULATED"]),
    }
    assert any("-DPHYAI_AMX_EMULATED" in call for call in compiler.calls())
    compiler.write(version="2")
    made.add(build.build(tmp_path / "cache"))
    assert len(made) == 4


@pytest.mark.usefixtures("unchecked")
def test_two_builds_at_once_both_get_the_library(compiler: Compiler, tmp_path: Path) -> None:
    compiler.write(before="sleep 0.1")
    start, got = threading.Barrier(2), []

    def run() -> None:
        start.wait()
        got.append(build.build(tmp_path / "cache"))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 2
    assert got[0] == got[1]
    assert sorted((tmp_path / "cache").iterdir()) == [got[0].with_suffix(".sha256"), got[0]]


def test_a_library_that_fails_its_check_is_not_kept(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_this_compiler(monkeypatch)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "linear is wrong: $*" >&2; exit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(KernelUnavailable, match=r"ended with 1: linear is wrong: .*native\.so"):
        build.build(tmp_path / "cache")
    assert compiler.calls()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelUnavailable, match="Set PHYAI_CACHE"):
        build.build(tmp_path / "file" / "cache")


def test_a_check_that_kills_its_process_ends_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    illegal = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"]
    with pytest.raises(KernelUnavailable, match="ended with -4"):
        build._run(illegal)


@pytest.mark.parametrize(
    ("march", "source", "kernel"),
    [
        ("sapphirerapids", "gemm_tiles.cpp", b"TileKernel"),
        pytest.param("cooperlake", "gemm_pairs.cpp", b"PairKernel", marks=pytest.mark.slow),
        pytest.param(
            "sapphirerapids", "gemm_int8_tiles.cpp", b"Int8TileKernel", marks=pytest.mark.slow
        ),
        pytest.param(
            "cascadelake", "gemm_int8_pairs.cpp", b"Int8PairKernel", marks=pytest.mark.slow
        ),
    ],
)
def test_products_of_newer_cpus_compile(
    march: str, source: str, kernel: bytes, tmp_path: Path
) -> None:
    try:
        compiler = build.find_compiler(os.environ)
    except KernelUnavailable as error:
        pytest.skip(str(error))
    flags = build.compile_flags(march)
    empty = tmp_path / "empty.cpp"
    empty.write_text("")
    known = subprocess.run(
        [*compiler, *flags, "-c", empty, "-o", tmp_path / "empty.o"], check=False
    )
    if known.returncode:
        pytest.skip(f"{compiler} does not know {march}")
    made = tmp_path / "made.o"
    command = [*compiler, *flags, "-Wall", "-Werror", "-c", build.SOURCES / source, "-o", made]
    subprocess.run(command, check=True)
    assert kernel in made.read_bytes()  # not the empty file of a CPU without them


@pytest.mark.usefixtures("unchecked")
def test_the_next_compiler_is_tried(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(build, "COMPILERS", (str(broken), str(compiler.path)))
    monkeypatch.delenv("CXX")
    with pytest.raises(KernelUnavailable, match="ended with 1"):
        build._version((str(broken),))
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] || exit 1\n')
    assert build.build(tmp_path / "cache").read_text() == "code\n"


@pytest.mark.usefixtures("unchecked")
def test_a_kept_library_serves_without_a_compiler(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build.build(tmp_path / "cache")
    only_this_compiler(monkeypatch)
    monkeypatch.delenv("CXX")
    assert build.build(tmp_path / "cache") == made
    with pytest.raises(KernelUnavailable, match="need a C"):
        build.build(tmp_path / "cache", march="other")


def test_cxx_may_have_arguments(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{compiler.path} --fast")
    assert build.compilers(os.environ)[0] == (str(compiler.path), "--fast")


@pytest.mark.usefixtures("unchecked", "compiler")
def test_what_others_can_write_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    made = build.build(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    for path, mode in ((folder, 0o770), (folder, 0o703), (made, 0o722), (tmp_path, 0o777)):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(KernelUnavailable, match="nobody else can write"):
            build.build(folder)
        path.chmod(before)
    assert build.build(folder) == made
    elsewhere = tmp_path / "elsewhere.so"
    made.rename(elsewhere)
    made.symlink_to(elsewhere)
    with pytest.raises(KernelUnavailable, match="nobody else can write"):
        build.build(folder)


def test_a_check_that_says_nothing_is_no_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as another module of that name in the working directory."""
    (tmp_path / "torch.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    nothing = tmp_path / "nothing.so"
    nothing.write_bytes(b"")
    with pytest.raises(KernelUnavailable):
        build._check(nothing)
    monkeypatch.setattr(build, "_run", lambda command: "all is well")
    with pytest.raises(KernelUnavailable, match="need the word of their check"):
        build._check(nothing)


@pytest.mark.usefixtures("unchecked")
def test_half_a_library_is_compiled_again(compiler: Compiler, tmp_path: Path) -> None:
    """Loading it would end the process with a signal."""
    made = build.build(tmp_path / "cache")
    before = len(compiler.calls())
    made.write_text("co")
    assert build.kept(tmp_path / "cache") is None
    assert build.build(tmp_path / "cache").read_text() == "code\n"
    assert len(compiler.calls()) > before


def test_a_damaged_library_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = library()
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"")
    given = iter([damaged, good.path])
    monkeypatch.setattr(library_module, "build", lambda folder: next(given))
    assert library.__wrapped__().isa == good.isa
    assert not damaged.exists()
    assert "made anew" in caplog.text
    monkeypatch.setattr(library_module, "build", lambda folder: damaged)
    with pytest.raises(KernelUnavailable, match="must load"):
        library.__wrapped__()
