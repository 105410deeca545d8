"""Chat formats, added tokens and the models that bring them: what llama2.py says to them and where they stop.

The ids were made by transformers 5.23 with the templates below, `"legacy": false` and Llama 2's own
tokenizer.model; where transformers is installed, random dialogues are compared with it, too.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
    dialogue,
    hf_state,
    make_weights,
    some_pieces,
    write_gguf,
    write_hf,
    write_meta,
)

import llama2

# Templates that do what the published ones do, and are told by the same texts.
BODY = "{% for m in messages %}"
SYSTEM = "{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}"
SYSTEM += "{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}"
SYSTEM += "{% endif %}"
MISTRAL = SYSTEM + "{{ bos_token }}{% for m in loop_messages %}{% if m['role'] == 'user' %}"
TEMPLATES = {
    "zephyr": BODY + "{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    "chatml": BODY + "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "mistral": MISTRAL + "{% if loop.first and system_message is defined %}"
    "{{ ' [INST] ' + system_message + '\n\n' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' [INST] ' + m['content'] + ' [/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}",
    "mistral v3": MISTRAL + "{% if loop.last and system_message is defined %}"
    "{{ '[INST] ' + system_message + '\n\n' + m['content'] + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + m['content'] + '[/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}",
    "vicuna": SYSTEM + "{{ bos_token }}{% if system_message is defined %}"
    "{{ system_message | trim + '\n\n' }}{% endif %}{% for m in loop_messages %}"
    "{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] | trim + '\n' }}"
    "{% else %}{{ 'ASSISTANT: ' + m['content'] | trim + eos_token + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    "llama-2": SYSTEM
    + "{% for m in loop_messages %}{% if loop.first and system_message is defined %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}{% if m['role'] == 'user' %}"
    "{{ bos_token + ' [INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
}
CONTROL_TAGS = {"[INST]": True, "[/INST]": True}  # added tokens: whether they are special
CHATML_TAGS = {"<|im_end|>": True, "<|im_start|>": False}
FORMATS = [  # the template, the format that it is, the tokens that stand behind Llama 2's
    ("llama-2", "llama-2", {}),
    ("zephyr", "zephyr", {}),
    ("chatml", "chatml", {}),
    ("chatml", "chatml", CHATML_TAGS),
    ("mistral", "mistral", {}),
    ("mistral v3", "mistral", CONTROL_TAGS),
    ("vicuna", "vicuna", {}),
]

# Llama 2's vocabulary as far as these dialogues reach it.
PIECES = """
261:er 263:▁a 264:en 273:an 274:▁c 275:is 279:ar 289:▁b 294:as 298:▁h 299:nd 303:st 317:▁S 326:im
331:em 344:se 355:end 371:te 375:us 391:ist 424:ant 442:art 465:ass 518:▁[ 529:▁< 593:nt 643:ser
829:</ 858:yst 893:ss 941:ta 952:ys 973:ystem 1001:ER 1039:si 1177:IN 1254:ST 1356:tem 1509:use
1533:▁</ 1655:ste 1660:SE 1792:user 1799:SS 2079:ista 2190:AN 2273:rt 2565:></ 2918:hi 2962:start
3059:NS 3235:IS 3289:AS 3308:US 3532:▁<< 3816:][ 5173:sta 5205:system 5299:>< 5425:SI 6040:TA
6304:SER 6778:>> 7251:▁hi 8508:star 9047:IST 9314:<< 9675:sys 9777:istan 11889:USER 12637:tar
13161:tan 13566:ANT 14411:stan 14816:SY 17171:USE 20321:NT 21554:YS 22137:istant 22933:ASS 24566:>[
25580:INST 29871:▁ 29872:e 29873:t 29874:a 29875:i 29876:n 29878:r 29879:s 29881:d 29882:h 29883:c
29884:u 29885:m 29890:b 29891:y 29901:: 29902:I 29903:S 29909:A 29911:T 29914:/ 29918:_ 29923:E
29934:R 29940:N 29958:> 29961:[ 29962:] 29965:U 29966:< 29979:Y 29989:|
"""
USER, ANSWER = [29989, 1792, 29989, 29958, 13], [29989, 465, 22137, 29989, 29958, 13]
START, END = [29989, 326, 29918, 2962, 29989, 29958], [29989, 326, 29918, 355, 29989, 29958, 13]
CUE = [29966, *START, 465, 22137, 13]
INST, END_INST, ASSISTANT = (
    [518, 25580, 29962],
    [518, 29914, 25580, 29962],
    [13, 22933, 9047, 13566],
)
IDS = {
    ("zephyr", "u:hi"): [529, *USER, 2918, 2, 13, 29966, *ANSWER],
    ("zephyr", "u:a a:b u:c"): [529, *USER, 29874, 2, 13, 29966, *ANSWER, 29890, 2, 13]
    + [29966, *USER, 29883, 2, 13, 29966, *ANSWER],
    ("zephyr", "s:S u:hi"): [529, 29989, 5205, 29989, 29958, 13, 29903, 2, 13]
    + [29966, *USER, 2918, 2, 13, 29966, *ANSWER],
    ("chatml", "u:hi"): [529, *START, 1792, 13, 2918, 29966, *END, *CUE],
    ("chatml", "u:a a:b u:c"): [529, *START, 1792, 13, 29874, 29966, *END, *CUE, 29890, 29966, *END]
    + [29966, *START, 1792, 13, 29883, 29966, *END, *CUE],
    ("chatml", "s:S u:hi"): [529, *START, 5205, 13, 29903, 29966, *END]
    + [29966, *START, 1792, 13, 2918, 29966, *END, *CUE],
    ("chatml+", "u:hi"): [32001, 1792, 13, 2918, 32000, 13, 32001, 465, 22137, 13],
    ("chatml+", "u:a a:b u:c"): [32001, 1792, 13, 29874, 32000, 13, 32001, 465, 22137, 13]
    + [29890, 32000, 13, 32001, 1792, 13, 29883, 32000, 13, 32001, 465, 22137, 13],
    ("chatml+", "s:S u:hi"): [32001, 5205, 13, 29903, 32000, 13, 32001, 1792, 13, 2918, 32000, 13]
    + [32001, 465, 22137, 13],
    ("mistral", "u:hi"): [1, *INST, 7251, *END_INST],
    ("mistral", "u:a a:b u:c"): [1, *INST, 263, *END_INST, 289, 2, *INST, 274, *END_INST],
    ("mistral", "s:S u:hi"): [1, *INST, 317, 13, 13, 2918, *END_INST],
    ("mistral", "s:S u:a a:b u:c"): [1, *INST, 317, 13, 13, 29874, *END_INST, 289, 2]
    + [*INST, 274, *END_INST],
    ("mistral+", "u:hi"): [1, 32000, 7251, 32001],
    ("mistral+", "u:a a:b u:c"): [1, 32000, 263, 32001, 289, 2, 32000, 274, 32001],
    ("mistral+", "s:S u:hi"): [1, 32000, 317, 13, 13, 2918, 32001],
    ("mistral+", "s:S u:a a:b u:c"): [
        1,
        32000,
        263,
        32001,
        289,
        2,
        32000,
        317,
        13,
        13,
        29883,
        32001,
    ],
    ("vicuna", "u:hi"): [1, 11889, 29901, 7251, *ASSISTANT, 29901],
    ("vicuna", "u:a a:b u:c"): [1, 11889, 29901, 263, *ASSISTANT, 29901, 289, 2, 13]
    + [11889, 29901, 274, *ASSISTANT, 29901],
    ("vicuna", "s:S u:hi"): [1, 29903, 13, 13, 11889, 29901, 7251, *ASSISTANT, 29901],
    ("llama-2", "u:a a:b u:c"): [1, *INST, 263, *END_INST, 289, 29871, 2, 1, *INST, 274, *END_INST],
}


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """The file tokenizer.model with Llama 2's ids."""
    path = tmp_path_factory.mktemp("real")
    tokenizer = llama2.Tokenizer.from_gguf(
        write_gguf(path / "vocabulary.gguf", some_pieces(PIECES))
    )
    (path / "tokenizer.model").write_bytes(tokenizer.sp.serialized_model_proto())
    return path / "tokenizer.model"


def added_tokens_decoder(added, start=32000):
    """As tokenizer_config.json has it, from texts and whether they are special."""
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    tokens = [{"content": text, "special": special} | plain for text, special in added.items()]
    return {str(i): token for i, token in enumerate(tokens, start)}


def directory(path, model_file, size=32000, **files):
    """A directory with tokenizer.model and JSON files (named without .json), and a Config for it."""
    path.mkdir(exist_ok=True)
    (path / "tokenizer.model").write_bytes(Path(model_file).read_bytes())
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path / "tokenizer.model", llama2.Config(vocab_size=size)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory, real):
    """A tokenizer from a directory for each set of added tokens, by its first."""
    root, found = tmp_path_factory.mktemp("added"), {}
    for i, added in enumerate(({}, CONTROL_TAGS, CHATML_TAGS)):
        config = {"added_tokens_decoder": added_tokens_decoder(added), "legacy": False}
        config |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        config |= {"tokenizer_class": "LlamaTokenizer"}
        file, model = directory(root / str(i), real, 32000 + len(added), tokenizer_config=config)
        found[next(iter(added), "")] = llama2.Tokenizer.from_file(file, model)
        found[next(iter(added), "")].path = file.parent
    return found


def random_dialogue(chance):
    """Roles in turn, contents of words, spaces and line breaks; no two spaces in a row.

    Of several spaces transformers 5 makes other pieces than SentencePiece does.
    """
    words = ["hi", "a", "b ", "\n", " c", "U", "{}", "\u65e5", "'", "SS", "user", "\U0001f999", ""]
    messages = [{"role": "system"}] * chance.randrange(2)
    messages += [{"role": ("user", "assistant")[i % 2]} for i in range(chance.choice((1, 3, 5)))]
    for i, message in enumerate(messages):
        text = "".join(chance.choice(words) for _ in range(chance.randrange(8)))
        messages[i] = message | {"content": re.sub(" +", " ", f"x{text}y")}
    return messages


# --------------------------------------------------------------------------------------------------
# Formats


@pytest.mark.parametrize("name, text", IDS)
def test_ids_are_those_of_the_published_templates(tokenizers, name, text):
    """Frozen. Catches spaces behind control tokens, a second BOS, a system message elsewhere."""
    tags = {"chatml+": "<|im_end|>", "mistral+": "[INST]"}
    tokenizer = tokenizers[tags.get(name, "")]
    assert llama2.encode_chat(tokenizer, dialogue(text), name.rstrip("+")) == IDS[name, text]


@pytest.mark.parametrize("template, name, added", FORMATS)
def test_ids_equal_transformers(tokenizers, template, name, added):
    transformers = pytest.importorskip("transformers")
    ours = tokenizers[next(iter(added), "")]
    theirs = transformers.AutoTokenizer.from_pretrained(str(ours.path))
    chance = random.Random(0)
    for text in ("u:hi", "u:a a:b u:c", "s:S u:hi", "s:S u:a a:b u:c", *range(60)):
        messages = dialogue(text) if isinstance(text, str) else random_dialogue(chance)
        wanted = theirs.apply_chat_template(
            messages,
            chat_template=TEMPLATES[template],
            add_generation_prompt=True,
            return_dict=False,
        )
        assert llama2.encode_chat(ours, messages, name) == wanted, messages


@pytest.mark.parametrize("template, name, added", FORMATS)
def test_templates_are_recognised(template, name, added):
    assert llama2.recognise_chat_format(TEMPLATES[template]) == name
    assert llama2.describe_chat_format(TEMPLATES[template]) == name


def test_no_template_is_llama_2s():
    assert llama2.recognise_chat_format("") == llama2.recognise_chat_format(" \n") == "llama-2"
    assert "no chat template" in llama2.describe_chat_format("")


@pytest.mark.parametrize(
    "template",
    [
        "{{ '### Instruction:\n' + message }}\n### Response: {# and much more of it, far beyond #}",
        "{{ '<|user|>\n' + m + '<|end|>\n<|assistant|>\n' }}{{ eos_token }}",  # Phi 3
        "{{ '[SYSTEM_PROMPT] ' + m + '[/SYSTEM_PROMPT][INST] ' }}",  # Mistral, version 7
        "{{ 'SYSTEM: ' + s + '\nUSER: ' + m + '\nASSISTANT: ' }}",  # Orca's Vicuna
        "{{ '<|header_start|>user<|header_end|>\n\n' }}",  # Llama 4
        "\x1b[2J\u0000 {{ cycler.__init__.__globals__.os.system('touch /tmp/executed') }}",
    ],
)
def test_unknown_templates_are_refused_in_one_line(template):
    with pytest.raises(ValueError, match="--chat-format") as caught:
        llama2.recognise_chat_format(template)
    text, start = str(caught.value), " ".join(template.split())[:60]
    assert repr(start) in text and "\n" not in text and len(text) < 200 and text.isprintable()
    assert all(name in text for name in ("llama-2", "mistral", "zephyr", "vicuna", "chatml"))
    assert llama2.describe_chat_format(template) == text


def test_a_long_template_is_no_work():
    """Searched in time linear in its length: 2 MB of any text."""
    for text in ("USER: ", "<|user|>", "[INST", "{{ "):
        with pytest.raises(ValueError, match="unknown chat template"):
            llama2.recognise_chat_format(text * (2**21 // len(text)) + "!")


def test_unknown_format_is_refused(tokenizers):
    for call in (lambda n: llama2.encode_chat(tokenizers[""], dialogue("u:hi"), n),
                 lambda n: llama2.find_chat_format(tokenizers[""], n)):  # fmt: skip
        with pytest.raises(
            ValueError, match="alpaca.*llama-2, llama-3, mistral, zephyr, vicuna, chatml"
        ):
            call("alpaca")


@pytest.mark.parametrize(
    "name, tokens, ids, texts",
    [
        ("llama-2", "", [2], ["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"]),
        ("mistral", "", [2], ["[INST]", "[/INST]"]),
        ("mistral", "[INST]", [2, 32000, 32001], []),
        ("zephyr", "", [2], ["<|user|>", "<|assistant|>", "<|system|>"]),
        ("vicuna", "", [2], ["USER:", "ASSISTANT:"]),
        ("chatml", "", [2], ["<|im_start|>", "<|im_end|>"]),
        ("chatml", "<|im_end|>", [2, 32000, 32001], ["<|im_start|>"]),
    ],
)
@pytest.mark.parametrize("where", ["s:x{} u:a", "u:{}y", "u:a a:x{}y u:b"])
def test_what_ends_an_answer_cannot_be_typed(tokenizers, name, tokens, ids, texts, where):
    """Tags that are text are refused; control tokens that are typed stay text."""
    tokenizer = tokenizers[tokens]
    _, tag_ids, reserved = llama2.find_chat_format(tokenizer, name)
    assert sorted({2, *tag_ids.values()}) == ids and sorted(reserved) == sorted(texts)
    for text in texts:
        with pytest.raises(ValueError, match=re.escape(f"reserved tag {text}")):
            llama2.encode_chat(tokenizer, dialogue(where.format(text)), name)
    innocent = llama2.encode_chat(tokenizer, dialogue(where.format("")), name)
    for text in ("</s>", "<s>", "[INST]", "[/INST]", "<|im_end|>", "<|im_start|>", "<|user|>"):
        if text not in texts:
            found = llama2.encode_chat(tokenizer, dialogue(where.format(text)), name)
            for control in (1, 2, 32000, 32001):
                assert found.count(control) == innocent.count(control), text
            assert text in tokenizer.decode(found)


@pytest.mark.parametrize("name", llama2.CHAT_FORMAT_NAMES)
@pytest.mark.parametrize(
    "messages, said",
    [
        ([], "no message"),
        (dialogue("s:S"), "found: system"),
        (dialogue("u:a u:b"), "user, user"),
        (dialogue("u:a a:b"), "user, assistant$"),
        ([{"content": "a"}], "None"),
        ([{"role": "user"}], "None"),
        ([{"role": "user", "content": ["a"]}], "a list, not text"),
        ([{"role": ["user"], "content": "a"}], "user"),
    ],
)
def test_other_messages_are_refused(tokenizers, name, messages, said):
    with pytest.raises(ValueError, match=said):
        llama2.encode_chat(tokenizers[""], messages, name)


@pytest.mark.parametrize("name", llama2.CHAT_FORMAT_NAMES)
def test_turns_grow_from_those_before(tokenizers, name):
    """A cache keeps what it holds: the next prompt begins with this one and its answer."""
    tokenizer = tokenizers[""]
    first = llama2.encode_chat(tokenizer, dialogue("s:S u:a"), name)
    second = llama2.encode_chat(tokenizer, dialogue("s:S u:a a:hi u:b"), name)
    assert second[: len(first)] == first and len(second) > len(first)


# --------------------------------------------------------------------------------------------------
# Tokens


def test_text_inside_others_has_no_space_in_front(tokenizers):
    tokenizer = tokenizers[""]
    assert tokenizer.encode("hi", bos=False) == [7251]
    assert tokenizer.encode("hi", bos=False, first=False) == [2918]
    assert tokenizer.encode(" hi", bos=False, first=False) == [7251]


def test_stream_keeps_a_space_that_no_one_put_there(tmp_path):
    """Of a vocabulary that puts no space in front, decode() takes none away, nor does the stream."""
    keys = some_pieces(PIECES) | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = llama2.Tokenizer.from_gguf(write_gguf(tmp_path / "x.gguf", keys))
    ids = tokenizer.encode(" hi", bos=False)
    decoder = llama2.StreamDecoder(tokenizer)
    assert "".join(map(decoder.decode, ids)) == tokenizer.decode(ids) == " hi"


DECODER = added_tokens_decoder(CHATML_TAGS)
SPECIAL = {"eos_token": "<|im_end|>", "pad_token": {"content": "</s>"}}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": DECODER}},
        {
            "added_tokens": {"<|im_start|>": 32001, "<|im_end|>": 32000},
            "special_tokens_map": SPECIAL,
        },
        {
            "special_tokens_map": {"eos_token": {"content": "<|im_end|>"}},
            "added_tokens": {"<|im_start|>": 32001, "<s>": 1, "<|im_end|>": 32000},
        },
        {"tokenizer_config": {"additional_special_tokens": ["<|im_end|>", {"content": "<s>"}]}},
        {"special_tokens_map": {"bos_token": None, "additional_special_tokens": ["<|im_end|>"]}},
        {"tokenizer_config": {"added_tokens_decoder": DECODER, "pad_token": "<|im_end|>"}},
    ],
)
def test_added_tokens(tmp_path, real, files):
    """Control tokens are silent and are never typed, user-defined ones are text."""
    file, config = directory(tmp_path, real, 32002, **files)
    tokenizer = llama2.Tokenizer.from_file(file, config)
    assert tokenizer.special_ids["<|im_end|>"] == 32000 and tokenizer.types[32000] == 3
    assert tokenizer.decode([7251, 32000, 289]) == "hi b"
    assert 32000 not in tokenizer.encode("hi<|im_end|>")
    assert tokenizer.encode("hi b") == [1, 7251, 289]
    ids, text = [7251], "hi"
    if "im_start" in str(files):
        assert tokenizer.special_ids["<|im_start|>"] == 32001 and tokenizer.types[32001] == 4
        assert tokenizer.encode("hi<|im_start|>", bos=False) == [7251, 32001]
        ids, text = [7251, 32001], "hi<|im_start|>"
    decoder = llama2.StreamDecoder(tokenizer)
    assert "".join(map(decoder.decode, [*ids, 32000])) == tokenizer.decode(ids) == text


def test_added_tokens_with_gaps_and_beyond_the_model(tmp_path, real):
    """A gap is filled; a padding token that the model has no row for, as Llama 2's, is left out."""
    tokens = {"<a>": 32002, "<pad>": 32004, "b c": 32003}
    file, config = directory(tmp_path, real, 32004, added_tokens=tokens)
    tokenizer = llama2.Tokenizer.from_file(file, config)
    assert tokenizer.vocab_size == 32004 and "<pad>" not in tokenizer.special_ids
    assert tokenizer.types[32000:] == [5, 5, 4, 4]
    assert tokenizer.decode([289, 32002, 32003]) == "b<a>b c"
    assert tokenizer.encode("hib c", bos=False) == [7251, 32003]


def test_what_ends_a_text_is_a_control_token(tmp_path, real):
    """Even where a file says that the token is not special."""
    files = {
        "tokenizer_config": {"added_tokens_decoder": added_tokens_decoder({"<|im_end|>": False})}
    }
    file, config = directory(tmp_path, real, 32001, **files)
    assert llama2.Tokenizer.from_file(file, config).types[32000] == 4
    config = llama2.Config(vocab_size=32001, stop_token_ids=(32000,))
    assert llama2.Tokenizer.from_file(file, config).types[32000] == 3


@pytest.mark.parametrize(
    "files, said",
    [
        ({"added_tokens": {"<a>": -1}}, "<a>.*-1"),
        ({"added_tokens": {"<a>": 1.5}}, "1.5"),
        ({"added_tokens": {"<a>": True}}, "True"),
        ({"added_tokens": {"<a>": None}}, "None"),
        ({"added_tokens": {"<a>": [32000]}}, "32000"),
        ({"added_tokens": {"": 32000}}, "not a token"),
        ({"added_tokens": {"<a>": 7251}}, r"7251.*hi.*<a>"),
        ({"added_tokens": {"\0": 32000}}, "not a token"),
        ({"added_tokens": {"hi": 32000}}, "duplicates"),
        ({"added_tokens": {"x" * 10**6: 32000}}, "too long"),
        ({"added_tokens": ["<a>"]}, "JSON"),
        ({"tokenizer_config": {"added_tokens_decoder": ["<a>"]}}, "expected dict"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "<a>"}}}}, "'x'"),
        ({"tokenizer_config": {"added_tokens_decoder": {"9" * 5000: {"content": "<a>"}}}}, "999"),
        ({"tokenizer_config": {"added_tokens_decoder": {"32000": {"content": 5}}}}, "not a token"),
        ({"tokenizer_config": {"added_tokens_decoder": {"32000": 5}}}, "not a token"),
        ({"tokenizer_config": {"added_tokens_decoder": {"32000": {}}}}, "not a token"),
        ({"special_tokens_map": {"eos_token": 5}}, "not a token"),
        ({"special_tokens_map": {"additional_special_tokens": [[]]}}, "not a token"),
        (
            {"tokenizer_config": {"added_tokens_decoder": added_tokens_decoder({"<s>": True})}},
            "duplicates",
        ),
    ],
)
def test_hostile_added_tokens(tmp_path, real, files, said):
    file, config = directory(tmp_path, real, 32002, **files)
    with pytest.raises(ValueError, match=said) as caught:
        llama2.Tokenizer.from_file(file, config)
    assert str(tmp_path) in str(caught.value) and len(str(caught.value)) < 500


