"""`course book`: the worked lessons, with their recorded outputs, as a static site that needs no network.

nbconvert turns each notebook into HTML, and latex2mathml its formulas into MathML, which browsers draw.
The pages' frame, style and script are in book_theme/; nothing is loaded from elsewhere.
"""

import base64
import html
import json
import re
from pathlib import Path

from course_lib import recorded, show
from course_lib.authoring import catalogue, notebook, prose, rules
from course_lib.authoring.notebook import CourseError

try:
    import jinja2
    import nbformat
    from bs4 import BeautifulSoup
    from latex2mathml.converter import convert
    from nbconvert import HTMLExporter, TemplateExporter
    from nbconvert.filters.highlight import Highlight2HTML
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
    from pygments.styles import get_style_by_name
    from pygments.token import STANDARD_TYPES, Error
except ImportError as e:
    raise CourseError(f"course book needs {e.name}: `pip install -e '.[dev]'` brings it") from None

THEME = Path(__file__).with_name("book_theme")


class Renderer(IPythonRenderer):
    "Markdown to HTML with MathML for formulas, and short ids for headings: exercise-roofline.1."

    def heading(self, text, level, **attrs):
        plain = html.unescape(re.sub("<[^>]*>", "", text)).partition(" · ")[0]
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", plain).strip("-").lower()
        return f'<h{level} id="{name}">{text}<a class="anchor-link" href="#{name}">¶</a></h{level}>\n'

    def inline_math(self, body):
        return convert(body)

    def block_math(self, body):
        return convert(body, display="block")


class Exporter(HTMLExporter):
    "nbconvert's HTML, without its search for images that lack a text: that takes half of the time."

    def from_notebook_node(self, nb):
        self.register_filter("highlight_code", Highlight2HTML(pygments_lexer="ipython3"))
        return TemplateExporter.from_notebook_node(self, nb)


def book_cmd(args):
    "Write the site into `args.out`. Raises CourseError where that folder holds something else."
    out, lessons = args.out, {path.stem: nb for path, nb in catalogue.published().values()}
    if out.exists() and not (out.is_dir() and ((out / "book.js").exists() or not any(out.iterdir()))):
        raise CourseError(f"{out} holds something that is no book: name another folder with --out")
    pages = [_index(lessons), *(_lesson(stem, lessons) for stem in lessons), _figures(lessons)]
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.html"):
        old.unlink()
    frame = jinja2.Environment(loader=jinja2.FileSystemLoader(THEME)).get_template("page.html.j2")
    parts, rows = {}, []
    for page in pages:
        parts.setdefault(page["part"], []).append(page)
    for before, page, after in zip([None, *pages[:-1]], pages, [*pages[1:], None], strict=True):
        soup = BeautifulSoup(re.sub("</?span[^>]*>", "", page["body"]), "html.parser")
        page["toc"] = [(h["id"], h.get_text().removesuffix("¶")) for h in soup.select("h2[id]")]
        rows += _sections(soup, page)
        text = frame.render(page=page, parts=parts, before=before, after=after)
        (out / f"{page['name']}.html").write_text(text, encoding="utf-8")
    (out / "search.js").write_text(f"SECTIONS = {json.dumps(rows, ensure_ascii=False)}\n", encoding="utf-8")
    (out / "book.js").write_text((THEME / "book.js").read_text(encoding="utf-8"), encoding="utf-8")
    style = (THEME / "book.css").read_text(encoding="utf-8") + _colours_of_code()
    (out / "book.css").write_text(style, encoding="utf-8")
    print(f"wrote {len(pages)} pages: open {out / 'index.html'}")


def _lesson(stem, lessons):
    "The page of the worked notebook lessons[stem]."
    nb, heading = lessons[stem], ""
    about, stamp = nb["metadata"]["course"], notebook.stamp(nb)
    head = f"{_facts(nb)}<br>Recorded on {stamp['gpu']}, torch {stamp['torch']}, {stamp['date']} · "
    head += f"<code>course lab {stem[3:]}</code> opens it"
    nb = nbformat.reads(json.dumps(nb), as_version=4)
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            heading = next(iter(re.findall(r"^#+ (.*)", cell.source, re.MULTILINE)), heading)
            cell.source = _linked(cell.source, lessons)
            continue
        cell.source = rules.solved(cell.source.removeprefix("# NBVAL_CHECK_OUTPUT\n"))
        for out in cell.outputs:
            if "image/png" in out.get("data", {}):
                out.metadata.setdefault("image/png", {})["alt"] = f"{heading}: {cell.id.replace('-', ' ')}"
    title, _, text = nb.cells[0].source.partition("\n")
    nb.cells[0].source = f'{title}\n\n<p class="about">{head}</p>\n{text}'
    exporter = Exporter(template_name="book_theme", extra_template_basedirs=[str(THEME.parent)],
                            exclude_input_prompt=True, exclude_output_prompt=True)  # fmt: skip
    exporter.register_filter("markdown2html", _html)
    body, _ = exporter.from_notebook_node(nb)
    return {"name": stem, "title": about["title"], "number": stem[:2], "part": about["part"], "body": body}


