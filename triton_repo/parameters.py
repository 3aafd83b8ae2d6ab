"""Parameters of the generated models: typed, complete, and checked when a model starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Json, ValidationError
from pydantic_core import ErrorDetails

from plugins.support.errors import InputError
from triton_repo.frontend.chat import ChatTemplate
from triton_repo.frontend.fetch import FetchLimits
from triton_repo.frontend.media import MediaPolicy
from triton_repo.frontend.options import PROMPT_VALUES, FrontEnd
from triton_repo.frontend.tokenizer import BYTES, Tokenizer, load_tokenizer
from triton_repo.tensors import request_fields

# Raised whenever configs of an older generator cannot be served any more.
REPOSITORY_FORMAT = 3
# What a default of a request field may be, by its Triton type.
_VALUES: dict[str, tuple[type, ...]] = {
    "STRING": (str,), "BOOL": (bool,), "INT32": (int,), "UINT64": (int,), "FP32": (int, float),
}  # fmt: skip


def check_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Request fields that hold when a request leaves them out.

    Raises ValueError for a name that is no field, for a prompt, and for a value of another type.
    """
    fields = {f.name: f for f in request_fields(echo=False)}
    for name, value in defaults.items():
        field = fields.get(name)
        if field is None:
            raise ValueError(f"{name} is no field of a request")
        kinds = _VALUES.get(field.dtype)
        if name in PROMPT_VALUES or name == "stop" or kinds is None:
            raise ValueError(f"{name} cannot have a default")
        if not field.scalar and not isinstance(value, list):
            raise ValueError(f"{name} must be a list")
        for one in [value] if field.scalar else value:
            if not isinstance(one, kinds) or (isinstance(one, bool) and bool not in kinds):
                raise ValueError(f"{name} must be {field.dtype}, not {one!r}")
    return dict(defaults)


def reason(error: ErrorDetails) -> str:
    """What is wrong with one value, in the words of the check that refused it."""
    return error["msg"].removeprefix("Value error, ")


# As a parameter of a model, in JSON.
RequestDefaults = Annotated[Json[dict[str, Any]], AfterValidator(check_defaults)]


