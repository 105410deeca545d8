"""Sampling, and what generates by it: distributions against transformers, seeds, stop texts."""

import json
import math
import re
import shutil
import warnings
from unittest.mock import patch

import gguf
import pytest
import torch

import llama2
from test_llama2 import GREEDY, json_cases, raises, scripted, write_files, write_gguf

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.5, 1.0, 0.0, 1.9, -0.5])
SEEN = [1, 2, 2, 6]  # ids before LOGITS


def plain(**options):
    """A Sampling without a change to the distribution but these."""
    return llama2.Sampling(**{"temperature": 1.0, "top_p": 1.0} | options)


# Beside transformers' classes: those of more options are added here.
WARPERS = {"temperature": "Temperature", "top_k": "TopK", "top_p": "TopP", "min_p": "MinP"}
WARPED = """\
{"temperature": 0.3, "top_p": 0.9}
{"top_p": 0.0}
{"top_p": 0.5}
{"top_k": 900, "top_p": 0.97}
{"top_k": 30, "min_p": 0.02}
{"top_k": 60, "temperature": 1.5, "top_p": 0.95, "min_p": 0.3}"""


@json_cases("options", WARPED)
def test_distributions_are_those_of_transformers(options):
    """Of 700, for steep and flat logits, by random numbers that are spread evenly from 0 to 1."""
    process = pytest.importorskip("transformers").generation.logits_process
    sampling, count = plain(**options), 1000
    for scale in (0.1, 1.0, 5.0):
        logits = scale * torch.randn(700, generator=torch.Generator().manual_seed(0))
        scores = logits[None]
        for name, value in options.items():  # in the order of Sampling
            scores = getattr(process, f"{WARPERS[name]}LogitsWarper")(value)(None, scores)
        expected = scores.softmax(-1)[0]
        numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        with patch.object(torch, "rand", side_effect=numbers):
            ids = torch.tensor([llama2.sample(logits, sampling) for _ in range(count)])
        actual = ids.bincount(minlength=len(logits)) / count
        assert (actual - expected).abs().max() < 1.1 / count
        assert expected[ids].min() > 0


def test_temperature_zero_is_greedy_and_tiny_ones_nearly():
    for temperature in (0.0, 1e-3, 1e-50):
        assert llama2.sample(1e4 * LOGITS, llama2.Sampling(temperature)) == 1


