"Our processes, told from those of others on this machine by a mark in the environment they started with."

import os
import time
import uuid

import psutil

MARK = "COURSE_TEST_MARK"


def mark(monkeypatch):
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    return value


def of(value):
    "The live processes, but for this one, that were started under a mark."
    found = []
    for p in psutil.process_iter():
        try:
            if p.pid != os.getpid() and p.environ().get(MARK) == value and p.status() != "zombie":
                found.append(p)
        except psutil.Error:
            continue
    return found


def none_left(value, seconds=5.0, but=()):
    "Wait until no process of a mark is left, `but` those of these numbers; what is left, as text."
    until = time.monotonic() + seconds
    while (left := [p for p in of(value) if p.pid not in but]) and time.monotonic() < until:
        time.sleep(0.05)
    return [str(p) for p in left]
