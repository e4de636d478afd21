"""Memory and speed switches: each takes effect, and one that cannot is refused before the first step.

What takes several processes to test is in test_sharding.py.
"""

from __future__ import annotations

import importlib.util
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch._dynamo.backends import registry
from transformers import training_args

from tests.errors import raises
from tests.helpers import each_once, partly_slow
from tests.models.kernels.test_flash import by_definition
from tests.tiny import llama_lm, quantizable_llama_lm
from tests.training.tiny_runs import PAIRS, TEXTS, equal, make, prepared, settings, weights
from unmask.cli import run
from unmask.cli.measurements import Measurements
from unmask.cli.verbs import VERBS
from unmask.config.run import DataConfig, HardwareConfig, RunConfig, StartConfig
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.errors import ConfigError, ModelError, TrainingError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.kernels import flash
from unmask.models.load import load
from unmask.supervised.sft import SFTConfig
from unmask.training import hardware_checks
from unmask.training.hardware_checks import bounded_memory, check_split
from unmask.training.run.folder import RunFolder
from unmask.training.sharding import deepspeed_config
from unmask.training.trainer import DiffusionTrainer

pytestmark = [
    # bitsandbytes and inductor use it
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes (the extra `cuda`)"
)
ATTENTIONS = [("bidirectional", None), ("block_causal", 2)]  # plain rows, and [x_t ; x_0]
TRAINERS = ["sft", "grpo"]  # with a loss computed at once, and with rollouts and views


def counted(trainer: DiffusionTrainer) -> list[torch.dtype]:
    """A list with the output dtype of every call of a layer's first projection."""
    calls: list[torch.dtype] = []
    module = trainer.lm.model.model.layers[0].self_attn.q_proj
    module.register_forward_hook(lambda module, args, out: calls.append(out.dtype))
    return calls


def losses(trainer: DiffusionTrainer) -> list[float]:
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


# Memory


def machine(**changes: Any) -> HardwareConfig:
    return HardwareConfig(name="GPU", devices=[{"name": "GPU", "memory_gb": 48}], **changes)


def test_a_run_takes_at_most_the_memory_that_it_may(monkeypatch):
    bounds: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=50e9)
    )
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *bound: bounds.append(bound))
    gpu = torch.device("cuda", 0)
    for hardware, device in (
        (machine(max_memory_gb=45), gpu),
        (machine(max_memory_gb=60), gpu),
        (machine(), gpu),
        (None, gpu),
    ):
        with bounded_memory(hardware, device):
            pass
    with bounded_memory(machine(max_memory_gb=45), torch.device("cpu")):
        pass
    assert bounds == [(0.9, gpu), (1.0, gpu)]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_bounds_its_memory_and_says_what_to_do_when_it_is_full(verb, model, tmp_path, monkeypatch):
    asked: list[HardwareConfig | None] = []

    def bounded(hardware: HardwareConfig | None, device: torch.device) -> AbstractContextManager[None]:
        asked.append(hardware)
        return bounded_memory(hardware, device)

    monkeypatch.setattr(run, "bounded_memory", bounded)
    for trainer in (DiffusionTrainer, ConvertTrainer):
        monkeypatch.setattr(trainer, "train", full)
    data = {
        "data": DataConfig(task="sudoku", max_rows=16),
        "output_dir": str(tmp_path),
        "hardware": machine(max_memory_gb=1),
    }
    training = {
        "use_cpu": True,
        "bf16": False,
        "max_steps": 20,
        "max_length": 48,
        "eval_strategy": "no",
        "report_to": "none",
    }
    config = RunConfig(model=StartConfig(path=str(model)), training=training, **data)
    with raises(TrainingError, where="hardware.max_memory_gb"):
        run.run_verb(verb, config, RunFolder(config), Measurements(config))
    assert asked == [config.hardware]


