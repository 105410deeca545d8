"""Compiles cpu.cpp once per machine and opens it as a library: load_kernels()."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .llama2 import printable  # type: ignore[import-not-found]

VERSION = 12  # of the interface between cpu.cpp and cpu.py
SOURCE = Path(__file__).with_name("cpu.cpp")
TENSOR_FACTS = ["data_ptr", "dim", "sizes", "strides", "dtype", "device_type"]
TARGETS = ["-march=native", "-mcpu=native"]  # some compilers know only one of them


@functools.cache
def load_kernels() -> ctypes.CDLL | None:
    """The library; None, with a warning that says why, if there is none.

    Its attribute gemv_tokens: how many tokens of a pass have, each, the bits that one alone has;
    compile_seconds: 0 if it was compiled before; built_for: instruction set and compiler, as text.
    """
    try:
        return find_library()
    except OSError as error:
        warnings.warn(f"quantised weights will be slow: {error}", stacklevel=2)
        return None


def find_library() -> ctypes.CDLL:
    """The library by the first compiler that can make it. Raises OSError that says why none can."""
    if not SOURCE.is_file():
        raise OSError(f"{SOURCE} is missing; it belongs beside llama2.py")
    other_folder = "set XDG_CACHE_HOME to a folder of your own"
    try:
        folder = cache_folder()
    except (OSError, RuntimeError) as error:  # no home, or one that cannot be written to
        raise OSError(f"{one_line(str(error))}; {other_folder}") from error
    named = os.environ.get("CXX", "").strip()  # then no other is tried
    try:
        commands = [shlex.split(named)]
    except ValueError as error:  # an open quote
        raise OSError(f"CXX is {named!r}: {error}; correct CXX or unset it") from None
    if not named:
        found = map(shutil.which, ("g++", "clang++", "c++"))
        commands = [[path] for path in found if path]
    problems = []
    for compiler in commands:
        try:
            return with_types(find_or_compile(compiler, folder))
        except (OSError, subprocess.SubprocessError) as error:
            problem = one_line(str(error))  # a full disk, no C++17, ...
            if not os.access(folder, os.W_OK):
                raise OSError(f"{problem}; {other_folder}") from error
            problems.append(problem)
    problems.append("correct CXX or unset it" if named else "install g++ or clang++, 9 or newer")
    raise OSError("; ".join(dict.fromkeys(problems)))


def one_line(text: str) -> str:
    """The beginning of what a compiler says, printable."""
    return printable(text)[:300].rstrip(": ")


def cache_folder() -> Path:
    """The folder of compiled kernels: the user's own, writable by nobody else. Raises OSError."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    folder = (base if base.is_absolute() else Path.home() / ".cache") / "llama2.py"
    if not folder.is_absolute():
        raise OSError(f"{folder} is not an absolute path")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_ours(folder):
        raise OSError(f"{folder} belongs to another user, or others may write to it")
    if hasattr(os, "ST_NOEXEC") and os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise OSError(f"{folder} is mounted noexec, so that no library of it can be loaded")
    return folder


def is_ours(path: Path) -> bool:
    """Whether a file or folder is the user's own and nobody else may write to it."""
    status = path.lstat()
    owned = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return owned and (os.name == "nt" or not status.st_mode & 0o022)


def find_or_compile(compiler: list[str], folder: Path) -> Any:
    """Open the library in the folder, or compile it. Raises OSError."""
    start = time.perf_counter()
    files = [SOURCE, Path(__file__), *sorted(SOURCE.parent.glob("*.h"))]
    sources = {file.name: file.read_bytes() for file in files}
    for target in TARGETS:
        try:
            macros = run_compiler([*compiler, target, "-dM", "-E", "-x", "c++", os.devnull], folder)
            break
        except OSError:
            if target == TARGETS[-1]:
                raise
    target = missed_target(macros) or target
    # The name holds hashes of what it depends on (macros tell the compiler's version and the
    # processor's instruction sets), and of the library, which a power cut may damage.
    key = repr((sources, macros, compiler, target)).encode()
    stem = f"cpu-{hashlib.sha256(key).hexdigest()[:16]}"
    for path in folder.glob(f"{stem}-*.so"):
        with suppress(OSError):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            if path.stem.endswith(digest) and is_ours(path):
                return open_library(path)
    for old in folder.glob("build-*"):  # of a run that was killed
        with suppress(OSError):
            if old.stat().st_mtime < time.time() - 3600:
                shutil.rmtree(old)

    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as build:
        new = Path(build, "cpu.so")
        for name, source in sources.items():
            Path(build, name).write_bytes(source)
        # Loops and functions begin a line of the cache: else some take 7 % longer, by chance.
        command = [*compiler, "-O2", "-falign-loops=64", "-falign-functions=64"]
        command += ["-ffp-contract=fast", target]
        command += ["-std=c++17", "-shared", SOURCE.name, "-o", new.name]
        # Sums in the order of the source: another one costs some loops of GCC 5 to 9 %. Every
        # product is fused with its sum: else bits would differ from function to function.
        if b" __clang__ " not in macros:
            command += ["-fno-tree-reassoc", "--param=avoid-fma-max-bits=0"]
        command += ["-fPIC"] * (sys.platform != "win32")
        for threads in ("-pthread", "-DONE_THREAD"):  # a compiler may know no threads
            try:
                run_compiler([*command, threads], Path(build))
                with new.open("rb+") as file:
                    digest = hashlib.sha256(file.read()).hexdigest()[:16]
                    os.fsync(file.fileno())
                new.chmod(0o700)  # whatever the umask is
                path = folder / f"{stem}-{digest}.so"
                new.replace(path)  # at once: two processes may do this at the same time
                return open_library(path, time.perf_counter() - start)
            except OSError:
                if threads == "-DONE_THREAD":
                    raise


