"The data sets: what they hold, that nothing leaks, and that the cache is never half-written."

import os
import signal
import subprocess
import sys

import pytest
import torch

from course_lib import data, files


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "cache"))
    return (tmp_path / "cache").resolve()


def test_digits_are_split_once_and_for_all():
    one, same, other = data.digits(), data.digits(0), data.digits(1)
    for (x, y), n in ((one.train, 1397), (one.valid, 400)):
        assert x.shape == (n, 1, 8, 8) and x.dtype == torch.float32 and (x.min(), x.max()) == (0, 1)
        assert y.shape == (n,) and y.dtype == torch.int64 and y.unique().tolist() == list(range(10))
    assert torch.equal(one.train[0], same.train[0]) and not torch.equal(one.valid[1], other.valid[1])
    # NumPy's RandomState is frozen, so this holds on every machine.
    assert one.valid[1][:8].tolist() == [2, 8, 2, 6, 6, 7, 1, 9]
    everything = torch.cat([one.train[0], one.valid[0]]).flatten(1)
    assert len(everything.unique(dim=0)) == 1797, "no image is on both sides"


def test_digits_ignore_the_default_device_and_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            x, y = data.digits().valid
    finally:
        torch.set_default_dtype(torch.float32)
    assert x.dtype == torch.float32 and x.device.type == y.device.type == "cpu"


@pytest.mark.parametrize("face", sorted({*data.FACES, *data.LATIN}))
def test_a_face_draws_letters(face):
    "Neither blank nor boxes: the letters that it sets all look different, and a space shows nothing."
    f, word = data.font(face, 60), data.CHARACTERS if face in data.LATIN else "aegnxAQ7"
    drawn = {bytes(f.getmask(c)) for c in word}
    assert len(drawn) == len(word) and all(any(d) for d in drawn) and not any(bytes(f.getmask(" ")))


def test_typefaces(cache):
    found = data.typefaces(40, n=64, em=(5, 11), n_valid=32)
    for (x, y), n in ((found.train, 64), (found.valid, 32)):
        assert x.shape == (n, 1, 40, 40) and x.dtype == torch.uint8 and y.dtype == torch.int64
        assert y.bincount().tolist() == [n // 16] * 16
        assert (x.float().std((1, 2, 3)) > 10).all(), "no page is blank"
    assert len(found.names) == 16 and len(list(cache.iterdir())) == 1
    assert torch.equal(data.typefaces(40, n=64, em=(5, 11), n_valid=32).train[0], found.train[0])
    other = data.typefaces(40, n=64, em=(5, 11), n_valid=32, seed=1)
    assert not torch.equal(other.train[0], found.train[0])


def test_training_and_validation_set_different_texts():
    texts = {side: (data.ASSETS / f"prose-{side}.txt").read_text().split() for side in ("train", "valid")}
    five = {side: {tuple(w[i : i + 5]) for i in range(len(w) - 4)} for side, w in texts.items()}
    assert not five["train"] & five["valid"]
    assert all(word.isascii() for words in texts.values() for word in words)  # some faces have no more


def test_batches_cover_everything_once():
    x, y = torch.arange(10.0), torch.arange(10)
    batches = data.Batches(x, y, size=4)
    assert len(batches) == 3 and [len(a) for a, _ in batches] == [4, 4, 2]
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


def test_cached_makes_once(cache):
    calls = []

    def make(path):
        calls.append(path)
        path.write_text("made")

    assert data.cached("a.txt", make).read_text() == "made"
    assert data.cached("a.txt", make) == cache / "a.txt"
    assert len(calls) == 1 and calls[0] != cache / "a.txt"
    assert os.listdir(cache) == ["a.txt"]


def test_cache_dir_by_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("COURSE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.cache_dir() == (tmp_path / "course").resolve() and data.cache_dir().is_dir()


def test_a_cache_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(data.DataError, match=r"can't be written .*set COURSE_CACHE") as e:
        data.cached("x", lambda path: path.write_text("x"))
    assert e.value._render_traceback_() == [str(e.value)] and "\n" not in str(e.value)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence_and_leaves_nothing(cache):
    def make(path):
        path.symlink_to("/dev/full")  # a device that is always full
        with open(path, "wb") as f:
            torch.save(torch.zeros(1 << 16), f)

    with pytest.raises(data.DataError, match=r"a can't be written \(No space left on device\)") as e:
        data.cached("a", make)
    assert "\n" not in str(e.value) and os.listdir(cache) == []


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, error):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(error), files.replacing(path) as tmp:
        tmp.write_text("ne")
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with files.replacing(path) as tmp:
        tmp.write_text("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_killed_make_leaves_nothing_under_its_name(cache):
    script = (
        "import time\nfrom course_lib import data\n"
        "def make(path):\n    path.write_text('half'); print('half', flush=True); time.sleep(60)\n"
        "data.cached('a', make)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert not (cache / "a").exists()
    assert data.cached("a", lambda path: path.write_text("whole")).read_text() == "whole"
