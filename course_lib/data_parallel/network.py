"""The α-β model of a network: what an all-reduce costs, what backward hides of it, and α and β from times.

A message of n bytes takes α + βn: latency, and seconds per byte. Source: Hockney 1994. It knows nothing of
other traffic, of several rails or of small protocols: it is a model, and stands beside measured times.
"""

from typing import NamedTuple


class Network(NamedTuple):
    "`alpha` seconds for a message to arrive, `beta` seconds for each byte, each way, for one GPU."

    name: str
    alpha: float
    beta: float


# Orders of magnitude, for drawing: line rates as sold; latencies as two programs see a small message.
NETWORKS = {
    "10 Gb Ethernet, TCP": Network("10 Gb Ethernet, TCP", 30e-6, 1 / 1.25e9),
    "100 Gb Ethernet, TCP": Network("100 Gb Ethernet, TCP", 30e-6, 1 / 12.5e9),
    "400 Gb RDMA": Network("400 Gb RDMA", 3e-6, 1 / 50e9),
    "NVLink 4": Network("NVLink 4", 1.5e-6, 1 / 450e9),
}


def ring_seconds(nbytes, ranks, alpha, beta):
    "Seconds of a ring all-reduce: 2(N-1) rounds of one message of n/N bytes (Patarasuk and Yuan 2009)."
    return 2 * (ranks - 1) * (alpha + nbytes / ranks * beta)


def tree_seconds(nbytes, ranks, alpha, beta):
    "Seconds of a reduction up a binary tree and back down: 2 ceil(log2 N) rounds of n bytes."
    return 2 * (ranks - 1).bit_length() * (alpha + nbytes * beta)


def exposed(layers, limit, ranks, alpha, beta):
    """Seconds of all-reduce that are left when backward is over.

    `layers` are (seconds, bytes) in the order of backward: its gradient's bytes are there when a layer's
    seconds are over. Buckets are filled up to `limit` bytes (`data_parallel.fill_buckets`); the wire takes
    one bucket at a time, as a ring.
    """
    clock = wire = filled = 0.0
    layers = list(layers)
    for i, (seconds, nbytes) in enumerate(layers):
        clock += seconds
        filled += nbytes
        if i + 1 == len(layers) or filled + layers[i + 1][1] > limit:
            wire = max(wire, clock) + ring_seconds(filled, ranks, alpha, beta)
            filled = 0.0
    return wire - clock


def schedule(layers, limit, ranks, alpha, beta):
    "What the wire does, as (start, end, bytes) for each bucket, and when backward is over; as `exposed`."
    clock = wire = filled = 0.0
    spans = []
    for i, (seconds, nbytes) in enumerate(layers):
        clock += seconds
        filled += nbytes
        if i + 1 == len(layers) or filled + layers[i + 1][1] > limit:
            start = max(wire, clock)
            wire = start + ring_seconds(filled, ranks, alpha, beta)
            spans.append((start, wire, filled))
            filled = 0.0
    return spans, clock


def fit(nbytes, seconds, ranks):
    """α and β of a ring from measured all-reduces, by least squares of the relative error.

    `nbytes` and `seconds` are lists of equal length, two sizes or more. Neither comes out below zero.
    """
    import numpy as np

    if len(nbytes) != len(seconds) or len(set(nbytes)) < 2:
        raise ValueError(
            f"a fit needs a time for each of two sizes or more; given {len(nbytes)} sizes and "
            f"{len(seconds)} times"
        )
    if ranks < 2:
        raise ValueError("one rank sends nothing, so there is nothing to fit: measure with two ranks or more")
    n, t = np.asarray(nbytes, float), np.asarray(seconds, float)
    rows = np.stack([np.ones_like(n), n / ranks], 1) * 2 * (ranks - 1) / t[:, None]
    alpha, beta = np.linalg.lstsq(rows, np.ones_like(t), rcond=None)[0]
    if alpha < 0:
        alpha, beta = 0.0, float((rows[:, 1].sum()) / (rows[:, 1] ** 2).sum())
    if beta < 0:
        alpha, beta = float((rows[:, 0].sum()) / (rows[:, 0] ** 2).sum()), 0.0
    return float(alpha), float(beta)


def bus_bandwidth(nbytes, seconds, ranks):
    "Bytes per second that each link carries in an all-reduce: 2(N-1)/N of the tensor, over the time."
    return 2 * (ranks - 1) / ranks * nbytes / seconds


# One backward pass to play with: a model of 24 layers whose gradients come in pieces of 4 MB, 1.2 GB in all.
PIECES = 24 * 12
PIECE_BYTES = 4 << 20
BACKWARD = 48e-3  # seconds, on one GPU


def explore_buckets(limit_mb=25, network="400 Gb RDMA", ranks=16):
    "The explorer's data: the wire's spans for one limit, and what is exposed for limits from 1 MB to all."
    if network not in NETWORKS:
        raise ValueError(f"no network is called {network!r}; expected one of {', '.join(NETWORKS)}")
    _, alpha, beta = NETWORKS[network]
    layers = [(BACKWARD / PIECES, PIECE_BYTES)] * PIECES
    spans, clock = schedule(layers, limit_mb * 2**20, ranks, alpha, beta)
    limits = [2**k for k in range(1, 12)]
    curve = [(mb, exposed(layers, mb * 2**20, ranks, alpha, beta)) for mb in limits]
    left = exposed(layers, limit_mb * 2**20, ranks, alpha, beta)
    return {"limit_mb": limit_mb, "network": network, "ranks": ranks, "spans": spans, "backward": clock,
            "exposed": left, "curve": curve, "best": min(curve, key=lambda c: c[1])}  # fmt: skip


def fsdp_seconds(layers, forward, backward, nbytes, ranks, alpha, beta):
    """Seconds of forward and backward where a layer's weight is gathered while the one before computes.

    `layers` equal layers of `forward` and `backward` seconds and `nbytes` of weight each. In backward the
    wire gathers the next weight and scatters the last gradient, one after the other.
    """
    half = ring_seconds(nbytes, ranks, alpha, beta) / 2  # a gather, or a reduce-scatter
    ahead = half + (layers - 1) * max(forward, half) + forward
    return ahead + backward + (layers - 1) * max(backward, 2 * half) + half


def cores_to_feed(bytes_per_second, cpu_seconds_per_gb):
    "Processor cores that are busy with nothing but moving `bytes_per_second`."
    return bytes_per_second / 1e9 * cpu_seconds_per_gb


def scaling(measured, ranks, alpha, beta, bucket=25 * 2**20):
    """Throughput on N ranks over one, {kind: (measured, model)}, from `data_parallel_times.scaling`.

    The model knows the time alone, and α and β. It leaves out that messages take memory and cores of the
    GPU from the computation, and what the host adds.
    """
    alone, backward, nbytes, layers = (measured[k] for k in ("alone", "backward", "bytes", "layers"))
    each = [(backward / layers, nbytes)] * layers
    whole = ring_seconds(layers * nbytes, ranks, alpha, beta)
    model = {
        "ddp": alone + exposed(each, bucket, ranks, alpha, beta),
        "ddp_no_overlap": alone + whole,
        "fsdp": fsdp_seconds(
            layers, (alone - backward) / layers, backward / layers, nbytes, ranks, alpha, beta
        ),
        "fsdp_no_overlap": alone + whole,  # one gather before, one reduce-scatter after
    }
    return {kind: (ranks * alone / measured[kind], ranks * alone / s) for kind, s in model.items()}
