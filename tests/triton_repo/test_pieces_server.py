"""A server whose tokenizer is as Llama's: spaces in its pieces, bytes for all else, a begin token,
two end ids, cuts on the left; and whose own options reach the chat template.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from PIL import Image

from tests.triton_repo.clients import generate, generate_stream, ok, refused
from tests.triton_repo.tables import rows
from triton_repo.frontend.tokenizer import Tokenizer, open_with_transformers
from triton_repo.generate import RepositoryOptions, write_repository
from triton_repo.server import TritonServer, running

both = pytest.mark.parametrize("model", ["tensorrt_llm_bls", "ensemble"])
CONTEXT = 100
DEFAULTS = {
    "truncation": "longest_first", "exclude_input_in_output": True, "temperature": 0.5,
    "random_seed": 7, "stop_words": ["halt"],
}  # fmt: skip
BEGIN, END, OTHER_END, PAD, PLACEHOLDER = 1, 2, 3, 4, 5


@pytest.fixture(scope="module")
def tokenizer(pieces_tokenizer: Path) -> Tokenizer:
    return open_with_transformers(pieces_tokenizer)


@pytest.fixture(scope="module")
def server(
    pieces_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    repository = write_repository(
        None,
        tmp_path_factory.mktemp("pieces") / "repository",
        tokenizer=pieces_tokenizer,
        generation="echo",
        options=RepositoryOptions(
            max_context=CONTEXT,
            chat_template_kwargs={"style": "s", "enable_thinking": False},
            request_defaults=DEFAULTS,
            placeholders={"image": "<image>"},
            trust_request_mm_kwargs=False,
        ),
    )
    with running(repository) as started:
        yield started


def pieces(tokenizer: Tokenizer, *names: str) -> list[int]:
    ids = [tokenizer.token_id(name) for name in names]
    assert None not in ids, names
    return [i for i in ids if i is not None]


def said(server: TritonServer, model: str, ids: list[int], **more: Any) -> list[str]:
    """The text of an answer, whole and in a stream."""
    body = {"text_input": "Hello", "echo_output_ids": ids, "max_tokens": 64, "end_id": -1} | more
    events = list(generate_stream(server, body, model))
    return [ok(server, body, model)["text_output"], "".join(e["text_output"] for e in events)]


@both
def test_a5_27_spaces_of_pieces(server: TritonServer, tokenizer: Tokenizer, model: str) -> None:
    ids = pieces(tokenizer, "▁world", "s", "▁are", "▁London", ".")
    # After the prompt "Hello" the first word keeps its space; alone each would lose it.
    assert said(server, model, ids) == [" worlds are London."] * 2
    assert "".join(tokenizer.decode([i], True) for i in ids) == "worldsareLondon."


@both
def test_a5_5_bytes_that_are_no_character(
    server: TritonServer, tokenizer: Tokenizer, model: str
) -> None:
    ids = pieces(tokenizer, "▁Hello", "<0xC3>", "<0xA9>", "<0xFF>", "▁world", "s")
    assert said(server, model, ids) == [" Helloé\ufffd worlds"] * 2


@both
def test_a5_4_a_prompt_is_not_said_again(
    server: TritonServer, tokenizer: Tokenizer, model: str
) -> None:
    names = [f"<0x{b:02X}>" for b in "🌶".encode()]
    prompt = {"input_ids": pieces(tokenizer, "▁Hello", *names[:3])}
    body = prompt | {"echo_output_ids": pieces(tokenizer, names[3], "▁world"), "max_tokens": 8}
    events = list(generate_stream(server, body, model))
    assert [e["text_output"] for e in events] == ["🌶", " world"]
    assert ok(server, body, model)["text_output"] == "🌶 world"


@both
@pytest.mark.parametrize("end", [END, OTHER_END])
def test_a5_24_both_end_ids_of_the_generation_config_end(
    server: TritonServer, tokenizer: Tokenizer, model: str, end: int
) -> None:
    hello, world = pieces(tokenizer, "▁Hello", "▁world")
    ids = [hello, end, world]
    # Without the server's stop words: then the classic tensors alone say where to end.
    body = {"text_input": ".", "echo_output_ids": ids, "max_tokens": 9, "stop_words": []}
    for answer in (ok(server, body, model), list(generate_stream(server, body, model))[-1]):
        assert answer["finish_reason"] == "stop"
    answer = ok(server, body | {"return_num_output_tokens": True}, model)
    assert answer["text_output"].strip() == "Hello"
    assert (answer["output_ids"], answer["num_output_tokens"]) == (ids[:2], 2)
    assert json.loads(answer["ECHO_SAMPLING"])["end_ids"] == [OTHER_END, END]
    # A request that names one has that one only.
    other = OTHER_END if end == END else END
    assert ok(server, body | {"end_id": other}, model)["output_ids"] == ids
    # Called directly, the generation model has none.
    direct = {"input_ids": [hello], "input_lengths": 1, "request_output_len": 9}
    direct |= {"echo_output_ids": ids, "exclude_input_in_output": True}
    status, answer = generate(server, direct, "tensorrt_llm")
    assert (status, answer["output_ids"]) == (200, ids)


@both
def test_a5_11_stop_words_are_matched_on_text(
    server: TritonServer, tokenizer: Tokenizer, model: str
) -> None:
    ids = pieces(tokenizer, "▁Hello", "ST", "OP", "▁world")
    words = ["STOP", "a,b", "\n"]
    assert said(server, model, ids, stop_words=words) == [" Hello"] * 2
    body = {"text_input": "Hello", "echo_output_ids": ids, "stop_words": words}
    answer = ok(server, body, model)
    assert (answer["stop_reason"], answer["output_ids"]) == ("STOP", ids[:3])
    found = json.loads(answer["ECHO_SAMPLING"])
    assert found["stop_words"] == words
    # The ids of the word alone are others, and no special token stands in front.
    assert found["stop_words_ids"][0] == pieces(tokenizer, "▁STOP") != ids[1:3]
    assert not any(BEGIN in one for one in found["stop_words_ids"])
    newline = pieces(tokenizer, "▁Hello", "<0x0A>", "▁world")
    assert said(server, model, newline, stop_words=words) == [" Hello"] * 2


@both
def test_a5_12_bad_words_in_the_middle_of_a_sentence(
    server: TritonServer, tokenizer: Tokenizer, model: str
) -> None:
    answer = ok(server, {"text_input": "Hello", "bad_words": ["London"]}, model)
    middle, bare = pieces(tokenizer, "▁London", "London")
    assert json.loads(answer["ECHO_SAMPLING"])["bad_words_ids"] == [[middle], [bare]]


def chat(*content: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]
    return {"messages": json.dumps([{"role": "user", "content": parts}]), "max_tokens": 8}


def drawn(form: str) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32)).save(buffer, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def picture(**options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": drawn("PNG")} | options}


@both
def test_a5_14_one_begin_token_on_every_path(
    server: TritonServer, tokenizer: Tokenizer, model: str
) -> None:
    thinking = {"chat_template_kwargs": '{"style": ""}'}
    urls = [picture()["image_url"]["url"]]
    for body, begins in (
        ({"text_input": "Hello"}, 1),
        ({"text_input": "Hello", "add_special_tokens": False}, 0),
        (chat("Hello") | thinking, 1),
        (chat("Hello") | thinking | {"add_special_tokens": True}, 2),
        (chat("Hello", picture()) | thinking, 1),
        ({"text_input": "Hello", "image_url_input": urls}, 1),
        ({"text_input": "Hello", "image_url_input": urls, "add_special_tokens": False}, 0),
        ({"content_parts": '["Hello"]'}, 0),
        ({"content_parts": '["Hello", "Hello"]', "add_special_tokens": True}, 1),
    ):
        ids = ok(server, body, model)["ECHO_INPUT_IDS"]
        ids = ids if isinstance(ids, list) else [ids]
        assert ids.count(BEGIN) == begins, body
        assert begins == 0 or ids[0] == BEGIN


@both
def test_a5_15_texts_without_tokens(server: TritonServer, model: str) -> None:
    assert ok(server, {"text_input": ""}, model)["ECHO_INPUT_IDS"] == BEGIN
    assert ok(server, {"text_input": "   "}, model)["ECHO_INPUT_IDS"] == BEGIN
    for text in ("", "   "):
        body = {"text_input": text, "add_special_tokens": False}
        assert refused(server, body, model).startswith("text_input: the prompt has no tokens")


@both
def test_a5_17_options_of_a_chat_are_merged_once(
    server: TritonServer, tokenizer: Tokenizer, model: str
) -> None:
    answer_ids = pieces(tokenizer, "▁Hello", "</think>", "▁world")
    body = chat("Hello") | {"echo_output_ids": answer_ids, "return_num_input_tokens": True}
    # The server's own options: no thoughts, for the template, the parser and whoever counts.
    plain = ok(server, body, model)
    off = pieces(tokenizer, "<think>", "</think>")
    assert plain["ECHO_INPUT_IDS"] == [
        BEGIN, *tokenizer.encode("Hellos", False, False).ids, *off,
    ]  # fmt: skip
    assert "reasoning_content" not in plain
    thinking = body | {"chat_template_kwargs": '{"enable_thinking": true}'}
    answer = ok(server, thinking, model)
    assert answer["ECHO_INPUT_IDS"] == plain["ECHO_INPUT_IDS"][:-1]
    assert (answer["reasoning_content"], answer["text_output"]) == (" Hello", " world")
    for asked, found in ((body, plain), (thinking, answer)):
        assert found["num_input_tokens"] == len(found["ECHO_INPUT_IDS"])
        url = f"{server.http_url}/v2/models/preprocessing/generate"
        fields = {k: v for k, v in asked.items() if k.startswith(("messages", "chat"))}
        counted = requests.post(url, json=fields | {"REQUEST_OUTPUT_LEN": 1}, timeout=20).json()
        assert counted["INPUT_ID"] == found["ECHO_INPUT_IDS"]
        assert counted["REQUEST_INPUT_LEN"] == found["num_input_tokens"]


LEFT = [
    r
    for r in rows("truncation_slices")
    if (r.values[0]["tokenizer_side"], r.values[0]["context"]) == ("left", CONTEXT)
    # Below the interface -1 has more spellings than one.
    and r.values[0]["truncate"] != -5
]


@both
@pytest.mark.parametrize("row", LEFT)
def test_a_tokenizer_that_cuts_on_the_left(
    server: TritonServer, model: str, row: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"input_ids": list(range(row["length"])), "truncation": "false"}
    body |= {"max_tokens": row["output"] or 1, "task": "embed"}
    if row["output"] != 0:
        body["task"] = "generate"
    for name, key in (("truncate_prompt_tokens", "truncate"), ("truncation_side", "side")):
        if row[key] is not None:
            body[name] = row[key]
    if row["truncate"] is not None:
        # Not given is another thing than switched off.
        del body["truncation"]
        body["truncate_prompt_tokens"] = row["truncate"]
    if row["kept"] == "error":
        wrong = "truncation_side" if row["side"] == "middle" else "truncate_prompt_tokens"
        wrong = "max_tokens" if row["output"] == 101 else wrong
        assert refused(server, body, model).startswith(f"{wrong}: ")
    elif row["kept"] == [0, 0]:
        assert refused(server, body, model).startswith("text_input: the prompt has no tokens")
    elif row["output"] and row["kept"][1] - row["kept"][0] == CONTEXT:
        # As many as were asked for are kept; that leaves no room for an answer.
        assert "leaves no room for output" in refused(server, body, model)
    else:
        assert ok(server, body, model)["ECHO_INPUT_IDS"] == list(range(*row["kept"]))


@both
def test_p14_and_p15(server: TritonServer, model: str) -> None:
    for name in ("P14", "P15"):
        row = next(r.values[0] for r in rows("paddings") if r.id == name)
        body = {"input_ids": row["ids"], "task": "embed", "padding": str(row["context"])}
        body["truncate_prompt_tokens"] = row["truncate"]
        if row["side"] is not None:
            body["truncation_side"] = row["side"]
        want = [PAD if i == 99 else i for i in row["result"]]
        answer = ok(server, body, model)
        assert answer["ECHO_INPUT_IDS"] == want
        assert sum(answer["ECHO_ATTENTION_MASK"]) == row["truncate"]


@both
@pytest.mark.parametrize("off", ["false", "False", "do_not_truncate"])
def test_false_switches_a_default_off(server: TritonServer, model: str, off: str) -> None:
    body = {"input_ids": list(range(CONTEXT + 20)), "task": "embed"}
    # The server cuts what is too long, on the tokenizer's side, unless a request says no.
    assert ok(server, body, model)["ECHO_INPUT_IDS"] == body["input_ids"][-CONTEXT:]
    assert "the prompt is too long" in refused(server, body | {"truncation": off}, model)


@both
def test_defaults_of_the_server_hold_for_every_field(server: TritonServer, model: str) -> None:
    body = {"text_input": "Hello", "max_tokens": 4}
    sampling = json.loads(ok(server, body, model)["ECHO_SAMPLING"])
    assert (sampling["temperature"], sampling["seed"]) == (0.5, 7)
    assert sampling["stop_words"] == ["halt"]
    # Under its other name the seed is the same field.
    for name in ("seed", "random_seed"):
        wished = body | {"temperature": 0.25, name: 8, "stop_words": ["now"]}
        sampling = json.loads(ok(server, wished, model)["ECHO_SAMPLING"])
        assert (sampling["temperature"], sampling["seed"]) == (0.25, 8)
        assert sampling["stop_words"] == ["now"]
    assert ok(server, body, model)["text_output"] == " Hello"
    shown = ok(server, body | {"exclude_input_in_output": False}, model)
    assert shown["text_output"] == "Hello Hello"


@both
def test_a_server_that_trusts_no_options_of_requests(server: TritonServer, model: str) -> None:
    body = chat("Hello", picture()) | {"mm_processor_kwargs": '{"size": {"longest_edge": 99}}'}
    assert refused(server, body, model).startswith("mm_processor_kwargs: is not allowed")
    where = "messages[0].content[1].image_url: processor options are not allowed"
    assert refused(server, chat("Hello", picture(max_pixels=99)), model).startswith(where)
    ids = ok(server, chat("Hello", picture(detail="low")), model)["ECHO_INPUT_IDS"]
    assert ids.count(PLACEHOLDER) == 64


@both
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1/x.png", "names an address that is not public"),
        ("http://localhost/x.png", "names an address that is not public"),
        ("http://169.254.169.254/latest", "names an address that is not public"),
        ("http://[::ffff:10.0.0.1]/x.png", "names an address that is not public"),
        ("http://[64:ff9b::127.0.0.1]/x.png", "names an address that is not public"),
        ("http://[2002:7f00:1::]/x.png", "names an address that is not public"),
        ("file:///etc/hostname", "names a local file, which is not allowed"),
        ("/etc/hostname", "has a scheme that is not allowed"),
        ("ftp://example.org/x.png", "has a scheme that is not allowed"),
        ("data:image/png;base64,!", "is not valid base64"),
        ("data:image/png;base64,AAAA", "is not a readable image"),
        # Whole images, in formats whose decoders are not used.
        (drawn("TIFF"), "is not a readable image"),
        (drawn("EPS"), "is not a readable image"),
    ],
    ids=lambda value: value[:40],
)
def test_media_that_are_not_fetched(
    server: TritonServer, model: str, url: str, message: str
) -> None:
    for body in (
        {"text_input": "Hello", "image_url_input": [url]},
        {"content_parts": json.dumps([{"type": "image_url", "image_url": url}])},
        chat({"type": "image_url", "image_url": {"url": url}}),
    ):
        error = refused(server, body, model)
        field, _, what = error.partition(": ")
        assert what.startswith(message), error
        assert field.split("[")[0] in body


@both
# More than the decoder itself would take, and more than this server takes.
@pytest.mark.parametrize("size", [(20000, 20000), (8500, 8500)])
def test_a_bomb_and_too_many_items(server: TritonServer, model: str, size: tuple[int, int]) -> None:
    bomb = io.BytesIO()
    Image.new("1", size).save(bomb, "PNG")
    url = "data:image/png;base64," + base64.b64encode(bomb.getvalue()).decode()
    assert len(url) < 100_000
    one = {"type": "image_url", "image_url": url}
    assert "has too many pixels" in refused(server, chat(one), model)
    several = chat(*[picture()] * 65)
    assert refused(server, several, model).startswith("image_url: too many items")
