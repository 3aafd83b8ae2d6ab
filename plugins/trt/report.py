"""What is inside a built engine, read from the builder's log.

A plan cannot be opened on a machine without a GPU, but the builder describes every kernel in one
verbose message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from plugins.support.errors import BuildError

_LAYER = re.compile(
    r"^Name: (?P<name>.*), LayerType: (?P<type>[\w ]*), Inputs: \[(?P<inputs>.*?)\], "
    # Copies of shapes between host and device have no constants, and values before the tactic.
    r"(?:Constants: \[(?P<constants>.*)\], )?Outputs: \[(?P<outputs>.*)\], "
    r"(?:ParameterType: .*)?Tactic(?:Name|Value): (?P<tactic>.*), "
    r"StreamId: \d+, (?:.*, )?Metadata: ?(?P<metadata>.*)$"
)
_TENSOR = re.compile(
    r"\{ Name: (?P<name>.*?), Dimensions: \[(?P<dims>[^\]]*)\], .*?Datatype: (?P<dtype>[^,]+),"
)
_IO = re.compile(
    r"^ ?Name: (?P<name>.*?), IOMode: (?P<mode>\w+), DataType: (?P<dtype>\w+), "
    r"Dimensions: \[(?P<dims>[^\]]*)\]"
)
_BYTES = {
    "activation_bytes": re.compile(r"^Total Activation Memory: (\d+) bytes"),
    "scratch_bytes": re.compile(r"^Max Scratch Memory: (\d+) bytes"),
    "weights_bytes": re.compile(r"^Total Weights Memory: (\d+) bytes"),
}


@dataclass(frozen=True)
class KernelTensor:
    """A tensor a kernel reads or writes; -1 marks dynamic dimensions."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Kernel:
    """One kernel of the engine.

    Attributes:
        name: the compiler's name, made of what it fused.
        type: gemm, kgen, runtime_fusion, …
        tactic: implementation, as far as the build fixes it.
        metadata: the parts of the network it comes from.
        inputs, outputs: tensors.
    """

    name: str
    type: str
    tactic: str
    metadata: str
    inputs: tuple[KernelTensor, ...]
    outputs: tuple[KernelTensor, ...]


@dataclass(frozen=True)
class LayerReport:
    """Kernels, inputs and outputs and memory of an engine.

    Attributes:
        kernels: in the order of the engine.
        inputs, outputs: network inputs and outputs.
        activation_bytes: memory for intermediates, scratch included, at the profile's maximum.
        scratch_bytes: largest scratch of one part.
        weights_bytes: weights inside the plan.
        aliases: outputs that are written in place, with their inputs.
    """

    kernels: tuple[Kernel, ...]
    inputs: tuple[KernelTensor, ...]
    outputs: tuple[KernelTensor, ...]
    activation_bytes: int
    scratch_bytes: int
    weights_bytes: int
    aliases: dict[str, str] = field(default_factory=dict)

    def attention_kernels(self) -> list[Kernel]:
        """Fused attention."""
        return [k for k in self.kernels if "_mha" in k.name]

    def topk_kernels(self) -> list[Kernel]:
        """Top-k selections."""
        return [k for k in self.kernels if re.search(r"topk", k.name, re.IGNORECASE)]

    def cache_updates(self) -> dict[str, str]:
        """Outputs written in place and their inputs, as far as the engine really has both."""
        inputs = {t.name for t in self.inputs}
        outputs = {t.name for t in self.outputs}
        return {o: i for o, i in self.aliases.items() if o in outputs and i in inputs}

    def weight_dequantisations(self, elements: int = 1 << 16) -> list[Kernel]:
        """Kernels that only dequantise and write at least `elements` static values: a weight
        that is decoded in each call.
        """
        return [
            k
            for k in self.kernels
            if "Dequ" in k.name
            and k.type == "kgen"
            and any(min(o.shape, default=-1) > 0 and prod(o.shape) >= elements for o in k.outputs)
        ]

    def summary(self) -> dict[str, int]:
        """Counts and bytes for a table."""
        return {
            "kernels": len(self.kernels),
            "attention": len(self.attention_kernels()),
            "top-k": len(self.topk_kernels()),
            "in-place updates": len(self.cache_updates()),
            "weight dequantisations": len(self.weight_dequantisations()),
            "activation bytes": self.activation_bytes,
            "scratch bytes": self.scratch_bytes,
            "weight bytes": self.weights_bytes,
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON values."""
        return {"summary": self.summary(), **asdict(self)}


def _shape(dims: str) -> tuple[int, ...]:
    return tuple(int(d) for d in dims.split(",") if d.strip())


def _tensors(text: str) -> tuple[KernelTensor, ...]:
    return tuple(
        KernelTensor(m["name"], m["dtype"], _shape(m["dims"])) for m in _TENSOR.finditer(text)
    )


def parse_report(messages: Iterable[str], aliases: dict[str, str] | None = None) -> LayerReport:
    """Read the builder's messages (see `RecordingLogger.report`).

    Raises BuildError when the layer list is missing or a line of it is not understood.
    """
    kernels: list[Kernel] = []
    tensors: dict[str, list[KernelTensor]] = {"Input": [], "Output": []}
    totals = dict.fromkeys(_BYTES, 0)
    found = False
    for message in messages:
        for key, pattern in _BYTES.items():
            if match := pattern.match(message):
                totals[key] = max(totals[key], int(match[1]))
        if not message.startswith("Layers:"):
            continue
        found = True
        body, _, io = message.removeprefix("Layers:").partition("I/O Tensors:")
        for line in body.strip().splitlines():
            if not line.strip():
                continue
            match = _LAYER.match(line.strip())
            if match is None:
                raise BuildError("a line of the builder's layer list is not understood", found=line)
            kernels.append(
                Kernel(
                    match["name"],
                    match["type"],
                    match["tactic"],
                    match["metadata"],
                    _tensors(match["inputs"]),
                    _tensors(match["outputs"]),
                )
            )
        for line in io.splitlines():
            if match := _IO.match(line):
                tensors[match["mode"]].append(
                    KernelTensor(match["name"], match["dtype"], _shape(match["dims"]))
                )
    if not found:
        raise BuildError("the builder did not describe the engine")
    return LayerReport(
        tuple(kernels),
        tuple(tensors["Input"]),
        tuple(tensors["Output"]),
        aliases=aliases or {},
        **totals,
    )
