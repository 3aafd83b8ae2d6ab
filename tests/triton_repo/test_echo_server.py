"""Front-end behaviour through a real tritonserver: BLS and ensemble, HTTP and gRPC."""

from __future__ import annotations

import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import soundfile
import tritonclient.grpc as grpcclient
from PIL import Image

from tests.triton_repo.clients import (
    Stream,
    generate,
    generate_stream,
    grpc_stream,
    metric,
    ok,
    refused,
    row_inputs,
    text_of,
    wait_for,
)
from tests.triton_repo.tables import rows
from triton_repo.frontend.salt import cache_salt_id
from triton_repo.server import TritonServer

MODELS = ("tensorrt_llm_bls", "ensemble")
both = pytest.mark.parametrize("model", MODELS)


def echo_ids(answer: dict[str, Any]) -> list[int]:
    """ECHO_INPUT_IDS; the generate endpoint unwraps a list of one."""
    ids = answer["ECHO_INPUT_IDS"]
    return ids if isinstance(ids, list) else [ids]


def pairs(flat: list[int]) -> list[list[int]]:
    return [list(p) for p in zip(flat[::2], flat[1::2], strict=True)]


@both
@pytest.mark.parametrize("row", rows("salts"))
def test_salt_ids(echo_server: TritonServer, model: str, row: dict[str, Any]) -> None:
    answer = ok(echo_server, {"text_input": "x", "cache_salt": row["salt"]}, model)
    assert answer["ECHO_CACHE_SALT_ID"] == row["salt_id"]


