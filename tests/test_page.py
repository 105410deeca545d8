"""Tests of examples/server/chat.html in a real browser: Debian's package chromium, by playwright.

The server and its model are real. Errors in the console (whatever the page's policy blocks is one)
and requests to other hosts fail every test.
"""

import json
import re
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

playwright = pytest.importorskip("playwright.sync_api")

from test_server import Running

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium")
expect = playwright.expect
expect.set_options(timeout=30_000)
KEY = "schlüssel"
MARKUP = "<img src=x onerror=alert(1)> & \U0001f999\n<script>alert(2)</script>"
EVENT = """data: {"choices": [{"text": "", "logprobs": {"content": [{\
"token": "</s>", "bytes": [%d], "logprob": 0, "top_logprobs": [\
{"token": "</s>", "bytes": [%d], "logprob": 0}, {"token": "</s>", "bytes": [159], "logprob": -1}, \
{"token": "</s>", "bytes": [], "logprob": -2}]}]}}]}\n\n"""
DONE = "article[aria-busy=false]"
TOKEN = ".tokens span"
BEGUN = """({ place: { turn, index } }, rank) =>
  textOf({ tokens: [...turn.tokens.slice(0, index), turn.tokens[index].top[rank]] })"""
# Contrasts of texts to their ground, the lowest first; of each shade to the next one. Controls
# without a name.
LOOK = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v > 10 ? ((v / 255 + 0.055) / 1.055) ** 2.4 : v / 255 / 12.92);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const ground = (e) => {
    const colour = numbers(getComputedStyle(e).backgroundColor);
    return colour[3] === 0 ? ground(e.parentElement) : luminance(colour);
  };
  const holdsText = (e) => [...e.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const texts = [...document.querySelectorAll("body *")]
    .filter((e) => e.checkVisibility() && !e.disabled && holdsText(e))
    .map((e) => [ratio(luminance(numbers(getComputedStyle(e).color)), ground(e)), e.outerHTML]);
  const shades = [...document.querySelectorAll("li")].map(ground);
  const steps = shades.slice(1).map((shade, i) => ratio(shade, shades[i]));
  const nameless = [...document.querySelectorAll("button, input, textarea, summary, [role]")]
    .filter((e) => !(e.ariaLabel || e.labels?.[0]?.textContent || e.textContent).trim());
  return [texts.sort((a, b) => a[0] - b[0]), steps, nameless.map((e) => e.outerHTML)];
}"""


def answer(server, path, **body):
    """What a server says without a page and a stream, greedily."""
    body = {"temperature": 0, "max_tokens": 40, **body}
    _, reply = server.post(f"/v1/{path}", body, Authorization=f"Bearer {KEY}".encode())
    return reply["choices"][0]


@pytest.fixture(scope="module")
def servers():
    """One whose model has a chat template and which wants a key, and one without either."""
    running = Running("--quiet", "--chat-template", "llama-2", "--api-key", KEY), Running("--quiet")
    yield running
    for server in running:
        server.stop()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as api:
        yield api.chromium.launch(executable_path=CHROMIUM)


@pytest.fixture
def visit(browser):
    """Opens a page whose answers are greedy and have at most 40 tokens."""
    problems = []

    def open_page(server, *keys, **options):
        page = browser.new_page(**options)
        expected = re.compile(r"a status of 4\d\d|net::ERR_FAILED")  # what a test makes fail
        page.on("console", lambda line: expected.search(line.text) or problems.append(line.text))
        page.on("pageerror", lambda error: problems.append(error))
        page.on("request", lambda r: r.url.startswith(server.url) or problems.append(r.url))
        page.goto(server.url)
        for key in keys:
            page.get_by_label("API key", exact=True).fill(key)
            strike(page, "Enter")
        expect(page.locator("#model")).not_to_be_empty()
        page.get_by_text("Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Maximum tokens").fill("40")
        return page

    yield open_page
    assert problems == []


def ask(page, question):
    """Ask, and wait for the end of the answer."""
    count = page.locator("article").count()
    page.fill("#message", question)
    page.press("#message", "Enter")
    expect(page.locator(DONE)).to_have_count(count + 1)


def strike(page, keys):
    """Press keys of the keyboard."""
    for key in keys.split():
        page.keyboard.press(key)


def press(page, name):
    page.get_by_role("button", name=name, exact=True).click()


def answers(page):
    return page.get_by_role("log", name="Conversation").locator(".plain").all_text_contents()


def alert(page, text):
    """It is said, among others."""
    expect(page.get_by_role("alert")).to_contain_text(text)


def begun(page, index, rank):
    """The text up to a token, with another one in its place."""
    return page.locator(TOKEN).nth(index).evaluate(BEGUN, rank)


def test_a_chat_of_several_turns(servers, visit):
    """Answers are the server's own; the last question is edited; Undo and Reset."""
    chat, _ = servers
    page = visit(chat, KEY)
    messages = []
    for question in ("Who is it?", "Why?"):
        ask(page, question)
        messages.append({"role": "user", "content": question})
        messages.append(answer(chat, "chat/completions", messages=messages)["message"])
    assert answers(page) == [message["content"] for message in messages[1::2]]
    press(page, "Edit")
    expect(page.locator("#message")).to_have_value("Why?")
    strike(page, "End Shift+Enter")
    page.keyboard.type("Tell!\n")
    expect(page.locator(".question").last).to_have_text("Why?\nTell!")
    press(page, "Reset")
    assert answers(page) == []
    press(page, "Undo")
    assert answers(page)[0] == messages[1]["content"]


