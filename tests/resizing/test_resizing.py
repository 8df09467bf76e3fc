"Lesson resizing's library: letters, files, gains, the explorer, the figures."

import io

import matplotlib
import pytest
import torch
from PIL import Image
from torch import nn

from course_lib import checking, data, machine, resizing, show
from course_lib.resizing import check, figures, solutions

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    yield
    plt.close("all")


def test_letters_are_drawn():
    letters = resizing.Letters(resizing.PLAIN, 32, 60, n=2, seed=3)
    (x, y), (other, _) = letters
    assert len(letters) == 2 and x.shape == (60, 1, 32, 32) and x.dtype == torch.float32
    assert y.min() >= 0 and y.max() < 10 and len(set(y.tolist())) > 5
    assert not torch.equal(x, other)
    assert x.flatten(1).min(1).values.max() < -0.3, "each image has ink"
    assert -0.5 < x.mean() < 1.5


def test_the_same_seed_gives_the_same_letters_at_every_size():
    kinds = [resizing.Letters(resizing.PLAIN, 64, 9, seed=5, shown=shown).batch() for shown in (64, 64, 32)]
    (x, y), (again, _), (small, same) = kinds
    assert torch.equal(x, again) and torch.equal(y, same) and small.shape[-1] == 32
    assert torch.allclose(solutions.resize(x, 32), small, atol=1e-5)


def test_letters_of_another_height_and_noise():
    clean, rough, small = (
        resizing.Letters("o", 64, 50, seed=2, em=em, noise=noise).batch()[0]
        for em, noise in (((0.3, 0.6), 0.0), ((0.3, 0.6), 0.3), ((0.15, 0.35), 0.0))
    )
    assert (rough - clean).std().item() == pytest.approx(4 * 0.3, rel=0.03)
    dark = [(x < 0).float().mean() for x in (clean, small)]  # 0 is grey: ink is darker, paper lighter
    assert dark[1] < 0.6 * dark[0]