def test_tensors_that_requests_share_are_not_mixed_up(echo_server: TritonServer) -> None:
    # More sets of options than are remembered, from several clients at once.
    url = f"{echo_server.http_url}/v2/models/preprocessing/generate"
    wrong: list[Any] = []

    def client(first: int) -> None:
        with requests.Session() as session:
            for number in range(first, first + 120):
                end, salt = number % 50, rows("salts")[number % len(rows("salts"))].values[0]
                body = {
                    "QUERY": f"text {number}",
                    "REQUEST_OUTPUT_LEN": 4,
                    "END_ID": end,
                    "STOP_WORDS_DICT": [chr(33 + end)],
                    "cache_salt": salt["salt"],
                }
                answer = session.post(url, json=body, timeout=20).json()
                right = {
                    "INPUT_ID": list(f"text {number}".encode()),
                    "OUT_END_ID": end,
                    "STOP_WORDS_IDS": [33 + end, 1],
                    "CACHE_SALT_ID": salt["salt_id"],
                    "OUT_PAD_ID": 257,
                }
                found = {name: answer.get(name) for name in right}
                state = json.loads(answer.get("REQUEST_STATE", "{}"))
                if found != right or state["text"]["stop_words"] != [chr(33 + end)]:
                    wrong.append((found, right, state))

    threads = [threading.Thread(target=client, args=(37 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:2]


@both
def test_s6_s7_s8_no_salt_is_no_tensor(echo_server: TritonServer, model: str) -> None:
    assert "ECHO_CACHE_SALT_ID" not in ok(echo_server, {"text_input": "x"}, model)
    for salt in ("", "a/b", "a@b", "a\\b", "a\0b", "x" * 129):
        message = refused(echo_server, {"text_input": "x", "cache_salt": salt}, model)
        assert message.startswith("cache_salt: ")


@both
@pytest.mark.parametrize("row", rows("block_keys"))
def test_block_keys(echo_server: TritonServer, model: str, row: dict[str, Any]) -> None:
    body: dict[str, Any] = {"input_ids": list(range(12))}
    if row["salt"] is not None:
        body["cache_salt"] = row["salt"]
    assert ok(echo_server, body, model)["ECHO_BLOCK_KEYS"] == row["keys"]
    # The last block is not full any more, and has no key; the others do not depend on it.
    shorter = ok(echo_server, body | {"input_ids": list(range(11))}, model)
    assert shorter["ECHO_BLOCK_KEYS"] == row["keys"][:2]


@both
def test_s9_s10_s11_salts_isolate_the_prefix_cache(echo_server: TritonServer, model: str) -> None:
    def reused(salt: str | None) -> int:
        body = {"text_input": f"{model} isolation 0123456789ab"}
        if salt is not None:
            body["cache_salt"] = salt
        return int(ok(echo_server, body, model)["kv_cache_reused_blocks"])

    assert reused("a") == 0
    assert reused("a") > 0
    assert reused("b") == 0
    assert reused(None) == 0
    assert reused(None) > 0


def picture(form: str, size: tuple[int, int] = (64, 64), color: int = 0, frames: int = 1) -> str:
    """A data URI of an image, or of frames that differ."""
    buffer = io.BytesIO()
    first, *rest = (Image.new("RGB", size, (color + i, 0, 0)) for i in range(frames))
    first.save(buffer, form, **({"save_all": True, "append_images": rest} if rest else {}))
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/{form.lower()};base64,{data}"


IMAGE = picture("PNG")
PATHS: dict[str, dict[str, Any]] = {
    "S1-text": {"text_input": "hi"},
    "S2-ids": {"input_ids": [104, 105]},
    "S3-messages": {"messages": '[{"role": "user", "content": "hi"}]'},
    "S3-parts": {"content_parts": '["hi"]'},
    "S4-image": {"content_parts": json.dumps(["hi", {"type": "image_url", "image_url": IMAGE}])},
    "S5-features": {
        "input_ids": [1, 258, 2],
        "mm_features": '[{"modality": "image", "offset": 1, "length": 1, "key": 7}]',
    },
    "S12-embed": {"text_input": "hi", "task": "embed"},
}


@both
@pytest.mark.parametrize("path", PATHS)
def test_the_salt_reaches_generation_on_every_path(
    echo_server: TritonServer, model: str, path: str
) -> None:
    body = PATHS[path] | {"cache_salt": "tenant-a"}
    answer = ok(echo_server, body, model)
    assert answer["ECHO_CACHE_SALT_ID"] == 15947361407820284973
    assert len(json.loads(answer["ECHO_MEDIA"])) == (path in ("S4-image", "S5-features"))
    # None is no tensor, on no path; an empty one is refused on each.
    assert "ECHO_CACHE_SALT_ID" not in ok(echo_server, PATHS[path], model)
    for bad in ("", "tenant/a"):
        message = refused(echo_server, PATHS[path] | {"cache_salt": bad}, model)
        assert message.startswith("cache_salt: ") and "tenant" not in message
    several = PATHS[path] | {"cache_salt": "tenant-a", "num_return_sequences": 2}
    for event in generate_stream(echo_server, several, model):
        assert event.get("ECHO_CACHE_SALT_ID", 15947361407820284973) == 15947361407820284973
    events = list(generate_stream(echo_server, body, model))
    assert events[0]["ECHO_CACHE_SALT_ID"] == 15947361407820284973


@both
@pytest.mark.parametrize(
    "row",
    # The rows that hold for one id per byte and the server's own context.
    [r for r in rows("truncations") if not r.values[0]["special"]
     and r.values[0]["truncate"] not in (None, -1, 0)],
)  # fmt: skip
def test_truncation(echo_server: TritonServer, model: str, row: dict[str, Any]) -> None:
    answer = ok(
        echo_server,
        {
            "text_input": row["text"],
            "truncate_prompt_tokens": row["truncate"],
            "truncation_side": row["side"],
            "return_token_offsets": True,
        },
        model,
    )
    assert bytes(echo_ids(answer)).decode() == row["kept"]
    assert pairs(answer["ECHO_PROMPT_TOKEN_OFFSETS"]) == row["offsets"]
    assert pairs(answer["PROMPT_TOKEN_OFFSETS"]) == row["offsets"]


@both
@pytest.mark.parametrize(
    "row", [r for r in rows("truncation_slices") if r.values[0]["tokenizer_side"] == "right"]
)
def test_truncation_of_ids(echo_server: TritonServer, model: str, row: dict[str, Any]) -> None:
    body: dict[str, Any] = {"input_ids": list(range(row["length"])), "task": "embed"}
    if row["truncate"] is not None:
        body["truncate_prompt_tokens"] = row["truncate"]
    if row["side"] is not None:
        body["truncation_side"] = row["side"]
    assert echo_ids(ok(echo_server, body, model)) == list(range(*row["kept"]))


@both
@pytest.mark.parametrize("text", ["abcdef", ""])
def test_t3_nothing_is_left_of_a_prompt(echo_server: TritonServer, model: str, text: str) -> None:
    # T3: a request for no tokens is refused, never a silent success.
    body = {"text_input": text, "truncate_prompt_tokens": 0, "truncation_side": "left"}
    for more in ({}, {"task": "embed"}, {"padding": "8", "task": "embed"}):
        message = refused(echo_server, body | more, model)
        assert message.startswith("text_input: the prompt has no tokens")


@both
@pytest.mark.parametrize("path", PATHS)
def test_a5_20_one_kind_of_truncation_on_every_path(
    echo_server: TritonServer, model: str, path: str
) -> None:
    whole = echo_ids(ok(echo_server, PATHS[path], model))
    open_end = PATHS[path] | {"truncate_prompt_tokens": -1}
    assert echo_ids(ok(echo_server, open_end, model)) == whole
    for wrong, name in (
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 4097}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
    ):
        assert refused(echo_server, PATHS[path] | wrong, model).startswith(f"{name}: ")
    # The ids that preprocessing alone counts are those that are served.
    names = {"text_input": "QUERY"}
    body = {names.get(k, k): v for k, v in PATHS[path].items()} | {"REQUEST_OUTPUT_LEN": 4}
    url = f"{echo_server.http_url}/v2/models/preprocessing/generate"
    counted = requests.post(url, json=body, timeout=20).json()
    assert (counted["INPUT_ID"], counted["REQUEST_INPUT_LEN"]) == (whole, len(whole))


@both
def test_rows_of_a_batch_are_cut_each_by_itself(echo_server: TritonServer, model: str) -> None:
    body = {
        "text_input": ["abcdef", "xy", "é12"], "max_tokens": [9] * 3,
        "truncate_prompt_tokens": [3] * 3, "truncation_side": ["left"] * 3,
        "return_token_offsets": [True] * 3, "return_num_input_tokens": [True] * 3,
        "exclude_input_in_output": [True] * 3,
    }  # fmt: skip
    (result,) = ask_rows(echo_server, model, body)
    ids, offsets = result.as_numpy("ECHO_INPUT_IDS"), result.as_numpy("PROMPT_TOKEN_OFFSETS")
    lengths = result.as_numpy("num_input_tokens").reshape(-1).tolist()
    assert lengths == [3, 2, 3]
    kept = [row[:n] for row, n in zip(ids.tolist(), lengths, strict=True)]
    assert kept == [list(b"def"), list(b"xy"), list("é12".encode())[-3:]]
    assert offsets.tolist() == [
        [[3, 4], [4, 5], [5, 6]], [[0, 1], [1, 2], [0, 0]], [[0, 1], [1, 2], [2, 3]],
    ]  # fmt: skip


@both
@pytest.mark.parametrize(
    "name", ["stream", "exclude_input_in_output", "return_log_probs", "return_num_output_tokens"]
)
def test_rows_that_want_other_answers(echo_server: TritonServer, model: str, name: str) -> None:
    body = {"text_input": ["a", "b"], "max_tokens": [4, 4], name: [True, False]}
    with pytest.raises(grpcclient.InferenceServerException) as caught:
        ask_rows(echo_server, model, body)
    assert f"{name}: must be the same in all rows" in str(caught.value.message())


@both
def test_streams_of_several_rows_and_sequences(echo_server: TritonServer, model: str) -> None:
    texts = ["é1", "two!"]
    body = {
        "text_input": ["p"] * 2, "max_tokens": [9] * 2, "stream": [True] * 2,
        "num_return_sequences": [2] * 2, "return_log_probs": [True] * 2,
        "return_num_output_tokens": [True] * 2, "end_id": [-1] * 2,
        "echo_output_ids": [[*texts[0].encode(), 256], list(texts[1].encode())],
    }  # fmt: skip
    found: dict[tuple[int, int], list[Any]] = {}
    for result in ask_rows(echo_server, model, body):
        place = tuple(int(result.as_numpy(f"{n}_index").item()) for n in ("batch", "sequence"))
        found.setdefault(place, []).append(result)
    assert sorted(found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for (row, _), results in found.items():
        assert text_of(results) == texts[row]
        ids = [i for r in results for i in r.as_numpy("output_ids").reshape(-1).tolist()]
        assert ids == body["echo_output_ids"][row]
        # Each id comes with its own log-probability, however text holds it back.
        logs = [p for r in results for p in r.as_numpy("output_log_probs").reshape(-1).tolist()]
        assert logs == [-n / 8 for n in range(1, len(ids) + 1)]
        for r in results:
            assert r.as_numpy("output_ids").size == r.as_numpy("output_log_probs").size
        last = results[-1]
        assert last.as_numpy("finish_reason").item() == b"stop"
        assert last.as_numpy("num_output_tokens").item() == len(ids)
        assert last.as_numpy("cum_log_probs").item() == pytest.approx(sum(logs))
        assert not any(r.as_numpy("finish_reason") is not None for r in results[:-1])
    # One row of one sequence has neither index.
    with grpc_stream(echo_server, {"text_input": "x", "stream": True}, model) as stream:
        for result in stream.collect():
            assert result.as_numpy("batch_index") is result.as_numpy("sequence_index") is None


@both
def test_truncate_then_pad(echo_server: TritonServer, model: str) -> None:
    body = {
        "input_ids": list(range(1, 11)), "truncate_prompt_tokens": 3, "truncation_side": "left",
        "padding": "max_length", "max_length": 6, "task": "embed",
    }  # fmt: skip
    answer = ok(echo_server, body, model)
    assert answer["ECHO_INPUT_IDS"] == [8, 9, 10, 257, 257, 257]
    assert answer["ECHO_ATTENTION_MASK"] == [1, 1, 1, 0, 0, 0]
    # The vector is that of the tokens alone.
    bare = ok(echo_server, {"input_ids": [8, 9, 10], "task": "embed"}, model)
    assert answer["embedding"] == bare["embedding"]
    other = ok(echo_server, {"input_ids": [8, 9], "task": "embed"}, model)
    assert answer["embedding"] != other["embedding"]


@both
@pytest.mark.parametrize(
    "row", [r for r in rows("views") if r.values[0]["modality"] in ("image", "video", "audio")]
)
def test_views(echo_server: TritonServer, model: str, row: dict[str, Any]) -> None:
    body = {"text_input": "x", "mm_processor_kwargs": json.dumps(row["kwargs"])}
    seen = json.loads(ok(echo_server, body, model)["ECHO_MM_VIEWS"])[row["modality"]]
    if row["same"]:
        assert seen == row["kwargs"]
    for key, value in row["expect"].items():
        assert seen[key] == value
    assert not set(row["absent"]) & seen.keys()


@both
@pytest.mark.parametrize("row", rows("detokeniser"))
def test_streamed_text(echo_server: TritonServer, model: str, row: dict[str, Any]) -> None:
    body: dict[str, Any] = {"echo_output_ids": row["bytes"]}
    body |= {"input_ids": row["prompt"]} if "prompt" in row else {"text_input": "Say: "}
    body["end_id"] = -1
    want = "".join(e or "" for e in row["emitted"]) + row["tail"]
    events = list(generate_stream(echo_server, body, model))
    assert "".join(e["text_output"] for e in events) == want
    # Step by step what the table says; what is left at the end goes with the last step.
    steps = [*row["emitted"][:-1], (row["emitted"][-1] or "") + row["tail"]]
    assert [e["text_output"] for e in events if e["text_output"]] == [s for s in steps if s]
    assert [e.get("finish_reason") for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["finish_reason"] == "stop"
    whole = ok(echo_server, body | {"exclude_input_in_output": True, "max_tokens": 64}, model)
    assert whole["text_output"] == want


@both
def test_a5_6_a5_7_a5_10_stop_words(echo_server: TritonServer, model: str) -> None:
    body = {
        "text_input": "x", "echo_output_ids": list(b"abcSTOPdef"), "stop_words": ["STOP", "zz"],
        "exclude_input_in_output": True, "return_log_probs": True,
    }  # fmt: skip
    answer = ok(echo_server, body, model)
    assert answer["text_output"] == "abc"
    assert answer["output_log_probs"] == [-n / 8 for n in range(1, 8)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "STOP")
    assert answer["output_ids"] == list(b"abcSTOP")
    kept = ok(echo_server, body | {"include_stop_str_in_output": True}, model)
    assert kept["text_output"] == "abcSTOP"
    events = list(generate_stream(echo_server, body, model))
    assert "".join(e["text_output"] for e in events) == "abc"
    released = body | {"echo_output_ids": list(b"abcSTO")}
    assert ok(echo_server, released, model)["text_output"] == "abcSTO"
    sampling = json.loads(answer["ECHO_SAMPLING"])
    assert sampling["stop_words_ids"] == [list(b"STOP"), list(b"zz")]


@both
def test_a5_8_a_stop_word_of_the_prompt_stops_nothing(
    echo_server: TritonServer, model: str
) -> None:
    body = {"text_input": "STOP and ST", "stop_words": ["STOP"], "max_tokens": 64}
    # Nor one that begins in the prompt.
    answer = ok(echo_server, body | {"echo_output_ids": list(b"OP goes on")}, model)
    assert answer["text_output"] == "STOP and STOP goes on"
    assert "stop_reason" not in answer
    both_times = ok(echo_server, body | {"echo_output_ids": list(b"OP STOP goes")}, model)
    assert both_times["text_output"] == "STOP and STOP "


@pytest.mark.parametrize("stops", [["STOP", "END"], ["END", "STOP"]])
def test_a5_9_two_stop_words_in_one_step(echo_server: TritonServer, stops: list[str]) -> None:
    # Postprocessing gets all ids at once, as from a generation model that makes several a step.
    state = {"context": [], "text": {"stop_words": stops}}
    inputs = [
        {"name": "TOKENS_BATCH", "datatype": "INT32", "shape": [1, 1, 12],
         "data": list(b"abSTOPdeENDf")},
        {"name": "SEQUENCE_LENGTH", "datatype": "INT32", "shape": [1, 1], "data": [12]},
        {"name": "FINISH_REASON", "datatype": "BYTES", "shape": [1, 1], "data": ["length"]},
        {"name": "STREAM_STATE", "datatype": "BYTES", "shape": [1, 1], "data": [json.dumps(state)]},
    ]  # fmt: skip
    url = f"{echo_server.http_url}/v2/models/postprocessing/infer"
    answer = requests.post(url, json={"inputs": inputs}, timeout=20).json()
    out = {o["name"]: o["data"] for o in answer["outputs"]}
    assert (out["OUTPUT"], out["STOP_REASON"]) == (["ab"], ["STOP"])
    assert out["OUTPUT_IDS"] == list(b"abSTOP")


def test_a5_22_responses_of_a_stream_come_in_order(echo_server: TritonServer) -> None:
    def ask(key: str, number: int) -> tuple[int, dict[str, Any]]:
        values = {
            "TOKENS_BATCH": ("INT32", [1, 1, 1], [97]), "SEQUENCE_LENGTH": ("INT32", [1, 1], [1]),
            "STREAM_STATE": ("BYTES", [1, 1], [json.dumps({"key": key, "number": number})]),
        }  # fmt: skip
        inputs = [
            {"name": n, "datatype": kind, "shape": shape, "data": data}
            for n, (kind, shape, data) in values.items()
        ]
        url = f"{echo_server.http_url}/v2/models/postprocessing/infer"
        answer = requests.post(url, json={"inputs": inputs}, timeout=20)
        return answer.status_code, answer.json()

    assert [ask("in order", n)[0] for n in (0, 1, 2)] == [200, 200, 200]
    assert ask("a gap", 0)[0] == 200
    status, answer = ask("a gap", 2)
    assert status == 400 and "responses of a stream came out of order" in answer["error"]
    # What came in the wrong order is not gone on with.
    assert ask("a gap", 1)[0] == 400


@both
def test_a5_12_a5_13_bad_words_reach_generation(echo_server: TritonServer, model: str) -> None:
    answer = ok(echo_server, {"text_input": "x", "bad_words": ["ab"]}, model)
    sampling = json.loads(answer["ECHO_SAMPLING"])
    assert sampling["bad_words_ids"] == [list(b"ab"), list(b" ab")]
    assert refused(echo_server, {"text_input": "x", "bad_words": [" "]}, model).startswith(
        "bad_words: "
    )


@both
def test_a5_23_seeds_and_sampling_reach_generation(echo_server: TritonServer, model: str) -> None:
    given = {
        "temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 2**64 - 1, "min_tokens": 2,
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
    }  # fmt: skip
    answer = ok(echo_server, {"text_input": "x"} | given, model)
    sampling = json.loads(answer["ECHO_SAMPLING"])
    assert {k: sampling[k] for k in given} == given
    assert sampling["end_ids"] == [256]
    aliased = ok(echo_server, {"text_input": "x", "random_seed": 7}, model)
    assert json.loads(aliased["ECHO_SAMPLING"])["seed"] == 7
    unset = {"top_p": 0.0, "top_k": 0, "num_return_sequences": 0, "beam_width": 0}
    sampling = json.loads(ok(echo_server, {"text_input": "x"} | unset, model)["ECHO_SAMPLING"])
    assert not {"top_p", "top_k"} & sampling.keys()
    assert sampling["num_return_sequences"] == 1


@both
def test_a5_21_prompt_in_the_answer(echo_server: TritonServer, model: str) -> None:
    body = {"text_input": "prompt ", "echo_output_ids": list(b"answer")}
    assert ok(echo_server, body, model)["text_output"] == "prompt answer"
    without = ok(echo_server, body | {"exclude_input_in_output": True}, model)
    assert without["text_output"] == "answer"
    # The echoed prompt is what was used, not what was sent.
    cut = body | {"truncate_prompt_tokens": 3, "truncation_side": "left"}
    assert ok(echo_server, cut, model)["text_output"] == "pt answer"
    events = list(generate_stream(echo_server, body, model))
    assert "".join(e["text_output"] for e in events) == "answer"


@both
def test_a5_24_end_id_ends(echo_server: TritonServer, model: str) -> None:
    body = {
        "text_input": "x", "echo_output_ids": [97, 256, 98], "exclude_input_in_output": True,
    }  # fmt: skip
    assert ok(echo_server, body, model)["text_output"] == "a"
    assert ok(echo_server, body | {"end_id": -1}, model)["text_output"] == "ab"
    assert ok(echo_server, body | {"end_id": 97}, model)["text_output"] == ""


@both
def test_length_and_usage(echo_server: TritonServer, model: str) -> None:
    body = {
        "text_input": "four", "max_tokens": 2, "echo_output_ids": list(b"abcdef"),
        "return_num_input_tokens": True, "return_num_output_tokens": True,
        "return_log_probs": True, "return_perf_metrics": True,
    }  # fmt: skip
    answer = ok(echo_server, body, model)
    assert answer["finish_reason"] == "length"
    assert (answer["num_input_tokens"], answer["num_output_tokens"]) == (4, 2)
    assert answer["output_log_probs"] == [-0.125, -0.25]
    assert answer["cum_log_probs"] == -0.375
    assert answer["last_token_time_ns"] >= answer["arrival_time_ns"] > 0


@both
def test_several_sequences(echo_server: TritonServer, model: str) -> None:
    body = {
        "text_input": "x", "num_return_sequences": 3, "echo_output_ids": list(b"ab"), "seed": 5,
        "exclude_input_in_output": True,
    }  # fmt: skip
    assert ok(echo_server, body, model)["text_output"] == ["ab", "ab", "ab"]
    texts: dict[int, str] = {}
    for event in generate_stream(echo_server, body, model):
        index = event["sequence_index"]
        texts[index] = texts.get(index, "") + event["text_output"]
    assert texts == {0: "ab", 1: "ab", 2: "ab"}


def ask_rows(server: TritonServer, model: str, body: dict[str, list[Any]]) -> list[Any]:
    """The responses to a request of several rows."""
    stream = Stream()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: stream.events.put((result, error)))
        inputs = row_inputs(body)
        client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        try:
            return stream.collect()
        finally:
            client.stop_stream()


@both
def test_s13_a_batch_of_rows(echo_server: TritonServer, model: str) -> None:
    body = {
        "text_input": ["first", "2nd"], "max_tokens": [9] * 2, "cache_salt": ["a", "b"],
        "exclude_input_in_output": [True] * 2, "return_num_input_tokens": [True] * 2,
    }  # fmt: skip
    (result,) = ask_rows(echo_server, model, body)
    assert [bytes(t) for t in result.as_numpy("text_output").reshape(-1)] == [b"first", b"2nd"]
    salts = result.as_numpy("ECHO_CACHE_SALT_ID").reshape(-1).tolist()
    assert salts == [cache_salt_id("a"), cache_salt_id("b")]
    ids = result.as_numpy("ECHO_INPUT_IDS").tolist()
    assert (ids[0], ids[1][:3]) == (list(b"first"), list(b"2nd"))
    assert result.as_numpy("ECHO_ATTENTION_MASK").sum(axis=1).tolist() == [5, 3]
    assert result.as_numpy("num_input_tokens").reshape(-1).tolist() == [5, 3]


@both
def test_output_types_and_shapes(echo_server: TritonServer, model: str) -> None:
    body = {
        "text_input": "ab", "return_token_offsets": True, "cache_salt": "a",
        "return_log_probs": True, "return_num_output_tokens": True, "echo_output_ids": [97, 98],
    }  # fmt: skip
    with grpc_stream(echo_server, body, model) as stream:
        results = stream.collect()
    assert len(results) == 1
    want = {
        "text_output": ((1, 1), np.object_), "output_ids": ((1, 1, 2), np.int32),
        "finish_reason": ((1, 1), np.object_), "PROMPT_TOKEN_OFFSETS": ((1, 2, 2), np.int32),
        "ECHO_CACHE_SALT_ID": ((1, 1), np.uint64), "cum_log_probs": ((1, 1), np.float32),
        "output_log_probs": ((1, 1, 2), np.float32), "num_output_tokens": ((1, 1), np.int32),
    }  # fmt: skip
    for name, (shape, dtype) in want.items():
        array = results[0].as_numpy(name)
        assert (array.shape, array.dtype) == (shape, dtype), name


@both
def test_grpc_stream_has_one_final_response(echo_server: TritonServer, model: str) -> None:
    body = {"text_input": "x", "stream": True, "echo_output_ids": list("héllo 👋".encode())}
    with grpc_stream(echo_server, body, model) as stream:
        assert text_of(stream.collect()) == "héllo 👋"
    # The stream has ended: nothing comes any more.
    assert stream.events.empty()


@both
def test_s14_images_do_not_share_cache_blocks(echo_server: TritonServer, model: str) -> None:
    def ask(color: int) -> dict[str, Any]:
        parts = [
            {"type": "image_url", "image_url": {"url": picture("PNG", color=color)}},
            f"about {model}",
        ]
        return ok(echo_server, {"content_parts": json.dumps(parts), "cache_salt": model}, model)

    first, same, other = ask(1), ask(1), ask(2)
    assert echo_ids(first) == echo_ids(other)
    assert (first["kv_cache_reused_blocks"], other["kv_cache_reused_blocks"]) == (0, 0)
    assert same["kv_cache_reused_blocks"] > 0


@both
def test_media_come_by_url_by_data_uri_or_in_tensors(echo_server: TritonServer, model: str) -> None:
    sound = io.BytesIO()
    soundfile.write(sound, np.zeros(8000, np.float32), 16000, format="WAV")
    files = {
        "image": base64.b64decode(picture("PNG").partition(",")[2]),
        "video": base64.b64decode(picture("GIF", frames=4).partition(",")[2]),
        "audio": sound.getvalue(),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = files[self.path[1:]]
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    for modality, data in files.items():
        uri = f"data:x/y;base64,{base64.b64encode(data).decode()}"
        url = f"http://127.0.0.1:{web.server_port}/{modality}"
        tensor = f"{modality}_bytes" if modality == "audio" else f"{modality}_bytes_input"
        value = list(data) if modality == "audio" else [data]
        part = {"type": f"{modality}_url"}
        bodies: list[dict[str, Any]] = [
            {"content_parts": json.dumps([part | {f"{modality}_url": place}, "x"])}
            for place in (url, uri)
        ]
        bodies.append({"text_input": "x", tensor: value})
        found = []
        for body in bodies:
            with grpc_stream(echo_server, body | {"max_tokens": 1}, model) as stream:
                (result,) = stream.collect()
            found.append(json.loads(result.as_numpy("ECHO_MEDIA").item()))
        assert [(m["modality"], m["offset"]) for m in found[0]] == [(modality, 0)]
        assert found[0][0]["length"] > 1
        assert found[0] == found[1] == found[2]
    web.shutdown()
    web.server_close()


@both
@pytest.mark.parametrize(
    "prompt",
    [
        {"text_input": "x", "image_url_input": ["URL"]},
        {"content_parts": '[{"type": "image_url", "image_url": {"url": "URL"}}]'},
        {"content_parts": '[{"type": "image", "image": "URL"}]'},
        {"messages": '[{"role": "user", "content": [{"type": "image", "url": "URL"}]}]'},
        {"content_parts": r'[{"type": "image\u005furl", "url": "URL"}]'},
    ],
)
def test_a_slow_media_server_delays_nobody_else(
    echo_server: TritonServer, model: str, prompt: dict[str, Any]
) -> None:
    asked, release = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            release.wait(10)
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{web.server_port}/x.png"
    answers: list[tuple[int, Any]] = []
    body = json.loads(json.dumps(prompt).replace("URL", url)) | {"max_tokens": 4}
    slow = threading.Thread(target=lambda: answers.append(generate(echo_server, body, model)))
    slow.start()
    try:
        assert asked.wait(10)
        assert ok(echo_server, {"text_input": "quick"}, model)["finish_reason"] == "stop"
        assert slow.is_alive()
    finally:
        release.set()
        slow.join(15)
        web.shutdown()
    assert answers[0][0] == 400
    assert "image_url" in answers[0][1]["error"]


@both
@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"text_input": "x", "max_token": 3}, "max_token"),
        ({"text_input": "x", "random_sed": 3}, "random_sed"),
        ({"text_input": "x", "random_seed": 3, "seed": 4}, "random_seed"),
        ({"text_input": "x", "min_tokens": 17}, "min_tokens"),
        ({"input_ids": [-1]}, "input_ids"),
        (
            {"content_parts": '[{"type": "token_ids", "token_ids": [261]}]'},
            "content_parts[0].token_ids",
        ),
        ({"content_parts": json.dumps(["x" * 2100] * 2)}, "text_input"),
        (
            {"content_parts": json.dumps(["x" * 5000, {"type": "image_url", "image_url": IMAGE}])},
            "text_input",
        ),
        ({"text_input": "x" * 5000, "image_url_input": [IMAGE]}, "text_input"),
        ({"text_input": "x", "bad_words": ["a", " \t"]}, "bad_words"),
        ({"text_input": "x", "stop_words": ["x" * 1025]}, "stop_words"),
        (
            {
                "content_parts": json.dumps(
                    [
                        {
                            "type": "image_url",
                            "image_url": {
                                "url": IMAGE,
                                "min_pixels": 1 << 30,
                                "max_pixels": 1 << 30,
                            },
                        }
                    ]
                )
            },
            "content_parts[0].image_url",
        ),
        ({"text_input": "x", "image_url_input": [IMAGE] * 65}, "image_url"),
        ({"text_input": "x", "max_tokens": 2**31 - 1}, "max_tokens"),
        ({"text_input": "x", "max_tokens": 2**40}, "max_tokens"),
        ({"text_input": "x", "temperature": -1}, "temperature"),
        ({"text_input": "x", "beam_width": 4}, "beam_width"),
        ({"text_input": ""}, "text_input"),
        ({"input_ids": [261]}, "input_ids"),
        ({"messages": "{"}, "messages"),
        ({"text_input": "x", "echo_delay_ms": -1}, "echo_delay_ms"),
        ({"text_input": "x", "echo_output_ids": [97, -1]}, "echo_output_ids"),
        ({"text_input": "x", "echo_output_ids": [261]}, "echo_output_ids"),
        ({"text_input": "x" * 5000}, "text_input"),
        ({"text_input": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"text_input": "x", "truncate_prompt_tokens": 4097}, "truncate_prompt_tokens"),
        ({"text_input": "x", "truncation_side": "middle"}, "truncation_side"),
        ({"text_input": "x", "padding": "longest"}, "padding"),
        ({"text_input": "x", "truncation": "only_first"}, "truncation"),
        ({"text_input": "x", "enable_chunked_processing": True}, "enable_chunked_processing"),
    ],
)
def test_refusals(echo_server: TritonServer, model: str, body: dict[str, Any], name: str) -> None:
    assert refused(echo_server, body, model).startswith(f"{name}: ")


