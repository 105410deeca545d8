"""lm-evaluation-harness against examples/server: its sums and verdicts are llama2.score's.

Needs the package lm_eval, which takes seconds to import: skipped without it.
"""

import json
import os

import pytest
import torch

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
lm_eval = pytest.importorskip("lm_eval")

from lm_eval.tasks import TaskManager
from save import save_folder
from test_server import Running

import llama2

# A beginning, four ends; the first is the right one.
QUESTIONS = r"""
{"question": "Once upon a time there was a", "choices": ["king", "railway", "committee", "theorem"]}
{"question": "The king had three", "choices": ["sons", "printers", "percent", "oxygen"]}
{"question": "The wolf knocked at the", "choices": ["door", "algebra", "Monday", "colour"]}
{"question": "The princess was as beautiful as the", "choices": ["day", "tax", "engine", "grammar"]}
{"question": "He cut off the dragon's", "choices": ["head", "invoice", "theory", "minute"]}
{"question": "They were married and lived", "choices": ["happily", "electric", "beneath of", "sixteen"]}
{"question": "The old woman said,", "choices": ["\"Good day", "seven seven", "the the", "of of"]}
{"question": "In the middle of the", "choices": ["forest", "quickly", "invented", "because"]}
{"question": "She gave him a golden", "choices": ["apple", "whereas", "yesterday", "politely"]}
{"question": "When the morning came, he went", "choices": ["away", "blue", "parliament", "eleventh"]}
"""
TASK = """{
"task": "ten_questions",
"dataset_path": "json",
"dataset_kwargs": {"data_files": "%s/questions"},
"test_split": "train",
"output_type": "multiple_choice",
"doc_to_text": "{{question}}",
"doc_to_choice": "{{choices}}",
"doc_to_target": 0,
"metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]
}"""


@pytest.mark.parametrize("backend, path", [("gguf", ""), ("local-completions", "/v1/completions")])
def test_harness_agrees_with_score(tmp_path, backend, path):
    """Of the bundled model in float32, and its tokenizer for transformers."""
    checkpoint = llama2.open_checkpoint(llama2.DEFAULT_MODEL)
    save_folder(checkpoint, tmp_path / "hf", "F32")
    (tmp_path / "questions").write_text(QUESTIONS.strip())
    server = Running("--dtype", "float32", "--quiet")
    arguments = (
        f"base_url={server.url}{path},tokenizer={tmp_path}/hf,add_bos_token=True,batch_size=8"
    )
    actual = lm_eval.simple_evaluate(
        model=backend,
        model_args=arguments,
        tasks=[json.loads(TASK % tmp_path.as_posix())],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    assert server.stop() == ""
    model, tokenizer = llama2.load(checkpoint, dtype="float32")
    verdicts = set()
    for sample in actual["samples"]["ten_questions"]:
        question, choices = sample["doc"].values()
        start = len(tokenizer.encode(question)) - 1
        for choice, ((logprob, verdict, *_),) in zip(choices, sample["resps"], strict=True):
            ids = tokenizer.encode(f"{question} {choice}")
            likeliest = model(torch.tensor([ids]))[0, start:-1].argmax(-1)
            assert str(verdict) == str(likeliest.tolist() == ids[start + 1 :]), choice
            expected = llama2.score(model, ids)[start:].sum().item()
            assert float(logprob) == pytest.approx(expected, abs=1e-4), choice
            verdicts.add(str(verdict))
    assert len(verdicts) == 2
    assert actual["results"]["ten_questions"]["acc,none"] >= 0.8
