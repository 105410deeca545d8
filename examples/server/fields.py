"""The fields of requests: each is taken out of a body and checked; what remains is refused by name."""

import json
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch

import llama2
from server.guard import Refusal
from server.tools import Answer

LIMITS = {
    "max_tokens": (0, 2**31 - 1),
    **llama2.SAMPLING_LIMITS,
    "temperature": (0, 2),
    "seed": (-(2**63), 2**63 - 1),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "n": (1, 4),
    "logprobs": (0, 20),
    "top_logprobs": (0, 20),
}
# Other names of fields: of OpenAI's second interface, of llama-server, Ollama, TGI and others.
SYNONYMS = {
    "max_tokens": "max_completion_tokens max_output_tokens max_new_tokens n_predict num_predict",
    "penalty_last_n": "repeat_last_n",
    "repetition_penalty": "repeat_penalty rep_pen",
    "stop": "stop_sequences stopping_strings",
    "schema": "json_schema guided_json format",
}
# What an answer would have to have, and cannot: fields that are refused, unless they are empty, 0 or
# false, or have such a value.
REFUSED = re.compile(
    r"""(?x) adapter | adaptive_.* | allowed_token_ids | audio | background | bad_words(_ids)? | best_of
    | cache_salt | chat_template | continue_final_message | conversation | documents
    | dry_.* | dynatemp_.* | ebnf | echo | .*_cutoff | eos_token_id | force_words_ids
    | function_call | functions | grammar | guidance_scale | guided_.*
    | ignore_eos | images | include | include_stop_str_in_output | length_penalty
    | logits_processors | lora | max_length | min_length | min_new_tokens | min_tokens | mirostat.*
    | modalities | n_indent | n_probs | negative_prompt | no_repeat_ngram_size
    | num_beams | options | penalty_alpha | prompt_logprobs | raw | regex
    | rep_pen_.* | repetition_penalty_range | return_full_text | return_token.* | samplers
    | smoothing_.* | stop_token_ids | structured_outputs | suffix | suppress_tokens | temp
    | template | tfs_z | tool_choice | tools | top_a | top_logprobs | top_n_sigma | top_n_tokens
    | truncate | truncate_prompt_tokens | typical_p | use_beam_search | videos | watermark
    | with_pieces | xtc_.*"""
)
NEUTRAL = re.compile(  # of encrypted reasoning there is none
    r"""(best_of|num_beams)\ 1|(guidance_scale|length_penalty|typical_p)\ 1(\.0)?
    |modalities\ \["text"]
    |tool_choice\ "(auto|none)"|include\ \["reasoning\.encrypted_content"]""",
    re.VERBOSE,
)
# What a message may have, and the types of its texts.
MESSAGE = re.compile("role|content|name|tool_calls|tool_call_id|reasoning_content|reasoning")
TEXTS = re.compile("(input_|output_|summary_|reasoning_)?text|refusal")
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # of a tool


