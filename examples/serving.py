"""What server.py does with a model: several caches, prompts of any kind, log-probabilities."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import llama2

MAX_CACHES, CACHE_BYTES = 4, 2**32  # conversations kept, if they fit; at least one


class Score(NamedTuple):
    """A token, how likely it was in its place, and the text that it completes."""

    token_id: int
    logprob: float | None  # None: nothing comes before it
    top: dict[int, float] | None  # log-probabilities of the likeliest ids there, and of this one
    text: str = ""


class Scorer:
    """A `step` for generate() that runs another one and keeps the scores of what is drawn."""

    def __init__(self, session: Any, prompt: Sequence[int], top: int) -> None:
        self.session, self.prompt, self.top = session, list(prompt), top
        self.tokenizer, self.scores = session.tokenizer, []
        self.logprobs: torch.Tensor | None = None  # (1, V): of the id to come

    def add(self, logprobs: torch.Tensor, ids: Sequence[int]) -> None:
        """Keep the scores of T ids, given the log-probabilities (T, V) in their places."""
        values, places = (column.tolist() for column in logprobs.topk(self.top))
        own = logprobs[range(len(ids)), ids].tolist()
        for token_id, logprob, value, place in zip(ids, own, values, places, strict=True):
            best = dict(zip([*place, token_id], [*value, logprob], strict=True))
            self.scores.append(Score(token_id, logprob, best))

    @torch.no_grad()
    def read(self, cache: llama2.Cache) -> None:
        """Score the prompt; the cache then holds all of it but its last id."""
        ids, model = self.prompt, self.session.model
        tokens = torch.tensor([ids], device=cache.k.device)
        cache.reset()
        report = llama2.CACHE_USERS[cache] = llama2.Report(model, [ids], len(ids))
        self.scores.append(Score(ids[0], None, None))
        for start in range(0, len(ids) - 1, llama2.SCORE_CHUNK):
            chunk = tokens[:, start : start + llama2.SCORE_CHUNK + 1]
            self.session.check()
            logits = model(chunk[:, :-1], cache, all_positions=True)[0]  # (T, V)
            logprobs = logits[:, : self.tokenizer.vocab_size].log_softmax(-1)
            self.add(logprobs, chunk[0, 1:].tolist())
        report.passes = cache.passes
        decoder = llama2.StreamDecoder(self.tokenizer)
        texts = [decoder.decode(token_id) for token_id in ids]
        texts[-1] += decoder.flush()  # as in the prompt's text
        pairs = zip(self.scores, texts, strict=True)
        self.scores = [score._replace(text=text) for score, text in pairs]

    def __call__(self, tokens: torch.Tensor, cache: llama2.Cache) -> torch.Tensor:
        if self.logprobs is not None:
            self.add(self.logprobs, tokens[0].tolist())
        logits = self.session.step(tokens, cache)
        if cache.pos >= len(self.prompt):
            self.logprobs = logits[:, : self.tokenizer.vocab_size].log_softmax(-1)
        return logits

    def finish(self, report: llama2.Report, stops: Sequence[str]) -> list[Score]:
        """All scores, once the generation has ended; none of what a stop text hides."""
        drawn, new = report.texts[0][len(self.prompt) :], report.new_ids[0]
        if drawn:
            self.add(self.logprobs, drawn[-1:])
        decoder = llama2.StreamDecoder(self.tokenizer, not self.tokenizer.decode(self.prompt))
        texts = [decoder.decode(token_id) for token_id in new] + [""] * (len(drawn) - len(new))
        whole = "".join(texts)
        if not any(stop in whole for stop in stops):
            whole += decoder.flush()
        shown, _, found = llama2.split_at_stop(whole, stops)
        hidden = len(whole) - len(shown) if found else -1
        while texts and hidden >= len(texts[-1]):
            hidden -= len(texts.pop())
        first = len(self.scores) - len(drawn)
        pairs = zip(self.scores[first:], texts)
        return self.scores[:first] + [score._replace(text=text) for score, text in pairs]


class Session:
    """A model with several caches: a prompt that continues an earlier one reuses its cache."""

    def __init__(
        self,
        model: llama2.Llama,
        tokenizer: llama2.Tokenizer,
        caches: Sequence[llama2.Cache],
        chat_format: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.chat_format = model, tokenizer, chat_format
        self.context = caches[0].max_seq_len
        # How long each cache's last prompt was, the most recently used cache last.
        self.prompts = dict.fromkeys(caches, 0)
        drafts = llama2.part_3("Drafts")
        self.run = drafts(model) if drafts else model
        self.check: Callable[[], None] = lambda: None

    @classmethod
    def open(cls, path: Path, context: int | None, chat_format: str | None) -> "Session":
        """Load a model on the best device, with as many caches as CACHE_BYTES hold.

        With an unknown chat template and without `chat_format` it completes texts alone.
        """
        checkpoint = llama2.open_checkpoint(path).allow_context(context)
        most = checkpoint.config.max_position_embeddings
        context = context or min(most, llama2.CHAT_CONTEXT)
        device = llama2.choose_device("auto", checkpoint)
        dtype, cache_dtype, exact = llama2.choose_dtypes("auto", device, checkpoint)
        plan = llama2.memory_plan(checkpoint, context, dtype, cache_dtype)
        count = max(1, min(MAX_CACHES, CACHE_BYTES // plan["cache"]))
        plan["cache"] *= count
        llama2.check_memory(plan, context, device, llama2.free_memory(device))
        model, tokenizer = llama2.load(checkpoint, device, dtype, exact=exact)
        kind = (1, context, cache_dtype, device)
        caches = [llama2.Cache(model.config, *kind) for _ in range(count)]
        template = checkpoint.chat_template
        assumed = llama2.recognise_chat_format(template) if template.strip() else "llama-2"
        chat_format = chat_format or assumed
        return cls(model, tokenizer, caches, chat_format)

    def step(self, tokens: torch.Tensor, cache: llama2.Cache) -> torch.Tensor:
        """A pass of the model, unless check() raises what ends the generation."""
        self.check()
        return self.run(tokens, cache)

    def take(self, ids: Sequence[int], reuse: bool) -> llama2.Cache:
        """The cache whose prompt goes on in `ids`, else the oldest, with what another shares."""
        shared = {c: reuse and llama2.held(self.model, c, ids) for c in self.prompts}
        cache = best = max(shared, key=shared.__getitem__)
        n = shared[best]
        if 10 * n < 9 * self.prompts[best]:  # all but the end: an answer is encoded anew
            cache = next(iter(shared))
        if cache is not best:
            cache.k[:, :, :, :n], cache.v[:, :, :, :n] = best.k[:, :, :, :n], best.v[:, :, :, :n]
            cache.pos, cache.passes = n, best.passes
            llama2.CACHE_USERS[cache] = llama2.CACHE_USERS[best]
        if not reuse:
            cache.reset()
        del self.prompts[cache]
        self.prompts[cache] = len(ids)
        return cache

    def encode(self, prompt: Any, chat: bool = False) -> list[list[int]]:
        """Token ids of a text, a list of ids, a list of either, or a chat's messages.

        Raises ValueError for anything else.
        """
        if chat:
            if self.chat_format is None:
                raise ValueError("the model's chat template is unknown; pass --chat-format NAME")
            return [llama2.encode_chat(self.tokenizer, prompt, self.chat_format)]
        several = isinstance(prompt, list) and not all(type(item) is int for item in prompt)
        rows = []
        for ids in prompt if several else [prompt]:
            if isinstance(ids, str):
                ids = self.tokenizer.encode(ids, self.tokenizer.add_bos)
            if not isinstance(ids, list):
                raise ValueError("expected text, token ids, or a list of either")  # noqa: TRY004
            self.tokenizer.decode(ids)
            rows.append(llama2.check_prompt(self.model.config, ids, len(ids)))
        return rows

    def stream_text(
        self,
        ids: Sequence[int],
        chat: bool = False,
        echo: bool = False,
        top: int | None = None,
        reuse: bool = True,
        stop: Sequence[str] = (),
        **options: Any,
    ) -> tuple[llama2.Stream[str], list[Score]]:
        """llama2.stream_text() of a prompt, and its tokens' scores, which come with its end.

        `chat`: it is an answer. `echo`: the prompt's text and scores come first. `top`: scores,
        with those of so many likeliest ids. `reuse`: what a cache holds is not read again (where
        rounding differs, the text may depend on it).
        """
        scorer = None if top is None else Scorer(self, ids, top)
        cache = self.take(ids, reuse and not (scorer and echo))
        if scorer and echo:
            scorer.read(cache)
        options |= {"cache": cache, "step": scorer or self.step}
        chat_format = self.chat_format if chat else None
        stream = llama2.stream_text(self.model, self.tokenizer, ids, stop, chat_format, **options)
        report, scores = stream.report, []
        if scorer and echo:
            report.prompt_tokens = len(ids)

        def pieces() -> Iterator[str]:
            if echo:
                yield self.tokenizer.decode(ids)
            yield from stream
            if scorer:
                tags = llama2.chat_stops(self.tokenizer, self.chat_format).texts if chat else []
                scores.extend(scorer.finish(report, [*stop, *tags]))

        return llama2.Stream(pieces(), report), scores
