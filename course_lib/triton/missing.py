"What stands in for Triton where it has no build, so that the cells of lesson triton can be run one by one."

from course_lib import kernels

SENTENCE = (
    "Triton isn't installed here (it has builds for Linux on x86-64): kernels can't run; "
    "what can be done is the reading, the counting of operators, the explorer and exercise triton.6."
)


class Kernel:
    "A kernel that was defined and can't be launched."

    def __init__(self, fn):
        self.fn = fn

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        refuse()


def refuse(*args, **kwargs):
    "Whatever is called: it can't be."
    raise kernels.KernelError(SENTENCE)


class StandIn:
    "For `triton`, its language and the modules of kernels: `jit` gives a `Kernel`, other names refuse calls."

    jit = Kernel

    def __call__(self, *args, **kwargs):
        refuse()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return refuse


def stand_in():
    "Say what is missing, and give something that has a `jit` and a `constexpr`."
    print(SENTENCE)
    return StandIn()
