"""The work of `run`: one prompt through an engine directory, without a server."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from build_scripts import output
from build_scripts.sounds import Sounds
from plugins.support.errors import InputError, UsageError
from runtime.engine import Engine
from runtime.requests import GenerationRequest
from runtime.sampling import SamplingParams
from runtime.session import Session, prompt_logits
from runtime.speculative import draft_logits
from triton_repo.frontend.detokenize import Detokenizer
from triton_repo.frontend.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Prompt:
    """The ways to give a prompt; exactly one is set, and audio may come with ids.

    A request file holds chat messages or a transcription task, with their audio.
    """

    text: str | None = None
    ids: str | None = None
    ids_file: Path | None = None
    sounds: Sounds = field(default_factory=Sounds)

    def __post_init__(self) -> None:
        ways = (self.text, self.ids, self.ids_file, self.sounds.request)
        given = [value for value in ways if value is not None]
        if len(given) != 1:
            raise UsageError(
                "give exactly one prompt",
                expected="one of --prompt TEXT, --ids 1,2,3, --ids-file FILE and --request FILE",
                found=f"{len(given)} of them",
            )
        if self.sounds.files and self.text is not None:
            raise UsageError(
                "a plain text has no place for audio",
                where="--audio",
                fix="give --ids or --ids-file with placeholders, or --request FILE",
            )

    def token_ids(self, tokenizer: Tokenizer | None) -> list[int]:
        """The prompt's ids. Raises InputError for a file or list that holds no ids."""
        if self.text is not None:
            if tokenizer is None:
                raise InputError(
                    "a text prompt needs a tokenizer and the engine directory has none",
                    fix="give --tokenizer DIR, or the prompt as --ids 1,2,3",
                )
            return list(tokenizer.encode(self.text, True, False).ids)
        if self.ids is not None:
            return _parse_ids(self.ids, "--ids")
        assert self.ids_file is not None
        return _parse_ids(self.ids_file.read_text(), str(self.ids_file))


def _parse_ids(text: str, where: str) -> list[int]:
    words = re.split(r"[\s,\[\]]+", text.strip())
    try:
        return [int(word) for word in words if word]
    except ValueError as error:
        raise InputError(
            "not a list of token ids",
            where=where,
            expected="whole numbers between commas, blanks or line ends",
            found=str(error).rpartition(":")[2].strip(),
        ) from None


@dataclass(frozen=True)
class Wish:
    """How the continuation is made; None means the runtime's own default."""

    max_new_tokens: int
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    ignore_eos: bool = False
    num_draft_tokens: int | None = None


