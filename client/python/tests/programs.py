"""The real programs: a registry that all tests of a module share, and directories to push."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

BINARIES = Path(os.environ.get("PF_TEST_BINARIES", "../../target/debug")).resolve()
PF = str(BINARIES / "pf")


class Registry:
    """`pf-registry` on a free port, with a home of its own."""

    def __init__(self, *options: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pf-client")
        self.folder = Path(self._folder.name)
        command = [str(BINARIES / "pf-registry"), "serve", "--listen", "127.0.0.1:0", "--data", str(self.folder / "data"), *options]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env={})
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("listening on "):
            said = (self.folder / "log").read_text()
            self.stop()
            raise AssertionError(f"pf-registry does not start: {said}")
        self.url = line.removeprefix("listening on ").strip()

    def token(self, scope: str) -> str:
        """A new access token."""
        command = [str(BINARIES / "pf-registry"), "token", "create", "--data", str(self.folder / "data"), "--label", "test"]
        return subprocess.run([*command, "--scope", scope], check=True, capture_output=True, text=True, env={}).stdout.strip()

    def stop(self) -> None:
        """Ends it, and deletes what it stored."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._folder.cleanup()


def synthetic(directory: Path, tokens: int) -> Path:
    """A snapshot as an engine would write it, with tokens and configuration."""
    command = [str(BINARIES / "pf-kv"), "synthetic", "--out", str(directory), "--tokens", str(tokens)]
    subprocess.run(command, check=True, capture_output=True, env={})
    return directory
