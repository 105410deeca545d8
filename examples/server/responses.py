"""/v1/responses, OpenAI's second interface, on top of the first: a request becomes one for a chat, and
the deltas of its answer become items and their events. The last responses are kept in memory.
"""

import json
import secrets
from typing import Any

from server.answer import COMMENT, Job
from server.choice import Choice, Score
from server.fields import take, text_of, wrong
from server.guard import Refusal
from server.serving import Session

# Fields of a chat that this interface has not, or by other names.
CHAT_ONLY = {"messages", "response_format", "max_tokens", "max_completion_tokens", "n", "logprobs"}
KEPT_BYTES = 2**26  # of responses, each with the conversation that led to it
# The deltas that are texts: their items, and the parts in these.
TEXTS = {
    "reasoning": ({"type": "reasoning", "summary": []}, {"type": "reasoning_text"}),
    "content": (
        {"type": "message", "role": "assistant"},
        {"type": "output_text", "annotations": [], "logprobs": []},
    ),
}


class Store(dict[str, tuple[dict, list, int]]):
    """The last responses by their ids, each with its conversation and the bytes of both: an answer
    can go on from one, or from an item of one.
    """

    limit = 500  # of their number

    def keep(self, response: dict, items: list) -> None:
        """Keep a response to items. Older ones go if there are too many, or too many bytes."""
        size = len(json.dumps([response, items]))
        self[response["id"]] = response, [*items, *response["output"]], size
        while len(self) > self.limit or sum(size for *_, size in self.values()) > KEPT_BYTES:
            del self[next(iter(self))]

    def find_item(self, item: dict) -> dict:
        """The item that another one refers to; any other as it is."""
        if item.get("type") != "item_reference":
            return item
        for kept in [one for response, *_ in [*self.values()] for one in response["output"]]:
            if kept["id"] == item["id"]:
                return kept
        raise Refusal(404, f"Item with id {item['id']!r:.60} not found.", param="input")


def messages_of(items: list[dict], body: dict) -> list[dict]:
    """The messages of a chat for the items of a conversation. Raises ValueError.

    Items of other types are forgotten, as fields of the body are.
    """
    messages = []
    for item in items:
        new = {"role": "assistant", "content": ""}
        match item.get("type", "message"):
            case "message":
                new |= {"role": item["role"], "content": item.get("content") or ""}
            case "reasoning":
                new["reasoning"] = text_of(item.get("content") or item.get("summary") or [])
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                new["tool_calls"] = [call]
            case "function_call_output":
                content = item.get("output") or ""
                new = {"role": "tool", "tool_call_id": item["call_id"], "content": content}
            case other:
                body[f"{other} in the input"] = True
                continue
        last = messages[-1] if messages else {"role": ""}
        # Reasoning begins a message; text goes on from it, and calls from either.
        goes_on = "tool_calls" in new or ("reasoning" not in new and not last.get("content"))
        if last["role"] == new["role"] == "assistant" and goes_on:
            last["content"] = new["content"] or last["content"]
            last["tool_calls"] = last.get("tool_calls", []) + new.get("tool_calls", [])
        else:
            messages.append(new)
    return messages


