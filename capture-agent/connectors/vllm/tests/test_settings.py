"""The connector's settings, and the configurations that the documentation tells people to copy."""

from __future__ import annotations

import ast
import importlib
import json
import re
import unittest
from dataclasses import fields
from pathlib import Path
from typing import Any

from pf_connector import settings, tally
from pf_connector.asking import Limits
from pf_connector.holding import HoldLimits
from pf_connector.settings import NUMBERS, TEXTS
from pf_connector.vllm.automatic import OBJECTS, Auto
from pf_connector.wishes import Wishes

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

    def rows(self, head: str) -> dict[str, str]:
        """A table of docs/connectors.md: what it says of each name."""
        text = (REPOSITORY / "docs/connectors.md").read_text()
        found: dict[str, str] = {}
        for row in text.split(head)[1].split("\n\n")[0].splitlines():
            cells = row.strip("| ").split(" | ", 1)
            found |= dict.fromkeys(re.findall(r"`([\w-]+)`", cells[0]), cells[-1])
        return found

    def defaults(self, head: str) -> dict[str, float]:
        """The defaults that it shows: the first number in brackets."""
        found = {name: re.search(r"\(([\d.]+)\)", said) for name, said in self.rows(head).items()}
        return {name: float(number[1]) for name, number in found.items() if number is not None}

    def test_the_table_of_settings_is_complete_and_shows_the_defaults(self) -> None:
        self.assertEqual(sorted(self.rows("| setting | is |")), sorted((*TEXTS, *NUMBERS, *OBJECTS)))
        waits, holds = Limits.of({}), HoldLimits.of({})
        expected = {
            **{"answer_limit": waits.answer, "later_limit": waits.later, "fill_limit": waits.fill},
            **{"hold_limit": holds.hold, "keep": holds.keep, "keep_share": holds.share},
        }
        self.assertEqual(self.defaults("| setting | is |"), expected)

    def test_the_table_of_automatic_mode_is_complete_and_shows_the_defaults(self) -> None:
        auto = Auto("agents/{user}")
        self.assertEqual(sorted(self.rows("| of `auto` | is |")), sorted(field.name for field in fields(Auto)))
        numbers = ("saves_per_minute", "open_saves", "match_limit", "least")
        self.assertEqual(self.defaults("| of `auto` | is |"), {name: getattr(auto, name) for name in numbers})
        self.assertIsNone(auto.bytes_per_second, "no limit if left out")

    def test_the_table_of_a_requests_wishes_is_complete(self) -> None:
        self.assertEqual(sorted(self.rows("| field | is |")), sorted(field.name for field in fields(Wishes) if field.name != "wrong"))

    def test_all_that_is_counted_is_named_and_the_agent_knows_it(self) -> None:
        counted = {value for name, value in vars(tally).items() if name.isupper() and isinstance(value, str)}
        automatic = {what for what in counted if what.startswith(("hit-", "save-", "miss"))}
        self.assertEqual(set(self.rows("| count | is |")), automatic)
        text = (REPOSITORY / "docs/connectors.md").read_text()
        listed = text.split("`pf engines` lists what lies ready")[1].split("The log of the engine")[0]
        self.assertEqual(
            set(re.findall("`([a-z-]+)`", listed)), counted - automatic - {tally.TAKEN, tally.TAKEN_ON_KEPT, tally.LOGITS_EQUAL}
        )
        variants = (REPOSITORY / "schema/src/engine/outcome.rs").read_text().split("pub enum Taking {")[1].split("\n}")[0]
        known = {re.sub("(?<!^)([A-Z])", r"-\1", name).lower() for name in re.findall(r"^    (\w+),", variants, re.MULTILINE)}
        self.assertEqual(known, counted)

    def test_what_the_page_tells_authors_to_use_is_there(self) -> None:
        section = (REPOSITORY / "docs/connectors.md").read_text().split("\n## Write another\n")[1]
        named = re.findall(r"`pf_connector\.([\w.]+)`", section)
        self.assertGreater(len(named), 5)
        for name in named:
            module, _, rest = name.partition(".")
            found: Any = importlib.import_module(f"pf_connector.{module}")
            for part in rest.split(".") if rest else ():
                found = getattr(found, part)
        for module in ("wishes", "asking", "saving"):
            self.assertIn(f"`{module}`", section)
            importlib.import_module(f"pf_connector.{module}")


if __name__ == "__main__":
    unittest.main()
