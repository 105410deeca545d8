"""Sampling and what draws by it: distributions against transformers, penalties, seeds, stop texts.

The frozen numbers were made by the processors of transformers 5.23. Penalties follow
llama_sampler_penalties of llama.cpp.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

import llama2
from test_llama2 import GREEDY, scripted

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.5, 1.0, 0.0, 1.9, -0.5])
SEEN = [1, 2, 2, 6]  # ids before LOGITS
FROZEN = [
    ({"temperature": 0.5}, [0.0208, 0.4168, 0.001, 0.1533, 0.0564, 0.0076, 0.3412, 0.0028]),
    ({"top_k": 3}, [0, 0.3982, 0, 0.2415, 0, 0, 0.3603, 0]),
    ({"top_p": 0.5}, [0, 0.525, 0, 0, 0, 0, 0.475, 0]),
    ({"top_p": 0.9}, [0.0719, 0.3223, 0, 0.1955, 0.1186, 0, 0.2917, 0]),
    ({"min_p": 0.3}, [0, 0.3473, 0, 0.2107, 0.1278, 0, 0.3143, 0]),
    (
        {"top_k": 6, "top_p": 0.95, "min_p": 0.2, "temperature": 1.5},
        [0.0969, 0.2634, 0, 0.1887, 0.1352, 0.0694, 0.2464, 0],
    ),
]


def plain(**options):
    """A Sampling without a change to the distribution but these."""
    return llama2.Sampling(**{"temperature": 1.0, "top_p": 1.0} | options)


@pytest.mark.parametrize(("options", "wanted"), FROZEN, ids=str)
def test_distributions_are_those_of_transformers(options, wanted):
    """By 20,000 draws, whose frequencies are within 0.016 but once in 100,000 times."""
    n = 20000
    generator = torch.Generator().manual_seed(0)
    drawn = llama2.sample(LOGITS.expand(n, -1), plain(**options), generator=generator)
    found = drawn.bincount(minlength=len(LOGITS)) / n
    assert (found - torch.tensor(wanted)).abs().max() < 0.016
    assert (found > 0).tolist() == [p > 0 for p in wanted]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.3, "top_p": 0.9},
        {"temperature": 4.0, "top_p": 0.999},
        {"top_k": 900, "top_p": 0.97},
        {"top_k": 30, "min_p": 0.02},
        {"top_p": 0.5, "min_p": 0.001},
    ],
    ids=str,
)
def test_the_same_ids_as_in_transformers_can_be_drawn(options):
    """Of 700, for steep and flat logits; nothing outside of them in 500 draws, all of the likely."""
    process = pytest.importorskip("transformers").generation.logits_process
    warpers = {
        "temperature": process.TemperatureLogitsWarper,
        "top_k": process.TopKLogitsWarper,
        "top_p": process.TopPLogitsWarper,
        "min_p": process.MinPLogitsWarper,
    }
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 5.0):
        logits = scale * torch.randn(700, generator=generator)
        scores = logits[None]
        for name, warper in warpers.items():
            if name in options:
                scores = warper(options[name])(None, scores)
        probabilities = scores.softmax(-1)[0]
        drawn = llama2.sample(logits.expand(500, -1), plain(**options), generator=generator)
        assert probabilities[drawn].min() > 0
        likely = (probabilities > 0.05).nonzero().flatten()
        assert set(likely.tolist()) <= set(drawn.tolist())


@pytest.mark.parametrize(
    ("top_p", "count"),
    [
        (0.0, 1),
        (0.49, 1),
        (0.51, 2),
        (0.76, 3),
        (0.95, 4),
    ],
)
def test_top_p_is_the_fewest_that_reach_it(top_p, count):
    """Of tokens of 50, 25, 15 and 10 %. 0 leaves one."""
    logits = torch.tensor([0.1, 0.25, 0.15, 0.5]).log()
    drawn = llama2.sample(logits.expand(5000, -1), plain(top_p=top_p))
    assert drawn.unique().numel() == count


def test_temperature_zero_is_greedy_and_tiny_ones_nearly():
    for temperature in (0.0, 1e-3, 1e-30):
        assert llama2.sample(1e4 * LOGITS, llama2.Sampling(temperature)).item() == 1
    tie = torch.tensor([1.0, 3.0, 3.0])
    assert llama2.sample(tie, GREEDY).item() == 1
    assert llama2.sample(tie, llama2.Sampling(0, top_k=1)).item() == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 5},
        {"min_p": 0.01},
        {"presence_penalty": 1.0},
    ],
)
def test_rows_draw_as_they_would_alone(options):
    sampling = llama2.Sampling(**options)
    logits = 3 * torch.randn(40, 200, generator=torch.Generator().manual_seed(0))
    texts = [[i, 7] for i in range(40)]
    generators = [torch.Generator().manual_seed(i) for i in range(40)]
    together = llama2.sample(logits, sampling, texts, generators)
    for i, row in enumerate(logits):
        generator = torch.Generator().manual_seed(i)
        alone = llama2.sample(row, sampling, texts[i], generator)
        assert alone == together[i]
    assert together.unique().numel() > 20


@pytest.mark.parametrize("sampling", [GREEDY, llama2.Sampling(), plain(presence_penalty=1)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_told(sampling, bad):
    logits = torch.stack([LOGITS, LOGITS])
    logits[1, 3] = bad
    first, second = llama2.sample(logits, sampling, [[], []]).tolist()
    assert first >= 0
    assert second == -1


# --------------------------------------------------------------------------------------------------
# Changes of logits


def adjusted(ids, **options):
    """What a processor sees, to which penalties and bias have come before."""
    seen = []

    def see(ids, logits):
        seen.append(logits.clone())
        return logits

    llama2.sample(LOGITS.clone(), llama2.Sampling(0, logits_processor=see, **options), ids)
    return seen[0]


def test_penalties_are_those_of_llama_cpp():
    """Divided or multiplied, less the frequency for each time, less the presence once; 64 tokens."""
    options = {"repetition_penalty": 2, "presence_penalty": 0.25, "frequency_penalty": 0.5}
    wanted = LOGITS.clone()
    wanted[1] = 2.0 / 2 - 0.5 - 0.25
    wanted[2] = -1.0 * 2 - 2 * 0.5 - 0.25
    wanted[6] = 1.9 / 2 - 0.5 - 0.25
    assert torch.allclose(adjusted(SEEN, **options), wanted)
    assert torch.allclose(adjusted([3, *[300] * 60, *SEEN], **options), wanted)
    far = adjusted([3, *[5] * 64], **options)
    assert far[3] == LOGITS[3]
    assert far[5] == -64 * 0.5 - 0.25
    assert adjusted([], **options).equal(LOGITS)


def test_repetition_penalty_is_that_of_transformers():
    wanted = [0.0837, 0.2364, 0.0138, 0.2275, 0.138, 0.0508, 0.2189, 0.0308]
    found = adjusted(SEEN, repetition_penalty=1.3).softmax(-1)
    assert torch.allclose(found, torch.tensor(wanted), atol=1e-4)


def test_bias_and_processor():
    """The bias is there before the processor, whose word is the last; the caller's logits stay."""
    bias = {1: -math.inf, 3: -5, 5: 0.5}
    seen = adjusted(SEEN, logit_bias=bias, presence_penalty=1)
    assert seen[1] == -math.inf
    assert seen[3] == -3.5
    assert seen[6] == pytest.approx(0.9)
    logits = LOGITS.clone()
    last = llama2.Sampling(0, logits_processor=lambda ids, logits: logits.flip(0))
    assert llama2.sample(logits, last, SEEN).item() == 6
    assert logits.equal(LOGITS)
    with pytest.raises(ValueError, match="no token"):
        nothing = dict.fromkeys(range(8), -math.inf)
        llama2.sample(logits, llama2.Sampling(logit_bias=nothing))
    with pytest.raises(ValueError, match="8"):
        llama2.sample(logits, llama2.Sampling(logit_bias={8: 1}))
    with pytest.raises(ValueError, match="logits"):
        llama2.sample(logits, llama2.Sampling(logits_processor=lambda ids, logits: logits[:3]))


