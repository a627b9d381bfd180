"""A registry, or one of its domains."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from . import events, program
from .errors import Error
from .model import (
    Detail,
    Drain,
    Event,
    EventKind,
    Exported,
    Forks,
    Freed,
    Job,
    Lineage,
    Match,
    Pulled,
    Pushed,
    Repository,
    Reset,
    Retention,
    SignatureManifest,
    Signed,
    Snapshot,
    Stats,
    Tag,
    Usage,
    Verified,
    parse,
)
from .transport import Transport

_DIGEST = re.compile("sha256:[0-9a-f]{64}")

_PAGE = 1000
"""Entries of a list that are asked for at a time."""


class Client:
    """A registry at `url`, or one of its domains (`https://host/domains/NAME`).

    Without `url` it is that of `PF_REGISTRY`, or `http://127.0.0.1:5077`; without `token` it is
    that of `PF_TOKEN`. `ca` (`PF_TLS_CA`) names a file with authorities to trust besides those that
    this machine trusts. A token is not sent over plain http to another machine unless
    `token_over_http` allows it. `program` is `pf`, if it is neither beside this Python nor on the
    path.

    A `ref` is a tag, `tag~N` (N parents up), or a digest, which may be cut short. All methods raise
    `Error`. Requests that fail on their way, or that the registry says to send again, are sent
    again up to `retries` times. `timeout`, in seconds, is for each step of a request of this class;
    `push` and `pull` take as long as they take, since `pf` has its own limits for a connection that
    stalls.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        token_over_http: bool = False,
        retries: int = 5,
        timeout: float = 120.0,
        program: str | None = None,
    ) -> None:
        self._token = token or os.environ.get("PF_TOKEN") or None
        self._ca = os.fspath(ca) if ca else os.environ.get("PF_TLS_CA") or None
        self._token_over_http = token_over_http or os.environ.get("PF_TOKEN_OVER_HTTP") in ("1", "true")
        self._program = program
        self._transport = Transport(
            url or os.environ.get("PF_REGISTRY") or "http://127.0.0.1:5077",
            token=self._token,
            ca=self._ca,
            token_over_http=self._token_over_http,
            retries=retries,
            timeout=timeout,
        )
        self._retries = retries

    @property
    def url(self) -> str:
        """Its address, without a slash at the end."""
        return self._transport.url

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    # ---- reading

    def repositories(self) -> Iterator[Repository]:
        """Repositories by name."""
        return (parse(Repository, found) for found in self._pages("repositories"))

    def snapshots(self, repository: str) -> Iterator[Snapshot]:
        """Snapshots of a repository, newest first."""
        return (parse(Snapshot, found) for found in self._pages("snapshots", "repositories", repository))

    def tags(self, repository: str) -> Iterator[Tag]:
        """Tags of a repository by name."""
        return (parse(Tag, found) for found in self._pages("tags", "repositories", repository))

    def tag(self, repository: str, name: str) -> Tag:
        """One tag."""
        return parse(Tag, self._of(repository, "GET", "tags", name))

    def snapshot(self, repository: str, ref: str) -> Detail:
        """One snapshot, with its documents."""
        return parse(Detail, self._of(repository, "GET", "snapshots", ref))

    def lineage(self, repository: str, ref: str, limit: int = 100) -> Lineage:
        """A snapshot and its ancestors, at most `limit` (10,000 at most)."""
        return parse(Lineage, self._of(repository, "GET", "snapshots", ref, "lineage", query={"limit": limit}))

    def stats(self, repository: str | None = None, *, below: str | None = None, agent: str | None = None) -> Stats:
        """How much the snapshots of a repository, or of the whole domain, share. Only the snapshots
        of an agent; in a repository also only `below` and what descends from it, or those that
        meet both. Raises `invalid_request` if the registry is of an older version, which knows
        neither."""
        if repository is None and below is not None:
            raise ValueError("below needs a repository")
        path = ["stats"] if repository is None else ["repositories", repository, "stats"]
        stats = parse(Stats, self._transport.request("GET", path, query={"below": below, "agent": agent}))
        if (below is not None and stats.below is None) or (agent is not None and stats.agent is None):
            raise Error("invalid_request", "the registry is of an older version, and has answered for all snapshots")
        return stats

    def freed(self, repository: str, digests: Sequence[str]) -> Freed:
        """What a deletion of these snapshots, all together and with their tags, would free: more
        than the sum of `exclusive_bytes` if they share what nothing else holds. Nothing is
        deleted. Needs complete digests, and leaves out those that are not there."""
        body = {"repositories": [{"repository": repository, "snapshots": list(digests)}]}
        return parse(Freed, self._transport.request("POST", ["freed"], body=body))

    def match(self, repository: str, tokens: Sequence[int], fingerprint: str, *, salt: str = "", adapter: str | None = None) -> Match:
        """The snapshot with the longest prefix of these tokens that can be resumed by an engine
        with this fingerprint, which `snapshot(…).config["fingerprint"]` has."""
        body: dict[str, Any] = {"tokens": list(tokens), "fingerprint": fingerprint, "salt": salt}
        if adapter is not None:
            body["adapter"] = adapter
        return parse(Match, self._of(repository, "POST", "match", body=body))

    def usage(self) -> Usage:
        """What takes up room in the domain."""
        return parse(Usage, self._transport.request("GET", ["usage"]))

    def events(
        self, repository: str | None = None, *, kind: EventKind | None = None, after: str | None = None, follow: bool = True
    ) -> Generator[Event | Reset, None, None]:
        """What happens in the registry, each event once and in order: those after the id `after`,
        or those from now on. `*` in the repository stands for any characters. A stream that is cut
        is asked for again after the last event, so the iterator waits and does not end, unless
        `follow` is false: then it ends with the last event that there is. A `Reset` says that the
        registry does not keep the events after an id any more. Nothing is asked before the first
        event is taken; `close()` of the iterator ends the stream."""
        return events.follow(self._transport, {"repository": repository, "kind": kind}, after, follow)

    def retention(self) -> list[dict[str, Any]]:
        """The retention policies of the domain, as docs/operations.md has them."""
        found = self._transport.request("GET", ["retention"])
        if not isinstance(found, dict) or not isinstance(found.get("policies"), list):
            raise Error("unavailable", "the answer is not that of a registry: it has no policies")
        return [dict(one) for one in found["policies"] if isinstance(one, dict)]

    def run_retention(self, *, dry_run: bool) -> Retention:
        """Deletes what the retention policies say; with `dry_run` only says what that is."""
        return parse(Retention, self._transport.request("POST", ["retention", "run"], body={"dry_run": dry_run}))

    def signatures(self, repository: str) -> Iterator[SignatureManifest]:
        """Manifests with signatures of a repository, oldest first. `verify_signature` checks
        them."""
        return (parse(SignatureManifest, found) for found in self._pages("signatures", "repositories", repository))

    # ---- names

    def put_tag(self, repository: str, name: str, ref: str, *, if_tag_is: str | None = None) -> Tag:
        """Points a tag at a snapshot of the same repository; with `if_tag_is` (a digest, or
        `absent`) only from there, else `tag_moved`."""
        body = {"snapshot": ref} if if_tag_is is None else {"snapshot": ref, "if_tag_is": if_tag_is}
        return parse(Tag, self._of(repository, "PUT", "tags", name, body=body, once=True))

    def fork(self, repository: str, ref: str, count: int, prefix: str) -> Forks:
        """Makes the tags `<prefix>-1` to `<prefix>-<count>` of one snapshot, all or none. No bytes
        move."""
        body = {"snapshot": ref, "count": count, "prefix": prefix}
        return parse(Forks, self._of(repository, "POST", "forks", body=body, once=True))

    def delete_tag(self, repository: str, name: str, *, if_tag_is: str | None = None) -> None:
        """Deletes a tag, and keeps its snapshot; with `if_tag_is` only if it points at that
        digest."""
        headers = {"if-match": f'"{if_tag_is}"'} if if_tag_is else None
        self._of(repository, "DELETE", "tags", name, headers=headers, once=True)

    def delete_snapshot(self, repository: str, digest: str, *, if_tags_are: Sequence[str] | None = None) -> None:
        """Deletes a snapshot and its tags; with `if_tags_are` only if exactly these tags point at
        it, else `tag_moved`. By digest only: a tag may move between looking and deleting.
        `if_tags_are` needs the complete digest, which is compared with them."""
        headers = None
        if if_tags_are is not None:
            if not _DIGEST.fullmatch(digest):
                raise Error("invalid_request", f"if_tags_are needs the complete digest (sha256: and 64 digits), not {digest!r}")
            lines = "".join(f"{line}\n" for line in [digest, *sorted(if_tags_are)])
            # A name that is not UTF-8 is no tag: the registry answers `tag_moved`.
            seen = hashlib.sha256(lines.encode(errors="replace")).hexdigest()
            headers = {"if-match": f'"sha256:{seen}"'}
        self._of(repository, "DELETE", "snapshots", digest, headers=headers, once=True)

    # ---- pages, by `pf`

    def push(
        self,
        directory: str | os.PathLike[str],
        repository: str,
        tag: str = "latest",
        *,
        parents: Sequence[str] = (),
        if_tag_is: str | None = None,
    ) -> Pushed:
        """Stores a snapshot directory under a tag; only what the registry lacks is sent. `parents`
        are refs of the same repository, at most two."""
        arguments = ["push", os.path.abspath(directory), self._reference(repository, tag)]
        for parent in parents:
            arguments += ["--parent", _suffix(parent)]
        if if_tag_is is not None:
            arguments += ["--if-tag-is", if_tag_is]
        return parse(Pushed, self._run(arguments))

    def pull(self, repository: str, ref: str, directory: str | os.PathLike[str]) -> Pulled:
        """Fetches a snapshot into a directory; only what is missing there is sent. Every byte is
        checked before it is visible."""
        return parse(Pulled, self._run(["pull", self._reference(repository, ref), os.path.abspath(directory)]))

    def verify(self, repository: str, ref: str) -> Verified:
        """Has the registry read and hash everything that a snapshot lists. This may take
        minutes."""
        return parse(Verified, self._run(["verify", self._reference(repository, ref)]))

    def sign(self, repository: str, ref: str, key: str | os.PathLike[str]) -> Signed:
        """Signs a snapshot with a private key, the file of which `pf keygen` made."""
        return parse(Signed, self._run(["sign", self._reference(repository, ref), "--key", os.path.abspath(key)]))

    def verify_signature(self, repository: str, ref: str, key: str | os.PathLike[str]) -> Signed:
        """The signature of a snapshot by one of the public keys in a file. Without one it raises
        `Error` (`signature_required`)."""
        return parse(Signed, self._run(["verify", self._reference(repository, ref), "--key", os.path.abspath(key)]))

    def export(self, repository: str, refs: Sequence[str], destination: str) -> list[Exported]:
        """Exports snapshots into a directory, a file that ends in .tar, another registry
        (`oci://…`) or a bucket (`s3://…`, `gs://…`, `az://…`)."""
        found = self._run(["export", *(self._reference(repository, ref) for ref in refs), destination])
        return [parse(Exported, one) for one in program.entries(found, "exports")]

    # ---- the agent of this host, by `pf`

    def warm(
        self,
        *references: str,
        newest: int | None = None,
        keep_seconds: int | None = None,
        max_bytes: int | None = None,
        engine: str | None = None,
        prefill_tokens_per_second: float | None = None,
        plan: bool = False,
        wait: bool = True,
        agent: str | os.PathLike[str] | None = None,
    ) -> Job:
        """Has the agent of this host pull snapshots of this registry ahead of the restores that
        need them. A reference is `REPOSITORY[:TAG]`, in which `*` stands for any characters, or
        `REPOSITORY@DIGEST`. `newest`: so many snapshots of each repository instead of a tag.
        `plan`: only say what would be fetched, and, with `prefill_tokens_per_second`, in how many
        seconds an engine would compute it instead. Without `wait` the job goes on by itself, and
        `jobs` lists it. `agent` is its socket, if it is not the usual one."""
        arguments = ["warm", *(f"{self.url}/{reference}" for reference in references)]
        arguments += _options(
            {
                "newest": newest,
                "keep": None if keep_seconds is None else f"{keep_seconds}s",
                "max-size": max_bytes,
                "for": engine,
                "prefill-tokens-per-second": prefill_tokens_per_second,
            }
        )
        arguments += ["--plan"] if plan else [] if wait else ["--detach"]
        return parse(Job, self._ask_agent(arguments, agent))

    def drain(
        self,
        repository: str,
        *,
        plan: bool = False,
        prefill_tokens_per_second: float | None = None,
        wait_seconds: int | None = None,
        agent: str | os.PathLike[str] | None = None,
    ) -> Drain:
        """Has the agent of this host capture every sequence and push it to its own registry, below
        `repository`. `plan`: only say what there is to do, and, with `prefill_tokens_per_second`,
        in how many seconds an engine would compute it again. Raises `Error` if not everything was
        pushed; the same call again sends what is missing."""
        arguments = ["drain", repository, *(["--plan"] if plan else [])]
        arguments += _options({"prefill-tokens-per-second": prefill_tokens_per_second, "wait": wait_seconds})
        return parse(Drain, self._ask_agent(arguments, agent))

    def jobs(self, *, agent: str | os.PathLike[str] | None = None) -> list[Job]:
        """The jobs of the agent of this host, oldest first."""
        return [parse(Job, one) for one in program.entries(self._ask_agent(["jobs"], agent), "jobs")]

    def cancel_job(self, job: str, *, agent: str | os.PathLike[str] | None = None) -> Job:
        """Ends a job; what it has done stays."""
        return parse(Job, self._ask_agent(["jobs", "cancel", job], agent))

    def _ask_agent(self, arguments: list[str], agent: str | os.PathLike[str] | None) -> dict[str, Any]:
        socket = [] if agent is None else ["--agent", os.path.abspath(agent)]
        return program.run(program.find(self._program), [*arguments, *socket], {})

    def _run(self, arguments: list[str]) -> dict[str, Any]:
        options = ["--registry", self.url, "--retries", str(self._retries)]
        environment = {
            "PF_TOKEN": self._token,
            "PF_TLS_CA": self._ca,
            "PF_TOKEN_OVER_HTTP": "1" if self._token_over_http else None,
        }
        return program.run(program.find(self._program), [*arguments, *options], environment)

    def _reference(self, repository: str, ref: str) -> str:
        return f"{self.url}/{repository}{_suffix(ref)}"

    def _of(
        self,
        repository: str,
        method: str,
        *path: str,
        query: Mapping[str, str | int | None] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        once: bool = False,
    ) -> Any:
        whole = ["repositories", repository, *path]
        return self._transport.request(method, whole, query=query, body=body, headers=headers, once=once)

    def _pages(self, entries: str, *above: str) -> Iterator[dict[str, Any]]:
        after: str | None = None
        while True:
            found = self._transport.request("GET", [*above, entries], query={"limit": _PAGE, "after": after})
            if not isinstance(found, dict) or not isinstance(found.get(entries), list):
                raise Error("unavailable", f"the answer is not that of a registry: it has no {entries}")
            yield from found[entries]
            after = found.get("next")
            if after is None:
                return


def _options(options: Mapping[str, str | float | None]) -> list[str]:
    """The options of `pf` that have a value."""
    return [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]


def _suffix(ref: str) -> str:
    """What names a snapshot behind its repository."""
    if ref.startswith("@"):
        return ref
    return f"@{ref}" if ":" in ref else f":{ref}"
