"""Chat formats, and the settings of models that bring them: what llama2.py says to them and where they stop.

The ids were made by transformers 5.23 with the templates below, `"legacy": false` and Llama 2's own
tokenizer.model; where transformers is installed, random dialogues are compared with it, too.
"""

from __future__ import annotations

import json
import random
import re

import pytest
import torch

import llama2
from test_llama2 import (
    added_tokens_decoder,
    dialogue,
    hf_state,
    make_weights,
    some_pieces,
    tokenizer_model,
    write_files,
    write_hf,
)

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
HEADER = "'<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim"
TURN = "{{ " + HEADER + " + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
TURN += "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
KNOWLEDGE = """{%- if messages[0].role == 'system' %}{% set s = messages[0].content | trim %}
{%- set messages = messages[1:] %}{% else %}{% set s = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + 'Cutting Knowledge Date: December 2023\n' }}
{{- 'Today Date: ' + date_string + '\n\n' + s + '<|eot_id|>' }}"""
DATE = '{% if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}'
SMOLLM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TEMPLATES |= {
    "llama-3": "{{ bos_token }}{% for m in messages %}" + TURN,
    "llama-3.1": "{{ bos_token }}" + DATE + KNOWLEDGE + "{% for m in messages %}" + TURN,
    "smollm2": "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + SMOLLM + "<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
}

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
MISTRAL_TAGS = {"[INST]": True, "[/INST]": True}  # added tokens: whether they are special
CHATML_TAGS = {"<|im_end|>": True, "<|im_start|>": False}
FORMATS = {  # of each template: the format that it is, what stands behind Llama 2's tokens
    "llama-2": ("llama-2", {}),
    "zephyr": ("zephyr", {}),
    "chatml": ("chatml", {}),
    "chatml tokens": ("chatml", CHATML_TAGS),
    "mistral": ("mistral", {}),
    "mistral v3": ("mistral", MISTRAL_TAGS),
    "vicuna": ("vicuna", {}),
    "llama-3": ("llama-3", None),  # these have byte-level BPE
    "llama-3.1": ("llama-3", None),
    "smollm2": ("chatml", None),
}
TEMPLATES["chatml tokens"] = TEMPLATES["chatml"]
INST = "518 25580 29962"
END_INST = "518 29914 25580 29962"
USER = "29966 29989 1792 29989 29958 13"
ANSWER = "29966 29989 465 22137 29989 29958 13"
START = "29966 29989 326 29918 2962 29989 29958"
END = "29966 29989 326 29918 355 29989 29958 13"
ASSISTANT = "13 22933 9047 13566 29901"
IDS = {  # of a template's name and a dialogue
    ("zephyr", "u:hi"): f"529 {USER[6:]} 2918 2 13 {ANSWER}",
    ("zephyr", "s:S u:a a:b u:c"): "529 29989 5205 29989 29958 13 29903 2 13 "
    f"{USER} 29874 2 13 {ANSWER} 29890 2 13 {USER} 29883 2 13 {ANSWER}",
    ("chatml", "s:S u:a a:b u:c"): f"529 {START[6:]} 5205 13 29903 {END} "
    f"{START} 1792 13 29874 {END} {START} 465 22137 13 29890 {END} "
    f"{START} 1792 13 29883 {END} {START} 465 22137 13",
    ("chatml tokens", "s:S u:a a:b u:c"): "32001 5205 13 29903 32000 13 32001 1792 13 29874 32000 "
    "13 32001 465 22137 13 29890 32000 13 32001 1792 13 29883 32000 13 32001 465 22137 13",
    (
        "mistral",
        "s:S u:a a:b u:c",
    ): f"1 {INST} 317 13 13 29874 {END_INST} 289 2 {INST} 274 {END_INST}",
    ("mistral v3", "s:S u:a a:b u:c"): "1 32000 263 32001 289 2 32000 317 13 13 29883 32001",
    (
        "vicuna",
        "u:a a:b u:c",
    ): f"1 11889 29901 263 {ASSISTANT} 289 2 13 11889 29901 274 {ASSISTANT}",
    ("vicuna", "s:S u:hi"): f"1 29903 13 13 11889 29901 7251 {ASSISTANT}",
    ("llama-2", "u:a a:b u:c"): f"1 {INST} 263 {END_INST} 289 29871 2 1 {INST} 274 {END_INST}",
    ("llama-3", "s:re~ u:on"): "295 297 82 88 82 83 68 76 298 267 263 299 297 84 82 68 81 298 267 "
    "264 299 297 64 82 82 72 82 83 291 83 298 267",
    ("llama-3.1", "u:the"): "295 297 82 88 82 83 68 76 298 267 34 84 83 83 261 70 220 42 77 78 86 "
    "75 68 67 70 68 220 35 64 83 68 25 220 35 68 66 68 76 65 68 81 220 17 15 17 18 198 51 78 67 64 "
    "88 220 35 64 83 68 25 220 17 21 220 41 84 75 220 17 15 17 19 267 299 297 84 82 68 81 298 267 "
    "83 259 299 297 64 82 82 72 82 83 291 83 298 267",
    ("smollm2", "u:the"): "301 82 88 82 83 68 76 198 56 78 84 262 263 262 220 259 75 79 69 84 75 "
    "220 32 40 262 82 82 72 82 83 291 83 220 77 64 76 68 67 220 50 76 78 75 43 44 11 258 81 64 261 "
    "68 67 220 65 88 220 39 84 70 70 261 70 220 37 64 66 68 302 198 301 84 82 68 81 198 83 259 302 "
    "198 301 64 82 82 72 82 83 291 83 198",
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Tokenizers by their added tags and templates, each from a folder that transformers reads."""
    root = tmp_path_factory.mktemp("tokenizers")
    llama2_model = tokenizer_model(some_pieces(PIECES))
    found = {}

    def get(tags, template=""):
        key = (str(tags), template)
        if key not in found:
            path = root / str(len(found))
            settings = {"chat_template": TEMPLATES.get(template), "legacy": False}
            if tags is None:
                bpe = pytest.importorskip("test_llama3")
                settings |= {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
                settings["tokenizer_class"] = "PreTrainedTokenizerFast"
                content = bpe.published_json("smollm" if template == "smollm2" else "llama-bpe")
                config, name = bpe.CONFIG, "tokenizer.json"
            else:
                settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
                settings["tokenizer_class"] = "LlamaTokenizer"
                settings["added_tokens_decoder"] = added_tokens_decoder(tags, 32000)
                content, name = llama2_model, "tokenizer.model"
                config = llama2.Config(vocab_size=32000 + len(tags))
            write_files(path, {"tokenizer_config.json": settings, name: content})
            found[key] = llama2.Tokenizer.from_file(path / name, config)
            found[key].path = path
        return found[key]

    return get


def random_dialogue(chance):
    """Roles in turn, contents of words, spaces and line breaks; no two spaces in a row.

    Of several spaces transformers 5 makes other pieces than SentencePiece does.
    """
    words = ["hi", "a", "b ", "\n", " c", "U", "{}", "\u65e5", "'", "SS", "user", "\U0001f999", ""]
    roles = ["system"] * chance.randrange(2)
    roles += ["user", "assistant", "user", "assistant", "user"][: chance.choice((1, 3, 5))]
    messages = []
    for role in roles:
        text = f"x{''.join(chance.choices(words, k=chance.randrange(8)))}y"
        messages.append({"role": role, "content": re.sub(" +", " ", text)})
    return messages


# --------------------------------------------------------------------------------------------------
# Formats


@pytest.mark.parametrize(("template", "text"), IDS)
def test_ids_are_those_of_the_published_templates(tokenizers, template, text):
    """Frozen. Catches spaces behind control tokens, a second BOS, a system message elsewhere."""
    _, tags = FORMATS[template]
    found = llama2.encode_chat(tokenizers(tags, template), dialogue(text))
    assert " ".join(map(str, found)) == IDS[template, text]


@pytest.mark.parametrize("template", FORMATS)
def test_ids_equal_transformers(tokenizers, template):
    transformers = pytest.importorskip("transformers")
    name, tags = FORMATS[template]
    ours = tokenizers(tags, template)
    theirs = transformers.AutoTokenizer.from_pretrained(str(ours.path))
    options = {"add_generation_prompt": True, "return_dict": False}
    chance = random.Random(0)
    for text in ("u:hi", "u:a a:b u:c", "s:S u:hi", "s:S u:a a:b u:c", *range(60)):
        messages = dialogue(text) if isinstance(text, str) else random_dialogue(chance)
        wanted = theirs.apply_chat_template(messages, **options)
        assert llama2.encode_chat(ours, messages) == wanted, messages
        assert llama2.encode_chat(ours, messages, name) == wanted
    assert llama2.recognise_chat_format(TEMPLATES[template]) == name
    wanted = theirs.apply_chat_template(messages, date_string="3 Mar 2033", **options)
    assert llama2.encode_chat(ours, messages, date_string="3 Mar 2033") == wanted


def test_contents_in_parts(tokenizers):
    """OpenAI's form: a list of texts."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    whole, listed = [{"role": "user", "content": content} for content in ("a\nb", parts)]
    tokenizer = tokenizers({}, "llama-2")
    assert llama2.encode_chat(tokenizer, [listed]) == llama2.encode_chat(tokenizer, [whole])


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{{ '### Instruction:\n' + message }}\n### Response: {# and much more of it, far beyond #}",
        "{{ '<|user|>\n' + m + '<|end|>\n<|assistant|>\n' }}{{ eos_token }}",  # Phi 3
        "{{ '[SYSTEM_PROMPT] ' + m + '[/SYSTEM_PROMPT][INST] ' }}",  # Mistral, version 7
        "{{ 'SYSTEM: ' + s + '\nUSER: ' + m + '\nASSISTANT: ' }}",  # Orca's Vicuna
        "{{ '<|header_start|>user<|header_end|>\n\n' }}",  # Llama 4
        "\x1b[2J\u0000 {{ cycler.__init__.__globals__.os.system('touch /tmp/executed') }}",
        "{{ <|user|> [INST USER: " * 10**5,  # takes no time
    ],
)
def test_unknown_templates(template):
    assert llama2.recognise_chat_format(template) is None
    tokenizer = llama2.Tokenizer(some_pieces("259:\u2581", 260))
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="--chat-format.*: llama-2, llama-3, mistral") as caught:
        llama2.encode_chat(tokenizer, dialogue("u:hi"))
    message = str(caught.value)
    assert repr(" ".join(template.split())[:60]) in message and message.isprintable()
    with pytest.raises(ValueError, match="named 'alpaca'; .*zephyr, vicuna, chatml"):
        llama2.chat_stops(tokenizer, "alpaca")