class ResponseJob(Job):
    """The response to a request, as an ASGI application."""

    def __init__(self, store: Store, session: Session, body: dict, field: str) -> None:
        """Make a chat's fields of those of a body. Raises Refusal, or ValueError for a wrong input."""
        items = body.pop(field, None)
        self.asked = {**body}
        for key in CHAT_ONLY & body.keys():
            raise wrong(key, body[key], ", which only chats have")
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        self.items = [store.find_item(item) for item in items]  # the conversation
        if previous := take(body, "previous_response_id", ""):
            if previous not in store:
                raise Refusal(
                    400,
                    f"Previous response with id {previous!r:.60} not found.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            self.items = store[previous][1] + self.items
        messages = messages_of(self.items, body)
        if instructions := take(body, "instructions", ""):
            messages.insert(0, {"role": "system", "content": instructions})
        form = take(body, "text", {}).get("format")
        self.store, self.is_kept = store, take(body, "store", True) and store.limit > 0
        self.output = []  # items of the response
        self.item = None  # the last of them, if it is incomplete
        self.number = 0  # of the next event
        body |= {"messages": messages, "response_format": form}
        super().__init__(session, body, "messages")

    def response(self, status: str, **fields: Any) -> dict:
        """OpenAI's object."""
        return {
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "error": None,
            "incomplete_details": None,
            **self.asked,
            "id": self.about["id"].replace("chatcmpl-", "resp_"),
            "object": "response",
            "created_at": self.about["created"],
            "model": self.about["model"],
            "status": status,
            "output": self.output,
            "store": self.is_kept,
            **fields,
        }

    def event(self, kind: str, **fields: Any) -> None:
        """Send an event, with its place among the items."""
        if self.stream:
            about = {"type": f"response.{kind}", "sequence_number": self.number}
            if self.item:
                about |= {
                    "output_index": len(self.output) - 1,
                    "item_id": self.item["id"],
                    "content_index": 0,
                }
            self.put(about | fields)
            self.number += 1

    async def events(self) -> Any:
        """The events, each with its type in front. An error comes in OpenAI's form for these, too."""
        while reply := await self.next_reply():
            event = json.loads(reply.body or "{}")
            if "error" in event:
                event = {"sequence_number": self.number, **event["error"], "type": "error"}
            head = f"event: {event.get('type')}\ndata: {json.dumps(event)}\n\n"
            yield head.encode() if event else COMMENT

    def tell(self, choice: Choice, delta: dict, scores: list[Score]) -> None:
        """Add what is new to the last item, or to a new one."""
        if not self.number:
            for kind in ("created", "in_progress"):
                self.event(kind, response=self.response("in_progress"))
        for key, (item, part) in TEXTS.items():
            if not delta.get(key):
                continue
            if not self.item or self.item["type"] != item["type"]:
                self.open(item | {"content": []})
                self.part = part | {"text": ""}
                self.item["content"].append(self.part)
                self.event("content_part.added", part=self.part)
            self.part["text"] += delta[key]
            self.event(f"{part['type']}.delta", delta=delta[key], logprobs=[])
        for call in delta.get("tool_calls", ()):
            new = call["function"]
            if "id" in call:
                about = {"type": "function_call", "call_id": call["id"], "arguments": ""}
                self.open({**about, "name": new["name"]})
            self.item["arguments"] += new["arguments"]
            self.event("function_call_arguments.delta", delta=new["arguments"])

    def open(self, item: dict) -> None:
        """Begin an item."""
        self.close("completed")
        self.item = {
            **item,
            "id": f"{item['type'][:2]}_{secrets.token_hex(12)}",
            "status": "in_progress",
        }
        self.output.append(self.item)
        self.event("output_item.added", item=self.item)

    def close(self, status: str) -> None:
        """End the last item."""
        item = self.item
        if not item:
            return
        item["status"] = status
        if "arguments" in item:
            self.event(
                "function_call_arguments.done", name=item["name"], arguments=item["arguments"]
            )
        else:
            self.event(f"{self.part['type']}.done", text=self.part["text"], logprobs=[])
            self.event("content_part.done", part=self.part)
        self.event("output_item.done", item=item)
        self.item = None

    def end(self, usage: dict) -> None:
        """Send the whole response."""
        status, details = "completed", None
        if self.choices[0].about["finish_reason"] == "length":
            status, details = "incomplete", {"reason": "max_output_tokens"}
        self.close(status)
        counts = {
            name.replace("prompt", "input").replace("completion", "output"): count
            for name, count in usage.items()
        }
        response = self.response(status, usage=counts, incomplete_details=details)
        if self.is_kept:
            self.store.keep(response, self.items)
        if self.stream:
            self.event(status, response=response)
        else:
            self.put(response)
