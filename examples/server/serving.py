"""What the server does with a model: several answers at once, caches, templates, grammars."""

import functools
import gc
import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio.from_thread
import torch
from batch import Row, Rows, copy_tokens
from prompts import read_template

import llama2
from server.guard import Refusal
from server.tools import Answer, Template, rules, visible

try:
    from server import grammar
except ImportError:  # without llguidance
    grammar = None

# Answers at once, and conversations remembered, without --parallel: if their caches fit; at least one.
PARALLEL, CACHE_BYTES = 4, 2**31
MAX_GRAMMARS = 4  # that are kept, each up to 50 MB
MAX_CONTEXT = 8192  # without --context: a file may claim any number


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
        source = read_template(args.chat_template) or self.tokenizer.chat_template.strip()
        self.has_template = bool(source)
        self.template = llama2.CHAT_TEMPLATES.get(source or "llama-2", source)
        path = Path(args.model).absolute()
        self.name = path.name.removesuffix(".gguf") if path.exists() else args.model
        # What holds unless a request says otherwise.
        self.parse_special, self.prompt_cache = args.parse_special, args.prompt_cache
        first = self.model.new_cache(context)
        size = 2 * first.k.nbytes
        fitting = min(CACHE_BYTES, llama2.free_memory(first.k.device)) // size
        self.parallel = args.parallel or int(max(1, min(PARALLEL, fitting)))  # answers at once
        self.cache_bytes = self.parallel * size
        others = (self.model.new_cache(context) for _ in range(self.parallel - 1))
        # In the order of their last use; those that are over remember conversations.
        self.rows = Rows(self.model)
        self.rows += [Row(ended=True, cache=cache) for cache in (first, *others)]
        self.jobs: list = []  # whose clients wait
        self.wake = threading.Event()  # to be set after one is added
        self.is_closed = lambda: False  # whether no more answers are written
        # Answers and their Jobs know each other, so that only a full collection frees them. Those
        # come soon, since what lives as long as the server does not count any more.
        gc.freeze()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        """The model's thread. The next answer is one of the Job that has the fewest of those that are
        written.
        """
        while not self.is_closed():
            self.wake.clear()
            owners = [row.job for row in self.rows if not row.ended]
            waiting = [job for job in [*self.jobs] if job.waiting and not job.is_over]
            if waiting and len(owners) < self.parallel:
                self.rows.append(min(waiting, key=owners.count).waiting.pop(0))
            elif owners:
                self.rows.run()
            else:
                self.wake.wait()
        for job in [*self.jobs]:
            job.fail(Refusal(503, "the server is shutting down"))

    def check(self) -> None:
        """Called while a grammar is compiled, to end that if nobody waits for it any more."""
        anyio.from_thread.check_cancelled()
        if self.is_closed():
            raise Refusal(503, "the server is shutting down")

    def take_cache(self, ids: list[int], reuse: bool) -> llama2.Cache:
        """The cache that shares most tokens with a prompt.

        If using it would drop more than a tenth of its tokens, it belongs to another conversation;
        then the tokens that they share are copied into the least recently used cache.
        """
        tokens = torch.tensor([ids])
        rows = [row for row in self.rows if row.cache]
        rows.sort(key=lambda row: not row.ended)  # those that may be taken come first
        shared = {row: row.cache.common_prefix(tokens) if reuse else 0 for row in rows}
        row, best = rows[0], max(rows, key=shared.get)
        if best.ended and shared[best] >= 0.9 * best.cache.pos:
            row = best
        if row is not best or not reuse:
            copy_tokens(best.cache, row.cache, shared[best])
        self.rows.remove(row)
        row.first = None  # large with a large vocabulary: who else knows the row needs no logits
        return row.cache

    def encode(self, prompt: Any, parse_special: bool) -> list[list[int]]:
        """Token ids of each prompt: a text, a list of ids, or a list of either. Raises ValueError."""
        if not isinstance(prompt, list) or {*map(type, prompt)} == {int}:
            prompt = [prompt]
        encoded = [
            self.tokenizer.encode(ids, parse_special=parse_special) if isinstance(ids, str) else ids
            for ids in prompt
        ]
        for ids in encoded:
            if {*map(type, ids)} != {int}:
                raise ValueError("expected text, token ids, or a list of either, not empty")
            self.tokenizer.decode(ids)  # ValueError for ids out of range
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
        return llama2.stop_ids(self.model, self.tokenizer).union(self.stops.ids if chat else ())

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
        return note

    def grammar(self, answer: Answer, chat: bool) -> Any:
        """The Grammar of an answer, which each choice copies, if it has one. Raises ValueError."""
        if not answer.schemas:
            return None
        return self.compile_grammar(chat, json.dumps(answer.schemas), rules(answer))

    @functools.lru_cache(MAX_GRAMMARS)  # noqa: B019
    def compile_grammar(self, chat: bool, schemas: str, rules: str) -> Any:
        """The last ones are kept."""
        self.check()
        return grammar.Grammar(self.vocabulary(chat), json.loads(schemas), rules)
