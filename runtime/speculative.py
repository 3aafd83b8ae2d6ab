"""Draft tokens: the draft engine follows the text model and guesses what comes next.

The draft engine takes, at every position, the text model's hidden state and the token of the
position after it. It reads along whatever the text engines are given (`follow`), which yields the
first draft; every further draft step (`extend`) takes its own last hidden state and its own last
guess. Such steps leave rows in the engine's states that the true hidden states replace: the next
`follow` passes them over as rejected.

Acceptance is by equality: a verified position gives the token that would have been chosen without
drafts, by the same sampler and the same random number, and the drafts count as long as they were
that token. Answers are therefore those of plain decoding, greedy or sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from plugins.support.errors import UsageError
from runtime.contract import HIDDEN, TOKEN_BLOCK, EngineConfig
from runtime.engine import Engine
from runtime.executors import OUTPUTS
from runtime.requests import GenerationRequest
from runtime.rows import Row

NEXT_HIDDEN = "hidden_states.next_draft"


@dataclass
class DraftState:
    """What the drafter knows about one sequence.

    Attributes:
        cached: positions that the draft engine has read with the text model's hidden states.
        guessed: positions that it has read with its own; the next call passes them over.
        tokens: the drafts, in order.
        hidden: [H], what the next draft step takes.
    """

    cached: int = 0
    guessed: int = 0
    tokens: list[int] = field(default_factory=list)
    hidden: torch.Tensor | None = None


@dataclass(frozen=True)
class Positions:
    """Positions of one sequence that the draft engine is to read.

    Attributes:
        next_ids: at each position the token after it.
        hidden: [n, H], hidden states there.
        past: positions before them.
        rejected: positions read in calls before that are to be passed over.
    """

    next_ids: Sequence[int]
    hidden: torch.Tensor
    past: int
    rejected: int = 0


def checked_count(config: EngineConfig, count: int | None) -> int:
    """Draft tokens per step. Raises UsageError when the engines cannot verify that many."""
    most = config.build_config.max_draft_len if "draft" in config.engines else 0
    if count is None:
        return most
    if not 0 <= count <= most:
        raise UsageError(
            "the engines cannot verify that many draft tokens",
            where="num_draft_tokens",
            expected=f"0 .. {most}",
            found=str(count),
            fix="build them with a larger --max-draft-len" if count > most else None,
        )
    return count


class Drafter:
    """Runs the draft engine.

    Args:
        engine: opened, with a draft engine.
        count: drafts per step.

    Raises CapabilityError for an executor that shows no hidden states.
    """

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine = engine
        self._outputs = OUTPUTS.require(engine.executor)
        self.count = count

    def follow(
        self,
        first: int,
        states: Sequence[DraftState | None],
        next_ids: Sequence[Sequence[int]],
    ) -> None:
        """Read what the text model has read in its last call; leaves each sequence its first draft.

        Args:
            first: first slot of the range; None in `states` is a padding slot.
            states: per slot of the range.
            next_ids: per slot, at each new position the token after it.
        """
        # [slots, S, H], the text model's hidden states at the new positions.
        hidden = self._outputs.output(HIDDEN)
        rows = [
            Positions(ids, hidden[i, : len(ids)], state.cached, state.guessed) if state else None
            for i, (state, ids) in enumerate(zip(states, next_ids, strict=True))
        ]
        longest = max(len(row.next_ids) for row in rows if row)
        step = self._engine.config.step_tokens
        columns = step if longest <= step else -(-longest // TOKEN_BLOCK) * TOKEN_BLOCK
        drafts, last = self._call(first, rows, columns)
        for index, (state, ids) in enumerate(zip(states, next_ids, strict=True)):
            if state is not None:
                state.cached += len(ids)
                state.guessed = 0
                state.tokens = [drafts[index]]
                state.hidden = last[index]

    def extend(self, states: Mapping[int, DraftState], width: int) -> None:
        """Guess on until every sequence has its drafts.

        Args:
            states: by slot, each with its first draft.
            width: slots of the calls, from slot 0.
        """
        for _ in range(1, self.count):
            rows = [_guess(states.get(slot)) for slot in range(width)]
            drafts, last = self._call(0, rows, 1)
            for slot, state in states.items():
                state.guessed += 1
                state.tokens.append(drafts[slot])
                state.hidden = last[slot]

    def _call(
        self, first: int, rows: Sequence[Positions | None], columns: int
    ) -> tuple[list[int], torch.Tensor]:
        """Run the draft engine; returns per slot the guess after its last position, and its
        hidden state there, [slots, H].
        """
        last = [len(row.next_ids) - 1 if row else 0 for row in rows]
        inputs = _inputs(rows, columns, [[place] for place in last])
        logits = self._engine.executor.step("draft", first, inputs)
        vocab = self._engine.config.vocab_size
        drafts: list[int] = logits[:, 0, :vocab].argmax(dim=-1).tolist()
        output = self._outputs.output(NEXT_HIDDEN)
        return drafts, output[range(len(rows)), last].clone()


def _guess(state: DraftState | None) -> Positions | None:
    """One position further, from the draft engine's own hidden state and guess."""
    if state is None:
        return None
    assert state.hidden is not None
    return Positions(state.tokens[-1:], state.hidden.unsqueeze(0), state.cached + state.guessed)


