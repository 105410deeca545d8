"""The answer to a request for a completion or a chat, whole or as a stream of events."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from server.choice import Choice, Score
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
from server.serving import Session
from server.tools import Answer, tokens_in, visible

MAX_PROMPTS, MAX_WAITING = 128, 64  # prompts in a request, queued requests
PATIENCE, COMMENT = 10, b": at work\n\n"  # which a stream has so often, in seconds


@asynccontextmanager
async def until_gone(receive: Any, log: list[str]) -> AsyncIterator[None]:
    """Around work for a client: it is cancelled when that hangs up."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not log:  # the work has not ended
            log.append("aborted: the client hung up")
        work.cancel()

    with anyio.CancelScope() as work:
        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()


class Job:
    """The response to a request for a chat or a completion, as an ASGI application."""

    def __init__(self, session: Session, body: dict, field: str) -> None:
        """Take all supported fields out of a body; what remains in it is refused or forgotten.

        `field` holds the prompt. Raises Refusal, or ValueError for a wrong prompt.
        """
        # 1. The fields.
        self.session = session
        self.chat = chat = field == "messages"
        prompt = body.pop(field, None)
        take(body, "model", "")
        self.stream = take(body, "stream", False)
        options = take(body, "stream_options", {})
        self.include_usage = take(options, "include_usage", False) or not self.stream
        top = take(body, "logprobs", None, bool if chat else int)
        if chat:
            top = take(body, "top_logprobs", 0) if top else None
        limit = take(body, "max_tokens", session.context if chat else 16)
        self.echo = not chat and take(body, "echo", False)
        continued = chat and take(body, "continue_final_message", False)
        # In a raw prompt whose author does not say, the texts of control tokens stay text.
        parse_special = not chat and take(body, "parse_special", session.parse_special)
        rendered = chat or parse_special  # by us, or by the client
        tools, answer = take_tools(body) if chat else ([], Answer())
        variables = take_variables(body)
        schema, stops = take_schema(body), take_stops(body)
        if answer.forced:  # it is a call, which neither ends
            schema, stops = [], []
        answer.schemas += schema
        self.answer = answer
        self.n = take(body, "n", 1)  # answers to each prompt
        self.seed = take(body, "seed", None, int)
        self.sampling = take_sampling(body, session.model)
        self.top = top  # how many of the likeliest tokens have scores, if any has
        self.score_prompt = self.echo and top is not None
        self.score_end = not chat or take(body, "include_stop_token", False)
        # A seed promises the same text, but rounding depends on how many tokens are prefilled at once.
        reuse = take(body, "cache_prompt", self.seed is None) and session.prompt_cache
        self.reuse = reuse and not self.score_prompt
        # Others' prompts are shared as their caches are.
        self.owner = None if session.prompt_cache else self
        note = ""  # for the log
        if forgotten := refuse_rest(body):
            note += f"; forgot {', '.join(forgotten):.200}"

        # 2. The prompts, and what the answers to them are held to.
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
        note += session.hold(answer, chat)
        self.grammar = session.grammar(answer, chat)
        if rendered and not answer.schemas:  # in a JSON string these may occur
            stops += session.stops.texts
        self.tokenizer = visible(session.tokenizer, tokens_in(answer))
        self.options = {  # of stream_text()
            "strip": chat and not continued,
            "stop": stops,
            "stop_ids": session.stop_ids(rendered),
            "max_new_tokens": limit,
        }
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

        # 3. The answers.
        self.note = note
        each = [ids for ids in prompts for _ in range(self.n)]
        self.choices = [Choice(self, index, ids) for index, ids in enumerate(each)]
        self.waiting = [*self.choices]  # those that have not begun
        self.is_over = False
        self.replies = asyncio.Queue()  # ends with None
        chunk = ".chunk" if self.stream else ""
        self.about = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"chat.completion{chunk}" if chat else "text_completion",
            "created": int(time.time()),
            "model": session.name,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer until the client hangs up."""
        self.log = scope["log"]
        jobs = self.session.jobs
        waiting = [job for job in jobs if job.choices[0] in job.waiting and not job.is_over]
        if len(waiting) >= MAX_WAITING:
            raise Refusal(503, f"{MAX_WAITING} requests are waiting; try later")
        self.request = Request(scope)
        self.loop = asyncio.get_running_loop()
        jobs.append(self)
        self.session.wake.set()
        try:
            async with until_gone(receive, self.log):
                stream = StreamingResponse(self.events(), media_type="text/event-stream")
                response = stream if self.stream else await self.replies.get()
                await response(scope, receive, send)
        finally:
            self.is_over = True
            jobs.remove(self)

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
        """End all, if all answers have ended."""
        if not all(choice.about["finish_reason"] for choice in self.choices):
            return
        firsts = self.choices[:: self.n]  # of each prompt
        prompt_tokens = sum(len(choice.ids) for choice in firsts)
        new = sum(len(choice.stream.generation.new_ids) for choice in self.choices)
        prefilled = sum(choice.stream.generation.prompt_tokens for choice in firsts)
        seconds = time.perf_counter() - self.choices[0].start
        cached = prompt_tokens - prefilled
        self.log.append(
            f"read {prefilled} + {cached} cached, made {new}, {new / seconds:.1f} tokens/s{self.note}"
        )
        thoughts = sum(choice.thoughts for choice in self.choices)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new,
            "total_tokens": prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prefilled},
            "completion_tokens_details": {"reasoning_tokens": thoughts},
        }
        self.end(usage)
        self.is_over = True
        self.reply(None)

    def tell(self, choice: Choice, delta: dict, scores: list[Score]) -> None:
        """Send an event of what is new."""
        if self.stream:
            self.put(self.about | {"choices": [choice.said("delta", delta, scores)]})

    def end(self, usage: dict) -> None:
        """Send the whole answer, or its usage."""
        choices = [
            choice.said("message", choice.reader.message, choice.scores[: choice.told])
            for choice in self.choices
            if not self.stream
        ]
        if self.include_usage:
            self.put(self.about | {"choices": choices, "usage": usage})
