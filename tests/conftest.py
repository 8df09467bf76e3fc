"Fixtures that several test modules use, and the rule for tests that need a GPU."

import pytest
import toy_course


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def toy(tmp_path, monkeypatch):
    "The toy course, built, with a fresh copy in work/; this process and its kernels use it, without a GPU."
    return toy_course.make(tmp_path / "course", monkeypatch)
