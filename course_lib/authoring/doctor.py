"`course doctor`: this machine on one screen, and what each lesson can do on it."

import json

from course_lib.authoring import notebook
from course_lib.authoring.notebook import CourseError

WAYS = {
    "gpu": "everything, on the real GPU",
    "cpu": "everything but GPU cells, on the CPU",
    "interpreter": "kernels in Triton's interpreter, on the CPU",
    "simulated": "on a simulated device",
    "none": "kernels can't run: Triton has no build for this platform",
}


def lessons(abilities):
    """What each lesson can do here: [{number, title, way, skipped}], from `machine.abilities()`.

    `way` is a key of WAYS; a lesson says what it does without a GPU in `metadata.course.without_gpu`
    ("cpu" where it is silent). `skipped` is the number of cells that want a GPU and find none.
    """
    rows = []
    for number, path in notebook.lessons().items():
        nb = notebook.load(path)
        course = nb["metadata"].get("course", {})
        way = "gpu" if abilities["gpu"] else course.get("without_gpu", "cpu")
        if way == "interpreter" and not abilities["triton"]:
            way = "none"
        skipped = 0 if abilities["gpu"] else sum("gpu" in notebook.tags(c) for c in nb["cells"])
        rows.append(
            {"number": number, "title": course.get("title", path.stem), "way": way, "skipped": skipped}
        )
    return rows


def doctor_cmd(args):
    "Print what this machine is, what it measures, and the lessons; a table, or JSON."
    try:
        from course_lib import machine
    except ImportError as e:
        raise CourseError(
            f"{e}: install the project with `pip install -e .[dev]`, or use `make venv`"
        ) from None
    found = machine.report()
    found["lessons"] = lessons(found["abilities"])
    print(json.dumps(found, indent=1, ensure_ascii=False) if args.json else text(found))


def text(found):
    "The report as text."
    can, sheet = found["abilities"], found["datasheet"] or {}
    memory = f"{found['ram_bytes'] / 2**30:.0f} GiB"
    if found["gpu_memory_bytes"]:
        memory += f", GPU {found['gpu_memory_bytes'] / 2**30:.0f} GiB"
    kernels = {"gpu": "on the GPU", "interpreter": "in the interpreter", None: "not here"}[can["triton"]]
    rows = [
        ("device", found["device"] + (f" (of {found['gpus']})" if found["gpus"] > 1 else "")),
        ("memory", memory),
        ("system", f"{found['system']}, Python {found['python']}"),
        ("torch", found["torch"] + (f", CUDA {found['cuda']}" if found["cuda"] else "")),
        ("triton", f"{found['triton'] or 'not installed'}; kernels run {kernels}"),
        (
            "torch.compile",
            "builds here" if can["compile"] else "can't build here: no C++ compiler or Python headers",
        ),
        (
            "matmul",
            _rate(found["matmul_flops"], "FLOP/s", sheet.get("bf16_flops")) + f" ({found['matmul_dtype']})",
        ),
        ("copy", _rate(found["copy_bytes"], "B/s", sheet.get("bytes")) + " (read + written)"),
        ("launch cost", f"{found['launch_seconds'] * 1e6:.1f} µs to enqueue one tiny operator"),
    ]
    out = [f"{name:<14} {value}" for name, value in rows]
    if found["lessons"]:
        out.append("")
    width = max((len(r["title"]) for r in found["lessons"]), default=0)
    for r in found["lessons"]:
        skipped = f"; {r['skipped']} cells want a GPU and are skipped" if r["skipped"] else ""
        out.append(f"{r['number']}  {r['title']:<{width}}  {WAYS.get(r['way'], r['way'])}{skipped}")
    return "\n".join(out)


def _rate(value, unit, peak):
    size, prefix = next((s, p) for s, p in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (0, "")) if value >= s)
    share = f", {value / peak:.0%} of the datasheet's" if peak else ""
    return f"{value / (size or 1):.3g} {prefix}{unit}{share}"
