"""Makes llama2.py and its siblings importable, and the fixtures of test_llama2.py available here.

Where pytest-xdist is installed, a plain `pytest` uses every core; naming files, -k or -n does not.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models: two threads take half as long again
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

from test_llama2 import (  # noqa: F401
    cli,
    cli_model,
    cli_path,
    forms,
    keys,
    model,
    model_path,
    tensors,
    tokenizer,
    vocabulary,
    weights,
)

gc.freeze()  # torch's objects need not be looked through again and again


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """A process per core for the whole suite: a few tests would end before torch is imported."""
    option = config.option
    chosen = (
        config.args_source is pytest.Config.ArgsSource.ARGS or option.keyword or option.markexpr
    )
    if (
        getattr(option, "numprocesses", 0) is None
        and not chosen
        and not hasattr(config, "workerinput")
    ):
        option.numprocesses = "logical"
        option.maxprocesses = option.maxprocesses or 4
