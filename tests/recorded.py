"""A stand-in for CUDA graphs: it records a function on a CPU and replays it, as a graph does.

Every number and tensor is frozen when it is recorded: a replay reads and writes the same memory,
whatever has become of the tensors that had it, and runs no Python of the function.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from test_llama2 import kernels_file


def frozen(values):
    """The same values; tensors become others that keep their memory."""
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, values)


class Recording(TorchDispatchMode):
    """Records the operations that run in its context."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.calls.append((operation, *frozen((args, kwargs or {}, result))))
        return result

    def replay(self):
        """Run the operations again, in the same memory."""
        with torch.no_grad():
            for operation, args, kwargs, result in self.calls:
                again = operation(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again)):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def capture(run, device):
    """As capture() of kernels/graph.py."""
    run()
    with Recording() as recording:
        result = run()
    return recording.replay, result


@pytest.fixture
def graph(monkeypatch):
    """kernels/graph.py, which captures on the CPU, for every eight positions."""
    module = kernels_file("graph")
    monkeypatch.setattr(module, "capture", capture)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "BUCKET", 8)
    return module
