"""A short run of the fuzzer, in the test server."""

from __future__ import annotations

from tests.triton_repo.fuzz import LEAKS, fuzz, processes
from triton_repo.server import TritonServer


def test_malformed_requests(echo_server: TritonServer) -> None:
    report = fuzz(echo_server, count=1600, seed=7, clients=4)
    assert report.failures == []
    assert not report.restarted
    assert report.ordinary >= 64
    # The fuzzer reaches all kinds of answers, not only refusals of the JSON parser.
    assert min(report.statuses[s] for s in ("200", "400", "404", "500")) > 10


def test_the_fuzzer_sees_what_it_looks_for(echo_server: TritonServer) -> None:
    assert len(processes(echo_server)) == 5
    assert LEAKS.search('File "/tmp/x/1/model.py", line 3')
