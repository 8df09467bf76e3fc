"Lesson syncs's traces: written, read, and refused."

import gzip
import json

import pytest
import torch

from course_lib import syncs
from course_lib.syncs import queue as syncs_queue
from course_lib.syncs import trace as syncs_trace


def span(cat, name, ts, dur, tid=1, pid=1):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "pid": pid}


def simulated():
    q = syncs_queue.Queue(enqueue=8, round_trip=10)
    for i in range(6):
        q.launch(30)
        if i == 3:
            q.synchronize("aten::nonzero")
    q.python(200, "resize images")
    q.launch(5)
    return q


def test_the_simulated_queue_and_its_gaps(tmp_path):
    q = simulated()
    path = syncs_trace.write(syncs_trace.of_queue(q), tmp_path / "folder" / "t.json")
    events = syncs_trace.load(path)
    found = syncs_trace.gaps(events)
    assert sum(g.duration for g in found) == q.idle()
    assert [g.cause for g in found] == [None, "aten::nonzero"]
    assert syncs.largest_gap(events) == found[0]
    assert syncs.largest_gap(syncs_trace.of_queue(q)) == found[0]  # with events that have no duration


def test_streams_overlap_and_kernels_lie_under_kernels():
    events = [
        span("kernel", "long", 10, 90, 7),
        span("kernel", "short", 20, 5, 7),
        span("gpu_memcpy", "c", 95, 15, 20),
        span("gpu_memset", "m", 130, 10, 20),
        span("cuda_runtime", "cudaDeviceSynchronize", 50, 70),
    ]
    assert syncs_trace.busy(events) == [(10, 110), (130, 140)]
    assert syncs.largest_gap(events) == (110, 20, "cudaDeviceSynchronize")
    assert syncs.largest_gap(events[:3]) is None and syncs.largest_gap([]) is None


def test_the_cause_is_the_longest_operator_on_the_same_thread():
    call = span("cuda_runtime", "cudaStreamSynchronize", 50, 20)
    inner, outer = span("cpu_op", "aten::_local_scalar_dense", 48, 24), span("cpu_op", "aten::item", 45, 30)
    other = span("cpu_op", "aten::copy_", 0, 500, tid=2)
    note = span("user_annotation", "step", 0, 500)
    assert syncs_trace.cause([inner, other, note, call, outer], 60) == "aten::item"
    assert syncs_trace.cause([inner, other, note, call, outer], 80) is None
    assert syncs_trace.cause([other, note, call], 60) == "cudaStreamSynchronize"


def text_of(events):
    return json.dumps({"traceEvents": events})


GOOD = text_of(syncs_trace.of_queue(simulated()))
BAD = {
    "empty": ("", "is empty"),
    "blank": (" \n", "is empty"),
    "cut in a word": (GOOD[: len(GOOD) // 2], "is cut off"),
    "cut after a brace": (GOOD[: GOOD.rindex("}", 0, -2) + 1], "is cut off"),
    "cut list": (json.dumps([span("kernel", "k", 1, 2)])[:-4], "is cut off"),
    "not JSON": ("hello", "is no JSON"),
    "a mistake in the middle": (GOOD.replace(":", ";", 1), "is no JSON"),
    "a notebook": ('{"cells": [], "nbformat": 4}', "no traceEvents"),
    "a number": ("3", "no traceEvents"),
    "a list of numbers": ("[1, 2]", "no traceEvents"),
    "no events": ('{"traceEvents": []}', "holds no events"),
    "a browser's": (text_of([span("devtools.timeline", "Paint", 1, 2)]), "another tool"),
    "only names": (text_of([{"ph": "M", "name": "process_name"}]), "another tool"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_traces_get_one_sentence(name, tmp_path):
    text, said = BAD[name]
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(syncs.TraceError, match=said) as e:
        syncs_trace.load(path)
    assert "\n" not in str(e.value) and "bad.json" in str(e.value)
    assert e.value._render_traceback_() == [str(e.value)]


def test_missing_binary_and_zipped_traces(tmp_path):
    with pytest.raises(syncs.TraceError, match=r"no trace at none\.json"):
        syncs_trace.load(tmp_path / "none.json")
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(GOOD.encode()))
    assert syncs_trace.load(path) == syncs_trace.checked(json.loads(GOOD))
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(syncs.TraceError, match="is cut off"):
        syncs_trace.load(path)
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(syncs.TraceError, match="is no text"):
        syncs_trace.load(path)


def test_the_profilers_own_trace_of_a_cpu(tmp_path):
    x = torch.randn(8, 8)
    path = syncs_trace.record(lambda: (x @ x).sum().item(), tmp_path / "t.json")
    events = syncs_trace.load(path)
    assert "aten::item" in {e["name"] for e in events}
    if not torch.cuda.is_available():
        assert syncs.largest_gap(events) is None
