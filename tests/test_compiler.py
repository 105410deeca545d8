"""How kernels/cpu.cpp becomes a library: compilers that fail, damaged caches, folders of others."""

import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

import llama2
from test_llama2 import kernels_file, needs_kernels

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = [
    needs_kernels,
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(not COMPILER, reason="no compiler"),
    pytest.mark.skipif(os.name != "posix", reason="POSIX modes and shell scripts"),
]
SOURCE = """
#include <cstdint>
#include "version.h"
extern "C" int32_t linear() { return 0; }
extern "C" int32_t embed() { return 0; }
extern "C" int32_t run_blocks() { return 0; }
extern "C" void use() {}
extern "C" int32_t kernels_gemv_tokens() { return 1; }
extern "C" int32_t kernels_version() { return VERSION; }
#ifdef ONE_THREAD
extern "C" const char *kernels_built_for() { return "nothing, one thread"; }
#else
extern "C" const char *kernels_built_for() { return "nothing"; }
#endif
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """kernels/ with a source that compiles at once, and an empty cache."""
    build, kernels = kernels_file("build"), tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "cpu.cpp").write_text(SOURCE)
    (kernels / "version.h").write_text(f"#define VERSION {build.VERSION}\n")
    monkeypatch.setattr(build, "SOURCE", kernels / "cpu.cpp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield kernels
    kernels_file("build").load_kernels.cache_clear()


def find():
    """What a new process would find."""
    kernels_file("build").load_kernels.cache_clear()
    return llama2.load_kernels()


def problem():
    """What a new process would say of kernels that it cannot have."""
    with pytest.warns(UserWarning, match="quantised weights will be slow: ") as warnings:
        assert find() is None
    return str(warnings[0].message)


def script(path, text):
    """A compiler of our own."""
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_compiled_once_unless_the_library_is_not_ours(folder):
    """It is compiled again where it is damaged or others may write to it, not loaded."""
    assert find().compile_seconds > 0 == find().compile_seconds
    (path,) = (folder.parent / "cache" / "llama2.py").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.unlink()  # the one that this process has mapped stays as it is
    path.write_text("no library")
    path.chmod(0o700)
    assert find().compile_seconds > 0
    path.chmod(0o777)
    assert find().compile_seconds > 0
    path.parent.chmod(0o777)
    assert "others may write" in problem()


@pytest.mark.parametrize("home, problem_of", [(os.devnull, os.devnull), ("~", "home directory")])
def test_a_home_that_cannot_be_used(folder, monkeypatch, home, problem_of):
    """The advice is another folder, not a compiler, which is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative paths are not used")
    monkeypatch.setenv("HOME", home)
    said = problem()
    assert problem_of in said and "set XDG_CACHE_HOME" in said and "g++" not in said


def test_files_are_watched(folder):
    """A header; what is missing is named."""
    assert find()
    (folder / "version.h").write_text("#define VERSION 999\n")
    assert "version 999" in problem()
    (folder / "cpu.cpp").unlink()
    assert "cpu.cpp is missing" in problem()


def test_a_named_compiler_may_have_options(folder, tmp_path, monkeypatch):
    wrapper = script(tmp_path / "my wrapper", 'echo "$@" >>"$0.log"\nexec "$@"')
    monkeypatch.setenv("CXX", f"'{wrapper}' {COMPILER} -DX='a b'")
    assert find()
    assert "-DX=a b" in (tmp_path / "my wrapper.log").read_text()


@pytest.mark.parametrize("bad", ["exit 1", r"printf 'error: \377\n\033[31mno'>&2; exit 1"])
def test_a_compiler_that_fails(folder, tmp_path, monkeypatch, bad):
    """Unless it was named, the next one is tried; when all fail, one line says what to install."""
    path = script(tmp_path / "g++", bad)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CXX", raising=False)
    assert find()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    for named in (path, "no_such_file", "an open 'quote"):
        monkeypatch.setenv("CXX", named)
        said = problem()
        assert named.split("/")[-1] in said and said.endswith("correct CXX or unset it")
        assert said.isprintable() and ":;" not in said
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "g++ failed" in problem() and "install g++ or clang++" in problem()


def test_a_library_that_does_not_load(folder, tmp_path, monkeypatch):
    """It is built without threads, which may be the reason; where nothing could load, not at all."""
    lost = '-pthread*) set -- "$@" -Wl,--no-as-needed -L. -llost; echo >lost.c'
    make = f"{COMPILER} -shared lost.c -o liblost.so -x c /dev/null"
    wrapper = script(
        tmp_path / "cxx",
        f'echo run >>"$0.log"\ncase "$*" in *{lost}; {make};; esac\nexec {COMPILER} "$@"',
    )
    monkeypatch.setenv("CXX", wrapper)
    log = tmp_path / "cxx.log"
    for runs in (3, 4):  # macros, with and without threads; macros, and it is there
        with pytest.warns(UserWarning, match="the compiler knows no threads: kernels use one"):
            assert find()
        assert log.read_text().count("run") == runs
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    said = problem()
    assert "noexec" in said and "set XDG_CACHE_HOME" in said and "g++" not in said
    assert log.read_text().count("run") == runs


@pytest.mark.parametrize("features", ["asimd asimddp", "asimd asimddp i8mm", "asimd"])
def test_what_compilers_miss_of_arm(folder, tmp_path, monkeypatch, features):
    """Linux knows which instructions there are; GCC 12 does not, on some processors."""
    macros = 'case "$*" in *-dM*) echo "#define __aarch64__ 1"; exit;; esac'
    build = 'for x; do case $x in -m*) ;; *) set -- "$@" "$x";; esac; shift; done'
    wrapper = script(
        tmp_path / "cxx", f'{macros}\necho "$*" >"$0.log"\n{build}\nexec {COMPILER} "$@"'
    )
    monkeypatch.setenv("CXX", wrapper)
    read_text = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda p, *a: features if str(p) == "/proc/cpuinfo" else read_text(p, *a)
    )
    assert find()
    options = (tmp_path / "cxx.log").read_text()
    assert ("+dotprod" in options) == ("asimddp" in features)
    assert ("+i8mm" in options) == ("i8mm" in features)
