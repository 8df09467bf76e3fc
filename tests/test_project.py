import os
import re
import shutil
import subprocess

import pytest
from small_course import REPOSITORY as ROOT


def test_pyproject_is_the_only_list_of_packages():
    yaml = pytest.importorskip("yaml")
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    python, pip, rest = environment["dependencies"]
    assert (python, pip, rest) == ("python>=3.11", "pip", {"pip": ["-e .[dev]"]})
    for name in ("requirements*.txt", "setup.py", "setup.cfg", "Pipfile*", "*/requirements*.txt"):
        assert not list(ROOT.glob(name)), name
    assert re.findall(r"pip install .*", (ROOT / "Makefile").read_text()) == [
        "pip install --quiet --editable '.[dev]'"
    ]


def test_wheels_are_needs_of_the_project():
    metadata = pytest.importorskip("importlib.metadata")
    requirements = pytest.importorskip("packaging.requirements")
    seen, rest = set(), {"course-lib"}
    while rest:
        name = rest.pop()
        if name not in seen:
            seen.add(name)
            try:
                needs = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            found = [requirements.Requirement(r) for r in needs]
            rest |= {re.sub(r"[-_.]+", "-", r.name).lower() for r in found if "extra" not in str(r.marker)}
    if len(seen) < 20:
        pytest.skip("the project is not installed here")
    lines = (ROOT / "course_lib/authoring/wheels.txt").read_text().split("\n")
    names = [requirements.Requirement(n).name for n in lines if n and not n.startswith("#")]
    assert names == sorted(set(names))
    assert not set(names) - seen


def test_configuration_files_parse():
    yaml = pytest.importorskip("yaml")
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert {"course build --check", "ruff check"} <= {h.get("entry") for r in hooks for h in r["hooks"]}
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    assert {"run": "make test"} in workflow["jobs"]["test"]["steps"]
    assert subprocess.run(["bash", "-n", ROOT / ".ci/run"]).returncode == 0
    assert "exec make test" in (ROOT / ".ci/run").read_text()


# --- make venv ----------------------------------------------------------------------

# Plays Python and pip: notes what it is asked to install, and succeeds as the file `status` says.
PYTHON = """\
#!/bin/sh
case "$*" in
  -c*) shift; exec python3 -c "import sys; sys.version_info = ($(cat version)); $1" ;;
  "-m venv --clear .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  "-m pip --version") ;;
  "-m pip install"*) echo "$*" >> log; exit "$(cat status)" ;;
  *) exit 99 ;;
esac
"""


@pytest.fixture
def folder(tmp_path):
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    folder = tmp_path / "a course"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    (folder / "version").write_text("3, 11")
    (folder / "status").write_text("0")
    return folder


def make(folder, *words):
    words = words or ("venv", "PYTHON=./python")
    return subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True)


def outdate(folder):
    "Make the installation older than pyproject.toml."
    os.utime(folder / ".venv/.installed", (0, 0))


def installs(folder):
    return len((folder / "log").read_text().splitlines())


def test_an_old_python_stops_before_pip(folder):
    (folder / "version").write_text("3, 10")
    result = make(folder)
    said = result.stderr.splitlines()
    assert result.returncode == 2 and said[0].startswith(
        "The course needs Python 3.11 or newer, and ./python is 3.10"
    )
    # make adds its own line, with its depth where a make runs this test
    assert len(said) == 2 and re.match(r"make(\[\d+\])?: \*\*\*", said[1])
    assert not (folder / ".venv").exists() and not (folder / "log").exists()


def test_a_python_that_is_not_there(folder):
    result = make(folder, "venv", "PYTHON=./nothing")
    assert (
        result.returncode == 2
        and "./nothing is not there: install Python 3.11" in result.stdout + result.stderr
    )


def test_an_installation_is_made_once(folder):
    assert make(folder).returncode == 0 and installs(folder) == 1
    assert make(folder).returncode == 0 and installs(folder) == 1
    outdate(folder)
    assert make(folder).returncode == 0 and installs(folder) == 2


def test_a_failed_installation_is_taken_up_again(folder):
    (folder / "status").write_text("1")
    assert make(folder).returncode == 2
    assert make(folder).returncode == 2 and installs(folder) == 2
    (folder / "status").write_text("0")
    assert make(folder).returncode == 0 and installs(folder) == 3
    # A venv that was interrupted has no pip yet, and is made anew.
    outdate(folder)
    (folder / ".venv/bin/python").unlink()
    assert make(folder).returncode == 0 and (folder / ".venv/bin/python").exists()


def test_a_folder_that_was_moved_is_installed_again(folder):
    make(folder)
    moved = folder.rename(folder.parent / "elsewhere")
    assert make(moved).returncode == 0 and installs(moved) == 2
    assert make(moved).returncode == 0 and installs(moved) == 2


def test_make_test_runs_what_ci_runs():
    text = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True).stdout
    for part in ("ruff check", "ruff format --check", "build --check", "pytest -m", "--nbval-lax"):
        assert part in text
