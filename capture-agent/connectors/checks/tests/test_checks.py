"""What the checks with real engines rest on: limits, messages when something is missing, and what
the documentation says of them. No engine runs here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from outcome import CRITERIA
from processes import CONNECTORS, Engine, Events, Stopped, documented, samples
from real_engine import CHECKS, NAMED

REPOSITORY = CONNECTORS.parent.parent


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

    def test_a_python_of_a_version_manager_is_chosen_by_its_version(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            shim = Path(folder) / "python3.12"
            shim.write_text('#!/bin/sh\n[ "$PYENV_VERSION" = 3.12 ] || exit 127\n[ "$1" = -c ] || { echo "made: $*" >&2; exit 3; }\n')
            shim.chmod(0o755)
            env = {"PATH": f"{folder}:/usr/bin:/bin", "PF_REAL_ENGINE": "1", "PF_CACHE": folder}
            done = subprocess.run([CONNECTORS / "real-engine"], env=env, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn(f"made: -m venv {Path(folder).resolve()}", done.stderr)

    def test_a_check_that_there_is_not_is_named_before_anything_is_installed(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            env = {"PATH": "/usr/bin:/bin", "PF_REAL_ENGINE": "1", "PF_CACHE": folder}
            done = subprocess.run([CONNECTORS / "real-engine", "vllm-dens"], env=env, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn('no check "vllm-dens"', done.stderr)
            self.assertIn(" ".join(CHECKS + NAMED), done.stderr)
            self.assertEqual(list(Path(folder).iterdir()), [])

    def test_without_its_variable_it_runs_nothing_and_says_so(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            env = {"PATH": "/usr/bin:/bin", "PF_CACHE": folder}
            done = subprocess.run([CONNECTORS / "real-engine", "vllm-dense"], env=env, capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn("take vllm-dense through capture on host A", done.stdout)
            self.assertIn("not run: PF_REAL_ENGINE is not set", done.stdout)
            self.assertEqual(list(Path(folder).iterdir()), [])


class Configuration(unittest.TestCase):
    def test_servers_run_with_the_configuration_that_users_copy(self) -> None:
        found = documented()
        self.assertEqual(found["kv_connector"], "PfConnector")
        self.assertIn("engine", found["kv_connector_extra_config"])


class Metrics(unittest.TestCase):
    def test_a_metric_is_found_by_its_whole_name_and_its_labels(self) -> None:
        text = '# TYPE a_total counter\na_total{engine="0",model_name="m"} 3.0\na_total{engine="1"} 2\na_total_created 7\nb 1e-05\n'
        self.assertEqual(samples(text, "a_total"), [({"engine": "0", "model_name": "m"}, 3.0), ({"engine": "1"}, 2.0)])
        self.assertEqual(samples(text, "b"), [({}, 0.00001)])
        self.assertEqual(samples(text, "a"), [])


class Criteria(unittest.TestCase):
    """The section of docs/checkpoint-abi.md that says what shows the acceptance criteria."""

    def setUp(self) -> None:
        text = (REPOSITORY / "docs/checkpoint-abi.md").read_text()
        self.section = text.split("## Acceptance criteria\n")[1].split("\n## ")[0]
        self.rows = [row.split(" | ") for row in self.section.splitlines() if row.startswith("| **")]

    def test_each_criterion_has_a_row_and_lines_of_checks_that_there_are(self) -> None:
        self.assertEqual([row[0].strip("| *") for row in self.rows], list(CRITERIA))
        checks = (
            "".join(file.read_text() for file in (CONNECTORS / "checks").glob("*_check.py"))
            + (CONNECTORS / "checks/vllm_reshard.py").read_text()
        )
        for criterion, _, lines, _ in self.rows:
            found = re.findall(r"\*([^*]+)\*", lines)
            self.assertTrue(found, criterion)
            for line in found:
                # Numbers are constants of the checks.
                words = r"(?:\d+|\{[^}]+\})".join(re.escape(part) for part in re.split(r"\d+", line))
                self.assertRegex(checks, r"\{(REPLAY|FIRST_STEP|CLOSED|APART)\}: " + words + '"', criterion)

    def test_the_tests_that_it_names_are_there(self) -> None:
        named = set(re.findall(r"`([a-z0-9]+(?:_[a-z0-9]+){3,})`", self.section))
        self.assertGreater(len(named), 20)
        crates = ("capture-agent", "schema", "tests", "store", "engine")
        files = [file for crate in crates for end in ("src", "tests") for file in (REPOSITORY / crate / end).rglob("*.rs")]
        files += CONNECTORS.glob("*/tests/test_*.py")
        there = set(re.findall(r"(?:fn|def) (\w+)\(", "".join(file.read_text() for file in files)))
        self.assertEqual(named - there, set())


if __name__ == "__main__":
    unittest.main()
