"""`build-engine doctor`: what this machine has, what each verb needs, what works here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from build_scripts import options, output
from plugins.support.errors import EXIT_MISSING_CAPABILITY, EXIT_OK

if TYPE_CHECKING:
    from build_scripts.machine import Survey


def command(json: options.Json = False) -> int:
    """Show each dependency, its version and the verbs that need it, and what works here.

    Ends with exit code 4 when a dependency that every verb needs is missing or broken.

    [bold]Examples[/bold]

      build-engine doctor
      build-engine doctor --json
    """
    from build_scripts import machine

    with output.reserved_stdout(json):
        found = machine.survey()
    if json:
        output.emit_json(found.as_dict())
    else:
        _print(found)
    return EXIT_OK if found.complete else EXIT_MISSING_CAPABILITY


def _print(found: Survey) -> None:
    rows = [(d.name, d.version or "-", d.state, d.needed_by, d.install) for d in found.dependencies]
    output.table("Dependencies", ("package", "version", "state", "needed by", "install"), rows)
    output.table("Machine", ("fact", "value"), list(found.facts.items()))
    output.table("What works here", ("verb", "how"), list(found.verbs.items()))
