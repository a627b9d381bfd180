"""Pushes the files of a directory as one artifact, or pulls them: push|pull HOST:PORT DIRECTORY."""

import pathlib
import sys

import oras.client

verb, address, place = sys.argv[1:]
client = oras.client.OrasClient(hostname=address, insecure=True)
target = f"{address}/bench/w:base"
if verb == "push":
    files = sorted(str(path) for path in pathlib.Path(place).rglob("*") if path.is_file())
    client.push(target=target, files=files, disable_path_validation=True, quiet=True)
else:
    client.pull(target=target, outdir=place)
