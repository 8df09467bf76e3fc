"The scripts of cluster/: a wheelhouse by a pip that says what it was asked for, jobs without a Slurm."

import os
import re
import shutil
import subprocess
import sys

import pytest
from small_course import REPOSITORY as ROOT

from course_lib.authoring import cli

PIP = """\
#!/bin/bash
echo "$*" >> asked
mkdir -p .whl
for name in {made}; do touch ".whl/$name"; done
"""


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


def shell(*words, **env):
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | env
    return subprocess.run([*map(str, words)], env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def wheelhouse(tmp_path):
    "Run wheelhouse.sh with a pip that makes these files; returns what ended, and what pip was asked for."
    (tmp_path / "cluster").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "cluster/wheelhouse.sh", tmp_path / "cluster")
    asked = tmp_path / "asked"

    def wheelhouse(*words, made="torch-1+cpu-x.whl torchvision-1-x.whl", system="Linux x86_64"):
        (tmp_path / ".whl").mkdir(exist_ok=True)
        (tmp_path / ".whl/torch-0-x.whl").touch()  # of an earlier call
        program(tmp_path / "bin/uname", f"#!/bin/sh\necho {system}\n")
        pip = program(tmp_path / "pip", PIP.format(made=made))
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        done = shell("bash", tmp_path / "cluster/wheelhouse.sh", pip, *words, PATH=path)
        return done, asked.read_text().splitlines() if asked.exists() else []

    return wheelhouse


def test_a_wheelhouse_with_pytorch(wheelhouse):
    done, [asked] = wheelhouse("cuda", "", "3.12")
    assert done.returncode == 0 and asked.endswith("_2_28_x86_64 .[dev] setuptools>=68")
    assert "--only-binary=:all:" in asked and "--platform manylinux2014_x86_64" in asked
    assert not any(word in asked for word in ("--no-deps", "--index-url", "--python-version"))


def test_a_wheelhouse_for_the_cpu(wheelhouse):
    done, [first, second] = wheelhouse("cpu", "https://host/cpu")
    assert done.returncode == 0, done.stderr
    assert first.endswith("--no-deps --index-url https://host/cpu torch torchvision")
    assert second.endswith(" .whl/torch-1+cpu-x.whl .whl/torchvision-1-x.whl .[dev] setuptools>=68")


def test_a_wheelhouse_for_a_host_that_has_pytorch(wheelhouse):
    done, [asked] = wheelhouse("none", "", "3.13", system="Darwin arm64")
    assert done.returncode == 0 and "--no-deps --python-version 3.13" in asked
    assert asked.endswith("--requirement course_lib/authoring/wheels.txt")


@pytest.mark.parametrize(
    ("words", "options", "sentence"),
    [
        (["rocm"], {}, "TORCH is cuda, cpu or none, and not rocm"),
        (["cpu"], {}, "TORCH=cpu needs the address of PyTorch's CPU index"),
        (["cuda"], {"system": "Darwin arm64"}, "is made on Linux x86-64"),
        (
            ["cpu", "https://pypi"],
            {"made": "torch-1.whl torchvision-1.whl nvidia_nccl-1.whl"},
            "built for CUDA",
        ),
    ],
)
def test_a_wheelhouse_that_can_not_be(wheelhouse, tmp_path, words, options, sentence):
    done, asked = wheelhouse(*words, **options)
    assert done.returncode == 1 and sentence in done.stderr and done.stderr.count("\n") == 1
    assert (
        bool(asked) != (tmp_path / ".whl/torch-0-x.whl").exists()
    )  # what is there stays until pip is called


def test_make_turns_the_index_off(tmp_path):
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    show = [
        "make",
        "-C",
        ROOT,
        "--no-print-directory",
        "--eval",
        "show: ; @echo $$PIP_NO_INDEX $$PIP_FIND_LINKS",
    ]
    done = shell(*show, "show", f"WHEELS={tmp_path}")
    assert done.returncode == 2 and f"{tmp_path} holds no wheels: make wheelhouse" in done.stderr
    (tmp_path / "a.whl").touch()
    assert shell(*show, "show", f"WHEELS={tmp_path}").stdout == f"1 {tmp_path}\n"


def job(*words, output=subprocess.PIPE, **env):
    "Run course.sh as Slurm does."
    slurm = {
        "SLURM_JOB_ID": "70123",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_SUBMIT_HOST": "login1",
        "USER": "anna",
    }
    env = os.environ | slurm | {"PYTHON": sys.executable} | env
    return subprocess.run(
        ["bash", ROOT / "cluster/course.sh", *words],
        env=env,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_command_as_a_job(built):
    done = job("list", COURSE_ROOT=str(built))
    assert (done.returncode, done.stderr) == (0, "") and "Next: course lab 01" in done.stdout


@pytest.mark.parametrize(
    ("opened", "way"), [("", "localhost:30123 -J anna@login1 anna@here"), ("1", "here:30123 anna@login1")]
)
def test_jupyterlab_as_a_job(tmp_path, opened, way):
    program(tmp_path / "hostname", "#!/bin/sh\necho here\n")
    python = program(tmp_path / "python", '#!/bin/bash\necho "$@"\n')
    with open(tmp_path / "out", "w") as out:
        done = job(
            "lab", "06", output=out, PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHON=str(python), OPEN=opened
        )
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "out").read_text()
    assert f"ssh -N -L 30123:{way}\n" in text and "scancel 70123" in text
    wanted = f"-m course_lib.authoring.cli lab 06{' --ip 0.0.0.0' * bool(opened)} --no-browser --port 30123\n"
    assert text.endswith(wanted)
    assert cli.parser().parse_args(wanted.split()[2:]).port == 30123
    assert (tmp_path / "out").stat().st_mode & 0o077 == 0  # others could read the token


def test_jobs_that_can_not_be():
    script = ROOT / "cluster/course.sh"
    for done, sentence in (
        (shell("bash", script), "which command? sbatch"),
        (shell("bash", script, "lab"), "this is a job for Slurm: sbatch"),
        (job("lab", PYTHON="/nowhere/python"), "/nowhere/python is not on "),
    ):
        assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1


def test_the_container_copies_what_is_there():
    text = (ROOT / "cluster/Containerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()]
    assert {"course_lib", "lessons", "nbs", "pyproject.toml"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    for line in re.findall(r"^RUN (.*)$", text, re.MULTILINE):
        assert shell("sh", "-n", "-c", line).returncode == 0


def test_the_page_names_files_that_are_there():
    text = (ROOT / "cluster/README.md").read_text()
    assert all((ROOT / name).is_file() for name in re.findall(r"cluster/\w[\w./]*\w", text))
