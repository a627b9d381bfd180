"""The lines of docs/python.md, run in their order against a registry, with what they print."""

from __future__ import annotations

import contextlib
import doctest
import os
import re
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from programs import PF, Registry

PAGE = Path(__file__).resolve().parents[3] / "docs" / "python.md"


class Page(unittest.TestCase):
    def test_every_line_prints_what_the_page_says(self) -> None:
        blocks = re.findall(r"^```pycon\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        self.assertGreater(len(blocks), 3)
        registry = Registry()
        self.addCleanup(registry.stop)
        folder = self.enterContext(tempfile.TemporaryDirectory())
        env = {"PF_REGISTRY": registry.url, "PF_PROGRAM": PF, "HOME": folder, "PATH": os.environ["PATH"]}
        self.enterContext(mock.patch.dict(os.environ, env, clear=True))
        self.enterContext(contextlib.chdir(folder))
        # A line of `…` stands for any text.
        text = "\n".join(blocks).replace("…", "...")
        page = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
        said: list[str] = []
        self.assertEqual(runner.run(page, out=said.append).failed, 0, "".join(said))
