"""Every request gets its own right tokens, whatever the others do, and no slot is lost."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.support.errors import CapabilityError, UsageError
from runtime.contract import EngineConfig, Phase
from runtime.engine import Engine
from runtime.executors import EXECUTOR
from runtime.host_inputs import open_host_inputs
from runtime.requests import GenerationRequest, QueueFullError, TokenEvent
from runtime.rows import Row
from runtime.sampling import SamplingParams
from runtime.session import GenerationHandle, Session, prompt_logits
from tests.fixtures.handmade import made
from tests.runtime.conftest import Answer, Embed
from tests.runtime.engines import VOCAB
from tests.runtime.language import POISON, LanguageExecutor, logits_of


def _executor(engine: Engine) -> LanguageExecutor:
    assert isinstance(engine.executor, LanguageExecutor)
    return engine.executor


def _prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    return [token + 1 if token == POISON else token for token in ids]


def _events(handle: GenerationHandle) -> list[TokenEvent]:
    return list(handle)


def test_one_request_gets_the_right_answer_token_by_token(engine: Engine, answer: Answer) -> None:
    prompt = _prompt(70)
    with Session(engine, threaded=False) as session:
        events = _events(session.submit(GenerationRequest(prompt, 12)))
    assert [event.token_id for event in events] == answer(prompt, 12)
    assert [event.finish_reason for event in events] == [None] * 11 + ["length"]
    # Two chunks of 64 at most for 70 tokens, then one call per further token.
    assert [phase for phase, _ in _executor(engine).calls] == ["context"] * 2 + ["generation"] * 11


def test_more_requests_than_slots_through_the_worker_thread(engine: Engine, answer: Answer) -> None:
    prompts = [_prompt(length) for length in (1, 3, 64, 65, 130, 2, 90, 7, 63)]
    with Session(engine) as session:
        handles = [
            session.submit(GenerationRequest(prompt, 5 + index))
            for index, prompt in enumerate(prompts)
        ]
        for index, (prompt, handle) in enumerate(zip(prompts, handles, strict=True)):
            ids, last = handle.result()
            assert ids == answer(prompt, 5 + index)
            assert last.finish_reason == "length"
            timings = handle.timings
            assert 0 < timings.arrival <= timings.scheduled <= timings.first_token
            assert timings.first_token <= timings.last_token
            assert timings.tokens == 5 + index
        stats = session.stats()
    assert stats.totals.finished["length"] == len(prompts)
    assert stats.totals.prompt_tokens == sum(len(prompt) for prompt in prompts)
    assert stats.totals.generated_tokens == sum(5 + index for index in range(len(prompts)))
    assert _executor(engine).occupied == set()


_actions = st.lists(
    st.tuples(
        st.integers(1, 150),  # prompt length
        st.integers(1, 12),  # tokens asked for
        st.integers(0, 3),  # steps before the next action
        st.one_of(st.none(), st.integers(0, 6)),  # steps until it is cancelled
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=30, deadline=None)
@given(actions=_actions)
def test_random_arrivals_and_cancellations(
    engine_dir: Path, config: EngineConfig, answer: Answer, actions: list[tuple]
) -> None:
    executor = made(EXECUTOR, LanguageExecutor, config)
    engine = Engine(config, executor, open_host_inputs(config, engine_dir))
    handles: list[tuple[GenerationHandle, list[int], int, bool]] = []
    deadlines: dict[int, list[GenerationHandle]] = {}
    clock = 0
    with Session(engine, threaded=False) as session:

        def tick() -> None:
            nonlocal clock
            for handle in deadlines.pop(clock, []):
                handle.cancel()
            session.step()
            clock += 1

        for index, (length, count, pause, patience) in enumerate(actions):
            prompt = _prompt(length, index)
            handle = session.submit(GenerationRequest(prompt, count))
            handles.append((handle, prompt, count, patience is not None))
            if patience is not None:
                deadlines.setdefault(clock + patience, []).append(handle)
            for _ in range(pause):
                tick()
        while deadlines:
            tick()
        while session.step():
            pass
        for handle, prompt, count, may_end_early in handles:
            ids, last = handle.result()
            expected = answer(prompt, count)
            if may_end_early and last.finish_reason == "cancelled":
                assert ids == expected[: len(ids)]
                assert last.token_id is None
            else:
                assert last.finish_reason == "length"
                assert ids == expected
        stats = session.stats()
        assert (stats.active, stats.waiting) == (0, 0)
        assert executor.occupied == set()
        assert session._scheduler.free_slots == engine.slots
        assert sum(stats.totals.finished.values()) == len(actions)


def test_events_can_be_delivered_to_a_function(engine: Engine, answer: Answer) -> None:
    got: dict[int, list[TokenEvent]] = {n: [] for n in range(6)}
    with Session(engine) as session:
        for number, events in got.items():
            session.submit(GenerationRequest(_prompt(number + 5), 7), events.append)
    for number, events in got.items():
        assert [event.token_id for event in events] == answer(_prompt(number + 5), 7)
        assert [event.finish_reason for event in events] == [None] * 6 + ["length"]


def test_function_that_raises_ends_its_own_request_only(engine: Engine, answer: Answer) -> None:
    def broken(event: TokenEvent) -> None:
        raise BrokenPipeError("nobody is there")

    with Session(engine) as session:
        session.submit(GenerationRequest(_prompt(5), 150), broken)
        assert session.submit(GenerationRequest(_prompt(6), 9)).result()[0] == answer(_prompt(6), 9)
    assert session.stats().totals.finished["cancelled"] == 1
    assert _executor(engine).occupied == set()


def test_cancelled_request_stops_within_one_step(engine: Engine) -> None:
    with Session(engine, threaded=False) as session:
        handle = session.submit(GenerationRequest(_prompt(5), 100))
        for _ in range(3):
            session.step()
        handle.cancel()
        calls = len(_executor(engine).calls)
        session.step()
        assert len(_executor(engine).calls) == calls
        ids, last = handle.result()
    assert len(ids) == 4
    assert last == TokenEvent(None, finish_reason="cancelled")


def test_waiting_request_can_be_cancelled(engine: Engine) -> None:
    with Session(engine, threaded=False) as session:
        running = [session.submit(GenerationRequest(_prompt(5), 20)) for _ in range(engine.slots)]
        waiting = session.submit(GenerationRequest(_prompt(5), 20))
        session.step()
        waiting.cancel()
        session.step()
        assert waiting.next_event(timeout=0) == TokenEvent(None, finish_reason="cancelled")
        assert all(handle.result()[1].finish_reason == "length" for handle in running)


def test_long_prompts_do_not_hold_up_running_requests(engine: Engine) -> None:
    with Session(engine, threaded=False) as session:
        running = session.submit(GenerationRequest(_prompt(3), 30))
        session.step()
        session.submit(GenerationRequest(_prompt(170), 2))
        before = running.timings.tokens
        for _ in range(3):
            session.step()
        assert running.timings.tokens == before + 3


def test_neighbouring_prompts_share_a_call(engine: Engine) -> None:
    with Session(engine, threaded=False) as session:
        for length in (10, 20, 30):
            session.submit(GenerationRequest(_prompt(length), 1))
        session.step()
    assert _executor(engine).calls == [("context", (3, 64))]


def test_a_call_has_at_most_max_num_tokens(engine_dir: Path, config: EngineConfig) -> None:
    limits = config.build_config.model_copy(update={"max_num_tokens": 2 * 64})
    small = config.model_copy(update={"build_config": limits})
    executor = made(EXECUTOR, LanguageExecutor, small)
    engine = Engine(small, executor, open_host_inputs(small, engine_dir))
    with Session(engine, threaded=False) as session:
        for length in (10, 20, 64, 30):
            session.submit(GenerationRequest(_prompt(length), 1))
        while session.step():
            pass
    assert executor.calls == [("context", (2, 64))] * 2


def test_end_id_stop_sequence_and_length(engine: Engine, answer: Answer) -> None:
    prompt = _prompt(9)
    right = answer(prompt, 10)
    end = right[4]
    first = right.index(end)
    with Session(engine, threaded=False) as session:
        ids, last = session.submit(GenerationRequest(prompt, 10, end_ids=(end,))).result()
        assert (ids, last.finish_reason) == (right[: first + 1], "stop")
        stop = (right[2], right[3])
        ids, last = session.submit(
            GenerationRequest(prompt, 10, stop_ids=((VOCAB - 1, 0), stop))
        ).result()
        assert (ids, last.finish_reason) == (right[:4], "stop")


def test_not_a_number_ends_one_request_and_spares_the_others(
    engine: Engine, answer: Answer
) -> None:
    good, bad = _prompt(40), [*_prompt(20), POISON]
    with Session(engine, threaded=False) as session:
        handles = [session.submit(GenerationRequest(p, 8)) for p in (good, bad, good)]
        session.step()
        ids, last = handles[1].result()
        assert ids == []
        assert last.finish_reason == "error"
        assert last.error == "the model's logits are not finite"
        for handle in (handles[0], handles[2]):
            assert handle.result()[0] == answer(good, 8)
        # The poisoned slot serves the next request as if nothing had happened.
        again = [session.submit(GenerationRequest(good, 8)) for _ in range(engine.slots)]
        assert all(handle.result()[0] == answer(good, 8) for handle in again)
    assert _executor(engine).occupied == set()


def test_failing_call_ends_its_requests_only(
    engine_dir: Path, config: EngineConfig, answer: Answer
) -> None:
    def long_prompt(phase: Phase, inputs: Mapping[str, torch.Tensor]) -> bool:
        return phase == "context" and int(inputs["new_lengths"].max()) > 50

    executor = made(EXECUTOR, LanguageExecutor, config, fail_when=long_prompt)
    engine = Engine(config, executor, open_host_inputs(config, engine_dir))
    short, long = _prompt(6), _prompt(60)
    with Session(engine) as session:
        first = session.submit(GenerationRequest(short, 20))
        first.next_event()
        bad = session.submit(GenerationRequest(long, 5))
        ids, last = bad.result()
        assert (ids, last.finish_reason) == ([], "error")
        assert "the device fell over" in str(last.error)
        assert first.result()[0] == answer(short, 20)[1:]
        assert session.submit(GenerationRequest(short, 4)).result()[0] == answer(short, 4)
    assert executor.occupied == set()


def test_executor_that_cannot_recover_ends_everything_without_hanging(
    engine_dir: Path, config: EngineConfig
) -> None:
    class Dead(LanguageExecutor):
        def end(self, slot: int, poisoned: bool = False) -> None:
            raise RuntimeError("the context is lost")

    executor = made(EXECUTOR, Dead, config, fail_when=lambda phase, inputs: phase == "generation")
    engine = Engine(config, executor, open_host_inputs(config, engine_dir))
    session = Session(engine)
    with session._wake:
        # All arrive before the first step.
        handles = [session.submit(GenerationRequest(_prompt(5), 5)) for _ in range(7)]
    assert all(handle.result()[1].finish_reason == "error" for handle in handles)
    with pytest.raises(CapabilityError, match="engine has failed"):
        session.submit(GenerationRequest(_prompt(5), 5))
    session.close()


def test_slot_that_cannot_be_prepared_ends_one_request(
    engine_dir: Path, config: EngineConfig, answer: Answer
) -> None:
    class Stubborn(LanguageExecutor):
        refuse = True

        def begin(self, slot: int) -> None:
            super().begin(slot)
            if self.refuse:
                self.refuse = False
                raise RuntimeError("no memory to clear")

    executor = made(EXECUTOR, Stubborn, config)
    engine = Engine(config, executor, open_host_inputs(config, engine_dir))
    with Session(engine, threaded=False) as session:
        handles = [session.submit(GenerationRequest(_prompt(5), 5)) for _ in range(3)]
        assert "no memory to clear" in str(handles[0].result()[1].error)
        assert [handle.result()[0] for handle in handles[1:]] == [answer(_prompt(5), 5)] * 2
    assert executor.occupied == set()


def test_request_that_arrives_while_the_engine_dies_is_told(
    engine_dir: Path, config: EngineConfig
) -> None:
    late: list[GenerationHandle] = []

    class Dying(LanguageExecutor):
        def end(self, slot: int, poisoned: bool = False) -> None:
            if not late:
                late.append(session.submit(GenerationRequest(_prompt(4), 3)))
            raise RuntimeError("the context is lost")

    executor = made(EXECUTOR, Dying, config, fail_when=lambda phase, inputs: True)
    engine = Engine(config, executor, open_host_inputs(config, engine_dir))
    session = Session(engine)
    first = session.submit(GenerationRequest(_prompt(5), 5))
    assert first.result()[1].finish_reason == "error"
    assert late[0].result()[1].finish_reason == "error"
    session.close()


@pytest.mark.parametrize(
    ("change", "where", "limit"),
    [
        ({"prompt_ids": []}, "prompt_ids", "at least one"),
        ({"prompt_ids": [1] * 181}, "prompt_ids", "at most 180 ids (max_input_len"),
        ({"prompt_ids": [1, VOCAB]}, "prompt_ids", f"0 .. {VOCAB - 1}"),
        ({"prompt_ids": [-1]}, "prompt_ids", f"0 .. {VOCAB - 1}"),
        ({"max_new_tokens": 0}, "max_new_tokens", "at least 1"),
        ({"max_new_tokens": 198}, "max_new_tokens", "max_new_tokens <= 197"),
        ({"end_ids": [VOCAB]}, "end_ids", f"0 .. {VOCAB - 1}"),
        ({"stop_ids": [[]]}, "stop_ids", "at least one id"),
        ({"bad_ids": [[1, 99]]}, "bad_ids", f"0 .. {VOCAB - 1}"),
        ({"embedding_bias": torch.zeros(3)}, "embedding_bias", f"[{VOCAB}]"),
    ],
)
def test_impossible_requests_name_parameter_and_limit(
    engine: Engine, change: dict, where: str, limit: str
) -> None:
    arguments = {"prompt_ids": [1, 2, 3], "max_new_tokens": 5} | change
    with Session(engine, threaded=False) as session:
        with pytest.raises(UsageError) as caught:
            session.submit(GenerationRequest(**arguments))
        assert caught.value.where == where
        assert limit in str(caught.value.expected)
        assert not session.step()


def test_the_longest_possible_request_is_served(engine: Engine, answer: Answer) -> None:
    prompt = _prompt(180)
    with Session(engine, threaded=False) as session:
        ids, last = session.submit(GenerationRequest(prompt, 20)).result()
    assert ids == answer(prompt, 20)
    assert last.finish_reason == "length"


def test_queue_limit(engine: Engine) -> None:
    with Session(engine, max_queue=2, threaded=False) as session:
        for _ in range(engine.slots + 2):
            session.submit(GenerationRequest(_prompt(4), 3))
        with pytest.raises(QueueFullError):
            session.submit(GenerationRequest(_prompt(4), 3))
        while session.step():
            pass
        session.submit(GenerationRequest(_prompt(4), 3))


def test_close_cancels_and_drain_finishes(engine: Engine, answer: Answer) -> None:
    prompts = [_prompt(30, seed) for seed in range(9)]
    session = Session(engine)
    handles = [session.submit(GenerationRequest(prompt, 100)) for prompt in prompts]
    session.close()
    session.close()
    assert {handle.result()[1].finish_reason for handle in handles} <= {"cancelled", "length"}
    assert _executor(engine).occupied == set()
    with pytest.raises(UsageError, match="closed"):
        session.submit(GenerationRequest(prompts[0], 1))

    session = Session(engine)
    handles = [session.submit(GenerationRequest(prompt, 9)) for prompt in prompts]
    session.close(drain=True)
    assert [handle.result()[0] for handle in handles] == [answer(p, 9) for p in prompts]


def test_drain_with_a_time_limit_ends(engine: Engine) -> None:
    session = Session(engine)
    handles = [session.submit(GenerationRequest(_prompt(5), 190)) for _ in range(20)]
    session.close(drain=True, timeout=0.01)
    assert all(handle.result()[1].finish_reason is not None for handle in handles)


def test_many_threads_submit_and_cancel(engine: Engine, answer: Answer) -> None:
    wrong: list[str] = []

    def client(number: int, session: Session) -> None:
        for round_ in range(3):
            prompt = _prompt(number * 7 + round_ + 1, number)
            handle = session.submit(GenerationRequest(prompt, 10))
            right = answer(prompt, 10)
            if round_ == 1:
                handle.next_event()
                handle.cancel()
                ids, last = handle.result()
                if ids != right[1 : 1 + len(ids)] or last.finish_reason is None:
                    wrong.append(f"{number}: {ids} {last}")
            elif handle.result()[0] != right:
                wrong.append(str(number))

    with Session(engine) as session:
        threads = [threading.Thread(target=client, args=(n, session)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert _executor(engine).occupied == set()


def test_two_sessions_cannot_share_an_engine(engine: Engine) -> None:
    with Session(engine, threaded=False):
        with pytest.raises(UsageError, match="in use"):
            Session(engine)
        with pytest.raises(UsageError, match="in use"):
            prompt_logits(engine, [1, 2])
    Session(engine).close()


def test_seeded_sampling_does_not_depend_on_the_company(engine: Engine) -> None:
    sampling = SamplingParams(temperature=1.5, top_k=20, top_p=0.95, seed=77)
    request = GenerationRequest(_prompt(12), 25, sampling)
    with Session(engine, threaded=False) as session:
        alone = session.submit(request).result()[0]
        crowd = [
            session.submit(
                GenerationRequest(_prompt(n + 3, n), 15, SamplingParams(temperature=2.0, top_k=n))
            )
            for n in range(3)
        ]
        again = session.submit(request).result()[0]
        for handle in crowd:
            handle.result()
        other = GenerationRequest(_prompt(12), 25, SamplingParams(temperature=1.5, seed=78))
        assert session.submit(other).result()[0] != alone
    assert again == alone


def test_prompt_logits_do_not_depend_on_how_the_prompt_is_cut(engine: Engine, embed: Embed) -> None:
    prompt = _prompt(60)
    right = torch.from_numpy(logits_of(prompt, embed))
    assert torch.equal(prompt_logits(engine, prompt), right)
    for chunk in (1, 7, 64, [1, 12, 7, 1, 39]):
        assert torch.equal(prompt_logits(engine, prompt, chunk), right)
    assert torch.equal(prompt_logits(engine, prompt, phase="generation"), right)
    long = _prompt(150)
    assert torch.equal(prompt_logits(engine, long), torch.from_numpy(logits_of(long, embed)))


@pytest.mark.parametrize("chunk", [0, 65, [75, 74], [64, 64, 22, 0]])
def test_impossible_chunks_are_refused(engine: Engine, chunk: int | list[int]) -> None:
    with pytest.raises(UsageError, match="cannot be cut"):
        prompt_logits(engine, _prompt(150), chunk)


def test_language_notices_a_stale_state_and_a_lost_context(
    engine_dir: Path, config: EngineConfig, embed: Embed
) -> None:
    """The tests above can fail: without clean states or n-gram context answers differ."""
    prompt = _prompt(60)
    right = torch.from_numpy(logits_of(prompt, embed))

    class Careless(LanguageExecutor):
        def begin(self, slot: int) -> None:
            self.occupied.add(slot)

    engine = Engine(config, made(EXECUTOR, Careless, config), open_host_inputs(config, engine_dir))
    assert torch.equal(prompt_logits(engine, prompt), right)
    assert not torch.equal(prompt_logits(engine, prompt), right)

    class Forgetful(Engine):
        def step(self, phase: Phase, first: int, rows: list[Row | None]) -> torch.Tensor:  # type: ignore[override]
            cut = [
                Row(
                    [2] * row.start + list(row.sequence[row.start :]),
                    row.start,
                    row.count,
                    row.logits,
                )
                if row
                else None
                for row in rows
            ]
            return super().step(phase, first, cut)

    forgetful = Forgetful(
        config, made(EXECUTOR, LanguageExecutor, config), open_host_inputs(config, engine_dir)
    )
    assert not torch.equal(prompt_logits(forgetful, prompt, 7), right)
