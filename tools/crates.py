"""Which crates are compiled into programs, as cargo says."""

import json
import subprocess
import sys
from typing import Any


def metadata() -> dict[str, Any]:
    """The answer of `cargo metadata` about this workspace on this machine. Downloads nothing."""
    version = subprocess.check_output(["rustc", "-vV"], text=True)
    host = next(line.split()[1] for line in version.splitlines() if line.startswith("host:"))
    asked = ["cargo", "metadata", "--format-version", "1", "--locked", "--offline", "--filter-platform", host]
    found = subprocess.run(asked, stdout=subprocess.PIPE)
    if found.returncode:
        sys.exit(f"{sys.argv[0]}: cargo cannot list the packages: `cargo fetch --locked` downloads those that are missing")
    return json.loads(found.stdout)


def compiled(metadata: dict[str, Any], roots: list[str]) -> dict[str, list[str]]:
    """The ids of the packages that are reached from these packages of the workspace, the packages
    themselves among them, without those that only tests need. Each with the ids of those that it
    uses."""
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    waiting = [id for id in metadata["workspace_members"] if packages[id]["name"] in roots]
    if len(waiting) != len(roots):
        sys.exit(f"{sys.argv[0]}: not all of {', '.join(roots)} are packages of this workspace")
    reached: dict[str, list[str]] = {}
    while waiting:
        if (id := waiting.pop()) not in reached:
            used = [dep["pkg"] for dep in nodes[id]["deps"] if any(kind["kind"] != "dev" for kind in dep["dep_kinds"])]
            reached[id] = used
            waiting += used
    return reached