def test_added_tokens_that_are_odd_but_harmless(tmp_path, real):
    """Lone surrogates, ids that no memory could hold: such a token is left out or made well-formed."""
    tokens = {"\ud800": 32000, "<far>": 999999999, "<s>": 1}
    file, config = directory(tmp_path, real, 32002, added_tokens=tokens)
    tokenizer = llama2.Tokenizer.from_file(file, config)
    assert tokenizer.vocab_size == 32001 and set(tokenizer.decode([32000])) == {"\ufffd"}


@pytest.mark.parametrize("content", [b"", b"\0", b"IQ== 0\n", "cut off", "changed"])
def test_damaged_tokenizer_model_is_named(tmp_path, real, content, capfd):
    data = real.read_bytes()
    data = {"cut off": data[:-5], "changed": data[:5000] + b"\xff" * 9 + data[5009:]}.get(
        content, content
    )
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(ValueError, match="not a SentencePiece model|tiktoken|empty") as caught:
        llama2.Tokenizer.from_file(tmp_path / "tokenizer.model")
    assert str(tmp_path / "tokenizer.model") in str(caught.value)
    assert "\n" not in str(caught.value) and capfd.readouterr().err == ""


# --------------------------------------------------------------------------------------------------
# Models

LETTERS = " ".join(f"{259 + i}:{piece}" for i, piece in enumerate(["\u2581", *"abcdefhiu", "hi"]))
SIZE = 272  # the small vocabulary: bytes, LETTERS, two tokens to be added
TINY = llama2.Config(32, 64, 2, 4, 2, SIZE, 64)
WEIGHTS = make_weights(TINY)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A small tokenizer.model."""
    path = tmp_path_factory.mktemp("small")
    keys = some_pieces(LETTERS, SIZE - 2)
    tokenizer = llama2.Tokenizer.from_gguf(write_gguf(path / "vocabulary.gguf", keys))
    (path / "tokenizer.model").write_bytes(tokenizer.sp.serialized_model_proto())
    return path / "tokenizer.model"


def hf_directory(path, small, change=None, generation=None, **files):
    """A Hugging Face directory of a small model, its config.json changed."""
    write_hf(path, TINY, WEIGHTS, ".bin")
    settings = json.loads((path / "config.json").read_text()) | (change or {})
    files |= {"generation_config": generation} if generation else {}
    directory(path, small, config=settings, **files)
    return path


CHATML = {"added_tokens_decoder": added_tokens_decoder(CHATML_TAGS, SIZE - 2)}
CHATML |= {"chat_template": TEMPLATES["chatml"]}


@pytest.mark.parametrize(
    "eos, generation, first, others",
    [
        (5, None, 5, ()),
        ([5, 6], None, 5, (6,)),
        (5, {"eos_token_id": [7, 5]}, 5, (7,)),
        (None, {"eos_token_id": 7}, 7, ()),
        (None, {"eos_token_id": None}, 2, ()),
        ([], None, 2, ()),
    ],
)
def test_several_eos_ids(tmp_path, small, eos, generation, first, others):
    path = hf_directory(tmp_path / "hf", small, {"eos_token_id": eos}, generation)
    config = llama2.open_checkpoint(path).config
    assert (config.eos_token_id, config.stop_token_ids) == (first, others)


@pytest.mark.parametrize("eos", ["2", -1, SIZE, 2**70, True, 2.0, [2, None, "x"], [[2]], {"a": 1}])
def test_eos_ids_are_checked(tmp_path, small, eos):
    path = hf_directory(tmp_path / "hf", small, generation={"eos_token_id": eos})
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id.*272"):
        llama2.open_checkpoint(path)


@pytest.mark.parametrize(
    "template, wanted",
    [
        ("text", "text"),
        (None, ""),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], ""),
        ([5], ""),
        ("\ud800", "\ufffd" * 3),
        (5, None),
        ({"a": "b"}, None),
        ([{"name": "default", "template": 5}], None),
    ],
)
def test_chat_template_of_a_directory(tmp_path, small, template, wanted):
    path = hf_directory(tmp_path / "hf", small, tokenizer_config={"chat_template": template})
    if wanted is None:
        with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template is"):
            llama2.open_checkpoint(path)
    else:
        assert llama2.open_checkpoint(path).chat_template == wanted
        (path / "chat_template.jinja").write_text("of its own")
        assert llama2.open_checkpoint(path).chat_template == "of its own"


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_saved_models_keep_tokens_ends_and_template(tmp_path, small, form):
    """A ChatML model from a directory, saved once, and what was saved, saved again."""
    change = {"eos_token_id": [SIZE - 2, 2, 7]}
    path = hf_directory(tmp_path / "hf", small, change, tokenizer_config=CHATML)
    first = llama2.open_checkpoint(path)
    for i in range(1 if form == "hf" else 2):
        llama2.save_gguf(llama2.open_checkpoint(path), tmp_path / f"{i}.gguf")
        path = tmp_path / f"{i}.gguf"
    saved = llama2.open_checkpoint(path)
    assert saved.chat_template == TEMPLATES["chatml"]
    assert saved.config.eos_token_id == SIZE - 2 and saved.config.stop_token_ids == (2, 7)
    old, new = first.tokenizer(), saved.tokenizer()
    assert new.vocab_size == SIZE and new.types[SIZE - 1] == 4
    assert new.types == old.types
    pieces = [*range(SIZE)]
    assert new.sp.id_to_piece(pieces) == old.sp.id_to_piece(pieces)
    assert new.sp.get_score(pieces) == old.sp.get_score(pieces)
    for text in ("u:hi", "s:abc u:hi a:fed u:a"):
        wanted = llama2.encode_chat(old, dialogue(text), "chatml")
        assert llama2.encode_chat(new, dialogue(text), "chatml") == wanted
        assert SIZE - 1 in wanted and SIZE - 2 in wanted
    for text in ("hi<|im_start|>hi", "<|im_end|>", "a b"):
        assert new.encode(text) == old.encode(text)


def test_user_defined_pieces_with_spaces(tmp_path):
    """Converters write their spaces as such; SentencePiece wants its own sign, saving does not."""
    keys = some_pieces(LETTERS, SIZE - 2, added=[("a  b", 4), ("<x>", 3)])
    tokenizer = llama2.Tokenizer.from_gguf(write_gguf(tmp_path / "x.gguf", keys))
    assert tokenizer.encode("hia  bhi", bos=False)[-2:] == [SIZE - 2, 269]
    assert tokenizer.decode([269, SIZE - 2]) == "hia  b"
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.sp.serialized_model_proto())
    again = llama2.Tokenizer.from_file(tmp_path / "tokenizer.model").vocabulary(SIZE)
    for name in ("tokens", "token_type"):
        assert again[f"tokenizer.ggml.{name}"] == keys[f"tokenizer.ggml.{name}"]


@pytest.mark.parametrize("key", ["eot", "eom"])
def test_gguf_ends_of_turns(tmp_path, small, key):
    """They stop like EOS and are control tokens, whatever type the file gives them."""
    path = hf_directory(tmp_path / "hf", small, tokenizer_config=CHATML)
    checkpoint = llama2.open_checkpoint(path)
    settings = checkpoint.tokenizer().vocabulary(SIZE) | {
        f"tokenizer.ggml.{key}_token_id": SIZE - 1
    }
    tokenizer = llama2.Tokenizer.from_gguf(write_gguf(tmp_path / "x.gguf", settings))
    assert tokenizer.types[SIZE - 1] == 3 and SIZE - 1 not in tokenizer.encode("a<|im_start|>")
    assert tokenizer.keys[f"tokenizer.ggml.{key}_token_id"] == SIZE - 1
    for bad in (SIZE, 2**32 - 1):
        settings |= {f"tokenizer.ggml.{key}_token_id": bad}
        with pytest.raises(ValueError, match=f"{bad} of {SIZE} tokens"):
            llama2.Tokenizer.from_gguf(write_gguf(tmp_path / "x.gguf", settings))


@pytest.mark.parametrize(
    "window, context",
    [
        (None, 64),
        ("absent", 64),
        (64, 64),
        (4096, 64),
        (40, 40),
    ],
)
def test_mistral(tmp_path, small, window, context):
    """Within the window it is Llama, as transformers' MistralForCausalLM says."""
    change = {"model_type": "mistral"} | ({} if window == "absent" else {"sliding_window": window})
    path = hf_directory(tmp_path / "hf", small, change)
    checkpoint = llama2.open_checkpoint(path)
    assert checkpoint.config.max_position_embeddings == context
    assert checkpoint.allow_context(context).config == checkpoint.config
    with pytest.raises(
        ValueError, match=rf"--context {context + 1}.*1 to {context}, its context or window"
    ):
        checkpoint.allow_context(context + 1)
    model, _ = llama2.load(path)
    tokens = torch.randint(SIZE, (1, context), generator=torch.manual_seed(0))
    transformers = pytest.importorskip("transformers")
    window = None if window == "absent" else window
    settings = json.loads((path / "config.json").read_text()) | {"sliding_window": window}
    reference = transformers.MistralForCausalLM(transformers.MistralConfig(**settings)).eval()
    reference.load_state_dict(hf_state(TINY, WEIGHTS))
    with torch.no_grad():
        assert torch.allclose(model(tokens), reference(tokens).logits, atol=1e-4)


