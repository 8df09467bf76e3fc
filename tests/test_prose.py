"Numbers in a lesson's text."

import pytest
import small_course
from small_course import code, markdown

from course_lib.authoring import prose

FIGURES = {
    "toy.copy_tbps": {"value": 4.2713, "unit": "TB/s"},
    "toy.steps": {"value": 1156.2, "unit": ""},
    "toy.drop": {"value": -0.0123, "unit": "%"},
}


@pytest.mark.parametrize(
    "printed, value, expected",
    [
        ("4.27", 3.9012, "3.90"),
        ("4.3", 4.2713, "4.3"),
        ("5", 4.2713, "4.3"),  # two digits at the least
        ("0.05", 0.0512, "0.051"),
        ("306", 1256, "1,260"),
        ("1,156", 987.64, "987.6"),
        ("2048", 4096.0, "4096"),
        ("−1.5", -2.04, "−2.0"),
        ("1.5", 0.0, "0.0"),
    ],
)
def test_a_number_keeps_its_digits(printed, value, expected):
    assert prose.like(printed, value) == expected


def test_tagged_numbers_are_renewed_and_nothing_else():
    text = (
        "3.95<!--toy.copy_tbps--> TB/s, 3.95<!--given--> TB/s, 1,000<!-- toy.steps --> steps, 1<!--toy.x-->."
    )
    new = (
        "4.27<!--toy.copy_tbps--> TB/s, 3.95<!--given--> TB/s, 1,156<!-- toy.steps --> steps, 1<!--toy.x-->."
    )
    assert prose.renewed(text, FIGURES) == new
    assert prose.renewed(new, FIGURES) == new


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("4.27<!--toy.copy_tbps--> TB/s", None),
        ("down by −0.012<!--toy.drop--> %", None),
        ("4.28<!--toy.copy_tbps--> TB/s", "4.28 is tagged toy.copy_tbps, which is 4.27 now"),
        ("4.27<!--toy.copy_gbps--> TB/s", "4.27 is tagged toy.copy_gbps, which is not recorded"),
        ("4.27 TB/s <!--toy.copy_tbps-->", "must follow its number at once"),
    ],
)
def test_tagged_numbers_must_be_true(text, sentence):
    found = prose.tag_problems(text, FIGURES)
    assert (found == []) if sentence is None else (len(found) == 1 and sentence in found[0])


@pytest.mark.parametrize(
    "text, found",
    [
        ("It takes 5 ms, 2.5 µs or 1,000 s.", ["5 ms", "2.5 µs", "1,000 s"]),
        ("785 TFLOP/s at 4.27 TB/s: 12 %, 50%, 3x and 4 × faster", None),
        ("99.8&nbsp;% of FLOPs", ["99.8&nbsp;%"]),
        ("a `5 ms` span, ```\n5 ms\n``` a block, $5\\,s$ a formula and <img width='50%'>", []),
        ("989<!--given--> TFLOP/s and 61<!--cited--> %", []),
        ("an 8192 × 8192 matrix, 2 × n, since the 1990s, 5 steps, 4 streams, 25 minutes, 3 x 3", []),
        ("05.1, 10^26, H200, 2026", []),
    ],
)
def test_untagged_numbers_are_found(text, found):
    expected = ["785 TFLOP/s", "4.27 TB/s", "12 %", "50%", "3x", "4 ×"] if found is None else found
    assert prose.untagged(text) == expected


def test_the_sources_section_is_exempt_and_no_other():
    nb = small_course.worked()
    nb["cells"] = [
        markdown("a", "5 ms\n\n## Sources\n\n6 ms"),
        code("b", "1"),
        markdown("c", "## Recap\n\n9 ms"),
    ]
    found = prose.problems(nb, {})
    assert [f.split(":")[0] + f.split("'")[1] for f in found] == [
        "cell `a`5 ms",
        "cell `c`9 ms",
    ]


def test_names_that_code_notes():
    nb = small_course.worked(slug="toy")
    nb["cells"] = [
        code("a", "recorded.note('toy.copy_tbps', 1, 'TB/s')\ncheck.yours('toy.1')\nx = 'toy'"),
        code(
            "b", """%%gpu it\nnote(f"toy.matmul.{kind.replace(' ', '_')}", 1)\nnote(f"toy.{kind}.eager", 2)"""
        ),
    ]
    assert prose.noted(nb) == ["toy.*.eager", "toy.copy_tbps", "toy.matmul.*"]


def test_a_renewed_number_stays():
    text = prose.renewed("takes 60<!--toy.us--> µs", {"toy.us": {"value": 145.856}})
    assert text == "takes 146<!--toy.us--> µs" == prose.renewed(text, {"toy.us": {"value": 145.856}})