@pytest.mark.parametrize(
    ("name", "tags", "ids", "texts"),
    [
        ("llama-2", {}, [], ["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"]),
        ("mistral", {}, [], ["[INST]", "[/INST]"]),
        ("mistral", MISTRAL_TAGS, [32000, 32001], []),
        ("zephyr", {}, [], ["<|assistant|>", "<|user|>", "<|system|>"]),
        ("vicuna", {}, [], ["USER:", "ASSISTANT:"]),
        ("chatml", {}, [], ["<|im_start|>", "<|im_end|>"]),
        ("chatml", CHATML_TAGS, [32001, 32000], ["<|im_start|>"]),
    ],
)
@pytest.mark.parametrize("where", ["s:x{} u:a", "u:{}y", "u:a a:x{}y u:b"])
def test_what_ends_an_answer_cannot_be_typed(tokenizers, name, tags, ids, texts, where):
    """Tags that are text are refused; control tokens that are typed stay text."""
    tokenizer = tokenizers(tags)
    assert llama2.chat_stops(tokenizer, name) == (ids, texts)
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


def test_a_date_is_no_tag(tokenizers):
    """What looks like a tag, the place for a date or for a message is text."""
    ours = tokenizers(None, "llama-3.1")
    for odd in ("<|eot_id|>", "{}", "{date}"):
        messages = [{"role": "user", "content": "{date}{}" + odd}]
        ids = llama2.encode_chat(ours, messages, date_string=odd)
        text = ours.decode(ids)
        assert ids.count(ours.special_ids["<|eot_id|>"]) == 2
        assert "{date}{}" + odd in text and f"Date: {odd}\n" in text