class CommonParameters(BaseModel):
    """Of every Python model.

    Attributes:
        repository_format: version stamp; must equal REPOSITORY_FORMAT.
        repository_id: the same in all models of one repository.
        tokenizer_dir: "bytes", or a directory relative to the model's own.
        threads: CPU threads of one instance.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    repository_format: int
    repository_id: str = Field(pattern=r"^[0-9a-f]{16}$")
    tokenizer_dir: str = Field(min_length=1)
    threads: int = Field(ge=1, le=1024)


class FrontEndParameters(CommonParameters):
    """Of preprocessing and BLS.

    Attributes:
        max_context: context length in tokens.
        max_prompt: longest prompt in tokens.
        vocab_size: ids below it are accepted.
        end_ids: JSON list of ids that end a sequence.
        exclude_input_in_output: whether answers leave the prompt out unless the request says.
        request_defaults: JSON object of request fields that hold when a request leaves them out.
        chat_template_kwargs, mm_processor_kwargs: JSON objects, below the request's own.
        placeholders: JSON object, per modality the placeholder token.
        trust_request_mm_kwargs: whether requests may set processor options.
        allow_private_media: whether media may come from loopback and private addresses.
        allowed_media_hosts: JSON list; if not empty, the only hosts media may come from.
        local_media_root: directory below which media may be local files; empty for none.
        max_media_bytes: size of one media item.
        audio: JSON object, see `triton_repo.frontend.audio.settings`.
    """

    max_context: int = Field(ge=1)
    max_prompt: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    end_ids: Json[list[int]]
    exclude_input_in_output: bool
    request_defaults: RequestDefaults
    chat_template_kwargs: Json[dict[str, Any]]
    mm_processor_kwargs: Json[dict[str, Any]]
    placeholders: Json[dict[str, str]]
    trust_request_mm_kwargs: bool
    allow_private_media: bool
    allowed_media_hosts: Json[list[str]]
    local_media_root: str
    max_media_bytes: int = Field(ge=1)
    audio: Json[dict[str, Any]]


class GenerationParameters(CommonParameters):
    """Of tensorrt_llm.

    Attributes:
        generation: "engine" or "echo".
        engine_dir: engine directory, absolute or relative to the model's; empty for an echo.
        executor, device: as `runtime.engine.Engine.load` takes them.
        max_queue: most sequences that wait for a slot.
        exclude_input_in_output: whether `output_ids` leave the prompt out.
        request_defaults: as of preprocessing; those that reach this model directly count here.
        vocab_size: ids below it are accepted.
    """

    generation: Literal["engine", "echo"]
    engine_dir: str
    executor: Literal["auto", "interpreter", "tensorrt"]
    device: str
    max_queue: int = Field(ge=1)
    exclude_input_in_output: bool
    request_defaults: RequestDefaults
    vocab_size: int = Field(ge=1)


P = TypeVar("P", bound=CommonParameters)


def parse_parameters(kind: type[P], model: str, values: Mapping[str, str]) -> P:
    """Check the parameters of one model.

    Raises InputError with one line per parameter: name, value, what was expected.
    """
    found = values.get("repository_format")
    if found is not None and found != str(REPOSITORY_FORMAT):
        raise InputError(
            "the model repository was written for another version",
            where=f"{model}/config.pbtxt",
            expected=f"repository_format {REPOSITORY_FORMAT}",
            found=found,
            fix="write it again with `build-engine repo`",
        )
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc']))}: {reason(e)}"
            + ("" if e["type"] == "missing" else f" (found {e['input']!r})")
            for e in error.errors()
        ]
        raise InputError(
            "the parameters are not valid: " + "; ".join(lines), where=f"{model}/config.pbtxt"
        ) from None


def model_parameters(kind: type[P], args: Mapping[str, str]) -> tuple[P, Path, dict[str, Any]]:
    """Parameters, model directory and configuration from the arguments of `initialize`."""
    config = json.loads(args["model_config"])
    values = {k: v["string_value"] for k, v in config.get("parameters", {}).items()}
    return parse_parameters(kind, config["name"], values), model_directory(args), config


def model_directory(args: Mapping[str, str]) -> Path:
    """The directory of this model version."""
    return Path(args["model_repository"]) / args["model_version"]


def open_tokenizer(parameters: CommonParameters, directory: Path) -> Tokenizer:
    """The tokenizer that the parameters name."""
    if parameters.tokenizer_dir == BYTES:
        return load_tokenizer(BYTES)
    return load_tokenizer((directory / parameters.tokenizer_dir).resolve())


def open_front_end(parameters: FrontEndParameters, directory: Path) -> FrontEnd:
    """Everything `prepare` needs, from the parameters."""
    tokenizer = open_tokenizer(parameters, directory)
    # What encoding needs is opened now, not by the first request.
    tokenizer.encode("", False, False)
    audio = None
    if parameters.audio:
        # Decoding needs libraries that servers of text do without.
        from triton_repo.frontend.audio.decode import AudioLimits
        from triton_repo.frontend.audio.frontend import AudioFrontEnd

        audio = AudioFrontEnd(
            parameters.audio,
            (directory / parameters.tokenizer_dir).resolve(),
            AudioLimits(max_bytes=parameters.max_media_bytes),
        )
    template = None
    if tokenizer.chat_template is not None:
        template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    return FrontEnd(
        tokenizer=tokenizer,
        context=parameters.max_context,
        max_prompt=parameters.max_prompt,
        vocab_size=parameters.vocab_size,
        end_ids=tuple(parameters.end_ids),
        defaults=parameters.request_defaults,
        chat_template=template,
        chat_template_kwargs=parameters.chat_template_kwargs,
        mm_processor_kwargs=parameters.mm_processor_kwargs,
        placeholders=parameters.placeholders,
        media=MediaPolicy(
            fetch=FetchLimits(
                max_bytes=parameters.max_media_bytes,
                allow_private=parameters.allow_private_media,
                allowed_hosts=frozenset(parameters.allowed_media_hosts),
                local_root=(
                    Path(parameters.local_media_root) if parameters.local_media_root else None
                ),
            ),
            trust_request_kwargs=parameters.trust_request_mm_kwargs,
        ),
        audio=audio,
    )
