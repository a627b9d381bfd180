#!/usr/bin/env python3
"""The slot interface of `llama-server` over real files, for the page on llama.cpp.

It computes nothing. At the start the first slot holds the state in `MODEL.empty`, and each other
one that in `MODEL.full`.
"""

import argparse
import json
import re
import struct
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("-m", required=True)
parser.add_argument("-c", type=int, required=True)
parser.add_argument("--parallel", type=int, required=True)
parser.add_argument("--host", required=True)
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--slot-save-path", type=Path, required=True)
given = parser.parse_args()
empty, full = (Path(f"{given.m}.{state}").read_bytes() for state in ("empty", "full"))
slots = [empty] + [full] * (given.parallel - 1)


def count(state: bytes) -> int:
    """Tokens: the third word after the three of the head."""
    return int(struct.unpack_from("<I", state, 20)[0])


def in_slot(state: bytes, slot: int) -> bytes:
    """The state as it is saved from a slot: each of its cells names that."""
    out = bytearray(state)
    for token in range(count(state)):
        struct.pack_into("<I", out, 12 + 4 * (count(state) + 4) + 8 + 12 * token + 8, slot)
    return bytes(out)


class Handler(BaseHTTPRequestHandler):
    def say(self, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        context = given.c // given.parallel
        tokens = [count(state) for state in slots]
        answers = {
            "/props": {
                "model_path": given.m,
                "build_info": "stand-in",
                "total_slots": given.parallel,
                "default_generation_settings": {"n_ctx": context},
            },
            "/lora-adapters": [],
            "/slots": [{"id": n, "n_ctx": context, "is_processing": False, "n_prompt_tokens": t} for n, t in enumerate(tokens)],
        }
        self.say(answers[self.path])

    def do_POST(self) -> None:
        slot, action = re.fullmatch(r"/slots/(\d+)\?action=(save|restore)", self.path).groups()
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        file, slot = given.slot_save_path / body["filename"], int(slot)
        if action == "save":
            file.write_bytes(in_slot(slots[slot], slot))
        else:
            slots[slot] = file.read_bytes()
        tokens, size = count(slots[slot]), len(slots[slot])
        names = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
        self.say({"id_slot": slot, names[0]: tokens, names[1]: size})

    def log_message(self, *_: object) -> None:
        pass


server = ThreadingHTTPServer((given.host, given.port), Handler)
print(f"server is listening on http://{given.host}:{given.port}", flush=True)
server.serve_forever()
