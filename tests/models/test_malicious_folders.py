"""Folders of strangers: each is one ModelError, runs nothing, fetches nothing and hangs nowhere."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import partly_slow
from tests.models.test_load import save_stock
from unmask.config.run import ModelConfig
from unmask.errors import ModelError, UnmaskError
from unmask.generation.remote.vllm_client import RemoteLM
from unmask.models.load import initialize, load
from unmask.planning.blueprint import ModelSpec
from unmask.rl.reward_model import RewardModel

CODE = "import pathlib\npathlib.Path({!r}).write_text('ran')\nclass Mine: pass\n"
SAFE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> Any:
        return exec, (CODE.format(str(self.target)),)


def change(path: Path, name: str = "config.json", **values: Any) -> None:
    file = path / name
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(old | values))


def fifo(path: Path, name: str) -> None:
    (path / name).unlink()
    os.mkfifo(path / name)


def pickled(path: Path, name: str = "pytorch_model.bin") -> None:
    (path / SAFE).unlink()
    (path / name).write_bytes(pickle.dumps(Payload(path / "ran")))


def index(path: Path, shard: str) -> None:
    weights = load_file(path / SAFE)
    (path / SAFE).unlink()
    torch.save(weights, path / "shard.bin")
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, shard)}))


def remote_code(path: Path, file: str = "config.json", **auto_map: Any) -> None:
    (path / "mine.py").write_text(CODE.format(str(path / "ran")))
    change(path, file, **({"model_type": "stranger"} if file == "config.json" else {}), auto_map=auto_map)


def inner(path: Path, name: str) -> Path:
    """The path of a file in a new folder of the folder."""
    (path / name).parent.mkdir()
    return path / name


def code_everywhere(path: Path) -> None:
    """Code that every config but the model's names, and a folder for `generate` to load."""
    for file in (
        "generation_config.json",
        "processor_config.json",
        "preprocessor_config.json",
        "tokenizer_config.json",
    ):
        remote_code(path, file, AutoProcessor="mine.Mine", AutoTokenizer=["mine.Mine", "mine.Mine"])
    inner(path, "custom_generate/generate.py").write_text((path / "mine.py").read_text())


def pickles_beside(path: Path) -> None:
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt"):
        (path / name).write_bytes(pickle.dumps(Payload(path / "ran")))


def overlapping(path: Path) -> None:
    """Weights that all lie at the same place."""
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in load_file(path / SAFE)}
    text = json.dumps(header).encode()
    (path / SAFE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))


