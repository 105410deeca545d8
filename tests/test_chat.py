"""Chats by the model's own template: transformers' ids, what ends an answer, what no message can do.

The templates are short ones of our own with the traits of published ones; their texts are frozen,
and compared with transformers where it is installed. PUBLISHED_TOKENIZERS names a folder
of folders with a tokenizer.json and a tokenizer_config.json, which are then compared, too.
"""

import collections
import datetime
import functools
import itertools
import json
import os
import random
import re
import signal
import time
import timeit
import types
from pathlib import Path

import jinja2
import pytest

import llama2
from test_llama2 import added_tokens_decoder, cases, dialogue, raises, random_texts, write_files

tokenizers = pytest.importorskip("tokenizers")

# --------------------------------------------------------------------------------------------------
# Templates

# Name: what ends an answer besides EOS; the template; its text of "u:hi~ a:yes u:so".
FAMILIES = r"""
## zephyr: </s>
{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
->
<|user|>\nhi </s>\n<|assistant|>\nyes</s>\n<|user|>\nso</s>\n<|assistant|>\n

## hermes 2 pro (BOS first): <|im_end|>
{{ bos_token }}{% for m in messages %}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
->
<s><|im_start|>user\nhi <|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n
<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n

## smollm2 (a default system message): <|im_end|>
{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}
{% for m in messages %}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
->
<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi <|im_end|>\n
<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n

## llama 3: <|eot_id|>
{{ bos_token }}{% for m in messages %}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
->
<s><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>
<|start_header_id|>assistant<|end_header_id|>\n\nyes<|eot_id|>
<|start_header_id|>user<|end_header_id|>\n\nso<|eot_id|>
<|start_header_id|>assistant<|end_header_id|>\n\n

## llama 3.1 (a date of its own): <|im_end|>
{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}
{{ bos_token + date_string + tools | default('', true) | string + '\n' }}{% for m in messages %}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
->
<s>26 Jul 2024\n<|im_start|>user\nhi <|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n
<|im_start|>user\nso<|im_end|>\n

## llama 3.2 (today's): |
{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content ~ '|' }}{% endfor %}
->
YEARhi |yes|so|

## mistral 0.1: </s>
{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}
{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content + eos_token + ' ' }}{% endif %}
{% endfor %}
->
<s>[INST] hi  [/INST]yes</s> [INST] so [/INST]

## mistral nemo (the system message in the last question): </s>
{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{% set messages = messages[1:] %}{% endif %}
{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}
{% if loop.last and system is defined %}{{ '[INST]' + system + '\n\n' + m.content + '[/INST]' }}
{%- else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}{% else %}
{{ m.content | trim + eos_token }}{% endif %}{% endfor %}
->
<s>[INST]hi [/INST]yes</s>[INST]so[/INST]

## llama 2: </s>
{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{% set messages = messages[1:] %}{% endif %}
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}
{{ bos_token + '[INST] ' + ('<<SYS>>\n' + system + '\n<</SYS>>\n\n' if loop.first and system else '')
   + m.content.strip() + ' [/INST]' }}{% else %}
{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}
->
<s>[INST] hi [/INST] yes </s><s>[INST] so [/INST]

## tulu (EOS behind answers alone): </s>
{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}
{%- if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
->
<|user|>\nhi \n<|assistant|>\nyes</s>\n<|user|>\nso\n<|assistant|>\n

## vicuna: </s>
{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{% set messages = messages[1:] %}{% endif %}
{{ bos_token + (system or 'A chat.') + ' ' }}{% for m in messages %}
{{ (m.role | upper) ~ ': ' ~ m.content ~ (' ' if m.role == 'user' else eos_token) }}{% endfor %}
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}
->
<s>A chat. USER: hi  ASSISTANT: yes</s>USER: so ASSISTANT:

## deepseek r1 (a namespace; thoughts are left out): </s>
{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}
{% set ns.system = ns.system ~ m.content %}{% endif %}{% endfor %}{{ bos_token ~ ns.system }}
{%- for m in messages %}{% if m.role == 'user' %}{{ '<\uff5cUser\uff5c>' + m.content }}
{%- elif m.role == 'assistant' %}
{{ '<\uff5cAssistant\uff5c>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\n' }}{% endif %}
->
<s><\uff5cUser\uff5c>hi <\uff5cAssistant\uff5c>yes</s>
<\uff5cUser\uff5c>so<\uff5cAssistant\uff5c><think>\n

## deepseek coder (ends that are no special tokens): <|EOT|>
{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + '\n<|EOT|>\n' }}
{%- else %}{{ '### ' + m.role + ':\n' + m.content + '\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '### Response:' }}{% endif %}
->
### user:\nhi \nyes\n<|EOT|>\n### user:\nso\n### Response:

## functionary (loopcontrols): <|eot_id|>
{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{% if loop.index > 9 %}{% break %}{% endif %}{{ m.content + '<|eot_id|>' }}{% endfor %}
->
hi <|eot_id|>yes<|eot_id|>so<|eot_id|>

## smollm3 (transformers' tag, indented): <|im_end|>
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
    {%- generation -%}
    {{ m.content + '<|im_end|>' }}
    {%- endgeneration %}
    {% else %}
    {{- m.role + m.content }}
    {%- endif %}
{%- endfor %}
->
userhi yes<|im_end|>userso

## hermes 3 (tools): <|im_end|>
{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}
{{ '<|im_start|>' + m.role + '\n' + (m.name or '') + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function | tojson }}{% endfor %}
{{ '<|im_end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
->
<|im_start|>user\nhi <|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n
<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n
"""
FAMILIES = {
    name: (template, text.replace("\n", "").encode().decode("unicode-escape"), end)
    for name, end, template, text in re.findall(
        r"(?s)## ([\w. ]+\w).*?: (\S+)\n(.+?)\n->\n(.+?)\n(?:\n|$)", FAMILIES
    )
}
# "<|im" begins others: the longest one counts. ";258;" is in a placeholder of encode_chat().
CONTROL = "<s> </s> <|im_start|> <|im_end|> <|eot_id|> <|start_header_id|> <|end_header_id|>"
CONTROL = f"{CONTROL} <|im ;258; [INST] [/INST] <\uff5cUser\uff5c> <\uff5cAssistant\uff5c>".split()
TAGS = dict.fromkeys(CONTROL, True) | {"<tool_call>": False}
PLAIN = json.loads("""{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
"use_regex": false}""")
SETTINGS = json.loads("""{"bos_token": "<s>", "eos_token": "</s>",
"tokenizer_class": "PreTrainedTokenizerFast"}""")


