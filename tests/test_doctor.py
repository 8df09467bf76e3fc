import json

import small_course

from course_lib import machine
from course_lib.authoring import cli, doctor


def test_what_each_lesson_can_do(course_root):
    nb = small_course.worked("06", "second")
    nb["metadata"]["course"]["without_gpu"] = "interpreter"
    small_course.put(course_root, nb)
    found = [doctor.lessons({"gpu": gpu, "triton": triton})
             for gpu, triton in ((True, "gpu"), (False, "interpreter"), (False, None))]  # fmt: skip
    assert [[r["way"] for r in rows] for rows in found] == [
        ["gpu", "gpu"],
        ["cpu", "interpreter"],
        ["cpu", "none"],
    ]
    assert [[r["skipped"] for r in rows] for rows in found] == [[0, 0], [1, 1], [1, 1]]


def test_doctor(course_root, capsys, monkeypatch):
    monkeypatch.setattr(machine, "peaks", lambda: machine.Peaks(2e11, 3e10, 4e-6))
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] and [r["number"] for r in found["lessons"]] == ["01", "06"]
    assert cli.main(["doctor"]) == 0
    assert "200 GFLOP/s" in capsys.readouterr().out
    h200 = {"gpus": 8, "gpu_memory_bytes": 139 * 2**30, "matmul_flops": 785e12}
    h200 |= {
        "datasheet": {"bf16_flops": 989e12},
        "abilities": {"gpu": True, "triton": "gpu", "compile": True},
    }
    text = doctor.text(found | h200)
    assert "785 TFLOP/s, 79% of the datasheet's" in text and "GPU 139 GiB" in text and "(of 8)" in text
