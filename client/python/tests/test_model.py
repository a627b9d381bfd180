"""What the client reads of an answer is what the document of the API says of it."""

from __future__ import annotations

import json
import unittest
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pf_client import model

DOCUMENT = Path(__file__).resolve().parents[3] / "registry" / "openapi.json"

SCHEMAS = {
    model.DeletedSnapshot: "DeletedSnapshot",
    model.Detail: "SnapshotDetail",
    model.Event: "Event",
    model.EventCollection: "EventCollection",
    model.Forks: "Forked",
    model.Freed: "Freed",
    model.Lineage: "Lineage",
    model.Match: "MatchResponse",
    model.Rejected: "MatchRejected",
    model.Repository: "RepositoryInfo",
    model.Retention: "RetentionReport",
    model.SignatureManifest: "SignatureManifest",
    model.Snapshot: "SnapshotSummary",
    model.SnapshotStats: "SnapshotStats",
    model.Stats: "Stats",
    model.Tag: "TagInfo",
    model.Usage: "Usage",
    model.Verified: "Verified",
}

# Printed by `pf`, or made here.
OTHERS = {model.Drain, model.Exported, model.Job, model.Pulled, model.Pushed, model.Reset, model.Signed}

TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


class Model(unittest.TestCase):
    def setUp(self) -> None:
        self.schemas: dict[str, Any] = json.loads(DOCUMENT.read_text())["components"]["schemas"]

    def types(self, schema: dict[str, Any]) -> set[str]:
        """The JSON types that a schema allows."""
        if "$ref" in schema:
            return self.types(self.schemas[schema["$ref"].rsplit("/", 1)[-1]])
        found = schema.get("type", [])
        types = {found} if isinstance(found, str) else set(found)
        for one in schema.get("oneOf", []) + schema.get("anyOf", []):
            types |= self.types(one)
        return types

    def test_every_class_has_a_schema_or_is_of_another_program(self) -> None:
        classes = {one for one in vars(model).values() if isinstance(one, type) and is_dataclass(one)}
        self.assertEqual(classes, SCHEMAS.keys() | OTHERS)

    def test_every_field_is_in_its_schema_and_there_whenever_the_client_needs_it(self) -> None:
        for kind, name in SCHEMAS.items():
            schema, hints = self.schemas[name], get_type_hints(kind)
            for one in fields(kind):
                field = one.metadata.get("name", one.name)
                with self.subTest(schema=name, field=field):
                    self.assertIn(field, schema["properties"])
                    if one.default is MISSING and one.default_factory is MISSING:
                        self.assertIn(field, schema["required"])
                    wanted = TYPES.get(hints[one.name])
                    if wanted and "read" not in one.metadata:
                        self.assertIn(wanted, self.types(schema["properties"][field]))
