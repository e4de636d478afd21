"""SFT learns the completion and its end token, given the prompt and the visible rest of the completion."""

from __future__ import annotations

import pytest
import torch

import unmask
from tests.errors import raises
from tests.tiny import PLAIN_TEMPLATE, llama_lm
from tests.training.tiny_runs import PAIRS, batch, make
from unmask.data.rows import separate_documents
from unmask.diffusion.log_probs import view_log_probs
from unmask.errors import ConfigError, DataError
from unmask.supervised.sft import SFTTrainer


def parts(trainer: SFTTrainer, *rows: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """A batch, and the masks of its completions and prompts [B, T]."""
    made = batch(trainer, *rows)
    real_BT = made["documents"] > 0
    return made, made["maskable"], real_BT & ~made["maskable"]


@pytest.mark.parametrize(("attention", "block_size"), [("bidirectional", None), ("block_causal", 4)])
def test_completions_alone_are_hidden_and_their_end_is_learnt(attention, block_size, tmp_path):
    trainer = make("sft", tmp_path, llama_lm(attention, block_size), views=64)
    rows, completion_BT, prompt_BT = parts(trainer, *range(8))
    views = trainer.plan(rows, trainer.draw(rows))
    assert torch.equal(views.hidden_BMT, views.target_BMT)
    # of 64 views each token is hidden in some, and never another
    assert torch.equal(views.hidden_BMT.any(1), completion_BT)
    assert not (completion_BT & prompt_BT).any()
    end_BT = completion_BT & (rows["input_ids"] == trainer.lm.eos_token_id)
    whole = [1 + len(pair["prompt"]) + len(pair["completion"]) + 1 for pair in PAIRS]
    beyond = [-length % (block_size or 1) for length in whole]  # the rest of the block that the sampler fills
    assert end_BT.sum(1).tolist() == [1 + count for count in beyond]
    lengths = [len(pair["completion"]) + 1 + count for pair, count in zip(PAIRS, beyond, strict=True)]
    assert lengths == completion_BT.sum(1).tolist()


def test_a_canvas_is_filled_with_eos_that_is_learnt(tmp_path):
    trainer = make("sft", tmp_path, canvas_length=9, views=8)
    rows, canvas_BT, prompt_BT = parts(trainer, *range(8))
    views = trainer.plan(rows, trainer.draw(rows))
    assert canvas_BT.sum(1).tolist() == [9] * 8
    ends = [9 - len(pair["completion"]) for pair in PAIRS]
    assert (canvas_BT & (rows["input_ids"] == trainer.lm.eos_token_id)).sum(1).tolist() == ends
    assert torch.equal(views.hidden_BMT, views.target_BMT)
    assert not (views.hidden_BMT & prompt_BT[:, None]).any()


@pytest.mark.parametrize("config", [{}, {"views": 3}, {"canvas_length": 9}, {"schedule": "cosine"}])
def test_the_loss_is_the_weighted_cross_entropy_by_hand(config, tmp_path):
    lm = llama_lm(dtype=torch.float64)
    trainer = make("sft", tmp_path, lm, **config)
    rows, completion_BT, _ = parts(trainer, 4, 0, 6)
    views = trainer.plan(rows, trainer.draw(rows))
    total = 0.0
    for row in range(3):
        real_T = rows["documents"][row] > 0
        ids_T = rows["input_ids"][row][real_T]
        for hidden_T, weight_T in zip(
            views.hidden_BMT[row, :, real_T], views.weight_BMT[row, :, real_T], strict=True
        ):
            noisy_T = torch.where(hidden_T, lm.mask_token_id, ids_T)
            log_prob_T = lm.logits(noisy_T[None])[0].log_softmax(-1).gather(1, ids_T[:, None])[:, 0]
            total -= (weight_T * log_prob_T)[weight_T > 0].sum().item()
    loss = trainer.compute_loss(trainer.model, rows).item()
    assert loss == pytest.approx(total / completion_BT.sum().item(), rel=1e-9)


@pytest.mark.parametrize(
    ("attention", "packing"), [("bidirectional", False), ("bidirectional", True), ("causal", False)]
)
def test_with_aggregation_by_sequence_each_answer_counts_alike_however_the_batch_is_cut(
    attention, packing, tmp_path
):
    """LLaDA's guideline: the mean over answers of sum(CE / t) / tokens of the answer."""
    lm = llama_lm(attention, dtype=torch.float64)
    views = {} if attention == "causal" else {"views": 4}
    trainer = make("sft", tmp_path, lm, loss_type="sequence_nll", packing=packing, **views)
    rows, loss_mask_BT, _ = parts(trainer, 0, 1) if packing else parts(trainer, 4, 0, 6)
    shares = trainer.plan(rows, trainer.draw(rows))
    plain = make("sft", tmp_path, lm, packing=packing, **views)
    pooled = plain.plan(rows, plain.draw(rows))
    assert torch.equal(pooled.hidden_BMT, shares.hidden_BMT)
    answers = []
    with torch.no_grad():
        log_prob_BMT = view_log_probs(lm, rows["input_ids"], separate_documents(rows), pooled)
    for row, documents_T in enumerate(rows["documents"]):
        for document in range(1, int(documents_T.max()) + 1):
            own_T = loss_mask_BT[row] & (documents_T == document)
            answers.append(
                -(pooled.weight_BMT[row] * log_prob_BMT[row])[:, own_T].sum().item() / int(own_T.sum())
            )
    assert trainer.compute_loss(trainer.model, rows).item() == pytest.approx(
        sum(answers) / len(answers), rel=1e-6
    )
    assert trainer.count_items(rows) == len(answers) and len(set(answers)) == len(answers)
    assert plain.compute_loss(plain.model, rows).item() != pytest.approx(
        sum(answers) / len(answers), rel=1e-5
    )


def test_weights_are_one_over_t(tmp_path):
    """With the linear schedule every hidden token of a row weighs 1/t, where t is the rate at which its row
    was hidden."""
    trainer = make("sft", tmp_path, rows=[{"prompt": "a", "completion": "abcdefgh" * 3}] * 400)
    rows = batch(trainer, *range(400))
    views = trainer.plan(rows, trainer.draw(rows))
    hidden_B, size_B = views.hidden_BMT.sum((1, 2)).double(), rows["maskable"].sum(1)
    some = hidden_B > 0
    weight_B = views.weight_BMT.amax((1, 2)).double()[some]
    assert torch.equal(
        views.weight_BMT, torch.where(views.hidden_BMT, views.weight_BMT.amax(2, keepdim=True), 0)
    )
    assert (weight_B >= 1).all()
    rate_B = hidden_B[some] / size_B[some]
    assert torch.corrcoef(torch.stack([rate_B, 1 / weight_B]))[0, 1] > 0.95
    assert (rate_B - 1 / weight_B).mean().abs() < 0.02


def test_a_causal_model_gets_the_next_token_loss(tmp_path):
    lm = llama_lm("causal", dtype=torch.float64)
    trainer = make("sft", tmp_path, lm)
    rows, completion_BT, _ = parts(trainer, 2, 0, 4)
    log_prob_BT = (
        lm.logits(rows["input_ids"], rows["documents"])
        .log_softmax(-1)
        .gather(2, rows["input_ids"][..., None])[..., 0]
    )
    expected = -log_prob_BT[completion_BT].mean().item()
    assert trainer.compute_loss(trainer.model, rows).item() == pytest.approx(expected, rel=1e-9)


def test_chat_and_plain_rows_are_learnt_alike(tmp_path):
    chat = [
        {
            "prompt": [{"role": "user", "content": pair["prompt"]}],
            "completion": [{"role": "assistant", "content": pair["completion"]}],
        }
        for pair in PAIRS
    ]
    assert [*make("sft", tmp_path, rows=chat).train_dataset] == [*make("sft", tmp_path).train_dataset]


CONVERSATION = [
    {"role": role, "content": text}
    for role, text in [("user", "ab"), ("assistant", "cd"), ("user", "ef"), ("assistant", "ghg")]
]
ENDED = PLAIN_TEMPLATE.replace(
    "{% endfor %}", "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(("learn", "trained"), [("all", "cd</s>ghg</s>"), ("last", "ghg</s>")])
@pytest.mark.parametrize("layout", ["messages", "conversations"])
def test_of_a_conversation_all_answers_are_learnt_or_the_last(layout, learn, trained, tmp_path):
    lm = llama_lm()
    lm.tokenizer.chat_template = ENDED
    speakers = {"user": "human", "assistant": "gpt"}
    said = [{"from": speakers[turn["role"]], "value": turn["content"]} for turn in CONVERSATION]
    row = {"messages": CONVERSATION} if layout == "messages" else {"conversations": said}
    trainer = make("sft", tmp_path, lm, rows=[row], learn=learn, views=32)
    rows = batch(trainer, 0)
    hidden_BT = trainer.plan(rows, trainer.draw(rows)).hidden_BMT.any(1)
    assert lm.tokenizer.decode(rows["input_ids"][0]) == "<s>abcd</s>efghg</s>"
    assert lm.tokenizer.decode(rows["input_ids"][hidden_BT]) == trained


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt "
    "%}<|im_start|>{% endif %}"
)


@pytest.mark.parametrize(
    ("more", "filling"),
    [({}, "</s>" * 3), ({"canvas_length": 6}, "</s>" * 2), ({"learn": "last"}, "</s>" * 3)],
    ids=["block", "canvas", "last"],
)
def test_a_turns_own_end_is_learnt_and_what_is_behind_it_is_eos(more, filling, tmp_path):
    """The row ends where the sampler ends it: at the first end token, with EOS in the rest of the block."""
    lm = llama_lm("block_causal", 5, vocab_size=16)
    lm.tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    lm.set_chat_template(CHATML)
    trainer = make("sft", tmp_path, lm, rows=[{"messages": CONVERSATION}], views=32, **more)
    rows = batch(trainer, 0)
    hidden_BT = trainer.plan(rows, trainer.draw(rows)).hidden_BMT.any(1)
    earlier = "" if "learn" in more else "cd<|im_end|>"
    assert lm.tokenizer.decode(rows["input_ids"][hidden_BT]) == f"{earlier}ghg<|im_end|>{filling}"
    assert lm.tokenizer.decode(rows["input_ids"][0]).count("</s>") == filling.count("</s>")


def test_packed_rows_hide_each_example_at_a_time_of_its_own(tmp_path):
    trainer = make("sft", tmp_path, packing=True, views=16, eval_dataset=PAIRS)
    assert len(trainer.train_dataset) == len(trainer.eval_dataset) == 2  # 61 tokens in rows of 32
    rows = batch(trainer, 0, 1)
    views = trainer.plan(rows, trainer.draw(rows))
    assert int(rows["maskable"].sum()) == sum(len(pair["completion"]) + 1 for pair in PAIRS)
    times = set()
    for row, documents_T in enumerate(rows["documents"]):
        for document in range(1, int(documents_T.max()) + 1):
            weights_MT = views.weight_BMT[row][:, documents_T == document]
            for weight_T in weights_MT:
                times |= {round(float(weight), 6) for weight in weight_T[weight_T > 0].unique()}
            assert all(len(weight_T[weight_T > 0].unique()) <= 1 for weight_T in weights_MT)
    assert len(times) > 16  # else all examples of a row would share theirs
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


def test_what_cannot_be_used_is_left_out_and_counted_where_the_config_says_so(tmp_path, capsys):
    rows = [*PAIRS, {"prompt": "a", "completion": "b" * 40}, {"prompt": "a"}]
    trainer = make("sft", tmp_path, rows=rows, bad_rows="skip", disable_tqdm=False)
    assert [*trainer.train_dataset] == [*make("sft", tmp_path).train_dataset]
    assert trainer.train_dataset.report.dropped == {"too long": [8], "a column is missing": [9]}
    shown = capsys.readouterr().out
    assert "train_dataset: rows" in shown and "left out: too long" in shown


def test_a_completion_that_is_cut_is_learnt_without_an_end(tmp_path):
    trainer = make(
        "sft",
        tmp_path,
        llama_lm("block_causal", 5),
        rows=[{"prompt": "ab", "completion": "cdefgh" * 6}],
        truncation_mode="keep_start",
    )
    [row] = trainer.train_dataset
    assert len(row["input_ids"]) == 30 and trainer.lm.eos_token_id not in row["input_ids"]
    assert trainer.train_dataset.report.truncated == {"completion": 1}


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"learn": "first"}, "learn"),
        ({"bad_rows": "drop"}, "bad_rows"),
        ({"truncation_mode": "keep_start", "canvas_length": 9}, "truncation_mode, canvas_length"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, where, tmp_path):
    with raises(ConfigError, where=where):
        make("sft", tmp_path, **wrong)


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ({"prompt": "a", "completion": "b" * 40}, "train_dataset, row 1"),
        ({"prompt": "a", "completion": None}, "train_dataset, row 1"),
        (
            {"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]},
            "train_dataset, row 1, prompt, completion",
        ),
        (
            {"prompt": [{"role": "user", "content": "b"}], "completion": "b"},
            "train_dataset, row 1, prompt, completion",
        ),
        ({"prompt": 3, "completion": "b"}, "train_dataset, row 1, prompt"),
    ],
)
def test_rows_that_cannot_be_learnt_are_named(row, where, tmp_path):
    with raises(DataError, where=where):
        make("sft", tmp_path, rows=[PAIRS[0], row])


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"canvas_length": 4}, id="canvas"),
        pytest.param({"lm": ("block_causal", 4)}, id="blocks", marks=pytest.mark.slow),
    ],
)
def test_it_learns_to_answer_and_to_stop(config, tmp_path):
    lm = llama_lm(*config.pop("lm", ("bidirectional",)))
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "ba", "completion": "h"}]
    trainer = make(
        "sft", tmp_path, lm, rows=rows, max_steps=200, per_device_train_batch_size=2, views=16, **config
    )
    trainer.train()
    sampler = unmask.SamplerConfig(max_new_tokens=4 if lm.block_size is None else 9)
    generation = unmask.generate(trainer.lm, ["ab", "ba"], sampler)
    assert generation.texts == ["cd", "h"]
