"""How torch's own threads wait: asleep. A module, no program: others import it before torch.

A thread of OpenMP that has no work would spin for milliseconds. Where other programs use the cores,
too, that costs it its core, for which all others then wait: models that torch computes write a tenth
of the text. The kernels have threads of their own.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
