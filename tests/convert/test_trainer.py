"""Each stage of a conversion trains the weights that it names at its learning rate; the result is a diffusion
model."""

from __future__ import annotations

import gc
import json
import math
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from safetensors import safe_open
from transformers import TrainerCallback
from typer.testing import CliRunner

from tests.errors import raises
from tests.helpers import partly_slow
from tests.tiny import llama_causal, llama_lm
from tests.training.tiny_runs import PAIRS, TEXTS, batch, equal, make, settings, weights
from unmask.cli import app
from unmask.config.sampler import SamplerConfig
from unmask.convert.config import ConvertConfig
from unmask.convert.stages import STAGES, ConversionStage
from unmask.convert.trainer import ConvertTrainer, StageTrainer
from unmask.data.rows import Collator
from unmask.errors import ConfigError, DataError, TrainingError
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.training.trainer import DiffusionTrainer


def convert(folder: Path, lm: DiffusionLM | None = None, rows: Any = None, **more: Any) -> ConvertTrainer:
    names = ("eval_dataset", "progress", "peft_config", "callbacks", "data_collator")
    taken = {name: more.pop(name) for name in names if name in more}
    return ConvertTrainer(
        lm or llama_lm("causal"),
        ConvertConfig(**settings(folder, max_steps=10, max_length=32) | more),
        train_dataset=rows or TEXTS,
        **taken,
    )


def converted(folder: Path, lm: DiffusionLM | None = None, **more: Any) -> dict[str, torch.Tensor]:
    trainer = convert(folder, lm, **more)
    trainer.train()
    return weights(trainer.lm)


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            name: value
            for name, value in line.items()
            if not name.endswith(("_runtime", "_per_second", "train_loss"))
        }
        for line in lines
    ]


def logged(folder: Path) -> list[dict[str, Any]]:
    """The log of a run, without its timings and transformers' mean loss, which is that of the steps since the
    resume."""
    return untimed([json.loads(line) for line in (folder / "training_logs.json").read_text().splitlines()])


def stage_trainer(folder: Path, rows: Any, **more: Any) -> StageTrainer:
    """The trainer of the second stage."""
    whole = convert(folder, rows=rows, **more)
    return StageTrainer(
        whole.lm,
        whole.args,
        train_dataset=whole.train_rows,
        stage=STAGES[1],
        teacher=None,
        steps_before=1,
        total_steps=10,
    )


@pytest.mark.parametrize("tied", [True, False])
def test_the_first_stage_moves_attention_and_the_mask_row_and_nothing_else(tied, tmp_path):
    lm = llama_lm("causal", tie_word_embeddings=tied)
    start = weights(lm)
    end = converted(tmp_path, lm, stages=STAGES[:1], weight_decay=0.1)
    mask = lm.mask_token_id
    for name, before in start.items():
        if ".self_attn." in name:
            assert not torch.equal(end[name], before), name
        elif name == "model.embed_tokens.weight" or (tied and name == "lm_head.weight"):
            others = torch.arange(len(before)) != mask
            assert torch.equal(end[name][others], before[others]), name
            assert not torch.equal(end[name][mask], before[mask]), name
        else:
            assert torch.equal(end[name], before), name


def test_after_the_first_stage_everything_is_trained(tmp_path):
    lm = llama_lm("causal")
    start = weights(lm)
    end = converted(tmp_path, lm, stages=STAGES[1:2])
    assert not any(torch.equal(end[name], start[name]) for name in start)
    assert all(parameter.requires_grad for parameter in lm.model.parameters()) and not lm.model.training


def test_the_stages_share_the_steps_and_scale_the_rate(tmp_path):
    trainer = convert(tmp_path, max_steps=10, lr_scheduler_type="constant", eval_dataset=TEXTS[:2])
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["stage"] for line in lines] == [1] + [2] * 6 + [3] * 3
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.5e-2] + [1e-2] * 6 + [0.3e-2] * 3)
    assert ["lm_cross_entropy" in line for line in lines] == [False] * 7 + [True] * 3
    assert [line["stage"] for line in trainer.state.log_history if "eval_loss" in line] == [1, 2, 3]


