"""Numbers in a lesson's text that come from somewhere: `4.27<!--05.copy_tbps--> TB/s`.

A number from a recording carries its figure's name, one from a source `<!--cited-->`, one that is a
definition or an instruction `<!--given-->`.
"""

import re
from decimal import Decimal

from course_lib.authoring import notebook

NUMBER = r"[-−]?\d[\d,]*(?:\.\d+)?"
TAGGED = re.compile(rf"({NUMBER})<!--\s*(\d\d\.[\w.]+)\s*-->")
TAG = re.compile(r"<!--\s*(\d\d\.[\w.]+)\s*-->")
UNIT = r"[TGP]?FLOP/s|[TGM]B/s|ms|[µμun]s|s|×|x|%"
GAP = r"(?:[\s\u00a0\u202f]|&nbsp;)*"
BARE = re.compile(rf"(?<![\w.,<])({NUMBER})({GAP})({UNIT})(?![\w/])")
UNIT_AFTER = re.compile(rf"{GAP}({UNIT})(?![\w/])")
PRODUCT = re.compile(r"\s*(?:\d|\(|[b-zB-Z]\b)")
CODE = re.compile(r"```.*?```|~~~.*?~~~|(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
MATH = re.compile(r"\$\$.*?\$\$|\$[^$\n]+\$", re.DOTALL)
HTML = re.compile(r"<(?!!--)[^<>]*>")


def like(printed, value):
    """`value` printed the way the number `printed` is: as many significant digits, two at the least.

    >>> like("4.3", 4.271), like("5", 4.271), like("1,156", 987.6)
    ('4.3', '4.3', '987.6')
    """
    digits = len(printed.lstrip("-−").replace(",", "").replace(".", "").lstrip("0"))
    rounded = Decimal(f"{float(value):.{max(digits, 2) - 1}e}")
    was_long = abs(Decimal(printed.replace(",", "").replace("−", "-"))) >= 1000
    comma = "," if "," in printed or (abs(rounded) >= 1000 and not was_long) else ""
    text = f"{rounded:{comma}f}"
    return text.replace("-", "−") if "−" in printed else text


def renewed(text, figures):
    "`text` with every number tagged with a name in `figures` ({name: {value, …}}) brought up to date."

    def new(m):
        return m[0].replace(m[1], like(m[1], figures[m[2]]["value"]), 1) if m[2] in figures else m[0]

    # Twice: 60 becomes 150 at two digits, and 150 says three.
    return TAGGED.sub(new, TAGGED.sub(new, text))


def tag_problems(text, figures):
    "What is wrong with the tagged numbers of a text, as sentences."
    found = []
    for m in TAG.finditer(text):
        number = re.search(rf"{NUMBER}\Z", text[: m.start()])
        figure = figures.get(m[1])
        if number is None:
            found.append(f"the tag {m[1]} must follow its number at once: `4.27<!--{m[1]}--> unit`")
        elif figure is None:
            found.append(f"{number[0]} is tagged {m[1]}, which is not recorded")
        elif number[0] != (now := like(number[0], figure["value"])):
            found.append(
                f"{number[0]} is tagged {m[1]}, which is recorded as {now}: `course record` renews it"
            )
        elif (unit := UNIT_AFTER.match(text, m.end())) and _differ(unit[1], figure["unit"]):
            found.append(f"{number[0]} {unit[1]} is tagged {m[1]}, which is recorded in {figure['unit']}")
    return found


def _differ(printed, recorded):
    def same(u):
        return u.replace("μ", "µ").replace("us", "µs").replace("x", "×")

    return re.fullmatch(UNIT, recorded) is not None and same(printed) != same(recorded)


def untagged(text):
    "The numbers with a unit in a text that carry no tag; code spans and formulas don't count."
    for pattern in (CODE, MATH, HTML):
        text = pattern.sub(" ", text)
    found = []
    for m in BARE.finditer(text):
        number, gap, unit = m.groups()
        product = unit in "×x" and PRODUCT.match(text, m.end())
        decade = unit == "s" and not gap and len(number) == 4
        if not (product or decade or (unit == "x" and gap)):
            found.append(number + gap + unit)
    return found


def prose(nb):
    "The markdown cells as (id, text), without the section headed Sources."
    level = 0  # of the heading Sources, while in its section
    for cell in nb["cells"]:
        if cell["cell_type"] != "markdown":
            continue
        kept, fenced = [], False
        for line in notebook.source(cell).splitlines():
            fenced ^= line.lstrip().startswith(("```", "~~~"))
            heading = None if fenced else re.match(r"(#+)\s+(.*)", line)
            if heading and (not level or len(heading[1]) <= level):
                level = len(heading[1]) if heading[2].strip().lower().startswith("sources") else 0
            kept += [] if level else [line]
        yield cell["id"], "\n".join(kept)


def problems(nb, figures):
    "What is wrong with the numbers in a notebook's text, as sentences that name the cell."
    found = []
    for name, text in prose(nb):
        found += [f"cell `{name}`: {p}" for p in tag_problems(text, figures)]
        found += [
            f"cell `{name}`: {n!r} needs a figure's name, `<!--cited-->` or `<!--given-->` after the number"
            for n in untagged(text)
        ]
    return found


def noted(nb):
    "A pattern for each figure that the code may note: names, and f-strings with a gap for each value."
    code = "\n".join(notebook.source(c) for c in nb["cells"] if c["cell_type"] == "code")
    names = re.findall(r"""["'](\d\d\.[\w.{}\[\]()'"]*?[\w}])["']""", code)
    return [re.compile(re.sub(r"\\\{.*?\\\}", r"[\\w.]+", re.escape(n))) for n in names]