def folder(path, template, tags=TAGS):
    """A folder with a vocabulary of bytes and tags, and a chat template."""
    decoder = added_tokens_decoder(tags, 256)
    content = {
        "added_tokens": [{"id": int(i), **token} for i, token in decoder.items()],
        "pre_tokenizer": PLAIN,
        "decoder": PLAIN,
        "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate(llama2.BYTES)}, "merges": []},
    }
    settings = SETTINGS | {"added_tokens_decoder": decoder, "chat_template": template}
    return write_files(path, {"tokenizer.json": content, "tokenizer_config.json": settings})


def test_a_tokenizer_json_alone_names_no_ids(tmp_path):
    """Its added tokens may have any numbers."""
    texts = ("<pad>", "<unk>", "<s>", "</s>")
    added = [llama2.FLAGS | {"id": i, "content": t, "special": True} for i, t in enumerate(texts)]
    model = {"type": "BPE", "vocab": {"a": len(texts)}, "merges": []}
    content = {"model": model, "decoder": PLAIN, "added_tokens": added}
    write_files(tmp_path, {"tokenizer.json": content})
    tokenizer = load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)


def load(path):
    """The tokenizer of a folder."""
    return llama2.Tokenizer.from_file(path / "tokenizer.json")


def load_theirs(path):
    """transformers' tokenizer of a folder."""
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A tokenizer of a model that brings no template."""
    return load(folder(tmp_path_factory.mktemp("bare"), None))


def text_of(tokenizer, ids):
    """What ids say, control tokens as their texts."""
    texts = (tokenizer.token_bytes(i) or tokenizer.pieces[i].encode() for i in ids)
    return b"".join(texts).decode()


def written(tokenizer, messages, template=None, **options):
    """What the ids of a chat say."""
    return text_of(tokenizer, llama2.encode_chat(tokenizer, messages, template, **options))


WORDS = "hi|b |\n| c|{{ x }}|\u65e5|'|\"|\U0001f999||<think>x</think>"


def random_dialogue(chance):
    def said():
        return "".join(chance.choices(WORDS.split("|"), k=chance.randrange(8)))

    roles = ["system"] * chance.randrange(2) + ["user", "assistant"] * 3
    return [{"role": role, "content": said()} for role in roles[: chance.randrange(1, 6)]]


TOOL = json.loads(
    '{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}'
)
WITH_TOOLS = json.loads("""[{"role": "user", "content": "a", "name": "Ann"},
{"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments":
{"x": "\u65e5", "y": [1, null]}}}]}, {"role": "tool", "content": "{}"}]""")
ORDERS = """u:hi~ a:yes u:so|u:hi|s:S u:hi|s:~S~ u:a a:b~|u:a u:b|a:hello u:hi|s:A s:B u:c
|u:a s:b|s:S|a:b"""


def assert_as_transformers(ours, theirs, messages, final, **variables):
    """The ids of a chat, or of one whose final message is to be continued; or both refuse."""
    variables["continue_final_message"] = final
    try:
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=not final, return_dict=False, **variables
        )
    except Exception:  # noqa: BLE001
        with pytest.raises(ValueError):
            llama2.encode_chat(ours, messages, **variables)
    else:
        assert llama2.encode_chat(ours, messages, **variables) == expected, (messages, final)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path, family):
    """Texts and ends are frozen; ids of any order of roles, and refusals, are transformers'."""
    template, text, end = FAMILIES[family]
    ours = load(folder(tmp_path, template))
    text = text.replace("YEAR", f"{datetime.datetime.now():%Y}")
    assert written(ours, dialogue("u:hi~ a:yes u:so")) == text
    stops = llama2.chat_stops(ours)
    assert [ours.pieces[i] for i in stops.ids] + stops.texts == [end]
    theirs = load_theirs(tmp_path)
    chance = random.Random(0)
    dialogues = [
        *map(dialogue, ORDERS.split("|")),
        WITH_TOOLS,
        *(random_dialogue(chance) for _ in range(40)),
    ]
    for messages in dialogues:
        for final in (False, "</think>" not in messages[-1]["content"]):
            assert_as_transformers(ours, theirs, messages, final, tools=[TOOL], date_string="3 Mar")


