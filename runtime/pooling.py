"""Embeddings: one vector per prompt, from the hidden states of its tokens behind the last norm.

"mean" is their mean, "last" the state of the last token; both are divided by their 2-norm. Only
real tokens are ever added, so that padding takes no part.
"""

from __future__ import annotations

import torch

from runtime.contract import Pooling


class Pool:
    """The embedding of one prompt, which may come in several pieces."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._state: torch.Tensor | None = None

    def add(self, hidden: torch.Tensor) -> None:
        """Take the hidden states of the next tokens, [n, H] with n >= 1."""
        if self._pooling == "last":
            self._state = hidden[-1].float().clone()
            return
        total = hidden.float().sum(dim=0)
        self._state = total if self._state is None else self._state + total

    def vector(self) -> torch.Tensor:
        """float32 [H] on the CPU with 2-norm 1, for which a sum serves as well as its mean.

        Raises ArithmeticError when there is no such vector.
        """
        assert self._state is not None
        norm = torch.linalg.vector_norm(self._state)
        if not torch.isfinite(norm) or norm == 0:
            raise ArithmeticError("the hidden states have no finite mean other than zero")
        return (self._state / norm).cpu()
