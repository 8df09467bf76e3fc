"What lesson feeding keeps outside its cells: texts, measures of batches, pages of a file, waiting."

import os
import time

import pytest
import torch

from course_lib import feeding
from course_lib.feeding import figures

LENGTHS = [3, 9, 4, 4, 8, 1, 7, 2, 6, 5, 5]


def test_documents_are_whole_texts_of_three_packages():
    found = feeding.documents()
    assert len(found.texts) == len(found.labels) == len(set(found.texts)) > 3000
    assert set(found.labels.tolist()) == {0, 1, 2} and found.names == feeding.PACKAGES
    sizes = [len(feeding.WORD.findall(t)) for t in found.texts]
    assert min(sizes) >= 16 and max(sizes) > 512


def test_met_again():
    first = [[0, 1, 2], [3, 4]]
    assert feeding.met_again(first, first) == 1
    assert feeding.met_again(first, [[0, 3], [1, 4, 2]]) == 1 / 4  # (1, 2) of (0, 3), (1, 4), (1, 2), (4, 2)


def test_between_is_zero_for_random_batches_and_one_for_equal_lengths():
    assert feeding.between([[0, 1], [2, 3]], [5, 5, 80, 80]) == 1
    lengths = torch.randint(1, 500, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    assert feeding.between([list(range(k, k + 8)) for k in range(0, 4000, 8)], lengths) < 0.03


@pytest.mark.parametrize("pool, bucket", [(1, 1), (2, 4), (99, 1)])
def test_explore_by_padding_the_same_batches(pool, bucket):
    found = feeding.explore(LENGTHS, batch=3, pool=pool, bucket=bucket)
    assert sum(n for n, _ in found["slots"]) == len(LENGTHS) and len(found["slots"]) == 4
    assert all(longest % bucket == 0 for _, longest in found["slots"])
    assert found["waste"] == pytest.approx(1 - sum(LENGTHS) / sum(n * m for n, m in found["slots"]))
    assert found["shapes"] == len({m for _, m in found["slots"]})
    if pool == 99:  # everything sorted: 1 2 3, 4 4 5, 5 6 7, 8 9
        assert found["slots"] == [(3, 3), (3, 5), (3, 7), (2, 9)]


def test_waited():
    assert feeding.waited([[0], [1]], [4, 4]) == 0
    assert feeding.waited([[0], [1, 2], []], [6, 1, 2]) == pytest.approx(0.5)


def test_step_costs_repeat_and_have_no_document_twice():
    drawn = feeding.step_costs(range(50), 12, 4)
    assert drawn == feeding.step_costs(range(50), 12, 4) and len(drawn) == 4
    assert all(len(set(costs)) == 12 for costs in drawn)


def test_loop_ms_leaves_out_the_batches_made_before():
    seen = []

    def step(a, b):
        seen.append((int(a), int(b)))
        time.sleep(0.05 if len(seen) <= 5 else 0.002)

    batches = ((torch.tensor(k), torch.tensor(-k)) for k in range(99))
    assert 2 <= feeding.loop_ms(batches, step, workers=1, steps=6) < 30
    assert seen == [(k, -k) for k in range(11)]


def test_pages_in_memory(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    kept = feeding.in_memory(path)
    assert kept is None or kept == 1
    if kept is not None and hasattr(os, "posix_fadvise"):
        with open(path, "rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert 0 <= feeding.in_memory(path) <= 1


def test_figures_of_the_race_and_of_its_parts():
    ax = figures.draw_race({"padded": [1e5, 1.1e5], "packed, varlen": [2e5, 2.4e5]}, bound=2.5e5).axes[0]
    assert [bar.get_width() for bar in ax.patches] == [105, 220]
    assert list(ax.lines[-1].get_xdata()) == [250, 250], "the bound"
    rows = [(66.0, 1700.0, 690.0, 700.0, "power limit"), (67.0, 1690.0, 695.0, 700.0, "power limit")]
    fig = figures.draw_parts({"padded": rows, "packed": rows[::-1]})
    assert [len(ax.lines) for ax in fig.axes] == [4, 4, 5], "two ways, and the power allowed"
