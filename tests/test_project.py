import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from small_course import REPOSITORY as ROOT

from course_lib.authoring import cli


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
    *_, executes, keeps = workflow["jobs"]["lessons"]["steps"]
    words = executes["run"].removeprefix(".venv/bin/course ").split()
    report = cli.parser().parse_args(words).junit  # a word that `course run` does not know ends the test
    assert keeps["if"] == "always()" and keeps["with"]["path"] == str(report)
    assert subprocess.run(["bash", "-n", ROOT / ".ci/run"]).returncode == 0
    assert "exec make test" in (ROOT / ".ci/run").read_text()


def test_a_wheel_holds_every_package_and_the_files_beside_them():
    setuptools = pytest.importorskip("setuptools")
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = set(setuptools.find_packages(ROOT, include=about["packages"]["find"]["include"]))
    files = subprocess.run(["git", "ls-files", "course_lib"], cwd=ROOT, capture_output=True, text=True)
    paths = [Path(name) for name in files.stdout.splitlines() if (ROOT / name).exists()]
    assert {".".join(p.parent.parts) for p in paths if p.suffix == ".py"} <= found
    data = {p for name, globs in about["package-data"].items() for g in globs
            for p in ROOT.joinpath(*name.split(".")).glob(g)}  # fmt: skip
    assert [p for p in paths if p.suffix != ".py" and ROOT / p not in data] == []


def test_an_old_python_stops_before_pip(tmp_path):
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\nshift; exec python3 -c "import sys; sys.version_info = (3, 10); $1"\n')
    old.chmod(0o755)
    said = {
        "./python": "The course needs Python 3.11 or newer, and ./python is 3.10",
        "./nothing": "./nothing is not there: install Python 3.11",
    }
    for python, sentence in said.items():
        done = subprocess.run(
            ["make", "venv", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 2 and sentence in done.stdout + done.stderr
        assert not (tmp_path / ".venv").exists()


def test_make_test_runs_what_ci_runs():
    text = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True).stdout
    parts = ("ruff check", "ruff format --check", "build --check", '-m "not gpu and not soak"', "--nbval-lax")
    for part in parts:
        assert part in text