ENDINGS = r"""
{{ m.role ~ m.content.upper() }}<|im_end|> | <|im_end|>
{{ m.content.replace('\u00a7', '').replace('p', '') }}<|im_end|>\n | <|im_end|>
{{ m.content[:4000] }}[/A]<|im_end|> | <|im_end|>
{% for t in tools %}{% endfor %}{{ m.content }}<|im_end|> | <|im_end|>
{{ m.content|tojson }}<|im_end|>\n{{ bos_token }} | <|im_end|>
{{ m.content[:2] }}</s><|im_end|> | </s>
{{ m.content.title() }}\n### End\n | ### End
{{ m.role ~ m.content }} | none
<|im_start|>{{ m.role }}<|im_end|> | none
"""


@cases("body, end", ENDINGS)
def test_ends_behind_answers_that_a_template_changes(bare, body, end):
    """A token or else a text, and nothing where there is neither, or no answer."""
    template = f"{{% for m in messages %}}{body}{{% endfor %}}".replace(r"\n", "\n")
    stops = llama2.chat_stops(bare, template)
    assert [bare.pieces[i] for i in stops.ids] + stops.texts == [end] * (end != "none")


def test_one_function_says_what_ends_a_text(bare):
    """The model's files, its tokenizer and, in a chat, the template."""
    size = bare.vocab_size
    config = llama2.Config(8, 8, 1, 1, 1, 8, size, 64, eos_token_id=3, stop_token_ids=(5,))
    model = llama2.Llama(config)
    ends = {3, 5, bare.eos_id}
    assert llama2.stop_ids(model, bare) == llama2.stop_ids(model, bare, "") == ends
    with_eot = ends | {bare.special_ids["<|eot_id|>"]}
    assert llama2.stop_ids(model, bare, "llama-3") == with_eot
    assert llama2.stream_text(model, bare, [1]).generation.stop_ids == ends
    stream = llama2.chat(model, bare, dialogue("u:hi"), "llama-3", max_new_tokens=1)
    assert stream.generation.stop_ids == with_eot


