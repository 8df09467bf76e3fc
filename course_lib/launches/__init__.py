"What lesson launches keeps out of its cells: a simulated GPU (`Device`), its trace, the explorer's numbers."

from course_lib.launches.device import Device, Race

__all__ = ["Device", "Race", "events", "explore"]


def events(spans):
    "The spans of a `Device` as torch.profiler would write them."
    kinds = {"kernel": "kernel", "copy": "gpu_memcpy"}
    calls = {"launch": "cudaLaunchKernel", "wait": "cudaStreamSynchronize"}
    return [{"ph": "X", "cat": kinds.get(s.kind, "cuda_runtime"), "name": calls.get(s.kind, s.name),
             "tid": s.lane, "ts": s.start, "dur": s.end - s.start} for s in spans]  # fmt: skip


def explore(launch=8, kernel=3, kernels=12):
    "The explorer's data: that many kernels launched one by one, and replayed: {name: spans}."
    eager, graph = Device(launch), Device(launch)
    for _ in range(kernels):
        eager.launch("kernel", kernel)
    graph.host(graph.replay_us, "launch", "replay")
    for _ in range(kernels):
        graph.put("kernel", kernel, [], [])
    return {"one by one": eager.spans, "replayed": graph.spans}
