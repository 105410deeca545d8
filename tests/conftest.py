"""Makes llama2.py, its siblings and the fixtures of test_llama2.py available here."""

import gc
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models: two threads take half as long again
for name in ("VEC_ISA_OK", "CPP_CACHE_PRECOMPILE_HEADERS"):  # which take 10 seconds for one test
    os.environ.setdefault(f"TORCHINDUCTOR_{name}", "0")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
pytest.register_assert_rewrite("test_llama2")


def pytest_configure(config):
    """Fixtures of a plugin are known everywhere."""
    config.pluginmanager.import_plugin("test_llama2")
    gc.freeze()  # torch's objects need not be looked through again and again


@pytest.fixture
def native():
    """The kernels; where there are a compiler and a source file, they must come out."""
    import llama2

    if not any(map(shutil.which, ("g++", "clang++", "c++"))) and "CXX" not in os.environ:
        pytest.skip("no compiled kernels here: no C++ compiler")
    if not llama2.KERNELS.is_dir():
        pytest.skip("no compiled kernels here: no kernels/")
    assert llama2.load_kernels()
    return llama2.load_kernels()


@pytest.fixture
def no_grad():
    """As most callers run a model."""
    import torch

    with torch.no_grad():
        yield
