"Files that are written whole or not at all."

import contextlib
import os
import secrets
from pathlib import Path


@contextlib.contextmanager
def replacing(path):
    """Give a path to write a file to, which is moved to `path` when the block ends without an error.

    A reader sees the old file or the new one. After an error, a full disk or an interrupt, the old one stays.
    """
    path = Path(path)
    tmp = path.with_name(f".{secrets.token_hex(4)}-{path.name}")
    try:
        yield tmp
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)
