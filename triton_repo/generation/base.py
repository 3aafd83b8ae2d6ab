"""What a generator gets and what it answers, whichever way a request came."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from plugins.support.errors import UsageError
from triton_repo.frontend.chat import MODALITIES, check_tools
from triton_repo.frontend.options import RequestOptions
from triton_repo.frontend.output import TextOptions
from triton_repo.frontend.pipeline import MediaSpan, Prepared
from triton_repo.frontend.problems import problem
from triton_repo.frontend.reasoning import Reasoning
from triton_repo.frontend.sampling import Sampling
from triton_repo.generation.feed import AudioFeed, Features

ErrorKind = Literal["invalid", "unavailable", "unsupported", "internal"]


@dataclass(frozen=True)
class GenerationCall:
    """One sequence to generate.

    Attributes:
        prompt_ids: the prompt without padding.
        max_tokens: most tokens of the answer; 0 for an embedding.
        sampling: as the request gave it.
        end_ids: ids that end the answer.
        stop_ids, bad_ids: id sequences that end the answer, and that must not appear in it.
        text: stop strings and what belongs into the text.
        cache_salt_id: 64-bit salt of cache keys; None for none.
        task: "generate", "transcribe" or "embed".
        window: tokens of the chunks in which a longer prompt is embedded; None: it is one.
        media: placeholder spans with their content keys.
        features: spectrograms that belong to the prompt, float32 [chunks, mels, frames], or
            [1, mels, frames] of a whole stream; None without audio.
        feed: brings the frames of a stream while the call runs; None for all others.
        echo: what an echo answers with; empty for an engine.
    """

    prompt_ids: list[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    end_ids: tuple[int, ...] = ()
    stop_ids: list[list[int]] = field(default_factory=list)
    bad_ids: list[list[int]] = field(default_factory=list)
    text: TextOptions = field(default_factory=TextOptions)
    cache_salt_id: int | None = None
    task: str = "generate"
    window: int | None = None
    media: list[MediaSpan] = field(default_factory=list)
    echo: dict[str, Any] = field(default_factory=dict)
    features: Features | None = field(default=None, compare=False)
    feed: AudioFeed | None = field(default=None, compare=False)

    @property
    def has_text(self) -> bool:
        """Whether an answer may begin with the prompt: that of a transcription is no text, and an
        embedding is no continuation of it.
        """
        return self.task == "generate"

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` turns back into an equal call, without its audio."""
        value = asdict(replace(self, features=None, feed=None))
        del value["features"], value["feed"]
        return value

    @staticmethod
    def from_json(value: dict[str, Any]) -> GenerationCall:
        """The call that `to_json` wrote."""
        fields = value | {
            "sampling": Sampling(**value["sampling"]),
            "end_ids": tuple(value["end_ids"]),
            "text": TextOptions.from_json(value["text"]),
            "media": [MediaSpan(**span) for span in value["media"]],
        }
        return GenerationCall(**fields)

    def sequences(self) -> list[GenerationCall]:
        """One call per returned sequence; given seeds differ by the sequence's number."""
        count = self.sampling.num_return_sequences
        seed = self.sampling.seed
        return [
            replace(
                self,
                sampling=replace(
                    self.sampling, seed=None if seed is None else (seed + i) % (1 << 64)
                ),
            )
            for i in range(count)
        ]


@dataclass(frozen=True)
class GenerationEvent:
    """One step of an answer.

    Attributes:
        token_ids, log_probs: new tokens; equal lengths.
        finish_reason: "stop", "length" or "cancelled" in the last event.
        error: kind and message of a failure; always the last event.
        extra: further output values by tensor name, e.g. what an echo received.
    """

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: tuple[str, str] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None or self.error is not None


Deliver = Callable[[GenerationEvent], None]


class Generator(Protocol):
    """Turns calls into events; `deliver` may be called from any thread, in order per call."""

    def submit(self, call: GenerationCall, deliver: Deliver) -> Callable[[], None]:
        """Start one sequence; returns what cancels it. Raises ToolchainError for a bad call."""

    def gauges(self) -> dict[str, float]:
        """Values for the metrics page: requests with and without a slot."""

    def close(self) -> None:
        """End everything; each running call gets a last event."""


class TextState(BaseModel):
    """`TextOptions` without end ids, as part of a request state."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stop_words: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    tools: str = ""
    reasoning: Reasoning = ""

    @field_validator("tools")
    @classmethod
    def _tools(cls, value: str) -> str:
        try:
            if value:
                check_tools(json.loads(value))
        except (ValueError, RecursionError, UsageError):
            raise ValueError("must be functions with a name and a schema each") from None
        return value


_USUAL = TextState()


class SpanState(BaseModel):
    """A `MediaSpan`, as part of a request state."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    modality: str
    offset: int
    length: int
    key: int = Field(ge=0, lt=1 << 64)


