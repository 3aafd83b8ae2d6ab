"""Clients for tests: plain HTTP and gRPC streams against one server."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import requests
import tritonclient.grpc as grpcclient

from triton_repo.server import TritonServer
from triton_repo.tensor_io import NUMPY
from triton_repo.tensors import GENERATION_INPUTS, REQUEST

TIMEOUT_S = 20.0
_DTYPES = {t.name: t.dtype for t in (*GENERATION_INPUTS, *REQUEST)}


def generate(
    server: TritonServer, body: Mapping[str, Any], model: str = "tensorrt_llm_bls"
) -> tuple[int, dict[str, Any]]:
    """POST to /generate; returns status and JSON body."""
    answer = requests.post(
        f"{server.http_url}/v2/models/{model}/generate", json=body, timeout=TIMEOUT_S
    )
    return answer.status_code, answer.json()


def ok(
    server: TritonServer, body: Mapping[str, Any], model: str = "tensorrt_llm_bls"
) -> dict[str, Any]:
    """The answer of /generate, which must be a success."""
    status, answer = generate(server, {"max_tokens": 16} | body, model)
    assert status == 200 and "error" not in answer, answer
    return answer


def refused(server: TritonServer, body: Mapping[str, Any], model: str = "tensorrt_llm_bls") -> str:
    """The error of /generate, which must be a refusal without traces or paths."""
    status, answer = generate(server, {"max_tokens": 16} | body, model)
    assert status == 400, answer
    error = answer["error"]
    assert "Traceback" not in error and ".py" not in error
    return str(error).removeprefix("in ensemble 'ensemble', ")


def generate_stream(
    server: TritonServer, body: Mapping[str, Any], model: str = "tensorrt_llm_bls"
) -> Iterator[dict[str, Any]]:
    """Events of /generate_stream as they come."""
    url = f"{server.http_url}/v2/models/{model}/generate_stream"
    with requests.post(
        url, json={"stream": True, "max_tokens": 64} | body, stream=True, timeout=TIMEOUT_S
    ) as answer:
        for line in answer.iter_lines():
            if line:
                yield json.loads(line.removeprefix(b"data: "))


def inputs_of(body: Mapping[str, Any]) -> list[Any]:
    """gRPC inputs for one row, from the names of request fields or of inputs of `tensorrt_llm`."""
    return row_inputs({name: [value] for name, value in body.items()})


def row_inputs(body: Mapping[str, list[Any]]) -> list[Any]:
    """gRPC inputs for several rows, with a value for each."""
    inputs = []
    for name, rows in body.items():
        dtype = _DTYPES[name]
        lists = [row if isinstance(row, list) else [row] for row in rows]
        if dtype == "STRING":
            lists = [[v.encode() if isinstance(v, str) else v for v in row] for row in lists]
        array = np.array(lists, dtype=NUMPY[dtype])
        datatype = "BYTES" if dtype == "STRING" else dtype
        tensor = grpcclient.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


@dataclass
class Stream:
    """What one gRPC stream delivered."""

    events: queue.Queue[tuple[Any, Any]] = field(default_factory=queue.Queue)

    def next(self, timeout: float = TIMEOUT_S) -> tuple[Any, bool]:
        """The next result (None when it has no tensors) and whether it is the final one."""
        result, error = self.events.get(timeout=timeout)
        if error is not None:
            raise error
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        return (result if response.outputs else None), final

    def collect(self) -> list[Any]:
        """All results up to the final one."""
        results = []
        while True:
            result, final = self.next()
            if result is not None:
                results.append(result)
            if final:
                return results


@contextmanager
def grpc_stream(
    server: TritonServer,
    body: Mapping[str, Any],
    model: str = "tensorrt_llm_bls",
    request_id: str = "",
    cancel: bool = False,
) -> Iterator[Stream]:
    """One request on a stream of its own."""
    stream = Stream()
    client = grpcclient.InferenceServerClient(server.grpc_url)
    client.start_stream(lambda result, error: stream.events.put((result, error)))
    defaults = {} if model == "tensorrt_llm" else {"max_tokens": 64}
    client.async_stream_infer(
        model,
        inputs_of(defaults | dict(body)),
        request_id=request_id,
        enable_empty_final_response=True,
    )
    try:
        yield stream
    finally:
        client.stop_stream(cancel_requests=cancel)
        client.close()


def text_of(results: list[Any]) -> str:
    """The joined text of a stream."""
    return "".join(bytes(r.as_numpy("text_output").reshape(-1)[0]).decode() for r in results)


def metric(server: TritonServer, name: str) -> float:
    """The value of one custom metric."""
    page = requests.get(server.metrics_url, timeout=TIMEOUT_S).text
    for line in page.splitlines():
        if line.startswith(f"trtllm_toolchain_{name}{{"):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no metric {name}")


def wait_for(condition: Any, timeout: float) -> bool:
    """Wait until `condition()` holds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
