"""The work of `all`: convert, build, verify and repo, each into its own directory under one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from build_scripts import engines, output, verdict, verification
from converters.checkpoint.convert import ConversionReport, execute, plan_conversion
from plugins.support.atomic import refuse_existing
from triton_repo.frontend.tokenizer import load_tokenizer
from triton_repo.generate import MODELS, write_repository

CHECKPOINT, ENGINE, REPOSITORY = "checkpoint", "engine", "model_repository"


@dataclass(frozen=True)
class Conversion:
    """The options of the first step, as `converters.checkpoint.convert.convert` takes them."""

    dtype: str | None = None
    quantize: str | None = None
    only: str = "experts"
    kv_cache: str | None = None
    calibration: Path | None = None
    workers: int | None = None


@dataclass(frozen=True)
class Result:
    """What every step reported; `repository` is None when verification failed."""

    out_dir: Path
    conversion: ConversionReport
    build: engines.Result
    verification: verdict.Result
    repository: Path | None

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values, one key per step."""
        return {
            "out_dir": str(self.out_dir),
            "convert": self.conversion.as_dict(),
            "build": self.build.as_dict(),
            "verify": self.verification.as_dict(),
            "repo": str(self.repository) if self.repository else None,
        }

    def print(self) -> None:
        """For people, on standard output."""
        print("\n".join(self.conversion.outcome()))
        self.build.print()
        self.verification.print()
        if self.repository is not None:
            print(f"{self.repository}: {', '.join(MODELS)}")
            print(f"serve it: build-engine serve {self.repository}")


def run(
    hf_dir: Path,
    out_dir: Path,
    options: Conversion,
    request: engines.Request,
    tokenizer: Path | None,
) -> Result:
    """Run the chain. Raises what the steps raise; what earlier steps finished stays.

    Output directories, the tokenizer and the build are checked first: nothing of them may be found
    wanting after hours of work.
    """
    for name in (CHECKPOINT, ENGINE, REPOSITORY):
        refuse_existing(out_dir / name, f"{name} directory")
    load_tokenizer(tokenizer or hf_dir)
    output.say(f"1/4 convert {hf_dir} -> {out_dir / CHECKPOINT}")
    if options.kv_cache is None and not engines.takes_fp8_caches(request):
        options = replace(options, kv_cache="none")
    plan = plan_conversion(hf_dir, out_dir / CHECKPOINT, **asdict(options))
    for line in plan.lines():
        output.say(line)
    engines.check(plan.config, request)
    conversion = execute(plan, out_dir / CHECKPOINT)
    output.say(f"2/4 build -> {out_dir / ENGINE}")
    built = engines.build(out_dir / CHECKPOINT, out_dir / ENGINE, request)
    output.say(f"3/4 verify against {hf_dir}")
    verified = verification.verify(out_dir / ENGINE, hf_dir)
    repository = None
    if verified.passed:
        output.say(f"4/4 repo -> {out_dir / REPOSITORY}")
        repository = write_repository(out_dir / ENGINE, out_dir / REPOSITORY, tokenizer=tokenizer)
    return Result(out_dir, conversion, built, verified, repository)