def test_a_reload_keeps_the_conversation(servers, visit):
    """Of its own tab, and of an answer that is being written; its tokens, too. Reset forgets it."""
    chat, _ = servers
    page = visit(chat, KEY)
    ask(page, "Who is it?")
    said = answers(page)
    page.fill("#max_tokens", "400")
    page.fill("#message", "Why?")
    press(page, "Send")
    page.locator("article").nth(1).locator(".tokens span").nth(3).wait_for()
    page.reload()
    page.get_by_label("API key", exact=True).fill(KEY)
    strike(page, "Enter")
    expect(page.locator(DONE)).to_have_count(2)
    assert answers(page)[0] == said[0] and len(answers(page)[1]) > 3
    expect(page.locator("#max_tokens")).not_to_have_value("256")
    page.locator(TOKEN).first.click()
    expect(page.get_by_role("option")).to_have_count(10)
    page.keyboard.press("Escape")
    press(page, "Continue")
    expect(page.locator("footer").last).to_contain_text("tokens/s")
    assert page.evaluate("localStorage.length") == 0  # which all tabs would share
    press(page, "Reset")
    page.reload()
    assert page.evaluate("sessionStorage.turns") == "[]"


def test_stop_and_continue(servers, visit):
    """Tokens are shown while others are to come."""
    page = visit(servers[0], KEY)
    page.fill("#max_tokens", "400")
    page.fill("#message", "Tell me all.")
    press(page, "Send")
    page.locator(TOKEN).nth(3).wait_for()
    press(page, "Stop")
    expect(page.locator("footer")).to_contain_text("stopped")
    (part,) = answers(page)
    assert 3 < page.locator(TOKEN).count() < 350
    page.fill("#max_tokens", "2")  # fewer than what was stopped has
    press(page, "Continue")
    expect(page.locator("footer")).to_contain_text(re.compile(r"\b2 tokens, .*tokens/s"))
    (whole,) = answers(page)
    assert whole.startswith(part) and whole > part


def test_another_token_by_keyboard(servers, visit):
    """What is before it is kept, and the server goes on from it."""
    chat, _ = servers
    page = visit(chat, KEY)
    ask(page, "Who?")
    page.locator(TOKEN).first.focus()
    strike(page, "ArrowRight " * 6 + "ArrowDown Home ArrowDown")
    expect(page.get_by_role("option")).to_have_count(10)
    assert page.locator("[aria-selected=true]").count() == 1
    start = begun(page, 6, 1)
    strike(page, "Enter")
    expect(page.locator(TOKEN).nth(6)).to_be_focused()
    expect(page.locator(DONE)).to_have_count(1)
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": start}]
    reply = answer(chat, "chat/completions", messages=messages, continue_final_message=True)
    assert answers(page) == [start + reply["message"]["content"]]
    strike(page, "ArrowLeft Escape")
    expect(page.get_by_role("listbox")).to_be_hidden()
    strike(page, "Tab")
    expect(page.get_by_role("button", name="Copy")).to_be_focused()


def test_a_story_by_mouse(servers, visit):
    """A model without a chat template continues a text."""
    _, story = servers
    page = visit(story)
    expect(page.get_by_label("Text to continue")).to_have_value("Once upon a time")
    ask(page, "Once upon a time")
    assert answers(page) == [answer(story, "completions", prompt="Once upon a time")["text"]]
    page.locator(TOKEN).nth(9).hover()
    start = begun(page, 9, 2)
    page.get_by_role("option").nth(2).click()
    expect(page.locator(f"{DONE} .chosen")).to_have_count(1)
    reply = answer(story, "completions", prompt="Once upon a time" + start)
    assert answers(page) == [start + reply["text"]]


