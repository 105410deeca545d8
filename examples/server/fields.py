"""The fields of requests: each is taken out of a body and checked; what remains is refused by name."""

import json
import re
from dataclasses import fields
from typing import Any

import torch
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

import llama2
from server.serving import Adjustment
from server.tools import Answer

LENGTHS = ["max_tokens", "max_completion_tokens", "max_output_tokens"]
LIMITS = {
    **dict.fromkeys(LENGTHS, (0, 2**31 - 1)),
    **llama2.SAMPLING_LIMITS,
    "temperature": (0, 2),
    "seed": (-(2**63), 2**63 - 1),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "n": (1, 4),
    "logprobs": (0, 20),
    "top_logprobs": (0, 20),
}
# Fields that change nothing, and fields that may only have these values.
IGNORED = ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"]
IGNORED += ["include_obfuscation"]
NEUTRAL = {
    "background": [False],
    "best_of": [1],
    "echo": [False],
    "include": [[], ["reasoning.encrypted_content"]],  # there is none
    "modalities": [["text"]],
    "parallel_tool_calls": [False],
    "tool_choice": ["none", "auto"],
    "tools": [[]],
    "top_logprobs": [0],
    "truncation": ["disabled"],
}
# What a message may have, and the types of its texts.
MESSAGE = ["role", "content", "name", "tool_calls", "tool_call_id"]
MESSAGE += ["reasoning_content", "reasoning"]
TEXTS = ["text", "input_text", "output_text", "summary_text", "reasoning_text"]
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # of a tool


class Refusal(HTTPException):
    """An error for the client; `about` may hold OpenAI's `param` (the wrong field) and `code`."""

    def __init__(self, status: int, message: str, **about: str) -> None:
        super().__init__(status, message, {"Retry-After": "2"} if status == 503 else None)
        self.about = about


def refuse(request: Any, error: Any) -> Response:
    """An error in OpenAI's form. Its message is logged, too."""
    if not isinstance(error, HTTPException):  # its text may quote a prompt or a path
        error = Refusal(500, f"the server failed: {type(error).__name__}")
    if error.status_code == 404 and not isinstance(error, Refusal):
        paths = ", ".join(route.path for route in request.app.routes)
        error = Refusal(
            404,
            f"{request.url.path[:60]} does not exist; there are {paths}",
        )
    message = utf8(error.detail)
    if request is not None:
        request.scope["log"] = [message]
    error_type = "invalid_request_error" if error.status_code < 500 else "server_error"
    about = getattr(error, "about", {})
    body = {"message": message, "type": error_type, "param": None, "code": None, **about}
    return JSONResponse({"error": body}, error.status_code, error.headers)


def wrong(name: str, value: Any, expected: str) -> Refusal:
    """The error for a field."""
    name = utf8(name[:40])
    return Refusal(400, f"{name} is {json.dumps(value)[:60]}{expected}", param=name)


def utf8(text: str) -> str:
    """The text with question marks for characters that UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


def take(body: dict, name: str, default: Any, value_type: type | None = None) -> Any:
    """Remove a field and return its value, of the default's type, or the default if it is null."""
    value = body.pop(name, None)
    if value is None:
        return default
    value_type = value_type or type(default)
    fits = type(value) is value_type or (value_type is float and type(value) is int)  # no bool
    expected = f"; expected {value_type.__name__}"
    if name in LIMITS:
        low, high = LIMITS[name]
        fits = fits and low <= value <= high
        expected += f" from {low} to {high}"
    if not fits:
        raise wrong(name, value, expected)
    return value


def take_sampling(body: dict, model: llama2.Llama) -> llama2.Sampling:
    """The fields of Sampling, else what the model's files recommend, and those of Adjustment.

    A seed may be negative.
    """
    recommended = model.sampling or llama2.Sampling()
    vocab_size = model.vocab_size
    values = {}
    for item in fields(llama2.Sampling):
        if item.name in LIMITS:
            item_type = int if item.name == "seed" else type(item.default)
            default = getattr(recommended, item.name)
            values[item.name] = take(body, item.name, default, item_type)
    if values["seed"] is not None:
        values["seed"] %= 2**63
    bias = torch.zeros(vocab_size)
    for key, value in take(body, "logit_bias", {}).items():
        is_id = key.isdecimal() and len(key) < 10 and int(key) < vocab_size
        if not is_id or type(value) not in (int, float) or not -100 <= value <= 100:
            raise wrong("logit_bias", {key: value}, "; expected ids: numbers from -100 to 100")
        bias[int(key)] = value
    processor = Adjustment(
        bias,
        take(body, "presence_penalty", 0.0),
        take(body, "frequency_penalty", 0.0),
    )
    return llama2.Sampling(logits_processor=processor, **values)