def test_a_stage_ends_at_its_final_rate(tmp_path):
    stages = [
        ConversionStage(rate=1, final_rate=0.4),
        ConversionStage(rate=0.4, final_rate=0.1),
        ConversionStage(rate=1),
    ]
    trainer = convert(tmp_path, max_steps=12, lr_scheduler_type="constant", stages=stages)
    trainer.train()
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    # the rate that a step is made with
    down = [0.5 + 0.5 * math.cos(math.pi * step / 4) for step in range(4)]
    assert rates == pytest.approx(
        [1e-2 * (0.4 + 0.6 * share) for share in down]
        + [1e-2 * (0.1 + 0.3 * share) for share in down]
        + [1e-2] * 4
    )


@pytest.mark.parametrize("steps", range(6, 10))
def test_the_shares_add_up(steps, tmp_path):
    trainer = convert(tmp_path, max_steps=steps)
    trainer.train()
    assert len([line for line in trainer.state.log_history if "loss" in line]) == steps


def test_no_stage_repeats_the_masks_of_another(tmp_path, monkeypatch):
    seen: dict[float, list[bytes]] = {}

    def plan(trainer: StageTrainer, rows: Any, draw: Any) -> Any:
        views = original(trainer, rows, draw)
        seen.setdefault(trainer.stage.rate, []).append(views.hidden_BMT.numpy().tobytes())
        return views

    original = StageTrainer.plan
    monkeypatch.setattr(StageTrainer, "plan", plan)
    converted(tmp_path, rows=[{"text": "abcdefgh" * 3}] * 64, packing=False)
    assert len(seen) == 3 and len({mask for masks in seen.values() for mask in masks}) == 10


def test_epochs_are_shared_out_like_steps(tmp_path):
    trainer = convert(tmp_path, max_steps=-1, num_train_epochs=5.0, packing=False)  # 8 rows in batches of 4
    trainer.train()
    assert [line["stage"] for line in trainer.state.log_history if "loss" in line] == [1] + [2] * 6 + [3] * 3


def test_the_auxiliary_loss_is_the_causal_one_of_the_same_weights(tmp_path):
    def losses(lm_loss: float) -> dict[str, float]:
        stage = ConversionStage(share=1, rate=1, lm_loss=lm_loss)
        trainer = convert(tmp_path, stages=[stage], max_steps=1)
        trainer.train()
        return trainer.state.log_history[0]

    without, added = losses(0.0), losses(0.25)
    pretrainer = make("pretrain", tmp_path, packing=True)
    causal = pretrainer.compute_loss(
        pretrainer.model, batch(pretrainer, *range(len(pretrainer.train_dataset)))
    ).item()
    assert added["lm_cross_entropy"] == pytest.approx(causal, rel=1e-5)
    assert added["loss"] == pytest.approx(without["loss"] + 0.25 * causal, rel=1e-4)


