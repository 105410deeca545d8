"""What a program here does first. A module, no program: others import it before torch.

It says that torch's own threads wait asleep, and where llama2.py is. A thread of OpenMP that has no
work would spin for milliseconds. Where other programs use the cores, too, that costs it its core, for
which all others then wait: models that torch computes write a tenth of the text. The kernels have
threads of their own.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@contextmanager
def imports(name: str, packages: str = "") -> Iterator[None]:
    """Around a module's imports: if it is the program and a package is missing, one line says so,
    and that `packages` are needed.
    """
    try:
        yield
    except ImportError as error:
        if name != "__main__":
            raise
        program = Path(sys.argv[0]).name
        needed = packages or error.name
        print(f"{program}: {error.name} is missing: pip install {needed}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def errors(parser: Any) -> Iterator[None]:
    """Around the rest: what goes wrong is one line of the parser, and exit status 2; a warning is one
    line, too.
    """
    warnings.showwarning = lambda message, *_: print(f"{parser.prog}: {message}", file=sys.stderr)
    try:
        yield
    except ImportError as error:
        parser.error(f"{error}; pip install {error.name}")
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        parser.error(str(error))