class RequestState(BaseModel):
    """What `preprocessing` tells `tensorrt_llm` beyond the classic tensors, as JSON text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: Literal["generate", "transcribe", "embed"] = "generate"
    window: int | None = Field(default=None, ge=1)
    features_shape: tuple[int, int, int] | None = None
    end_ids: tuple[int, ...] | None = None
    text: TextState = TextState()
    mm_views: dict[str, Any] = Field(
        default_factory=lambda: {modality: {} for modality in MODALITIES}
    )
    media: tuple[SpanState, ...] = ()

    @staticmethod
    def is_needed(options: RequestOptions) -> bool:
        """Whether the classic tensors do not say everything about options."""
        return len(options.end_ids) > 1 or len(RequestState.of_options(options)) > 1

    @staticmethod
    def of_options(options: RequestOptions) -> dict[str, Any]:
        """What a state holds of the options, as a JSON object; what is as usual is left out."""
        state: dict[str, Any] = {"end_ids": options.end_ids}
        if options.task != "generate":
            state["task"] = options.task
        values = {name: getattr(options.text, name) for name in TextState.model_fields}
        text = {name: v for name, v in values.items() if v != getattr(_USUAL, name)}
        if text:
            state["text"] = text
        if any(options.mm_views.values()):
            state["mm_views"] = options.mm_views
        return state

    @staticmethod
    def of_prompt(prepared: Prepared) -> dict[str, Any]:
        """What a state holds besides, of one prompt; empty when the classic tensors say all."""
        state: dict[str, Any] = {}
        if prepared.window is not None:
            state["window"] = prepared.window
        if prepared.features is not None:
            # Rows of a batch are filled to one shape.
            state["features_shape"] = prepared.features.shape
        if prepared.media:
            state["media"] = [asdict(span) for span in prepared.media]
        return state

    @staticmethod
    def parse(text: str | None) -> RequestState:
        """A state from its JSON text. Raises UsageError for any other text."""
        if text is None:
            return RequestState()
        try:
            return RequestState.model_validate_json(text)
        except ValidationError as error:
            raise _invalid("request_state", error) from None


class AnswerTextState(TextState):
    """`TextOptions`, as part of a stream state."""

    end_ids: tuple[int, ...] = ()

    def options(self) -> TextOptions:
        """The options that this is the state of."""
        return TextOptions(**self.model_dump())


class StreamState(BaseModel):
    """What `tensorrt_llm` tells `postprocessing` about the ids of one row, as JSON text.

    Attributes:
        answer, key: names of the answer and, in a stream, of the sequence.
        number: responses of the sequence before this one.
        context: ids before the generated ones, with the first response.
        text: what text the client wants, with the first response.
        prompt_length: how many of the ids are the prompt's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    answer: str = ""
    key: str = ""
    number: int = Field(default=0, ge=0)
    context: tuple[Annotated[int, Field(ge=0)], ...] = ()
    text: AnswerTextState = AnswerTextState()
    prompt_length: int = Field(default=0, ge=0)

    @staticmethod
    def parse(text: bytes) -> StreamState:
        """A state from its JSON text. Raises UsageError for any other text."""
        try:
            return StreamState.model_validate_json(text)
        except ValidationError as error:
            raise _invalid("STREAM_STATE", error) from None


def _invalid(name: str, error: ValidationError) -> UsageError:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return problem(name, f"is not valid: {where} {first['msg']}")


def call_from_prepared(prepared: Prepared, echo: dict[str, Any] | None) -> GenerationCall:
    """The call for one prepared prompt; `echo` holds the echo fields of the request, or None."""
    options = prepared.options
    return GenerationCall(
        prompt_ids=prepared.real_ids,
        max_tokens=prepared.max_tokens,
        sampling=options.sampling,
        end_ids=options.end_ids,
        stop_ids=options.stop_ids or [],
        bad_ids=options.bad_ids or [],
        text=options.text,
        cache_salt_id=options.cache_salt_id,
        task=options.task,
        window=prepared.window,
        media=prepared.media,
        features=prepared.features,
        echo={} if echo is None else echo | received(prepared),
    )


def received(prepared: Prepared) -> dict[str, Any]:
    """What an echo tells about the engine input."""
    offsets = prepared.prompt.arrays.get("offsets")
    return {
        "input_ids": list(prepared.prompt.ids),
        "attention_mask": prepared.prompt.attention_mask,
        "offsets": offsets,
        "mm_views": prepared.options.mm_views,
        "pad_id": prepared.options.pad_id,
    }