@pytest.mark.parametrize(
    "pattern",
    [
        {"attention": "bidirectional"},
        {"attention": "bidirectional", "logit_shift": True},
        {"attention": "bidirectional", "schedule": "cosine"},
        {"attention": "block_causal", "block_size": 4},
        {"attention": "block_causal", "block_size": 4, "complementary": True},
        {"attention": "block_causal", "block_size": 1, "logit_shift": True},
    ],
    ids=lambda pattern: " ".join(map(str, pattern.values())),
)
def test_the_converted_model_has_its_pattern_and_survives_saving(pattern, tmp_path):
    lm = llama_lm("causal")
    trainer = convert(tmp_path / "run", lm, max_steps=6, **pattern)
    trainer.train()
    trainer.save_model(tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert loaded.settings == trainer.lm.settings
    assert loaded.attention == pattern["attention"] and loaded.block_size == pattern.get("block_size")
    assert loaded.logit_shift == pattern.get("logit_shift", False)
    ids = torch.tensor([[1, 4, 5, 6, lm.mask_token_id, 7]])
    assert torch.equal(loaded.logits(ids), trainer.lm.logits(ids))


def test_complementary_views_learn_every_token_in_each_step(tmp_path):
    trainer = stage_trainer(tmp_path, TEXTS, attention="block_causal", block_size=4, complementary=True)
    rows = trainer.data_collator(list(trainer.train_dataset))
    views = trainer.plan(rows, trainer.draw(rows))
    assert views.count == 2
    assert torch.equal(views.target_BMT.sum(1), rows["maskable"].long())


def test_pairs_hide_the_completion_alone_with_its_canvas(tmp_path, capsys):
    trainer = stage_trainer(tmp_path, PAIRS, canvas_length=8)
    rows = trainer.data_collator(list(trainer.train_dataset))
    views = trainer.plan(rows, trainer.draw(rows))
    assert rows["maskable"].sum(1).tolist() == [8] * len(PAIRS)
    assert not (views.hidden_BMT[:, 0] & ~rows["maskable"]).any()
    capsys.readouterr()
    converted(tmp_path, rows=PAIRS, canvas_length=8, max_steps=6, disable_tqdm=False)
    assert capsys.readouterr().out.count("train_dataset: rows") == 1  # not once a stage


@partly_slow(
    "lost",
    [
        ("stage-2/checkpoint-6", "stage-3"),  # stopped in the middle of the second stage
        ("stage-2", "stage-3"),  # between the first and the second
        ("stage-3",),
        ("stage-3/checkpoint-3",),
        (),  # it was over
    ],
    *(0, 3),
    ids=lambda lost: " ".join(lost) or "nothing",
)
def test_a_conversion_resumed_anywhere_is_the_same_bit_for_bit(lost, tmp_path):
    # A constant rate, so that a step too many shows; two steps an epoch, so that stages end in the middle of
    # one.
    run = {"lr_scheduler_type": "constant", "packing": False, "save_strategy": "steps", "save_steps": 2}
    straight = converted(tmp_path, **run)
    for name in lost:
        shutil.rmtree(tmp_path / name)
    trainer = convert(tmp_path, **run)
    trainer.train(resume_from_checkpoint=True)
    assert equal(weights(trainer.lm), straight)


@pytest.mark.parametrize("adapters", [False, pytest.param(True, marks=pytest.mark.slow)])
@partly_slow(
    "named", ["stage-1/checkpoint-1", "stage-2/checkpoint-2", "stage-2", ".", "stage-3/checkpoint-2"], 1
)
def test_a_conversion_goes_on_from_the_checkpoint_of_any_stage_in_another_folder(named, adapters, tmp_path):
    run = {"lr_scheduler_type": "constant", "packing": False, "save_strategy": "steps", "save_steps": 2}
    run |= {"peft_config": lora()} if adapters else {}
    straight = convert(tmp_path / "first", **run)
    straight.train()
    # its own folder: the last checkpoint
    convert(tmp_path / "first", **run).train(resume_from_checkpoint=tmp_path / "first")
    trainer = convert(tmp_path / "second", llama_lm("causal"), **run)
    trainer.train(resume_from_checkpoint=tmp_path / "first" / named)
    assert equal(weights(trainer.lm), weights(straight.lm))
    told, first = (untimed(one.lm.config.unmask_history) for one in (trainer, straight))
    assert [line["steps"] for line in told] == [line["steps"] for line in first] == [1, 6, 3]


def test_a_checkpoint_that_no_conversion_can_go_on_from_is_refused(tmp_path):
    run = {"save_strategy": "steps", "save_steps": 2, "max_steps": 10}
    convert(tmp_path / "first", **run).train()
    make("sft", tmp_path / "sft", save_strategy="steps", save_steps=2).train()
    for path, where in (("sft", "sft/checkpoint-2"), ("nowhere", "nowhere")):
        with raises(TrainingError, where=str(tmp_path / where)):
            convert(tmp_path / "second", **run).train(resume_from_checkpoint=tmp_path / path)
    with raises(TrainingError, where=str(tmp_path / "first/stage-3/checkpoint-3")):
        convert(tmp_path / "first", **run).train(
            resume_from_checkpoint=tmp_path / "first/stage-2/checkpoint-2"
        )
    with raises(ConfigError, where="max_steps"):
        convert(tmp_path / "third", **run | {"max_steps": 6}).train(
            resume_from_checkpoint=tmp_path / "first/stage-2/checkpoint-6"
        )
    with raises(ConfigError, where="stages"):
        convert(tmp_path / "third", **run, stages=STAGES[:1]).train(resume_from_checkpoint=tmp_path / "first")


OWN_CODE = """
from transformers import LlamaForCausalLM

class MineForCausalLM(LlamaForCausalLM):
    pass
"""


def test_whole_weights_between_sharded_stages_keep_the_code_that_came_with_the_model(tmp_path):
    llama_lm("causal").save(tmp_path / "mine")
    (tmp_path / "mine/modeling_mine.py").write_text(OWN_CODE)
    config = json.loads((tmp_path / "mine/config.json").read_text()) | {"architectures": ["MineForCausalLM"]}
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    (tmp_path / "mine/config.json").write_text(json.dumps(config))
    trainer = convert(
        tmp_path / "run", load(tmp_path / "mine", trust_remote_code=True), stages=STAGES[1:2], max_steps=1
    )
    trainer.train()
    before = weights(trainer.lm)
    trainer.gather_weights(trainer.trainer)
    assert type(trainer.lm.model).__name__ == "MineForCausalLM" and equal(weights(trainer.lm), before)


@partly_slow(
    "lost", [("stage-2/checkpoint-6", "stage-3"), ("stage-3",), ("stage-2", "stage-3"), ()], 0, ids=str
)
def test_a_finished_stage_is_loaded_alone_and_the_log_is_that_of_the_whole_run(lost, tmp_path, monkeypatch):
    run = {"save_strategy": "steps", "save_steps": 2, "eval_dataset": TEXTS[:2]}
    straight = convert(tmp_path, **run)
    straight.train()
    lines = logged(tmp_path)
    for name in lost:
        shutil.rmtree(tmp_path / name)
    trained: list[int] = []
    inner = StageTrainer.train
    monkeypatch.setattr(
        StageTrainer,
        "train",
        lambda self, *rest, **more: (trained.append(self.args.seed - 41), inner(self, *rest, **more)),
    )
    resumed = convert(tmp_path, **run)
    resumed.train(resume_from_checkpoint=True)
    assert trained == [
        number for number in (1, 2, 3) if any(name.startswith(f"stage-{number}") for name in lost)
    ]
    assert logged(tmp_path) == lines and untimed(resumed.state.log_history) == untimed(
        straight.state.log_history
    )
    assert equal(weights(resumed.lm), weights(straight.lm))
    told, first = (untimed(trainer.lm.config.unmask_history) for trainer in (resumed, straight))
    assert told == first


def test_a_stage_killed_before_its_evaluation_is_evaluated(tmp_path):
    run = {"save_strategy": "steps", "save_steps": 2, "eval_dataset": TEXTS[:2]}
    converted(tmp_path, **run)
    lines = logged(tmp_path)
    log = tmp_path / "training_logs.json"
    # the summary of the last stage, and its evaluation
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-2]))
    converted_again = convert(tmp_path, **run)
    converted_again.train(resume_from_checkpoint=True)
    assert logged(tmp_path) == lines