def test_noise_falls_as_images_shrink():
    "What the statistics of batch norm then show."
    drawn = resizing.Letters("i", 64, 40, seed=1)
    x, _ = drawn.batch()
    corner, small = (t[..., : t.shape[-1] // 8, : t.shape[-1] // 8] for t in (x, solutions.resize(x, 32)))
    assert corner.std((2, 3)).mean() > 1.5 * small.std((2, 3)).mean()


def test_held_out_faces_are_other_images():
    some, kept = (resizing.glyphs(resizing.PLAIN, held, 24, "cpu") for held in (False, True))
    assert len(some) == 12 * 10 and len(kept) == len(data.HELD_OUT) * 10
    assert not any(torch.equal(a, b) for a in kept[:10] for b in some[::10])
    assert all(0.005 < ink < 0.4 for ink in some.mean((1, 2, 3)).tolist())


def test_passes_take_the_next_images_in_the_seeds_order():
    x = torch.arange(12.0).half().view(12, 1, 1, 1)
    passes = resizing.Passes(x, torch.arange(12), epoch=6, size=3, seed=4)
    seen = [(images.flatten().tolist(), labels.tolist()) for _ in range(4) for images, labels in passes]
    assert len(passes) == 2 and len(seen) == 8 and all(images == labels for images, labels in seen)
    assert sorted(label for _, labels in seen[:4] for label in labels) == list(range(12)), "each image once"
    assert seen[4:] == seen[:4], "then they come again"
    assert next(iter(passes))[0].dtype == torch.float32
    (_, first), *_ = resizing.Passes(x, torch.arange(12), epoch=6, size=3, seed=5)
    assert first.tolist() != seen[0][1]


def test_sizes_show_the_part_with_the_letter():
    images = torch.ones(1, 1, 20, 20)
    images[..., 15:19, 2:5] = -1
    shown = figures._around_ink({"20": images, "40": images.repeat_interleave(2, 2).repeat_interleave(2, 3)})
    (small,), (large,) = shown.values()
    assert small.shape == (1, 10, 10) and large.shape == (1, 20, 20)
    assert (small < 0).sum() == 12 and torch.equal(
        small.repeat_interleave(2, 1).repeat_interleave(2, 2), large
    )


def test_photos_are_files():
    photos = resizing.Photos(40, 96)
    x, y = photos[39]
    assert len(photos) == 40 and x.shape == (1, 96, 96) and x.dtype == torch.uint8 and 0 <= y < 10
    assert Image.open(io.BytesIO(photos.files[0])).format == "JPEG"
    assert torch.equal(photos[3][0], photos[19][0]), "sixteen files, again and again"


def test_a_wrapped_network_gives_what_the_network_gives():
    net = nn.Conv2d(1, 3, 3)
    x = torch.randn(2, 1, 9, 9)
    assert torch.allclose(resizing.Bf16(net)(x), net(x), atol=1e-6)


def test_gain_pairs_by_seed_and_says_who_did_not_arrive():
    gain = resizing.gain({1: 3.0, 2: 4.0, 3: 9.0}, {3: 3.0, 1: 2.0, 2: 2.0})
    assert gain == (2.0, 1.5, 3.0, 3) and str(gain) == "2.00 times (3 seeds, 1.50 to 3.00)"
    assert str(resizing.gain({1: 3.0}, {1: 2.0})) == "1.50 times (one seed)"
    assert resizing.gain({1: 3.0, 2: None}, {1: None, 2: None}) == (
        "not reached: full size 1 of 2, growing 2 of 2"
    )


def test_explorer_answers_its_question():
    at = {t: resizing.explore(loader=t)["gain"] for t in (0.0, 0.25, 0.3, 0.9, 1.0, 1.2)}
    assert at[0.0] == at[0.25] == pytest.approx(1.6) and at[0.3] < at[0.25] and at[0.9] > 1
    assert at[1.0] == at[1.2] == 1
    assert resizing.explore(small=128)["gain"] == 1
    found = resizing.explore(loader=0.4)
    assert found["gains"][found["loaders"].index(0.4)] == found["gain"]


def test_said():
    assert resizing.said(None, 33.64, "%") == "33.6 %"
    assert resizing.said(50, 33.64, "%") == "33.6 %; you said 50"
    assert resizing.spread([3.0, 1.0, 2.5]) == "2.5 (1.0 to 3.0)" and resizing.spread([1.0], "+.1f") == "+1.0"


def test_share_right():
    x = torch.eye(10).repeat(60, 1)
    assert resizing.share_right(nn.Identity(), x, torch.arange(600) % 10) == 100
    assert resizing.share_right(nn.Identity(), x, torch.zeros(600)) == pytest.approx(10)


def test_a_stub_of_the_callback_is_not_solved():
    from fastai.callback.core import Callback

    class Stub(Callback):
        def __init__(self, schedule):
            self.schedule = schedule

        def before_batch(self):
            raise NotImplementedError

    with pytest.raises(checking.Wrong, match="not solved yet"):
        check.size_schedule(Stub)


def test_figures_draw_what_they_are_given(monkeypatch):
    images = torch.rand(3, 1, 8, 8)
    assert len(figures.draw_sizes({"8 × 8": images, "4 × 4": images[..., ::2, ::2]}).axes) == 6
    assert len(figures.draw_beside({"a": images[0], "b": images[1]}).axes) == 2
    curve = {8: 80.0, 16: 20.0}
    figures.draw_reading({"as trained": curve, "new": curve}, 8, 10)
    figures.draw_statistics([1.0, 2.0], {"8 pixels": [1.0, 2.0], "16 pixels": [2.0, 3.0]})
    figures.draw_cost({8: 1.0, 16: 4.0}, {8: 2.0, 16: 4.0})
    runs = {
        arm: {s: [(1.0 + s, 50.0), (2.0, 80.0 + s)] for s in range(3)} for arm in ("full size", "growing")
    }
    ax = figures.draw_race(runs).axes[0]
    assert len(ax.lines) == 8 and list(ax.lines[3].get_xdata()) == [2.0, 2.0]
    errors = figures.draw_race(runs, errors=True).axes[0]
    assert errors.get_yscale() == "log" and list(errors.lines[3].get_ydata()) == [50.0, 19.0]
    gains = {80: resizing.Gain(1.4, 1.2, 1.6, 5), 81: resizing.Gain(1.0, 0.9, 1.1, 5)}
    assert len(figures.draw_gains(gains).axes[0].lines) == 2, "the median, equal time"
    figures.draw_loading({"on the device": (0.01, 0.03), "files": (0.05, 0.05)})
    drawn = []
    monkeypatch.setattr(show, "figure", drawn.append)
    explorer = show.Explorer(resizing.explore, figures.view_costs, small=[32, 64], loader=(0.0, 1.2, 0.05))
    explorer.interact().children[1].value = 0.5
    assert "1.33 times" in drawn[-1].axes[1].get_title() + drawn[-1].axes[1].get_title(loc="left")
