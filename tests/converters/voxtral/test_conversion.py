"""Every precondition of the configuration, and every tensor of both layouts and both variants."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.checkpoint.config import WEIGHTS_FILE
from converters.checkpoint.convert import convert
from converters.checkpoint.export_hf import export_hf
from converters.registry import read_checkpoint_config
from converters.voxtral.config import VoxtralCheckpointConfig
from plugins.support.errors import InputError, ToolchainError
from tests.fixtures.tekken import write_tekken
from tests.fixtures.voxtral_deterministic import write_huggingface, write_mistral

FILES = {
    "huggingface": ("config.json", "model.safetensors"),
    "mistral": ("params.json", "consolidated.safetensors"),
}
KINDS = [(layout, realtime) for layout in FILES for realtime in (False, True)]
every_kind = pytest.mark.parametrize(("layout", "realtime"), KINDS)
AUDIO = "multimodal.whisper_model_args.encoder_args"
MEL = f"{AUDIO}.audio_encoding_args"


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    base = tmp_path_factory.mktemp("voxtral-sources")
    found = {}
    for realtime in (False, True):
        hf = write_huggingface(base / f"hf-{realtime}", realtime=realtime)
        mistral = write_mistral(hf, base / f"mistral-{realtime}", realtime=realtime)
        found |= {("huggingface", realtime): hf, ("mistral", realtime): mistral}
    return found


class Bend:
    """A copy of a checkpoint that can be spoilt."""

    def __init__(self, source: Path, directory: Path, layout: str) -> None:
        shutil.copytree(source, directory)
        self.directory = directory
        self.config_file, self.weights_file = (directory / name for name in FILES[layout])

    def config(self, change: Callable[[dict[str, Any]], object]) -> None:
        content = json.loads(self.config_file.read_text())
        change(content)
        self.config_file.write_text(json.dumps(content))

    def tensors(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        content = load_file(self.weights_file)
        change(content)
        save_file(content, self.weights_file, {"format": "pt"})

    def convert(self) -> tuple[VoxtralCheckpointConfig, dict[str, torch.Tensor]]:
        target = self.directory.with_name("checkpoint")
        shutil.rmtree(target, ignore_errors=True)
        convert(self.directory, target)
        config = read_checkpoint_config(target)
        assert isinstance(config, VoxtralCheckpointConfig)
        return config, load_file(target / WEIGHTS_FILE)

    def refused(self) -> str:
        shutil.rmtree(self.directory.with_name("checkpoint"), ignore_errors=True)
        with pytest.raises(InputError) as caught:
            convert(self.directory, self.directory.with_name("checkpoint"))
        assert not self.directory.with_name("checkpoint").exists()
        return str(caught.value)


@pytest.fixture
def bend(sources: dict[tuple[str, bool], Path], tmp_path: Path) -> Callable[[str, bool], Bend]:
    return lambda layout, realtime: Bend(sources[layout, realtime], tmp_path / "source", layout)


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change that sets a nested key; `...` removes it."""

    def change(content: dict[str, Any]) -> None:
        *tables, key = path.split(".")
        for table in tables:
            content = content[table]
        if value is ...:
            del content[key]
        else:
            content[key] = value

    return change


