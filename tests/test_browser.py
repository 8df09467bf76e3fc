"""Lesson 01 as a learner takes it: `course lab` in Debian's Chromium, driven by Playwright.

SCREENSHOTS=FOLDER pytest tests/test_browser.py -k screenshots looks at worked lessons instead.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import small_course
from test_lab import get, running

from course_lib.authoring import notebook
from course_lib.descent import solutions

playwright = pytest.importorskip("playwright.sync_api", reason="browser tests need the package playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="browser tests need Chromium: apt-get install chromium")

QUIET = ("background-networking", "component-update", "sync", "quic", "gpu")
ERROR = ".jp-Notebook [data-mime-type='application/vnd.jupyter.stderr']"


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

    words = [sys.executable, "-m", "course_lib.authoring.cli", "check", "01", "--work", tmp_path / "work"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
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
