"The most memory that a piece of code holds beside its arguments, counted: the same on every machine."

from course_lib.meter import peak_memory as extra  # noqa: F401
