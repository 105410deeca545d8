"""/v1/responses, OpenAI's second interface, on top of the first: a request becomes one for a chat, and
the deltas of its answer become items and their events. Nothing is remembered: what an answer goes on
from must be in its input.
"""

import json
import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import llama2
from server.answer import Job, read_request
from server.fields import Refusal, take
from server.serving import Score, Session

# Fields of a chat that mean the same here.
SAME = {"model", "stream", "parallel_tool_calls", "temperature", "top_p", "stop", "logit_bias"}
SAME |= llama2.SAMPLING_LIMITS.keys() | {"presence_penalty", "frequency_penalty"}
# Fields that change nothing, and the values that they may have.
TAKEN = {
    "truncation": ["disabled"],
    "include": [[], ["reasoning.encrypted_content"]],  # there is none
    "store": [True, False],  # it is not
    "background": [False],
    "stream_options": [{"include_obfuscation": True}, {"include_obfuscation": False}, {}],
}
# Fields of the request that are shown in the response, and those that have defaults there.
SHOWN = [
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
]
SHOWN += ["temperature", "text", "tool_choice", "tools", "top_p"]
DEFAULTS = ("parallel_tool_calls", "tool_choice", "tools")
# The deltas that are texts: the types of their items, and of the parts in these.
TEXTS = {
    "reasoning_content": ("reasoning", "reasoning_text"),
    "content": ("message", "output_text"),
}


def refuse_field(name: str, message: str) -> Refusal:
    """The error for a field."""
    return Refusal(400, f"{name}: {message}", param=name)


def text_of(content: Any) -> str:
    """The text of an item's content."""
    parts = [{"text": content}] if isinstance(content, str) else content
    kinds = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
    if any(part.get("type", "text") not in kinds for part in parts):
        raise refuse_field("input", "only texts are supported as content")
    return "\n".join(part["text"] for part in parts)


