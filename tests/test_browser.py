"""Lesson 01 as a learner takes it: `course lab` in Debian's Chromium, driven by Playwright.

With SCREENSHOTS=FOLDER, pictures of the worked lessons are written there, at two widths and in both themes;
LESSONS="06 17" says of which lessons.
"""

import contextlib
import json
import os
import re
import shutil
import socket
from pathlib import Path

import pytest
import small_course
from test_lab import get, running

from course_lib.authoring import notebook

playwright = pytest.importorskip("playwright.sync_api", reason="browser tests need the package playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="browser tests need Chromium: apt-get install chromium")

QUIET = ("background-networking", "component-update", "sync", "quic", "gpu")
ERROR = ".jp-Notebook :is([data-mime-type$='.stderr'], [data-mime-type$='.error'])"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        words = ["--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in QUIET)]
        browser = p.chromium.launch(executable_path=CHROMIUM, args=words)
        yield browser
        browser.close()


@contextlib.contextmanager
def lab(folder, *lesson):
    "`course lab` on folder/work, without the settings of whoever runs the test; yields its address."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    own = {"JUPYTER_CONFIG_DIR": str(folder / "jupyter"), "IPYTHONDIR": str(folder / "ipython")}
    words = [*lesson, "--work", folder / "work", "--port", port, "--no-browser"]
    with running(small_course.REPOSITORY, *words, **own) as (_, line):
        address = re.search(r"http://\S+", line)[0]
        get(f"http://127.0.0.1:{port}/api/status", address.split("token=")[1])
        yield address


class Page:
    "A notebook that is open in the browser. `self[id]` is the cell that `nb` has under this id."

    def __init__(self, browser, address, nb, width=1280):
        self.page = browser.new_page(viewport={"width": width, "height": 1000})
        self.page.goto(address)
        self.ids = [cell["id"] for cell in nb["cells"]]
        self.cells = self.page.locator(".jp-Notebook .jp-Cell")
        playwright.expect(self.cells).to_have_count(len(self.ids), timeout=60_000)
        self.idle()

    def __getitem__(self, name):
        return self.cells.nth(self.ids.index(name))

    def idle(self):
        playwright.expect(self.page.get_by_text("Python 3 (ipykernel) | Idle")).to_be_visible(timeout=60_000)

    def run(self, what):
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name=what, exact=True).click()

    def select(self, name):
        self[name].locator(".jp-InputPrompt").click()

    def says(self, name, text):
        playwright.expect(self[name].locator(".jp-OutputArea")).to_contain_text(text, timeout=60_000)

    def errors(self):
        return [text.strip() for text in self.page.locator(ERROR).all_text_contents()]

    def figure(self, name):
        image = self[name].locator(".jp-OutputArea img").last
        playwright.expect(image).to_be_attached(timeout=60_000)
        return image.get_attribute("src")


def test_a_learner_takes_lesson_01(browser, tmp_path):
    lesson = notebook.load(notebook.lessons()["01"])
    with lab(tmp_path, "01") as address:
        page = Page(browser, address, lesson)

        page.run("Run All Cells")
        page.says("ex1-check", "descent.1 not passed: not solved yet")
        page.idle()
        assert page.errors() == [page["ex1-check"].locator(".jp-OutputArea").text_content().strip()]
        assert (
            page.errors()[0].startswith("descent.1 not passed: not solved yet")
            and "\n" not in page.errors()[0]
        )
        assert page["surfaces"].locator("img").count() == 0
        # JupyterLab shows the notebook's end by then; its table of contents leads back.
        page.page.get_by_role("tab", name="Table of Contents").click()
        page.page.locator("[data-running='-0.5']").click()
        playwright.expect(page["ex1-check"].locator(".jp-OutputArea")).to_be_in_viewport()

        page["ex1-stub"].locator(".cm-content").click()
        page.page.keyboard.press("Control+a")
        page.page.keyboard.insert_text(MINE)
        page.page.keyboard.press("Shift+Enter")
        page.run("Run Selected Cell and All Below")
        page.says("ex1-check", "descent.1 passed: ")
        page.says("surfaces", "mine: 300 steps")
        page.says("ex2-check", "descent.2 not passed: not solved yet")
        page.idle()
        page.figure("surfaces")
        assert page["surfaces"].get_by_text("the course's own solution").count() == 0
        assert len(page.errors()) == 1
        said = page.errors()[0]

        for name in ("digits", "image-bowl", "explorer-static", "explorer"):
            page.select(name)
            page.page.keyboard.press("Shift+Enter")
        page.says("image-bowl", "descent.2 is not passed here: the course's own solution is used")
        page.says("image-bowl", "mine: 400 steps")
        before = page.figure("explorer")
        page["explorer"].locator(".noUi-handle").first.press("ArrowRight")
        image = page["explorer"].locator(".jp-OutputArea img").last
        playwright.expect(image).not_to_have_attribute("src", before, timeout=60_000)
        page.idle()
        assert page.errors() == [said]

        page.page.keyboard.press("Control+s")
        playwright.expect(page.page.locator(".lm-DockPanel .jp-mod-dirty")).to_have_count(0)
        page.page.close()

    done = small_course.course(small_course.REPOSITORY, "check", "01", "--work", tmp_path / "work")
    verdicts = dict(re.findall(r"^(descent\.\d)  .*?  (passed|not passed: .*)$", done.stdout, re.MULTILINE))
    assert done.returncode == 1 and verdicts.pop("descent.1") == "passed"
    assert {f"{name} {verdict.strip()}" for name, verdict in verdicts.items()} >= {said}
    assert "\n1 of 6 passed\nnext: descent.2, " in done.stdout

    with lab(tmp_path) as address:  # on the first lesson with an unsolved exercise
        page = Page(browser, address, lesson)
        page.says("ex1-check", "descent.1 passed: ")
        assert "mine: " in page["ex1-stub"].locator(".cm-content").text_content()
        assert page.figure("surfaces")
        page.page.close()


MINE = """\
def descend(f, start, lr, steps):
    print(f"mine: {steps} steps")
    path = [start.detach()]
    for _ in range(steps):
        w = path[-1].clone().requires_grad_()
        (grad,) = torch.autograd.grad(f(w), w)
        path.append(w.detach() - lr * grad)
    return torch.stack(path)
"""


@pytest.mark.skipif(not os.environ.get("SCREENSHOTS"), reason="SCREENSHOTS=FOLDER names no folder")
@pytest.mark.parametrize("number", os.environ.get("LESSONS", "01 06 17").split())
def test_screenshots(browser, tmp_path, number):
    "Pictures of a worked lesson as it was recorded; what is wider than its cell is an error."
    shutil.copytree(notebook.NBS, tmp_path / "work")
    folder, nb = Path(os.environ["SCREENSHOTS"]), notebook.load(notebook.lessons(notebook.NBS)[number])
    folder.mkdir(parents=True, exist_ok=True)
    too_wide, errors = {}, []
    for theme in ("Light", "Dark"):
        settings = (
            tmp_path / "jupyter/lab/user-settings/@jupyterlab/apputils-extension/themes.jupyterlab-settings"
        )
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(json.dumps({"theme": f"JupyterLab {theme}"}))
        with lab(tmp_path, number) as address:
            for width in (1280, 1920):
                page = Page(browser, address, nb, width)
                page.page.add_style_tag(content=ALL_AT_ONCE)
                page.page.set_viewport_size({"width": width, "height": 3000})
                page.page.wait_for_timeout(1000)
                scroller = page.page.locator(".jp-WindowedPanel-outer")
                height = scroller.evaluate("e => e.scrollHeight")
                for k, top in enumerate(range(0, height, 2800)):
                    scroller.evaluate("(e, top) => e.scrollTo(0, top)", top)
                    page.page.wait_for_timeout(300)
                    page.page.screenshot(path=folder / f"{number}_{width}_{theme.lower()}_{k:02}.png")
                too_wide |= {(width, name): w for name in page.ids if (w := page[name].evaluate(TOO_WIDE))}
                errors += page.errors()
                page.page.close()
    assert not too_wide and not errors


ALL_AT_ONCE = ".jp-Notebook .jp-Cell { content-visibility: visible !important; }"
TOO_WIDE = """cell => [...cell.querySelectorAll(".jp-OutputArea-output, .jp-MarkdownOutput, table, img")]
    .filter(e => e.scrollWidth > e.clientWidth + 1
        || e.getBoundingClientRect().right > cell.getBoundingClientRect().right + 1)
    .map(e => `${e.tagName} ${e.scrollWidth} > ${e.clientWidth}`)"""
