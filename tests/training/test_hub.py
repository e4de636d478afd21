"""What trainers push to the hub is what they trained, with a card that the hub reads; adapters from there are
loaded, and trained further."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, snapshot_download
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from tests.errors import raises
from tests.helpers import each_once, partly_slow
from tests.hub import TOKEN, Hub, running
from tests.tiny import llama_causal, llama_lm
from tests.training.tiny_runs import PAIRS, PREFERENCES, TEXTS, equal, prepared, settings, unmask, weights
from unmask.config.run import LoraSettings, ModelConfig, RunConfig, StartConfig
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.errors import ConfigError, ModelError, NoModelError
from unmask.models.adapters import with_adapters
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.planning.blueprint import ModelSpec
from unmask.training.config import lora_rank

NAME = "user/name"
IDS_BT = torch.tensor([[3, 4, 5, 6, 7, 8]])
ADAPTERS, MODEL = {"adapter_config.json", "adapter_model.safetensors"}, {"model.safetensors"}
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # which PEFT reads
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # of huggingface_hub's uploads
]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with running(tmp_path / "cache") as hub:
        yield hub


@pytest.fixture
def base(tmp_path: Path) -> Path:
    llama_lm("block_causal", block_size=2).save(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def causal(tmp_path: Path) -> Path:
    llama_lm("causal", logit_shift=True).save(tmp_path / "causal")
    return tmp_path / "causal"


def lora(**more: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False} | more)


def logits(lm: DiffusionLM) -> torch.Tensor:
    with torch.no_grad():
        return lm.logits(IDS_BT, hidden_BT=lm.mask_token_id == IDS_BT)


def trainer_of(verb: str, folder: Path, model: Any, *, adapters: bool, **more: Any) -> Any:
    more |= {"push_to_hub": True, "hub_model_id": NAME, "report_to": []} | more
    config = {"peft_config": lora()} if adapters else {}
    if verb != "convert":
        return prepared(verb, folder, model, **config, **{"bound": "elbo"} if verb == "dpo" else {}, **more)
    args = ConvertConfig(**settings(folder, attention="block_causal", block_size=2, max_steps=10) | more)
    return ConvertTrainer(load(model), args, train_dataset=TEXTS, **config)


PUSHED = [
    *(("sft", kind) for kind in ("whole", "adapters", "merged")),
    *((verb, "adapters") for verb in ("pretrain", "convert", "dpo", "grpo")),
    *((verb, kind) for verb in ("pretrain", "convert", "dpo", "grpo") for kind in ("whole", "merged")),
]


@partly_slow("verb, kind", PUSHED, 2, 4)
def test_the_pushed_model_is_the_trained_one(verb, kind, hub, base, causal, tmp_path):
    start = str(causal if verb in ("pretrain", "convert") else base)
    trainer = trainer_of(verb, tmp_path / "run", start, adapters=kind != "whole")
    trainer.train()
    trainer.push_to_hub(merge_adapters=kind == "merged", license="mit", dataset="owner/rows", tags="mine")
    files = hub.files(NAME)
    assert files.keys() & (ADAPTERS | MODEL) == (ADAPTERS if kind == "adapters" else MODEL)
    assert not files.keys() & {"run.json", "training_args.bin", "optimizer.pt"}
    loaded = load(NAME)
    assert loaded.settings == trainer.lm.settings
    torch.testing.assert_close(
        logits(loaded), logits(trainer.lm), rtol=0, atol=0 if kind != "merged" else 1e-5
    )
    data = ModelCard(files["README.md"].decode()).data
    assert (data.license, data.datasets, data.library_name) == ("mit", ["owner/rows"], "unmask")
    assert data.pipeline_tag == "text-generation" and {verb, "mine"} <= set(data.tags)
    assert ("lora" in data.tags) == (kind == "adapters") and data.base_model is None
    assert (
        str(tmp_path) not in files["README.md"].decode()
        and "More Information" not in files["README.md"].decode()
    )
    assert f'unmask.load("{NAME}")' in files["README.md"].decode()


@each_once("strategy, adapters", ["end", "every_save", "checkpoint", "all_checkpoints"], [False, True])
def test_a_strategy_uploads_what_it_says(strategy, adapters, hub, base, tmp_path):
    more = {"save_strategy": "steps", "save_steps": 1, "hub_always_push": True, "hub_token": TOKEN}
    trainer = trainer_of("sft", tmp_path / "run", str(base), adapters=adapters, hub_strategy=strategy, **more)
    trainer.train()
    trainer._finish_current_push()
    paths = hub.files(NAME).keys()
    assert {path.split("/")[0] for path in paths if "/" in path} == {
        "end": set(),
        "every_save": set(),
        "checkpoint": {"last-checkpoint"},
        "all_checkpoints": {"checkpoint-1", "checkpoint-2"},
    }[strategy]
    if strategy == "end":
        assert not paths
        trainer.save_model(str(tmp_path / "saved"))
        assert load(tmp_path / "saved").settings == trainer.lm.settings
    loaded = load(NAME)
    assert torch.equal(logits(loaded), logits(trainer.lm))
    assert not [path for path, content in hub.files(NAME).items() if TOKEN.encode() in content]
    assert not [path for path in paths if "training_args" in path or "unfinished" in path]
    assert ("last-checkpoint/checkpoint_files.json" in paths) == (strategy == "checkpoint")
    card = ModelCard(hub.files(NAME)["README.md"].decode())
    assert "sft" in card.data.tags and "| sft | 8 | 2 |" in card.text
    messages = [message for _, message, _ in hub.repositories[NAME].commits]
    first = "Model save" if strategy == "end" else "Training in progress, step 1"
    assert messages[0] == first and any("checkpoint" in each for each in messages) == (
        "checkpoint" in strategy
    )


def test_a_run_goes_on_from_its_last_checkpoint_on_the_hub(hub, base, tmp_path):
    more = {"save_strategy": "steps", "save_steps": 1, "hub_strategy": "checkpoint"}
    stopped = trainer_of("sft", tmp_path / "run", str(base), adapters=True, **more)
    stopped.train()
    stopped._finish_current_push()
    folder = snapshot_download(NAME, local_dir=tmp_path / "downloaded")
    resumed = trainer_of("sft", tmp_path / "again", str(base), adapters=True, **more)
    resumed.train(resume_from_checkpoint=f"{folder}/last-checkpoint")
    assert equal(weights(resumed.lm), weights(stopped.lm)) and resumed.state.global_step == 2


@pytest.mark.slow
def test_a_conversion_goes_on_from_its_last_checkpoint_on_the_hub(hub, causal, tmp_path):
    def conversion(folder, strategy="checkpoint"):
        more = {"save_strategy": "steps", "save_steps": 1, "hub_strategy": strategy, "hub_always_push": True}
        more |= {"stages": [{"share": 0.5}, {"share": 0.5}], "max_steps": 4}
        return trainer_of("convert", tmp_path / folder, str(causal), adapters=False, **more)

    straight = conversion("run")
    straight.train()
    straight.trainer._finish_current_push()
    folder = snapshot_download(NAME, local_dir=tmp_path / "downloaded")
    resumed = conversion("again")
    resumed.train(resume_from_checkpoint=f"{folder}/last-checkpoint")
    assert equal(weights(resumed.lm), weights(straight.lm)) and resumed.state.global_step == 4
    first = tmp_path / "run/stage-1/checkpoint-1"
    named = first.rename(tmp_path / "last-checkpoint")  # as it was after the first step
    resumed = conversion("middle", "all_checkpoints")
    resumed.train(resume_from_checkpoint=str(named))
    assert equal(weights(resumed.lm), weights(straight.lm)) and resumed.state.global_step == 4
    resumed.trainer._finish_current_push()
    kept = {path.rpartition("/")[0] for path in hub.files(NAME) if path.endswith("run.json")}
    assert kept == {
        "last-checkpoint",
        *(f"stage-{stage}/checkpoint-{step}" for stage, step in [(1, 2), (2, 1), (2, 2)]),
    }


def test_private_repositories_branches_and_background_uploads(hub, base, tmp_path):
    named = {"hub_private_repo": True, "hub_revision": "next", "hub_model_id": "name"}
    trainer = trainer_of("sft", tmp_path / "run", str(base), adapters=True, **named)
    trainer.push_to_hub(blocking=False, commit_message="First").result()
    repository = hub.repositories[NAME]
    assert repository.private is True and not hub.files(NAME)
    assert set(hub.files(NAME, "next")) >= ADAPTERS
    assert repository.commits == [("next", "First", repository.commits[0][2])]
    assert torch.equal(logits(load(NAME, revision="next")), logits(trainer.lm))
    trainer.args.hub_merge_adapters = True
    trainer.push_to_hub()  # replaces the adapters
    assert not ADAPTERS & set(hub.files(NAME, "next")) and set(hub.files(NAME, "next")) >= MODEL


def test_the_card_has_base_data_licence_and_results(hub, base, tmp_path):
    card = "---\nlicense: apache-2.0\nlanguage: en\n---\n# Theirs\n"
    (base / "README.md").write_text(card)
    hub.put("owner/base", base)
    rows = {"eval_dataset": [{"prompt": "ab", "completion": "cd"}], "eval_strategy": "epoch"}
    trainer = trainer_of("sft", tmp_path / "run", "owner/base", adapters=True, **rows)
    trainer.train()
    trainer.push_to_hub(dataset_name="owner/rows", model_name="Fine", language=["en", "de"])
    files = hub.files(NAME)
    data = ModelCard(files["README.md"].decode()).data
    assert (data.base_model, data.base_model_relation) == ("owner/base", "adapter")
    assert (data.license, data.language, data.datasets) == ("apache-2.0", ["en", "de"], ["owner/rows"])
    loss = next(each for each in data.eval_results if each.metric_type == "loss")
    assert loss.metric_value == pytest.approx(trainer.evaluate()["eval_loss"])
    assert (data.model_name, loss.dataset_name, loss.task_type) == ("Fine", "owner/rows", "text-generation")
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "owner/base"
    assert torch.equal(logits(load(NAME)), logits(trainer.lm))
    with raises(ConfigError, where="push_to_hub"):
        trainer.push_to_hub(licence="mit")


def test_a_base_in_the_cache_has_its_name_and_its_revision(hub, base, tmp_path):
    hub.put("owner/base", base)
    folder = snapshot_download("owner/base")
    trainer = trainer_of("sft", tmp_path / "run", folder, adapters=True)
    hub.put("owner/base", base.rename(tmp_path / "moved"))
    llama_lm("block_causal", block_size=2, seed=1).save(tmp_path / "other")
    hub.put("owner/base", tmp_path / "other")  # a later revision
    trainer.push_to_hub()
    assert ModelCard(hub.files(NAME)["README.md"].decode()).data.base_model == "owner/base"
    assert torch.equal(logits(load(NAME)), logits(trainer.lm))


def test_what_somebody_wrote_in_the_card_is_pushed(hub, base, tmp_path):
    trainer = trainer_of("sft", tmp_path / "run", str(base), adapters=True)
    trainer.create_model_card(license="mit", tags=["one"])
    card = tmp_path / "run" / "README.md"
    assert ModelCard.load(card).data.license == "mit"
    card.write_text("# Mine\n")
    trainer.push_to_hub()
    assert hub.files(NAME)["README.md"] == b"# Mine\n"


@partly_slow("verb", ["sft", "dpo", "grpo", "convert"], 0)
def test_adapters_are_trained_further(verb, hub, base, causal, tmp_path):
    start = causal if verb == "convert" else base
    trainer = trainer_of(verb, tmp_path / "run", str(start), adapters=True)
    trainer.train()
    trainer.push_to_hub()
    before, loaded = logits(trainer.lm), load(NAME)
    if verb != "convert":
        again = trainer_of(verb, tmp_path / "again", loaded, adapters=False, hub_model_id="user/second")
        again.train()
        again.push_to_hub()
        second = load("user/second")
        assert torch.equal(logits(second), logits(again.lm)) and not torch.equal(logits(second), before)
        own, first = weights(second), weights(load(NAME))
        changed = {name for name in own if not torch.equal(own[name], first[name])}
        assert changed and all("lora_" in name for name in changed)
        tags = ModelCard(hub.files("user/second")["README.md"].decode()).data.tags
        assert verb in tags
        with raises(ConfigError, where="lora (peft_config)"):
            trainer_of(verb, tmp_path / "third", load(NAME), adapters=True)
    assert torch.equal(logits(load(NAME)), before)


@pytest.mark.filterwarnings("ignore:no token is the mask token")
def test_peft_and_the_auto_classes_read_them(hub, base, tmp_path):
    trainer = trainer_of("sft", tmp_path / "run", str(base), adapters=True)
    trainer.train()
    trainer.push_to_hub()
    expected = logits(trainer.lm)
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), NAME)
    merged = AutoModelForCausalLM.from_pretrained(NAME)
    folder = snapshot_download(NAME)
    for model, tolerance in ((peft, 0), (merged, 1e-5), (AutoModelForCausalLM.from_pretrained(folder), 1e-5)):
        with torch.no_grad():
            torch.testing.assert_close(model(IDS_BT).logits, expected, rtol=0, atol=tolerance)


def test_adapters_of_other_trainers_are_read(hub, tmp_path):
    """As TRL writes them: neither config nor tokenizer is beside them."""
    from peft import get_peft_model

    model, tokenizer = llama_causal()
    model.save_pretrained(tmp_path / "stock")
    tokenizer.save_pretrained(tmp_path / "stock")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    theirs = get_peft_model(stock, lora(task_type="CAUSAL_LM"))
    theirs.push_to_hub(NAME)
    loaded = load(NAME)
    with torch.no_grad():
        expected = theirs(IDS_BT).logits
    assert loaded.autoregressive
    size = expected.shape[-1]
    torch.testing.assert_close(logits(loaded)[:, 1:, :size], expected[:, :-1], rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:no token is the mask token")
def test_models_are_pushed_as_those_of_transformers(hub, base, tmp_path):
    lm = load(base)
    lm.push_to_hub(
        NAME,
        private=True,
        revision="next",
        commit_message="Mine",
        tags=["one"],
        license="mit",
        max_shard_size="40KB",
    )
    files = hub.files(NAME, "next")
    assert len([name for name in files if name.endswith(".safetensors")]) > 1
    assert hub.repositories[NAME].private and hub.repositories[NAME].commits[0][1] == "Mine"
    data = ModelCard(files["README.md"].decode()).data
    assert data.license == "mit" and "one" in data.tags and data.model_name == "name"
    assert torch.equal(logits(load(NAME, revision="next")), logits(lm))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(NAME, revision="next")(IDS_BT).logits, logits(lm))
    with raises(NoModelError, where=NAME):
        load(NAME, revision="nope")
    lm.save_pretrained(tmp_path / "second", push_to_hub=True)
    assert torch.equal(logits(load("user/second")), logits(lm))
    adapted = with_adapters(load(base), lora())
    for merge, expected in ((False, ADAPTERS), (True, MODEL)):
        adapted.push_to_hub("user/third", merge_adapters=merge)
        assert set(hub.files("user/third")) & (ADAPTERS | MODEL) == expected
        found = logits(load("user/third"))
        torch.testing.assert_close(found, logits(adapted), rtol=0, atol=1e-5 * merge)


@partly_slow("inside", [False, True], 1)
def test_models_of_transformers_are_pushed_as_diffusion_models(hub, base, tmp_path, inside):
    model = load(base).model if inside else AutoModelForCausalLM.from_pretrained(base)
    how = {"repo_id": NAME, "private": True, "commit_message": "Mine"}
    model.save_pretrained(tmp_path / "pushed", push_to_hub=True, **how)
    assert hub.repositories[NAME].private and hub.repositories[NAME].commits[0][1] == "Mine"
    model.push_to_hub("user/second")
    for config in (
        hub.files(NAME)["config.json"],
        hub.files("user/second")["config.json"],
        (tmp_path / "pushed/config.json").read_bytes(),
    ):
        assert json.loads(config)["model_type"] == "unmask"


@pytest.mark.parametrize("beside", ["config and tokenizer", "nothing"])
def test_a_base_that_is_gone_is_named(beside, hub, base, tmp_path):
    adapted = with_adapters(load(base), lora())
    folder, config = tmp_path / "adapters", tmp_path / "adapters" / "adapter_config.json"
    adapted.save(folder)
    if beside == "nothing":
        for path in folder.glob("*"):
            if path.name not in ADAPTERS:
                path.unlink()
    base.rename(tmp_path / "moved")
    written = config.read_text()
    for gone in (str(base), "base", "user/base"):
        config.write_text(written.replace(str(base), gone))
        hub.put(NAME, folder)
        for name in (folder, NAME) if beside == "config and tokenizer" else (folder,):
            with raises(ModelError, where=str(name)) as refused:
                load(name)
            assert f"the base of these adapters, {gone}:" in refused.value.what
            assert "base_model_name_or_path" in (refused.value.remedy or "")
    config.write_text(written.replace(str(base), str(tmp_path / "moved")))  # the remedy
    assert torch.equal(logits(load(folder)), logits(adapted))
    hub.put("user/base", tmp_path / "moved")
    config.write_text(written.replace(str(base), "user/base"))
    assert torch.equal(logits(load(folder)), logits(adapted))


def test_the_command_line_pushes_and_goes_on_with_adapters(hub, base, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    quick = ["training.max_steps=2", "--data", rows, "training.use_cpu=true", "training.max_length=32"]
    pushed = ["training.push_to_hub=true", f"training.hub_model_id={NAME}", "lora.target_modules=[q_proj]"]
    done = unmask("sft", "--model", base, "--output", tmp_path / "run", *quick, *pushed, "lora.r=2")
    assert done.exit_code == 0, done.output
    assert set(hub.files(NAME)) >= ADAPTERS
    merged = load(tmp_path / "run")
    torch.testing.assert_close(logits(load(NAME)), logits(merged), rtol=0, atol=1e-5)
    folder = snapshot_download(NAME)
    for number, model in enumerate((folder, NAME)):
        output = tmp_path / f"again-{number}"
        done = unmask("sft", "--model", model, "--output", output, *quick, "training.save_steps=1")
        assert done.exit_code == 0, done.output
        assert {path.name for path in (output / "checkpoint-2").iterdir()} >= ADAPTERS
        assert not torch.equal(logits(load(output)), logits(merged))
        torch.testing.assert_close(
            logits(load(output / "checkpoint-2")), logits(load(output)), rtol=0, atol=1e-5
        )
        resumed = unmask("sft", "--config", output / "config.yaml", "--resume", "training.max_steps=3")
        assert resumed.exit_code == 0, resumed.output
    shown = unmask("generate", folder, "--prompt", "ab", "--max-new-tokens", "2")
    assert shown.exit_code == 0, shown.output
    assert ModelSpec.read(ModelConfig(path=folder)).settings["block_size"] == 2
    small = unmask("sft", "--model", folder, "--output", tmp_path / "4bit", *quick, "model.quantization=4bit")
    assert small.exit_code == 0, small.output
    refused = unmask("sft", "--model", folder, "--output", tmp_path / "third", *quick, "lora.r=2")
    assert refused.exit_code == 2 and "the model has adapters" in refused.output


@partly_slow("way", ["folder", "hub"])
def test_the_command_line_knows_adapters_wherever_they_are(way, hub, base, causal, tmp_path):
    rows = {"sft": PAIRS, "dpo": PREFERENCES, "grpo": PAIRS}
    (tmp_path / "mine.py").write_text(
        "def longer(completions, **_):\n    return [len(c) for c in completions]\n"
    )
    reward = f"rewards=[{tmp_path}/mine.py:longer]"
    vllm = [
        "rollout.backend=vllm",
        "rollout.url=http://localhost:1",
        "rollout.patience=0.1",
        "rollout.sync=lora",
    ]
    for verb, start, more in (
        ("sft", base, ["model.quantization=4bit"]),
        ("dpo", base, ["training.reference=adapter", "training.bound=elbo"]),
        ("grpo", causal, [reward, *vllm]),
    ):
        with_adapters(load(start), lora(init_lora_weights=True)).save(tmp_path / verb)
        hub.put(f"user/{verb}", tmp_path / verb)
        data = tmp_path / f"{verb}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[verb]))
        quick = ["training.max_steps=1", "--data", data, "training.use_cpu=true", "training.max_length=32"]
        quick += ["training.max_completion_length=4"] if verb == "grpo" else []
        model = tmp_path / verb if way == "folder" else f"user/{verb}"
        arguments = [verb, "--model", model, "--output", tmp_path / f"{verb}-run", *quick, *more]
        for end in (["--dry-run"], []):
            done = unmask(*arguments, *end)
            started = verb == "grpo" and "localhost:1" in done.output  # where there is no vLLM
            assert done.exit_code == 0 or started, done.output
        run = RunConfig(model=StartConfig(path=str(model)), output_dir="o")
        assert lora_rank(run) == 2 and lora_rank(run.model_copy(update={"lora": LoraSettings(r=4)})) == 4