def messages_of(items: Any) -> list[dict]:
    """The messages of a chat for the items of a conversation. Raises Refusal."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages: list[dict] = []
    thought = {}  # reasoning belongs to what the assistant does next
    for item in items:
        kind = item.get("type", "message")
        answer = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind == "reasoning":
            thought = {"reasoning": text_of(item.get("content") or item.get("summary") or [])}
        elif kind == "function_call":
            if answer is None or thought:
                answer = {"role": "assistant", "content": None, **thought}
                messages.append(answer)
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)
            thought = {}
        elif kind == "function_call_output":
            content = text_of(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif kind == "message":
            message = {"role": item["role"], "content": text_of(item["content"])}
            if item["role"] == "assistant":
                message |= thought
                thought = {}
            messages.append(message)
        elif kind == "item_reference":
            raise refuse_field("input", "item_reference: nothing is stored here; send store: false")
        else:
            raise refuse_field("input", f"an item is {str(kind)[:40]!r}, which is not supported")
    return messages


def take_tools(body: dict) -> dict[str, Any]:
    """The fields of a chat for tools."""
    fields: dict[str, Any] = {"tools": []}
    for tool in take(body, "tools", list, []):
        kind = tool.get("type")
        if kind != "function":
            raise refuse_field("tools", f"{str(kind)[:40]!r} is not here; there are functions only")
        function = {key: value for key, value in tool.items() if key != "type"}
        fields["tools"].append({"type": "function", "function": function})
    choice = body.pop("tool_choice", "auto")
    if isinstance(choice, dict):
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    return fields | {"tool_choice": choice}


def read_response(session: Session, name: str, reuse: bool, body: dict, field: str) -> Job:
    """The job for a body. Raises Refusal."""
    asked = {**body}
    messages = messages_of(body.pop(field, None))
    if instructions := take(body, "instructions", str):
        messages.insert(0, {"role": "system", "content": instructions})
    chat = {key: body.pop(key) for key in SAME & body.keys()}
    chat |= {"messages": messages, **take_tools(body)}
    chat["max_completion_tokens"] = take(body, "max_output_tokens", int)
    text = take(body, "text", dict, {})
    form = take(text, "format", dict, {"type": "text"})
    if any(text.values()):
        body["text"] = text  # what else it has is refused
    if form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    chat["response_format"] = form
    for key, values in TAKEN.items():
        if key in body and body[key] in values:
            del body[key]
    return read_request(session, name, reuse, chat, "messages", partial(ResponseJob, asked=asked))


@dataclass
class ResponseJob(Job):
    """The response to a request, as an ASGI application."""

    asked: dict[str, Any] = field(default_factory=dict)  # the request
    output: list[dict] = field(default_factory=list)  # the items
    is_open: bool = False  # whether the last of them is incomplete
    number: int = 0  # of the next event

    def response(self, status: str, **fields: Any) -> dict:
        """OpenAI's object."""
        return {
            "id": self.about["id"].replace("chatcmpl-", "resp_"),
            "object": "response",
            "created_at": self.about["created"],
            "model": self.model_name,
            "status": status,
            "output": self.output,
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            **{
                key: self.asked.get(key)
                for key in SHOWN
                if key not in DEFAULTS or key in self.asked
            },
            "store": False,
            **fields,
        }

    def event(self, kind: str, **fields: Any) -> None:
        """Send an event, with its place among the items."""
        if self.stream:
            about = {"type": f"response.{kind}", "sequence_number": self.number}
            if self.is_open:
                about |= {"output_index": len(self.output) - 1, "item_id": self.output[-1]["id"]}
            self.put(about | fields)
            self.number += 1

    async def events(self) -> Any:
        """The events, each with its type in front. An error comes in OpenAI's form for these, too."""
        while reply := await self.replies.get():
            event = json.loads(reply.body)
            if "error" in event:
                event = {"sequence_number": self.number, **event["error"], "type": "error"}
            yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()

    def begin(self, choice: dict) -> None:
        """The first events."""
        for kind in ("created", "in_progress"):
            self.event(kind, response=self.response("in_progress"))

    def tell(self, choice: dict, delta: dict, scores: list[Score]) -> None:
        """Add what is new to the last item, or to a new one."""
        for key, (kind, part_type) in TEXTS.items():
            if key in delta:
                if not self.is_open or self.output[-1]["type"] != kind:
                    self.open(
                        kind,
                        content=[],
                        **({"role": "assistant"} if key == "content" else {"summary": []}),
                    )
                    part = {"type": part_type, "text": ""}
                    part |= {"annotations": [], "logprobs": []} if key == "content" else {}
                    self.output[-1]["content"].append(part)
                    self.event("content_part.added", content_index=0, part=part)
                self.output[-1]["content"][0]["text"] += delta[key]
                more = {"logprobs": []} if key == "content" else {}
                self.event(f"{part_type}.delta", content_index=0, delta=delta[key], **more)
        for call in delta.get("tool_calls", ()):
            new = call["function"]
            if "id" in call:
                self.open("function_call", call_id=call["id"], **new)
            else:
                self.output[-1]["arguments"] += new["arguments"]
                self.event("function_call_arguments.delta", delta=new["arguments"])

    def open(self, kind: str, **fields: Any) -> None:
        """Begin an item."""
        self.close("completed")
        item = {"type": kind, "id": f"{kind[:2]}_{secrets.token_hex(12)}", "status": "in_progress"}
        self.output.append(item | fields)
        self.is_open = True
        self.event("output_item.added", item=self.output[-1])

    def close(self, status: str) -> None:
        """End the last item."""
        if not self.is_open:
            return
        item = self.output[-1]
        item["status"] = status
        if "arguments" in item:
            self.event(
                "function_call_arguments.done", arguments=item["arguments"], name=item["name"]
            )
        else:
            (part,) = item["content"]
            fields = {key: part[key] for key in ("text", "logprobs") if key in part}
            self.event(f"{part['type']}.done", content_index=0, **fields)
            self.event("content_part.done", content_index=0, part=part)
        self.event("output_item.done", item=item)
        self.is_open = False

    def end(self, choices: list[dict], usage: dict) -> None:
        """Send the whole response."""
        status = "incomplete" if choices[0]["finish_reason"] == "length" else "completed"
        self.close(status)
        more = {"incomplete_details": {"reason": "max_output_tokens"}} if status[0] == "i" else {}
        counts = {"total_tokens": usage["total_tokens"]}
        for ours, theirs in (("prompt", "input"), ("completion", "output")):
            counts[f"{theirs}_tokens"] = usage[f"{ours}_tokens"]
            counts[f"{theirs}_tokens_details"] = usage[f"{ours}_tokens_details"]
        response = self.response(status, usage=counts, **more)
        if self.stream:
            self.event(status, response=response)
        else:
            self.put(response)
