"""How kernels/cpu.cpp becomes a library: compilers that fail, damaged caches, folders of others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import launch
import pytest

import llama2

if not hasattr(llama2, "kernels"):
    pytest.skip("this copy of llama2.py has no part III", allow_module_level=True)
COMPILER = shutil.which("g++") or shutil.which("clang++")
build = llama2.kernel_builder()
if not build:
    pytest.skip("no kernels/", allow_module_level=True)
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no compiler")
posix = pytest.mark.skipif(os.name != "posix", reason="POSIX modes, signals and shell scripts")

SOURCE = """
#include <cstdint>
extern "C" int32_t linear() { return 0; }
extern "C" int32_t dequantize() { return 0; }
extern "C" int32_t run_layers() { return 0; }
extern "C" int32_t kernels_features() { return 1; }
extern "C" int32_t kernels_version() { return VERSION; }
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, and a source that compiles at once."""
    source = tmp_path / "kernels" / "cpu.cpp"
    source.parent.mkdir()
    source.write_text(SOURCE.replace("VERSION", str(llama2.KERNELS_VERSION)))
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    llama2.kernels.cache_clear()
    yield tmp_path / "cache" / "llama2.py"
    llama2.kernels.cache_clear()


def find() -> llama2.Kernels:
    """What a new process would find."""
    llama2.kernels.cache_clear()
    return llama2.kernels()


def script(path: Path, text: str) -> str:
    """A compiler of our own."""
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


@needs_compiler
def test_compiled_once(cache):
    first, second = find(), find()
    assert first.library and first.compile_seconds > 0
    assert second.library and second.compile_seconds == 0
    assert [path.suffix for path in cache.iterdir()] == [".so"]


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "cut", "a bit flipped", "unloadable", "another"])
def test_a_damaged_library_is_compiled_again(cache, damage):
    assert find().library
    (path,) = cache.iterdir()
    data = bytearray(path.read_bytes())
    path.unlink()  # the one that this process has mapped stays as it is
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "a bit flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "empty":
        path.write_bytes(b"")
    else:  # with a name that fits
        other = b"no library"
        if damage == "another":
            file = cache.parent / "other.cpp"
            file.write_text("int other;")
            flags = ["-shared", "-fPIC", str(file), "-o", str(cache.parent / "other.so")]
            subprocess.run([COMPILER, *flags], check=True)
            other = (cache.parent / "other.so").read_bytes()
        digest = build.hashlib.sha256(other).hexdigest()[:16]
        path = path.with_name(path.name.rpartition("-")[0] + f"-{digest}.so")
        path.write_bytes(other)
    path.chmod(0o700)
    again = find()
    assert again.library and again.compile_seconds > 0


@needs_compiler
@posix
@pytest.mark.parametrize("what", ["folder", "library"])
def test_what_others_may_write_is_not_loaded(cache, what):
    assert find().library
    (library,) = cache.iterdir()
    if what == "folder":
        cache.chmod(0o777)
        found = find()
        assert not found.library and "others may write" in found.problem
    else:
        library.chmod(0o777)
        assert find().compile_seconds > 0


@posix
@pytest.mark.parametrize("home", [None, "relative"])
def test_only_absolute_folders(cache, tmp_path, monkeypatch, home):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    if home is None:  # a uid that has no name, either

        def no_home():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", no_home)
    before = set(tmp_path.rglob("*"))
    found = find()
    assert not found.library and ("home" in found.problem or "absolute" in found.problem)
    assert set(tmp_path.rglob("*")) == before


@needs_compiler
@posix
@pytest.mark.parametrize("options", ["-O2", "-DX='a b'"])
def test_cxx_may_have_options(cache, tmp_path, monkeypatch, options):
    wrapper = script(tmp_path / "my wrapper", 'echo "$@" >>"$0.log"\nexec "$@"')
    monkeypatch.setenv("CXX", f"'{wrapper}' {COMPILER} {options}")
    assert find().library
    assert "-O2" in (log := (tmp_path / "my wrapper.log").read_text()) or "-DX=a b" in log


@needs_compiler
@posix
@pytest.mark.parametrize("text", ["exit 1", r"printf '\377\376 no'>&2; exit 1", "kill -9 $$"])
def test_the_next_compiler_is_tried(cache, tmp_path, monkeypatch, text):
    monkeypatch.setenv("CXX", script(tmp_path / "bad", text))
    assert find().library


@posix
def test_all_compilers_fail(cache, tmp_path, monkeypatch):
    bad = script(tmp_path / "g++", r"printf 'error: \377\n\033[31mno'>&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "'open quote")
    problem = find().problem
    assert bad in problem and "failed" in problem and "\n" not in problem
    (tmp_path / "g++").unlink()
    assert "no C++ compiler" in find().problem


@needs_compiler
def test_another_version_is_refused(cache):
    build.SOURCE.write_text(SOURCE.replace("VERSION", "999"))
    found = find()
    assert not found.library and "version 999" in found.problem


@needs_compiler
def test_headers_are_compiled_and_watched(cache):
    """A change in a header beside the source is as much a change as one in it."""
    source = build.SOURCE
    header = source.with_name("version.h")
    header.write_text(f"#define NUMBER {llama2.KERNELS_VERSION}\n")
    source.write_text('#include "version.h"\n' + SOURCE.replace("VERSION", "NUMBER"))
    assert find().library
    header.write_text("#define NUMBER 999\n")
    assert "version 999" in find().problem


def test_a_missing_source_is_named(cache):
    build.SOURCE.unlink()
    found = find()
    assert not found.library and f"{build.SOURCE} is missing" in found.problem


@needs_compiler
@posix
def test_one_thread_is_told(cache, tmp_path, monkeypatch):
    """A compiler that refuses -fopenmp."""
    text = f'for x; do [ "$x" = -fopenmp ] && exit 1; done\nexec {COMPILER} "$@"'
    monkeypatch.setenv("CXX", script(tmp_path / "c++", text))
    source = build.SOURCE
    source.write_text(source.read_text().replace("features() { return 1", "features() { return 0"))
    with pytest.warns(UserWarning, match="one thread"):
        assert find().library


SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) if os.name == "posix" else ()


@pytest.fixture(scope="module")
def compiling(tmp_path_factory):
    """Runs whose compiler never ends, by the signal that each will get; started side by side."""
    runs = {}
    for number in SIGNALS:
        folder = tmp_path_factory.mktemp(number.name)
        text = f'case "$*" in *-dM*) exit 0;; esac\n: >"{folder}/started"\nsleep 60\n'
        environment = {"XDG_CACHE_HOME": str(folder), "CXX": script(folder / "slow", text)}
        command = [*launch.command(Path(llama2.__file__)), "--compile", "--prompt", "x"]
        options = {"env": {**os.environ, **environment}, "start_new_session": True}
        handler = signal.signal(number, lambda *_: None)  # what nohup ignores is inherited
        runs[number] = folder, subprocess.Popen(command, **options)
        signal.signal(number, handler)
    return runs


@pytest.mark.parametrize("number", SIGNALS)
def test_a_killed_run_leaves_nothing_behind(compiling, number):
    """A signal while the compiler works: it ends, too, and its folder goes."""
    (folder, process), deadline = compiling[number], time.monotonic() + 60
    while not (folder / "started").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)  # until it has left Popen(), which knows no process to end
    process.send_signal(number)
    assert process.wait(20) == (130 if number == signal.SIGINT else 128 + number)
    assert not list((folder / "llama2.py").iterdir())
    while str(folder / "slow") in subprocess.check_output(["ps", "ax", "-o", "args"], text=True):
        assert time.monotonic() < deadline
