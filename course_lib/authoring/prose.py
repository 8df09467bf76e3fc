"""Numbers in a lesson's text carry their source: `4.27<!--roofline.copy_tbps--> TB/s`, a figure's name.

One from elsewhere carries `<!--cited-->`, one that is a definition or an instruction `<!--given-->`.
"""

import re
from decimal import Decimal

from course_lib.authoring import notebook

NUMBER = r"[-−]?\d[\d,]*(?:\.\d+)?"
NAME = r"<!--\s*([a-z]\w*\.[\w.]+)\s*-->"
GAP = r"(?:\s|&nbsp;)*"
UNIT = r"[TGP]?FLOP/s|[TGM]B/s|[mnµμu]s|s|%|×|x"
# Not 8192 × 8192 and 2 × n, not 3 x 3, not the 1990s.
BARE = re.compile(
    rf"(?<![\w.,<]){NUMBER}{GAP}(?:(?!s\b|x\b|×)(?:{UNIT})|(?<!\d)s|(?<=\d)x|×(?!\s*(?:\d|\(|\w\b)))(?![\w/])"
)
CODE = r"```.*?```|(`+)(?!`).*?(?<!`)\1(?!`)"
NO_PROSE = re.compile(rf"{CODE}|\$\$.*?\$\$|\$[^$\n]+\$|<(?!!--)[^<>]*>", re.DOTALL)


def like(printed, value):
    "`value` printed the way the number `printed` is: as many significant digits, two at the least."
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

    for _ in range(2):  # 60 becomes 150 at two digits, and 150 says three
        text = re.sub(f"({NUMBER}){NAME}", new, text)
    return text


def tag_problems(text, figures):
    "What is wrong with the tagged numbers of a text, as sentences."
    found = []
    for m in re.finditer(NAME, text):
        number, figure = re.search(rf"{NUMBER}\Z", text[: m.start()]), figures.get(m[1])
        if number is None:
            found.append(f"the tag {m[1]} must follow its number at once: `4.27<!--{m[1]}--> unit`")
        elif figure is None:
            found.append(f"{number[0]} is tagged {m[1]}, which is not recorded")
        elif number[0] != (now := like(number[0], figure["value"])):
            found.append(f"{number[0]} is tagged {m[1]}, which is {now} now: `course record` renews it")
    return found


def untagged(text):
    "The numbers with a unit in a text that carry no tag; code spans and formulas don't count."
    return [m[0] for m in BARE.finditer(NO_PROSE.sub(" ", text))]


def problems(nb, figures):
    "What is wrong with the numbers in a notebook's text, as sentences that name the cell."
    found = []
    for cell in nb["cells"]:
        if cell["cell_type"] == "markdown":
            text = re.split(r"^#+ Sources\b", notebook.source(cell), flags=re.MULTILINE)[0]
            wrong = tag_problems(text, figures)
            wrong += [f"{n!r} needs a figure's name, `<!--cited-->` or `<!--given-->` after the number"
                      for n in untagged(text)]  # fmt: skip
            found += [f"cell `{cell['id']}`: {w}" for w in wrong]
    return found


def noted(nb):
    "The figures that the code may note, as patterns: `toy.rate`, and `toy.rate.*` of an f-string."
    code = "\n".join(notebook.source(c) for c in nb["cells"] if c["cell_type"] == "code")
    slug = nb["metadata"]["course"]["slug"]
    found = re.findall(rf"""["']({slug}\.(?!\d+["'])(?:[\w.]|{{[^{{}}]*}})+)["']""", code)
    return sorted({re.sub(r"{[^{}]*}", "*", name) for name in found})
