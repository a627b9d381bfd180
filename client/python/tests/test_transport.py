"""Requests that are refused, cut, or answered by something else."""

from __future__ import annotations

import json
import tempfile
import threading
import unittest
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from pf_client import Client, Error

Answer = tuple[int, dict[str, str], bytes]


def problem(status: int, code: str, retryable: bool, **headers: str) -> Answer:
    body = {"code": code, "detail": "words", "retryable": retryable, "request_id": "r-1"}
    return status, {"content-type": "application/problem+json", **headers}, json.dumps(body).encode()


def found(document: Any) -> Answer:
    return 200, {"content-type": "application/json"}, json.dumps(document).encode()


class Transport(unittest.TestCase):
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
