"""config.json and generation_config.json, read strictly."""

from __future__ import annotations

import json
import logging
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from agentinfer.errors import CheckpointError, InvalidSetting
from agentinfer.models.config import DenseConfig
from agentinfer.models.model import ARCHITECTURES, eos_ids, kv_layout, read_config, weight_sizes
from agentinfer.models.weights import tree_leaves
from agentinfer.ops.kv import bytes_per_token
from agentinfer.ops.rope import inv_freq, magnitude

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 90,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


class Gone(Enum):
    """Stands where a field is taken out; its name does not change from process to process, as an address would."""

    GONE = "gone"


GONE = Gone.GONE


def write(folder: Path, change: dict[str, Any] | None = None, generation: object = GONE) -> Path:
    """A folder with QWEN3 as config.json, some fields changed or GONE."""
    raw = {k: v for k, v in {**QWEN3, **(change or {})}.items() if v is not GONE}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not GONE:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def read(folder: Path, **change: Any) -> DenseConfig:
    config = read_config(write(folder, change)).config
    assert isinstance(config, DenseConfig)
    return config


def test_fields(tmp_path: Path) -> None:
    """Every field arrives, nothing else is assumed."""
    c = read(tmp_path)
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.num_layers, c.vocab_size) == (32, 8, 128, 36, 151936)
    assert (c.hidden_size, c.intermediate_size, c.norm_eps, c.max_positions) == (4096, 12288, 1e-6, 40960)
    assert (c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm, c.tied, c.dtype) == (
        False,
        False,
        False,
        True,
        False,
        torch.bfloat16,
    )
    assert c.windows == (None,) * 36


REQUIRED = (
    "architectures", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "vocab_size",
)  # fmt: skip


@pytest.mark.parametrize("name", REQUIRED)
def test_missing(tmp_path: Path, name: str) -> None:
    """A field that the model needs and that is not there is an error that names file and field."""
    with pytest.raises(CheckpointError, match=rf"config\.json: {name}: .*") as e:
        read(tmp_path, **{name: GONE})
    assert str(tmp_path) in str(e.value)


NUMBERS = (*(name for name in REQUIRED if name not in {"architectures", "hidden_act"}), "head_dim")


