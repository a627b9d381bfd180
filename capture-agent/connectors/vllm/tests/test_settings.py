"""The connector's settings, and the configurations that the documentation tells people to copy."""

from __future__ import annotations

import ast
import importlib
import json
import re
import unittest
from pathlib import Path
from typing import Any

from pf_connector import settings
from pf_connector.settings import NUMBERS, TEXTS
from pf_connector.vllm.automatic import OBJECTS, Auto

PLACE = "kv_connector_extra_config"


def check(given: Any) -> dict[str, Any]:
    """As the connector does."""
    return settings.check(given, PLACE, OBJECTS)


REPOSITORY = Path(__file__).resolve().parents[4]
PAGES = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "capture-agent/connectors/vllm/README.md"]


class Settings(unittest.TestCase):
    def test_known_settings_are_taken_and_null_is_left_out(self) -> None:
        given = {"engine": "vllm-0", "answer_limit": 2, "fill_limit": "1.5"}
        self.assertEqual(check({**given, "socket": None}), given)

    def test_a_misspelled_setting_is_refused_and_all_settings_are_named(self) -> None:
        with self.assertRaisesRegex(ValueError, r"no setting 'later-limit'; there are engine, .*later_limit"):
            check({"engine": "e", "later-limit": 5})

    def test_automatic_mode_is_off_unless_it_has_a_repository(self) -> None:
        self.assertIsNone(Auto.of(None))
        self.assertEqual(check({"auto": {"repository": "agents/{user}"}})["auto"], {"repository": "agents/{user}"})
        for auto, word in (
            ("agents", "auto is an object"),
            ({}, "auto.repository"),
            ({"repository": "agents/{user}", "saves": 3}, "there are repository, save"),
            ({"repository": "agents/{name}"}, "no field {name}"),
            ({"repository": "Agents/{user}"}, "no repository's name"),
            ({"repository": "a", "least": 0}, "auto.least"),
            ({"repository": "a", "open_saves": True}, "auto.open_saves"),
            ({"repository": "a", "match": 1}, "auto.match"),
            ({"repository": "a", "push": "wait"}, "auto.push"),
        ):
            with self.subTest(auto=auto), self.assertRaises(ValueError) as refused:
                check({"auto": auto})
            self.assertIn(word, str(refused.exception))

    def test_a_limit_that_is_no_number_is_refused_by_name(self) -> None:
        values: tuple[Any, ...] = ("soon", [1], {})
        for value in values:
            with self.subTest(value=value), self.assertRaisesRegex(ValueError, "later_limit is a number"):
                check({"later_limit": value})

    def test_a_limit_out_of_bounds_is_refused_by_name(self) -> None:
        wrong = {"answer_limit": (-1, "nan", "inf"), "hold_limit": (-0.5, float("inf")), "keep_share": (-0.1, 1.5, "nan", 50)}
        for name, values in wrong.items():
            for value in values:
                with self.subTest(name=name, value=value), self.assertRaisesRegex(ValueError, f"{name} is a "):
                    check({name: value})
        self.assertEqual(check({"answer_limit": 0, "keep_share": 1}), {"answer_limit": 0, "keep_share": 1})


class Documentation(unittest.TestCase):
    def configurations(self) -> list[tuple[str, dict[str, Any]]]:
        """Each `--kv-transfer-config` and each `KVTransferConfig(…)` of the pages, with its
        page."""
        found = []
        for page in PAGES:
            text = page.read_text()
            found += [(page.name, json.loads(given)) for given in re.findall(r"--kv-transfer-config '(\{.*?\})'(?=\s)", text, re.DOTALL)]
            for given in re.findall(r"^ *(KVTransferConfig\(.*?\}\))", text, re.DOTALL | re.MULTILINE):
                call = ast.parse(given, mode="eval").body
                assert isinstance(call, ast.Call)
                found.append((page.name, {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}))
        return found

    def test_every_configuration_that_can_be_copied_is_taken(self) -> None:
        found = self.configurations()
        self.assertGreaterEqual([page for page, _ in found].count("connectors.md"), 2, "docs/connectors.md shows the command and the class")
        for page, given in found:
            with self.subTest(page=page, given=given):
                own = given.pop("kv_connector_extra_config", {})
                module = importlib.import_module(given.pop("kv_connector_module_path"))
                self.assertIn(given.pop("kv_connector"), module.__all__)
                # The rest is vLLM's. A failed load must not fail the request.
                self.assertEqual(given, {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"})
                self.assertEqual(check(own), own)

    def test_the_table_of_settings_is_complete(self) -> None:
        text = (REPOSITORY / "docs/connectors.md").read_text()
        table = text.split("| setting | is |")[1].split("\n\n")[0]
        self.assertEqual(sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)), sorted((*TEXTS, *NUMBERS, *OBJECTS)))


if __name__ == "__main__":
    unittest.main()
