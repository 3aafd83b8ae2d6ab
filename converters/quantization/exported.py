"""The two ways in which an exported checkpoint declares its quantisation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from converters.checkpoint.config import Quantization
from converters.quantization import fp8
from converters.quantization.declared import MIXED

# Readers recognise the layout by this name; it says whose layout it is.
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
BLOCKS = "FP8_BLOCK_SCALES"
# One scale per matrix and none of activations, for which Model Optimizer has no name.
WEIGHT_ONLY_FP8 = "W8A16_FP8"
_MODELOPT_NAMES = {BLOCKS: "FP8_PB_WO", WEIGHT_ONLY_FP8: "FP8"}
_FP8_FORM = {"dynamic": False, "num_bits": 8, "type": "float"}

Storage = tuple[str, int | None]


def declare(
    modules: Mapping[str, Storage | None], tables: Collection[str], quantization: Quantization
) -> tuple[str | None, dict[str, Any] | None, dict[str, Any] | None]:
    """Algorithm, content of `hf_quant_config.json`, and inline `quantization_config`.

    Args:
        modules: module name on disk -> (algorithm, group size), None for a plain matrix.
        tables: those of them that are looked up, not multiplied.
        quantization: of the converted checkpoint, for the cache's algorithm.

    FP8 with blocks, and FP8 without scales of activations, are declared as the released FP8
    checkpoints do it, inline with dynamic activations: as Model Optimizer's "FP8" they would make
    readers look for scales that do not exist. A quantised cache alone has no algorithm.
    """
    kinds = {storage for storage in modules.values() if storage is not None}
    cache = quantization.kv_cache_quant_algo
    if not kinds and cache is None:
        return None, None, None
    plain = sorted(name for name, storage in modules.items() if storage is None)
    linear = {storage for name, storage in modules.items() if storage and name not in tables}
    if linear in ({(BLOCKS, fp8.BLOCK)}, {(WEIGHT_ONLY_FP8, None)}):
        looked_up = {name: modules[name] for name in tables if modules[name] is not None}
        if all(storage == ("FP8", None) for storage in looked_up.values()):
            ((name, blocks),) = linear
            inline = _released_form(plain, looked_up, cache, blocks=blocks is not None)
            shown = "FP8" if name == WEIGHT_ONLY_FP8 else name
            return MIXED if looked_up and shown != "FP8" else shown, None, inline
    algorithm: str | None = None
    group_size: int | None = None
    layers: dict[str, Any] | None = None
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
    return algorithm, {"producer": _PRODUCER, "quantization": details}, _inline(details)


def limits(
    modules: Mapping[str, Storage | None], quantization: Quantization, *, modelopt: bool
) -> list[str]:
    """What readers of an exported checkpoint cannot take of it.

    Args:
        modules, quantization: as for `declare`.
        modelopt: whether it was declared in Model Optimizer's form.
    """
    notes = []
    kinds = {storage for storage in modules.values() if storage is not None}
    if any(name == WEIGHT_ONLY_FP8 for name, _ in kinds):
        alone = all(name in (WEIGHT_ONLY_FP8, "FP8") for name, _ in kinds)
        readers = "TensorRT-LLM and transformers find" if alone else "vLLM finds"
        notes.append(
            f"FP8 with one scale and none of activations: {readers} no declaration of it; "
            "--calibration of `convert` brings the scales"
        )
    if kinds and quantization.kv_cache_quant_algo is not None and not modelopt:
        notes.append(
            "a quantised cache beside FP8 as the releases declare it: engines take it by their own "
            "option only (vLLM --kv-cache-dtype fp8; TensorRT-LLM KvCacheConfig, dtype fp8)"
        )
    if not kinds and quantization.kv_cache_quant_algo is not None:
        notes.append(
            "a quantised cache alone: vLLM takes no such declaration; remove quantization_config "
            "and hf_quant_config.json for it, and start it with --kv-cache-dtype fp8"
        )
    return notes


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
        inline["kv_cache_scheme"] = _FP8_FORM
    return inline


def _group(details: Mapping[str, Any]) -> dict[str, Any]:
    form: dict[str, Any] = dict(_FP8_FORM)
    if details["quant_algo"] != "FP8":
        form = {**form, "num_bits": 4, "group_size": details["group_size"]}
    group: dict[str, Any] = {"weights": form, "targets": ["Linear"]}
    if details["quant_algo"] != "W4A16_NVFP4":
        group["input_activations"] = form
    return group


def _released_form(
    plain: list[str], tables: Collection[str], cache: str | None, *, blocks: bool
) -> dict[str, Any]:
    form: dict[str, Any] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": plain,
    }
    if blocks:
        form["weight_block_size"] = [fp8.BLOCK, fp8.BLOCK]
    if tables:
        form["modules_to_convert"] = sorted(tables)
    if cache == "FP8":
        form["kv_cache_scheme"] = _FP8_FORM
    return form