@pytest.mark.parametrize("window", [0, -1, "4096", 1.5, True, [4096]])
def test_mistral_windows_are_checked(tmp_path, small, window):
    change = {"model_type": "mistral", "sliding_window": window}
    with pytest.raises(ValueError, match=r"(sliding_window|max_position_embeddings) is"):
        llama2.open_checkpoint(hf_directory(tmp_path / "hf", small, change))


@pytest.mark.parametrize("model_type", ["falcon", "mixtral", 5, ["llama"], {"a": 1}])
def test_other_model_types_are_refused(tmp_path, small, model_type):
    with pytest.raises(ValueError, match="model_type is .*; expected llama or mistral"):
        llama2.open_checkpoint(hf_directory(tmp_path / "hf", small, {"model_type": model_type}))


def test_code_llama_in_metas_form(tmp_path, small):
    """params.json tells theta but no context: 4096, and more for who asks for it."""
    path = tmp_path / "meta"
    write_meta(path, TINY, WEIGHTS)
    shutil.copy(small, path)
    params = json.loads((path / "params.json").read_text()) | {"rope_theta": 1e6}
    (path / "params.json").write_text(json.dumps(params))
    checkpoint = llama2.open_checkpoint(path)
    assert checkpoint.config.rope_theta == 1e6
    assert checkpoint.config.max_position_embeddings == 4096
    for bad in (0, -5):
        with pytest.raises(ValueError, match=f"--context {bad}; expected 1 to 4096, or more"):
            checkpoint.allow_context(bad)
    assert checkpoint.allow_context(100).config.max_position_embeddings == 4096
    larger = checkpoint.allow_context(5000)
    assert larger.config.max_position_embeddings == 5000
    model = llama2.build_model(larger)
    cache = llama2.Cache(model.config)
    with torch.no_grad():
        for _ in range(5):
            logits = model(torch.full((1, 1000), 260), cache)
    assert cache.pos == 5000 and logits.isfinite().all()


