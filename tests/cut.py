"""Copies the tree without kernels/: all the rest must still work.

python tests/cut.py FOLDER && cd FOLDER && pytest
"""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(folder: Path) -> None:
    """Copy the tree. Raises FileExistsError."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "kernels"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