def test_ids_straight_to_generation(echo_server: TritonServer) -> None:
    def call(**more: Any) -> tuple[int, dict[str, Any]]:
        body = {"input_ids": [97, 98, 0], "input_lengths": 2, "request_output_len": 5}
        return generate(echo_server, body | more, "tensorrt_llm")

    status, answer = call()
    assert status == 200
    # The lengths trim the padding, and the prompt comes first.
    assert answer["output_ids"] == [97, 98, 97, 98]
    status, answer = call(exclude_input_in_output=True, echo_output_ids=[1, 256, 2])
    # Without an end id generation does not stop at the tokenizer's.
    assert answer["output_ids"] == [1, 256, 2]
    status, answer = call(exclude_input_in_output=True, echo_output_ids=[1, 256, 2], end_id=256)
    assert answer["output_ids"] == [1, 256]
    for bad in ({"input_lengths": 4}, {"input_lengths": 0}, {"request_output_len": 0},
                {"input_ids": [300, 1, 1]}):  # fmt: skip
        status, answer = call(**bad)
        assert status == 400 and answer["error"].startswith(f"{next(iter(bad))}: ")


@both
def test_custom_metrics_exist_and_count(echo_server: TritonServer, model: str) -> None:
    names = (
        "requests", "requests_failed", "prompt_tokens", "generated_tokens", "first_tokens",
        "time_to_first_token_us", "cache_reused_blocks",
    )  # fmt: skip

    def read() -> dict[str, float]:
        return {name: metric(echo_server, name) for name in names}

    body = {"text_input": f"counted by {model}", "echo_output_ids": [97, 98, 99]}
    ok(echo_server, body, model)
    before = read()
    reused = ok(echo_server, body, model)["kv_cache_reused_blocks"]
    after = read()
    grown = {name: after[name] - before[name] for name in names}
    assert grown.pop("time_to_first_token_us") > 0
    assert reused > 0 and grown == {
        "requests": 1, "requests_failed": 0, "prompt_tokens": len(body["text_input"]),
        "generated_tokens": 3, "first_tokens": 1, "cache_reused_blocks": reused,
    }  # fmt: skip
    refused(echo_server, body | {"echo_output_ids": [261]}, model)
    assert read()["requests_failed"] == after["requests_failed"] + 1
    with grpc_stream(
        echo_server, body | {"stream": True, "echo_delay_ms": 200}, model, cancel=True
    ) as stream:
        stream.next()
        # Others may still be on their way out.
        assert wait_for(lambda: metric(echo_server, "requests_active") == 1, 5)