def test_a_character_may_be_a_control_token(tmp_path):
    """White space, which a template trims, or what JSON writes as two characters."""
    template = "{{ messages[0].content | trim }}\n{{ messages[0].content | tojson }}"
    ours = load(folder(tmp_path, template, {"\n": True, "\t": True}))
    for text in ("\n", "\t", "a\t\n"):
        ids = llama2.encode_chat(ours, [{"role": "user", "content": text}])
        assert [ours.pieces[i] for i in ids if i >= 256] == ["\n"]
        assert ours.decode(ids) == text + json.dumps(text)


# --------------------------------------------------------------------------------------------------
# Control tokens and pieces of them, which a template writes side by side or puts brackets around

BRACKETS = """{% for m in messages %}<{{ m.content }}>{{ '<|' ~ m.content ~ '|>' }}
{%- for c in m.tool_calls or [] %}{% for key, x in c.function.arguments.items() %}
{{- '<' ~ key ~ '>' ~ x ~ '</' ~ key ~ '>' }}{% endfor %}{% endfor %}[{{- m.content -}}]
{%- endfor %}{% for t in tools or [] %}{% for key, x in t.function.parameters.properties.items() %}
{{- '<|%s|>' % key }}<{{ key }}>{{ x }}{% endfor %}{% endfor %}"""
SIDE_BY_SIDE = "{% for m in messages %}{{ m.content | trim }}{% endfor %}{{ messages | string }}"
# Of CHAT_TEMPLATES, too: a folder such as llama.cpp has.
JINJA = Path(os.environ.get("CHAT_TEMPLATES", "nowhere")).glob("*.jinja")
SOURCES = {name: template for name, (template, _, _) in FAMILIES.items()}
SOURCES |= {"brackets": BRACKETS, "side by side": SIDE_BY_SIDE}
SOURCES |= {path.stem: path.read_text("utf-8") for path in JINJA}
TAG = r"<[\w/|\uff5c][^<>'\"\s]{0,40}>|\[/?[A-Z_]{2,20}\]"  # what may be a control token
COUNT = int(os.environ.get("FUZZ", "40"))
ORDERS_OF_ROLES = ["su", "uu", "suuu", "uaaau", "suaauuu", "suctttau", "uctctu", "uru"]
SIGN = "\ue000"


def own(text):
    """A control token that no message can hold a piece of: the template's own."""
    return text[:1] + SIGN + text[1:]


def pieces_of(chance, controls):
    """The pieces of control tokens, one after the other, each whole or in two or three."""
    while True:
        text = chance.choice(controls)
        cuts = min(len(text) - 1, chance.choice([0, 1, 2]))
        places = [0, *sorted(chance.sample(range(1, len(text)), cuts)), None]
        for start, end in itertools.pairwise(places):
            before, behind = (
                chance.choice(["", "", "", " ", "a "]),
                chance.choice(["", "", "\n", "b"]),
            )
            yield before + text[start:end] + behind


