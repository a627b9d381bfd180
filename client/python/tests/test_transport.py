"""Requests that are refused, cut, or answered by something else."""

from __future__ import annotations

import json
import tempfile
import threading
import unittest
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from pf_client import Client, Error, Event, Reset
from pf_client.events import Blocks

Answer = tuple[int, dict[str, str], bytes]


def problem(status: int, code: str, retryable: bool, **headers: str) -> Answer:
    body = {"code": code, "detail": "words", "retryable": retryable, "request_id": "r-1"}
    return status, {"content-type": "application/problem+json", **headers}, json.dumps(body).encode()


def found(document: Any) -> Answer:
    return 200, {"content-type": "application/json"}, json.dumps(document).encode()


def events(*blocks: str, **headers: str) -> Answer:
    return 200, {"content-type": "text/event-stream", **headers}, "".join(f"{block}\n\n" for block in blocks).encode()


def event(number: int, kind: str = "tagged", **more: Any) -> str:
    data = {"id": f"e1-{number}", "at": 1000, "kind": kind, "repository": "team/agent", **more}
    return f"id: e1-{number}\nevent: {kind}\ndata: {json.dumps(data)}"


class Case(unittest.TestCase):
    def serve(self, *answers: Answer | None) -> str:
        """A server that gives these answers, one to each request; `None` closes the connection."""
        self.seen: list[tuple[str, dict[str, str]]] = []
        left = iter(answers)
        seen = self.seen

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", "0")))
                seen.append((f"{self.command} {self.path}", {name.lower(): value for name, value in self.headers.items()}))
                answer = next(left)
                if answer is None:
                    self.close_connection = True
                    return
                status, headers, body = answer
                self.send_response(status)
                for name, value in {"content-length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def stop() -> None:
            server.shutdown()
            thread.join()
            server.server_close()

        self.addCleanup(stop)
        return f"http://127.0.0.1:{server.server_port}"

    def waited(self, work: Callable[[], object]) -> list[float]:
        """For how long it would have slept."""
        with mock.patch("time.sleep") as sleep:
            work()
        return [call.args[0] for call in sleep.call_args_list]


class Transport(Case):
    def test_a_change_is_sent_again_under_one_key(self) -> None:
        tag = {"name": "a", "digest": "sha256:0", "updated_at": 0}
        later = problem(503, "unavailable", True, **{"retry-after": "7"})
        client = Client(self.serve(later, None, found(tag)), token="hush")
        waits = self.waited(lambda: client.put_tag("team/agent", "a", "b~1"))
        self.assertEqual((waits[0], len(waits)), (7.0, 2))
        self.assertEqual([request for request, _ in self.seen], ["PUT /v1/repositories/team%2Fagent/tags/a"] * 3)
        self.assertEqual(len({headers["idempotency-key"] for _, headers in self.seen}), 1)
        self.assertEqual({headers["authorization"] for _, headers in self.seen}, {"Bearer hush"})

    def test_what_cannot_help_is_not_sent_again(self) -> None:
        client = Client(self.serve(problem(404, "tag_unknown", False)))
        with self.assertRaises(Error) as raised:
            client.tag("a", "b")
        error = raised.exception
        self.assertEqual((error.code, error.message, error.status, error.request_id), ("tag_unknown", "words", 404, "r-1"))
        self.assertEqual(len(self.seen), 1)

    def test_tries_end(self) -> None:
        client = Client(self.serve(*[problem(429, "rate_limited", True)] * 3), retries=2)
        with mock.patch("time.sleep"), self.assertRaisesRegex(Error, "rate_limited"):
            client.stats()
        self.assertEqual(len(self.seen), 3)

    def test_another_server_is_named_and_a_redirect_is_not_followed(self) -> None:
        page: Answer = (200, {"content-type": "text/html"}, b"<html>")
        away: Answer = (302, {"location": "http://127.0.0.1:1/"}, b"")
        for answer in (page, away):
            with self.assertRaisesRegex(Error, "is a registry there"):
                Client(self.serve(answer), token="hush").stats()

    def test_statistics_of_another_selection_are_refused(self) -> None:
        sizes = dict.fromkeys(("logical", "unique", "stored", "disk"), 1)
        stats = {"repository": "a", "snapshots": [], "dedup_ratio": 1.0, "codec_ratio": 1.0, **sizes}
        # A registry of an older version ignores what it does not know.
        client = Client(self.serve(found(stats), found(stats), found({**stats, "below": "sha256:0"}), found(stats)))
        self.assertIsNone(client.stats("a").below)
        for selection in ({"below": "t"}, {"below": "t", "agent": "b"}, {"agent": "b"}):
            with self.assertRaisesRegex(Error, "^invalid_request: .*older version"):
                client.stats("a", **selection)

    def test_an_answer_has_bounds(self) -> None:
        deep: Answer = (200, {"content-type": "application/json"}, b"[" * 200_000)
        with self.assertRaisesRegex(Error, "is a registry there"):
            Client(self.serve(deep)).stats()
        with mock.patch("pf_client.transport._LARGEST_ANSWER", 10):
            with self.assertRaisesRegex(Error, "more than 10 bytes") as raised:
                Client(self.serve(found({"tags": []}))).stats()
            self.assertFalse(raised.exception.retryable)

    def test_an_answer_that_is_cut_is_asked_for_again(self) -> None:
        cut: Answer = (200, {"content-length": "100"}, b'{"name":')
        client = Client(self.serve(cut, found({"name": "a", "digest": "sha256:0", "updated_at": 0})))
        self.assertEqual(len(self.waited(lambda: client.tag("x", "a"))), 1)

    def test_lists_are_read_page_by_page_in_their_domain(self) -> None:
        names = [{"name": name, "digest": "sha256:0", "updated_at": 0, "new": "field"} for name in ("a", "b")]
        url = self.serve(found({"tags": names[:1], "next": "a&b"}), found({"tags": names[1:]}))
        tags = list(Client(f"{url}/domains/acme/").tags("x"))
        self.assertEqual([tag.name for tag in tags], ["a", "b"])
        path = "GET /domains/acme/v1/repositories/x/tags?limit=1000"
        self.assertEqual([request for request, _ in self.seen], [path, f"{path}&after=a%26b"])

    def test_a_token_is_not_sent_where_others_can_read_it(self) -> None:
        for url in ("http://registry.example.com", "http://10.0.0.1:5077"):
            with self.assertRaisesRegex(Error, "plain http"):
                Client(url, token="hush")
            Client(url, token="hush", token_over_http=True)
        Client("https://registry.example.com", token="hush")
        wrong = ["registry:80", "ftp://h", "http://", "http://u:hush@h", "http://h:port", "http://h?x=hush", "http://a b", "http://h\n"]
        for url in (*wrong, "http://a..b", f"http://{'a' * 64}", "http://h/d\u00f6", "http://h/a b", "http://[::1", "http://h:99999"):
            with self.assertRaisesRegex(Error, "invalid_request") as raised:
                Client(url)
            self.assertNotIn("hush", str(raised.exception))

    def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(self) -> None:
        for token in ("hush\n", "hush\r\nx: y", "hush\u20ac", "hush\x00"):
            with self.assertRaisesRegex(Error, "no header can carry") as raised:
                Client("http://127.0.0.1:1", token=token)
            self.assertEqual(raised.exception.code, "invalid_request")
            self.assertNotIn("hush", str(raised.exception))

    def test_what_no_request_can_carry_is_refused(self) -> None:
        client = Client("http://127.0.0.1:1", retries=0)
        for call in (
            lambda: client.delete_tag("a", "b", if_tag_is="x\r\ny: z"),
            lambda: client.delete_tag("a", "b", if_tag_is="\u20ac"),
            lambda: client.tag("a", "\udc80"),
            lambda: client.match("a", [{1}], "sha256:0"),  # type: ignore[list-item]
        ):
            with self.assertRaisesRegex(Error, "^invalid_request: "):
                call()

    def test_numbers_and_authorities_that_cannot_be_used_are_refused(self) -> None:
        with tempfile.NamedTemporaryFile() as garbage:
            garbage.write(b"none")
            garbage.flush()
            for ca in ("/nope", garbage.name):
                with self.assertRaisesRegex(Error, f"^invalid_request: the authorities in {ca}"):
                    Client("https://127.0.0.1:1", ca=ca)
        with self.assertRaisesRegex(Error, "^invalid_request: retries is -1"):
            Client("http://127.0.0.1:1", retries=-1)
        for timeout in (0, -1, float("nan"), float("inf")):
            with self.assertRaisesRegex(Error, "^invalid_request: timeout is"):
                Client("http://127.0.0.1:1", timeout=timeout)

    def test_an_address_of_ipv6_needs_no_port(self) -> None:
        with mock.patch("http.client.HTTPConnection") as connection, self.assertRaisesRegex(Error, "not sent"):
            connection.return_value.request.side_effect = OSError("not sent")
            Client("http://[2001:db8::abcd]", retries=0).stats()
        self.assertEqual(connection.call_args.args, ("2001:db8::abcd", 80))

    def test_json_of_another_server_is_an_error(self) -> None:
        documents: list[Any] = [{}, [], 3, {"tags": 3}, {"tags": [{"name": "a", "digest": "b", "updated_at": "soon"}]}]
        for document in documents:
            with self.assertRaisesRegex(Error, "^unavailable: the answer is not that of a registry"):
                list(Client(self.serve(found(document))).tags("a"))
            with self.assertRaisesRegex(Error, "^unavailable: the answer is not that of a registry"):
                Client(self.serve(found(document))).tag("a", "b")

    def test_a_program_that_is_not_pf_is_an_error(self) -> None:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        garbage = folder / "garbage"
        garbage.write_bytes(b"\x00\x01")
        garbage.chmod(0o755)
        for program, says in ((str(garbage), "cannot be run"), ("/bin/true", "does not answer as pf does")):
            with self.assertRaisesRegex(Error, f"^invalid_request: {program} {says}"):
                Client("http://127.0.0.1:1", program=program).pull("a", "b", folder / "back")


class Events(Case):
    def ids(self, found: Iterator[Event | Reset], count: int) -> list[str]:
        return [next(found).id for _ in range(count)]

    def test_a_stream_that_is_cut_goes_on_after_the_last_id(self) -> None:
        # The second answer ends within an event, the third is orderly, the fourth only says an id.
        status, _, text = events(event(2), event(3))
        cut: Answer = (status, {"content-type": "text/event-stream", "content-length": "5000"}, text[:-9])
        later = problem(503, "unavailable", True)
        url = self.serve(events("retry: 2000\nid: e1-0", ":", event(1)), cut, None, later, events("id: e1-7"), events(event(8)))
        found = Client(url, token="hush").events("team/*", kind="tagged")
        with mock.patch("time.sleep"):
            self.assertEqual(self.ids(found, 3), ["e1-1", "e1-2", "e1-8"])
        self.assertEqual({request for request, _ in self.seen}, {"GET /v1/events?repository=team%2F%2A&kind=tagged&follow=true"})
        resumed = [headers.get("last-event-id") for _, headers in self.seen]
        self.assertEqual(resumed, [None, "e1-1", "e1-2", "e1-2", "e1-2", "e1-7"])
        self.assertEqual(
            {(headers["accept"], headers["authorization"]) for _, headers in self.seen}, {("text/event-stream", "Bearer hush")}
        )

    def test_an_iterator_that_does_not_follow_ends_only_with_the_last_event(self) -> None:
        url = self.serve(events(event(1), **{"content-length": "5000"}), events(event(2)))
        with mock.patch("time.sleep") as sleep:
            found = [one.id for one in Client(url).events(after="e1-0", follow=False)]
        self.assertEqual((found, sleep.call_count), (["e1-1", "e1-2"], 1))
        self.assertEqual([headers["last-event-id"] for _, headers in self.seen], ["e1-0", "e1-1"])
        self.assertTrue(self.seen[0][0].endswith("?follow=false"))

    def test_streams_that_end_at_once_are_asked_for_later_each_time(self) -> None:
        url = self.serve(*[events("id: e1-1")] * 9, events(event(2)))
        with mock.patch("time.sleep") as sleep, mock.patch("random.uniform", return_value=1.0):
            self.assertEqual(self.ids(Client(url).events(), 1), ["e1-2"])
        waits = [call.args[0] for call in sleep.call_args_list]
        self.assertEqual(waits, [min(0.2 * 2**failures, 30.0) for failures in range(1, 10)])

    def test_an_event_has_its_fields_and_a_gap_is_told(self) -> None:
        freed = {"run": "r", "objects": 3, "freed_bytes": 4, "deleted_bytes": 5, "later": 6}
        pushed = event(2, "pushed", digest="sha256:0", parents=["sha256:1"], new_bytes=7, artifact_type="x", later=1)
        gap = 'id: e2-9\nevent: reset\ndata: {"id":"e2-9","reason":"words"}'
        answer = events(pushed, event(3, "renamed"), event(4, "collected", repository=None, collection=freed), gap)
        found = list(Client(self.serve(answer)).events(follow=False))
        self.assertEqual([one.kind for one in found], ["pushed", "collected", "reset"])
        first, second, third = found
        assert isinstance(first, Event) and isinstance(second, Event) and isinstance(third, Reset)
        self.assertEqual((first.parents, first.new_bytes, first.tag, first.at.timestamp()), (["sha256:1"], 7, None, 1.0))
        assert second.collection is not None
        self.assertEqual((second.repository, second.collection.freed_bytes), (None, 4))
        self.assertEqual((third.id, third.reason), ("e2-9", "words"))

    def test_what_is_no_stream_of_events_is_an_error(self) -> None:
        garbage = "event: tagged\ndata: "
        deep = garbage + "[" * 200_000
        for answer in (
            events(f"{garbage}x"),
            events(f"{garbage}[]"),
            events(f"{garbage}{{}}"),
            events(deep),
            events("data: " + "x" * (2 << 20)),
        ):
            with self.assertRaisesRegex(Error, "^unavailable: the answer is not that of a registry"):
                list(Client(self.serve(answer)).events())
        for other in (found({"events": []}), (200, {"content-type": "text/html"}, b"<html>")):
            with self.assertRaisesRegex(Error, "is a registry there"):
                list(Client(self.serve(other)).events())
        with self.assertRaisesRegex(Error, "^denied: words"):
            list(Client(self.serve(problem(403, "denied", False))).events())
        with self.assertRaisesRegex(Error, "^invalid_request: the header last-event-id"):
            list(Client("http://127.0.0.1:1", retries=0).events(after="x\r\ny: z"))
        with self.assertRaisesRegex(Error, "^unavailable: .* cannot be reached"):
            list(Client("http://127.0.0.1:1", retries=0).events(kind="tagged"))

    def test_an_id_that_no_registry_sends_is_not_sent_back(self) -> None:
        url = self.serve(events("id: \u20ac", event(1)), events("id: x y"), events(event(2)))
        with mock.patch("time.sleep"):
            self.ids(Client(url).events(), 2)
        self.assertEqual([headers.get("last-event-id") for _, headers in self.seen], [None, "e1-1", "e1-1"])

    def test_blocks_are_the_same_however_the_bytes_come(self) -> None:
        text = b"retry: 2000\nid: a-1\n\n:\n\n\n\nid:a-2\r\nevent: pushed\r\ndata: x\r\n\r\ndata\ndata: y\nfuture: z\n\nid: a-3\n"
        expected = [("a-1", "", []), (None, "", []), ("a-2", "pushed", ["x"]), (None, "", ["", "y"])]
        for size in (1, 2, 3, 7, len(text)):
            blocks = Blocks()
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            read = [(block.id, block.event, block.data) for piece in pieces for block in blocks.push(piece)]
            self.assertEqual(read, expected, size)
        with self.assertRaisesRegex(ValueError, "more than"):
            for _ in range(40):
                list(blocks.push(b"x" * (64 << 10)))
        with self.assertRaisesRegex(ValueError, "more than"):
            for _ in range(2000):
                list(Blocks.push(blocks, b"data: " + b"x" * 1000 + b"\n"))


class Agent(Case):
    def test_work_of_the_agent_is_asked_of_pf(self) -> None:
        job: dict[str, Any] = {"id": "j", "request": {"kind": "warm"}, "state": "running", "started_at": "2000-02-29T00:00:00.123Z"}
        job |= {"done_bytes": 1, "total_bytes": 2, "later": 3}
        drain = {"plan": [], "done": [], "failed": [], "bytes": 4, "recompute_tokens": 5, "recompute_seconds": 2.5}
        said = {"warm": job, "drain": drain, "jobs": {"jobs": [job]}}
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        asked: list[str] = []

        def run(_program: str, arguments: list[str], _environment: dict[str, str | None]) -> Any:
            asked.append(" ".join(arguments))
            return said[arguments[0]] if arguments[:2] != ["jobs", "cancel"] else job

        client = Client("http://127.0.0.1:1", program="/bin/true")
        with mock.patch("pf_client.program.run", run):
            warm = client.warm("team/*:latest", "x", newest=3, keep_seconds=60, max_bytes=7, engine="e", wait=False, agent=folder / "s")
            self.assertEqual((warm.id, warm.bytes_total, warm.started_at.microsecond), ("j", 2, 123_000))
            client.warm("x", prefill_tokens_per_second=2000, plan=True)
            planned = client.drain("team/evacuated", plan=True, prefill_tokens_per_second=2.0, wait_seconds=9)
            self.assertEqual((planned.bytes, planned.recompute_seconds), (4, 2.5))
            self.assertEqual([one.state for one in client.jobs()], ["running"])
            self.assertEqual(client.cancel_job("j").id, "j")
        options = f"--newest 3 --keep 60s --max-size 7 --for e --detach --agent {folder}/s"
        first = f"warm http://127.0.0.1:1/team/*:latest http://127.0.0.1:1/x {options}"
        second = "warm http://127.0.0.1:1/x --prefill-tokens-per-second 2000 --plan"
        third = "drain team/evacuated --plan --prefill-tokens-per-second 2.0 --wait 9"
        self.assertEqual(asked, [first, second, third, "jobs", "jobs cancel j"])