def full(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory\nof which ...")


# A model that is split over devices


def subject(attention: str = "causal", *, split: bool = False) -> hardware_checks.TrainedModel:
    return hardware_checks.TrainedModel(
        attention, torch.float32, adapters=False, quantized=False, split=split
    )


@pytest.mark.parametrize(
    "more",
    [
        {"world_size": 2},
        {"fsdp": True},
        {"deepspeed": {"zero_optimization": {"stage": 2}}},
        {"torch_compile": True},
        {"flash_attention": True},
        {"generates": True},
    ],
)
def test_what_cannot_work_on_a_split_model_is_refused(more):
    off = {
        "world_size": 1,
        "n_gpu": 1,
        "generates": False,
        "fsdp": None,
        "deepspeed": None,
        "torch_compile": False,
        "flash_attention": False,
    }
    check_split(SimpleNamespace(**off), subject(split=True))
    check_split(SimpleNamespace(**off | more), subject())
    named = "".join(
        f" and {name}" for name in more if name in off and name not in ("world_size", "generates")
    )
    with raises(ConfigError, where=f"model.device_map{named}"):
        check_split(SimpleNamespace(**off | more), subject(split=True))


def test_several_gpus_in_one_process_are_for_models_that_are_split():
    on = SimpleNamespace(
        world_size=1,
        n_gpu=2,
        generates=False,
        fsdp=None,
        deepspeed=None,
        torch_compile=False,
        flash_attention=False,
    )
    check_split(on, subject(split=True))
    with raises(ConfigError, where="device"):
        check_split(on, subject())


def test_a_model_whose_layers_are_on_several_devices_is_known_as_split(tmp_path):
    lm = llama_lm()
    lm.model.hf_device_map = {"model": "cuda:0", "lm_head": "cuda:1"}
    with raises(ConfigError, where="model.device_map"):
        make("grpo", tmp_path, lm)


# Activation checkpointing


@each_once("attention, block_size, verb", ATTENTIONS, TRAINERS)
def test_activation_checkpointing_runs_the_layers_again_and_changes_nothing(
    attention, block_size, verb, tmp_path
):
    def run(**more: Any) -> tuple[int, dict[str, torch.Tensor]]:
        trainer = prepared(verb, tmp_path, llama_lm(attention, block_size), optim="sgd", max_steps=3, **more)
        calls = counted(trainer)
        trainer.train()
        return len(calls), weights(trainer.lm)

    plain_calls, plain = run()
    calls, checkpointed = run(activation_checkpointing=True)
    assert calls - plain_calls == 3 and (verb == "grpo" or plain_calls == 3)
    assert equal(checkpointed, plain) and not equal(plain, weights(llama_lm(attention, block_size)))


def test_the_old_name_of_activation_checkpointing_still_acts(tmp_path):
    with pytest.warns(FutureWarning, match="activation_checkpointing"):
        trainer = make("sft", tmp_path, gradient_checkpointing=True)
    calls = counted(trainer)
    trainer.train()
    assert len(calls) == 4


# Quantized weights


def quantized(folder: Path, name: str, **options: Any) -> DiffusionLM:
    if not folder.exists():
        quantizable_llama_lm().save(folder)
    return load(folder, quantization=name, **options)


def adapters(**more: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", **more)


@needs_bitsandbytes
@pytest.mark.parametrize(
    ("name", "kind", "stored"), [("4bit", "Linear4bit", torch.uint8), ("8bit", "Linear8bitLt", torch.int8)]
)
def test_a_quantized_model_trains_its_adapters_alone_and_is_saved_whole(name, kind, stored, tmp_path):
    lm = quantized(tmp_path / "model", name, dtype="bfloat16" if name == "4bit" else "float32")
    model, block = lm.model, lm.model.model.layers[0]
    assert {type(block.mlp.up_proj).__name__, type(block.self_attn.o_proj).__name__} == {kind}
    assert block.mlp.up_proj.weight.dtype == stored
    if name == "4bit":
        assert block.mlp.up_proj.weight.quant_state.nested and block.mlp.up_proj.weight.quant_type == "nf4"
    assert type(model.lm_head) is torch.nn.Linear and model.lm_head.weight.is_floating_point()
    assert model.get_input_embeddings().weight.is_floating_point()

    start = {key: value for key, value in weights(lm).items() if value.dtype == stored}
    trainer = make("sft", tmp_path / "run", lm, peft_config=adapters(), max_steps=16, learning_rate=0.05)
    before = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] < before
    assert all(
        ("lora_" in key) == weight.requires_grad for key, weight in trainer.lm.model.named_parameters()
    )
    assert block.input_layernorm.weight.dtype == torch.float32  # peft.prepare_model_for_kbit_training
    after = {
        key.removeprefix("base_model.model.").replace(".base_layer", ""): value
        for key, value in weights(trainer.lm).items()
    }
    assert start and all(torch.equal(after[key], value) for key, value in start.items())

    trainer.save_model(str(tmp_path / "whole"))
    whole, ids = load(tmp_path / "whole"), torch.tensor([[1, 4, 5, 6, lm.mask_token_id, 7]])
    assert type(whole.model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    trainer.lm.model.eval()
    expected = trainer.lm.logits(ids)
    # computed in bfloat16, or on inputs in 8 bits
    torch.testing.assert_close(whole.logits(ids), expected, rtol=0, atol=0.02)
    assert (quantizable_llama_lm().logits(ids) - expected).nan_to_num().abs().max() > 0.2


@needs_bitsandbytes
def test_a_resumed_run_of_a_quantized_model_is_the_same_run(tmp_path):
    def run() -> DiffusionTrainer:
        torch.manual_seed(0)
        lm = quantized(tmp_path / "model", "4bit")
        saving = {
            "save_strategy": "steps",
            "save_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "eval_dataset": PAIRS,
        }
        return make("sft", tmp_path / "run", lm, peft_config=adapters(), max_steps=4, **saving)

    straight, resumed = run(), run()
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert equal(weights(resumed.lm), weights(straight.lm))


@needs_bitsandbytes
def test_quantized_weights_without_adapters_are_refused(tmp_path):
    with raises(ConfigError, where="model.quantization and lora"):
        make("sft", tmp_path, quantized(tmp_path / "model", "4bit"))


def test_quantization_that_cannot_be_is_refused(tmp_path, monkeypatch):
    llama_lm().save(tmp_path)
    with raises(ModelError, where="quantization"):
        load(tmp_path, quantization="3bit")
    with raises(ModelError, where="dtype"):
        load(tmp_path, quantization="4bit", dtype="float64")
    with raises(ConfigError, where="quantization"):
        StartConfig(path="x", quantization="3bit")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ModelError, where="quantization"):
        load(tmp_path, quantization="4bit")


# FlashAttention


@pytest.mark.parametrize("verb", TRAINERS)
def test_flash_attention_serves_every_pass_and_changes_nothing(verb, tmp_path, monkeypatch):
    plain = prepared(verb, tmp_path, optim="sgd")
    plain.train()
    with raises(ConfigError, where="flash_attention and use_cpu"):
        prepared(verb, tmp_path, flash_attention=True)
    calls: list[int] = []
    monkeypatch.setattr(hardware_checks, "check_flash_attention", lambda *_: None)
    monkeypatch.setattr(flash, "usable", lambda query: True)
    monkeypatch.setattr(
        flash, "varlen_attn", lambda *given, **more: (calls.append(1), by_definition(*given, **more))[1]
    )
    trainer = prepared(verb, tmp_path, optim="sgd", flash_attention=True)
    passes = counted(trainer)
    trainer.train()
    torch.testing.assert_close(weights(trainer.lm), weights(plain.lm), rtol=0, atol=1e-6)
    assert len(calls) == 2 * len(passes) > 0  # of two layers


@pytest.mark.parametrize(
    ("capability", "options", "attention", "where"),
    [
        ((7, 5), {"bf16": True}, "bidirectional", "flash_attention"),
        ((8, 0), {"bf16": True, "use_cpu": True}, "bidirectional", "flash_attention and use_cpu"),
        ((8, 0), {}, "bidirectional", "flash_attention and model.dtype"),
        ((8, 0), {"bf16": True}, "block_causal", "flash_attention and model.attention"),
        ((8, 0), {"bf16": True}, "causal", None),
    ],
)
def test_flash_attention_is_refused_where_it_could_not_act(
    capability, options, attention, where, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    args = SimpleNamespace(
        **{"flash_attention": True, "use_cpu": False, "bf16": False, "fp16": False} | options
    )
    with raises(ConfigError, where=where) if where else nullcontext():
        hardware_checks.check_flash_attention(args, subject(attention))


# torch.compile


def compiled_run(folder: Path, verb: str, attention: str, block_size: int | None, backend: str) -> int:
    """The number of graphs of a run of eight steps, whose losses must equal the plain ones."""

    def run(**more: Any) -> list[float]:
        return losses(
            prepared(verb, folder, llama_lm(attention, block_size), max_steps=8, learning_rate=1e-3, **more)
        )

    plain = run()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = run(torch_compile=True, torch_compile_backend=backend)
    assert len(compiled) == 8 and compiled == pytest.approx(plain, rel=1e-5)
    assert not torch._dynamo.utils.counters["graph_break"]
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.usefixtures("dynamo_as_it_was")
@pytest.mark.parametrize(
    ("verb", "attention", "block_size"),
    [pytest.param("grpo", *ATTENTIONS[0], marks=pytest.mark.slow), ("sft", *ATTENTIONS[-1])],
)
def test_compiled_steps_share_a_graph_whatever_is_hidden(verb, attention, block_size, tmp_path):
    # one, and one for sizes that vary
    assert 1 <= compiled_run(tmp_path, verb, attention, block_size, "eager") <= 3


@pytest.mark.usefixtures("dynamo_as_it_was")
@partly_slow("verb", ["sft", "grpo"], 0)
def test_a_compiled_model_that_a_trainer_is_given_runs_compiled(verb, tmp_path):
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: (ran.append(1), graph.forward(*args))[1]

    def trainer(name: str) -> Any:
        return prepared(verb, tmp_path / name, llama_lm("bidirectional"), max_steps=3, learning_rate=1e-3)

    plain, given = losses(trainer("plain")), trainer("given")
    given.model = torch.compile(given.model, backend=backend)
    assert given.model is given.lm.model and not hasattr(given.model, "_orig_mod")
    assert losses(given) == pytest.approx(plain, rel=1e-5) and len(ran) >= 3
    given.save_model(str(tmp_path / "model"))
    assert equal(weights(load(tmp_path / "model")), weights(given.lm))
    modes = trainer("modes")
    modes.model = torch.compile(modes.model, mode="reduce-overhead")
    assert modes.lm.compile_options["backend"].config == {"triton.cudagraphs": True}
    stays = modes.model
    modes.model = stays
    assert modes.model is stays


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo_as_it_was")
@partly_slow("place", ["trainer.lm", "conversion", "conversion.lm"], 0)
def test_wherever_a_compiled_model_is_assigned_it_runs_compiled(place, tmp_path):
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: (ran.append(1), graph.forward(*args))[1]

    if place == "trainer.lm":
        trainer = make("sft", tmp_path, llama_lm("bidirectional"))
    else:
        args = ConvertConfig(**settings(tmp_path, max_length=32, packing=False, max_steps=10))
        trainer = ConvertTrainer(llama_lm("causal"), args, train_dataset=TEXTS)
    owner = trainer.lm if place.endswith("lm") else trainer
    owner.model = torch.compile(owner.model, backend=backend)
    trainer.train()
    assert len(ran) >= trainer.args.max_steps


@pytest.mark.usefixtures("dynamo_as_it_was")
@pytest.mark.parametrize(
    ("verb", "attention", "block_size"),
    [
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("sft", "bidirectional", None),
                ("dpo", "bidirectional", None),
                ("pretrain", "causal", None),
                ("sft", "block_causal", 2),
            )
        ],
        pytest.param("grpo", *ATTENTIONS[0], marks=pytest.mark.slow),
        pytest.param("grpo", "causal", None, marks=pytest.mark.nightly),
        pytest.param("convert", None, None, marks=pytest.mark.slow),
    ],
)
def test_every_pass_runs_compiled_and_in_few_graphs(verb, attention, block_size, tmp_path, monkeypatch):
    """The passes of training, rollouts, scoring and evaluation, and those of a frozen reference or
    teacher."""
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        number = len(compiled)
        compiled.append(graph)
        return lambda *args: (ran.append(number), graph.forward(*args))[1]

    compiled: list[Any] = []
    monkeypatch.setitem(registry._COMPILER_FNS, "eager", backend)
    rows: dict[str, Any] = {"eval_dataset": PAIRS[:3]} if verb in ("sft", "grpo") else {}
    rows |= {"dpo": {"reference": "frozen"}, "grpo": {"beta": 0.1}}.get(verb, {})
    compiling: dict[str, Any] = {"max_steps": 4, "torch_compile": True, "torch_compile_backend": "eager"}
    if verb == "convert":
        args = ConvertConfig(
            **settings(tmp_path, max_length=32, distillation=0.5, **compiling | {"max_steps": 8})
        )
        trainer: Any = ConvertTrainer(llama_lm("causal"), args, train_dataset=TEXTS, eval_dataset=TEXTS[:2])
    else:
        trainer = prepared(verb, tmp_path, llama_lm(attention, block_size), **compiling, **rows)
    passes: list[bool] = []
    run = DiffusionLM.run_model

    def counting(lm: DiffusionLM, *args: Any) -> Any:
        before = len(ran)
        out = run(lm, *args)
        passes.append(len(ran) > before)
        return out

    monkeypatch.setattr(DiffusionLM, "run_model", counting)
    trainer.train()
    if verb in ("sft", "grpo"):
        trainer.evaluate()
    assert len(passes) >= 4 and all(passes), passes
    assert len(compiled) <= 8


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo_as_it_was")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_trains_as_the_plain_one(backend, tmp_path):
    assert 1 <= compiled_run(tmp_path, "pretrain", "causal", None, backend) <= 3