@dataclass
class Adjustment:
    """A `logits_processor` with all options of OpenAI's API."""

    bias: torch.Tensor  # (V,)
    last_n: int  # how many tokens are recent
    presence_penalty: float  # subtracted from the logits of recent tokens
    frequency_penalty: float  # the same, for each occurrence
    grammar: Any = None

    def __call__(self, ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Logits (V,) after ids."""
        V = len(logits)
        counts = torch.tensor(ids[max(0, len(ids) - self.last_n % 2**32) :], dtype=int).bincount(
            minlength=V
        )[:V]
        penalty = counts * self.frequency_penalty + counts.clamp(max=1) * self.presence_penalty
        logits = logits + (self.bias - penalty).to(logits.device)
        return self.grammar(ids, logits) if self.grammar else logits


def wrong(name: str, value: Any, expected: str) -> Refusal:
    """The error for a field."""
    return Refusal(400, f"{name:.40} is {json.dumps(value)[:60]}{expected}", param=name[:40])


def take(body: dict, name: str, default: Any, value_type: type | None = None) -> Any:
    """Remove a field, by any of its names, and return its value, of the default's type; or the
    default if it is null."""
    value_type = value_type or type(default)
    expected = f"; expected {value_type.__name__}"
    low, high = LIMITS.get(name, (None, None))
    if name in LIMITS:
        expected += f" from {low} to {high}"
    taken = default
    for key in (name, *SYNONYMS.get(name, "").split()):
        value = body.pop(key, None)
        if value is None or (value == -1 and key.endswith("_predict")):  # there: no limit
            continue
        fits = type(value) is value_type or (value_type is float and type(value) is int)  # no bool
        if not (fits or value_type is object) or (name in LIMITS and not low <= value <= high):
            raise wrong(key, value, expected)
        if taken not in (default, value):
            raise wrong(key, value, f", but by another name it is {json.dumps(taken):.60}")
        taken = value
    return taken


def take_sampling(body: dict, model: llama2.Llama) -> llama2.Sampling:
    """The fields of Sampling, else what the model's files recommend, and those of Adjustment."""
    recommended = model.sampling or llama2.Sampling()
    last_n = take(dict(body), "penalty_last_n", llama2.Sampling.penalty_last_n)
    values = {name: take(body, name, getattr(recommended, name)) for name in llama2.SAMPLING_LIMITS}
    if not take(body, "do_sample", True):
        values["temperature"] = 0.0
    bias = torch.zeros(model.vocab_size)
    for key, value in take(body, "logit_bias", {}).items():
        is_id = key.isdecimal() and int(key) < model.vocab_size
        if not is_id or type(value) not in (int, float) or not -100 <= value <= 100:
            raise wrong("logit_bias", {key: value}, "; expected ids: numbers from -100 to 100")
        bias[int(key)] = value
    penalties = [take(body, f"{kind}_penalty", 0.0) for kind in ("presence", "frequency")]
    if last_n not in (-1, 0, 64) and not any(penalties) and values["repetition_penalty"] == 1:
        raise wrong("penalty_last_n", last_n, ", but there is no penalty")
    processor = Adjustment(bias, last_n, *penalties)
    return replace(recommended, logits_processor=processor, **values)


def take_stops(body: dict) -> list[str]:
    """The stop texts."""
    stop = take(body, "stop", [], object)
    stops = stop if isinstance(stop, list) else [stop]
    if len(stops) > 16 or not all(isinstance(text, str) and len(text) <= 256 for text in stops):
        raise wrong("stop", stop, "; expected up to 16 texts of up to 256 characters")
    return [text for text in stops if text]


def take_schema(body: dict) -> list[dict]:
    """The schema of `response_format`; none if the answer may be any text."""
    form = take(body, "response_format", {"type": "text"})
    if schema := take(body, "schema", {}):
        return [schema]
    match form:
        case {"type": "text"}:
            return []
        case {"type": "json_object"} if len(form) == 1:
            return [{"type": "object"}]
        case (  # /v1/responses has it flat
            {"type": "json_schema", "json_schema": {"schema": dict(schema)}}
            | {"type": "json_schema" | "json_object", "schema": dict(schema)}
        ):
            return [schema]
    raise wrong(
        "response_format", form, "; expected text, json_object, or json_schema and a schema"
    )


def take_tools(body: dict) -> tuple[list[dict], Answer]:
    """The tools, and how an answer may call them."""
    choice = body.pop("tool_choice", "auto")
    several = take(body, "parallel_tool_calls", True)
    answer = Answer(several=several, forced=choice not in ("auto", "none"))
    tools = []
    for tool in take(body, "tools", []):
        schema = None
        match tool:  # /v1/responses has it flat
            case {"type": str(other)} if other != "function":
                body[f"{other} among the tools"] = True  # which is forgotten
                continue
            case {"function": {"name": str(name), **function}} | {
                "type": "function",
                "name": str(name),
                **function,
            }:
                schema = function.get("parameters") or {"properties": {}}
        schema_type = isinstance(schema, dict) and (schema.get("type") or "object")
        if schema_type != "object" or not NAME.fullmatch(name):
            expected = "names of 1 to 64 of A-Z a-z 0-9 _ . - and objects as parameters"
            raise wrong("tools", tool, f"; expected functions with {expected}")
        schema["type"] = schema_type
        function = {"name": name, **function}
        tools.append({"type": "function", "function": function})
        chosen = (
            {"type": "function", "name": name},
            {"type": "function", "function": {"name": name}},
        )
        if choice in ("auto", "required", *chosen):
            answer.names.append(name)
            answer.schemas.append(schema)
            answer.strict.append(function.get("strict") is True)
    if answer.forced and not answer.names:
        known = ", ".join(tool["function"]["name"] for tool in tools) or "there is none"
        expected = f"; expected auto, none, or a call of a function among the tools: {known:.200}"
        raise wrong("tool_choice", choice, expected)
    return tools, answer


def take_variables(body: dict) -> dict[str, Any]:
    """Variables for the chat template: how the model is to think, as llama-server and vLLM say it."""
    variables = take(body, "chat_template_kwargs", {})
    match body.pop("reasoning_effort", None) or body.pop("reasoning", None):
        case str(effort) | {"effort": str(effort)}:
            thinks = effort != "none"
            variables = {"enable_thinking": thinks, "thinking": thinks} | variables
            if thinks:
                variables.setdefault("reasoning_effort", effort)
    return variables


def text_of(content: Any) -> str:
    """The text of a message's content. Raises ValueError, or TypeError."""
    if isinstance(content, str):
        return content
    for part in content:
        if not TEXTS.fullmatch(part.get("type", "text")):
            raise ValueError(f"{part['type']!r:.40} in a message is not supported; expected text")
    return "\n".join(part.get("refusal") or part["text"] for part in content)


def check_messages(messages: Any) -> None:
    """Check messages, and give them the form that templates expect. Raises TypeError or others."""
    names = {}  # of the functions that were called
    for message in messages:
        for key, value in [*message.items()]:
            if value and REFUSED.fullmatch(key):  # such as audio
                raise ValueError(f"{key} in a message is not supported; expected text")
            # Templates ask whether there are tool_calls; what clients add is for themselves.
            if not MESSAGE.fullmatch(key) or not value and key != "content":
                del message[key]
        if message["role"] == "developer":
            message["role"] = "system"
        if message["role"] in ("assistant", "tool"):
            message["content"] = message.get("content") or ""
        message["content"] = text_of(message["content"])
        for call in message.get("tool_calls", ()):
            names[call.get("id")] = call["function"]["name"]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
        if thought := message.get("reasoning_content") or message.get("reasoning"):
            message["reasoning_content"] = message["reasoning"] = thought


def refuse_rest(body: dict) -> list[str]:
    """Refuse the fields that remain and ask for what an answer cannot have; the others are returned.

    A hint of one client or another harms nobody, but a misspelt name is told.
    """
    forgotten = []
    known = [*LIMITS, *" ".join(SYNONYMS.values()).split()]
    for key, value in body.items():
        close = get_close_matches(key, known, 1, 0.85)
        if REFUSED.fullmatch(key):
            if value and not NEUTRAL.fullmatch(f"{key} {json.dumps(value)}"):
                raise wrong(key, value, ", which is not supported")
        elif close:
            raise wrong(key, value, f", which is not known; {close[0]} is")
        elif value:
            forgotten.append(key)
    return forgotten
