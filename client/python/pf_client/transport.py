"""Requests to a registry: JSON over HTTP, sent again where that can help.

Every request here may be repeated: those that change something carry an `Idempotency-Key`, or set
what they say.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import random
import ssl
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from .errors import Error

_LONGEST_WAIT = 30.0
"""Seconds before another try, at most."""

_LARGEST_ANSWER = 256 << 20
"""Bytes of an answer that are read at most: its largest lists are far smaller."""

_LONGEST_TIMEOUT = 1_000_000.0
"""Seconds; a socket takes about twice as many."""

_SILENCE = 60.0
"""Seconds after which a stream that says nothing is given up: registries speak every 15."""

_PIECE = 64 << 10
"""Bytes of a stream that are read at a time."""

T = TypeVar("T")


class Stream:
    """An answer that is read while it comes. Close it."""

    def __init__(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._answer = answer

    def read(self) -> bytes:
        """The bytes that came; none at the end. Raises `OSError` or `http.client.HTTPException` if
        the answer was cut or fell silent."""
        data = self._answer.read1(_PIECE)
        if not data and self._answer.length:
            raise http.client.IncompleteRead(data, self._answer.length)
        return data

    def close(self) -> None:
        """Ends it."""
        self._answer.close()
        self._connection.close()


class Transport:
    """Sends requests to one registry, each on a connection of its own."""

    def __init__(self, url: str, *, token: str | None, ca: str | None, token_over_http: bool, retries: int, timeout: float) -> None:
        # A refused address may hold a password: it is not shown.
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
            # As a socket spells it: a part of a name may not be empty, and has at most 63 bytes.
            host.encode("idna")
        except ValueError:
            raise Error("invalid_request", "the address of the registry is not valid") from None
        # urlsplit leaves out line ends and tabs.
        is_clean = _is_plain(parts.path) and all("!" <= character != "\x7f" for character in url)
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or "@" in parts.netloc or not is_clean:
            raise Error("invalid_request", "the address of the registry is not valid: expected http(s)://HOST[:PORT][/domains/NAME]")
        if retries < 0:
            raise Error("invalid_request", f"retries is {retries}: expected 0 or more")
        if not 0 < timeout <= _LONGEST_TIMEOUT:
            raise Error("invalid_request", f"timeout is {timeout}: expected seconds, more than 0 and at most {_LONGEST_TIMEOUT:.0f}")
        # The message of http.client would show it.
        if token and not _is_plain(token):
            raise Error("invalid_request", "the token has characters that no header can carry")
        if token and parts.scheme == "http" and not token_over_http and not _is_loopback(host):
            raise Error("invalid_request", f"the token is not sent to {host} over plain http, which others could read: see token_over_http")
        self.url = url.rstrip("/")
        self._host = host
        # Without a port http.client looks for one in the host, also in an address of IPv6.
        self._port = port if port is not None else (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._tls = _trust(ca) if parts.scheme == "https" else None
        self._token = token
        self._retries = retries
        self._timeout = timeout

    def request(
        self,
        method: str,
        path: Sequence[str],
        *,
        query: Mapping[str, str | int | None] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        once: bool = False,
    ) -> Any:
        """Sends a request to `/v1/…`; each part of the path is one segment. Returns the JSON of the
        answer, `None` if it has none. `once`: a change that is to take place once."""
        target, sent = self._target(path, query), self._headers(headers)
        try:
            payload = None if body is None else json.dumps(body).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise _unsendable(error) from None
        if once:
            sent["idempotency-key"] = str(uuid.uuid4())
        if payload is not None:
            sent["content-type"] = "application/json"
        return self._tried(lambda: self._once(method, target, payload, sent))

    def stream(self, path: Sequence[str], *, query: Mapping[str, str | int | None], kind: str, headers: Mapping[str, str]) -> Stream:
        """Asks for an answer of the media type `kind`, which is read while it comes."""
        target, sent = self._target(path, query), self._headers({**headers, "accept": kind})
        return self._tried(lambda: self._begun(target, sent, kind))

    def _target(self, path: Sequence[str], query: Mapping[str, str | int | None] | None) -> str:
        given = {name: value for name, value in (query or {}).items() if value is not None}
        try:
            target = f"{self._prefix}/v1/" + "/".join(quote(part, safe="") for part in path)
            return target + (f"?{urlencode(given)}" if given else "")
        except (TypeError, ValueError) as error:
            raise _unsendable(error) from None

    def _headers(self, headers: Mapping[str, str] | None) -> dict[str, str]:
        for name, value in (headers or {}).items():
            if not isinstance(value, str) or not _is_plain(value):
                raise Error("invalid_request", f"the header {name} cannot carry {value!r}")
        sent = {"user-agent": "pf-client", "accept": "application/json", **(headers or {})}
        if self._token:
            sent["authorization"] = f"Bearer {self._token}"
        return sent

    def _tried(self, work: Callable[[], T]) -> T:
        """Does it again where that can help, later each time."""
        for failures in range(self._retries + 1):
            try:
                return work()
            except Error as error:
                if not error.retryable or failures == self._retries:
                    raise
                time.sleep(min(backoff(failures) if error.retry_after is None else error.retry_after, _LONGEST_WAIT))
        raise AssertionError("the last try returns or raises")

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        return http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=self._tls)

    def _once(self, method: str, target: str, payload: bytes | None, headers: Mapping[str, str]) -> Any:
        connection = self._connection(self._timeout)
        try:
            answer, data = self._read(connection, method, target, payload, headers)
        finally:
            connection.close()
        if 200 <= answer.status < 300:
            if not data:
                return None
            found = _json(data)
            if found is not None:
                return found
        raise self._refusal(answer, data)

    def _begun(self, target: str, headers: Mapping[str, str], kind: str) -> Stream:
        connection = self._connection(min(self._timeout, _SILENCE))
        is_kept = False
        try:
            with self._reached():
                connection.request("GET", target, None, dict(headers))
                answer = connection.getresponse()
                is_kept = answer.status == 200 and answer.headers.get_content_type() == kind
                if is_kept:
                    return Stream(connection, answer)
                data = self._body(answer)
        finally:
            if not is_kept:
                connection.close()
        raise self._refusal(answer, data)

    def _read(
        self, connection: http.client.HTTPConnection, method: str, target: str, payload: bytes | None, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        with self._reached():
            connection.request(method, target, payload, dict(headers))
            answer = connection.getresponse()
            return answer, self._body(answer)

    def _body(self, answer: http.client.HTTPResponse) -> bytes:
        data = answer.read(_LARGEST_ANSWER + 1)
        if len(data) > _LARGEST_ANSWER:
            raise Error("unavailable", f"{self.url} answered with more than {_LARGEST_ANSWER} bytes: is a registry there?")
        # Otherwise only a read without a limit says that the answer was cut.
        if answer.length:
            raise http.client.IncompleteRead(data, answer.length)
        return data

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Failures of a connection, as the exception of this package."""
        try:
            yield
        except ssl.SSLCertVerificationError as error:
            raise Error("unavailable", f"the certificate of {self.url} is not accepted: {error.verify_message}; see ca") from error
        except (OSError, http.client.HTTPException) as error:
            raise Error("unavailable", f"{self.url} cannot be reached: {error}", retryable=True) from error

    def _refusal(self, answer: http.client.HTTPResponse, data: bytes) -> Error:
        problem = _json(data)
        wait = answer.headers.get("retry-after", "")
        retry_after = float(wait) if wait.isdecimal() else None
        if isinstance(problem, dict) and isinstance(problem.get("code"), str):
            return Error(
                problem["code"],
                str(problem.get("detail") or problem.get("title") or ""),
                status=answer.status,
                retryable=problem.get("retryable") is True,
                retry_after=retry_after,
                request_id=problem.get("request_id"),
            )
        message = f"{self.url} answered {answer.status} without JSON: is a registry there?"
        return Error("unavailable", message, status=answer.status, retryable=answer.status >= 500, retry_after=retry_after)


def backoff(failures: int) -> float:
    """Seconds to wait after so many failures before."""
    return 0.2 * 2.0 ** min(failures, 10) * random.uniform(0.5, 1.5)


def _unsendable(error: Exception) -> Error:
    return Error("invalid_request", f"the request cannot be sent: {error}")


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (RecursionError, ValueError):
        return None


def _trust(ca: str | None) -> ssl.SSLContext:
    """Trusts what this machine trusts, and the authorities in a file besides."""
    context = ssl.create_default_context()
    if ca:
        try:
            context.load_verify_locations(ca)
        except (OSError, ValueError) as error:
            raise Error("invalid_request", f"the authorities in {ca} cannot be read: {error}") from None
    return context


def _is_plain(text: str) -> bool:
    """Whether a line of HTTP can carry it."""
    return text.isascii() and text.isprintable()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