def test_a_processor_writes_what_a_grammar_wants(model):
    """The whole text reaches it, of rows that have not ended: here a text that counts."""
    heard = []

    def count(ids, logits):
        heard.append(len(ids))
        allowed = torch.full_like(logits, -math.inf)
        allowed[ids[-1] + 1] = 0
        return allowed

    sampling = llama2.Sampling(logits_processor=count)
    prompts = [[1, 5, 9], [1, 70]]
    steps = list(llama2.generate_batch(model, prompts, sampling, 4, stop_ids=[12]))
    assert steps == [
        [10, 71],
        [11, 72],
        [None, 73],
        [None, 74],
    ]
    assert heard == [3, 2, 4, 3, 5, 4, 5]


# --------------------------------------------------------------------------------------------------
# One set of values

REFUSED = {
    "temperature": (-1.0, math.nan, math.inf, "hot", None),
    "top_k": (-1, 1.5),
    "top_p": (-0.1, 1.1, math.nan),
    "min_p": (-0.1, 1.1),
    "repetition_penalty": (0.0, math.inf),
    "presence_penalty": (math.nan, 101),
    "frequency_penalty": (-math.inf, "1"),
    "seed": (-1, 2**63, 1.0),
    "logit_bias": ({"1": 1}, {1: "1"}, {1: math.nan}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sampling_refuses(name):
    for value in REFUSED[name]:
        with pytest.raises(ValueError, match=name):
            llama2.Sampling(**{name: value})


def test_options_of_the_command_line_reach_the_draw(cli, cli_model):
    model, tokenizer = cli_model
    options = {"temperature": 2.0, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "seed": 7}
    options |= {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 2.0}
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    status, out, _ = cli("--prompt", "fox", "--no-echo", "--max-new-tokens", 30, *argv)
    ids = tokenizer.encode("fox")
    new = list(llama2.generate(model, ids, llama2.Sampling(**options), 30))
    assert (status, "fox" + out) == (0, tokenizer.decode([*ids, *new]) + "\n")


def test_global_state_is_left_alone(model):
    """torch's generator is moved by sample() alone, if it is given neither a seed nor another one."""
    state = torch.get_rng_state()
    llama2.sample(LOGITS, plain(), generator=torch.Generator())
    llama2.sample(LOGITS, llama2.Sampling(seed=3))
    for sampling in (llama2.Sampling(seed=3), llama2.Sampling(), GREEDY):
        list(llama2.generate_batch(model, [[1, 5], [1, 6, 7]], sampling, 3))
    assert torch.get_rng_state().equal(state)
    llama2.sample(LOGITS)
    assert not torch.get_rng_state().equal(state)


# --------------------------------------------------------------------------------------------------
# Stop texts


def shown(tokenizer, text, stop):
    """The pieces of what stream_text shows of a text."""
    script = [*tokenizer.encode(text, bos=False), 2]
    model = scripted(script, 1)
    return list(llama2.stream_text(model, tokenizer, [1], stop=stop, sampling=GREEDY))


def test_a_stop_text_is_one_text(tokenizer):
    """And not its letters; texts that are none or empty are refused."""
    text = "the fox saw the moon and laughed"
    assert "".join(shown(tokenizer, text, "moon and")) == "the fox saw the "
    assert "".join(shown(tokenizer, text, "END")) == text
    for bad in ("", [""], ["a", ""], [5], [None]):
        with pytest.raises(ValueError, match="stop"):
            shown(tokenizer, text, bad)


def test_what_comes_before_the_first_stop_text_is_shown(tokenizer):
    """The first that is complete; and only what may begin a stop text is held back."""
    chance = random.Random(0)
    for _ in range(150):
        text = "".join(chance.choices("abc", k=12))
        stops = []
        for _ in range(3):
            length = chance.randrange(1, 5)
            stops.append("".join(chance.choices("abc", k=length)))
        wanted = text
        ids = tokenizer.encode(text)
        for i in range(len(ids) + 1):
            begin = tokenizer.decode(ids[:i])
            places = [begin.index(stop) for stop in stops if stop in begin]
            if places:
                wanted = text[: min(places)]
                break
        assert "".join(shown(tokenizer, text, stops)) == wanted
    assert len(shown(tokenizer, "the fox saw the moon", ["xyz"])) > 5
