"Data sets come from one entry point, and a killed or failed download leaves nothing half-written."

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch

from course_lib import data


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_digits():
    digits = data.digits()
    for (x, y), n in ((digits.train, 1397), (digits.valid, 400)):
        assert x.shape == (n, 1, 8, 8) and x.dtype == torch.float32
        assert y.shape == (n,) and y.dtype == torch.int64
        assert x.min() == 0 and x.max() == 1
        assert y.unique().tolist() == list(range(10))
    assert "UCI" in digits.source and digits.licence == "CC BY 4.0"


def test_digits_are_split_once_and_for_all():
    one, same, other = data.digits(), data.digits(0), data.digits(1)
    assert torch.equal(one.train[0], same.train[0]) and torch.equal(one.valid[1], same.valid[1])
    assert not torch.equal(one.valid[1], other.valid[1])
    # NumPy's RandomState is frozen, so this holds on every machine.
    assert one.valid[1][:8].tolist() == FIRST
    everything = [torch.cat([d.train[0], d.valid[0]]).flatten(1) for d in (one, other)]
    assert [len(e.unique(dim=0)) for e in everything] == [1797, 1797], "no image is on both sides"


FIRST = [2, 8, 2, 6, 6, 7, 1, 9]


def test_digits_ignore_the_default_device_and_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            x, y = data.digits().valid
    finally:
        torch.set_default_dtype(torch.float32)
    assert x.dtype == torch.float32 and x.device.type == y.device.type == "cpu"


def test_batches_cover_everything_once():
    x, y = torch.arange(10.0), torch.arange(10)
    batches = data.Batches(x, y, size=4)
    assert len(batches) == 3
    assert [len(a) for a, _ in batches] == [4, 4, 2]
    assert torch.equal(torch.cat([a for a, _ in batches]), x)
    shuffled = data.Batches(x, y, size=4, seed=3)
    first, second = ([(a.clone(), b) for a, b in shuffled] for _ in range(2))
    for run in (first, second):
        assert sorted(torch.cat([b for _, b in run]).tolist()) == list(range(10))
        assert all(torch.equal(a.long(), b) for a, b in run), "the tensors stay together"
    assert not torch.equal(first[0][0], second[0][0]), "every pass has its own order"
    again = data.Batches(x, y, size=4, seed=3)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(again, first, strict=True))


def test_batches_by_steps():
    x = torch.arange(10)
    batches, again = (data.Batches(x, size=4, seed=3) for _ in range(2))
    got = [b.tolist() for (b,) in batches.steps(7)]
    assert [len(b) for b in got] == [4, 4, 2, 4, 4, 2, 4]
    assert got == [b.tolist() for _ in range(3) for (b,) in again][:7]
    assert list(batches.steps(0)) == []


def test_batches_leave_the_random_state_alone_and_move():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    batches = data.Batches(torch.ones(3, 2), size=2, seed=0)
    list(batches)
    assert torch.equal(torch.get_rng_state(), before)
    assert batches.to("meta") is batches and batches.tensors[0].device.type == "meta"


@pytest.mark.parametrize(
    "tensors, size",
    [((), 2), ((torch.ones(3), torch.ones(4)), 2), ((torch.ones(0),), 2), ((torch.ones(3),), 0)],
)
def test_batches_say_what_is_wrong(tensors, size):
    with pytest.raises(ValueError, match="expected"):
        data.Batches(*tensors, size=size)


def test_cache_dir_by_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "a" / "b"))
    assert data.cache_dir() == (tmp_path / "a" / "b").resolve() and data.cache_dir().is_dir()
    monkeypatch.delenv("COURSE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.cache_dir() == (tmp_path / "course").resolve()


def test_cache_dir_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(data.DataError, match=r"can't be written .*set COURSE_CACHE") as e:
        data.cached("x", lambda path: path.write_text("x"))
    assert "\n" not in str(e.value)
    assert e.value._render_traceback_() == [str(e.value)]


def test_cached_makes_once(cache):
    calls = []

    def make(path):
        calls.append(path)
        path.write_text("made")

    assert data.cached("a.txt", make).read_text() == "made"
    assert data.cached("a.txt", make) == cache.resolve() / "a.txt"
    assert len(calls) == 1 and calls[0] != cache / "a.txt"
    assert os.listdir(cache) == ["a.txt"]


def test_cached_folders(cache):
    def make(path):
        path.mkdir()
        (path / "one").write_text("1")

    assert (data.cached("set", make) / "one").read_text() == "1"
    assert os.listdir(cache) == ["set"]


def test_a_cache_that_cannot_be_written_is_still_read(cache, monkeypatch):
    data.cached("a", lambda path: path.write_text("a"))
    monkeypatch.setattr(data, "cache_dir", lambda: pytest.fail("not needed"))
    assert data.cached("a", None).read_text() == "a"


def test_the_loser_of_a_race_takes_the_winners(cache):
    def make(path):
        path.mkdir()
        (path / "mine").write_text("")
        (cache / "set").mkdir()
        (cache / "set" / "theirs").write_text("")

    assert os.listdir(data.cached("set", make)) == ["theirs"]
    assert os.listdir(cache) == ["set"]


def fails_with(error):
    def make(path):
        path.write_text("half")
        raise error

    return make


@pytest.mark.parametrize(
    "error, sentence",
    [
        (urllib.error.URLError(socket.gaierror(-2, "Name or service not known")), "connect to the network"),
        (TimeoutError("timed out"), r"can't be downloaded \(timed out\)"),
        (ConnectionResetError(104, "Connection reset by peer"), "can't be downloaded"),
        (
            urllib.error.HTTPError("http://x", 404, "Not Found", None, None),
            "the server answered 404 Not Found",
        ),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_a_failed_make_is_one_sentence_and_leaves_nothing(cache, error, sentence):
    with pytest.raises(data.DataError, match=sentence) as e:
        data.cached("a", fails_with(error))
    assert "\n" not in str(e.value) and "a can't be" in str(e.value)
    assert os.listdir(cache) == []


def test_other_mistakes_pass_through_and_leave_nothing(cache):
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error):
            data.cached("a", fails_with(error()))
    with pytest.raises(data.DataError, match="wrote nothing"):
        data.cached("a", lambda path: None)
    assert os.listdir(cache) == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", ".hidden"])
def test_names_are_plain(cache, name):
    with pytest.raises(ValueError, match="plain name"):
        data.cached(name, lambda path: None)


def test_offline_really(cache, monkeypatch):
    "A download with every connection refused, as where there is no network."

    def refuse(*args, **kwargs):
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(data.DataError, match="connect to the network"):
        data.cached("a", lambda path: path.write_bytes(opener.open("http://data.invalid/a").read()))


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_killed_make_leaves_nothing_under_its_name(cache):
    script = (
        "import sys, time\nfrom course_lib import data\n"
        "def make(path):\n    path.write_text('half'); print('half', flush=True); time.sleep(60)\n"
        "data.cached('a', make)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert not (cache / "a").exists()
    (left,) = cache.iterdir()
    data.cached("b", lambda path: path.write_text("b"))
    assert left.exists(), "somebody may still be writing there"
    old = time.time() - 2 * 86_400
    os.utime(left, (old, old))
    assert data.cached("a", lambda path: path.write_text("whole")).read_text() == "whole"
    assert not left.exists()
