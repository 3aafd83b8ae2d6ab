"""Times GPU work by replays of a CUDA graph, free of launch gaps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch

REPLAYS = 20

Name = TypeVar("Name", bound=Hashable)


def timed(calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> float:
    """Median time of one call in microseconds, over replays of a graph that makes all of them."""
    return timed_in_turn({"": calls}, replays)[""]


def timed_in_turn(
    cases: Mapping[Name, Sequence[Callable[[], object]]], replays: int = REPLAYS
) -> dict[Name, float]:
    """`timed` of each case, their replays in turn: a GPU slows down while it works."""
    graphs = {name: _captured(calls) for name, calls in cases.items()}
    times: dict[Name, list[float]] = {name: [] for name in cases}
    for _ in range(replays + 3):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / len(cases[name]))
    return {name: statistics.median(found[3:]) for name, found in times.items()}


def _captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph
