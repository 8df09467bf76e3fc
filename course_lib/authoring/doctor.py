"`course doctor`: this machine on one screen, and what each lesson can do on it."

import json

from course_lib.authoring import catalogue, notebook

WAYS = {
    "gpu": "everything, on the GPU",
    "cpu": "everything but GPU cells, on the CPU",
    "interpreter": "kernels in Triton's interpreter, on the CPU",
    "simulated": "on a simulated device",
    "none": "kernels can't run: Triton has no build for this platform",
}


def lessons(abilities):
    """What each lesson can do here: [{number, title, way, skipped}], from `machine.abilities()`.

    `way` is a key of WAYS; `skipped`, the number of cells that need a GPU and find none.
    """
    rows = []
    for number, (_, nb) in catalogue.published().items():
        course, cells = nb["metadata"]["course"], sum(notebook.needs_gpu(c) for c in nb["cells"])
        way = course.get("without_gpu", "cpu")
        if abilities["gpu"]:
            way, cells = "gpu", 0
        elif way == "interpreter" and not abilities["triton"]:
            way = "none"
        rows.append({"number": number, "title": course["title"], "way": way, "skipped": cells})
    return rows


def doctor_cmd(args):
    "Print what this machine is, what it measures, and the lessons; a table, or JSON."
    from course_lib import machine  # imports torch

    found = machine.report()
    found["lessons"] = lessons(found["abilities"])
    print(json.dumps(found, indent=1, ensure_ascii=False) if args.json else text(found))


def text(found):
    "The report as text."
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
    }
    out = [f"{name:<14} {value}" for name, value in rows.items()]
    for r in found["lessons"]:
        skipped = f"; {r['skipped']} cells need a GPU" if r["skipped"] else ""
        out.append(f"{r['number']}  {r['title']:<30} {WAYS.get(r['way'], r['way'])}{skipped}")
    return "\n".join(out)


def _rate(value, unit, peak):
    size, prefix = next((s, p) for s, p in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1, "")) if value >= s)
    share = f", {value / peak:.0%} of the datasheet's" if peak else ""
    return f"{value / size:.3g} {prefix}{unit}{share}"
