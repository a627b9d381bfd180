"""The proxy between an engine and its agent: it removes groups from every form of message, and
keeps answers back."""

from __future__ import annotations

import socket
import tempfile
import unittest
from pathlib import Path
from typing import Any

from proxy import Proxy

from pf_connector.tokens import Packed, pack
from pf_connector.wire import receive, receive_body, send

TOKENS = list(range(70_000))


def described(**more: Any) -> dict[str, Any]:
    """A sequence with blocks of two groups."""
    return {"id": "chat", "blocks": {"full": [[1, 2]], "state": [[3]]}, **more}


class Groups(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = Path(folder.name)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path / "agent"))
        listener.listen()
        self.addCleanup(listener.close)
        self.proxy = Proxy(path / "proxy", path / "agent")
        self.addCleanup(self.proxy.close)
        self.proxy.omit = "state"
        self.engine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.addCleanup(self.engine.close)
        self.engine.connect(str(path / "proxy"))
        groups = [{"name": "full"}, {"name": "state"}]
        send(self.engine, {"id": 1, "call": "register", "args": {"groups": groups}})
        self.agent, _ = listener.accept()
        self.addCleanup(self.agent.close)
        self.agent.settimeout(10)

    def test_an_omitted_group_is_in_no_message(self) -> None:
        first = receive(self.agent)
        assert first is not None
        self.assertEqual(first["args"]["groups"], [{"name": "full"}])
        send(self.engine, {"id": 7, "ok": {"sequences": [described()]}})
        table = receive(self.agent)
        assert table is not None
        self.assertEqual(table["ok"]["sequences"][0]["blocks"], {"full": [[1, 2]]})
        send(self.engine, {"id": 8, "ok": described(tokens=Packed.of(TOKENS, len(TOKENS)))})
        body = receive_body(self.agent)
        assert body is not None
        self.assertNotIn(b'"state"', body)
        self.assertIn(b'"full"', body)
        self.assertTrue(body.endswith(pack(TOKENS)), "the tokens behind the JSON are the same")

    def test_an_answer_to_hold_waits_and_others_go_ahead_of_it(self) -> None:
        receive(self.agent)
        self.proxy.passes_holds.clear()
        send(self.agent, {"id": 3, "call": "hold", "args": {"sequence": "chat"}})
        send(self.agent, {"id": 4, "call": "sequences", "args": {}})
        self.engine.settimeout(10)
        self.assertEqual([(receive(self.engine) or {})["call"] for _ in range(2)], ["hold", "sequences"])
        send(self.engine, {"id": 3, "ok": described()})
        send(self.engine, {"id": 4, "ok": {"sequences": []}})
        self.assertEqual((receive(self.agent) or {})["id"], 4)
        self.proxy.passes_holds.set()
        held = receive(self.agent) or {}
        self.assertEqual((held["id"], held["ok"]["id"]), (3, "chat"))
