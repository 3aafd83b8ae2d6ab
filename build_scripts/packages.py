"""The packages this tool stands on: which verbs need each, and the extra that installs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """One dependency: distribution and import name, the verbs that need it, how to install it."""

    name: str
    module: str
    needed_by: str
    extra: str | None = None

    @property
    def install(self) -> str:
        """The command that installs it."""
        extra = f"[{self.extra}]" if self.extra else ""
        return f"pip install 'trtllm-toolchain{extra}'"


PACKAGES = (
    Package("torch", "torch", "every verb"),
    Package("transformers", "transformers", "verify; run --prompt, repo and serve (tokenizer)"),
    Package("safetensors", "safetensors", "every verb"),
    Package("tokenizers", "tokenizers", "run --prompt, repo, serve"),
    Package("pydantic", "pydantic", "every verb"),
    Package("numpy", "numpy", "every verb"),
    Package("tensorrt_rtx", "tensorrt_rtx", "build --flavor tensorrt_rtx", "rtx"),
    Package("tensorrt", "tensorrt", "build --flavor tensorrt; run on data-centre GPUs", "trt"),
    Package("nvidia-pytriton", "pytriton", "serve (carries tritonserver)", "serve"),
    Package("tritonclient", "tritonclient.grpc", "repo, and requests to serve", "serve"),
    Package("triton", "triton", "sparse-attention kernels on GPUs", "kernels"),
    Package("nvidia-modelopt", "modelopt", "quantization", "quantize"),
)


def package_of(module: str) -> Package | None:
    """The package that an import name belongs to, None when it is not in the table."""
    top = module.partition(".")[0]
    return next((p for p in PACKAGES if p.module.partition(".")[0] == top), None)
