"""Makes llama2.py and its siblings importable, and the fixtures of test_llama2.py available here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

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
