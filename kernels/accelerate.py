"""Makes a built model faster by changing the classes of its modules. llama2.py opens this file alone.

    accelerate.py   which of the others a device needs
    cpu.py          layers, each of them one call of cpu.cpp
    build.py        compiles cpu.cpp once per machine
    cpu.cpp         the kernels, with formats.h (types of matrices), vectors.h (instruction sets),
                    team.h (threads) and tensor.h (torch's tensors)
    gpu.py          quantised matrices on a GPU, by Triton
    graph.py        a decode step as one CUDA graph
    NOTES.md        what was measured

Each class has a base class in llama2.py, which computes the same by torch and does it wherever the
kernels cannot. `.llama2` is the module that opened the folder, whatever its name is: it may be a copy
or a part of a package. The folder has no __init__.py, because a package `kernels` is on PyPI.
"""

from __future__ import annotations

import importlib

import torch

from . import cpu
from .build import load_kernels
from .llama2 import Llama


def can_accelerate(device: torch.device) -> bool:
    """Whether accelerate() has kernels for a device. They are compiled at the first call."""
    if device.type == "cuda":
        from . import graph  # which takes a second

        return graph.gpu is not None
    return device.type == "cpu" and load_kernels() is not None


def accelerate(model: Llama, fast: bool, compile: bool) -> Llama:
    """As llama2.accelerate()."""
    device = model.norm.weight.device
    if device.type == "cuda":
        from . import graph

        graph.accelerate(model, compile and can_accelerate(device))
    elif compile and can_accelerate(device):
        cpu.accelerate(model, fast)
    return model


def __getattr__(name: str) -> type:
    """The class of a name that a pickle has."""
    for prefix, file in {"Native": "cpu", "Planes": "gpu", "Graph": "graph"}.items():
        if name.startswith(prefix):
            return getattr(importlib.import_module(f".{file}", __package__), name)
    raise AttributeError(name)
