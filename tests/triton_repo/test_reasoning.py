"""Thoughts before an answer: what is one, what is the answer, in whatever pieces they come."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fixtures.dots3_tokenizer import CHAT_TEMPLATE
from tests.triton_repo.test_pipeline import MESSAGES, front_end, run
from triton_repo.frontend.output import OutputText, TextOptions
from triton_repo.frontend.reasoning import ReasoningSplitter, reasoning_after
from triton_repo.frontend.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
# As Qwen3 models since the one that always thinks: the template itself opens the section.
OPENING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% endfor %}"
    "{{ '<|im_start|>assistant\n<think>\n' }}"
    "{% if enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}"
)


def split(begins: Any, text: str, size: int | None) -> tuple[str, str]:
    splitter = ReasoningSplitter(begins)
    step = size or max(len(text), 1)
    pieces = [splitter.feed(text[i : i + step]) for i in range(0, len(text), step)]
    thoughts, contents = zip(*pieces, splitter.finish(), strict=True)
    return "".join(thoughts), "".join(contents)


@pytest.mark.parametrize("size", [None, 1, 2, 5])
@pytest.mark.parametrize(
    ("begins", "text", "thought", "content"),
    [
        ("possible", "<think>\nWhy?\n</think>\n\nYes", "Why?", "Yes"),
        ("possible", "\n <think>a\n\nb</think>c", "a\n\nb", "c"),
        ("possible", "<think>\n\n</think>\n\nYes", "", "Yes"),
        ("possible", "Yes <think>no</think>", "", "Yes <think>no</think>"),
        ("possible", " <thin", "", " <thin"),
        ("possible", "", "", ""),
        ("open", "Why?\n</think>\n\nYes\n", "Why?", "Yes\n"),
        ("open", "\nWhy < why?</thin\n</think>Yes</think>", "Why < why?</thin", "Yes</think>"),
        # Cut off while it thought: there is no answer yet, and nothing is lost.
        ("open", "Why?\n</th", "Why?\n</th", ""),
        ("open", "Why?\n", "Why?\n", ""),
        ("open", "", "", ""),
    ],
)
def test_thought_and_content(
    begins: str, text: str, thought: str, content: str, size: int | None
) -> None:
    assert split(begins, text, size) == (thought, content)


def test_thoughts_come_while_they_are_written() -> None:
    splitter = ReasoningSplitter("open")
    pieces = [splitter.feed(c)[0] for c in "a\nb</t"]
    assert pieces == ["a", "", "\nb", "", "", ""]


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [
        ("<|assistant|>", "possible"),
        ("<|im_start|>assistant\n<think>\n", "open"),
        ("<|im_start|>assistant\n<think>", "open"),
        ("<|assistant|><think>\n\n</think>\n\n", ""),
        # What was thought or said earlier is no beginning of this answer.
        ("<|user|>What is <think>?<|endofuser|><|assistant|>", "possible"),
    ],
)
def test_the_prompt_says_how_an_answer_begins(prompt: str, begins: str) -> None:
    assert reasoning_after(prompt) == begins


@pytest.mark.parametrize(
    ("template", "kwargs", "begins"),
    [
        (CHAT_TEMPLATE, {}, "possible"),
        (CHAT_TEMPLATE, {"enable_thinking": False}, ""),
        (OPENING, {}, "open"),
        (OPENING, {"enable_thinking": False}, ""),
        ("{{ messages[0]['content'] }}", {}, ""),
    ],
)
@pytest.mark.parametrize("by", ["server", "request"])
def test_a5_17_template_and_parser_see_the_same_options(
    template: str, kwargs: dict[str, Any], begins: str, by: str
) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    server = front_end(1000, tokenizer, chat_template_kwargs=kwargs if by == "server" else {})
    row = {"messages": MESSAGES, "stop_words": ["x"]}
    if by == "request":
        row["chat_template_kwargs"] = json.dumps(kwargs)
    prepared = run(row, server)
    assert prepared.options.text.reasoning == begins
    # Ids cannot tell thoughts from an answer: where there may be some, the text alone is matched.
    assert (prepared.options.stop_ids is None) == bool(begins)


def test_a_text_prompt_has_no_thoughts() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = OPENING
    assert run({"text_input": "<think>"}, front_end(100, tokenizer)).options.text.reasoning == ""


def everything(options: TextOptions, text: str, tokenizer: Any = BYTES) -> tuple[str, str, Any]:
    output = OutputText(tokenizer, [], options)
    piece, used = output.feed(list(text.encode()))
    return *piece.joined(output.finish()), used if output.stopped else output.tool_calls


def test_a5_8_stop_strings_are_looked_for_in_the_answer() -> None:
    text = "I STOP here?</think>Go. STOP. More"
    options = TextOptions(("STOP",), reasoning="open")
    assert everything(options, text) == ("Go. ", "I STOP here?", text.index("STOP. M") + 4)
    # Negative control: without sections the first one would end it.
    assert everything(TextOptions(("STOP",)), text)[0] == "I "


def test_calls_are_looked_for_in_the_answer() -> None:
    call = '<dots_function_call><invoke name="f"></invoke></dots_function_call>'
    options = TextOptions(tools='[{"name": "f"}]', reasoning="open")
    text, thought, calls = everything(options, f"Should I {call}?\n</think>\n\nNo.")
    assert (text, thought, calls) == ("No.", f"Should I {call}?", "[]")
    text, thought, calls = everything(options, f"Yes.</think>{call}")
    assert (text, thought) == ("", "Yes.")
    assert json.loads(calls) == [{"name": "f", "arguments": {}}]


def test_markers_may_be_special_tokens() -> None:
    class Special(ByteTokenizer):
        def token_id(self, token: str) -> int | None:
            return {"<think>": 2, "</think>": 3}.get(token)

        def decode(self, ids: Any, skip_special_tokens: bool) -> str:
            kept = [i for i in ids if i not in (2, 3)] if skip_special_tokens else ids
            return super().decode(kept, skip_special_tokens)

    options = TextOptions(reasoning="possible")
    assert everything(options, "\2Why?\3Yes", Special())[:2] == ("Yes", "Why?")
    # Who wants to see special tokens gets nothing added to them.
    shown = TextOptions(skip_special_tokens=False)
    assert everything(shown, "\2Why?\3Yes", Special())[0] == "\2Why?\3Yes"
