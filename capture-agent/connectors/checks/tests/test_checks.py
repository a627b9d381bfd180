"""What the checks with real engines rest on: limits, and messages when something is missing. No
engine runs here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from processes import CONNECTORS, Engine, Events, Stopped


def engine(events: Events) -> Any:
    """An engine whose process is `false`."""
    found = Engine.__new__(Engine)
    found.name, found._events = "engine", events
    found.process = subprocess.Popen(["false"])
    found.log = SimpleNamespace(read_text=lambda errors: "the last line")  # type: ignore[assignment]
    found.process.wait()
    return found


class Waiting(unittest.TestCase):
    def pipe(self, limit: float) -> tuple[int, Events]:
        read, write = os.pipe()
        return write, Events(read, limit)

    def test_events_come_in_order_and_others_are_passed_over(self) -> None:
        write, events = self.pipe(10)
        os.write(write, b'{"event":"progress","n":1}\n{"event":"progress","n":2}\n{"event":"done"}\n')
        self.assertEqual(engine(events).until("progress", lambda e: e["n"] == 2)["n"], 2)
        self.assertEqual(engine(events).until("done"), {"event": "done"})
        os.close(write)

    def test_an_engine_that_says_nothing_is_given_up(self) -> None:
        write, events = self.pipe(0.05)
        with self.assertRaisesRegex(Stopped, "no event.*'ready'(.|\n)*the last line"):
            engine(events).until("ready")
        os.close(write)

    def test_an_engine_that_ends_is_given_up_each_time(self) -> None:
        write, events = self.pipe(10)
        os.close(write)
        for _ in range(2):
            with self.assertRaisesRegex(Stopped, "ended with 1"):
                engine(events).until("ready")


class Script(unittest.TestCase):
    def test_a_python_that_is_there_by_name_only_is_named(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            shim = Path(folder) / "python3.12"
            shim.write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
            shim.chmod(0o755)
            for python in ("python3.12", sys.executable if sys.version_info[:2] != (3, 12) else str(shim), str(Path(folder) / "none")):
                env = {"PATH": f"{folder}:/usr/bin:/bin", "PF_REAL_ENGINE": "1", "PF_CACHE": folder, "PF_REAL_ENGINE_PYTHON": python}
                done = subprocess.run([CONNECTORS / "real-engine"], env=env, capture_output=True, text=True, check=False)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn(python, done.stderr)
                self.assertIn("PF_REAL_ENGINE_PYTHON", done.stderr)
                self.assertFalse((Path(folder) / "real-engine").exists())


if __name__ == "__main__":
    unittest.main()