HF_BOTH: list[tuple[str, Any]] = [
    ("projector_hidden_act", "relu"),
    ("text_config.model_type", "mistral"),
    ("text_config.hidden_act", "gelu"),
    ("text_config.attention_bias", True),
    ("text_config.mlp_bias", True),
    ("text_config.hidden_size", ...),
    ("text_config.hidden_size", "48"),
    ("text_config.num_attention_heads", 5),
    ("text_config.head_dim", 1),
    ("text_config.rms_norm_eps", 0),
    ("text_config.rope_parameters.rope_type", "yarn"),
    ("text_config.rope_scaling", {"type": "linear"}),
    ("text_config.eos_token_id", "2"),
    ("text_config.eos_token_id", 300),
    ("text_config.num_experts", 8),
    ("audio_config.model_type", "whisper"),
    ("audio_config.activation_function", "gelu_new"),
    ("audio_config.num_key_value_heads", 2),
    ("audio_config.num_mel_bins", ...),
    ("audio_config.conv_stride", 2),
    ("vision_config", {}),
    ("text_config", "none"),
]
HF_CHUNKS: list[tuple[str, Any]] = [
    ("audio_token_id", ...),
    ("audio_token_id", 300),
    ("text_config.sliding_window", 4096),
    ("text_config.tie_word_embeddings", True),
    ("tie_word_embeddings", True),
    ("audio_config.scale_embedding", True),
    ("audio_config.num_attention_heads", 5),
    ("audio_config.head_dim", 16),
    ("audio_config.intermediate_size", 130),
    ("audio_config.max_source_positions", 1501),
    ("downsample_factor", 7),
]
HF_STREAM: list[tuple[str, Any]] = [
    ("default_num_delay_tokens", ...),
    ("audio_length_per_tok", 4),
    ("text_config.sliding_window", ...),
    ("text_config.tie_word_embeddings", False),
    ("audio_config.hidden_act", "gelu"),
    ("audio_config.sliding_window", None),
    ("audio_config.rope_parameters.rope_theta", -1),
]
MISTRAL_BOTH: list[tuple[str, Any]] = [
    ("dim", ...),
    ("n_kv_heads", 3),
    ("rope_theta", "1e8"),
    ("norm_eps", -1e-5),
    ("moe", {}),
    ("multimodal.whisper_model_args.downsample_args.downsample_factor", 7),
    (f"{MEL}.sampling_rate", 8000),
    (f"{MEL}.hop_length", 256),
    (f"{MEL}.window_size", 512),
    (f"{MEL}.frame_rate", 25.0),
    (f"{AUDIO}.n_kv_heads", 2),
    (f"{AUDIO}.dropout", 0.1),
]
MISTRAL_CHUNKS: list[tuple[str, Any]] = [
    ("sliding_window", 4096),
    ("tied_embeddings", True),
    (f"{AUDIO}.max_source_positions", 750),
    (f"{AUDIO}.head_dim", 16),
    (f"{MEL}.chunk_length_s", 10.0),
]
MISTRAL_STREAM: list[tuple[str, Any]] = [
    ("sliding_window", "many"),
    ("tied_embeddings", False),
    ("ada_rms_norm_t_cond", False),
    ("ada_rms_norm_t_cond_dim", 64),
    (f"{AUDIO}.pos_embed", "sinusoidal"),
    (f"{AUDIO}.ffn_type", "mlp"),
    (f"{AUDIO}.norm_type", "layer_norm"),
    (f"{AUDIO}.use_biases", False),
    (f"{AUDIO}.sliding_window", 0),
    (f"{MEL}.chunk_length_s", 30.0),
    (f"{MEL}.transcription_format", "instruct"),
    (f"{MEL}.global_log_mel_max", 2.0),
    (f"{AUDIO}.norm_eps", 1e-6),
]
PRECONDITIONS = [
    (layout, realtime, path, value)
    for layout, realtime, cases in (
        ("huggingface", False, HF_BOTH + HF_CHUNKS),
        ("huggingface", True, HF_BOTH + HF_STREAM),
        ("mistral", False, MISTRAL_BOTH + MISTRAL_CHUNKS),
        ("mistral", True, MISTRAL_BOTH + MISTRAL_STREAM),
    )
    for path, value in cases
]


@pytest.mark.parametrize(("layout", "realtime", "path", "value"), PRECONDITIONS)
def test_preconditions(
    bend: Callable[[str, bool], Bend], layout: str, realtime: bool, path: str, value: Any
) -> None:
    if realtime and path.endswith("downsample_factor"):
        value = 0
    bent = bend(layout, realtime)
    # It would have the last word about end ids.
    (bent.directory / "generation_config.json").unlink(missing_ok=True)
    bent.config(put(path, value))
    message = bent.refused()
    assert FILES[layout][0] in message
    key = path.rpartition(".")[2]
    known = {
        # What is refused by its consequence names that.
        "max_source_positions": ("positions of a chunk", "max_source_positions", "chunk_length_s"),
        "downsample_factor": ("downsample_factor", "frame_rate", "positions of a chunk"),
        "n_kv_heads": ("key/value heads", "n_kv_heads"),
        "num_attention_heads": ("key/value heads", "num_attention_heads", "num_key_value_heads"),
    }
    assert any(word in message for word in known.get(key, (key,))), message


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_theta", 5e5), ("sliding_window", "64"), ("max_seq_len", 2048)],
)
def test_mistral_spellings(bend: Callable[[str, bool], Bend], key: str, value: Any) -> None:
    bent = bend("mistral", True)
    if key == "max_seq_len":
        bent.config(put("max_position_embeddings", ...))
    bent.config(put(key, value))
    config, _ = bent.convert()
    found = {
        "rope_theta": config.rotary_base,
        "sliding_window": config.voxtral.sliding_window,
        "max_seq_len": config.max_position_embeddings,
    }
    assert found[key] == int(value)


