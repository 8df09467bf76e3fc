"The book: every page in a real browser, without a network."

import re
import shutil
import subprocess
import sys
from urllib.parse import unquote, urldefrag

import pytest
import small_course

from course_lib.authoring import catalogue, cli, notebook

# Chromium asks for its maker's hosts otherwise, and needs no sandbox in a container.
OPTIONS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
FACTS = """() => ({
    wide: document.documentElement.scrollWidth - innerWidth,
    cut: [...document.querySelectorAll("pre, table")].filter(e => e.scrollWidth > e.clientWidth + 1).length,
    open: document.querySelectorAll("details[open]").length,
    folded: [...document.querySelectorAll("details")].filter(e => e.textContent.length > 30).length,
    broken: [...document.images].filter(i => !i.naturalWidth || !i.alt).length,
    images: document.images.length,
    formulas: document.querySelectorAll("math").length,
    text: document.body.innerText,
    ids: [...document.querySelectorAll("[id]")].map(e => e.id),
    links: [...document.querySelectorAll("a")].map(a => a.href),
})"""


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    "The folder of the real course's book."
    out = tmp_path_factory.mktemp("book") / "site"
    command = [sys.executable, "-m", "course_lib.authoring.cli", "book", "--out", str(out)]
    done = subprocess.run(
        command, env=small_course.environment(notebook.ROOT), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if not chromium:
        pytest.skip("Chromium is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    "A page of 1280 pixels on a dark system that reaches files alone, and fails a test with what went wrong."
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="dark", offline=True)
    page, wrong = context.new_page(), []
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("requestfailed", lambda r: wrong.append(f"failed: {r.url[:200]}"))
    page.on("request", lambda r: None if re.match("(file|data):", r.url) else wrong.append(f"asked: {r.url}"))
    page.set_default_timeout(10_000)
    yield page
    context.close()
    assert wrong == []


def test_every_page_is_whole(book, page):
    facts = {}
    for path in sorted(book.glob("*.html")):
        page.goto(path.as_uri())
        facts[path.as_uri()] = page.evaluate(FACTS)
    lessons = {path.stem: nb for path, nb in catalogue.published().values()}
    assert {p.stem for p in book.glob("*.html")} == {"index", "figures", *lessons}
    for address, f in facts.items():
        name = address.rpartition("/")[2]
        assert (f["wide"], f["cut"], f["broken"], f["open"]) == (0, 0, 0, 0), name
        assert len(set(f["ids"])) == len(f["ids"]), name
        for link in f["links"]:
            there, place = urldefrag(link)
            assert there in facts and (not place or {place, unquote(place)} & {*facts[there]["ids"]}), link
    for stem, nb in lessons.items():
        f = facts[(book / f"{stem}.html").as_uri()]
        sources = [notebook.source(c) for c in nb["cells"] if c["cell_type"] == "markdown"]
        hints = sum(s.count("<details>") for s in sources)
        assert f["folded"] == hints + sum("exercise" in notebook.tags(c) for c in nb["cells"]), stem
        assert f["formulas"] >= any("$$" in s for s in sources) and "$$" not in f["text"], stem
        pictures = sum("image/png" in o.get("data", {}) for c in nb["cells"] for o in c.get("outputs", []))
        assert f["images"] == pictures, stem
        assert nb["metadata"]["course"]["title"] in facts[(book / "index.html").as_uri()]["text"]


def test_search_finds_a_section_and_opens_it(book, page):
    page.goto((book / "index.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("rmsnorm backward")
    page.locator("#found a").first.wait_for()
    assert "Your own kernels" in page.locator("#found a").first.inner_text()
    page.keyboard.press("Enter")
    page.wait_for_url("**/12_triton.html#exercise-triton.4")
    page.fill("#search", "no-lesson-has-this-word")
    assert page.locator("#found li").inner_text() == "No section holds all of these words."


def test_the_theme_follows_the_system_and_the_switch(book, page):
    def lightness():
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3

    page.goto((book / "index.html").as_uri())
    assert lightness() < 60
    page.click("#theme")
    assert lightness() > 200
    with page.expect_navigation():
        page.click("a[rel=next]")
    assert lightness() > 200  # the next page remembers


def test_a_book_overwrites_only_a_book(course_root, tmp_path, capsys):
    pytest.importorskip("nbconvert")
    pytest.importorskip("latex2mathml")
    draft = small_course.worked("06", "second", "Second")
    del draft["metadata"]["recorded"]
    small_course.put(course_root, draft)
    for _ in range(2):
        assert cli.main(["book"]) == 0
    assert {p.stem for p in (course_root / "build/book").glob("*.html")} == {"index", "figures", "01_tiny"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.html").write_text("mine")
    assert cli.main(["book", "--out", str(tmp_path / "mine")]) == 1
    assert "holds something that is no book: name another folder" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes.html"]
