"""The client of a peer in Python: it puts from, and gets into, memory that pf-bench shares.

Arguments: the files behind two pieces of shared memory, then those of the peer. Each line of
standard input is a request, {"do": "put" or "get", "half": 0 or 1, "names": […], "lens": […]}:
blobs that lie, or shall lie, one after the other in that piece. Each is answered with a line:
{"done": number} or {"error": words}.
"""

import ctypes
import itertools
import json
import mmap
import os
import sys

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # libraries print to standard output


def answer(**fields):
    print(json.dumps(fields), file=answers, flush=True)


class Half:
    """A piece of shared memory."""

    def __init__(self, path):
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def offsets(self, lens):
        return itertools.accumulate(lens[:-1], initial=0)


def serve(peer):
    answer(done=0)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            work = {"put": peer.put, "get": peer.get}[request["do"]]
            work(peer.halves[request["half"]], request["names"], request["lens"])
        except Exception as error:  # any error of a library ends the measurement, in words
            answer(error=f"{type(error).__name__}: {error}")
        else:
            answer(done=len(request["names"]))
