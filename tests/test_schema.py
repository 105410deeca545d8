"""Tests of examples/schema.py and grammar.py: answers that fit random schemas."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

import llama2

EXAMPLES = Path(llama2.__file__).resolve().parent / "examples"
sys.path.insert(0, str(EXAMPLES))
from grammar import Grammar, answer_ends, open_vocabulary


def random_schema(rng: random.Random, depth: int) -> dict:
    """A schema whose answers end within a few hundred tokens."""
    kinds = ["string", "enum", "const", "integer", "number", "boolean", "null", "pattern"]
    kind = rng.choice(kinds + ["object", "array", "anyOf"] * (2 if depth else 0))
    low = rng.randint(-50, 50)
    match kind:
        case "string":
            return {"type": "string", "maxLength": rng.randint(0, 12)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^\\d{3}-x?$"])}
        case "enum":
            return {"enum": rng.sample(["a", 'q"\\', "é€𝄞", 1, None, True, [1], "x y"], 3)}
        case "const":
            return {"const": {"k": [low, "v"]}}
        case "integer":
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 99)}
        case "number":
            return {"type": "number", "minimum": low, "maximum": low + 9, "multipleOf": 0.5}
        case "array":
            least = rng.randint(0, 2)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + 1}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
        case "object":
            names = rng.sample(["name", "größe", "a b", "x", "y"], rng.randint(0, 3))
            properties = {name: random_schema(rng, depth - 1) for name in names}
            required = [name for name in names if rng.random() < 0.7]
            schema = {"type": "object", "properties": properties, "required": required}
            return schema | {"additionalProperties": False}
    return {"type": kind}