Break = Callable[[Path], None]
# What is done to a folder, and the error of `load`; None: it has no effect.
FOLDERS: dict[str, tuple[Break, str | None]] = {
    "pickled weights": (pickled, "pickled .*pytorch_model.bin.*safetensors"),
    "pickled weights by another name": (lambda path: pickled(path, "consolidated.00.pth"), "pickled"),
    "an index that names a pickle": (lambda path: index(path, "shard.bin"), "names 'shard.bin'"),
    "an index that leaves the folder": (
        lambda path: index(path, "../other.safetensors"),
        "names '../other.safetensors'",
    ),
    "an index that is a list": (
        lambda path: ((path / SAFE).unlink(), (path / INDEX).write_text("[]"))[0],
        "cannot load the weights",
    ),
    "a config that names a pickle": (
        lambda path: change(path, transformers_weights="adapter_model.bin"),
        "cannot load the weights",
    ),
    "modeling code": (
        lambda path: remote_code(path, AutoConfig="mine.Mine", AutoModelForCausalLM="mine.Mine"),
        "model config",
    ),
    "code of another repository": (
        lambda path: remote_code(path, AutoConfig="evil/repo--mine.Mine"),
        "model config",
    ),
    "tokenizer code": (
        lambda path: (
            change(path, "tokenizer_config.json", tokenizer_class="Mine"),
            remote_code(path, "tokenizer_config.json", AutoTokenizer=["mine.Mine", "mine.Mine"]),
            (path / "tokenizer.json").unlink(),
        )[0],
        "no usable tokenizer",
    ),
    "adapters of another model": (
        lambda path: change(
            path, "adapter_config.json", peft_type="LORA", base_model_name_or_path="evil/model"
        ),
        "evil/model: no such folder",
    ),
    "a class of another library": (
        lambda path: change(path, quantization_config={"quant_method": "gptq", "bits": 4}),
        "cannot load the weights",
    ),
    "an unknown quantization": (lambda path: change(path, quantization_config={"quant_method": 3}), None),
    "no attention heads": (lambda path: change(path, num_attention_heads=0), "model config|weights"),
    "a text for a number": (lambda path: change(path, hidden_size="big"), "model config|weights"),
    "an object for a number": (lambda path: change(path, num_hidden_layers={}), "model config"),
    "negative sizes": (lambda path: change(path, vocab_size=-5), "cannot build the model"),
    "layers without end": (
        lambda path: change(path, num_hidden_layers=10**9),
        "num_hidden_layers is 1000000000",
    ),
    "labels without end": (lambda path: change(path, num_labels=10**9), "num_labels is 1000000000"),
    "layers that the config lists": (
        lambda path: change(path, model_type="qwen2", num_hidden_layers=10**9),
        "num_hidden_layers is 1000000000",
    ),
    "layers of a part": (lambda path: change(path, parts=[{"n_layer": 10**9}]), "n_layer is 1000000000"),
    "code in the other configs": (code_everywhere, None),
    "pickles beside the weights": (pickles_beside, None),
    "adapters that name a module": (
        lambda path: change(
            path, "adapter_config.json", auto_mapping={"parent_library": "mine", "base_model_class": "Mine"}
        ),
        "the adapters name no base model",
    ),
    "a FIFO for a further chat template": (
        lambda path: os.mkfifo(inner(path, "additional_chat_templates/x.jinja")),
        "additional_chat_templates/x.jinja is not a file",
    ),
    "a chat template without end": (
        lambda path: (
            (path / "chat_template.jinja").touch(),
            os.truncate(path / "chat_template.jinja", 2**40),
        )[0],
        "chat_template.jinja has more than",
    ),
    "a chat template that divides by zero": (
        lambda path: (path / "chat_template.jinja").write_text("{{ 1 // 0 }}"),
        None,
    ),
    "a chat template that is a number": (
        lambda path: change(path, "tokenizer_config.json", chat_template={"default": 5}),
        "chat template is no text",
    ),
    "no token to pad with": (
        lambda path: change(path, "tokenizer_config.json", pad_token=None, eos_token=None),
        None,
    ),
    "a config nested without end": (
        lambda path: (path / "config.json").write_text('{"a":' * 10**5),
        "cannot load a model config",
    ),
    "a config of nulls": (lambda path: change(path, model_type=None, architectures=None), "model config"),
    "settings that are a list": (lambda path: change(path, unmask=[1]), "'unmask' is not an object"),
    "settings of wrong types": (
        lambda path: change(path, unmask={"attention": {}, "block_size": "x"}),
        "unknown attention pattern",
    ),
    "end tokens that are objects": (
        lambda path: change(path, unmask={"eos_token_ids": {"a": []}}),
        "eos_token_ids|cannot use",
    ),
    "a tokenizer of nothing": (
        lambda path: (path / "tokenizer.json").write_text("{}"),
        "no usable tokenizer",
    ),
    "a tokenizer nested without end": (
        lambda path: (path / "tokenizer.json").write_text("[" * 10**5),
        "no usable tokenizer",
    ),
    "a tokenizer config that is a list": (
        lambda path: (path / "tokenizer_config.json").write_text("[1]"),
        "no usable tokenizer",
    ),
    "special tokens that are numbers": (
        lambda path: change(
            path, "tokenizer_config.json", mask_token=5, eos_token={"a": 1}, extra_special_tokens=7
        ),
        "no usable tokenizer|cannot use",
    ),
    "a FIFO for a config": (lambda path: fifo(path, "config.json"), "config.json is not a file"),
    "a FIFO for a tokenizer": (lambda path: fifo(path, "tokenizer.json"), "tokenizer.json is not a file"),
    "a FIFO for the weights": (lambda path: fifo(path, SAFE), "model.safetensors is not a file"),
    "an endless config": (
        lambda path: ((path / "config.json").unlink(), (path / "config.json").symlink_to("/dev/zero"))[0],
        "is not a file",
    ),
    "a generation config of wrong types": (
        lambda path: change(path, "generation_config.json", eos_token_id={"a": {}}),
        None,
    ),
    "weights that are a pickle": (
        lambda path: (path / SAFE).write_bytes(pickle.dumps(Payload(path / "ran"))),
        "no safetensors file",
    ),
    "weights that overlap": (overlapping, "no safetensors file"),
    "weights with a header without end": (
        lambda path: (path / SAFE).write_bytes(b"\xff" * 7 + b"\x00" + b"{}"),
        "no safetensors file",
    ),
}


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What tried to reach the network."""
    tried: list[Any] = []

    def refuse(*given: Any) -> None:
        tried.append(given[1:])
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **_: refuse(None, *given))
    return tried


@pytest.mark.parametrize("name", FOLDERS)
def test_a_malicious_folder_is_one_error(name: str, tmp_path: Path, connections: list[Any]) -> None:
    break_it, message = FOLDERS[name]
    save_stock(tmp_path)
    break_it(tmp_path)
    with pytest.raises(UnmaskError, match=message) if message else contextlib.nullcontext():
        load(tmp_path)
    assert not (tmp_path / "ran").exists() and not connections


@pytest.mark.parametrize("name", FOLDERS)
@partly_slow("reader", ["reward model", "inspect", "from scratch", "remote tokenizer"], 0, 3)
def test_the_other_loaders_run_and_fetch_nothing(
    name: str, reader: str, tmp_path: Path, connections: list[Any]
) -> None:
    """They need not read what is wrong."""
    save_stock(tmp_path)
    FOLDERS[name][0](tmp_path)
    read: dict[str, Callable[[str], Any]] = {
        "reward model": RewardModel,
        "inspect": lambda path: ModelSpec.read(ModelConfig(path=path)),
        "from scratch": lambda path: initialize(path, seed=0, trust_remote_code=False),
        "remote tokenizer": lambda path: RemoteLM("http://localhost:1", path, patience=0.0),
    }
    try:
        read[reader](str(tmp_path))
    except Exception as error:
        assert isinstance(error, ModelError) or (
            reader == "remote tokenizer" and type(error).__name__ == "RemoteError"
        ), repr(error)
    assert not (tmp_path / "ran").exists()
    assert not connections or reader == "remote tokenizer"


@pytest.mark.parametrize(
    "key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"]
)
def test_no_kernel_of_a_config_is_fetched(key: str, tmp_path: Path, connections: list[Any]) -> None:
    save_stock(tmp_path)
    change(tmp_path, **{key: "evil/kernel"})
    load(tmp_path)
    initialize(tmp_path, seed=0, trust_remote_code=False)
    assert not connections


def test_nobody_is_asked_about_remote_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a setting transformers would ask on the terminal."""
    save_stock(tmp_path)
    remote_code(tmp_path, "tokenizer_config.json", AutoTokenizer=["mine.Mine", "mine.Mine"])
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    for read in (
        lambda: RewardModel(str(tmp_path)),
        lambda: RemoteLM("http://localhost:1", str(tmp_path), patience=0.0),
    ):
        with pytest.raises(UnmaskError):
            read()
    assert not (tmp_path / "ran").exists()