@pytest.mark.parametrize("name", llama2.CHAT_FORMAT_NAMES)
@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "found: $"),
        (dialogue("s:S"), "found: system"),
        (dialogue("u:a u:b"), "user, user"),
        (dialogue("u:a a:b"), "user, assistant$"),
        ([{"role": ["user"], "content": "a"}], "user"),
        *((m, "messages with a role, and text alone") for m in (
            [{"content": "a"}],
            [{"role": "user"}],
            [{"role": "user", "content": None}],
            [{"role": "user", "content": ["a"]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            ["user"],
            "hi",
            {"role": "user", "content": "hi"},
        )),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_other_messages_are_refused(tokenizers, name, messages, said):
    with pytest.raises(ValueError, match=said):
        llama2.encode_chat(tokenizers({}), messages, name)


@pytest.mark.parametrize("name", llama2.CHAT_FORMAT_NAMES)
def test_turns_grow_from_those_before(tokenizers, name):
    """A cache keeps what it holds: the next prompt begins with this one and its answer."""
    tokenizer = tokenizers({})
    first = llama2.encode_chat(tokenizer, dialogue("s:S u:a"), name)
    second = llama2.encode_chat(tokenizer, dialogue("s:S u:a a:hi u:b"), name)
    assert second[: len(first)] == first and len(second) > len(first)


# --------------------------------------------------------------------------------------------------
# Directories

LETTERS = " ".join(f"{259 + i}:{piece}" for i, piece in enumerate(["\u2581", *"abcdefhiu", "hi"]))
SIZE = 272  # the small vocabulary: bytes, LETTERS, two tokens to be added
TINY = llama2.Config(32, 64, 2, 4, 2, SIZE, 64)
WEIGHTS = make_weights(TINY)
CHATML = {"added_tokens_decoder": added_tokens_decoder(CHATML_TAGS, SIZE - 2)}
CHATML["chat_template"] = TEMPLATES["chatml"]
SMALL = tokenizer_model(some_pieces(LETTERS, SIZE - 2))


def hf_directory(path, change=None, **files):
    """A Hugging Face directory of a small model, its config.json changed, with JSON files."""
    write_hf(path, TINY, WEIGHTS)
    settings = json.loads((path / "config.json").read_text()) | (change or {})
    named = {f"{name}.json": content for name, content in files.items()}
    return write_files(path, {"tokenizer.model": SMALL, "config.json": settings, **named})


@pytest.mark.parametrize(
    ("eos", "generation", "ids"),
    [
        (5, {}, [5]),
        ([5, 6], {}, [5, 6]),
        (5, {"eos_token_id": [7, 5]}, [5, 7]),
        (None, {"eos_token_id": None}, [2]),
        ([], {}, [2]),
    ],
)
def test_several_eos_ids(tmp_path, eos, generation, ids):
    path = hf_directory(tmp_path / "hf", {"eos_token_id": eos}, generation_config=generation)
    config = llama2.open_checkpoint(path).config
    assert [config.eos_token_id, *config.stop_token_ids] == ids


@pytest.mark.parametrize("eos", ["2", -1, SIZE, 2.0, [2, None, "x"]])
def test_eos_ids_are_checked(tmp_path, eos):
    path = hf_directory(tmp_path / "hf", generation_config={"eos_token_id": eos})
    with pytest.raises(ValueError, match="eos_token_id is|stop id"):
        _ = llama2.open_checkpoint(path).tokenizer


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("text", "text"),
        (None, ""),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], ""),
        ("\ud800", "\ufffd" * 3),
        (5, None),
        ([{"name": "default", "template": 5}], None),
    ],
)
def test_chat_template_of_a_directory(tmp_path, template, wanted):
    path = hf_directory(tmp_path / "hf", tokenizer_config={"chat_template": template})
    if wanted is None:
        with pytest.raises(ValueError, match=re.escape(str(path))):
            assert llama2.open_checkpoint(path).tokenizer
    else:
        assert llama2.open_checkpoint(path).tokenizer.chat_template == wanted
        (path / "chat_template.jinja").write_text("of its own")
        assert llama2.open_checkpoint(path).tokenizer.chat_template == "of its own"


