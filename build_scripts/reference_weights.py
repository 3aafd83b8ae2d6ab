"""What `verify` gives to transformers: the checkpoint itself, or the values of quantised weights.

A quantised network is right when it computes what its codes and scales mean. Its reference is
therefore transformers on the decoded weights; how far those are from the checkpoint they were made
of is the price of the format, and another question.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from build_scripts import output
from converters.checkpoint.config import CheckpointConfig, Quantization, write_config
from converters.checkpoint.export_hf import export_hf
from converters.checkpoint.source import SourceCheckpoint
from converters.quantization.restore import restored_weights
from converters.registry import family_for, family_of, model_type_of
from plugins.support.errors import InputError
from runtime.contract import EngineConfig, NgramEmbedding, weights_file
from runtime.identity import read_header


@dataclass(frozen=True)
class Reference:
    """Where transformers finds the weights that the networks must compute with.

    Attributes:
        directory: a Hugging Face checkpoint.
        dtype: type to which transformers' weights are rounded first.
        decoded: whether the directory holds decoded weights.
    """

    directory: Path
    dtype: str
    decoded: bool


def is_quantised(path: Path) -> bool:
    """Whether a safetensors file of a converted checkpoint has quantised weights."""
    return any(name.endswith(".weights_scaling_factor") for name in read_header(path))


def is_plain(hf_dir: Path) -> bool:
    """Whether a Hugging Face checkpoint holds no quantised weights, so that transformers loads
    the values that were quantised.
    """
    suffixes = ("weight_scale", "weight_scale_inv", "weight_packed")
    return not any(
        name.endswith(suffixes)
        for path in hf_dir.glob("*.safetensors")
        for name in read_header(path)
    )


@contextmanager
def open_reference(
    engine_dir: Path, config: EngineConfig, checkpoint: CheckpointConfig, hf_dir: Path
) -> Iterator[Reference]:
    """The reference of an engine directory, for the length of a `with` block.

    Raises InputError when `hf_dir` is of another family, and when the engine is quantised and
    `hf_dir` is not what it was made from: the decoded weights alone would not tell.
    """
    source = SourceCheckpoint.open(hf_dir)
    if not is_quantised(engine_dir / weights_file()):
        _require_family(checkpoint, source)
        yield Reference(hf_dir, checkpoint.dtype, decoded=False)
        return
    found = source.identity()
    if found != checkpoint.source:
        raise InputError(
            "the engine was made from another checkpoint",
            where=str(hf_dir),
            expected=f"digest {checkpoint.source.digest[:16]}",
            found=f"digest {found.digest[:16]}",
            fix="--against the directory that was converted; for another one, such as an export of "
            "it, convert and build again",
        )
    output.say("the weights are quantised: the reference computes with their decoded values")
    with TemporaryDirectory(prefix="build-engine-verify-") as directory:
        plain, exported = Path(directory) / "checkpoint", Path(directory) / "model"
        plain.mkdir()
        weights = restored_weights(engine_dir)
        for host in config.host_inputs:
            if isinstance(host, NgramEmbedding):
                # Rows reach the engine in its own type, so they are rounded in the reference too.
                rounded = weights[host.table].to(getattr(torch, checkpoint.dtype))
                weights[host.table] = rounded.float()
        save_file(weights, plain / weights_file())
        del weights
        decoded = {"dtype": "float32", "quantization": Quantization()}
        write_config(plain, checkpoint.model_copy(update=decoded))
        export_hf(plain, exported)
        yield Reference(exported, "float32", decoded=True)


def _require_family(checkpoint: CheckpointConfig, source: SourceCheckpoint) -> None:
    found = model_type_of(source)
    if family_for(found, str(source.config_file)) is not family_of(checkpoint):
        raise InputError(
            "the engine was made from another model",
            where=f"{source.config_file}: model_type",
            expected=checkpoint.model_type,
            found=str(found),
            fix="--against the directory that was converted",
        )