def test_markup_stays_text(servers, visit):
    """Of questions and answers, even if a character comes byte by byte."""
    page = visit(servers[1], permissions=["clipboard-read", "clipboard-write"])
    body = "".join(EVENT % (byte, byte) for byte in MARKUP.encode())
    body += 'data: {"error": {"message": "<i>broken</i>"}}\n\n'
    page.route("**/v1/completions", lambda route: route.fulfill(body=body))
    ask(page, MARKUP)
    assert answers(page) == page.locator(".question").all_text_contents() == [MARKUP]
    alert(page, "<i>broken</i>")
    assert page.locator("img, i, article script").count() == 0
    press(page, "Copy")
    assert page.evaluate("navigator.clipboard.readText()") == MARKUP
    page.locator(TOKEN).nth(MARKUP.index("&")).click()
    options = page.get_by_role("option")
    assert [text.split()[0] for text in options.all_inner_texts()] == ["&", "\ufffd", "</s>"]
    expect(options.nth(1)).to_be_disabled()  # no text has half a character
    options.nth(2).click()
    assert answers(page) == [MARKUP.partition("&")[0]]


def test_key_and_errors(servers, visit):
    """The key is in memory alone. An error has the server's words."""
    page = visit(servers[0], "wrong", KEY)
    assert page.locator("#asks").text_content() == "The server says: the API key is wrong."
    page.fill("#temperature", "3")
    ask(page, "Who?")
    alert(page, "temperature is 3; expected float from 0 to 2")
    page.reload()
    kept = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")
    assert "Who?" in kept and KEY not in kept and "wrong" not in kept
    expect(page.get_by_label("API key", exact=True)).to_have_value("")


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_phone_and_colours(servers, visit, mode):
    page = visit(servers[1], color_scheme=mode, viewport={"width": 390, "height": 844})
    ask(page, "Once")
    page.locator(TOKEN).nth(20).focus()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    texts, steps, nameless = page.evaluate(LOOK)
    assert len(texts) > 60 and texts[0][0] >= 4.5, texts[0]
    assert min(steps) > 1.1 and nameless == []
    page.get_by_role("switch", name="Shading").uncheck()
    expect(page.locator(".tokens")).to_be_hidden()
    expect(page.locator(".plain")).to_have_css("position", "static")


def test_reasoning_is_folded(servers, visit):
    """Its tokens, and those around it, are no part of the answer; it is sent back with it."""
    page = visit(servers[0], KEY)
    body = stream("", "Hm", "", "A").replace('"content": "Hm"', '"reasoning": "Hm"')
    sent = []

    def answer(route):
        sent.append(route.request.post_data_json)
        route.fulfill(body=body)

    page.route("**/v1/chat/completions", answer)
    ask(page, "Why?")
    ask(page, "Why?")
    assert answers(page) == ["A", "A"]
    expect(page.locator(TOKEN)).to_have_count(2)
    thought = page.locator("article details p").first
    expect(thought).to_be_hidden()
    page.get_by_text("Reasoning").first.click()
    expect(thought).to_have_text("Hm")
    assert sent[1]["messages"][1] == {"role": "assistant", "content": "A", "reasoning": "Hm"}


def stream(*texts, key="delta", end="stop", likeliest=()):
    """A stream of these tokens, whole unless `end` is None; each with the same likeliest ones."""
    events = []
    for text in texts:
        entries = [{"token": t, "bytes": [*t.encode()], "logprob": -1} for t in (text, *likeliest)]
        content = [{**entries[0], "top_logprobs": entries}]
        new = {"text": text} if key == "text" else {"delta": {"content": text}}
        events.append({"choices": [new | {"logprobs": {"content": content}}]})
    events.append({"choices": [{key: "" if key == "text" else {}, "finish_reason": end}]})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events)


def fulfil(body, route):
    """Answer with these events."""
    route.fulfill(body=body)


LEFTS = "spans => spans.map((span) => span.getBoundingClientRect().left)"


@pytest.mark.parametrize("is_chat", [True, False])
def test_text_from_right_to_left(servers, visit, is_chat):
    """Each word of an Arabic answer is left of the one before, "!" leftmost; and it is at the right.

    A continuation stands left of the text that it continues. An English answer is as ever.
    """
    page = visit(*((servers[0], KEY) if is_chat else (servers[1],)))
    key = "delta" if is_chat else "text"
    words = ["\u0645\u0631\u062d\u0628\u0627", " \u0628\u0627\u0644\u0639\u0627\u0644\u0645", "!"]
    for question, answered in (
        ("\u0643\u064a\u0641\u061f", words),
        ("How?", ["Well", " done", "!"]),
    ):
        page.route(re.compile("completions$"), partial(fulfil, stream(*answered, key=key)))
        ask(page, question)
        turn = page.locator("article").last
        lefts = turn.locator(TOKEN).evaluate_all(LEFTS)
        [asked] = turn.locator(".question").evaluate_all(LEFTS)
        arabic = answered is words
        assert lefts == sorted(lefts, reverse=arabic)
        if not is_chat:
            assert (asked > max(lefts)) is arabic
        footer = turn.locator("footer span").evaluate_all(LEFTS)
        assert footer[0] < 400  # in English, whatever the answer is
    assert page.get_by_role("textbox").first.evaluate("(e) => e.dir") == "auto"