def run(
    engine_dir: Path,
    prompt: Prompt,
    wish: Wish,
    *,
    logits_path: Path | None,
    draft_logits_path: Path | None,
    tokenizer_dir: Path | None,
    executor: str,
    device: str,
    stream: bool,
) -> dict[str, Any]:
    """Run one prompt; with `stream` the text (or the ids) goes to standard output as it comes.

    Returns the object that `run --json` prints.
    """
    sampling = SamplingParams(
        temperature=wish.temperature, top_k=wish.top_k, top_p=wish.top_p, seed=wish.seed
    )
    start = time.perf_counter()
    engine = Engine.load(engine_dir, executor=executor, device=device)
    try:
        timings = {"load_s": time.perf_counter() - start}
        source = tokenizer_dir or engine.tokenizer_dir
        tokenizer = load_tokenizer(source) if source else None
        audio = None
        if prompt.sounds:
            from build_scripts.hearing import hear

            given = None if prompt.sounds.request else prompt.token_ids(tokenizer)
            heard = time.perf_counter()
            ids, audio = hear(engine, source, given, prompt.sounds)
            timings["audio_s"] = time.perf_counter() - heard
        else:
            ids = prompt.token_ids(tokenizer)
        limits = engine.config.build_config
        output.say(
            f"{engine.executor.name}: {engine.reason}; max_batch_size {limits.max_batch_size}, "
            f"max_seq_len {limits.max_seq_len}, max_input_len {limits.max_input_len}, "
            f"chunk {engine.config.chunk_tokens}"
        )
        for line in engine.notices:
            output.say(line)
        end_ids = () if wish.ignore_eos else engine.config.pretrained_config["eos_token_id"]
        if audio is not None and audio.streaming:
            # In a stream the end of a sentence is ordinary output; the audio's end is the end.
            end_ids = ()
        request = GenerationRequest(
            ids, max(1, wish.max_new_tokens), sampling, end_ids, audio=audio
        )
        request.check(engine.config)
        if logits_path is not None:
            timings["logits_s"] = _write_logits(
                logits_path, lambda: prompt_logits(engine, ids, audio=audio)
            )
        if draft_logits_path is not None:
            timings["draft_logits_s"] = _write_logits(
                draft_logits_path, lambda: draft_logits(engine, ids)
            )
        result: dict[str, Any] = {"prompt_ids": ids, "output_ids": [], "text": ""}
        result["finish_reason"] = "length"
        if wish.max_new_tokens > 0:
            result |= _generate(engine, request, wish, tokenizer, stream, timings)
        result["executor"] = engine.executor.name
    finally:
        engine.close()
    result["timings"] = {key: round(value, 6) for key, value in timings.items()}
    if logits_path is not None:
        result["logits"] = str(logits_path)
    if draft_logits_path is not None:
        result["draft_logits"] = str(draft_logits_path)
    return result


def _generate(
    engine: Engine,
    request: GenerationRequest,
    wish: Wish,
    tokenizer: Tokenizer | None,
    stream: bool,
    timings: dict[str, float],
) -> dict[str, Any]:
    """Submit the request, pass its text on as it comes, and collect the answer."""
    detokenizer = Detokenizer(tokenizer, request.prompt_ids) if tokenizer else None
    output_ids: list[int] = []
    parts: list[str] = []
    reason = None

    def show(piece: str) -> None:
        if piece and not any(parts):
            # What the text has to wait for, beginning with the audio at hand.
            waited = time.perf_counter() - start + timings.get("audio_s", 0.0)
            timings["first_text_s"] = waited
        parts.append(piece)
        if stream:
            sys.stdout.write(piece)
            sys.stdout.flush()

    start = time.perf_counter()
    with closing(Session(engine, num_draft_tokens=wish.num_draft_tokens)) as session:
        for event in session.submit(request):
            if event.error is not None:
                raise InputError("the generation failed", found=event.error)
            reason = event.finish_reason
            if event.token_id is None:
                continue
            if not output_ids:
                timings["first_token_s"] = time.perf_counter() - start
            output_ids.append(event.token_id)
            if detokenizer is None:
                show(f"{event.token_id} ")
            else:
                show(detokenizer.feed(event.token_id))
        if detokenizer is not None:
            show(detokenizer.flush())
        totals = session.stats().totals
    timings["generate_s"] = time.perf_counter() - start
    if stream:
        sys.stdout.write("\n")
    if request.audio is not None and "first_text_s" in timings:
        output.say(f"first text after {timings['first_text_s']:.3f} s, with the audio at hand")
    text = "".join(parts) if detokenizer is not None else ""
    result: dict[str, Any] = {"output_ids": output_ids, "text": text, "finish_reason": reason}
    if "draft" in engine.config.engines:
        calls, drafted, accepted = totals.generation_calls, totals.drafted, totals.accepted
        result["drafts"] = {"steps": calls, "verified": drafted, "accepted": accepted}
        output.say(f"{accepted} of {drafted} draft tokens accepted in {calls} steps")
    return result


def _write_logits(path: Path, compute: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    values = compute().float().cpu().numpy()
    with path.open("wb") as file:
        np.save(file, values.astype(np.float32, copy=False))
    output.say(f"logits of {values.shape[0]} prompt tokens: {path} {list(values.shape)} float32")
    return time.perf_counter() - start
