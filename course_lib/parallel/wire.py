"""What goes between the notebook and its ranks, as bytes: cloudpickle, since functions come from notebooks.

cloudpickle forgets the file a function was written in; here it is kept, so that a rank's traceback names
the cell and its line.
"""

import io
import linecache
import marshal
import os
import pickle
import socket
import struct
import types

import cloudpickle


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType):
            return marshal.loads, (marshal.dumps(obj),)  # the same Python is at the other end
        return super().reducer_override(obj)


def pack(obj):
    "Bytes that `pickle.loads` reads, on this host and this Python."
    with io.BytesIO() as file:
        _Pickler(file).dump(obj)
        return file.getvalue()


def framed(request):
    "What `multiprocessing.connection` writes for a message."
    body = pickle.dumps(request)
    n = len(body)
    return (struct.pack("!i", n) if n < 2**31 else struct.pack("!iQ", -1, n)) + body


def push(connection, data):
    "Write as much as can be written without waiting; how many bytes that was."
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        return end.send(data, socket.MSG_DONTWAIT)


def cells():
    "The source of notebook cells, by the names that tracebacks know them by: {filename: source}."
    return {
        name: "".join(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and entry[1] is None and len(entry[2]) < 10_000
    }


def know(sources):
    "Let tracebacks in this process show these sources' lines."
    for name, source in sources.items():
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)


def shown(text):
    "Text with IPython's names for cells ('Cell In[3]') in place of the temporary files it compiles."
    import sys

    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return text
    for name in cells():
        if name in text:
            kind, label = shell.compile.format_code_name(name) or (None, None)
            if kind:
                text = text.replace(f'"{name}"', f"{kind} {label}").replace(name, f"{kind} {label}")
    return text
