import pytest

from course_lib.authoring import rules
from course_lib.authoring.notebook import CourseError

TWO = """\
class A(B):
    'Doc.'
    def f(
        self,
        x,
    ):
        "Kept."
        # kept
{}

    async def g(self) -> int:
{}

print('after')"""
STUB = "        # YOUR CODE HERE\n        raise NotImplementedError"


def test_several_functions_and_methods_in_one_cell():
    bodies = "        # gone\n        if x:\n            return 1\n        return 2", "        return 3"
    solved = [f"        ### BEGIN SOLUTION\n{body}\n        ### END SOLUTION" for body in bodies]
    assert rules.stub(TWO.format(*solved)) == TWO.format(STUB, STUB)
    assert rules.solved(TWO.format(*solved)) == TWO.format(*bodies)


def test_a_starter_is_put_in_place():
    made = rules.stub(
        "def f(x):\n"
        "    'Doc.'\n"
        "    ### BEGIN SOLUTION\n"
        "    return x.sum()\n"
        "    ### END SOLUTION\n"
        "\n"
        "    ### BEGIN STARTER\n"
        "    # total = 0\n"
        "    # for y in x:\n"
        "    #     # slow: waits each time\n"
        "    #     total += y.item()\n"
        "    #\n"
        "    # return total\n"
        "    ### END STARTER\n"
        "f(1)"
    )
    assert made == (
        "def f(x):\n    'Doc.'\n    total = 0\n    for y in x:\n        # slow: waits each time\n"
        "        total += y.item()\n\n    return total\nf(1)"
    )


BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
STARTER, END_STARTER = "### BEGIN STARTER", "### END STARTER"
SOLVED = (BEGIN, "return 1", END)


def f(*lines):
    "A function with these lines as its body."
    return "\n".join(["def f(x):", *("    " + line for line in lines)])


BODY = "must be exactly the body of one function or method"
NO_BLOCK = "the marker at line {} belongs to no block"
MISPLACED = {
    "no end": (f(BEGIN, "return 1"), NO_BLOCK.format(2)),
    "nested": (f(BEGIN, *SOLVED, END), BODY),
    "at module level": ("\n".join([BEGIN, "x = 1", END]), BODY),
    "around part of a body": (f("y = 2", *SOLVED), BODY),
    "where the body goes on": (f(BEGIN, "y = 1", END, "return y"), BODY),
    "around the docstring": (f(BEGIN, "'Doc.'", "return 1", END), BODY),
    "in a branch": (f("if x:", *("    " + line for line in SOLVED)), BODY),
    "indented otherwise": ("\n".join(["def f():", "  " + BEGIN, "    return 1", "  " + END]), BODY),
    "its end indented otherwise": (f(BEGIN, "return 1") + "\n" + END, NO_BLOCK.format(2)),
    "misspelt": (f("## BEGIN SOLUTION", "return 1", END), NO_BLOCK.format(2)),
    "a starter alone": (f(STARTER, "# y", END_STARTER, "return 1"), NO_BLOCK.format(2)),
    "a starter without blanks": (f(*SOLVED, STARTER, "#return 2", END_STARTER), "commented out with `# `"),
    "beside a magic": ("%timeit 3\n" + f(*SOLVED), r"plain Python \(line 1 is not\)"),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_misplaced_markers_are_refused(name):
    text, why = MISPLACED[name]
    with pytest.raises(CourseError, match=why) as e:
        rules.stub(text)
    assert "\n" not in str(e.value)