# --------------------------------------------------------------------------------------------------
# Command line


@pytest.mark.parametrize(
    "template, arguments, used",
    [
        (TEMPLATES["zephyr"], (), "zephyr"),
        (TEMPLATES["chatml"], (), "chatml"),
        (TEMPLATES["zephyr"], ("--chat-format", "vicuna"), "vicuna"),
        ("unheard of", ("--chat-format", "mistral"), "mistral"),
        ("", (), "llama-2"),
        ("", ("--chat-format", "zephyr"), "zephyr"),
        ("unheard of", (), None),
    ],
)
def test_chat_in_the_models_format(cli, tmp_path, small, monkeypatch, template, arguments, used):
    """As its template says, or the option; one that is unknown is refused before weights are read."""
    settings = CHATML | {"chat_template": template}
    path = hf_directory(
        tmp_path / "hf", small, {"max_position_embeddings": 512}, tokenizer_config=settings
    )
    fed, encode = [], llama2.encode_chat

    def spy(tokenizer, messages, chat_format="llama-2"):
        fed.append((chat_format, [message["content"] for message in messages]))
        return encode(tokenizer, messages, chat_format)

    monkeypatch.setattr(llama2, "encode_chat", spy)
    if used is None:
        monkeypatch.setattr(llama2, "build_model", lambda *args: pytest.fail("read the weights"))
    options = ("--chat", "--max-new-tokens", 3, *arguments)
    status, out, err = cli(*options, model=path, stdin=b"hi\nabc\n")
    if used is None:
        assert status == 2 and err.count("\n") == 1
        assert "'unheard of'" in err and "--chat-format" in err and "chatml" in err
        return
    assert status == 0 and out.count("\n") >= 2
    assert {name for name, _ in fed} == {used} and fed[-1][1][::2] == ["hi", "abc"]
    assert ("no chat template" in err) == (not template and not arguments)
    status, out, _ = cli("--info", model=path)
    assert status == 0 and re.search(
        {"": "chat format +llama-2", "unheard of": "chat format .*'unheard of'"}.get(
            template, f"chat format +{llama2.describe_chat_format(template)}"
        ),
        out,
    )