def test_a_streamed_conversion_goes_through_its_rows_once_and_resumes_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("unmask.training.run.fingerprints.STREAMED_ROWS", 1)
    run = {
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": 2,
        "max_length": 7,
        "max_steps": 10,
    }
    seen: list[int] = []

    def recorded(rows: Any) -> Any:
        seen.extend(row["sample_id"] for row in rows)
        return Collator(0)(rows)

    trainer = convert(
        tmp_path, rows=Dataset.from_list(TEXTS).to_iterable_dataset(), data_collator=recorded, **run
    )
    trainer.train()
    assert sorted(set(seen)) == list(range(len(set(seen)))) and len(set(seen)) >= 40
    shutil.rmtree(tmp_path / "stage-2/checkpoint-6")
    shutil.rmtree(tmp_path / "stage-3")
    others = [*TEXTS[:-1], {"text": "abcabc"}]
    with raises(DataError, where="train_dataset"):
        convert(tmp_path, rows=Dataset.from_list(others).to_iterable_dataset(), **run).train(
            resume_from_checkpoint=True
        )
    resumed = convert(tmp_path, rows=Dataset.from_list(TEXTS).to_iterable_dataset(), **run)
    resumed.train(resume_from_checkpoint=True)
    assert equal(weights(resumed.lm), weights(trainer.lm))


