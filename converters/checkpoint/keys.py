"""Reads a model configuration key by key, so that nothing in it is passed over.

Every key is required, checked against what the network relies on, or ignored for a stated reason.
`finish` reports all problems at once and refuses keys that nobody asked for, with the nearest known
key as a suggestion: a misspelt key changes the mathematics as silently as a missing one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from plugins.support.errors import InputError

_MISSING = object()


class KeyReader:
    """One level of a configuration.

    Getters return a harmless placeholder where there is a problem; nothing may be derived from the
    values before `finish` has been called.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where = values, where
        self._known: set[str] = set()
        self._problems: list[str] = []
        self._children: dict[str, KeyReader] = {}

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self._values.get(key) is not None

    def integer(self, key: str, *, minimum: int = 1) -> int:
        """A required integer, at least `minimum`."""
        value = self._get(key)
        if type(value) is not int or value < minimum:
            self._wrong(key, f"an integer of at least {minimum}", value)
            return minimum
        return value

    def optional_integer(self, key: str, *, minimum: int = 0) -> int | None:
        """An integer, or None when the key is absent or null."""
        if not self.has(key):
            self._known.add(key)
            return None
        return self.integer(key, minimum=minimum)

    def positive_number(self, key: str) -> float:
        """A required number above zero."""
        value = self._get(key)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self._wrong(key, "a positive number", value)
            return 1.0
        return float(value)

    def boolean(self, key: str) -> bool:
        """A required true or false."""
        value = self._get(key)
        if type(value) is not bool:
            self._wrong(key, "true or false", value)
            return False
        return value

    def choice(self, key: str, allowed: Iterable[str]) -> str:
        """A required string out of `allowed`."""
        names = list(allowed)
        value = self._get(key)
        if value not in names:
            self._wrong(key, " or ".join(names), value)
            return names[0]
        return str(value)

    def integers(self, key: str) -> list[int]:
        """A required list of integers of at least zero."""
        value = self._get(key)
        if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
            self._wrong(key, "a list of integers", value)
            return []
        return list(value)

    def strings(self, key: str) -> list[str]:
        """A required list of strings."""
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._wrong(key, "a list of strings", value)
            return []
        return list(value)

    def table(self, key: str) -> KeyReader:
        """A required object, read by a reader of its own whose problems this one reports."""
        value = self._get(key)
        if not isinstance(value, Mapping):
            self._wrong(key, "an object", value)
            return KeyReader({}, self._where)
        return self._children.setdefault(key, KeyReader(value, self._where))

    def token_ids(self, key: str) -> list[int]:
        """A required token id or list of them, always as a list."""
        value = self._get(key)
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(type(item) is int and item >= 0 for item in ids):
            self._wrong(key, "a token id or a list of them", value)
            return [0]
        return list(ids)

    def rely_on(self, key: str, expected: Any, why: str) -> None:
        """Demand that a key has the one value that the network is written for."""
        value = self._get(key)
        if value is not _MISSING and (type(value) is not type(expected) or value != expected):
            self._problems.append(f"{key}: expected {expected!r} ({why}), found {value!r}")

    def rely_on_if_present(self, key: str, expected: Any, why: str) -> None:
        """As `rely_on`, for a key that may be absent with the same meaning."""
        if key in self._values:
            self.rely_on(key, expected, why)
        else:
            self._known.add(key)

    def ignore(self, *keys: str) -> None:
        """Keys that do not change what the network computes."""
        self._known.update(keys)

    def ignore_rest(self) -> None:
        """As `ignore`, for all keys of a part that no network is made of."""
        self._known.update(self._values)

    def require(self, holds: bool, key: str, sentence: str) -> None:
        """Record a broken relation between keys."""
        if not holds:
            self._problems.append(f"{key}: {sentence}")

    def finish(self) -> None:
        """Raise InputError when anything was wrong or any key is unknown."""
        problems = self._all_problems()
        if problems:
            raise InputError(
                "the model configuration is not one this family is written for",
                where=self._where,
                found="; ".join(problems),
                fix="correct the configuration, or report it if the model really is like that",
            )

    def _all_problems(self) -> list[str]:
        problems = list(self._problems)
        for key in sorted(set(self._values) - self._known):
            near = difflib.get_close_matches(key, sorted(self._known), n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            problems.append(f"{key}: unknown key{hint}")
        for name, child in self._children.items():
            problems += [f"{name}.{problem}" for problem in child._all_problems()]
        return problems

    def _get(self, key: str) -> Any:
        self._known.add(key)
        value = self._values.get(key, _MISSING)
        if value is _MISSING:
            self._problems.append(f"{key}: missing, and no default is safe")
        return value

    def _wrong(self, key: str, expected: str, value: Any) -> None:
        if value is not _MISSING:
            self._problems.append(f"{key}: expected {expected}, found {value!r}")
