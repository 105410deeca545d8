"""Copies the tree without part IV of llama2.py and without kernels/: all the rest must still work.

python tests/cut.py FOLDER && cd FOLDER && pytest
"""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def without_part_4(text: str) -> str:
    """llama2.py's text from its start to part IV and from part V to its end."""
    rule = f"# {'=' * 98}\n"
    start, end = (text.index(f"{rule}# Part {part}: ") for part in ("IV", "V"))
    return text[:start] + text[end:]


def main(folder: Path) -> None:
    """Copy the tree. Raises FileExistsError."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "kernels"))
    file = folder / "llama2.py"
    file.write_text(without_part_4(file.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