def test_a_salt_is_nowhere_to_be_read(echo_server: TritonServer) -> None:
    for model in MODELS:
        for salt in ("a-salt-nobody-may-read", "a-salt-nobody-may-read/"):
            for more in ({}, {"top_p": 2.0}, {"task": "embed"}):
                body = {"text_input": "x", "max_tokens": 4, "cache_salt": salt} | more
                _, answer = generate(echo_server, body, model)
                assert "nobody-may-read" not in json.dumps(answer)
    assert "nobody-may-read" not in echo_server.log_text()
    # The log is the right one.
    assert "tensorrt_llm_bls" in echo_server.log_text()


def test_t11_arrays_of_the_client_have_one_entry_per_id(echo_server: TritonServer) -> None:
    body: dict[str, Any] = {
        "input_ids": [97, 98, 99, 0], "input_lengths": 3, "request_output_len": 4,
        "prompt_token_offsets": [[0, 1], [1, 2], [2, 3], [0, 0]], "attention_mask": [1, 1, 1, 0],
    }  # fmt: skip
    with grpc_stream(echo_server, body, "tensorrt_llm") as stream:
        (result,) = stream.collect()
    assert result.as_numpy("ECHO_PROMPT_TOKEN_OFFSETS").tolist() == [body["prompt_token_offsets"]]
    assert result.as_numpy("ECHO_ATTENTION_MASK").tolist() == [body["attention_mask"]]
    # T11: cut by its own length, a shorter one would be misaligned without a sign.
    for name in ("prompt_token_offsets", "attention_mask"):
        shorter = body | {name: body[name][:3]}
        with (
            grpc_stream(echo_server, shorter, "tensorrt_llm") as stream,
            pytest.raises(grpcclient.InferenceServerException) as caught,
        ):
            stream.next()
        assert f"{name}: does not have one entry per prompt token" in str(caught.value.message())


