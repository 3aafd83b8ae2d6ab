"""A reader of exported checkpoints that knows nothing of the converter.

It takes the storage of every module from the declarations alone, by the rules of two serving
engines, and then insists on exactly the tensors that such a storage has. Numbers are decoded from
the bytes with numpy. What it cannot explain is an `Unreadable`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Rules = str  # "trtllm": hf_quant_config.json first, fnmatch; "vllm": inline first, substrings too.


class Unreadable(Exception):
    """The tensors are not those that the declarations promise."""


def _e4m3() -> Floats:
    """The 256 values of float8_e4m3fn: sign, 4 exponent bits (bias 7), 3 of mantissa."""
    values = np.empty(256, np.float32)
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        if exponent == 15 and mantissa == 7:
            size = np.nan
        values[byte] = -size if byte & 128 else size
    return values


E4M3 = _e4m3()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])


def stray_names(directory: Path) -> list[str]:
    """Declared modules that do not lie on disk: readers do not forgive a prefix as we do."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    inline = json.loads((directory / "config.json").read_text()).get("quantization_config", {})
    keys = ("ignore", "modules_to_not_convert", "modules_to_convert", "quantized_layers")
    names = [name for key in keys for name in inline.get(key, ())]
    return [name for name in names if not any(found.startswith(f"{name}.") for found in index)]


