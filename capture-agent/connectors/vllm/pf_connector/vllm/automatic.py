"""Automatic mode: every turn that has ended is saved, and every new request is looked for, without
a wish of the request.

It is off unless the setting `auto` is there. The budget of bytes is the agent's to keep, since only
the agent knows which bytes are new.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_FIELD = re.compile(r"\{(\w*)\}")
_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*\Z")
_REPOSITORY = 255
"""Bytes of a repository's name."""
FIELDS = ("user", "model", "engine")
"""What a template may name."""


@dataclass(frozen=True)
class Auto:
    """The setting `auto`."""

    repository: str
    """The template of a repository's name, such as `agents/{user}`."""
    save: bool = True
    match: bool = True
    push: str = "background"
    saves_per_minute: float = 60.0
    """Saves of the engine, on average; as many may come at once."""
    bytes_per_second: float | None = None
    """New bytes in the agent's store, on average over ten seconds; none for no limit."""
    open_saves: int = 8
    """Saves at a time whose blocks are held. A turn that ends meanwhile is not saved."""
    match_limit: float = 2.0
    """Seconds that a request waits for state. Then it is computed."""
    least: int = 256
    """Tokens of a turn that is saved, and tokens that a state must save a request."""

    @classmethod
    def of(cls, given: Any) -> Auto | None:
        """Of the setting; none if it is off. Raises `ValueError`."""
        if given is None or given is False:
            return None
        if not isinstance(given, Mapping):
            raise ValueError(f"auto is an object with a repository, not {given!r}")
        known = [field.name for field in fields(cls)]
        if unknown := sorted(given.keys() - set(known)):
            raise ValueError(f"auto has no setting {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
        if not isinstance(given.get("repository"), str):
            raise ValueError("auto.repository is the template of a repository's name, such as agents/{user}")
        for name in ("save", "match"):
            if not isinstance(given.get(name, True), bool):
                raise ValueError(f"auto.{name} is true or false")
        if given.get("push", "background") not in ("background", "never"):
            raise ValueError("auto.push is background or never")
        for name in ("saves_per_minute", "bytes_per_second", "open_saves", "match_limit", "least"):
            value = given.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise ValueError(f"auto.{name} is a number above 0, not {value!r}")
        found = cls(**{name: value for name, value in given.items() if value is not None})
        Names(found.repository, "", "").of("user")
        return found


OBJECTS = {"auto": Auto.of}
"""Settings of this connector alone, each with what checks its value."""


class Names:
    """Names of repositories, by a template."""

    def __init__(self, template: str, model: str, engine: str) -> None:
        self._template = template
        self._fixed = {"model": component(model), "engine": component(engine)}

    def of(self, user: str | None) -> str:
        """The repository of a user's requests. Raises `ValueError`.

        The user is never rewritten: two users must not get one repository.
        """

        def value(found: re.Match[str]) -> str:
            name = found[1]
            if name not in FIELDS:
                raise ValueError(f"auto.repository has no field {{{name}}}; there are {', '.join(FIELDS)}")
            if name != "user":
                return self._fixed[name]
            if user is None:
                raise ValueError("the request names no user")
            if not _COMPONENT.match(user):
                raise ValueError(
                    f"user {user!r:.60} cannot be a part of a repository's name: lower-case letters and digits, single . _ - between"
                )
            return user

        name = _FIELD.sub(value, self._template)
        if len(name) > _REPOSITORY or not all(_COMPONENT.match(part) for part in name.split("/")):
            raise ValueError(f"{name!r:.300} is no repository's name: words of lower-case letters and digits, parted by single . _ - or /")
        return name


def component(text: str) -> str:
    """A part of a repository's name, for a name that is the same in the whole engine."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


class Rate:
    """So many events a minute, and as many at once."""

    def __init__(self, per_minute: float) -> None:
        self._rate = per_minute / 60
        self._most = max(1.0, per_minute)
        self._left = self._most
        self._at: float | None = None

    def take(self, now: float) -> bool:
        """Whether one more may happen now."""
        if self._at is not None:
            self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
