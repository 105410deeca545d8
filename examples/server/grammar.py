"""Nothing but text that fits rules or a JSON schema, by llguidance: for schema.py and the server."""

import copy
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

import llama2

# White space between two tokens of JSON. Without any, small models write {}; with any, no end.
WHITE_SPACE = {"whitespace_pattern": r" |\n {0,8}"}
# Keywords of JSON Schema that hold a schema for each name, and those that hold one or several.
OF_NAMES = {"$defs", "definitions", "patternProperties", "properties"}
JOINING = {"$ref", "anyOf", "oneOf"}  # properties beside a schema's own
HELD = {"allOf", "anyOf", "oneOf", "items", "prefixItems", "additionalProperties"}


class Vocabulary:
    """A tokenizer in the form that llguidance needs: bytes per id. Stop tokens have no bytes."""

    bos_token_id = None

    def __init__(self, tokenizer: llama2.Tokenizer, stop_ids: Collection[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = [i for i, data in enumerate(self.tokens) if not data]
        self.special_token_ids += stop_ids

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, bos=False, first=False)


def open_vocabulary(tokenizer: llama2.Tokenizer, stop_ids: Collection[int]) -> LLTokenizer:
    """The vocabulary for Grammar; making it takes 20 to 100 ms."""
    vocabulary = Vocabulary(tokenizer, stop_ids)
    return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=[*stop_ids])


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all schemas in it, but not the data of const, enum, default and examples."""
    if isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key in OF_NAMES and isinstance(value, dict):
                value = [*value.values()]
            elif key not in HELD:
                continue
            for item in value if isinstance(value, list) else [value]:
                yield from subschemas(item)


def close(schema: dict[str, Any]) -> dict[str, Any]:
    """Allow only the properties that an object's schema names, as in vLLM and llama.cpp.

    Where a schema takes properties from several, none of them can tell which others there are.
    """
    schema = copy.deepcopy(schema)
    schemas = [*subschemas(schema)]
    joined = any("allOf" in s or ("properties" in s and JOINING & s.keys()) for s in schemas)
    for one in schemas:
        if not joined and "properties" in one and "object" in one.get("type", "object"):
            one.setdefault("additionalProperties", False)
    return schema


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
        text = ", ".join(map(json.dumps, schemas))
        for i, schema in enumerate(schemas):
            if not isinstance(schema, dict):
                raise ValueError(f"the schema {text:.200} cannot be used: it is no object")
            rules += f"\nvalue{i}: %json {json.dumps(close(schema) | {'x-guidance': WHITE_SPACE})}"
        self.matcher = LLMatcher(vocabulary, rules, log_level=0)
        if problem := self.matcher.get_error():
            _, _, said = problem.splitlines()[0].rpartition("JSON schema: ")
            raise ValueError(f"the schema {text:.200} cannot be used: {said}")
        self.seen = 0  # how many ids the matcher has seen, with the prompt

    def __call__(self, ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Logits (V,) after ids, with -inf for tokens that would not fit."""
        if self.seen:
            self.matcher.consume_tokens(ids[self.seen :])
        self.seen = len(ids)
        allowed = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8)
        return logits.masked_fill(allowed[: len(logits)].to(logits.device) == 0, -torch.inf)
