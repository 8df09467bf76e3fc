"What can go wrong with ranks, each said in a sentence that names the rank."

import os
import signal

ENDED = "The ranks were ended, with what they held; they start afresh at the next call."
_MEANS = {"SIGKILL": ", often for want of memory", "SIGSEGV": ", a crash in compiled code"}


class RankError(RuntimeError):
    """What happened on a rank. The first line is one sentence; what the rank had to say follows it.

    `rank` is the rank the sentence is about (None where it is about several or none), `world` the number
    of ranks. `__cause__` is the rank's own exception, where it could be sent.
    """

    def __init__(self, message, rank=None, world=None):
        super().__init__(message)
        self.rank, self.world = rank, world

    def _render_traceback_(self):
        # A notebook shows what the rank said, and not the frames of the process handling.
        return str(self).splitlines()


class Refused(ValueError):
    "What was asked for can't be had; one sentence says why."

    def _render_traceback_(self):
        return [str(self)]


class RankFailed(RankError):
    "A rank raised an exception."


class RankDied(RankError):
    "A rank's process ended. `signal` is the signal's name or None, `code` its exit code or None."

    def __init__(self, message, rank=None, world=None, signal=None, code=None):
        super().__init__(message, rank, world)
        self.signal, self.code = signal, code


class RankTimeout(RankError, TimeoutError):
    "One or more ranks did not finish in time. `hung` are their numbers, `where` what each was doing."

    def __init__(self, message, hung, where, world=None):
        super().__init__(message, hung[0] if len(hung) == 1 else None, world)
        self.hung, self.where = hung, where


class RankInterrupted(KeyboardInterrupt):
    "The call was interrupted, and so were the ranks. The message says where each of them was."

    def _render_traceback_(self):
        return str(self).splitlines()


def listing(numbers):
    "[0] -> 'rank 0'; [0, 2, 3] -> 'ranks 0, 2 and 3'."
    names = [str(n) for n in sorted(numbers)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def places(where, one, several):
    "{0: 'in recv', 1: 'in send', 2: 'in recv'} -> 'ranks 0 and 2 are in recv; rank 1 is in send'."
    by_place = {}
    for rank in sorted(where):
        by_place.setdefault(where[rank], []).append(rank)
    return "; ".join(f"{listing(rs)} {one if len(rs) == 1 else several} {p}" for p, rs in by_place.items())


def died(rank, world, status, errors, doing):
    "A `RankDied` for a wait status (None where it isn't known) and the last that the rank wrote to stderr."
    name = code = None
    if status is not None and os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        how = f"killed by {name}{_MEANS.get(name, '')}"
    elif status is not None:
        code = os.waitstatus_to_exitcode(status)
        how = f"its process ended with exit code {code}"
    else:
        how = "its process is gone"
    said = "".join(f"\n{line}" for line in errors.strip().splitlines()[-20:])
    return RankDied(
        f"rank {rank} of {world} died during {doing}: {how}{said}\n{ENDED}", rank, world, name, code
    )