def test_chat_ends_where_the_format_says(cli, tmp_path, small, monkeypatch):
    """Not only at EOS: an answer ends at <|im_end|>, and where the model speaks for the user."""
    path = hf_directory(
        tmp_path / "hf", small, {"max_position_embeddings": 512}, tokenizer_config=CHATML
    )
    forward, script = llama2.Llama.forward, [269, SIZE - 2, 269, SIZE - 1, 269]

    def scripted(model, tokens, *args, **options):
        logits = forward(model, tokens, *args, **options)
        logits.zero_()[..., script.pop(0) if script else 2] = 1.0
        return logits

    monkeypatch.setattr(llama2.Llama, "forward", scripted)
    status, out, err = cli("--chat", model=path, stdin=b"a\nb\n")
    assert (status, out, script) == (0, "hi\nhi\n", [269])
    assert f"stop token {SIZE - 1}" in err


def test_context_beyond_the_window(cli, tmp_path, small):
    change = {"model_type": "mistral", "sliding_window": 40}
    path = hf_directory(tmp_path / "hf", small, change)
    status, _, err = cli("--context", 41, "--prompt", "a", model=path)
    assert status == 2 and "--context 41; expected 1 to 40, its context or window" in err
    assert cli("--context", 40, "--prompt", "a", "--max-new-tokens", 2, model=path)[0] == 0
