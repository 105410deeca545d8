"""The answer to a request for a completion or a chat, whole or as a stream of events."""

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio
from batch import patiently
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from server.fields import (
    check_messages,
    refuse_rest,
    take,
    take_sampling,
    take_schema,
    take_stops,
    take_tools,
    take_variables,
)
from server.guard import Refusal, refuse
from server.serving import Score, Session
from server.tools import Answer, Reader, name_tokens

MAX_PROMPTS, MAX_WAITING = 128, 64  # prompts in a request, queued requests
PATIENCE, COMMENT = 10, b": at work\n\n"  # which a stream has so often, in seconds


async def until_gone(receive: Any, log: list[str], group: Any) -> None:
    """Cancel a group's work when the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not log:  # the work has not ended
        log.append("aborted: the client hung up")
    group.cancel_scope.cancel()


class Job:
    """The response to a request for a chat or a completion, as an ASGI application."""

    def __init__(self, session: Session, name: str, reuse: bool, body: dict, field: str) -> None:
        """Take all supported fields out of a body; what remains in it is refused or forgotten.

        `field` holds the prompt. Raises Refusal, or ValueError for a wrong prompt.
        """
        self.session = session
        self.chat = chat = field == "messages"
        prompt = body.pop(field, None)
        take(body, "model", "")
        self.stream = take(body, "stream", False)
        wanted = take(take(body, "stream_options", {}), "include_usage", False)
        self.include_usage = wanted or not self.stream
        top = take(body, "logprobs", None, bool if chat else int)
        if chat:
            top = take(body, "top_logprobs", 0) if top else None
        limit = take(body, "max_tokens", session.context if chat else 16)
        self.echo = not chat and take(body, "echo", False)
        continued = chat and take(body, "continue_final_message", False)
        # In a raw prompt whose author does not say, the texts of control tokens stay text.
        parse_special = not chat and take(body, "parse_special", session.parse_special)
        tools, answer = take_tools(body) if chat else ([], Answer())
        variables = take_variables(body)
        schema, stops = take_schema(body), take_stops(body)
        if answer.forced:  # it is a call, which neither ends
            schema, stops = [], []
        answer.schemas += schema
        self.n = take(body, "n", 1)  # answers to each prompt
        self.seed = take(body, "seed", None, int)
        self.options = {  # of Session.start()
            "chat": chat or parse_special,  # such a prompt is one that the client rendered
            "strip": chat and not continued,
            "stop": stops,
            "max_new_tokens": limit,
            # A seed promises the same text, but rounding depends on how many tokens are prefilled at once.
            "reuse": take(body, "cache_prompt", self.seed is None) and reuse,
            "sampling": take_sampling(body, session.model),
            "answer": answer,
            "score_prompt": self.echo and top is not None,
            "score_end": not chat or take(body, "include_stop_token", False),
            "top": top,
        }
        note = ""  # for the log
        if forgotten := refuse_rest(body):
            note += f"; forgot {', '.join(forgotten):.200}"

        if chat:
            check_messages(prompt)
            try:
                prompts = [session.encode_chat(prompt, continued, tools, variables)]
            except (ValueError, TypeError):
                note += f"; the template takes no {', '.join(variables):.100}"
                prompts = [session.encode_chat(prompt, continued, tools, {})]
            session.settle(answer, prompts[0], continued)
        else:
            prompts = session.encode(prompt, parse_special)
            control = session.tokenizer.control_pattern.search(str(prompt))
            if control and not parse_special:
                note += f'; {control[0]} in the prompt stays text without "parse_special": true'
        if answer.schemas:
            note += session.hold(answer, chat)
        is_held = answer.form or answer.schemas
        self.options["grammar"] = session.grammar(answer, chat) if is_held else None
        # Others' prompts are shared as their caches are.
        self.options["owner"] = None if reuse else self
        if not 1 <= len(prompts) <= MAX_PROMPTS or not all(prompts):
            raise ValueError(f"there are {len(prompts)}; expected 1 to {MAX_PROMPTS}, none empty")
        longest = max(map(len, prompts))
        if longest + min(limit, 1) > session.context:
            raise Refusal(
                400,  # in OpenAI's words, for which clients look
                f"This model's maximum context length is {session.context} tokens, and {field} has "
                f"{longest}",
                param=field,
                code="context_length_exceeded",
            )

        self.prompts, self.note = prompts, note
        each = [ids for ids in prompts for _ in range(self.n)]
        self.waiting = deque(enumerate(each))  # answers that have not begun
        self.is_begun = self.is_over = False
        self.ended = [None] * len(each)  # choices, and their generations
        self.thoughts = 0  # tokens of reasoning
        self.replies = asyncio.Queue()  # ends with None
        chunk = ".chunk" if self.stream else ""
        self.about = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"chat.completion{chunk}" if chat else "text_completion",
            "created": int(time.time()),
            "model": name,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer until the client hangs up."""
        self.log = scope["log"]
        waiting = [job for job in self.session.jobs if not (job.is_begun or job.is_over)]
        if len(waiting) >= MAX_WAITING:
            raise Refusal(503, f"{MAX_WAITING} requests are waiting; try later")
        self.request = Request(scope)
        self.loop = asyncio.get_running_loop()
        self.session.add(self)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(until_gone, receive, self.log, group)
                stream = StreamingResponse(self.events(), media_type="text/event-stream")
                response = stream if self.stream else await self.replies.get()
                await response(scope, receive, send)
        finally:
            self.is_over = True

    async def next_reply(self) -> Response | None:
        """The next reply; an empty one if a stream is silent: clients give that up."""
        with anyio.move_on_after(PATIENCE):
            return await self.replies.get()
        return Response()

    async def events(self) -> Any:
        """The replies as server-sent events."""
        while reply := await self.next_reply():
            yield b"data: " + reply.body + b"\n\n" if reply.body else COMMENT
        yield b"data: [DONE]\n\n"

    def put(self, body: dict) -> None:
        """Send an event, or the whole answer, from the model's thread."""
        self.reply(JSONResponse(body))

    def reply(self, *replies: Response | None) -> None:
        """Hand replies to the event loop, which waits for the client."""
        with suppress(RuntimeError):  # it has ended
            for reply in replies:
                self.loop.call_soon_threadsafe(self.replies.put_nowait, reply)

    def fail(self, error: Exception) -> None:
        """End all with an error."""
        if not self.is_over:
            self.is_over = True
            self.reply(refuse(self.request, error), None)

    def finish(self) -> None:
        """End all, when all answers have ended."""
        prompt_tokens = sum(map(len, self.prompts))
        new = sum(len(generation.new_ids) for _, generation in self.ended)
        prefilled = sum(generation.prompt_tokens for _, generation in self.ended[:: self.n])
        seconds = time.perf_counter() - self.start
        cached = prompt_tokens - prefilled
        self.log.append(
            f"read {prefilled} + {cached} cached, made {new}, {new / seconds:.1f} tokens/s{self.note}"
        )
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new,
            "total_tokens": prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prefilled},
            "completion_tokens_details": {"reasoning_tokens": self.thoughts},
        }
        self.end([choice for choice, _ in self.ended], usage)
        self.is_over = True
        self.reply(None)

    def complete_one(self, index: int, ids: list[int]) -> Iterator[None]:
        """Continue a prompt; an error ends all."""
        try:
            yield from self.write(index, ids)
        except Exception as error:  # noqa: BLE001 (memory that ran out, weights with NaN)
            self.fail(error)

    def write(self, index: int, ids: list[int]) -> Iterator[None]:
        """Continue a prompt; each time that it waits for a pass of the model, it yields."""
        if not self.is_begun:
            self.is_begun, self.start = True, time.perf_counter()
        choice = {"index": index, "logprobs": None, "finish_reason": None}
        if self.chat:
            self.tell(choice, {"role": "assistant", "content": ""}, [])
        sampling = self.options["sampling"]
        if self.seed is not None:  # several answers to one prompt differ
            sampling = replace(sampling, seed=(self.seed + index % self.n) % 2**63)
        scorer = self.session.start(ids, **self.options | {"sampling": sampling})
        stream = scorer.stream
        reader = Reader(self.options["answer"])
        scores, thoughts = [], 0
        before = [self.session.tokenizer.decode(ids)] if self.echo else []
        try:
            for text in patiently(itertools.chain(before, stream, [""])):  # the last one ends it
                if self.is_over:
                    return
                if text is None:
                    yield
                    continue
                new = scorer.take(text)
                scores += new
                delta = reader.feed(text, ended=not text)
                if delta or new:
                    self.tell(choice, delta, new)
                if reader.is_reasoning:
                    thoughts = len(stream.generation.new_ids)
        finally:
            self.session.free(scorer)
        self.thoughts += thoughts
        choice["finish_reason"] = "length"
        if stream.stop_reason.startswith("stop"):
            choice["finish_reason"] = "tool_calls" if "tool_calls" in reader.message else "stop"
        self.tell(choice, {}, [])
        said = {"message": reader.message} if self.chat else {"text": reader.text}
        self.ended[index] = choice | said | self.table(scores), stream.generation
        if all(self.ended):
            self.finish()

    def tell(self, choice: dict, delta: dict, scores: list[Score]) -> None:
        """Send an event of what is new."""
        if self.stream:
            said = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
            self.put(self.about | {"choices": [choice | said | self.table(scores)]})

    def end(self, choices: list[dict], usage: dict) -> None:
        """Send the whole answer, or its usage."""
        if self.include_usage:
            self.put(self.about | {"choices": [] if self.stream else choices, "usage": usage})

    def entries(self, score: Score) -> list[dict]:
        """A token, and then the likeliest ones in its place. No two have the same name."""
        tokenizer = self.session.tokenizer
        entries = {}
        for token_id, logprob in score.top.items():
            data = tokenizer.token_bytes(token_id)  # maybe only some bytes of a character
            name = name_tokens(tokenizer, score.text)
            if entries:
                name = data.decode(errors="backslashreplace")
                name = tokenizer.vocabulary.pieces[token_id] if name in ("", *entries) else name
            entries[name] = {"token": name, "logprob": logprob, "bytes": [*data]}
        return [*entries.values()]

    def table(self, scores: list[Score]) -> dict:
        """Log-probabilities in OpenAI's form, as a field, if they were asked for."""
        if self.options["top"] is None:
            return {}
        tokens = [self.entries(score) for score in scores]
        content = [{**token[0], "top_logprobs": token} for token in tokens if token]
        # It has bytes: the names of other lists do not tell </s> from text.
        table = {"content": content, "refusal": None}
        if not self.chat:
            table |= {
                "tokens": [score.text for score in scores],
                "token_logprobs": [score.top.get(score.token_id) for score in scores],
                "top_logprobs": [  # nothing comes before a first token
                    {e["token"]: e["logprob"] for e in token} or None for token in tokens
                ],
                "text_offset": [score.start for score in scores],
            }
        return {"logprobs": table}