# Precision


@pytest.mark.parametrize("verb", TRAINERS)
def test_bfloat16_computes_in_16_bits_on_weights_in_32(verb, tmp_path):
    plain, trainer = prepared(verb, tmp_path), prepared(verb, tmp_path, bf16=True)
    expected, found = counted(plain), counted(trainer)
    plain.train()
    trainer.train()
    assert set(expected) == {torch.float32} and set(found) == {torch.bfloat16}
    assert {weight.dtype for weight in trainer.lm.model.parameters()} == {torch.float32}
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    assert {value.dtype for value in states} == {torch.float32}


def test_weights_in_bfloat16_train(tmp_path):
    llama_lm().save(tmp_path / "model")
    lm = load(tmp_path / "model", dtype="bfloat16")
    start = weights(lm)
    trainer = make("sft", tmp_path / "run", lm)
    assert all(torch.isfinite(torch.tensor(losses(trainer))))
    assert {weight.dtype for weight in lm.model.parameters()} == {torch.bfloat16}
    assert not equal(weights(lm), start)


@pytest.mark.usefixtures("tf32_restored")
def test_tf32_sets_the_switch_of_torch_and_is_off_by_default(tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("pretends to have a GPU, and this machine has one")
    before = torch.backends.fp32_precision
    make("sft", tmp_path)
    assert torch.backends.fp32_precision == before != "tf32"
    with pytest.raises(ValueError, match="requires Ampere"):
        make("sft", tmp_path, tf32=True)
    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: True)
    for verb, wanted in [("sft", True), ("grpo", False), ("grpo", True), ("sft", False)]:
        make(verb, tmp_path, tf32=wanted)
        assert (
            torch.backends.fp32_precision
            == torch.backends.cuda.matmul.fp32_precision
            == ("tf32" if wanted else "ieee")
        )
        assert torch.backends.cudnn.conv.fp32_precision == torch.backends.fp32_precision
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is wanted
        assert torch.get_float32_matmul_precision() == ("high" if wanted else "highest")
    torch.backends.fp32_precision = "tf32"  # as transformers does for torch_compile
    make("sft", tmp_path)
    assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32


