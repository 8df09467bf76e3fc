"Fixtures that several test modules use, and the rule for tests that need a GPU."

import importlib.util
import shutil

import pytest
import small_course
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


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    "The folder of the small course, built; nobody writes there."
    root = small_course.write(tmp_path_factory.mktemp("built"))
    assert small_course.course(root, "build").returncode == 0
    return root


@pytest.fixture
def course_root(built, tmp_path, monkeypatch):
    "A copy of the small course, built; this process uses it."
    root = tmp_path / "course"
    shutil.copytree(built, root)
    small_course.use(root, monkeypatch)
    return root


@pytest.fixture(scope="module")
def answers(request):
    "mutants.py beside the test's file: REFERENCE, RIGHT, MUTANTS and what makes them."
    path = request.path.with_name("mutants.py")
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_answers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
