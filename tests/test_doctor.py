import json

import pytest
import small_course

from course_lib import machine
from course_lib.authoring import cli, doctor


@pytest.fixture
def root(tmp_path, monkeypatch, capsys):
    small_course.use(small_course.write(tmp_path), monkeypatch)
    cli.main(["build"])
    capsys.readouterr()
    return tmp_path


def test_what_each_lesson_can_do(root):
    nb = small_course.worked("05", "second")
    nb["metadata"]["course"]["without_gpu"] = "interpreter"
    small_course.put(root, nb)
    cli.main(["build"])
    ways = [
        [r["way"] for r in doctor.lessons({"gpu": gpu, "triton": triton})]
        for gpu, triton in ((True, "gpu"), (False, "interpreter"), (False, None))
    ]
    assert ways == [["gpu", "gpu"], ["cpu", "interpreter"], ["cpu", "none"]]
    assert [r["skipped"] for r in doctor.lessons({"gpu": False, "triton": None})] == [1, 1]


def test_doctor(root, capsys, monkeypatch):
    report = machine.report()
    monkeypatch.setattr(machine, "report", lambda: dict(report))
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["torch"]
        and found["matmul_flops"] > 0
        and [r["number"] for r in found["lessons"]] == ["01", "05"]
    )
    assert cli.main(["doctor"]) == 0
    assert "launch cost" in capsys.readouterr().out
    h200 = {
        "gpus": 8,
        "gpu_memory_bytes": 139 * 2**30,
        "matmul_flops": 785e12,
        "datasheet": {"bf16_flops": 989e12},
    }
    text = doctor.text(found | h200 | {"abilities": {"gpu": True, "triton": "gpu", "compile": True}})
    assert "785 TFLOP/s, 79% of the datasheet's" in text and "GPU 139 GiB" in text and "(of 8)" in text