def missed_target(macros: bytes) -> str | None:
    """The target, if an ARM processor has more than a compiler finds; else None.

    GCC 12 cuts the long line of a Neoverse V1 in /proc/cpuinfo; clang 14 does not know Apple's
    processors under Linux.
    """
    if b" __aarch64__ " not in macros or b" __ARM_FEATURE_DOTPROD " in macros:
        return None
    features: set[str] = set()
    with suppress(OSError):  # macOS has no such file, and compilers that know its processors
        features.update(Path("/proc/cpuinfo").read_text().split())
    if "asimddp" not in features:
        return None
    return "-march=armv8.2-a+dotprod" + "+i8mm" * ("i8mm" in features)


def run_compiler(command: list[str], folder: Path) -> bytes:
    """What a compiler writes to stdout. It is killed if we are. Raises OSError if it fails."""
    own_group = os.name == "posix"  # the compiler proper is a child of the driver
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=own_group,
    ) as process:
        try:
            # With sanitizers, AVX-512 took more than four minutes on a busy machine.
            out, errors = process.communicate(timeout=1200)
        except BaseException:
            with suppress(OSError):  # it has just ended
                os.killpg(process.pid, signal.SIGKILL) if own_group else process.kill()
            raise
    if process.returncode:
        raise OSError(f"{command[0]} failed: {errors.decode(errors='replace').strip()[:200]}")
    return out


def open_library(path: Path, compile_seconds: float = 0.0) -> Any:
    """Raises OSError for a library that cannot be loaded, and removes it."""
    try:
        library: Any = ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)
        raise
    library.compile_seconds = compile_seconds
    return library


def with_types(library: Any) -> ctypes.CDLL:
    """The library with its functions' types. Raises OSError if it has another version."""
    i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    try:
        library.linear.argtypes = [*[pointer] * 3, i32, i32, *[i64] * 4, i32]
        library.embed.argtypes = [*[pointer] * 3, i32, i32, *[i64] * 3]
        library.run_blocks.argtypes = [pointer] * 3
        library.kernels_built_for.restype = ctypes.c_char_p
        library.use((pointer * len(TENSOR_FACTS))(*torch_functions()), usable_cores())
        for function in (library.linear, library.run_blocks):
            function.errcheck = check_status
        found, library.gemv_tokens = library.kernels_version(), library.kernels_gemv_tokens()
        library.built_for = library.kernels_built_for().decode()
    except AttributeError as error:
        raise OSError(f"{SOURCE}: {error}") from None
    if found != VERSION:
        raise OSError(f"{SOURCE} is version {found}; expected {VERSION}")
    if library.built_for.endswith("one thread"):
        warnings.warn("the compiler knows no threads: kernels use one", stacklevel=2)
    return library


def usable_cores() -> int:
    """How many of the machine's cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def torch_functions() -> list[int | None]:
    """The addresses of the functions in struct Torch of tensor.h."""
    # Where torch is loaded already. Its library is searched through the one that depends on it.
    path = "torch_cpu.dll" if sys.platform == "win32" else torch._C.__file__
    library = ctypes.CDLL(path)
    functions = [library[f"aoti_torch_get_{fact}"] for fact in TENSOR_FACTS]
    return [ctypes.cast(function, ctypes.c_void_p).value for function in functions]


def check_status(status: int, function: Any, arguments: tuple) -> int:
    """What a kernel returned: 2 for sizes or types that it does not know. Raises MemoryError."""
    if status == 1:
        raise MemoryError("the kernels ran out of memory")
    return status
