"""What the server does with a model: several answers at once, caches, grammars, log-probabilities."""

import copy
import functools
import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from batch import Row, Rows, copy_tokens

import llama2
from server.guard import Refusal
from server.tools import Answer, Template, rules, tokens_in, visible

try:
    from server import grammar
except ImportError:  # without llguidance
    grammar = None

# Answers at once, and conversations remembered, without --parallel: if their caches fit; at least one.
PARALLEL, CACHE_BYTES = 4, 2**31
MAX_GRAMMARS = 4  # that are kept, each up to 50 MB
MAX_CONTEXT = 8192  # without --context: a file may claim any number


class Score(NamedTuple):
    """A token, its log-probability, and the text that it completes."""

    token_id: int
    top: dict[int, float]  # log-probabilities of this id and the likeliest; {} for the first id
    text: str
    start: int  # of the text, in what the client is shown


class Session:
    """A model with several KV caches: a prompt continues the one that shares most tokens with it."""

    def __init__(self, args: Any) -> None:
        """Load a model as the command line says. Raises ValueError or OSError."""
        checkpoint = llama2.open_checkpoint(args.model)
        context = args.context or min(checkpoint.config.max_position_embeddings, MAX_CONTEXT)
        self.model, self.tokenizer = llama2.load(
            checkpoint,
            args.device,
            args.dtype,
            context=context,
            progress=not args.quiet,
            batch_size=args.parallel or 1,
        )
        self.context = context
        source = args.chat_template or self.tokenizer.chat_template.strip()
        self.has_template = bool(source)
        self.template = llama2.CHAT_TEMPLATES.get(source or "llama-2", source)
        if args.chat_template == self.template:  # it is no name
            with llama2.naming(source):
                self.template = Path(source).read_text("utf-8")
        self.parse_special = args.parse_special  # in raw prompts, unless a request says otherwise
        self.check = lambda: None  # called while a grammar is compiled; it may raise to end that
        first = self.model.new_cache(context)
        size = 2 * first.k.nbytes
        fitting = min(CACHE_BYTES, llama2.free_memory(first.k.device)) // size
        self.parallel = args.parallel or int(max(1, min(PARALLEL, fitting)))  # answers at once
        self.cache_bytes = self.parallel * size
        # Those that no answer uses: conversations, in the order of their last use.
        self.caches = [first]
        while len(self.caches) < self.parallel:
            self.caches.append(self.model.new_cache(context))
        self.rows = Rows(self.model)
        self.jobs: list = []  # that have not ended
        self.wake = threading.Event()
        self.is_closed = lambda: False  # whether no more answers are written
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def add(self, job: Any) -> None:
        """Have a Job answered, by the model's thread."""
        self.jobs.append(job)
        self.wake.set()

    def work(self) -> None:
        """The model's thread."""
        for _ in self.rows.write(self.begin):
            pass

    def begin(self, owners: list) -> Any:
        """The next answer, and its Job: the one that has the fewest of those that are written. None if
        all may go on, or at the end.
        """
        while True:
            self.wake.clear()
            for job in [*self.jobs]:
                if self.is_closed():
                    job.fail(Refusal(503, "the server is shutting down"))
                if job.is_over:
                    self.jobs.remove(job)
            waiting = [job for job in self.jobs if job.waiting]
            if waiting and len(owners) < self.parallel:
                job = min(waiting, key=owners.count)
                return job.complete_one(*job.waiting.popleft()), job
            if owners or self.is_closed():
                return None
            self.wake.wait()

    def take_cache(self, ids: list[int], reuse: bool) -> llama2.Cache:
        """The cache that shares most tokens with a prompt.

        If using it would drop more than a tenth of its tokens, it belongs to another conversation;
        then the tokens that they share are copied into the least recently used cache.
        """
        tokens = torch.tensor([ids])
        caches = [*self.caches, *(row.cache for row in self.rows)]
        best = max(caches, key=lambda cache: cache.common_prefix(tokens))
        n = best.common_prefix(tokens) if reuse else 0
        cache = best if best in self.caches and n >= 0.9 * best.pos else self.caches[0]
        if cache is not best or not reuse:
            copy_tokens(best, cache, n)
        self.rows[:] = [row for row in self.rows if row.cache is not cache]
        return cache

    def free(self, row: Row) -> None:
        """Others may take the cache of an answer that has ended; until then it is remembered."""
        row.tokens = None
        self.caches.append(row.cache)

    def encode(self, prompt: Any, parse_special: bool) -> list[list[int]]:
        """Token ids of each prompt: a text, a list of ids, or a list of either. Raises ValueError."""
        if not isinstance(prompt, list) or {*map(type, prompt)} == {int}:
            prompt = [prompt]
        encoded = []
        for ids in prompt:
            if isinstance(ids, str):
                ids = self.tokenizer.encode(ids, parse_special=parse_special)
            if not isinstance(ids, list) or {*map(type, ids)} != {int}:
                raise ValueError(
                    "expected text, token ids, or a list of either; one token at least"
                )
            self.tokenizer.decode(ids)  # ValueError for ids out of range
            encoded.append(ids)
        return encoded

    @functools.cached_property
    def chat_template(self) -> Template:
        """The template, from which formats are read."""
        shown = visible(self.tokenizer, range(self.tokenizer.vocab_size))
        stops = [shown.decode([i]) for i in self.stop_ids(True)]
        return Template(shown, self.template, [*stops, *self.stops.texts])

    def settle(self, answer: Answer, ids: list[int], continued: bool) -> None:
        """How an answer to a conversation calls and reasons. Raises Refusal if that is unknown."""
        template = self.chat_template
        if answer.names:
            answer.form = template.format
            if answer.form.problem:
                raise Refusal(400, f"tools: {answer.form.problem}", param="tools")
        if template.reasoning and not continued:
            answer.reasoning = template.reasoning
            end = template.tokenizer.decode(ids[-32:]).rstrip()
            answer.is_reasoning = end.endswith(answer.reasoning[0])

    def encode_chat(
        self, messages: list, continued: bool, tools: list, variables: dict[str, Any]
    ) -> list[int]:
        """Token ids of a conversation. Raises ValueError."""
        for message in messages:
            for call in message.get("tool_calls", ()):
                if "tool_calls" not in self.template:
                    raise ValueError("the chat template has no place for tool_calls")
                form, function = self.chat_template.format, call["function"]
                message["content"] = message["content"] or form.no_content
                if not form.arguments_as_text:
                    with suppress(ValueError, TypeError):  # a limit may have cut them
                        function["arguments"] = json.loads(function["arguments"] or "{}")
        return llama2.encode_chat(
            self.tokenizer, messages, self.template, continued, tools=tools or None, **variables
        )

    @functools.cached_property
    def stops(self) -> llama2.ChatStops:
        """What ends an answer. This renders the template, so that only chats need it."""
        return llama2.chat_stops(self.tokenizer, self.template)

    def stop_ids(self, chat: bool) -> set[int]:
        """The stop tokens of a chat, or of another text."""
        return llama2.stop_ids(self.model, self.tokenizer, self.template if chat else None)

    @functools.cache  # noqa: B019 (there is one session)
    def vocabulary(self, chat: bool) -> Any:
        """The tokenizer for grammars. Raises Refusal."""
        if grammar is None:
            raise Refusal(400, "a schema and calls need the package llguidance")
        return grammar.open_vocabulary(self.tokenizer, self.stop_ids(chat))

    def hold(self, answer: Answer, chat: bool) -> str:
        """Leave out what an answer cannot be held to; returns words for the log.

        Raises Refusal if it has to be held to that.
        """
        with suppress(ValueError):
            self.grammar(answer, chat)
            return ""
        note = ""
        places = [*(f"tools: {name}" for name in answer.names), "response_format"]
        for i, schema in enumerate(answer.schemas):
            held, left_out = grammar.hold(self.vocabulary(chat), json.dumps(schema), self.check)
            if left_out:
                if [*answer.strict, True][i]:
                    said = f"{places[i]}: {left_out[0]}; a strict schema is held whole"
                    raise Refusal(400, said, param=said.partition(":")[0])
                note += f"; {places[i]} is not held to "
                note += ", ".join(problem.partition(": ")[0] for problem in left_out)
                held = {"type": "object"} | held
            answer.schemas[i] = held
        self.grammar(answer, chat)
        return note

    def grammar(self, answer: Answer, chat: bool) -> Any:
        """A Grammar for one answer. Raises ValueError."""
        return self.compile_grammar(chat, json.dumps(answer.schemas), rules(answer)).copy()

    @functools.lru_cache(MAX_GRAMMARS)  # noqa: B019
    def compile_grammar(self, chat: bool, schemas: str, rules: str) -> Any:
        """A Grammar that answers copy. Raises ValueError."""
        self.check()
        return grammar.Grammar(self.vocabulary(chat), json.loads(schemas), rules)

    def start(
        self,
        ids: list[int],
        *,
        chat: bool,
        reuse: bool,
        score_prompt: bool,
        score_end: bool,
        top: int | None,
        answer: Answer,
        grammar: Any,
        owner: Any,
        **options: Any,
    ) -> "Scorer":
        """llama2.stream_text() of a prompt, in a Scorer of its tokens.

        `reuse`: tokens that a cache holds are not prefilled again; as rounding may differ then, so may
        the text. An answer with a `grammar` fits it, and ends with it. Equal prompts of one `owner`
        are read once. free() has to be called at the end.
        """
        options["stop_ids"] = self.stop_ids(chat)
        if grammar:
            processor = copy.copy(options["sampling"].logits_processor)
            processor.grammar = grammar.copy()
            options["sampling"] = replace(options["sampling"], logits_processor=processor)
        if chat and not answer.schemas:  # in a JSON string these may occur
            options["stop"] = [*options["stop"], *self.stops.texts]
        tokenizer = visible(self.tokenizer, tokens_in(answer))
        scorer = Scorer(self, top, score_end)
        scorer.owner = owner
        scorer.cache = cache = self.take_cache(ids, reuse and not score_prompt)
        stream = llama2.stream_text(self.model, tokenizer, ids, step=scorer, cache=cache, **options)
        scorer.stream = stream
        scorer.decoder = llama2.StreamDecoder(tokenizer, score_prompt or stream.decoder.strip)
        scorer.strip = stream.strip  # leading white space is dropped until a text is shown
        if score_prompt:
            scorer.prompt = object()  # it is read for its scores, and equals no other
            scorer.read, scorer.chunk = scorer.score, llama2.SCORE_CHUNK
            scorer.append(ids[0], {})
        self.rows.append(scorer)
        self.caches.remove(cache)
        return scorer


