"""Nothing but text that fits rules or a JSON schema, by llguidance: for schema.py and the server."""

import copy
import functools
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

import llama2

# White space between two tokens of JSON. Without any, small models write {}; with any, no end. No
# character is written as \uXXXX: "\u0061" would be another name than "a" to llguidance.
JSON_OPTIONS = {"whitespace_pattern": r" |\n {0,8}", "json_allowed_escapes": 'bfnrt\\"'}
# Keywords of JSON Schema that hold a schema for each name, and those that hold one or several.
OF_NAMES = {"$defs", "definitions", "patternProperties", "properties"}
JOINING = {"$ref", "anyOf", "oneOf"}  # properties beside a schema's own
HELD = {"allOf", "anyOf", "oneOf", "items", "prefixItems", "additionalProperties"}
# Keywords that llguidance does not know, with values that ask for nothing.
NOTHING = {"uniqueItems": False, "propertyNames": {"type": "string"}}
# A character that JSON can only write as \\uXXXX, in JSON and in a pattern without its classes: in place
# of it llguidance would write nothing.
UNWRITTEN = re.compile(
    r"(?i)(?<!\\)(\\\\)*\\(u00[01]|u007f|x[01]|x7f|[cv0])|[\0-\x07\x0b\x0e-\x1f\x7f]"
)
CLASS = re.compile(r"(?s)\[(\\.|[^]\\])*\]")
# Exclusive bounds, and what bounds the other side.
OPPOSITE = {
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}
# Of a schema that cannot be held as it is, so many bytes are compiled to find out what can be.
CHECKED_BYTES = 2**22
# By default a schema of 500 properties that may be missing ends an answer: it has more items.
LIMITS = LLParserLimits(max_items_in_row=50_000)


def open_vocabulary(tokenizer: llama2.Tokenizer, stop_ids: Collection[int]) -> LLTokenizer:
    """The vocabulary for Grammar; making it takes 20 to 100 ms."""
    # What llguidance needs is a function with these attributes. Control tokens have no bytes.
    vocabulary = functools.partial(tokenizer.encode, bos=False, first=False)
    vocabulary.tokens = tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    vocabulary.special_token_ids = [i for i, data in enumerate(tokens) if not data]
    vocabulary.special_token_ids += stop_ids
    vocabulary.bos_token_id, vocabulary.eos_token_id = None, tokenizer.eos_id
    return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=[*stop_ids])


def subschemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The path and value of a schema and of all schemas in it, but not of the data of const, enum,
    default and examples."""
    if isinstance(schema, list):
        for i, item in enumerate(schema):
            yield from subschemas(item, f"{path}{i}/")
    if isinstance(schema, dict):
        yield path, schema
        for key, value in schema.items():
            if key in HELD:
                yield from subschemas(value, f"{path}{key}/")
            if key in OF_NAMES and isinstance(value, dict):
                for name, item in value.items():
                    yield from subschemas(item, f"{path}{key}/{name}/")


def find_endless(schema: dict[str, Any]) -> set[int]:
    """The id() of each schema in it that no answer ends, because it refers to itself, maybe by others."""
    parts = dict(subschemas(schema))
    targets = {f"#/{path}".rstrip("/"): part for path, part in parts.items()}
    targets |= {f"#{part['$anchor']}": part for part in parts.values() if "$anchor" in part}
    endless = {*map(id, parts.values())}

    def ends(part: dict[str, Any]) -> bool:
        reference = unquote(str(part.get("$ref"))).replace("~1", "/").replace("~0", "~")
        try:
            needed = [targets.get(reference), *part.get("allOf", ())]
            if part.get("type") == "object":
                needed += map(part.get("properties", {}).get, part.get("required", ()))
            if part.get("type") == "array" and part.get("minItems"):
                needed += [*part.get("prefixItems", ()), part.get("items")][:1]
            choices = part.get("anyOf") or part.get("oneOf") or [None]
            return endless.isdisjoint(map(id, needed)) and not endless.issuperset(map(id, choices))
        except (TypeError, AttributeError):  # llguidance will say which value has a wrong type
            return True

    while found := {id(part) for part in parts.values() if id(part) in endless and ends(part)}:
        endless -= found
    return endless


def close(schema: dict[str, Any]) -> dict[str, Any]:
    """Allow only the properties that an object's schema names, as in vLLM and llama.cpp.

    Where a schema takes properties from several, none of them can tell which others there are.
    """
    schema = copy.deepcopy(schema)
    if find_endless(schema):
        raise ValueError('"$ref" leads only to itself')
    schemas = [one for _, one in subschemas(schema)]
    joined = any("allOf" in s or ("properties" in s and JOINING & s.keys()) for s in schemas)
    for one in schemas:
        if not joined and "properties" in one and "object" in one.get("type", "object"):
            one.setdefault("additionalProperties", False)
        refuse_wrong(one)
    return schema


def refuse_wrong(schema: dict[str, Any]) -> None:
    """Raises ValueError for what llguidance takes and would not hold an answer to."""
    for key, others in OPPOSITE.items():
        for other in others:
            match schema.get(key), schema.get(other):
                case (int() | float() as a, int() | float() as b) if 0 < abs(a - b) < 1:
                    if a % 1 == 0:  # it takes this bound
                        raise ValueError(f'"{key}" within 1 of the other bound is not supported')
    for key in ("const", "enum", "required", "properties", "patternProperties", "pattern"):
        value = schema.get(key) or ""
        if key in OF_NAMES:
            value = [*value]
        text = CLASS.sub("", value) if key == "pattern" else json.dumps(value)
        if UNWRITTEN.search(text):
            raise ValueError(f'"{key}" needs a character that only \\uXXXX can write')
    least = schema.get("minProperties")
    is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
    if isinstance(least, int) and is_open and least > max(1, len(schema.get("required", ()))):
        raise ValueError('"minProperties" above 1 is not supported where a name may come twice')


@functools.lru_cache(4)
def control_ids(vocabulary: LLTokenizer) -> list[int]:
    """The control tokens, and those that end an answer."""
    return [i for i in range(vocabulary.vocab_size) if vocabulary.is_special_token(i)]


@functools.lru_cache(64)
def hold(
    vocabulary: LLTokenizer, text: str, check: Callable[[], None] = lambda: None
) -> tuple[Any, list[str]]:
    """As much of a schema, given as JSON, as llguidance can hold an answer to; and for each keyword
    that is left out its path and llguidance's reason. None is if the answer fits the whole schema.

    check() is called between two parts; it may raise to end the work.
    """
    schema = json.loads(text)
    checks = itertools.count()
    # What cannot be held in a definition is found there, not where it is used.
    keys = [key for key in ("$defs", "definitions") if isinstance(schema.get(key), dict)]
    names = {key: {name: {} for name in schema[key]} for key in keys}

    def problem_of(part: Any) -> str:
        check()
        if next(checks) >= CHECKED_BYTES // len(text):
            return "the schema has too many such parts"
        try:
            Grammar(vocabulary, [names | part])
        except ValueError as error:
            return str(error)
        return ""

    left_out = []
    for path, part in [*subschemas(schema)][::-1]:  # inner ones first
        if "$ref" in part and id(part) in find_endless(schema):
            left_out.append(f"{path}$ref: it leads only to itself")
            del part["$ref"]
    if problem_of(schema):
        for path, part in [*subschemas(schema)][::-1]:
            if not problem_of(part):
                continue
            # It is anyOf, if its branches exclude each other; else anyOf is a part of it.
            if isinstance(part.get("oneOf"), list) and "anyOf" not in part:
                part["anyOf"] = part.pop("oneOf")
                pairs = itertools.combinations(part["anyOf"], 2)
                if not all("Unsatisfiable" in problem_of({"allOf": [*pair]}) for pair in pairs):
                    left_out.append(f"{path}oneOf: two of its branches may hold at once")
            # Definitions first, as others refer to them.
            keywords = sorted(part.items(), key=lambda item: item[0] not in names)
            part.clear()
            for key, value in keywords:
                problem = problem_of(part | {key: value})
                if not problem:
                    part[key] = value
                elif value != NOTHING.get(key, NOTHING):
                    left_out.append(f"{path}{key}: {problem}")
    return schema, left_out


class Grammar:
    """A `logits_processor` for one answer that fits rules, in which valueN is the schema of index N.

    Raises ValueError for a schema that llguidance does not support.
    """

    def __init__(
        self,
        vocabulary: LLTokenizer,
        schemas: Sequence[dict[str, Any]],
        rules: str = "start: value0",
    ) -> None:
        wrong = ""
        for i, schema in enumerate(schemas):
            try:
                schema = close(schema)
            except (TypeError, AttributeError):  # which llguidance puts into words
                wrong = "a keyword has a value of a wrong type"
            text = json.dumps(schema | {"x-guidance": JSON_OPTIONS})
            if len(schemas) > 1 and re.search('"pattern"|"[$]ref"', text):
                Grammar(vocabulary, [schema])  # it may allow no answer
            rules += f"\nvalue{i}: %json {text}"
        self.matcher = LLMatcher(vocabulary, rules, log_level=0, limits=LIMITS)
        if problem := self.matcher.get_error():
            said = problem.partition("\n   1 |")[0].rpartition("JSON schema: ")[2]
            raise ValueError(" ".join(said.split()))
        first = self.matcher.deep_copy()
        first.compute_logit_bias()
        if wrong or (first.is_stopped() and not first.is_accepting()):
            raise ValueError(wrong or "no answer fits the schema")
        self.control_ids, self.stop_ids = control_ids(vocabulary), vocabulary.eos_tokens
        self.named = [int(i) for i in re.findall(r"<\[(\d+)\]>", rules)]  # control tokens in rules
        self.seen = 0  # how many ids the matcher has seen, with the prompt

    def copy(self) -> "Grammar":
        """One for another answer, which has seen nothing; making it takes no time."""
        other = copy.copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    def __call__(self, ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Logits (V,) after ids, with -inf for tokens that would not fit."""
        if self.seen:
            self.matcher.consume_tokens(ids[self.seen :])
        self.seen = len(ids)
        allowed = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8)
        # Where one control token may follow a text, llguidance's mask allows all of them.
        allowed[self.control_ids] = 0
        allowed[[i for i in self.named if self.matcher.validate_tokens([i])]] = 1
        # It stops where a large schema exceeds its limits; then nothing else is left.
        allowed[self.stop_ids] = int(self.matcher.is_accepting() or self.matcher.is_stopped())
        return logits.masked_fill(allowed[: len(logits)].to(logits.device) == 0, -torch.inf)