def test_a_stream_of_pairs_is_refused(tmp_path):
    with raises(DataError, where="train_dataset"):
        convert(tmp_path, rows=Dataset.from_list(PAIRS).to_iterable_dataset())
    with raises(DataError, where="train_dataset"):
        convert(tmp_path, rows=iter(TEXTS))


def test_rows_that_are_texts_are_refused(tmp_path):
    with raises(DataError, where="train_dataset, row 0"):
        convert(tmp_path, rows=["abc", "de"])


def test_progress_goes_once_from_start_to_end(tmp_path):
    fractions: list[float] = []

    class Recorder:
        def update(self, fraction: float, **metrics: float) -> None:
            fractions.append(fraction)

    converted(tmp_path, progress=Recorder())
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    assert {0.1, 0.7} <= {round(fraction, 6) for fraction in fractions}


def test_what_cannot_be_converted_is_refused(tmp_path):
    with raises(ConfigError, where="attention"):
        convert(tmp_path, attention="causal")
    with raises(ConfigError, where="block_size"):
        convert(tmp_path, attention="bidirectional", block_size=4)
    for empty in ([], [{"text": ""}]):
        with raises(DataError, where="train_dataset"):
            ConvertTrainer(llama_lm("causal"), ConvertConfig(**settings(tmp_path)), train_dataset=empty)
    with raises(DataError, where="train_dataset, row 5"):
        convert(tmp_path, rows=[*TEXTS[:5], {"prompt": "a"}])
    with raises(DataError, where="eval_dataset, row 1"):
        convert(tmp_path, eval_dataset=[PAIRS[0], {"prompt": "a"}])
    assert not list(tmp_path.iterdir())
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["up_proj"])
    with raises(ConfigError, where="time_embedding and lora"):
        convert(tmp_path, peft_config=lora, time_embedding=True)
    with raises(ConfigError, where="stages, stage 1, train"):
        convert(tmp_path, peft_config=lora, stages=[{"train": ["attention"]}])
    for setting, named in (
        ("modules_to_save", ["embed_tokens"]),
        ("target_modules", ["q_proj", "embed_tokens"]),
    ):
        table = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]} | {setting: named})
        with raises(ConfigError, where=f"lora (peft_config), {setting}"):
            convert(tmp_path, peft_config=table)
    with raises(ConfigError, where="lora (peft_config)"):
        convert(tmp_path, peft_config=peft.IA3Config(task_type="CAUSAL_LM"))


