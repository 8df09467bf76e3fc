"""Imagenette: photographs of ten classes, downloaded only where that is asked for. Reached through `data`."""

import os
import socket
import tarfile
import zlib
from pathlib import Path

import torch

from course_lib import data
from course_lib.images import Images


def imagenette(size=128, download=False, timeout=20):
    """Photographs of ten of ImageNet's classes, [N, 3, size, size]: 9,469 for training, 3,925 held out.

    Nothing is downloaded unless `download` is true or the environment says COURSE_DOWNLOAD=1: then fastai's
    untar_data fetches 99 MB (for size up to 160) or 341 MB, and gives up where the network is silent for
    `timeout` seconds. The shorter side is brought to `size`, the middle is kept. DataError where the
    photographs aren't here and can't or may not be fetched.
    """
    if not 8 <= size <= 320:
        raise ValueError(f"size is {size}; expected 8 to 320 pixels")
    allowed = download or os.environ.get("COURSE_DOWNLOAD") == "1"

    def make(path):
        torch.save(_imagenette(_photographs(size, allowed, timeout), size), path)

    path = data.cached(f"imagenette-1-{size}.pt", make)
    made = torch.load(path, weights_only=True)
    return Images(
        train=tuple(made["train"]),
        valid=tuple(made["valid"]),
        names=tuple(made["names"]),
        source="Imagenette (J. Howard, github.com/fastai/imagenette), photographs from ImageNet",
        licence="the code and the selection: Apache-2.0; the photographs: ImageNet's terms, for research and "
        "teaching, not for redistribution",
        extra={},
    )


def _photographs(size, allowed, timeout):
    "The folder that fastai's untar_data unpacked, downloaded first where that is allowed."
    from fastai.data.external import URLs, fastai_cfg, untar_data

    url = URLs.IMAGENETTE_160 if size <= 160 else URLs.IMAGENETTE_320
    folder = fastai_cfg().path("data") / Path(url).stem
    if folder.exists():
        return folder
    if not allowed:
        raise data.DataError(
            "Imagenette is not on this machine: pass download=True or set COURSE_DOWNLOAD=1 to fetch it "
            f"({99 if size <= 160 else 341} MB)"
        )
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(timeout)  # fastai sets none, and a firewall that drops packets would hang it
    try:
        return untar_data(url)
    except (tarfile.TarError, EOFError, zlib.error) as e:
        raise data.DataError(f"Imagenette's archive is damaged ({e}): delete {Path(url).name} in "
                             f"{fastai_cfg().path('archive')} and try again") from None  # fmt: skip
    finally:
        socket.setdefaulttimeout(before)


IMAGENETTE = {
    "n01440764": "tench", "n02102040": "English springer", "n02979186": "cassette player",
    "n03000684": "chain saw", "n03028079": "church", "n03394916": "French horn", "n03417042": "garbage truck",
    "n03425413": "gas pump", "n03445777": "golf ball", "n03888257": "parachute",
}  # fmt: skip


def _imagenette(folder, size):
    import numpy as np
    from PIL import Image, ImageOps

    sides = {}
    for side, name in (("train", "train"), ("valid", "val")):
        x, y = [], []
        for label, synset in enumerate(IMAGENETTE):
            for path in sorted((folder / name / synset).glob("*.JPEG")):
                with Image.open(path) as photograph:
                    square = ImageOps.fit(photograph.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
                x.append(torch.from_numpy(np.asarray(square).transpose(2, 0, 1).copy()))
                y.append(label)
        if not x:
            raise data.DataError(f"{folder} holds no photographs for {name}: delete the folder and try again")
        sides[side] = [torch.stack(x), torch.tensor(y)]
    return {**sides, "names": list(IMAGENETTE.values())}