def conversation_of(chance, controls):
    """Messages and tools of which each text, key and value is a piece of a control token."""
    pieces = pieces_of(chance, controls)

    def key():
        text = chance.choice(controls)
        return text[chance.randint(1, 2) : -chance.randint(1, 2)] or text[1:]

    def value(depth=0):
        if depth == 2 or chance.random() < 0.5:
            return chance.choice([key(), next(pieces)])
        items = [value(depth + 1) for _ in range(2)]
        return chance.choice([items, {key(): item for item in items}])

    messages = []
    for letter in chance.choice(ORDERS_OF_ROLES):
        role = {"s": "system", "u": "user", "t": "tool"}.get(letter, "assistant")
        message = {"role": role, "content": next(pieces)}
        if letter == "c":
            calls = called({key(): value(), next(pieces): value()}, {key(): value()})
            message |= {"content": chance.choice(["", next(pieces)]), "tool_calls": calls}
        elif letter == "t":
            message |= {"tool_call_id": "callid000", "name": "clock"}
        elif letter == "r":
            message["reasoning_content"] = next(pieces)
        messages.append(message)
    kinds = ["string", "object", key()]
    fields = {k: {"type": chance.choice(kinds), key(): value()} for k in (key(), next(pieces))}
    parameters = {"type": "object", key(): value(), "required": [key()], "properties": fields}
    function = {"name": "clock", "description": next(pieces), "parameters": parameters}
    return messages, chance.choice([None, [{"type": "function", "function": function, key(): "x"}]])


def called(*arguments):
    return [
        {"id": "callid000", "type": "function", "function": {"name": "clock", "arguments": a}}
        for a in arguments
    ]


@pytest.mark.parametrize("name", SOURCES)
def test_no_pieces_become_a_control_token(tmp_path, name):
    """The vocabulary has each token twice: as the template writes it, and in messages and variables."""
    source = SOURCES[name].replace(r"\uff5c", "\uff5c")
    controls = sorted({*re.findall(TAG, source), *CONTROL}, key=len, reverse=True)
    for text in controls:
        source = source.replace(text, own(text))
    ours = load(folder(tmp_path, source, dict.fromkeys([*controls, *map(own, controls)], True)))
    ours.bos_id, ours.eos_id = (ours.special_ids[own(text)] for text in ("<s>", "</s>"))
    names = {*re.findall(r"\w+", source), *llama2.ROLES}  # which a template may compare with
    chance = random.Random(name)
    accepted = 0
    for _ in range(COUNT):
        messages, tools = conversation_of(chance, controls)
        try:
            date = chance.choice(controls)
            ids = llama2.encode_chat(ours, messages, tools=tools, documents=None, date_string=date)
        except ValueError:  # the template takes other roles, or other tools
            continue
        accepted += 1
        made = [ours.pieces[i] for i in ids if ours.types[i] == llama2.CONTROL]
        made = [text for text in made if SIGN not in text and text.strip("</[|]>") not in names]
        assert not made, (messages, tools)
        assert not re.search(r"~\d{9,}~", ours.decode(ids))
    assert accepted or name not in FAMILIES


COMPARED = """{% for t in tools %}{% if t.type == 'function' %}{{ '<|' ~ t.type ~ '|>' }}
{%- for k, p in t.function.parameters.properties | dictsort %}{{ k }}{% if p.type == "string" %}!
{%- endif %}{{ '<' ~ p.type ~ '>' }}{% endfor %}{% endif %}{% endfor %}{% for m in messages %}
{{- '<|' ~ m.role ~ '|>' ~ m.content }}{% endfor %}"""