# Adapters


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_conversion_with_adapters_trains_them_and_the_mask_row_and_merges_them(tied, tmp_path):
    lm = llama_lm("causal", tie_word_embeddings=tied)
    start, mask = weights(lm), lm.mask_token_id
    trainer = convert(tmp_path / "run", lm, peft_config=lora(), weight_decay=0.1)
    trainer.train()
    trainer.save_model(tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert loaded.settings == trainer.lm.settings and loaded.attention == "bidirectional"
    end, others = weights(loaded), torch.arange(len(start["model.embed_tokens.weight"])) != mask
    for name, before in start.items():
        if name == "model.embed_tokens.weight" or (tied and name == "lm_head.weight"):
            assert torch.equal(end[name][others], before[others]) and not torch.equal(
                end[name][mask], before[mask]
            ), name
        else:
            assert torch.equal(end[name], before) == ("_proj" not in name), name
    ids = torch.tensor([[1, 4, mask, 6]])
    torch.testing.assert_close(loaded.logits(ids), trainer.lm.logits(ids), rtol=0, atol=1e-5)
    losses = [line["cross_entropy"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 10


def test_the_first_stage_trains_the_adapters_of_attention_and_the_mask_row_alone(tmp_path):
    trainer = convert(tmp_path, peft_config=lora(), stages=STAGES[:1])
    before = {name: parameter.clone() for name, parameter in trainer.lm.model.named_parameters()}
    trainer.train()
    moved = {
        name
        for name, parameter in trainer.lm.model.named_parameters()
        if not torch.equal(parameter, before[name])
    }
    assert moved and all(
        ("self_attn" in name and "lora" in name) or "trainable_tokens_delta" in name for name in moved
    )
    assert any("trainable_tokens_delta" in name for name in moved)


def test_a_model_with_adapters_continues_rows_itself_and_learns_from_a_teacher(tmp_path):
    own = {"lmbda": 1.0, "max_new_tokens": 2, "distillation": 0.5, "alignment": 0.1, "packing": False}
    stages = [{"attention": "block_causal", "block_size": 2}, {"attention": "bidirectional"}]
    trainer = convert(tmp_path, peft_config=lora(), stages=stages, eval_dataset=TEXTS[:3], **own)
    trainer.train()
    assert (
        trainer.lm.attention == "bidirectional"
        and len([line for line in trainer.state.log_history if "eval_loss" in line]) == 2
    )


def test_a_stage_begins_without_the_optimizer_of_the_one_before(tmp_path):
    held: list[int] = []

    class Count(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            gc.collect()
            held.append(sum(isinstance(thing, torch.optim.AdamW) for thing in gc.get_objects()))

    convert(tmp_path, callbacks=[Count()]).train()
    assert held and max(held) <= held[0], held


def test_checkpoints_of_adapters_hold_no_table_where_the_mask_token_is_new(tmp_path):
    model, tokenizer = llama_causal()

    model.save_pretrained(tmp_path / "causal")
    tokenizer.save_pretrained(tmp_path / "causal")
    run = {"packing": False, "save_strategy": "steps", "save_steps": 1, "max_steps": 6}
    trainer = convert(tmp_path / "run", load(tmp_path / "causal"), peft_config=lora(), **run)
    assert trainer.lm.config.vocab_size > model.config.vocab_size
    trainer.train()
    for checkpoint in (tmp_path / "run").glob("stage-*/checkpoint-*"):
        with safe_open(checkpoint / "adapter_model.safetensors", framework="pt") as adapters:
            names = list(adapters.keys())
        assert names and not any(
            name.endswith(("embed_tokens.weight", "lm_head.weight", "base_layer.weight")) for name in names
        ), names
    resumed = convert(tmp_path / "again", load(tmp_path / "causal"), peft_config=lora(), **run)
    resumed.train(resume_from_checkpoint=tmp_path / "run/stage-2/checkpoint-1")
    assert equal(weights(resumed.lm), weights(trainer.lm))


@partly_slow(
    "lost",
    [("stage-1/checkpoint-1", "stage-2", "stage-3"), ("stage-2/checkpoint-6", "stage-3"), ("stage-3",)],
    1,
    ids=str,
)
def test_a_conversion_with_adapters_resumes_bit_for_bit(lost, tmp_path):
    run = {"lr_scheduler_type": "constant", "packing": False, "save_strategy": "steps", "save_steps": 2}
    straight = converted(tmp_path, peft_config=lora(), **run)
    for name in lost:
        shutil.rmtree(tmp_path / name)
    trainer = convert(tmp_path, peft_config=lora(), **run)
    trainer.train(resume_from_checkpoint=True)
    assert equal(weights(trainer.lm), straight)


# Annealing, a causal context, and the recipes.


def test_attention_is_causal_at_first_and_full_after_its_share(tmp_path, monkeypatch):
    seen: dict[bool, list[float]] = {True: [], False: []}
    cross_entropy = DiffusionTrainer.cross_entropy

    def spied(self: StageTrainer, lm: DiffusionLM, rows: Any, views: Any) -> torch.Tensor:
        mask, whole = (
            one.noised_inputs(rows["input_ids"], rows["documents"]).mask.allowed_B1QK[:, 0]
            for one in (lm, self.lm)
        )
        assert torch.equal(mask.tril(), whole.tril())
        seen[self.model.training].append((mask.triu(1).sum() / whole.triu(1).sum()).item())
        return cross_entropy(self, lm, rows, views)

    monkeypatch.setattr(StageTrainer, "cross_entropy", spied)
    rows = [{"text": "abcdefgh" * 3}] * 8
    convert(tmp_path, attention_annealing=0.5, max_steps=20, rows=rows, eval_dataset=rows).train()
    assert (
        seen[True][:10] == pytest.approx([step / 11 for step in range(1, 11)], abs=0.15) and seen[True][9] < 1
    )
    assert seen[True][10:] == [1.0] * 10 and set(seen[False]) == {1.0}


@pytest.mark.parametrize("step", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_conversion_resumed_in_the_middle_of_annealing_is_the_same_bit_for_bit(step, tmp_path):
    run = {
        "lr_scheduler_type": "constant",
        "packing": False,
        "save_strategy": "steps",
        "save_steps": 1,
        "attention_annealing": 0.8,
    }
    straight = converted(tmp_path, **run)
    assert not equal(straight, converted(tmp_path / "at_once", **run | {"attention_annealing": 0.0}))
    shutil.rmtree(tmp_path / "stage-3")
    for later in range(step, 7):
        shutil.rmtree(tmp_path / f"stage-2/checkpoint-{later}", ignore_errors=True)
    trainer = convert(tmp_path, **run)
    trainer.train(resume_from_checkpoint=True)
    assert equal(weights(trainer.lm), straight)


def test_annealing_leaves_stages_of_blocks_alone(tmp_path):
    stages = [{"attention": "block_causal", "block_size": 4}]
    plain, annealed = (
        converted(tmp_path / str(share), stages=stages, max_steps=2, attention_annealing=share)
        for share in (0.0, 1.0)
    )
    assert equal(plain, annealed)


@pytest.mark.parametrize(("context", "passes"), [(False, 2), (True, 1)])
def test_with_a_causal_context_the_auxiliary_loss_takes_no_second_pass(context, passes, tmp_path):
    lm, calls = llama_lm("causal"), []
    lm.model.register_forward_hook(lambda *_: calls.append(1))
    trainer = convert(
        tmp_path, lm, attention="block_causal", causal_context=context, stages=[{"lm_loss": 0.5}], max_steps=3
    )
    trainer.train()
    assert len(calls) == 3 * passes and all(
        line["lm_cross_entropy"] > 0 for line in trainer.state.log_history if "loss" in line
    )


RECIPES = {
    "block": ("block_causal", 4),
    "block-sdar": ("block_causal", 4),
    "full": ("bidirectional", None),
    "growing": ("block_causal", 32),
    "distilled": ("block_causal", 4),
    "on-policy": ("block_causal", 4),
}
QUICK = {
    "distilled": {"max_new_tokens": 4},
    "on-policy": {"max_new_tokens": 8, "start_new_tokens": 4, "max_length": 32},
}
"""Settings of recipes for short rows."""
LONG = [
    {"text": "abcdefgh" * 4},
    {"text": "hgfedcba" * 2},
    {"text": "aabbccdd" * 3},
    {"text": "cafe" * 3},
] * 2


STEPS = {name: 26 if name == "growing" else 10 for name in RECIPES}  # every stage has one at least


def recipe(name: str, folder: Path, **more: Any) -> ConvertConfig:
    return ConvertConfig.for_recipe(
        name, **settings(folder, max_steps=STEPS[name], packing=False, **QUICK.get(name, {})) | more
    )


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows that a recipe reads: texts, or prompts alone."""
    return [{"prompt": row["text"][:5]} for row in LONG] if name == "on-policy" else LONG


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_ends_with_its_pattern_and_a_model_that_writes(name, tmp_path):
    trainer = ConvertTrainer(llama_lm("causal"), recipe(name, tmp_path / "run"), train_dataset=rows_of(name))
    trainer.train()
    stages = {line["stage"] for line in trainer.state.log_history if "loss" in line}
    assert stages == {*range(1, len(trainer.args.stages) + 1)}
    trainer.save_model(tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert (loaded.attention, loaded.block_size) == RECIPES[name] and loaded.settings == trainer.lm.settings
    written = [
        generate(lm, ["abc", "h"], SamplerConfig(max_new_tokens=8)).tokens for lm in (trainer.lm, loaded)
    ]
    assert written[0] == written[1] and all(written[0])


@pytest.mark.parametrize(
    "name",
    [
        "block",
        "full",
        *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(RECIPES.keys() - {"block", "full"})),
    ],
)
def test_accumulating_gradients_changes_no_recipe(name, tmp_path):
    """In float64 and with SGD, so that differences are visible."""
    ends = []
    for size, accumulation in ((4, 1), (1, 4)):
        sizes = {
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": accumulation,
            "optim": "sgd",
            "learning_rate": 0.1,
        }
        lm = llama_lm("causal", dtype=torch.float64)
        trainer = ConvertTrainer(
            lm, recipe(name, tmp_path / str(size), max_grad_norm=1e9, **sizes), train_dataset=rows_of(name)
        )
        start = weights(lm)
        trainer.train()
        ends.append(weights(trainer.lm))
    assert not equal(ends[0], start)
    for end in ends[1:]:
        for key, weight in end.items():
            torch.testing.assert_close(
                weight, ends[0][key], rtol=0, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
            )


def test_a_recipe_gives_way_to_other_settings(tmp_path):
    assert recipe("growing", tmp_path, block_size=8).block_size == 8
    with raises(ConfigError, where="--recipe"):
        ConvertConfig.for_recipe("grwoing")


@partly_slow("name", RECIPES, 0, 1)
def test_recipes_are_a_word_on_the_command_line(name, tmp_path):
    llama_lm("causal").save(tmp_path / "causal")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows_of(name)))
    quick = [
        f"max_steps={STEPS[name]}",
        "max_length=32",
        "per_device_train_batch_size=4",
        "use_cpu=true",
        *(f"{key}={value}" for key, value in QUICK.get(name, {}).items()),
        "packing=false",
    ]
    command = [
        "convert",
        "--recipe",
        name,
        "--model",
        str(tmp_path / "causal"),
        "--data",
        str(tmp_path / "rows.jsonl"),
    ]
    result = CliRunner().invoke(
        app, [*command, "--output", str(tmp_path / "out"), *(f"training.{setting}" for setting in quick)]
    )
    assert result.exit_code == 0, (result.output, result.exception)
    loaded = load(tmp_path / "out/model")
    assert (loaded.attention, loaded.block_size) == RECIPES[name]
    assert generate(loaded, ["abc"], SamplerConfig(max_new_tokens=4)).tokens[0]
