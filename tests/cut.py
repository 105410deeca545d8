"""Copies the tree without kernels/: all the rest must still work.

python tests/cut.py FOLDER && cd FOLDER && pytest
"""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "kernels")
shutil.copytree(ROOT, sys.argv[1], ignore=IGNORED)
