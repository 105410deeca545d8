"""lm-evaluation-harness against examples/server.py: its sums and verdicts are llama2.score's.

Needs the package lm_eval, which takes seconds to import: skipped without it.
"""

from __future__ import annotations

import json
import os

import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
lm_eval = pytest.importorskip("lm_eval")

from lm_eval.tasks import TaskManager
from test_convert import convert
from test_server import Running

import llama2

# A beginning, four ends; the first is the right one.
QUESTIONS = """
Once upon a time there was a: king, railway, committee, theorem
The king had three: sons, printers, percent, oxygen
The wolf knocked at the: door, algebra, Monday, colour
The princess was as beautiful as the: day, tax, engine, grammar
He cut off the dragon's: head, invoice, theory, minute
They were married and lived: happily, electric, beneath of, sixteen
The old woman said,: "Good day, seven seven, the the, of of
In the middle of the: forest, quickly, invented, because
She gave him a golden: apple, whereas, yesterday, politely
When the morning came, he went: away, blue, parliament, eleventh
"""
TASK = """
task: ten_questions
dataset_path: json
dataset_kwargs: {{data_files: {}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The bundled model in float32, its tokenizer for transformers, the questions as a task."""
    path = tmp_path_factory.mktemp("harness")
    checkpoint = llama2.open_checkpoint(llama2.DEFAULT_MODEL)
    llama2.save_gguf(checkpoint, path / "model.gguf", "F32")
    convert.save_folder(checkpoint, path / "hf", "F32")
    entries = [line.split(": ") for line in QUESTIONS.strip().splitlines()]
    entries = [{"question": question, "choices": ends.split(", ")} for question, ends in entries]
    (path / "questions.json").write_text("\n".join(map(json.dumps, entries)))
    (path / "ten_questions.yaml").write_text(TASK.format(path / "questions.json"))
    server = Running("--model", str(path / "model.gguf"), "--quiet")
    yield server, path
    assert server.stop() == ""


@pytest.mark.parametrize("backend", ["local-completions", "gguf"])
def test_harness_agrees_with_score(server, backend):
    running, path = server
    arguments = {"base_url": running.url}
    if backend == "local-completions":
        arguments = {"base_url": f"{running.url}/v1/completions", "model": "stories"}
        arguments |= {"tokenizer": str(path / "hf"), "add_bos_token": True, "batch_size": 8}
    actual = lm_eval.simple_evaluate(
        model=backend,
        model_args=arguments,
        tasks=["ten_questions"],
        task_manager=TaskManager(include_path=str(path), include_defaults=False),
        bootstrap_iters=0,
    )
    model, tokenizer = llama2.load(path / "model.gguf")
    verdicts = []
    for sample in actual["samples"]["ten_questions"]:
        doc = sample["doc"]
        for choice, ((logprob, is_greedy, *_),) in zip(
            doc["choices"], sample["resps"], strict=True
        ):
            ids = tokenizer.encode(f"{doc['question']} {choice}")
            start = len(tokenizer.encode(doc["question"])) - 1
            expected = llama2.score(model, ids)[start:].sum().item()
            likeliest = model(torch.tensor([ids]))[0, start:-1].argmax(-1)
            verdicts.append(str(is_greedy) == "True")
            assert float(logprob) == pytest.approx(expected, abs=1e-4), (doc, choice)
            assert verdicts[-1] == (likeliest.tolist() == ids[start + 1 :]), (doc, choice)
    assert len(verdicts) == 40 and any(verdicts) and not all(verdicts)
    assert actual["results"]["ten_questions"]["acc,none"] >= 0.8
