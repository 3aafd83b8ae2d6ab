"""Errors that a user reads. Each says what is wrong, where, what was expected, what was found and
what to do; each maps to one documented exit code of the `build-engine` command.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_BAD_INPUT = 3
EXIT_MISSING_CAPABILITY = 4
EXIT_VERIFICATION_FAILED = 5


class ToolchainError(Exception):
    """Base of every error that is the fault of an input, an option or the machine.

    Args:
        what: one sentence, no full stop needed.
        where: file, tensor or key the sentence is about.
        expected: what would have been right.
        found: what is there instead.
        fix: what the user can do, preferably a command.

    Instances survive pickling, so they cross worker processes unchanged.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.fix = fix

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _rebuild, (type(self), self.what, self.where, self.expected, self.found, self.fix)

    def __str__(self) -> str:
        lines = [self.what]
        for label, value in self.details().items():
            lines.append(f"  {label + ':':<10}{value}")
        return "\n".join(lines)

    def one_line(self) -> str:
        """The sentence, with where, expected and found in brackets, for lists of errors."""
        found = [f"{label} {value}" for label, value in self.details().items() if label != "fix"]
        brackets = "; ".join(found).removeprefix("where ")
        return f"{self.what} ({brackets})" if found else self.what

    def details(self) -> dict[str, str]:
        """The fields that are set, in reading order."""
        fields = {
            "where": self.where,
            "expected": self.expected,
            "found": self.found,
            "fix": self.fix,
        }
        return {label: value for label, value in fields.items() if value is not None}


def _rebuild(
    cls: type[ToolchainError],
    what: str,
    where: str | None,
    expected: str | None,
    found: str | None,
    fix: str | None,
) -> ToolchainError:
    return cls(what, where=where, expected=expected, found=found, fix=fix)


class UsageError(ToolchainError):
    """The command line or a request asks for something that cannot be asked."""

    exit_code = EXIT_USAGE


class InputError(ToolchainError):
    """A checkpoint, engine directory, repository or request body is not as it must be."""

    exit_code = EXIT_BAD_INPUT


class BuildError(InputError):
    """TensorRT refused a layer, a profile or the whole network, or did so silently."""


class CapabilityError(ToolchainError):
    """The machine lacks a library, a device or a feature that the request needs."""

    exit_code = EXIT_MISSING_CAPABILITY


class VerificationError(ToolchainError):
    """A comparison with the reference is outside its bounds."""

    exit_code = EXIT_VERIFICATION_FAILED
