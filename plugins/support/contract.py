"""What an object must have to be used somewhere, as one list that its user and its maker check.

A `typing.Protocol` says it to the type checker. `Contract.of` reads the same class at run time, so
that an object made by hand or by a library is refused where it is handed over, with everything that
it lacks, and not by an attribute error in the middle of the work. `isinstance` with a runtime
protocol would not do: it looks at the existence of names only.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from plugins.support.errors import CapabilityError

T = TypeVar("T")
_Kind = inspect.Parameter


@dataclass(frozen=True)
class Member:
    """One name that is looked up.

    Attributes:
        name: of the attribute or method.
        parameters: of a method: name -> whether every call gives it; None for an attribute.
        values: of a flag: what it may be.
    """

    name: str
    parameters: Mapping[str, bool] | None = None
    values: tuple[Any, ...] | None = None

    def violations(self, candidate: object) -> list[str]:
        """What is wrong with this member of `candidate`."""
        value = getattr(candidate, self.name, None)
        if value is None:
            return [f"no {self.name}"]
        if self.values is not None and value not in self.values:
            return [f"{self.name} is {value!r}"]
        if self.parameters is None:
            return []
        if not callable(value):
            return [f"{self.name} is no method"]
        return [f"{self.name} {what}" for what in _misfits(value, self.parameters)]


def _misfits(function: Any, given: Mapping[str, bool]) -> list[str]:
    takes = inspect.signature(function).parameters.values()
    named = {p.name: p for p in takes if p.kind not in (_Kind.VAR_POSITIONAL, _Kind.VAR_KEYWORD)}
    # What `**kwargs` swallows is not taken, except by a function that names nothing at all.
    wanting = [name for name in given if name not in named] if named else []
    unknown = [
        p.name for p in named.values() if p.default is _Kind.empty and not given.get(p.name, False)
    ]
    return [f"takes no {name}" for name in wanting] + [
        f"needs {name}, which not every call gives" for name in unknown
    ]


@dataclass(frozen=True)
class Contract(Generic[T]):
    """What the users of an object rely on.

    Attributes:
        name: of the role, for messages.
        members: in the order of the protocol.
    """

    name: str
    members: tuple[Member, ...]

    @classmethod
    def of(cls, protocol: Any) -> Contract[Any]:
        """The contract of a `typing.Protocol`, with those it extends.

        Methods are callable with the protocol's parameters, by name; an attribute exists and is not
        None; one that is annotated as a Literal has one of its values.
        """
        members: dict[str, Member] = {}
        for base in reversed(protocol.__mro__):
            if not getattr(base, "_is_protocol", False) or base.__module__ == "typing":
                continue
            for name, hint in get_type_hints(base).items():
                values = get_args(hint) if get_origin(hint) is Literal else None
                members[name] = Member(name, values=values)
            for name, value in vars(base).items():
                if inspect.isfunction(value) and not name.startswith("_"):
                    _, *takes = inspect.signature(value).parameters.values()
                    given = {p.name: p.default is _Kind.empty for p in takes}
                    members[name] = Member(name, given)
                elif isinstance(value, property):
                    members[name] = Member(name)
        return cls(protocol.__name__, tuple(members.values()))

    def violations(self, candidate: object) -> list[str]:
        """Everything that `candidate` lacks."""
        if inspect.isclass(candidate):
            return [f"the class {candidate.__name__} itself, not an object of it"]
        return [what for member in self.members for what in member.violations(candidate)]

    def require(self, candidate: object, where: str | None = None) -> T:
        """`candidate` itself. Raises CapabilityError naming all that it lacks."""
        found = self.violations(candidate)
        if found:
            kind = type(candidate)
            raise CapabilityError(
                f"not a usable {self.name}",
                where=where or f"{kind.__module__}.{kind.__qualname__}",
                expected=", ".join(member.name for member in self.members),
                found="; ".join(found),
            )
        return candidate  # type: ignore[return-value]