@dataclass(eq=False)
class Scorer(Row):
    """A `step` for generate() that keeps the scores of sampled tokens, unless `top` is None.

    They are of the model's own logits, before penalties, biases and grammars.
    """

    session: Session
    top: int | None
    score_end: bool  # of the stop token, which has no text
    logits: list[torch.Tensor] = field(default_factory=list)  # (1, V) of ids that have no score yet
    scores: list[Score] = field(default_factory=list)  # of tokens that are not shown yet
    length: int = 0  # of the text of all tokens, in characters
    shown: int = 0  # how many of them are shown

    def add(self, logits: torch.Tensor, ids: Sequence[int]) -> None:
        """Keep the scores of T ids, given the logits (T, V) by which each was predicted."""
        logprobs = logits.log_softmax(-1)[:, : self.session.model.vocab_size]
        best = logprobs.topk(self.top)
        for t, token_id in enumerate(ids):
            top = dict(zip(best.indices[t].tolist(), best.values[t].tolist(), strict=True))
            self.append(token_id, {token_id: logprobs[t, token_id].item()} | top)

    def append(self, token_id: int, top: dict[int, float]) -> None:
        """Keep the score of an id."""
        text = self.decoder.decode(token_id)
        self.scores.append(Score(token_id, top, text, self.length))
        if self.strip:
            text = text.lstrip()
            self.strip = not text
        self.length += len(text)

    @torch.no_grad()
    def score(self, model: llama2.Llama, tokens: torch.Tensor, cache: llama2.Cache) -> torch.Tensor:
        """A pass for tokens (1, n) of the prompt, which also scores those after them: logits (1, V)."""
        start, n = cache.pos, tokens.shape[1]
        chunk = tokens[:, start:].to(cache.k.device)
        logits = model(chunk, cache, all_positions=True)[0]  # (T, V)
        ids = self.tokens[0, start + 1 : n + 1].tolist()
        self.add(logits[: len(ids)], ids)
        return logits[-1:]

    def __call__(self, tokens: torch.Tensor, cache: llama2.Cache) -> torch.Tensor:
        """tokens (1, n) -> logits (1, V), once a pass has made them."""
        logits = super().__call__(tokens, cache)
        if self.top is not None:
            self.logits.append(logits)
        return logits

    def take(self, text: str) -> list[Score]:
        """The scores of a text that is shown now.

        At the end all remaining scores come, except those of text that a stop text hides.
        """
        reason = self.stream.stop_reason
        if self.logits:
            ids = self.stream.generation.ids[-len(self.logits) :]
            if reason.startswith("stop token") and not self.score_end:
                ids.pop()
            self.add(torch.cat(self.logits), ids)
            self.logits = []
        self.shown += len(text)
        whole = reason and not reason.startswith("stop text")
        count = sum(whole or score.start < self.shown for score in self.scores)
        taken = self.scores[:count]
        self.scores = self.scores[count:]
        if whole and taken:  # incomplete characters
            last = taken[-1]
            taken[-1] = last._replace(text=last.text + self.decoder.flush())
        return taken
