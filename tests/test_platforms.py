"""What other platforms lack or do otherwise, taken away or imitated here: Windows, macOS."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_compiler import COMPILER, cache, find, needs_compiler, posix, script  # noqa: F401

import llama2


def test_windows_has_neither_sysconf_nor_resource(cli_path, monkeypatch, capfd):
    """Memory is then unknown: nothing is refused, and all runs."""
    monkeypatch.delattr(os, "sysconf", raising=False)
    monkeypatch.setitem(sys.modules, "resource", None)  # importing it fails
    read_text = Path.read_text

    def hidden(path, *args, **kwargs):
        if path.parts[1:2] in (("proc",), ("sys",)):
            raise FileNotFoundError(path)
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", hidden)
    assert llama2.free_memory(torch.device("cpu")) == float("inf")
    argv = [
        "--model",
        str(cli_path),
        "--prompt",
        "a",
        "--max-new-tokens",
        "3",
        "--temperature",
        "0",
    ]
    assert llama2.main(argv) == 0
    out, err = capfd.readouterr()
    assert out.startswith("a") and "stopped: " in err and "Traceback" not in err


@needs_compiler
def test_a_c_long_may_have_32_bits(monkeypatch):
    """As on Windows: nothing between Python and C++ is a long, and sizes pass 2**31 unharmed."""
    monkeypatch.setattr(ctypes, "c_long", ctypes.c_int32)
    monkeypatch.setattr(ctypes, "c_ulong", ctypes.c_uint32)
    for file in llama2.KERNELS.glob("*.[ch]*"):
        source = re.sub(r"//.*", "", file.read_text(encoding="utf-8"))
        assert not re.search(r"\b(?:long|size_t|ptrdiff_t)\b", source)
    llama2.kernels.cache_clear()
    library = llama2.kernels().library
    assert library, llama2.kernels().problem
    for function in (library.linear, library.dequantize, library.run_layers):
        assert {ctypes.sizeof(kind) for kind in function.argtypes} == {4, 8}
    blocks = torch.randint(0, 255, (3, 4 * 64), dtype=torch.uint8)
    blocks[:, 1::2] &= 0x3B  # finite float16
    plain = llama2.QuantizedLinear(blocks, "F16")
    x = torch.linspace(-1, 1, 128)
    assert torch.allclose(llama2.NativeLinear(plain, True)(x), plain(x), rtol=1e-4)
    with pytest.raises(RuntimeError, match="status 2"):  # no multiple of 32: read with all its bits
        library.linear(1, 0, blocks.data_ptr(), x.data_ptr(), x.data_ptr(), 0, 3, 2**33 + 1)
    llama2.kernels.cache_clear()


def test_quantised_files_prefer_the_cpu_to_mps(monkeypatch):
    """MPS is taken for dense weights, or when it is asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    there = SimpleNamespace(device=torch.device("mps"))
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda size, device: there if device == "mps" else empty(size, device=device),
    )
    for types, device in ((["F32", "F16"], "mps"), (["F32", "Q4_0"], "cpu")):
        weights = {str(i): SimpleNamespace(ggml_type=name) for i, name in enumerate(types)}
        checkpoint = SimpleNamespace(weights=weights)
        assert llama2.choose_device("auto", checkpoint).type == device
        assert llama2.choose_device("mps", checkpoint).type == "mps"


@needs_compiler
@posix
def test_a_compiler_like_apples(cache, tmp_path, monkeypatch):  # noqa: F811
    """It knows -mcpu=native, not -march=native, and OpenMP only through the preprocessor."""
    text = f"""
    log() {{ echo "$@" >>"{tmp_path}/log"; }}
    log "$@"
    arguments= last=
    for x; do
      case "$x" in
        -march=native) exit 1;;
        -mcpu=native) x=-march=native;;
        -fopenmp) [ "$last" = -Xpreprocessor ] || exit 1;;
        -Xpreprocessor) last="$x"; continue;;
        */libomp.dylib) continue;;
      esac
      last="$x"; arguments="$arguments $x"
    done
    exec {COMPILER} $arguments
    """
    monkeypatch.setenv("CXX", script(tmp_path / "apple", text))
    assert find().library
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert "-mcpu=native" in last and "-Xpreprocessor -fopenmp" in last and "libomp.dylib" in last
