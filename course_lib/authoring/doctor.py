"`course doctor`: what this machine is, how fast it is, and what it can do."


def doctor_cmd(args):
    "Print what this machine is and what it measures."
    from course_lib import machine  # imports torch

    print(text(machine.report()))


def text(found):
    "`machine.report()` as text."
    can, sheet, gpu = found["abilities"], found["datasheet"] or {}, found["gpu_memory_bytes"]
    where = {"gpu": "on the GPU", "interpreter": "in the interpreter", None: "not here"}[can["triton"]]
    builds = "builds here" if can["compile"] else "can't build here: no C++ compiler or Python headers"
    matmul = _rate(found["matmul_flops"], "FLOP/s", sheet.get("bf16_flops"))
    rows = {
        "device": found["device"] + f" (of {found['gpus']})" * (found["gpus"] > 1),
        "memory": f"{found['ram_bytes'] / 2**30:.0f} GiB" + (f", GPU {gpu / 2**30:.0f} GiB" if gpu else ""),
        "system": f"{found['system']}, Python {found['python']}",
        "torch": found["torch"] + (f", CUDA {found['cuda']}" if found["cuda"] else ""),
        "triton": f"{found['triton'] or 'not installed'}; kernels run {where}",
        "torch.compile": builds,
        "matmul": f"{matmul} ({found['matmul_dtype']})",
        "copy": _rate(found["copy_bytes"], "B/s", sheet.get("bytes")) + " (read + written)",
        "launch cost": f"{found['launch_seconds'] * 1e6:.1f} µs to enqueue one tiny operator",
        "cells for a GPU": "run" if can["gpu"] else "print one line each",
    }
    return "\n".join(f"{name:<15} {value}" for name, value in rows.items())


def _rate(value, unit, peak):
    size, prefix = next((s, p) for s, p in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1, "")) if value >= s)
    share = f", {value / peak:.0%} of the datasheet's" if peak else ""
    return f"{value / size:.3g} {prefix}{unit}{share}"