@pytest.mark.parametrize("bad", [0, -4, "12", True, [8], 1e400, 2**80])
@pytest.mark.parametrize("name", NUMBERS)
def test_bad_numbers(tmp_path: Path, name: str, bad: object) -> None:
    """Zero, negative, of another type, not finite or absurd: an error that names file and field."""
    with pytest.raises(CheckpointError, match=rf"config\.json: {name}: must be"):
        read(tmp_path, **{name: bad})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide num_attention_heads 32"),
        ({"num_key_value_heads": 64}, "num_key_value_heads"),
        ({"head_dim": 127}, "head_dim: must be even"),
        ({"head_dim": None, "hidden_size": 4097}, "hidden_size: 4097 is no multiple"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: .*'fp8'"),
        ({"quantization_config": "awq"}, "quantization_config: .*'awq'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor: 0.25"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false"),
        ({"attention_bias": 1}, "attention_bias: must be true or false"),
        ({"dtype": "int8"}, "dtype: 'int8'"),
        ({"dtype": 16}, "dtype: 16"),
        ({"architectures": []}, "architectures"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures"),
        ({"architectures": [None]}, "architectures"),
        ({"text_config": 3}, "text_config: must be an object"),
        ({"rope_parameters": 3}, "rope_parameters: must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"rope_type": "foo"}}, "rope_type: 'foo' is unknown; known are default, linear"),
        ({"rope_parameters": GONE, "rope_scaling": {"type": "dynamic", "factor": 2}}, "type: 'dynamic' is unknown"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor: missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor: must be"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor: missing"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor: missing"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor: 4 must be above",
        ),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta: must be"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2}}, "beta_fast"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 10**9}},
            "original_max_position_embeddings: 1000000000 is more than max_position_embeddings 40960",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 1e9, "original_max_position_embeddings": 32768}},
            r"factor: 1e\+09 times original_max_position_embeddings 32768 is more than 67108864 positions",
        ),
        ({"use_sliding_window": True}, "sliding_window: missing"),
        ({"use_sliding_window": True, "sliding_window": None}, "sliding_window: must be"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window: must be"),
        ({"use_sliding_window": True, "sliding_window": 8}, "max_window_layers: missing"),
        ({"layer_types": ["full_attention"]}, "layer_types: must list 36 layers"),
        ({"layer_types": ["linear_attention"] * 36}, "layer_types: unknown kind 'linear_attention'"),
        ({"layer_types": ["sliding_attention"] * 36}, "layer_types: names sliding_attention, but use_sliding_window"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"eos_token_id": [-1]}, "eos_token_id"),
        ({"eos_token_id": [True]}, "eos_token_id"),
    ],
)
def test_contradictions(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """What contradicts itself or asks for what is not implemented is refused by name, never ignored."""
    with pytest.raises(CheckpointError, match=message) as e:
        read(tmp_path, **change)
    assert "config.json" in str(e.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"null", b'{"a": 1, "a": 2}', b"\xff\xfe{}", b'{"a":' * 100_000],
)
def test_no_json(tmp_path: Path, content: bytes) -> None:
    """A config.json that is no JSON object is an error that names the file."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        read_config(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    """A folder without config.json, or none at all, is an error that names it."""
    with pytest.raises(CheckpointError, match=r"config\.json: missing"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
        read_config(tmp_path / "nowhere")


def test_unknown_architecture(tmp_path: Path) -> None:
    """An architecture that is not there is named, with all that are."""
    with pytest.raises(CheckpointError) as e:
        read(tmp_path, architectures=["GPT2LMHeadModel"])
    assert all(name in str(e.value) for name in ("GPT2LMHeadModel", *ARCHITECTURES))


OLD = {"rope_parameters": GONE}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
DEFAULTS = [
    {**OLD, "rope_theta": 1e6, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {**OLD, "rope_theta": 1000000},
]
YARNS = [
    {**OLD, "rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
    {**OLD, "rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", **YARN}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
    {"rope_parameters": {"rope_type": "yarn", **YARN}, "rope_theta": 1e6},
]


@pytest.mark.parametrize("change", DEFAULTS)
def test_rope_default(tmp_path: Path, change: dict[str, Any]) -> None:
    """Theta of either form, float or integer, gives the frequencies of theta 1e6."""
    freq = inv_freq(read(tmp_path, **change).rope)
    assert freq[1].item() == pytest.approx(0.8058421878, rel=1e-6)
    assert freq[63].item() == pytest.approx(1.240937758e-06, rel=1e-6)


def test_rope_yarn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """YaRN of all forms and spellings is one and the same, with a factor of cos and sin and a longer context."""
    found = {read(tmp_path, **change).rope for change in YARNS}
    assert len(found) == 1
    assert magnitude(found.pop()) == pytest.approx(1.138629436, rel=1e-9)
    assert read(tmp_path, **YARNS[0]).max_positions == 131072
    assert not caplog.records


def test_rope_disagreement(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where old and new form disagree the new one wins and a warning says so; where they agree nobody is warned."""
    new = {"rope_type": "default", "rope_theta": 1e6}
    c = read(tmp_path, rope_parameters=new, rope_theta=1e4, rope_scaling={"type": "yarn", **YARN})
    assert (c.rope.theta, c.rope.kind) == (1e6, "default")
    assert ["disagree" in r.message or "wins" in r.message for r in caplog.records] == [True, True]
    caplog.clear()
    read(
        tmp_path,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **YARN},
        rope_theta=1e6,
        rope_scaling={"type": "yarn", **YARN},
    )
    assert not caplog.records


def test_rope_theta_default(tmp_path: Path) -> None:
    """Without any theta it is 10000, as documented."""
    assert read(tmp_path, **OLD).rope.theta == 10000
    assert read(tmp_path, rope_parameters={"rope_type": "default"}).rope.theta == 10000


