"""What server.py does with a model: several caches, prompts of any kind, log-probabilities."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

import llama2

try:
    import grammar
except ImportError:  # without llguidance
    grammar = None

MAX_CACHES, CACHE_BYTES = 4, 2**31  # conversations kept, if they fit; at least one
MAX_CONTEXT = 8192  # without --context: a file may claim any number
CHUNK = 512  # tokens of a prompt between two looks at whether its client is still there
SCORE_CHUNK = 128  # the same where the logits of all positions are needed


class Score(NamedTuple):
    """A token, how likely it was in its place, and the text that it completes."""

    token_id: int
    logprob: float | None  # None: nothing comes before it
    top: dict[int, float] | None  # log-probabilities of the likeliest ids there, and of this one
    text: str = ""


class Session:
    """A model with several caches: a prompt goes on from the one that holds most of it."""

    def __init__(self, args: Any) -> None:
        """Load a model as the command line says. ValueError or OSError."""
        context = args.context
        checkpoint = llama2.open_checkpoint(args.model, context)
        if context is None:
            context = min(checkpoint.config.max_position_embeddings, MAX_CONTEXT)
        self.model, self.tokenizer = llama2.load(
            checkpoint, args.device, args.dtype, context=context, progress=not args.quiet
        )
        self.context = context
        self.chat_format = find_chat_format(self.tokenizer, args.chat_format)
        self.vocabulary: Any = None  # of grammar(), when it is first asked for
        self.check: Any = lambda: None  # is called before each pass, and may raise what ends it

        drafts = getattr(llama2, "Drafts", None)  # of part III
        self.read = drafts(self.model) if drafts else partial(llama2.read_tokens, self.model)
        cache_dtype = self.model.cache_dtype or self.model.norm.weight.dtype
        kind = (self.model.config, 1, context, cache_dtype)
        size = 2 * llama2.Cache(*kind, device="meta").k.nbytes
        count = max(1, min(MAX_CACHES, CACHE_BYTES // size))
        device = self.model.norm.weight.device
        self.caches = [llama2.Cache(*kind, device) for _ in range(count)]  # last used last

    def take_cache(self, ids: list[int], reuse: bool) -> llama2.Cache:
        """The cache that holds most of a prompt.

        Where that would lose more than a tenth of what it holds, another conversation's, it is the
        one that was not used for longest, with a copy of what they share.
        """
        tokens = torch.tensor([ids])
        cache = self.caches[0]
        if reuse:
            best = max(self.caches, key=lambda cache: cache.common_prefix(tokens))
            n = best.common_prefix(tokens)
            if n >= 0.9 * best.pos:
                cache = best
            elif cache is not best:
                cache.reset()
                cache.k[:, :, :, :n] = best.k[:, :, :, :n]
                cache.v[:, :, :, :n] = best.v[:, :, :, :n]
                cache.advance(best.tokens[:, :n])
        else:
            cache.reset()
        self.caches.remove(cache)
        self.caches.append(cache)
        return cache

    def step(self, texts: torch.Tensor, cache: llama2.Cache) -> torch.Tensor:
        """A `step` for generate(): texts (1, n) -> logits (1, V), with a check() before each pass."""
        n = texts.shape[1]
        for end in range(cache.common_prefix(texts) + CHUNK, n, CHUNK):
            self.check()
            self.read(texts[:, :end], cache)
        self.check()
        return self.read(texts, cache)

    def encode(self, prompt: Any) -> list[list[int]]:
        """Token ids of a text, a list of ids, or a list of either. ValueError for other things."""
        several = isinstance(prompt, list) and not all(type(item) is int for item in prompt)
        return [self.encode_one(item) for item in (prompt if several else [prompt])]

    def encode_one(self, prompt: Any) -> list[int]:
        """Token ids of a text or of a list of ids. ValueError."""
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt, self.tokenizer.add_bos)
        if not isinstance(prompt, list) or not all(type(item) is int for item in prompt):
            raise ValueError("expected text, token ids, or a list of either")
        self.tokenizer.decode(prompt)  # ValueError for ids out of range
        if not prompt:
            raise ValueError("the prompt is empty; expected one token at least")
        return prompt

    def encode_chat(self, messages: Any) -> list[list[int]]:
        """Token ids of a conversation. ValueError."""
        if self.chat_format is None:
            raise ValueError("the model's chat template is unknown; pass --chat-format NAME")
        return [llama2.encode_chat(self.tokenizer, messages, self.chat_format)]

    def grammar(self, schema: dict[str, Any]) -> Any:
        """A logits_processor for one answer in JSON of a schema. ValueError."""
        if grammar is None:
            raise ValueError("not supported here: it needs the package llguidance")
        if self.vocabulary is None:
            self.ends = grammar.answer_ends(self.model, self.tokenizer, self.chat_format)
            self.vocabulary = grammar.open_vocabulary(self.tokenizer, self.ends)
        return grammar.Grammar(self.vocabulary, schema)

    def start(
        self,
        ids: list[int],
        *,
        reuse: bool,
        score_prompt: bool,
        top: int | None,
        schema: dict[str, Any] | None,
        **options: Any,
    ) -> tuple[Any, "Scorer | None"]:
        """llama2.stream_text() of a prompt, and what scores its tokens, unless `top` is None.

        `reuse`: what a cache holds is not read again; where rounding differs, the text may depend
        on it. `schema`: the answer is JSON that fits it, and ends with it.
        """
        if schema is not None:
            processor = self.grammar(schema)
            options["sampling"] = replace(options["sampling"], logits_processor=processor)
            options["stop_ids"] = self.ends
            options["chat_format"] = None  # its tags are no more than text in a JSON string
        scorer = None if top is None else Scorer(self, ids, top)
        options["step"] = scorer or self.step
        options["cache"] = self.take_cache(ids, reuse and not (scorer and score_prompt))
        if scorer and score_prompt:
            scorer.read_prompt(options["cache"])
        stream = llama2.stream_text(self.model, self.tokenizer, ids, **options)
        if scorer and score_prompt:
            stream.report.prompt_tokens = len(ids)
        return stream, scorer


def find_chat_format(tokenizer: llama2.Tokenizer, name: str | None) -> str | None:
    """The chat format of a model: the given one, or its template's. None if that is unknown."""
    if name is None:
        template = tokenizer.chat_template
        name = llama2.recognise_chat_format(template) if template.strip() else "llama-2"
    if name is not None:
        llama2.chat_stops(tokenizer, name)  # ValueError if the vocabulary lacks its tokens
    return name