@pytest.mark.parametrize("sampling", [GREEDY, llama2.Sampling(), plain(repetition_penalty=2)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_told(sampling, bad):
    logits = LOGITS.clone()
    logits[3] = bad
    raises(f"largest logit is {bad}; .* a weight is NaN", llama2.sample, logits, sampling, SEEN)


# --------------------------------------------------------------------------------------------------
# Changes of logits


def test_the_word_of_a_processor_is_the_last():
    """The caller's logits stay as they are."""
    logits = LOGITS.clone()

    def sample(processor):
        return llama2.sample(logits, llama2.Sampling(0, logits_processor=processor), SEEN)

    scale = torch.ones(8, requires_grad=True)
    for processor in (lambda ids, x: x.bfloat16(), lambda ids, x: x * scale):
        assert sample(processor) == 1
    assert sample(lambda ids, logits: logits.fill_(-1).index_fill_(0, torch.tensor(5), 0)) == 5
    assert logits.equal(LOGITS)
    with pytest.raises(ValueError, match="no token"):
        sample(lambda ids, logits: logits - math.inf)
    for wrong in (lambda ids, logits: logits[:3], lambda ids, logits: logits.tolist()):
        with pytest.raises(ValueError, match="must return logits"):
            sample(wrong)


def test_a_processor_writes_what_a_grammar_wants(model):
    """The whole text reaches it: here a text that counts."""
    texts = []

    def count(ids, logits):
        texts.append(ids)
        return logits.where(torch.arange(len(logits)) == ids[-1] + 1, -math.inf)

    sampling = llama2.Sampling(logits_processor=count)
    assert list(llama2.generate(model, [1, 5, 9], sampling, 9, stop_ids=[13])) == [10, 11, 12]
    assert texts == [[1, 5, *range(9, n)] for n in range(10, 14)]


# --------------------------------------------------------------------------------------------------
# One set of values

REFUSED = json.loads("""{"temperature": [-1e7, NaN, Infinity, "hot"], "top_k": [-2, 1.5],
"top_p": [1.1], "min_p": [1.1], "repetition_penalty": [0.0], "seed": [-1, 9223372036854775808],
"penalty_last_n": [-2, 2.5, "x", null, 4294967296], "stop_strings": ["", [""], ["a", 5], 5, null]}""")


@pytest.mark.parametrize("name", REFUSED)
def test_sampling_refuses(name):
    for value in REFUSED[name]:
        raises(name, llama2.Sampling, **{name: value})


def test_global_state_is_left_alone(model):
    """torch's generator is moved by sample() alone, if it is given neither a seed nor another one."""
    state = torch.get_rng_state()
    llama2.sample(LOGITS, plain(), generator=torch.Generator())
    llama2.sample(LOGITS, llama2.Sampling(seed=3))
    for sampling in (llama2.Sampling(seed=3), llama2.Sampling(), GREEDY):
        list(llama2.generate(model, [1, 5], sampling, 3))
    assert torch.get_rng_state().equal(state)
    llama2.sample(LOGITS)
    assert not torch.get_rng_state().equal(state)


# --------------------------------------------------------------------------------------------------
# Stop texts


@pytest.mark.parametrize("stop", ["", ["a", ""], [5]])
def test_stop_texts_that_are_none(tokenizer, stop):
    raises("stop", llama2.stream_text, scripted(), tokenizer, [1], stop=stop)


RECOMMENDED = """
{"temperature": 0.6, "top_p": 0.9, "do_sample": true} | {"temperature": 0.6, "top_p": 0.9}
{"temperature": 0.6, "do_sample": false} | {"temperature": 0.0}
{"repetition_penalty": 1.3, "do_sample": false} | {"temperature": 0.0, "repetition_penalty": 1.3, "penalty_last_n": -1}
{"repetition_penalty": 1.3, "penalty_last_n": 9} | {"repetition_penalty": 1.3, "penalty_last_n": 9}
{"top_k": 40, "temperature": null} | {"top_k": 40}
{"top_k": 50.0, "temperature": 1} | {"top_k": 50, "temperature": 1.0}
{"top_k": -1, "temperature": -1} | {"top_k": -1, "temperature": -1.0}
{} | {}
"""  # what generation_config.json says: what a Sampling then is


@json_cases("content, stated", RECOMMENDED)
def test_what_the_files_recommend_is_used(tmp_path, forms, capsys, content, stated):
    """By generate(), the command line and the server, unless something else is said."""
    take_sampling = pytest.importorskip("server.fields").take_sampling
    folder = shutil.copytree(forms[0] / "hf_index", tmp_path / "folder")
    write_files(folder, {"generation_config.json": content})
    model, _ = llama2.load(folder)
    expected = llama2.Sampling(**stated)
    used = llama2.generate(model, [1, 5], max_new_tokens=1).sampling
    for name in llama2.GGUF_SAMPLING:
        assert getattr(used, name) == getattr(expected, name)
    asked = take_sampling({"min_p": 0.5}, model)
    assert (asked.min_p, asked.temperature) == (0.5, expected.temperature)
    assert llama2.main(["--model", str(folder), "--prompt=fox", "-n=1", "--top-p=0.5"]) == 0
    report = capsys.readouterr().err
    said = f"temperature {expected.temperature:.6g} ({'model' if 'temperature' in stated else 'default'})"
    assert said in report
    said = f"penalty_last_n {expected.penalty_last_n} (model)"
    assert (said in report) is ("penalty_last_n" in stated)


def test_a_penalty_of_a_gguf_file_looks_at_64_tokens(tmp_path, keys, tensors):
    """As in llama.cpp, unless the file says how many; in transformers it looks at all."""
    keys = keys | {"general.sampling.penalty_repeat": 1.5}
    path = write_gguf(tmp_path / "x.gguf", keys, tensors)
    assert llama2.open_checkpoint(path).sampling == {"repetition_penalty": 1.5}


@pytest.mark.parametrize("last_n", [-1, 0, 3, 64, 2**31, None])
def test_what_the_penalty_looks_at(last_n, no_grad):
    """transformers' processor, given the last tokens, by default 64; in llama.cpp, too, -1 is all and
    0 none. Ids beyond those that can be sampled are passed over."""
    transformers = pytest.importorskip("transformers")
    ids = [*range(10, 110), 5, 300, 7]
    logits = torch.linspace(-1, 1, 200)
    count = {-1: len(ids), None: 64}.get(last_n, last_n)
    seen = [i for i in ids[len(ids) - min(count, len(ids)) :] if i != 300]
    process = transformers.RepetitionPenaltyLogitsProcessor(1.5)
    expected = process(torch.tensor([seen], dtype=torch.int64), logits[None].clone())[0]
    heard = []
    options = {} if last_n is None else {"penalty_last_n": last_n}
    sampling = plain(repetition_penalty=1.5, logits_processor=lambda _, x: heard.append(x) or x)
    llama2.sample(logits, llama2.replace(sampling, **options), ids)
    assert torch.equal(heard[0], logits if last_n == 0 else expected)


def test_stop_strings_are_followed(forms, tmp_path, capsys):
    """They end a text, whatever the options say; generate() has no texts. One, or a list of them."""
    folder = shutil.copytree(forms[0] / "hf", tmp_path / "folder")
    for stops in ("fox", ["fox", "the moon"]):  # a text is not its letters
        write_files(folder, {"generation_config.json": {"stop_strings": stops}})
        model, tokenizer = llama2.load(folder)
        assert model.sampling.stop_strings == ((stops,) if isinstance(stops, str) else tuple(stops))
        told = scripted(tokenizer.encode("a b fox c", bos=False), start=1)
        for stop, expected in (((), "a b "), ("b", "a ")):
            told.sampling = llama2.replace(GREEDY, stop_strings=stops)
            stream = llama2.stream_text(told, tokenizer, [1], stop, max_new_tokens=9)
            assert "".join(stream) == expected and "stop text" in stream.stop_reason
    assert llama2.main(["--model", str(folder), "--prompt=fox", "--max-new-tokens=1"]) == 0
    assert "stop_strings 'fox', 'the moon' (model)" in capsys.readouterr().err


# What a file recommends and the line says is not followed, and what is off.
NOT_FOLLOWED = json.loads("""{
"generation_config.json": {"no_repeat_ngram_size": 3, "num_beams": 4, "suppress_tokens": [7],
"stop_strings": ["the", ""], "typical_p": 0.5, "top_p": 1.5, "temperature": "hot", "top_k": Infinity,
"repetition_penalty": -1.0},
"x.gguf": {"mirostat": 2, "xtc_probability": 0.5, "sequence": "temperature;top_k", "top_p": 1.5}}""")
OFF = json.loads("""{
"generation_config.json": {"num_beams": 1, "typical_p": 1.0, "suppress_tokens": [], "top_h": null},
"x.gguf": {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "xtc_threshold": 0.1}}""")


@pytest.mark.parametrize("file", NOT_FOLLOWED)
def test_what_is_recommended_and_not_followed_is_named(forms, write_tiny, tmp_path, capsys, file):
    """In one line, which names the file; also by --info. Wrong values, too: options count instead."""

    def write(settings):
        if file == "x.gguf":
            return write_tiny(
                {f"general.sampling.{name}": value for name, value in settings.items()}
            )
        folder = shutil.copytree(forms[0] / "hf", tmp_path / "folder", dirs_exist_ok=True)
        write_files(folder, {file: settings})
        return folder

    path = write(OFF[file])
    assert llama2.main(["--model", str(path), "--prompt=fox", "--max-new-tokens=1"]) == 0
    assert "followed" not in capsys.readouterr().err
    path = write(OFF[file] | NOT_FOLLOWED[file])
    for options in (["--info"], ["--prompt=fox", "--max-new-tokens=1", "--top-p=0.5", "--top-k=5"]):
        assert llama2.main(["--model", str(path), *options]) == 0
        [line] = [x for x in capsys.readouterr().err.splitlines() if "followed" in x]
        assert file in line
        for name in NOT_FOLLOWED[file]:
            assert name in line
        for name in OFF[file].keys() - NOT_FOLLOWED[file].keys():
            assert name not in line


NAMED = """mirostat xtc_probability sequence typical_p top_h epsilon_cutoff eta_cutoff penalty_alpha
dola_layers guidance_scale no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_beams
encoder_repetition_penalty presence_penalty frequency_penalty suppress_tokens begin_suppress_tokens
forced_bos_token_id forced_eos_token_id sequence_bias constraints force_words_ids min_length max_length
min_new_tokens max_new_tokens exponential_decay_length_penalty watermarking_config token_healing
top_n_sigma length_penalty diversity_penalty"""


def test_the_list_of_what_is_harmless(write_tiny):
    """A new version's new option is named until somebody says here that it changes no text."""
    path = write_tiny()
    checkpoint = llama2.open_checkpoint(path)
    checkpoint.recommended = dict.fromkeys([*NAMED.split(), "max_length"], 9)
    with pytest.warns(UserWarning, match=", ".join(checkpoint.recommended)):
        assert checkpoint.sampling == {}
    # Llama 2's own files have a limit that is the context: nothing is missing.
    checkpoint.recommended = {"max_length": checkpoint.config.max_position_embeddings}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.sampling == {}
    known = [*llama2.GGUF_SAMPLING, "stop_strings", *NAMED.split()]
    keys = {k for k in vars(gguf.Keys.General).values() if str(k).startswith("general.sampling.")}
    names = {key.rpartition(".")[2] for key in keys - {*llama2.GGUF_SAMPLING.values()}}
    names |= vars(pytest.importorskip("transformers").GenerationConfig()).keys()
    assert not [n for n in names if n not in known and not re.fullmatch(llama2.HARMLESS, n)]