def _facts(nb):
    about, count = nb["metadata"]["course"], len(notebook.exercises(nb))
    return f"{about['minutes']} minutes · {count} exercises · {html.escape(about['needs'])}"


def _linked(text, lessons):
    "Markdown whose recorded numbers lead to the table of figures, and whose lessons lead to their pages."
    pages = {stem[3:]: stem for stem in lessons}
    figures = {name for nb in lessons.values() for name in notebook.stamp(nb).get("figures", {})}

    def number(m):
        link = f'<a class="figure" href="figures.html#{m[2]}" title="{m[2]}">{m[1]}</a>'
        return link if m[2] in figures else m[0]

    def lesson(m):
        return f"{m[1]}[*{m[2]}*]({pages[m[2]]}.html)" if m[2] in pages else m[0]

    return re.sub(r"([Ll]esson )\*(\w+)\*", lesson, re.sub(f"({prose.NUMBER}){prose.NAME}", number, text))


def _html(text):
    return MarkdownWithMath(renderer=Renderer(escape=False)).render(text)


def _index(lessons):
    "The first page: how README begins, and the lessons with their questions."
    readme = (notebook.ROOT / "README.md").read_text(encoding="utf-8")
    text, part = re.split(r"^## |^<!-- lessons", readme, maxsplit=1, flags=re.MULTILINE)[0], None
    for stem, nb in lessons.items():
        about = nb["metadata"]["course"]
        text += f"\n\n## {about['part']}\n" * (about["part"] != part)
        part = about["part"]
        question = re.search(r"\*\*(.+?)\*\*|$", notebook.source(nb["cells"][0]), re.DOTALL)[1] or ""
        text += f"\n\n### {stem[:2]} [{about['title']}]({stem}.html)\n\n{question}"
        text += f'\n\n<p class="about">{_facts(nb)}</p>'
    body = _html(_linked(re.sub(r"\]\(([\w./-]+\.png)\)", _embedded, text), lessons))
    return {"name": "index", "title": "Training, fast", "number": "", "part": "", "body": body}


def _embedded(m):
    data = base64.b64encode((notebook.ROOT / m[1]).read_bytes()).decode()
    return f"](data:image/png;base64,{data})"


def _figures(lessons):
    "The table of every recorded figure."
    columns = ("figure", "value", "unit", "bar", "machine", "torch", "date")
    head = f"<table class='figures'><tr>{''.join(f'<th>{c}</th>' for c in columns)}</tr>"
    found = recorded.figures()
    body = f"<h1>Recorded figures</h1><p>{len(found)} figures that the lessons measured and recorded.</p>"
    for stem, nb in lessons.items():
        topic, title = stem[3:], html.escape(nb["metadata"]["course"]["title"])
        rows = [f for f in found if f["lesson"] == topic]
        body += f'<h2 id="{topic}"><a href="{stem}.html">{title}</a></h2>{head}'
        for f in rows:
            bar = f"{f['bar']['op']} {f['bar']['value']:g}" if f.get("bar") else ""
            cells = show.number(f["value"]), f["unit"], bar, f["machine"], f["torch"], f["date"]
            cells = "".join(f"<td>{html.escape(c)}</td>" for c in cells)
            name = f["name"].replace(".", ".<wbr>")  # where it may be broken
            body += f'<tr id="{f["name"]}"><td><code>{name}</code></td>{cells}</tr>'
        body += "</table>"
    return {"name": "figures", "title": "Recorded figures", "number": "", "part": "", "body": body}


def _sections(soup, page):
    "What is searched: a row [page, id of its heading, title, heading, text] for each heading."
    row = [page["name"], "", page["title"], page["title"], ""]
    rows = [row]
    for element in soup.find_all(["h1", "h2", "h3", "p", "li", "td", "pre"]):
        text = " ".join(element.get_text().split())
        if element.name in ("h2", "h3"):
            row = [page["name"], element.get("id", ""), page["title"], text.removesuffix("¶"), ""]
            rows.append(row)
        elif not element.find_parent(["li", "td"]):
            row[4] += text + " "
    return rows


def _colours_of_code():
    "CSS of pygments' colours, for a light and a dark page."
    light, dark, css = get_style_by_name("default"), get_style_by_name("github-dark"), ""
    for token, name in STANDARD_TYPES.items():
        day, night = light.style_for_token(token), dark.style_for_token(token)
        if name and token is not Error and (day["color"] or night["color"]):
            colours = f"#{day['color'] or '1f2328'}, #{night['color'] or 'e6edf3'}"
            css += f".highlight .{name} {{ color: light-dark({colours}) }}\n"
    return css
