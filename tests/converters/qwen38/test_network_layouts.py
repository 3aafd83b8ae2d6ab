"""Every quantised layout that people have: converted, run by the network, compared with
transformers on the exactly dequantised weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.checkpoint.config import WEIGHTS_FILE, read_config
from converters.checkpoint.convert import convert
from converters.controls import storage_controls
from converters.definition import EngineLimits
from converters.quantization.restore import restored_weights
from converters.qwen38 import FAMILY
from converters.qwen38.config import Qwen38CheckpointConfig
from converters.qwen38.oracle import Oracle
from tests.converters.qwen38.driver import Driver
from tests.fixtures import qwen38_layout as layout
from tests.fixtures.qwen38_deterministic import GOLDEN_PROMPT
from tests.fixtures.qwen38_quantized import LAYOUTS, TABLE, Quantized


def _oracle_logits(checkpoint: Quantized, directory: Path) -> torch.Tensor:
    """transformers on what the tensors mean."""
    tensors = layout.released_tensors(checkpoint.dequantised, checkpoint.text)
    config = layout.released_config(checkpoint.text, torch.float32)
    layout.write_checkpoint(directory, config, tensors, files=1)
    return Oracle(directory).run(GOLDEN_PROMPT)["logits"]


NIBBLES, UP = "halves of the bytes of FP4 codes swapped", "global scale of the gate used for up"
CODES = "FP8 codes without their scales"
TABLES = {"fp8": "FP8 table without its scale", "nvfp4": "FP4 table without its global scale"}
MISTAKES = {
    "radixark": [NIBBLES, UP, TABLES["fp8"]],
    "nvidia": [NIBBLES, UP, TABLES["fp8"]],
    "official fp8": [CODES, TABLES["fp8"]],
    "nvfp4 table": [NIBBLES, UP, TABLES["nvfp4"]],
    "mixed dense": [NIBBLES, UP, CODES, TABLES["fp8"]],
    "community a": [NIBBLES, UP, TABLES["nvfp4"]],
    "community c": [NIBBLES, UP, CODES, TABLES["fp8"]],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(tmp_path: Path, name: str) -> None:
    """The right logits; and every mistake in reading this layout is seen in them."""
    checkpoint = LAYOUTS[name]()
    convert(checkpoint.write(tmp_path / "hf"), tmp_path / "checkpoint")
    config = read_config(tmp_path / "checkpoint", Qwen38CheckpointConfig)
    weights = load_file(tmp_path / "checkpoint" / WEIGHTS_FILE)
    # The rows of the table are decoded on the host, which is not the network's part.
    table = FAMILY.host_inputs(config)[0]["table"]
    controls = {control.name: control for control in storage_controls(weights)}
    assert list(controls) == MISTAKES[name]

    def with_table(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        save_file(tensors, tmp_path / "checkpoint" / WEIGHTS_FILE)
        return tensors | {table: restored_weights(tmp_path / "checkpoint")[table]}

    right = with_table(weights)
    assert torch.equal(right[table], checkpoint.dequantised[f"{TABLE}.weight"])
    driver = Driver(
        config,
        right,
        EngineLimits(1, 64, chunk_size=64, max_logits_tokens=64),
        host_inputs=FAMILY.host_inputs(config),
        promote_floats=True,
        # Layers where the target has them, tables where it lacks FP4.
        targets=("8.9",),
    )
    rows = [driver.call("context", [GOLDEN_PROMPT[:40]])[0]["logits"]]
    rows += [driver.call("generation", [[token]])[0]["logits"] for token in GOLDEN_PROMPT[40:]]
    expected = _oracle_logits(checkpoint, tmp_path / "plain")
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-4, rtol=0.0)
    for control in controls.values():
        driver.bind(with_table(weights | control.weights(weights)))
        driver.reset()
        (wrong,) = driver.call("context", [GOLDEN_PROMPT[:40]])
        # Not close, or not a number.
        assert not (wrong["logits"] - expected[:40]).abs().max() < 2e-2, control.name
