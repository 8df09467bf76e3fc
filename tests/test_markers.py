import pytest

from course_lib.authoring import rules
from course_lib.authoring.notebook import CourseError


def test_several_functions_and_methods_in_one_cell():
    made = rules.stub(
        "import math\n\n"
        "class A(B):\n"
        "    'Doc.'\n"
        "    def f(\n        self,\n        x,\n    ):\n"
        '        """Two\n        lines."""\n'
        "        # kept\n"
        "        ### BEGIN SOLUTION\n"
        "        # gone\n"
        "        if x:\n            return 1\n        return 2\n"
        "        ### END SOLUTION\n\n"
        "    async def g(self) -> int:\n"
        "        ### BEGIN SOLUTION\n"
        "        @decorated\n        def h():\n            return 3\n        return h()\n"
        "        ### END SOLUTION\n\n"
        "print('after')"
    )
    assert made == (
        "import math\n\n"
        "class A(B):\n"
        "    'Doc.'\n"
        "    def f(\n        self,\n        x,\n    ):\n"
        '        """Two\n        lines."""\n'
        "        # kept\n"
        "        # YOUR CODE HERE\n        raise NotImplementedError\n\n"
        "    async def g(self) -> int:\n"
        "        # YOUR CODE HERE\n        raise NotImplementedError\n\n"
        "print('after')"
    )


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
    "no begin": (f("return 1", END), NO_BLOCK.format(3)),
    "nested": (f(BEGIN, *SOLVED, END), BODY),
    "crossed": (f(BEGIN, "return 1", END_STARTER), NO_BLOCK.format(2)),
    "at module level": ("\n".join([BEGIN, "x = 1", END]), BODY),
    "around part of a body": (f("y = 2", *SOLVED), BODY),
    "where the body goes on": (f(BEGIN, "y = 1", END, "return y"), BODY),
    "around the docstring": (f(BEGIN, "'Doc.'", "return 1", END), BODY),
    "around a function": ("\n".join([BEGIN, f("return 1"), END]), BODY),
    "around a body and more": (f(BEGIN, "return 1") + "\ny = 2\n    " + END, BODY),
    "in a class": ("class A:\n    " + "\n    ".join([BEGIN, "x = 1", END]), BODY),
    "in a branch": (f("if x:", *("    " + line for line in SOLVED)), BODY),
    "around nothing": (f("'Doc.'", BEGIN, END), BODY),
    "indented otherwise": ("\n".join(["def f():", "  " + BEGIN, "    return 1", "  " + END]), BODY),
    "its end indented otherwise": (f(BEGIN, "return 1") + "\n" + END, NO_BLOCK.format(2)),
    "misspelt": (f("## BEGIN SOLUTION", "return 1", END), NO_BLOCK.format(2)),
    "in lower case": (f(BEGIN.lower(), "return 1", END.lower()), NO_BLOCK.format(2)),
    "on a line with code": (f("return 1  " + BEGIN), NO_BLOCK.format(2)),
    "a starter alone": (f(STARTER, "# y", END_STARTER, "return 1"), NO_BLOCK.format(2)),
    "a starter elsewhere": (
        f(*SOLVED) + "\ny = 2\n" + f(STARTER, "# y", END_STARTER),
        "plain Python",
    ),
    "a starter after code": (
        f(*SOLVED, "# more", STARTER, "# y", END_STARTER),
        NO_BLOCK.format(6),
    ),
    "a starter of code": (f(*SOLVED, STARTER, "return 2", END_STARTER), BODY),
    "a starter without blanks": (f(*SOLVED, STARTER, "#return 2", END_STARTER), "commented out with `# `"),
    "a starter that is no Python": (f(*SOLVED, STARTER, "# return (", END_STARTER), "valid Python once"),
    "beside a magic": ("%timeit 3\n" + f(*SOLVED), r"plain Python \(line 1 is not\)"),
    "in a string": ("y = '''\n" + f(*SOLVED) + "\n'''", BODY),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_misplaced_markers_are_refused(name):
    text, why = MISPLACED[name]
    with pytest.raises(CourseError, match=why) as e:
        rules.stub(text)
    assert "\n" not in str(e.value)