def _inputs(
    rows: Sequence[Positions | None], columns: int, wanted: Sequence[Sequence[int]]
) -> dict[str, torch.Tensor]:
    """Inputs of the draft engine; `wanted` are the positions whose logits come back."""
    batch = len(rows)
    some = next(row.hidden for row in rows if row is not None)
    ids = torch.zeros(batch, columns, dtype=torch.int32)
    hidden = some.new_zeros(batch, columns, some.shape[-1])
    lengths = torch.zeros(3, batch, dtype=torch.int32)
    for index, row in enumerate(rows):
        if row is not None:
            count = len(row.next_ids)
            ids[index, :count] = torch.tensor(list(row.next_ids), dtype=torch.int32)
            hidden[index, :count] = row.hidden
            lengths[:, index] = torch.tensor([row.past, count, row.rejected])
    return {
        "input_ids": ids,
        "hidden_states": hidden,
        "past_lengths": lengths[0],
        "new_lengths": lengths[1],
        "rejected_lengths": lengths[2],
        "logits_positions": torch.tensor(wanted, dtype=torch.int32),
    }


def draft_logits(engine: Engine, ids: Sequence[int]) -> torch.Tensor:
    """The draft layer's logits at every position of a prompt that has a token after it.

    Arguments, errors and the result as the first one of `read_along`.
    """
    return read_along(engine, ids)[0]


def read_along(engine: Engine, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the draft layer makes of a prompt, with the text model's hidden states.

    Args:
        engine: opened and not in use, with a draft engine.
        ids: the prompt, two ids at least.

    Returns:
        Logits float32 [len(ids) - 1, vocab_size], row i about the token of position i + 2, and the
        hidden states [len(ids) - 1, H] that a further draft would take; on the CPU.

    Raises UsageError when the ids or the engine do not allow it.
    """
    GenerationRequest(ids, 1).check_prompt(engine.config)
    if "draft" not in engine.config.engines or len(ids) < 2:
        raise UsageError(
            "there are no draft logits",
            expected="an engine built with --max-draft-len, and a prompt of two tokens at least",
            found=f"engines {', '.join(engine.config.engines)}; {len(ids)} tokens",
        )
    most = min(engine.config.chunk_tokens, engine.config.max_logits_rows)
    parts, following_hidden = [], []
    outputs = OUTPUTS.require(engine.executor)
    with engine.claim(), torch.inference_mode():
        engine.executor.begin(0)
        poisoned = True
        try:
            for start in range(0, len(ids) - 1, most):
                following = list(ids[start + 1 : start + 1 + most])
                count = len(following)
                engine.step("context", 0, [Row(ids, start, count)])
                hidden = outputs.output(HIDDEN)[0, :count]
                columns = -(-count // TOKEN_BLOCK) * TOKEN_BLOCK
                inputs = _inputs([Positions(following, hidden, start)], columns, [range(count)])
                logits = engine.executor.step("draft", 0, inputs)
                parts.append(logits[0, :, : engine.config.vocab_size].float().cpu().clone())
                following_hidden.append(outputs.output(NEXT_HIDDEN)[0, :count].cpu().clone())
            poisoned = False
        finally:
            engine.executor.end(0, poisoned)
    return torch.cat(parts), torch.cat(following_hidden)
