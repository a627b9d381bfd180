"""The program `pf`, which moves pages: it hashes, encodes, sends and checks them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import Error


def find(given: str | None) -> str:
    """The program: as given, of `PF_PROGRAM`, beside this Python, or on the path."""
    name = given or os.environ.get("PF_PROGRAM")
    beside = Path(sys.executable or "python3").with_name("pf")
    candidates = [name] if name else [str(beside.absolute()), "pf"]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found:
            return found
    wanted = name or "pf"
    raise Error("not_found", f"there is no program {wanted}: pip install pf-registry, or say in PF_PROGRAM where it is")


def run(program: str, arguments: list[str], environment: Mapping[str, str | None]) -> dict[str, Any]:
    """Runs it with `--json`, and returns its result. A variable that is `None` is taken out of the
    environment."""
    merged: dict[str, str | None] = {**os.environ, **environment}
    env = {name: value for name, value in merged.items() if value is not None}
    try:
        done = subprocess.run(
            [program, *arguments, "--json"],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, ValueError) as error:
        raise Error("invalid_request", f"{program} cannot be run: {error}") from None
    if done.returncode == 0:
        return _result(program, done.stdout)
    lines = done.stderr.strip().splitlines()
    try:
        problem = json.loads(lines[-1])
        retryable = problem.get("retryable") is True
        raise Error(problem["code"], problem["message"], retryable=retryable, hint=problem.get("hint"))
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError):
        reason = lines[-1] if lines else f"it ended with {done.returncode}"
        raise Error("internal", f"{program}: {reason}") from None


def _result(program: str, text: str) -> dict[str, Any]:
    try:
        result = json.loads(text)
    except (RecursionError, ValueError):
        result = None
    if not isinstance(result, dict):
        raise Error("invalid_request", f"{program} does not answer as pf does: is it another program?")
    return result


def entries(found: dict[str, Any], name: str) -> list[Any]:
    """A list of a result."""
    listed = found.get(name)
    if not isinstance(listed, list):
        raise Error("invalid_request", f"the program does not answer as pf does: it has no {name}")
    return listed