def test_rope_unused_field(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rope field that its type does not know is named in a warning."""
    read(tmp_path, rope_parameters={"rope_type": "default", "factor": 2.0})
    assert "factor means nothing" in caplog.text


def test_dtype(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Old and new key mean the same; where they differ the new one wins with a warning; without any it is left open."""
    assert (
        read(tmp_path, dtype="bfloat16").dtype
        == read(tmp_path, dtype=GONE, torch_dtype="bfloat16").dtype
        == torch.bfloat16
    )
    assert read(tmp_path, dtype=GONE).dtype is None
    assert not caplog.records
    assert read(tmp_path, dtype="float16", torch_dtype="float32").dtype == torch.float16
    assert "dtype wins" in caplog.text


@pytest.mark.parametrize(
    ("heads", "q", "k", "scale"),
    [
        ((1024, 16, 8, 128), 2048, 1024, 0.0883883476),
        ((2560, 32, 8, 128), 4096, 1024, 0.0883883476),
        ((5120, 64, 8, 128), 8192, 1024, 0.0883883476),
        ((896, 14, 2, None), 896, 128, 0.125),
        ((48, 4, 2, 16), 64, 32, 0.25),
    ],
)
def test_head_dim(tmp_path: Path, heads: tuple[int, int, int, int | None], q: int, k: int, scale: float) -> None:
    """head_dim is what the config says, else hidden / heads; projections and softmax scale follow it."""
    hidden, n, kv, dim = heads
    change = {
        "hidden_size": hidden,
        "num_attention_heads": n,
        "num_key_value_heads": kv,
        "head_dim": GONE if dim is None else dim,
    }
    model = read_config(write(tmp_path, change))
    layer = model.specs(model.config).layers[0]
    assert (layer.q.shape, layer.k.shape, layer.o.shape) == ((q, hidden), (k, hidden), (hidden, q))
    assert model.config.scale == pytest.approx(scale, rel=1e-8)


def test_kv_bytes(tmp_path: Path) -> None:
    """Qwen3-8B takes 147,456 bytes of KV a token in bfloat16; half of it on each of two ranks, one head of 16 ranks."""
    model = read_config(write(tmp_path))
    assert bytes_per_token(kv_layout(model, 1, 16)) == 147456
    assert bytes_per_token(kv_layout(model, 2, 16)) == 73728
    assert bytes_per_token(kv_layout(model, 16, 16)) == 147456 // 8
    assert bytes_per_token(kv_layout(model, 1, 16, torch.float32)) == 2 * 147456


def test_weight_sizes(tmp_path: Path) -> None:
    """The sizes of Qwen3-8B follow from its config alone: 8.19e9 numbers, 16.4 GB in bfloat16."""
    model = read_config(write(tmp_path))
    sizes = weight_sizes(model, 1)
    assert sizes.num_parameters == 8_190_735_360
    assert sizes.rank_bytes == 2 * 8_190_735_360
    assert sizes.largest_bytes == 151936 * 4096 * 2
    norms = 2 * (36 * (2 * 4096 + 2 * 128) + 4096)
    assert weight_sizes(model, 4).rank_bytes == (sizes.rank_bytes - norms) // 4 + norms
    assert len(tree_leaves(model.specs(model.config))) == 36 * 11 + 3


def test_biases(tmp_path: Path) -> None:
    """Qwen2 has biases of q, k, v without a key; attention_bias gives q, k, v and o; mlp_bias gate, up and down."""

    def flags(**change: Any) -> tuple[bool, bool, bool]:
        c = read(tmp_path, **change)
        return c.qkv_bias, c.o_bias, c.mlp_bias

    assert flags(architectures=["Qwen2ForCausalLM"], attention_bias=GONE) == (True, False, False)
    assert flags() == (False, False, False)
    assert flags(attention_bias=True) == (True, True, False)
    assert flags(architectures=["LlamaForCausalLM"], mlp_bias=True) == (False, False, True)


def test_windows(tmp_path: Path) -> None:
    """A sliding window is there only where the config really turns it on, in the layers that it names."""
    off = {"sliding_window": 4096, "max_window_layers": 3}
    assert set(read(tmp_path, **off).windows) == {None}
    on = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 34}
    assert read(tmp_path, **on).windows == (None,) * 34 + (8, 8)
    kinds = ["sliding_attention", "full_attention"] * 18
    assert read(tmp_path, **on, layer_types=kinds).windows == (8, None) * 18
    with pytest.raises(CheckpointError, match="sliding_window: 4096; Llama models have no"):
        read(tmp_path, architectures=["LlamaForCausalLM"], sliding_window=4096)


