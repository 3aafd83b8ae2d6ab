"""What verification asks of a family's reference, and references of their models in transformers.

Both are contracts (`plugins.support.contract`): a reference or a model that lacks something is
refused before it runs, whoever made it: a release of transformers, a family, or a test by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from plugins.support.contract import Contract


class Reference(Protocol):
    """The right values of one checkpoint, `converters.<family>.oracle.Oracle`."""

    def sample_ids(self, limit: int) -> list[int]:
        """At most `limit` ids that reach every branch of the model."""

    def run(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """ "logits" float32 [n, vocab] and every tap of the text networks."""


class HearingReference(Reference, Protocol):
    """The reference of a model with an audio encoder.

    Attributes:
        features: float32 [chunks, mels, frames] that belong to the ids of `sample_ids`.
        listens: whether these ids take the rows of the features.
    """

    features: Tensor
    listens: bool

    def run_audio(self) -> dict[str, Tensor]:
        """ "audio_rows" [rows, H] and every tap of the audio network."""


class DraftReference(Protocol):
    """The right values of a checkpoint's draft layer, `converters.<family>.oracle.DraftOracle`."""

    def run(self, next_ids: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Draft logits [n, vocab] and the hidden states [n, H] that a further draft takes."""


class TextModel(Protocol):
    """What references use of a model of transformers.

    Attributes:
        config: of the text model.
        lm_head: shared by the draft layer, which transformers does not have.
    """

    config: Any
    lm_head: Any

    def forward(self, input_ids: Any, *, use_cache: Any = None) -> Any:
        """Logits of whole sequences."""

    def get_input_embeddings(self) -> Any:
        """The embedding, whose rows those of audio join or replace."""


class HearingModel(TextModel, Protocol):
    """A model with an audio encoder that hears whole chunks."""

    def forward(self, input_ids: Any, *, input_features: Any = None, use_cache: Any = None) -> Any:
        """Logits of whole sequences and what is heard in them."""

    def get_audio_features(self, input_features: Any) -> Any:
        """Rows of the encoder after the projector."""


class StreamingModel(HearingModel, Protocol):
    """A model with an audio encoder that hears a stream."""

    def forward(
        self,
        input_ids: Any,
        *,
        input_features: Any = None,
        use_cache: Any = None,
        num_delay_tokens: Any = None,
    ) -> Any:
        """Logits of whole sequences and what is heard in them, with a delay."""


REFERENCE: Contract[Reference] = Contract.of(Reference)
HEARING_REFERENCE: Contract[HearingReference] = Contract.of(HearingReference)
DRAFT_REFERENCE: Contract[DraftReference] = Contract.of(DraftReference)
TEXT_MODEL: Contract[Any] = Contract.of(TextModel)
HEARING_MODEL: Contract[Any] = Contract.of(HearingModel)
STREAMING_MODEL: Contract[Any] = Contract.of(StreamingModel)