def test_the_nested_theta_wins(bend: Callable[[str, bool], Bend]) -> None:
    bent = bend("huggingface", False)
    bent.config(put("text_config.rope_theta", 1e4))
    assert bent.convert()[0].rotary_base == 1e8
    bent.config(put("text_config.rope_parameters", ...))
    assert bent.convert()[0].rotary_base == 1e4


def test_generation_config_names_the_ends(bend: Callable[[str, bool], Bend]) -> None:
    bent = bend("huggingface", False)
    (bent.directory / "generation_config.json").write_text('{"eos_token_id": [2, 4]}')
    assert bent.convert()[0].eos_token_id == [2, 4]


def test_both_layouts_say_the_same(bend: Callable[[str, bool], Bend], tmp_path: Path) -> None:
    configs = {}
    for realtime in (False, True):
        for layout in FILES:
            bent = bend(layout, realtime)
            configs[layout, realtime] = bent.convert()[0]
            shutil.rmtree(tmp_path / "source")
        hf, mistral = configs["huggingface", realtime], configs["mistral", realtime]
        different = {"source", "position_embedding_type", "voxtral"}
        assert hf.model_dump(exclude=different) == mistral.model_dump(exclude=different)
        own = {"source_layout", "position_table"}
        assert hf.voxtral.model_dump(exclude=own) == mistral.voxtral.model_dump(exclude=own)
        assert hf.position_embedding_type == "rope_gpt_neox"
        assert mistral.position_embedding_type == "rope_gptj"


@every_kind
def test_counts_of_tensors(bend: Callable[[str, bool], Bend], layout: str, realtime: bool) -> None:
    """The counts of the released files by the same rule: only layers multiply.

    Mini: 32 encoder and 30 decoder layers give 762 tensors (Hugging Face) or 761 (Mistral, without
    the position table); realtime: 32 and 26 give 711, the tied head being stored once.
    """
    stored = load_file(bend(layout, realtime).weights_file)
    audio, text = (13, 11) if realtime else (15, 9)
    outside, layers, released = {
        ("huggingface", False): (12, 30, 762),
        ("mistral", False): (11, 30, 761),
        ("huggingface", True): (9, 26, 711),
        ("mistral", True): (9, 26, 711),
    }[layout, realtime]
    assert len(stored) == outside + 2 * audio + 2 * text
    assert released == outside + 32 * audio + layers * text


@every_kind
def test_no_tensor_may_be_missing(
    bend: Callable[[str, bool], Bend], layout: str, realtime: bool
) -> None:
    bent = bend(layout, realtime)
    whole = load_file(bent.weights_file)
    for name in whole:
        if ".layers.1." in name:
            continue
        save_file({n: t for n, t in whole.items() if n != name}, bent.weights_file)
        assert name in bent.refused()


@every_kind
def test_unknown_tensors_and_wrong_shapes(
    bend: Callable[[str, bool], Bend], layout: str, realtime: bool
) -> None:
    bent = bend(layout, realtime)
    whole = load_file(bent.weights_file)
    first = next(n for n in whole if n.endswith(("k_proj.weight", "wk.weight")))
    bias = first.removesuffix("weight") + "bias"
    # A bias on the keys is nothing the model has.
    save_file(whole | {bias: torch.zeros(4)}, bent.weights_file)
    assert bias in bent.refused()
    wrong = copy.copy(whole) | {first: whole[first][:-1].contiguous()}
    save_file(wrong, bent.weights_file)
    message = bent.refused()
    assert first in message and str(list(whole[first].shape)) in message


def test_names_as_in_memory(bend: Callable[[str, bool], Bend]) -> None:
    bent = bend("huggingface", False)
    _, wanted = bent.convert()

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            new = name.replace("language_model.model.", "model.language_model.")
            if name.startswith(("audio_tower.", "multi_modal_projector.")):
                new = f"model.{name}"
            tensors[new.replace("language_model.lm_head", "lm_head")] = tensors.pop(name)

    bent.tensors(rename)
    _, found = bent.convert()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    bent.tensors(
        lambda t: t.update({"audio_tower.conv1.bias": t["model.audio_tower.conv1.bias"] * 2})
    )
    assert "mean the same one" in bent.refused()