class HfReader:
    """One exported directory, read by the rules of one engine."""

    def __init__(self, directory: Path, rules: Rules) -> None:
        self.rules = rules
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        separate = directory / "hf_quant_config.json"
        inline = self.config.get("quantization_config")
        nested = json.loads(separate.read_text())["quantization"] if separate.exists() else None
        found = (nested, inline) if rules == "trtllm" else (inline, nested)
        self.quantization: dict[str, Any] | None = next((q for q in found if q is not None), None)
        self.tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
        index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
        for file in sorted(set(index.values())):
            data = (directory / file).read_bytes()
            (length,) = struct.unpack("<Q", data[:8])
            for name, entry in json.loads(data[8 : 8 + length]).items():
                if name == "__metadata__":
                    continue
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                self.tensors[name] = (entry["dtype"], tuple(entry["shape"]), data[begin:end])
                if index.get(name) != file:
                    raise Unreadable(f"{name} is not where the index says")
        if index.keys() != self.tensors.keys():
            raise Unreadable("the index names other tensors than the files hold")
        self.used: set[str] = set()

    def algorithm(self, module: str) -> str | None:
        """The storage that the declarations give a linear layer; None for a plain one."""
        found = self.quantization
        if found is None:
            return None
        method = found.get("quant_method", "modelopt")
        key = "modules_to_not_convert" if method == "fp8" else "exclude_modules"
        excluded = found.get(key, found.get("ignore", []))
        if any(self._excludes(pattern, module) for pattern in excluded):
            return None
        if method == "fp8":
            if found["weight_block_size"] != [128, 128]:
                raise Unreadable("block size")
            return "FP8_PB_WO"
        algorithm: str = found["quant_algo"]
        if algorithm != "MIXED_PRECISION":
            return algorithm
        layers = found["quantized_layers"]
        for name in (module, module.partition(".experts.")[0] + ".experts"):
            if name in layers:
                listed: str = layers[name]["quant_algo"]
                return listed
        return None

    def _excludes(self, pattern: str, module: str) -> bool:
        if fnmatchcase(module, pattern):
            return True
        if self.rules == "trtllm":
            return module.startswith(f"{pattern}.")
        return pattern in module

    def linears(self) -> Iterator[tuple[str, Floats]]:
        """Every module with a matrix, and its values; experts one by one."""
        modules = sorted(
            name.removesuffix(".weight")
            for name, (_, shape, _) in self.tensors.items()
            if name.endswith(".weight") and len(shape) > 1 and ".ngram_embedding." not in name
        )
        for module in modules:
            yield module, self.linear(module)

    def linear(self, module: str) -> Floats:
        """The values of one module by its declared storage."""
        algorithm = self.algorithm(module)
        read: dict[str | None, Callable[[str], Floats]] = {
            None: lambda m: self._plain(f"{m}.weight"),
            "NVFP4": self._nvfp4,
            "W4A16_NVFP4": self._nvfp4,
            "FP8": self._fp8,
            "FP8_PB_WO": self._fp8_blocks,
        }
        values = read[algorithm](module)
        if algorithm in ("NVFP4", "FP8"):
            scale = self._take(f"{module}.input_scale", "F32", ())
            if not float(np.frombuffer(scale, np.float32)[0]) > 0:
                raise Unreadable(f"{module}: input scale")
        return values

    def table(self, module: str) -> Floats:
        """The values of the n-gram table, whose storage the configuration names first of all."""
        shards = sorted(
            (int(name.rpartition("shard_")[2].removesuffix(".weight")), name)
            for name in self.tensors
            if name.startswith(f"{module}.shard_") and name.endswith(".weight")
        )
        kind = self.config.get("ple_embedding_dtype")
        rows = []
        for _, name in shards:
            shape = self.tensors[name][1]
            if kind is None:
                rows.append(self._plain(name))
            elif kind == "float8_e4m3fn":
                rows.append(self._codes(name, shape) * self._scalar(f"{module}.weight_scale"))
            elif kind == "nvfp4":
                second = self._scalar(f"{module}.weight_scale_2")
                rows.append(self._blocks(name, second))
            else:
                raise Unreadable(f"{module}: {kind}")
        return np.concatenate(rows)

    def unexplained(self) -> set[str]:
        """Tensors that no declared storage has, apart from vectors and constants."""
        return {
            name
            for name, (dtype, shape, _) in self.tensors.items()
            if name not in self.used and (len(shape) != 1 or name.endswith("_scale"))
        }

    def _take(self, name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
        found = self.tensors.get(name)
        if found is None or found[:2] != (dtype, shape):
            raise Unreadable(f"{name}: expected {dtype} {shape}, found {found and found[:2]}")
        self.used.add(name)
        return found[2]

    def _plain(self, name: str) -> Floats:
        dtype, shape, data = self.tensors[name]
        if dtype == "BF16":
            bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
            values = bits.view(np.float32)
        elif dtype in ("F32", "F16"):
            values = np.frombuffer(data, {"F32": np.float32, "F16": np.float16}[dtype])
        else:
            raise Unreadable(f"{name}: declared plain, found {dtype}")
        self.used.add(name)
        return values.astype(np.float32).reshape(shape)

    def _scalar(self, name: str) -> np.float32:
        value = self._plain(name).reshape(-1)
        if value.size != 1 or not (np.isfinite(value[0]) and value[0] > 0):
            raise Unreadable(f"{name}: {value}")
        return np.float32(value[0])

    def _codes(self, name: str, shape: tuple[int, ...]) -> Floats:
        data = self._take(name, "F8_E4M3", shape)
        return E4M3[np.frombuffer(data, np.uint8)].reshape(shape)

    def _fp8(self, module: str) -> Floats:
        shape = self.tensors[f"{module}.weight"][1]
        return self._codes(f"{module}.weight", shape) * self._scalar(f"{module}.weight_scale")

    def _fp8_blocks(self, module: str) -> Floats:
        rows, columns = self.tensors[f"{module}.weight"][1]
        codes = self._codes(f"{module}.weight", (rows, columns))
        blocks: tuple[int, ...] = (-(-rows // 128), -(-columns // 128))
        suffix = "weight_scale_inv"
        assert self.quantization is not None
        if self.quantization.get("quant_method", "modelopt") != "fp8" and ".experts." not in module:
            # Linear layers as Model Optimizer writes them; experts as the releases have them.
            suffix, blocks = "weight_scale", (blocks[0], 1, blocks[1], 1)
        scales = self._plain(f"{module}.{suffix}")
        if scales.shape != blocks:
            raise Unreadable(f"{module}: {scales.shape} blocks")
        scales = scales.reshape(blocks[0], -1)
        return codes * scales[np.arange(rows) // 128][:, np.arange(columns) // 128]

    def _nvfp4(self, module: str) -> Floats:
        second = self._take(f"{module}.weight_scale_2", "F32", ())
        return self._blocks(f"{module}.weight", np.frombuffer(second, np.float32)[0])

    def _blocks(self, name: str, second: np.float32) -> Floats:
        rows, half = self.tensors[name][1]
        packed = np.frombuffer(self._take(name, "U8", (rows, half)), np.uint8).reshape(rows, half)
        scales = self._codes(f"{name}_scale", (rows, half // 8))
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, 2 * half)
        return E2M1[codes] * np.repeat(scales * second, 16, axis=1)