def take_stops(body: dict) -> list[str]:
    """The stop texts."""
    stop = body.pop("stop", [])
    stops = stop if isinstance(stop, list) else [stop]
    if len(stops) > 16 or not all(isinstance(text, str) and 0 < len(text) <= 256 for text in stops):
        raise wrong("stop", stop, "; expected up to 16 texts of 1 to 256 characters")
    return stops


def take_schema(body: dict) -> list[dict]:
    """The schema of `response_format`; none if the answer may be any text."""
    form = take(body, "response_format", {"type": "text"})
    match form:
        case {"type": "text"} if len(form) == 1:
            return []
        case {"type": "json_object"} if len(form) == 1:
            return [{"type": "object"}]
        case (  # /v1/responses has it flat
            {"type": "json_schema", "json_schema": {"schema": schema}}
            | {"type": "json_schema", "schema": schema}
        ):
            return [schema]
    expected = "; expected type text, json_object, or json_schema with a schema"
    raise wrong("response_format", form, expected)


def take_tools(body: dict) -> tuple[list[dict], Answer]:
    """The tools, and how an answer may call them."""
    choice = body.pop("tool_choice", "auto")
    answer = Answer(several=take(body, "parallel_tool_calls", True))
    answer.forced = choice not in ("auto", "none")
    tools = []
    for tool in take(body, "tools", []):
        name, schema = "", None
        match tool:  # /v1/responses has it flat
            case {"function": {"name": str(name), **function}} | {
                "type": "function",
                "name": str(name),
                **function,
            }:
                schema = function.get("parameters") or {"properties": {}}
        fits = NAME.fullmatch(name) and isinstance(schema, dict)
        if not fits or schema.setdefault("type", "object") != "object":
            expected = "; expected functions with names of 1 to 64 of A-Z a-z 0-9 _ . - and objects"
            raise wrong("tools", tool, f"{expected} as parameters")
        function = {"name": name, **function}
        tools.append({"type": "function", "function": function})
        chosen = (
            {"type": "function", "name": name},
            {"type": "function", "function": {"name": name}},
        )
        if choice in ("auto", "required", *chosen):
            answer.names.append(name)
            answer.schemas.append(schema)
    if answer.forced and not answer.names:
        raise wrong("tool_choice", choice, "; expected auto, none, required or a tool")
    return tools, answer


def text_of(content: Any) -> str:
    """The text of a message's content. Raises TypeError."""
    if isinstance(content, str):
        return content
    if type(content) is not list or any(p.get("type", "text") not in TEXTS for p in content):
        raise TypeError
    return "\n".join(part["text"] for part in content)


def check_messages(messages: Any) -> None:
    """Check messages, and give them the form that templates expect. Raises TypeError or others."""
    names = {}  # of the functions that were called
    for message in messages:
        for key, value in [*message.items()]:
            if value and key not in MESSAGE:
                raise ValueError(f"{key[:40]} in a message is not supported")
            if not value and key != "content":  # templates ask whether there are tool_calls
                del message[key]
        if message["role"] == "developer":
            message["role"] = "system"
        calls = message.get("tool_calls") or []
        if not calls or message.get("content"):
            message["content"] = text_of(message.get("content"))
        for call in calls:
            function = call["function"]
            names[call.get("id")] = function["name"]
            function["arguments"] = json.loads(function["arguments"] or "{}")
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
        if thought := message.get("reasoning_content") or message.get("reasoning"):
            message["reasoning_content"] = message["reasoning"] = thought


def refuse_rest(body: dict) -> None:
    """Refuse the fields that remain, unless they change nothing."""
    for key, value in body.items():
        text = json.dumps(value)  # tells false from 0
        if key not in IGNORED and text not in map(json.dumps, NEUTRAL.get(key, ())):
            raise wrong(key, value, ", which is not supported")