def test_kernels_of_a_library_that_is_missing_are_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware_checks, "is_liger_kernel_available", lambda: False)
    with raises(ConfigError, where="use_liger_kernel"):
        SFTConfig(output_dir=str(tmp_path), use_liger_kernel=True)
    monkeypatch.setattr(hardware_checks, "is_liger_kernel_available", lambda: True)
    SFTConfig(output_dir=str(tmp_path), use_liger_kernel=True)


@pytest.mark.parametrize("verb", TRAINERS)
def test_cudnn_tries_its_algorithms_where_asked_to_and_where_it_is(verb, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    make(verb, tmp_path)
    assert not torch.backends.cudnn.benchmark
    for available, options in [(False, {"use_cpu": False}), (True, {"use_cpu": True})]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        with raises(ConfigError, where="cudnn_benchmark"):
            make(verb, tmp_path, cudnn_benchmark=True, **options)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    hardware_checks.set_backends(SimpleNamespace(tf32=None, cudnn_benchmark=True, use_cpu=False))
    assert torch.backends.cudnn.benchmark


# Transfer


@pytest.mark.parametrize("verb", TRAINERS)
def test_pinned_memory_and_asynchronous_copies_reach_the_loader(verb, tmp_path):
    trainer = make(verb, tmp_path)
    assert not trainer.get_train_dataloader().base_dataloader.pin_memory
    trainer.args.dataloader_pin_memory = True  # as the config sets them where there is a GPU
    trainer.args.accelerator_config.non_blocking = True
    trainer.create_accelerator_and_postprocess()
    loader = trainer.get_train_dataloader()
    assert loader.base_dataloader.pin_memory and loader._non_blocking


@partly_slow("verb", TRAINERS, 0)
def test_rows_are_read_by_as_many_workers_as_asked_for_and_are_the_same(verb, tmp_path):
    plain, trainer = prepared(verb, tmp_path), prepared(verb, tmp_path, dataloader_num_workers=2)
    assert losses(trainer) == losses(plain)
    assert (plain.get_train_dataloader().num_workers, trainer.get_train_dataloader().num_workers) == (0, 2)


# Sharding: what is refused in one process


def test_sharding_that_would_not_act_is_refused(tmp_path):
    with raises(ConfigError, where="fsdp"), warnings.catch_warnings():
        make("sft", tmp_path, fsdp=True)


def test_deepspeed_configs_are_presets_files_or_mappings(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, where="deepspeed"):
        make("sft", tmp_path, deepspeed="zero1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with raises(ConfigError, where="deepspeed"):
        make("sft", tmp_path, deepspeed="zero1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert [deepspeed_config(f"zero{stage}")["zero_optimization"]["stage"] for stage in (1, 2, 3)] == [
        1,
        2,
        3,
    ]
    mapping = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert deepspeed_config(mapping) == mapping
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert deepspeed_config(str(tmp_path / "zero.json")) == {"zero_optimization": {"stage": 1}}
    with raises(ConfigError, where="deepspeed"):
        deepspeed_config("zero4")
    with raises(ConfigError, where="deepspeed.zero_optimization.stage3_gather_16bit_weights_on_model_save"):
        deepspeed_config({"zero_optimization": {"stage": 3}})