def test_models_cannot_be_unloaded_by_clients(echo_server: TritonServer) -> None:
    url = f"{echo_server.http_url}/v2/repository/models/ensemble/unload"
    assert requests.post(url, json={}, timeout=5).status_code in (400, 403)
    assert ok(echo_server, {"text_input": "x"}, "ensemble")


@both
@pytest.mark.parametrize("row", rows("media_truncations"))
def test_a5_18_truncation_keeps_media_whole(
    echo_server: TritonServer, model: str, row: dict[str, Any]
) -> None:
    offset, length = row["span"]
    ids = list(range(row["length"]))
    ids[offset : offset + length] = [258] * length
    feature = {"modality": "image", "offset": offset, "length": length, "key": 2**64 - 1}
    body = {
        "input_ids": ids, "mm_features": json.dumps([feature]), "max_tokens": 1,
        "truncate_prompt_tokens": row["limit"], "truncation_side": row["side"],
    }  # fmt: skip
    if row["result"] == "error":
        assert refused(echo_server, body, model).startswith("truncate_prompt_tokens: ")
        return
    kept, place = row["result"]
    answer = ok(echo_server, body, model)
    assert echo_ids(answer) == (ids[-kept:] if row["side"] == "left" else ids[:kept])
    assert json.loads(answer["ECHO_MEDIA"]) == [feature | {"offset": place}]