def test_saved_models_keep_tokens_ends_and_template(tmp_path):
    """A ChatML model from a directory, saved once, and what was saved, saved again."""
    change = {"eos_token_id": [SIZE - 2, 2, 7]}
    path = hf_directory(tmp_path / "hf", change, tokenizer_config=CHATML)
    old = llama2.open_checkpoint(path).tokenizer
    wanted = llama2.encode_chat(old, dialogue("s:abc u:hi a:fed u:a"))
    assert SIZE - 1 in wanted and SIZE - 2 in wanted
    for i in range(2):
        llama2.save_gguf(llama2.open_checkpoint(path), tmp_path / f"{i}.gguf")
        path = tmp_path / f"{i}.gguf"
        saved = llama2.open_checkpoint(path)
        assert saved.config.eos_token_id == SIZE - 2 and saved.config.stop_token_ids == (2, 7)
        new = saved.tokenizer
        assert (new.pieces, new.types, new.scores) == (old.pieces, old.types, old.scores)
        assert llama2.encode_chat(new, dialogue("s:abc u:hi a:fed u:a")) == wanted


@pytest.mark.parametrize(
    ("window", "context"), [(None, 64), ("absent", 64), (64, 64), (4096, 64), (40, 40)]
)
def test_mistral(tmp_path, window, context):
    """Within the window it is Llama, as transformers' MistralForCausalLM says."""
    change = {"model_type": "mistral", "sliding_window": window}
    if window == "absent":
        del change["sliding_window"]
    path = hf_directory(tmp_path / "hf", change)
    assert llama2.open_checkpoint(path, context).config.max_position_embeddings == context
    with pytest.raises(ValueError, match=rf"--context {context + 1}; expected 1 to {context}"):
        llama2.open_checkpoint(path, context + 1)
    model, _ = llama2.load(path)
    tokens = torch.randint(SIZE, (1, context), generator=torch.manual_seed(0))
    transformers = pytest.importorskip("transformers")
    settings = json.loads((path / "config.json").read_text()) | {
        "sliding_window": None if window == "absent" else window
    }
    reference = transformers.MistralForCausalLM(transformers.MistralConfig(**settings)).eval()
    reference.load_state_dict(hf_state(TINY, WEIGHTS))
    with torch.no_grad():
        assert torch.allclose(model(tokens), reference(tokens).logits, atol=1e-4)