def test_a_stream_that_was_cut_says_so_and_goes_on(servers, visit):
    """Without a reason why it ended, and where the connection breaks."""
    page = visit(servers[0], KEY)
    sent = []

    def answer(route):
        sent.append(route.request.post_data_json)
        if len(sent) == 3:
            route.abort()
        else:
            route.fulfill(body=stream("once ", end=None if len(sent) == 1 else "stop"))

    page.route("**/v1/chat/completions", answer)
    ask(page, "Who?")
    alert(page, "the connection was lost")
    press(page, "Continue")
    expect(page.locator(".plain")).to_have_text("once once ")
    expect(page.get_by_role("alert")).to_have_count(0)
    assert sent[1]["messages"][-1]["content"] == "once " and sent[1]["continue_final_message"]
    ask(page, "Why?")
    alert(page, "the connection was lost")


NAMES = r"""{"\u200b": "zero-width space", "\u202e": "RTL override", "\u00ad": "soft hyphen",
"\ufeff": "byte order mark", "\u00a0": "no-break space", "\u2066": "U+2066", "\u0007": "U+0007",
"\udb40\udc41": "U+E0041", "\ufe0f": "U+FE0F", "a\u200bb": "zero-width space"}"""


def test_invisible_characters_have_names(servers, visit):
    """In the list of tokens, for a screen reader, and in the text, where nothing would be seen."""
    page = visit(servers[0], KEY)
    names = json.loads(NAMES)
    body = stream("A", likeliest=names) + stream("\u200b")
    page.route("**/v1/chat/completions", partial(fulfil, body))
    ask(page, "Who?")
    page.locator(TOKEN).first.click()
    options = page.get_by_role("option")
    for i, (text, name) in enumerate(names.items(), start=1):
        expect(options.nth(i)).to_contain_text(f"\u2039{name}\u203a")
        assert name in options.nth(i).get_attribute("aria-label"), text
    mark = "(e) => getComputedStyle(e, '::before').content"
    assert page.locator(TOKEN).nth(1).evaluate(mark) == '"\u00b7"'


def test_errors_of_others_and_a_server_that_is_not_there(servers, visit, browser):
    """What stands before the server may answer in words of its own; the next question tries again."""
    page = visit(servers[0], KEY)
    answers_ = [{"status": 413, "body": "Content too large"}, {"body": stream("A")}]
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answers_.pop(0)))
    ask(page, "Who?")
    alert(page, "the answer was 413")
    ask(page, "Who?")
    assert answers(page)[-1] == "A"
    page = browser.new_page()
    page.route("**/v1/models", lambda route: route.abort())
    page.goto(servers[1].url)
    alert(page, "no model: the connection was lost")
    page.unroute("**/v1/models")
    page.fill("#message", "Once")
    press(page, "Send")
    expect(page.locator("#model")).to_have_text("stories")
    expect(page.locator("#message")).to_have_value("Once")
    ask(page, "Once")


NGINX = """daemon off; master_process off; pid %(folder)s/pid; error_log %(folder)s/log; events {}
http {
  access_log off; client_body_temp_path %(folder)s/body; proxy_temp_path %(folder)s/proxy;
  fastcgi_temp_path %(folder)s/a; uwsgi_temp_path %(folder)s/b; scgi_temp_path %(folder)s/c;
  server {
    listen 127.0.0.1:%(port)s ssl; ssl_certificate %(folder)s/cert; ssl_certificate_key %(folder)s/key;
%(location)s
  }
}"""


@pytest.mark.skipif(not shutil.which("nginx") or not shutil.which("openssl"), reason="no nginx")
def test_behind_a_proxy(servers, visit, tmp_path):
    """With TLS and in a folder: by the lines that the documents show."""
    usage = (Path(__file__).parent.parent / "docs/usage.md").read_text("utf-8")
    location = re.search(r"```nginx\n(.*?)```", usage, re.DOTALL)[1]
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -days 2 -keyout key -out cert"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lines = location.replace("127.0.0.1:8080", servers[1].url.removeprefix("http://"))
    about = {"folder": tmp_path, "port": port, "location": lines}
    (tmp_path / "conf").write_text(NGINX % about)
    proxy = subprocess.Popen(["nginx", "-e", tmp_path / "log", "-c", tmp_path / "conf"])
    try:
        for _ in range(100):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        there = SimpleNamespace(url=f"https://localhost:{port}/llm/")
        page = visit(there, ignore_https_errors=True)
        ask(page, "Once upon a time")
        said = answer(servers[1], "completions", prompt="Once upon a time")["text"]
        assert answers(page) == [said]
    finally:
        proxy.terminate()
        proxy.wait()
