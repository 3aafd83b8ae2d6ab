"""The `build-engine` command: one sub-command per verb, one exit code per kind of failure.

This module knows no model and no engine. It gives the verbs a name, and turns whatever they
raise into one message and a documented exit code. A verb's module imports the heavy libraries
inside its function, so that `--help` and usage errors answer at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import typer

from build_scripts import all as all_verb
from build_scripts import (
    build,
    convert,
    doctor,
    export_hf,
    inspect,
    output,
    repo,
    run,
    serve,
    verify,
)
from build_scripts.packages import package_of
from plugins.support.errors import (
    EXIT_OK,
    EXIT_USAGE,
    CapabilityError,
    InputError,
    ToolchainError,
    UsageError,
)

# An error nobody foresaw, and Ctrl-C; the foreseen ones are in plugins.support.errors.
EXIT_UNEXPECTED = 1
EXIT_INTERRUPTED = 130
# As a shell says of a program that SIGPIPE ended.
EXIT_NO_READER = 141

TRACEBACK_VARIABLE = "BUILD_ENGINE_TRACEBACK"

HELP = """Build TensorRT engines from Hugging Face checkpoints and serve them on Triton.

[bold]The chain, verb by verb[/bold]

  build-engine convert HF_DIR checkpoint
  build-engine build checkpoint engine --max-batch-size 8 --max-seq-len 4096
  build-engine verify engine --against HF_DIR
  build-engine run engine --prompt "Once upon a time" --max-new-tokens 32
  build-engine repo engine model_repository
  build-engine serve model_repository

[bold]The chain in one go[/bold]

  build-engine all HF_DIR OUT_DIR

[bold]Exit codes[/bold]

  0 done · 1 unexpected error · 2 usage · 3 bad input or checkpoint ·
  4 missing hardware or library · 5 verification failed · 130 interrupted ·
  141 nobody reads the output

Every verb takes --json: one JSON object on standard output, progress on standard error.
"""

VERBS = (convert, build, verify, inspect, run, repo, serve, all_verb, export_hf, doctor)

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
NAMES = tuple(module.__name__.rpartition(".")[2].replace("_", "-") for module in VERBS)
for name, module in zip(NAMES, VERBS, strict=True):
    app.command(name=name, no_args_is_help=module is not doctor)(module.command)


class UnexpectedError(ToolchainError):
    """A fault of this tool, not of its input."""

    exit_code = EXIT_UNEXPECTED


def execute(arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code.

    Errors are printed: text on standard error, or with `--json` an object with the one key
    `error` on standard output. Never raises for what a user can cause.
    """
    as_json = "--json" in arguments
    try:
        result = app(args=list(arguments), prog_name="build-engine", standalone_mode=False)
    except typer.TyperException as error:
        verb = " ".join(name for name in arguments[:1] if name in NAMES)
        fix = " ".join(["see build-engine", verb, "--help"]).replace("  ", " ")
        usage = UsageError(error.format_message(), fix=fix)
        return output.report_error(usage, as_json) if error.format_message() else EXIT_USAGE
    except ToolchainError as error:
        _trace()
        return output.report_error(error, as_json)
    except (KeyboardInterrupt, typer.Abort):
        result = EXIT_INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # typer and rich make an exit with 1 of it.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        # The reader went away (`| head`): nobody is left to tell.
        output.discard_stdout()
        return EXIT_NO_READER
    except ModuleNotFoundError as error:
        package = package_of(error.name or "")
        if package is None:
            return _unexpected(error, as_json)
        _trace()
        missing = CapabilityError(
            f"a package is not installed: {package.name}",
            where=f"needed by {package.needed_by}",
            fix=package.install,
        )
        return output.report_error(missing, as_json)
    except (OSError, MemoryError) as error:
        _trace()
        problem = InputError(
            "the system refused: " + (getattr(error, "strerror", None) or "out of memory"),
            where=getattr(error, "filename", None),
            found=type(error).__name__,
        )
        return output.report_error(problem, as_json)
    except Exception as error:
        return _unexpected(error, as_json)
    if result == EXIT_INTERRUPTED:
        # typer makes a result of Ctrl-C.
        output.say("interrupted; no output directory is half written")
    return result if isinstance(result, int) else EXIT_OK


def _trace() -> None:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exc()


def _unexpected(error: Exception, as_json: bool) -> int:
    _trace()
    text = " ".join(str(error).split())
    problem = UnexpectedError(
        f"unexpected {type(error).__name__}: {text}",
        fix=f"set {TRACEBACK_VARIABLE}=1 and run again to see the trace; please report it",
    )
    return output.report_error(problem, as_json)


def main() -> None:
    """Entry point of the `build-engine` command."""
    sys.exit(execute(sys.argv[1:]))


if __name__ == "__main__":
    main()