class Scorer:
    """A `step` for generate() that keeps the scores of what is drawn.

    They are the model's own: of logits before penalties, biases and grammars.
    """

    def __init__(self, session: Session, prompt: list[int], top: int) -> None:
        self.session = session
        self.prompt = prompt
        self.top = top
        self.scores: list[Score] = []
        self.next: Any = None  # log-probabilities (1, V) of the id to come

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (T, V) as log-probabilities of the ids that can be drawn."""
        return logits[:, : self.session.tokenizer.vocab_size].log_softmax(-1)

    def add(self, logprobs: torch.Tensor, ids: Sequence[int]) -> None:
        """Keep the scores of T ids, given the log-probabilities (T, V) in their places."""
        best = logprobs.topk(self.top)
        for t, token_id in enumerate(ids):
            top = dict(zip(best.indices[t].tolist(), best.values[t].tolist(), strict=True))
            top[token_id] = logprobs[t, token_id].item()
            self.scores.append(Score(token_id, top[token_id], top))

    @torch.no_grad()
    def read_prompt(self, cache: llama2.Cache) -> None:
        """Score the prompt; the cache then holds all of it but its last id."""
        tokens = torch.tensor([self.prompt], device=cache.k.device)
        self.scores.append(Score(self.prompt[0], None, None))
        for start in range(0, len(self.prompt) - 1, SCORE_CHUNK):
            self.session.check()
            chunk = tokens[:, start : start + SCORE_CHUNK + 1]
            logits = self.session.model(chunk[:, :-1], cache, all_positions=True)[0]  # (T, V)
            self.add(self.logprobs(logits), chunk[0, 1:].tolist())

    def __call__(self, texts: torch.Tensor, cache: llama2.Cache) -> torch.Tensor:
        """texts (1, n) -> logits (1, V)."""
        if self.next is not None:
            self.add(self.next, texts[0, -1:].tolist())
        logits = self.session.step(texts, cache)
        self.next = self.logprobs(logits)
        return logits

    def decoded(self, ids: list[int], first: bool) -> list[str]:
        """The text that each id completes. `first`: they begin a text."""
        decoder = llama2.StreamDecoder(self.session.tokenizer, first)
        texts = [decoder.decode(token_id) for token_id in ids]
        if texts:
            texts[-1] += decoder.flush()
        return texts

    def finish(self, row: Any, shown: str) -> list[Score]:
        """All scores, when the generation has ended with the text `shown`.

        `row`: of its report. What a stop text hides has none.
        """
        drawn = row.ids[len(self.prompt) :]
        if drawn:
            self.add(self.next, drawn[-1:])
        texts = self.decoded(drawn, first=not self.session.tokenizer.decode(self.prompt))
        if row.stop_reason.startswith("stop text"):
            end = "".join(texts).index(shown) + len(shown)
            while texts and len("".join(texts[:-1])) >= end:
                texts.pop()
        if len(self.scores) > len(drawn):
            texts = self.decoded(self.prompt, first=True) + texts
        return [score._replace(text=t) for score, t in zip(self.scores, texts, strict=False)]