def test_kv_heads_of_llama(tmp_path: Path) -> None:
    """Null means one KV head a query head; only an old Llama file may leave the field out."""
    assert read(tmp_path, num_key_value_heads=None).num_kv_heads == 32
    assert read(tmp_path, architectures=["LlamaForCausalLM"], num_key_value_heads=GONE).num_kv_heads == 32


@pytest.mark.parametrize(("heads", "kv", "tp"), [(16, 4, 3), (9, 3, 2), (12, 4, 6), (8, 8, 16), (4, 1, 3)])
def test_tp_refused(tmp_path: Path, heads: int, kv: int, tp: int) -> None:
    """Heads that the ranks can not share are refused at config time, with the numbers of ranks that can."""
    model = read_config(write(tmp_path, {"num_attention_heads": heads, "num_key_value_heads": kv}))
    works = [t for t in range(1, 9) if heads % t == 0 and (kv % t == 0 or t % kv == 0)]
    for call in (lambda: kv_layout(model, tp, 16), lambda: weight_sizes(model, tp)):
        with pytest.raises(InvalidSetting, match=f"tp: {tp} ranks .*these can: {', '.join(map(str, works))}$"):
            call()


def test_tp_of_demo_model(tmp_path: Path) -> None:
    """9 heads and 3 KV heads work on 1 and 3 ranks."""
    model = read_config(write(tmp_path, {"num_attention_heads": 9, "num_key_value_heads": 3}))
    with pytest.raises(InvalidSetting, match=r"these can: 1, 3$"):
        kv_layout(model, 2, 16)


@pytest.mark.parametrize(
    ("config", "generation", "want"),
    [
        (90, {"eos_token_id": [90, 91]}, (90, 91)),
        ([92, 90], {"eos_token_id": 91}, (91,)),
        (90, {"eos_token_id": None}, (90,)),
        (90, {}, (90,)),
        ([90, 91, 90], GONE, (90, 91)),
        (None, GONE, ()),
        (GONE, GONE, ()),
        (0, GONE, (0,)),
    ],
)
def test_eos(tmp_path: Path, config: object, generation: object, want: tuple[int, ...]) -> None:
    """The end ids are generation_config.json's, else config.json's, else none; an integer, a list or null."""
    folder = write(tmp_path, {"eos_token_id": config}, generation)
    assert eos_ids(folder) == want
    assert read_config(folder).config.eos_ids == want


def test_eos_faults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bad generation_config.json is an error that names it; an id outside of the vocabulary is left out, warned."""
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        eos_ids(write(tmp_path, None, {"eos_token_id": "end"}))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: no valid JSON"):
        eos_ids(tmp_path)
    assert eos_ids(write(tmp_path, None, {"eos_token_id": [151936, 5]})) == (5,)
    assert "151936" in caplog.text


def test_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A plain config is read without a word."""
    with caplog.at_level(logging.INFO):
        read(tmp_path)
    assert not caplog.records


def test_language_part(tmp_path: Path) -> None:
    """A vision-language config is read flat or nested, old or new, and mrope of text alone is plain rope."""
    old = {"type": "mrope", "mrope_section": [16, 24, 24]}
    flat = read(
        tmp_path,
        architectures=["Qwen2VLForConditionalGeneration"],
        rope_parameters=GONE,
        rope_theta=1e6,
        rope_scaling=old,
    )
    assert (flat.rope.kind, flat.rope.theta, flat.qkv_bias, flat.qk_norm) == ("default", 1e6, True, False)
    inner = {k: v for k, v in QWEN3.items() if k not in {"architectures", "dtype", "tie_word_embeddings"}}
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "torch_dtype": "float16", "text_config": inner}
        )
    )
    c = read_config(tmp_path).config
    assert isinstance(c, DenseConfig)
    assert (c.hidden_size, c.dtype, c.eos_ids) == (4096, torch.float16, (90,))
