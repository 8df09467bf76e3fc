import tomllib
from pathlib import Path

import pytest
import torch

from course_lib import machine

ROOT = Path(__file__).resolve().parent.parent


def test_start_prints_one_line_and_seeds(capsys):
    machine.start("roofline", lib="0.1")
    first = torch.rand(3)
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert line.startswith("lesson roofline · ")
    assert machine.name() in line and f"torch {torch.__version__}" in line
    machine.start("roofline", lib="0.1")
    assert torch.equal(first, torch.rand(3))
    import matplotlib.pyplot as plt

    assert plt.rcParams["figure.dpi"] == 80


def test_start_says_what_to_do_when_the_library_is_older(capsys):
    machine.start("roofline", lib="99.1")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "99.1" in lines[1] and machine.LIB in lines[1] and "git pull" in lines[1]


@pytest.mark.parametrize(
    ("older", "newer"), [("0.1", "0.2"), ("0.9", "0.10"), ("0.1.9", "0.2"), ("0.9.9", "1.0")]
)
def test_versions_compare_as_numbers(older, newer, monkeypatch, capsys):
    for lib, has, lines in ((newer, older, 2), (older, newer, 1)):
        monkeypatch.setattr(machine, "LIB", has)
        machine.start("roofline", lib=lib)
        assert len(capsys.readouterr().out.splitlines()) == lines


def test_library_version_is_the_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == machine.LIB


def test_device_and_pick(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.device() == torch.device("cpu")
    assert machine.pick(cpu=3, gpu=30) == 3
    machine.sync()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine.device() == torch.device("cuda")
    assert machine.pick(cpu=3, gpu=30) == 30


def test_name_of_a_cpu_says_model_and_cores(monkeypatch):
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    monkeypatch.setattr(machine, "cores", lambda: 1)
    assert machine.name().endswith(", 1 core")
    monkeypatch.setattr(machine, "cores", lambda: 12)
    assert machine.name().endswith(", 12 cores")
    assert len(machine.name()) > len(", 12 cores")


def test_datasheet_rates_are_dense():
    assert machine.DATASHEET["NVIDIA H200"] == {"bf16_flops": 989e12, "bytes": 4.8e12}
    for name, rates in machine.DATASHEET.items():
        assert set(rates) == {"bf16_flops", "bytes"}, name
        # Flops for each byte of memory traffic: a sparse rate taken for a dense one would leave this range.
        assert 50 < rates["bf16_flops"] / rates["bytes"] < 420, name


def test_rates_are_plausible():
    flops, copied, launch = machine.matmul_rate(), machine.copy_rate(), machine.launch_cost()
    assert 1e8 < flops < 1e16
    assert 1e8 < copied < 2e13
    assert 1e-8 < launch < 1e-3


def test_rates_are_worked_out_from_the_faster_runs(monkeypatch):
    seen = []

    def clock(fn, *args, seconds):
        seen.append([(a.dtype, tuple(a.shape)) for a in args])
        return machine.timing.Timing(median=2.0, low=1.0, high=3.0, runs=5)

    monkeypatch.setattr(machine.timing, "time", clock)
    monkeypatch.setattr(machine, "pick", lambda cpu, gpu: cpu)
    assert machine.matmul_rate() == 2 * 1024**3
    assert machine.copy_rate() == 2 * 2**28
    assert seen == [[(torch.float32, (1024, 1024))] * 2, [(torch.uint8, (2**28,))]]


def test_peaks_are_measured_once(monkeypatch):
    calls = []
    for name in ("matmul_rate", "copy_rate", "launch_cost"):
        monkeypatch.setattr(machine, name, lambda name=name: calls.append(name) or float(len(calls)))
    machine.peaks.cache_clear()
    try:
        first = machine.peaks()
        assert machine.peaks() is first
        assert (first.flops, first.bytes, first.launch) == (1.0, 2.0, 3.0)
        assert calls == ["matmul_rate", "copy_rate", "launch_cost"]
    finally:
        machine.peaks.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_peaks_stay_below_the_datasheet():
    sheet = machine.DATASHEET.get(machine.name())
    if sheet is None:
        pytest.skip(f"no datasheet for {machine.name()}")
    peaks = machine.peaks()
    assert 0.4 < peaks.flops / sheet["bf16_flops"] <= 1
    assert 0.6 < peaks.bytes / sheet["bytes"] <= 1
    assert 1e-6 < peaks.launch < 1e-4
