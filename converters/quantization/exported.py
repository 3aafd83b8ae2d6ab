"""The two ways in which an exported checkpoint declares its quantisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converters.checkpoint.config import Quantization
from converters.quantization import fp8
from converters.quantization.declared import MIXED

# Readers recognise the layout by this name; it says whose layout it is.
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
_MODELOPT_NAMES = {"FP8_BLOCK_SCALES": "FP8_PB_WO"}

Storage = tuple[str, int | None]


def declare(
    modules: Mapping[str, Storage | None], quantization: Quantization
) -> tuple[str | None, dict[str, Any] | None, dict[str, Any] | None]:
    """Algorithm, content of `hf_quant_config.json`, and inline `quantization_config`.

    Args:
        modules: module name on disk -> (algorithm, group size), None for a plain matrix.
        quantization: of the converted checkpoint, for the cache's algorithm.

    Block FP8 alone is declared as the released FP8 checkpoints do it, inline; a quantised cache
    alone has no algorithm.
    """
    kinds = {storage for storage in modules.values() if storage is not None}
    cache = quantization.kv_cache_quant_algo
    if not kinds and cache is None:
        return None, None, None
    plain = sorted(name for name, storage in modules.items() if storage is None)
    algorithm, group_size, layers = None, None, None
    if len(kinds) == 1:
        ((algorithm, group_size),) = kinds
    elif kinds:
        algorithm = MIXED
        layers = {name: _layer(*storage) for name, storage in modules.items() if storage}
    details: dict[str, Any] = {"quant_algo": algorithm, "exclude_modules": plain}
    if layers is not None:
        details["quantized_layers"] = layers
    details["kv_cache_quant_algo"] = cache
    details["group_size"] = group_size
    separate = {"producer": _PRODUCER, "quantization": details}
    if algorithm == "FP8_BLOCK_SCALES":
        # The released form says nothing of caches; where there is something to say, both are there.
        return algorithm, separate if cache else None, _block_fp8(plain)
    return algorithm, separate, _inline(details)


def _layer(algorithm: str, group_size: int | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"quant_algo": _MODELOPT_NAMES.get(algorithm, algorithm)}
    return entry if group_size is None else {**entry, "group_size": group_size}


def _inline(details: Mapping[str, Any]) -> dict[str, Any]:
    """The flat form."""
    inline: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": details["quant_algo"],
        "ignore": details["exclude_modules"],
        "producer": _PRODUCER,
    }
    if "quantized_layers" in details:
        inline["quantized_layers"] = details["quantized_layers"]
    elif details["quant_algo"] is not None:
        inline["config_groups"] = {"group_0": _group(details)}
    if details["kv_cache_quant_algo"] == "FP8":
        inline["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return inline


def _group(details: Mapping[str, Any]) -> dict[str, Any]:
    form: dict[str, Any] = {"dynamic": False, "num_bits": 8, "type": "float"}
    if details["quant_algo"] != "FP8":
        form = {**form, "num_bits": 4, "group_size": details["group_size"]}
    group: dict[str, Any] = {"weights": form, "targets": ["Linear"]}
    if details["quant_algo"] != "W4A16_NVFP4":
        group["input_activations"] = form
    return group


def _block_fp8(plain: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [fp8.BLOCK, fp8.BLOCK],
        "modules_to_not_convert": plain,
    }