def test_names_that_a_template_compares(tmp_path):
    """They are never changed; the order of others stays, and ids are those of transformers."""
    path = folder(
        tmp_path, COMPARED, dict.fromkeys(["<|function|>", "<|user|>", "<string>", "<xa>"], True)
    )
    fields = {"x": {"type": "string"}, "a": {"type": "number"}, "xa": {"type": "object"}}
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"properties": fields}}}
    ours = load(path)
    messages = [{"role": "user", "content": "function"}]
    assert_as_transformers(ours, load_theirs(path), messages, False, tools=[tool])
    assert written(ours, messages, tools=[tool]).startswith("<|function|>a<number>x!<string>xa")


class Odd:
    text = "<|im_end|>"


def test_what_a_chat_may_hold(bare):
    """Iterables are copied once, and what is no text, number, None, mapping or list is refused."""
    template = (
        "{{ documents }}{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    messages = [types.MappingProxyType({"role": "user", "content": "hi"})]
    expected = llama2.encode_chat(bare, messages, template, tools=[TOOL], documents=["a", 1.5])
    for copy in (iter, tuple, collections.deque):
        options = {"tools": copy([TOOL]), "documents": copy(["a", 1.5])}
        assert llama2.encode_chat(bare, copy(messages), template, **options) == expected
    for odd in ({"tools": ["search"]}, {"tools": [{"function": "clock"}]}):
        raises("attribute", llama2.encode_chat, bare, messages, template, **odd)
    for odd in (Odd(), Path("<|im_end|>"), print):
        for documents in ([odd], {"text": odd}):
            raises(
                type(odd).__name__,
                llama2.encode_chat,
                bare,
                messages,
                template,
                documents=documents,
            )


def test_a_message_of_100_kb_is_quick(tmp_path):
    """Whatever it says, with a thousand control tokens that begin alike: up to 55 ms."""
    controls = {"[INST]": True} | {f"<SPECIAL_{i}>": True for i in range(999)}
    ours = load(folder(tmp_path, "{{ messages[0].content }}", controls))
    ours.encode_marked = len  # tokenizers takes its own time
    for text in ("<", "<S", "<SPECIAL_1", "[INST]", "> ", '"\n'):
        messages = [{"role": "user", "content": text * (100_000 // len(text))}]
        call = functools.partial(llama2.encode_chat, ours, messages)
        seconds = timeit.repeat(call, timer=time.process_time, number=1, repeat=3)
        assert min(seconds) < 0.4, text


NAMED_SO = """{"messages": [{"content": "a", "role": X}]}
{"messages": [{"content": "a", "role": "user"}], "tools": [{"name": X, "function": {"name": "a"}}]}
{"messages": [{"content": "a", "role": "user", "name": X}]}
{"messages": [{"content": "a", "role": "assistant", "tool_calls": [{"function": {"name": X}}]}]}
{"messages": [{"content": "a", "role": "user"}], "tools": [{"function": {"name": X}}]}"""


# Writes each of these names as '<|' + role + '|>' and as '<' + role + '>'.
NAMES = """{% for x in messages + (tools or []) %}{% for y in [x] + (x.tool_calls or []) %}
{%- for z in [y, y.function or {}] %}{% for n in [z.role, z.name] %}{{ '<|%s|><%s>' % (n, n) }}
{%- endfor %}{% endfor %}{% endfor %}{% endfor %}"""


@pytest.mark.parametrize("name", ["im_end", "</s>", "s", "a b", "a|", "", "\u00e9"])
def test_names_of_which_a_template_could_make_a_control_token(bare, name):
    for text in NAMED_SO.splitlines():
        chat = json.loads(text.replace("X", json.dumps(name)))
        raises("the role or name", llama2.encode_chat, bare, template=NAMES, **chat)
    for role in (*llama2.ROLES, "critic-2.b_"):
        assert llama2.encode_chat(bare, [{"role": role, "content": "x"}], "zephyr")


LLAMA_3_NAMES = "python id text end begin right pad header tune tools messages"
LLAMA_3 = """begin_of_text end_of_text start_header_id end_header_id eot_id eom_id python_tag
finetune_right_pad_id reserved_special_token_0 end tools messages"""
HEADERS = """{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' }}
{{- m.name }}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}
{{- '<|eot_id|>' }}{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"""


def test_names_that_stand_in_a_control_token_without_a_template_that_completes_it(tmp_path):
    """They are those of tools, of messages, of roles; what they could become otherwise is refused."""
    tags = {f"<|{name}|>": True for name in LLAMA_3.split()} | {"<s>": True, "</s>": True}
    path = folder(tmp_path, HEADERS, tags)
    ours, theirs = load(path), load_theirs(path)
    for name in (*LLAMA_3_NAMES.split(), "s", "eot_id"):
        for text in NAMED_SO.splitlines():
            chat = json.loads(text.replace("X", json.dumps(name)))
            assert_as_transformers(ours, theirs, final=False, **{"tools": None} | chat)
            if name in ("end", "eot_id", "s"):
                raises("the role or name", llama2.encode_chat, ours, template=NAMES, **chat)
    chat |= {"tools": [{"function": {"name": "end"}}]}
    completed = HEADERS.replace("{{ t | tojson }}", "{{ '<|' ~ t.function.name ~ '_header_id|>' }}")
    raises("the role or name 'end'", llama2.encode_chat, ours, template=completed, **chat)
    lower = "{% for m in messages %}{{ '<|' + m.role | lower + '|>' }}{% endfor %}"
    messages = [{"role": "EOT_ID", "content": ""}]
    raises("the role or name 'EOT_ID'", llama2.encode_chat, ours, messages, lower)


NONE = """
[]
{"role": "user"}
[{"content": "a"}]
[{"role": ["user"], "content": "a"}]
[{"role": "user", "content": 0}]
[{"role": "user", "content": false}]
[{"role": "user", "content": []}]
[{"role": "user", "content": {}}]
[{"role": "user", "content": [{"type": "secret"}]}]
"""


@cases("messages", NONE)
def test_messages_that_are_none(bare, messages):
    with pytest.raises(ValueError, match="expected messages with a role|no messages") as caught:
        llama2.encode_chat(bare, json.loads(messages), "chatml")
    assert "secret" not in str(caught.value)


# --------------------------------------------------------------------------------------------------
# Templates by name, and none

NAMED = {  # what they make of "s:S u:hi~ a:yes u:so"; Llama 2's is Meta's own text
    "llama-2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nhi [/INST] yes </s><s>[INST] so [/INST]",
    "llama-3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nyes<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nso<|eot_id|><|start_header_id|>assistant"
    "<|end_header_id|>\n\n",
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi <|im_end|>\n<|im_start|>assistant"
    "\nyes<|im_end|>\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n",
    "mistral": "<s>[INST] hi [/INST] yes</s>[INST] S\n\nso[/INST]",
    "vicuna": "<s>S\n\nUSER: hi\nASSISTANT: yes</s>\nUSER: so\nASSISTANT:",
    "zephyr": "<|system|>\nS</s>\n<|user|>\nhi </s>\n<|assistant|>\nyes</s>\n<|user|>\nso</s>\n"
    "<|assistant|>\n",
}


@pytest.mark.parametrize("name", llama2.CHAT_TEMPLATES)
def test_named_templates(bare, tmp_path, name):
    messages = dialogue("s:S u:hi~ a:yes u:so")
    assert written(bare, messages, name) == NAMED[name]
    if name != "mistral":  # a cache keeps what it holds
        assert NAMED[name].startswith(written(bare, messages[:2], name))
    if name == "llama-2":
        with pytest.warns(match="no chat template: llama-2 is assumed"):
            assert written(bare, messages) == NAMED[name]
    theirs = load_theirs(folder(tmp_path, None))
    theirs.chat_template = bare.chat_template = llama2.CHAT_TEMPLATES[name]
    assert_as_transformers(bare, theirs, messages, final=False)
    bare.chat_template = ""


FOUND = {
    '"x"': "x",
    "null": "",
    '[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]': (
        "{% if tools +%}t{%+ else +%}d{%+ endif %}"
    ),
    '[{"name": "tool_use", "template": "t"}]': "t",
}


@pytest.mark.parametrize("template", FOUND)
def test_templates_of_a_folder(tmp_path, template):
    """One, several by name, or a file of its own; what is none is refused."""
    path = folder(tmp_path, json.loads(template))
    assert load(path).chat_template == FOUND[template]
    write_files(path, {"chat_template.jinja": "of its own"})
    assert load(path).chat_template == "of its own"
    (path / "additional_chat_templates").mkdir()
    write_files(path, {"additional_chat_templates/tool_use.jinja": "t"})
    assert load(path).chat_template == "{% if tools +%}t{%+ else +%}of its own{%+ endif %}"
    raises("chat_template is 5; expected str", load, folder(tmp_path / "wrong", 5))


# --------------------------------------------------------------------------------------------------
# Templates that fail

FAILING = """
{% if %} | TemplateSyntaxError
{{ raise_exception('no tools') }} | TemplateError: no tools
{{ 1 / 0 }} | ZeroDivisionError
{{ ''.__class__.__mro__ }} | SecurityError
{{ messages.append(1) }} | SecurityError
{% include '/etc/passwd' %} | TypeError
klingon | is 'klingon'; expected llama-2, .*, zephyr or Jinja
"""


@cases("template, said", FAILING)
def test_templates_that_fail(bare, template, said):
    with pytest.raises(ValueError, match=f"^the chat template.*{said}") as caught:
        llama2.encode_chat(bare, dialogue("u:hi"), template)
    assert len(str(caught.value)) < 500


def test_ctrl_c_ends_a_template(bare):
    template = "{{ stop(2) }}"
    llama2.compile_template(template).globals["stop"] = signal.raise_signal
    with pytest.raises(KeyboardInterrupt):
        written(bare, dialogue("u:hi"), template)


def test_old_jinja_is_refused(bare, monkeypatch):
    for version in ("3.1.6", "3.1.10", "3.1.5"):
        monkeypatch.setattr(jinja2, "__version__", version)
        call = written, bare, dialogue("u:hi"), f"{{# {version} #}}fine"  # not compiled yet
        if version == "3.1.5":
            raises(r"3\.1\.6 or newer: .*pip install --upgrade jinja2", *call)
        else:
            assert call[0](*call[1:]) == "fine"


# --------------------------------------------------------------------------------------------------
# Tokenizers as published

PUBLISHED = sorted(Path(os.environ.get("PUBLISHED_TOKENIZERS", "nowhere")).rglob("tokenizer.json"))
SAID = r"the| Hello|don't|12345|  |\n\n|\t|\u65e5\u672c|\U0001f642|caf\u00e9|\u2581|e\u0301|<s |<"


@pytest.mark.skipif(not PUBLISHED, reason="PUBLISHED_TOKENIZERS names no folder of tokenizers")
@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parts[-4])
def test_published_tokenizers(path):
    """Ids of texts are those of tokenizers, of chats those of transformers."""
    ours = llama2.Tokenizer.from_file(path)
    engine = tokenizers.Tokenizer.from_file(str(path))
    for text in random_texts(SAID.encode().decode("unicode-escape").split("|"), 2300):
        ids = ours.encode(text)
        assert ids == engine.encode(text).ids
        assert ours.decode(ids) == engine.decode(ids)
    theirs = pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(
        path.parent
    )
    ours.chat_template = ours.chat_template or llama2.CHAT_TEMPLATES["llama-2"]
    theirs.chat_template = ours.chat_template
    chance = random.Random(0)
    for _ in range(60):
        assert_as_transformers(ours, theirs, random_dialogue(chance), False)