@both
def test_local_files_only_below_their_root(
    echo_server: TritonServer, echo_repository: Path, model: str
) -> None:
    image = Image.new("RGB", (32, 32))
    inside, outside = echo_repository.parent / "media" / "a.png", echo_repository.parent / "b.png"
    image.save(inside)
    image.save(outside)
    (inside.parent / "link.png").unlink(missing_ok=True)
    (inside.parent / "link.png").symlink_to(outside)

    def body(path: object) -> dict[str, Any]:
        return {"text_input": "x", "image_url_input": [f"file://{path}"], "max_tokens": 1}

    media = json.loads(ok(echo_server, body(inside), model)["ECHO_MEDIA"])
    assert [span["modality"] for span in media] == ["image"]
    for path in (
        outside,
        inside.parent / "link.png",
        inside.parent / ".." / "b.png",
        inside.parent,
    ):
        assert refused(echo_server, body(path), model).startswith("image_url_input: ")


@both
def test_a5_25_a5_26_options_of_one_modality_do_not_reach_the_other(
    echo_server: TritonServer, model: str
) -> None:
    image, video = picture("PNG", (512, 512)), picture("GIF", (256, 256), frames=4)
    parts = [
        {"type": "image_url", "image_url": image},
        {"type": "video_url", "video_url": video},
    ]

    def lengths(kwargs: dict[str, Any]) -> list[int]:
        body = {"content_parts": json.dumps(parts), "mm_processor_kwargs": json.dumps(kwargs)}
        answer = ok(echo_server, body, model)
        spans = json.loads(answer["ECHO_MEDIA"])
        assert [span["modality"] for span in spans] == ["image", "video"]
        # What was counted is what stands in the prompt.
        assert [echo_ids(answer).count(i) for i in (258, 259)] == [s["length"] for s in spans]
        return [span["length"] for span in spans]

    tight = {"size": {"longest_edge": 16384, "shortest_edge": 1024}}
    plain = lengths({})
    assert plain == [256, 128]
    # A5.25, A5.26: the keys of cached media change with their own options, and with no others.
    keys_of = {}
    for name, kwargs in (
        ("plain", {}),
        ("video", {"videos_kwargs": {"fps": 4}}),
        ("image", {"images_kwargs": {"x": 1}}),
    ):
        body = {"content_parts": json.dumps(parts), "mm_processor_kwargs": json.dumps(kwargs)}
        spans = json.loads(ok(echo_server, body, model)["ECHO_MEDIA"])
        keys_of[name] = [span["key"] for span in spans]
    assert keys_of["video"][0] == keys_of["plain"][0] != keys_of["image"][0]
    assert keys_of["image"][1] == keys_of["plain"][1] != keys_of["video"][1]
    # An item may have options of its own, for itself only.
    small = [{"type": "image_url", "image_url": {"url": image} | tight_item} for tight_item in
             ({"max_pixels": 16384, "min_pixels": 1024}, {})]  # fmt: skip
    spans = json.loads(ok(echo_server, {"content_parts": json.dumps(small)}, model)["ECHO_MEDIA"])
    assert (spans[0]["length"], spans[1]["length"]) == (16, plain[0])
    assert spans[0]["key"] != spans[1]["key"] == keys_of["plain"][0]
    image_only, video_only = lengths({"images_kwargs": tight}), lengths({"videos_kwargs": tight})
    assert image_only[0] <= 16 and image_only[1] == plain[1]
    assert video_only[0] == plain[0] and video_only[1] <= 8
    assert lengths(tight) == [image_only[0], video_only[1]]


