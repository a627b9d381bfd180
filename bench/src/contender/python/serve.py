"""The first part of two scripts: pf-bench appends lmcache.py or mooncake.py, which use these
imports and call `serve`. The script is the client of a contender with a Python API.

Arguments: the files behind the two halves of the memory that pf-bench shares, then the arguments of
the contender's class. The script writes the line {"done": 0} when it is ready.

Each line of standard input is a request: {"do": "put" or "get", "half": 0 or 1, "names": […],
"lens": […]}. "put" reads blobs from that half, where they lie one after the other. "get" writes
them there in the same way. The answer to each request is a line: {"done": number of blobs} or
{"error": message}.
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
    """One of the two halves of the shared memory."""

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
        except Exception as error:  # pf-bench ends the measurement with the message of any error
            answer(error=f"{type(error).__name__}: {error}")
        else:
            answer(done=len(request["names"]))
