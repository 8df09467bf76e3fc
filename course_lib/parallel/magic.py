"The cell magic `%%ranks`."

import argparse
import shlex

from course_lib.parallel.errors import Refused

_cells = 0


def register(shell):
    "Make `%%ranks` known to an IPython shell."
    if "ranks" not in shell.magics_manager.magics["cell"]:
        shell.register_magic_function(_ranks, "cell", "ranks")


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(f"%%ranks: {message}; write for example `%%ranks 4 --timeout 30`")


def _options(line):
    parser = _Parser(prog="%%ranks", add_help=False, exit_on_error=False)
    parser.add_argument("n", nargs="?", type=int)
    parser.add_argument("--backend", choices=["gloo", "nccl"])
    parser.add_argument("--timeout", type=float)
    try:
        return parser.parse_args(shlex.split(line))
    except argparse.ArgumentError as e:
        parser.error(str(e))


def _ranks(line, cell):
    """Execute the cell on every rank: `%%ranks [N] [--timeout SECONDS] [--backend gloo]`.

    Variables stay on the ranks from cell to cell. What a cell's last line gives is shown, by rank.
    """
    from course_lib.parallel import ranks

    global _cells
    given = _options(line)
    if given.n is None and given.backend is None:
        group = ranks.current()
    else:
        n = ranks.current().world if given.n is None else given.n
        group = ranks._current
        if group is None or group.closed or group.world != n or given.backend not in (None, group.backend):
            group = ranks.start(n, backend=given.backend)
    _cells += 1
    group.execute(cell, f"<%%ranks cell {_cells}>", timeout=given.timeout)
