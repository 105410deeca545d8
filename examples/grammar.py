"""JSON of a schema and nothing else, by llguidance: what schema.py and server.py share."""

import json
from collections.abc import Collection
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

import llama2


class Vocabulary:
    """A tokenizer as llguidance wants it: bytes per id. Ids that end a text have no bytes."""

    bos_token_id = None

    def __init__(self, tokenizer: llama2.Tokenizer, stop_ids: Collection[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = [i for i, data in enumerate(self.tokens) if not data]
        self.special_token_ids += stop_ids

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, bos=False, first=False)


def answer_ends(
    model: llama2.Llama, tokenizer: llama2.Tokenizer, chat_format: str | None
) -> set[int]:
    """The ids that end an answer: `stop_ids` for generate() and for open_vocabulary()."""
    ids = {model.config.eos_token_id, *model.config.stop_token_ids, tokenizer.eos_id}
    if chat_format is not None:
        ids |= {*llama2.chat_stops(tokenizer, chat_format).ids}
    return ids


def open_vocabulary(tokenizer: llama2.Tokenizer, stop_ids: Collection[int]) -> LLTokenizer:
    """The vocabulary for Grammar, which takes 20 to 100 ms."""
    wrapped = TokenizerWrapper(Vocabulary(tokenizer, stop_ids))
    return LLTokenizer(wrapped, eos_token=[*stop_ids])


class Grammar:
    """A `logits_processor` for one answer, which will be JSON that fits a schema.

    White space is fixed, as small models would write it for ever. ValueError for a schema that
    llguidance cannot do.
    """

    def __init__(self, vocabulary: LLTokenizer, schema: dict[str, Any]) -> None:
        text = json.dumps(schema)
        if not isinstance(schema, dict):
            raise ValueError(f"the schema {text:.200} cannot be used: it is no object")
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
        self.matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if problem := self.matcher.get_error():
            raise ValueError(f"the schema {text:.200} cannot be used: {problem}")
        self.seen = 0  # how many ids the matcher knows, the prompt's too

    def __call__(self, ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Logits (V,) after ids, with -inf for what would not fit."""
        if self.seen:
            self.matcher.consume_tokens(ids[self.seen :])
        self.seen = len(ids)
        allowed = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8)
        return logits.masked_fill(allowed[: len(logits)].to(logits.device) == 0, -torch.inf)