@pytest.mark.parametrize("window", [0, -1, "4096", [4096]])
def test_mistral_windows_are_checked(tmp_path, window):
    change = {"model_type": "mistral", "sliding_window": window}
    with pytest.raises(ValueError, match=r"(sliding_window|max_position_embeddings) is"):
        llama2.open_checkpoint(hf_directory(tmp_path / "hf", change))


# --------------------------------------------------------------------------------------------------
# Command line


@pytest.mark.parametrize(
    ("template", "arguments", "used"),
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
def test_chat_in_the_models_format(cli, tmp_path, monkeypatch, template, arguments, used):
    """As its template says, or the option; one that is unknown is refused before weights are read."""
    settings = CHATML | {"chat_template": template}
    change = {"max_position_embeddings": 512}
    path = hf_directory(tmp_path / "hf", change, tokenizer_config=settings)
    _, info, _ = cli("--info", model=path)
    if used is None:
        monkeypatch.setattr(llama2, "build_model", lambda *args: pytest.fail("read the weights"))
    options = ("--chat", "--max-new-tokens", 3, *arguments)
    status, out, err = cli(*options, model=path, stdin=b"hi\nabc\n")
    if used is None:
        assert status == 2 and err.count("\n") == 1
        assert "'unheard of'" in err and "--chat-format" in err and "chatml" in err
        assert re.search("chat format +unknown", info)
    else:
        assert status == 0 and out.count("\n") >= 2 and f"format {used}" in err
        known = llama2.recognise_chat_format(template)
        assert known is None or re.search(f"chat format +{known}", info)
        assert ("no chat template" in info) == (not template)


def test_chat_ends_where_the_format_says(cli, tmp_path, monkeypatch):
    """Not only at EOS: an answer ends at <|im_end|>, and where the model speaks for the user."""
    change = {"max_position_embeddings": 512}
    path = hf_directory(tmp_path / "hf", change, tokenizer_config=CHATML)
    forward, script = llama2.Llama.forward, [269, SIZE - 2, 269, SIZE - 1, 269]

    def scripted(model, tokens, *args, **options):
        logits = forward(model, tokens, *args, **options)
        logits.zero_()[..., script.pop(0) if script else 2] = 1.0
        return logits

    monkeypatch.setattr(llama2.Llama, "forward", scripted)
    status, out, err = cli("--chat", model=path, stdin=b"a\nb\n")
    assert (status, out, script) == (0, "hi\nhi\n", [269])
    assert f"stop token {SIZE - 1}" in err