def test_plain_name_of_the_embedding(bend: Callable[[str, bool], Bend]) -> None:
    bent = bend("mistral", False)
    _, wanted = bent.convert()
    bent.tensors(
        lambda t: t.update(
            {"tok_embeddings.weight": t.pop("mm_whisper_embeddings.tok_embeddings.weight")}
        )
    )
    _, found = bent.convert()
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_the_position_table_stays_float32(bend: Callable[[str, bool], Bend]) -> None:
    bent = bend("huggingface", False)
    target = bent.directory.with_name("narrow")
    convert(bent.directory, target, "bfloat16")
    weights = load_file(target / WEIGHTS_FILE)
    table = weights.pop("audio.position_embedding.weight")
    assert table.dtype == torch.float32
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    stored = load_file(bent.weights_file)["audio_tower.embed_positions.weight"]
    assert torch.equal(table, stored)


def _tokenizer(directory: Path, **changes: Any) -> None:
    path = write_tekken(directory, realtime=True)
    document = json.loads(path.read_text())
    document["audio"] |= changes
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("layout", FILES)
def test_the_delay_is_said_once_or_twice_the_same(
    bend: Callable[[str, bool], Bend], layout: str
) -> None:
    bent = bend(layout, True)
    assert bent.convert()[0].voxtral.default_num_delay_tokens == 6
    _tokenizer(bent.directory)
    assert bent.convert()[0].voxtral.default_num_delay_tokens == 6
    _tokenizer(bent.directory, transcription_delay_ms=960)
    if layout == "mistral":
        # Only the tokenizer says it there, unless `params.json` does.
        assert bent.convert()[0].voxtral.default_num_delay_tokens == 12
        bent.config(put(f"{MEL}.transcription_delay_ms", 480))
    message = bent.refused()
    assert "different delays" in message and "12 tokens" in message and "6 tokens" in message
    _tokenizer(bent.directory, transcription_delay_ms=500)
    assert "no whole number of tokens" in bent.refused()


@every_kind
def test_a_tokenizer_with_more_ids_than_the_embedding(
    bend: Callable[[str, bool], Bend], layout: str, realtime: bool
) -> None:
    bent = bend(layout, realtime)
    write_tekken(bent.directory, ("la", "ng", "en", " the", "he", "in"), realtime=realtime)
    message = bent.refused()
    assert "token ids that the model has no embedding for" in message and "301" in message


@pytest.mark.parametrize("realtime", [False, True])
def test_quantised_checkpoints_are_refused(bend: Callable[[str, bool], Bend], realtime: bool):
    """No network of this family decodes weights: by the tensors, and by what is declared."""
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    changed = bend("huggingface", realtime)
    changed.config(put("quantization_config", block))
    assert "declares quantised weights, but all weights are plain" in changed.refused()
    changed.tensors(
        lambda t: t.update({name: t[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": t[name]})
    )
    message = changed.refused()
    assert name in message
    assert "found float8_e4m3fn" in message
    changed.config(put("quantization_config", {"quant_method": "modelopt", "quant_algo": "MXFP8"}))
    assert "unsupported quantisation algorithm" in changed.refused()


def test_quantised_mistral_files_are_refused(bend: Callable[[str, bool], Bend]):
    changed = bend("mistral", False)
    changed.config(put("quantization", {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}))
    assert "quantised weights are not read in this layout" in changed.refused()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "nvfp4", "only": "all"}, "has nothing to quantise"),
        ({"kv_cache": "fp8"}, "caches cannot be FP8"),
    ],
)
def test_requests_that_this_family_cannot_meet(
    sources: dict[tuple[str, bool], Path], tmp_path: Path, options: Any, message: str
):
    source = sources["huggingface", False]
    with pytest.raises(ToolchainError, match=message):
        convert(source, tmp_path / "ckpt", **options)
    assert not (tmp_path / "ckpt").exists()
    convert(source, tmp_path / "ckpt")
    with pytest.raises(InputError, match="cannot be exported") as caught:
        export_hf(tmp_path / "ckpt", tmp_path / "out")
    assert caught.value.expected == "qwen38, dots3"
    assert not (tmp_path / "out").exists()
