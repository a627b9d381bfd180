"""The connection to the agent: framing, calls both ways, descriptors, what happens when it ends."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
import time
import unittest
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

from fake_agent import Answer, FakeAgent
from pf_connector.member import Later, Member, Verb
from pf_connector.paths import socket_path
from pf_connector.tokens import Packed
from pf_connector.wire import MAX_MESSAGE, Failure, Full, Lost, WireError, encode, encode_match_keys, receive, send

REGISTRATION = {"engine": "e", "member": "m", "verbs": ["pause"], "world": 1, "deployment": {"weights": "w", "engine": "e", "backend": "b"}}


class Framing(unittest.TestCase):
    def setUp(self) -> None:
        self.a, self.b = socket.socketpair()
        self.addCleanup(self.a.close)
        self.addCleanup(self.b.close)

    def test_a_message_arrives_as_it_was_sent(self) -> None:
        for message in ({}, {"id": 1, "ok": {"ä": [1, 2.5, None, True]}}, {"x": "y" * 3_000_000}):
            thread = threading.Thread(target=send, args=(self.a, message))
            thread.start()
            self.assertEqual(receive(self.b), message)
            thread.join()

    def test_the_length_is_little_endian(self) -> None:
        self.assertEqual(encode({})[:4], b"\x02\x00\x00\x00")

    def test_foreign_bytes_are_refused(self) -> None:
        for data, word in (
            (struct.pack("<I", MAX_MESSAGE + 1), "limit"),
            (struct.pack("<I", 3) + b"{,}", "JSON"),
            (struct.pack("<I", 2) + b"[]", "object"),
            (struct.pack("<I", 100_000) + b"[" * 100_000, "JSON"),
            (struct.pack("<I", 2) + b"\xff\xfe", "JSON"),
            (struct.pack("<I", 9) + b"{", "within"),
            (b"\x01\x00", "within"),
        ):
            with self.subTest(data=data[:8]):
                a, b = socket.socketpair()
                with a, b:
                    thread = threading.Thread(target=lambda a=a, data=data: (a.sendall(data), a.shutdown(socket.SHUT_WR)))
                    thread.start()
                    with self.assertRaisesRegex(WireError, word):
                        receive(b)
                    thread.join()

    def test_the_end_between_two_messages_is_an_end(self) -> None:
        self.a.close()
        self.assertIsNone(receive(self.b))

    def test_the_binary_form_has_the_bytes_that_the_agent_reads(self) -> None:
        # The tests of schema/src/engine/binary.rs have the same bytes.
        key = sha256(b"k").digest()
        found = encode_match_keys(7, 3, 1, "s", None, [(2, key)])
        numbers = ["0700000000000000", "0300000000000000", "0100000000000000"]
        body = bytes.fromhex("".join(["01", *numbers, "01000000", "73", "00", "01000000", "0200000000000000", key.hex()]))
        self.assertEqual(found, struct.pack("<I", len(body)) + body)
        with self.assertRaises(WireError):
            encode_match_keys(1, 1, 0, "x" * ((1 << 20) + 1), None, [])

    def test_packed_tokens_have_the_bytes_that_the_agent_reads(self) -> None:
        # The tests of schema/src/engine/packed.rs have the same bytes.
        found = encode({"id": 7, "call": "match", "args": {"tokens": Packed.of([1, 151_808, 3], 2), "salt": ""}})
        head = b'{"id":7,"call":"match","args":{"tokens":[],"salt":""}}'
        body = b"\x02" + struct.pack("<I", len(head)) + head + bytes([1, 0, 0, 0, 0, 81, 2, 0])
        self.assertEqual(found, struct.pack("<I", len(body)) + body)
        with self.assertRaisesRegex(TypeError, "Packed"):
            encode({"tokens": Packed.of([1], 1), "again": Packed.of([1], 1)})
        with self.assertRaisesRegex(TypeError, "object"):
            encode({"tokens": object()})
        with self.assertRaisesRegex(WireError, "limit"):
            encode({"tokens": Packed([bytes(MAX_MESSAGE)])})

    def test_tokens_are_packed_in_steps_and_none_is_cut_short(self) -> None:
        for count in (0, 1, 16_383, 16_384, 16_385, 20_000):
            packed = Packed.of(range(40_000), count)
            self.assertEqual([token for (token,) in struct.iter_unpack("<I", b"".join(packed.parts))], list(range(count)))
        self.assertEqual(Packed.of([1, 2], 4).parts, [bytes([1, 0, 0, 0, 2, 0, 0, 0])])
        for wrong in (-1, 1 << 32):
            with self.assertRaises(OverflowError):
                Packed.of([wrong], 1)
        with self.assertRaises(TypeError):
            Packed.of(["a"], 1)  # type: ignore[list-item]

    def test_numbers_that_are_no_json_are_not_sent(self) -> None:
        with self.assertRaises(ValueError):
            encode({"x": float("nan")})


class Place(unittest.TestCase):
    def test_the_socket_is_the_one_given_or_that_of_the_environment_or_the_agents_default(self) -> None:
        everything = {"PF_AGENT_ENGINE_SOCKET": "/e/s", "XDG_RUNTIME_DIR": "/r", "XDG_DATA_HOME": "/d", "HOME": "/h"}
        for given, expected in (
            ("/own", "/own"),
            (None, "/e/s"),
            # As the agent's `places_follow_the_environment`.
            (None, "/r/pf/engines.sock"),
            (None, "/d/pf/agent/engines.sock"),
            (None, "/h/.local/share/pf/agent/engines.sock"),
        ):
            with mock.patch.dict(os.environ, everything, clear=True):
                self.assertEqual(socket_path(given), expected)
            if given is None:
                everything.pop(next(iter(everything)))


class Connection(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = str(Path(self.folder.name) / "s")

    def agent(self, answer: Answer | None = None) -> FakeAgent:
        agent = FakeAgent(self.path, answer)
        self.addCleanup(agent.close)
        return agent

    def member(self, calls: dict[str, Verb] | None = None, **options: Any) -> Member:
        member = Member(self.path, REGISTRATION, calls, **options).start()
        self.addCleanup(member.close)
        return member

    def test_it_registers_with_its_descriptors(self) -> None:
        agent = self.agent()
        fd = os.memfd_create("x")
        self.addCleanup(os.close, fd)
        os.write(fd, b"pages")
        member = self.member(descriptors=[fd])
        link = agent.link(0)
        self.assertTrue(member.wait_registered(10))
        self.assertEqual(link.register, {"protocol": 4, **REGISTRATION})
        self.assertEqual(os.pread(link.descriptors[0], 5, 0), b"pages")

    def test_both_sides_call_at_once(self) -> None:
        agent = self.agent(lambda call, args: {"match": "later", "n": args["n"]})
        member = self.member({"table": lambda args: {"sequences": [args]}})
        link = agent.link(0)
        self.assertTrue(member.wait_registered(10))
        futures = [member.submit("match", {"n": n}) for n in range(50)]
        self.assertEqual(link.call("table", {"sequence": "a"})["ok"], {"sequences": [{"sequence": "a"}]})
        self.assertEqual([f.result(10)["n"] for f in futures], list(range(50)))

    def test_refusals_cross_with_their_code(self) -> None:
        agent = self.agent(lambda call, args: {"code": "no_room", "detail": "full"})

        def refuse(args: dict[str, Any]) -> dict[str, Any]:
            raise Failure("sequence_unknown", "no such")

        def broken(args: dict[str, Any]) -> dict[str, Any]:
            raise KeyError("x")

        member = self.member({"oracle": refuse, "table": broken})
        link = agent.link(0)
        self.assertTrue(member.wait_registered(10))
        self.assertEqual(link.call("oracle")["error"], {"code": "sequence_unknown", "detail": "no such"})
        self.assertEqual(link.call("pause")["error"]["code"], "invalid_request")
        with self.assertLogs("pf_connector", "ERROR"):
            self.assertEqual(link.call("table")["error"]["code"], "internal")
        with self.assertRaises(Failure) as caught:
            member.call("fill", {}, 10)
        self.assertEqual(caught.exception.code, "no_room")

    def test_an_answer_may_come_later_and_other_calls_do_not_wait_for_it(self) -> None:
        agent = self.agent()
        later: Later = Future()
        self.member({"hold": lambda args: later, "staged": lambda args: {}})
        link = agent.link(0)
        threading.Timer(0.1, later.set_result, [lambda: {"id": "a"}]).start()
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(link.call("hold")), daemon=True)
        waiting.start()
        self.assertEqual(link.call("staged")["ok"], {})
        waiting.join(10)
        self.assertEqual(answers[0]["ok"], {"id": "a"})
        later = Future()
        later.set_exception(Failure("engine_busy", "no"))
        # The call reads the variable anew.
        self.assertEqual(link.call("hold")["error"]["code"], "engine_busy")

    def test_without_an_agent_calls_fail_at_once(self) -> None:
        member = self.member()
        with self.assertRaises(Lost):
            member.call("match", {}, 10)

    def test_when_the_connection_ends_open_calls_fail_the_engine_goes_on_and_it_connects_again(self) -> None:
        hold = threading.Event()
        self.addCleanup(hold.set)
        agent = self.agent(lambda call, args: (hold.wait(30), {})[1])
        lost = threading.Event()
        member = self.member(on_lost=lost.set)
        link = agent.link(0)
        self.assertTrue(member.wait_registered(10))
        future = member.submit("match", {})
        link.close()
        with self.assertRaises(Lost):
            future.result(10)
        self.assertTrue(lost.wait(10))
        agent.link(1)
        self.assertTrue(member.wait_registered(10))

    def test_calls_never_wait_for_an_agent_that_does_not_read(self) -> None:
        agent = self.agent()
        member = self.member()
        link = agent.link(0)
        self.assertTrue(member.wait_registered(10))
        link.reading.clear()
        begun = time.monotonic()
        futures = [member.submit("match", {"tokens": "x" * 100_000}) for _ in range(200)]
        # Twenty megabytes: a blocking write would stand still after the kernel's few hundred
        # kilobytes.
        self.assertLess(time.monotonic() - begun, 5)
        refused = [future for future in futures if future.done()]
        self.assertTrue(all(isinstance(future.exception(), Full) for future in refused))
        self.assertEqual(member.dropped, len(refused))
        self.assertGreater(len(refused), 100)
        link.reading.set()
        for future in futures:
            if future not in refused:
                self.assertEqual(future.result(10), {})
        self.assertEqual(member.call("match", {}, 10), {}, "it goes on when the agent does")

    def test_an_agent_that_dribbles_is_understood(self) -> None:
        agent = self.agent()
        member = self.member({"table": lambda args: {"sequences": [args]}})
        link = agent.link(0)
        self.assertTrue(member.wait_registered(10))
        self.assertEqual(link.call("table", {"sequence": "a"}, dribble=True)["ok"], {"sequences": [{"sequence": "a"}]})

    def test_a_call_in_hand_is_finished_before_the_loss_is_told(self) -> None:
        agent = self.agent()
        order: list[str] = []
        begun, go, told = threading.Event(), threading.Event(), threading.Event()

        def pause(args: dict[str, Any]) -> dict[str, Any]:
            begun.set()
            go.wait(10)
            order.append("paused")
            return {}

        def lost() -> None:
            order.append("lost")
            told.set()

        self.member({"pause": pause}, on_lost=lost)
        link = agent.link(0)
        threading.Thread(target=lambda: link.call("pause"), daemon=True).start()
        self.assertTrue(begun.wait(10))
        link.close()
        go.set()
        self.assertTrue(told.wait(10))
        self.assertEqual(order, ["paused", "lost"])


if __name__ == "__main__":
    unittest.main()