@both
def test_t13_media_prompts_and_ids_have_no_offsets(echo_server: TritonServer, model: str) -> None:
    for path in ("S2-ids", "S3-parts", "S4-image", "S5-features"):
        answer = ok(echo_server, PATHS[path] | {"return_token_offsets": True}, model)
        assert not {"PROMPT_TOKEN_OFFSETS", "ECHO_PROMPT_TOKEN_OFFSETS"} & answer.keys()
    # The same wish with a text is heard.
    assert "PROMPT_TOKEN_OFFSETS" in ok(
        echo_server, PATHS["S1-text"] | {"return_token_offsets": True}, model
    )


def test_rows_are_filled_after_their_lengths_are_known(echo_server: TritonServer) -> None:
    inputs = [
        {"name": "QUERY", "datatype": "BYTES", "shape": [2, 1], "data": ["first", "2nd"]},
        {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": [2, 1], "data": [9, 9]},
        {"name": "return_token_offsets", "datatype": "BOOL", "shape": [2, 1], "data": [True, True]},
    ]
    url = f"{echo_server.http_url}/v2/models/preprocessing/infer"
    answer = requests.post(url, json={"inputs": inputs}, timeout=20).json()
    outputs = {o["name"]: o for o in answer["outputs"]}
    assert outputs["INPUT_ID"]["data"] == [*b"first", *b"2nd", 257, 257]
    assert outputs["REQUEST_INPUT_LEN"]["data"] == [5, 3]
    assert outputs["PROMPT_TOKEN_OFFSETS"]["shape"] == [2, 5, 2]
    assert pairs(outputs["PROMPT_TOKEN_OFFSETS"]["data"])[8:] == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        ({"STREAM_STATE": "{"}, "STREAM_STATE"),
        ({"STREAM_STATE": '{"context": [-1]}'}, "STREAM_STATE"),
        ({"STREAM_STATE": '{"text": {"tools": "[5]"}}'}, "STREAM_STATE"),
        ({"STREAM_STATE": '{"key": "nobody", "number": 3}'}, "STREAM_STATE"),
        ({"SEQUENCE_LENGTH": [2, 1]}, "SEQUENCE_LENGTH"),
        ({"SEQUENCE_LENGTH": 3}, "SEQUENCE_LENGTH"),
        ({"SEQUENCE_LENGTH": -1}, "SEQUENCE_LENGTH"),
        ({"TOKENS_BATCH": [104, -1]}, "TOKENS_BATCH"),
        ({"FINISH_REASON": ["stop", "stop"]}, "FINISH_REASON"),
    ],
)
def test_what_postprocessing_refuses(
    echo_server: TritonServer, tensors: dict[str, Any], name: str
) -> None:
    def ask(values: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        inputs = []
        for key, value in values.items():
            data = value if isinstance(value, list) else [value]
            kind = "INT32" if isinstance(data[0], int) else "BYTES"
            shape = [1, 1, len(data)] if key == "TOKENS_BATCH" else [1, len(data)]
            inputs.append({"name": key, "datatype": kind, "shape": shape, "data": data})
        url = f"{echo_server.http_url}/v2/models/postprocessing/infer"
        answer = requests.post(url, json={"inputs": inputs}, timeout=20)
        return answer.status_code, answer.json()

    right = {"TOKENS_BATCH": [104, 105], "SEQUENCE_LENGTH": 2, "STREAM_STATE": "{}"}
    without = {"TOKENS_BATCH": [104], "SEQUENCE_LENGTH": 1, "FINISH_REASON": "stop"}
    assert ask(without) == (400, {"error": "STREAM_STATE: is required"})
    status, answer = ask(right)
    assert status == 200
    assert [o["data"] for o in answer["outputs"] if o["name"] == "OUTPUT"] == [["hi"]]
    status, answer = ask(right | tensors)
    assert (status, answer["error"].partition(":")[0]) == (400, name)
