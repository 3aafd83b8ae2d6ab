"""`build-engine run`: generate with an engine directory, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from build_scripts import options, output
from build_scripts.sounds import Sounds


def command(
    engine_dir: options.EngineDir,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Prompt text.")] = None,
    ids: Annotated[
        str | None, typer.Option("--ids", metavar="1,2,3", help="Prompt as token ids.")
    ] = None,
    ids_file: Annotated[
        Path | None,
        typer.Option("--ids-file", metavar="FILE", help="Token ids: commas, blanks or lines."),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        typer.Option(
            "--audio", metavar="FILE", help="Audio file (WAV, FLAC, OGG, MP3); repeatable."
        ),
    ] = None,
    request: Annotated[
        Path | None,
        typer.Option(
            "--request", metavar="FILE.json", help="Chat messages with audio, or a transcription."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=0, help="Most tokens to generate.")
    ] = 32,
    logits: Annotated[
        Path | None,
        typer.Option(
            "--logits",
            metavar="OUT.npy",
            help="Write the prompt's logits, float32 \\[prompt_tokens, vocab].",
        ),
    ] = None,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens",
            min=0,
            help="Draft tokens per step; default: as many as the engines verify.",
        ),
    ] = None,
    draft_logits: Annotated[
        Path | None,
        typer.Option(
            "--draft-logits",
            metavar="OUT.npy",
            help="Write the draft layer's logits, float32 \\[prompt_tokens - 1, vocab].",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", help="0 is greedy; default: 1 with --top-k/--top-p, else 0."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Sample among the k most likely tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Sample among the fewest tokens with this probability."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of the sampler; default: a fresh one.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")
    ] = False,
    tokenizer: options.TokenizerDir = None,
    executor: options.Executor = options.ExecutorChoice.auto,
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Generate from one prompt; text appears as it is made.

    Give exactly one of --prompt, --ids, --ids-file and --request. Without tokenizer files the
    output is ids. A request file holds chat messages, whose audio parts are
    {"type": "audio", "audio": "A.wav"}, or {"task": "transcribe", "language": "en",
    "audio": "A.wav"}; an audio part without a file takes the next --audio.

    [bold]Examples[/bold]

      build-engine run engine --prompt "Once upon a time" --max-new-tokens 32
      build-engine run engine --ids 1,2,3 --max-new-tokens 8 --json
      build-engine run engine --ids-file prompt.txt --max-new-tokens 0 --logits logits.npy
      build-engine run engine --prompt "Hello" --temperature 0.8 --top-p 0.9 --seed 7
      build-engine run voxtral-engine --request transcribe.json
      build-engine run voxtral-engine --audio A.wav --ids-file prompt.txt --json
    """
    from build_scripts import generation

    with output.reserved_stdout(json):
        result = generation.run(
            engine_dir,
            generation.Prompt(prompt, ids, ids_file, Sounds(tuple(audio or ()), request)),
            generation.Wish(
                max_new_tokens, temperature, top_k, top_p, seed, ignore_eos, num_draft_tokens
            ),
            logits_path=logits,
            draft_logits_path=draft_logits,
            tokenizer_dir=tokenizer,
            executor=executor.value,
            device=device,
            stream=not json,
        )
    if json:
        output.emit_json(result)
