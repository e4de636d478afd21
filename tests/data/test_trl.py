"""A row has the same token ids in every verb, and those of TRL's trainers: over kinds of rows, columns and
chat templates."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerBase

from tests.errors import raises
from tests.helpers import each_once, partly_slow
from unmask.data.characters import character_tokenizer
from unmask.data.encoding import encode_prompt, encode_row
from unmask.data.formats import SUPERVISED, Reader, read_prompt
from unmask.errors import DataError
from unmask.evaluation.file_likelihood import likelihood_parts
from unmask.evaluation.tasks import prompt_ids
from unmask.preference.config import DPOConfig
from unmask.preference.trainer import DPOTrainer
from unmask.rl.config import GRPOConfig
from unmask.rl.trainer import GRPOTrainer
from unmask.supervised.sft import SFTConfig, SFTTrainer

trl = pytest.importorskip("trl", reason="needs TRL: pip install -e '.[peers]' -c constraints.txt")
pytestmark = pytest.mark.filterwarnings("ignore::trl.import_utils.TRLExperimentalWarning")

PUBLISHED = Path(trl.__file__).parent / "chat_templates"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
WITH_TOOLS = ("qwen2_5", "qwen3_training", "llama3_1")
TEMPLATES = (*WITH_TOOLS, "llama3")

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}


def tokenizer_of(template: str) -> PreTrainedTokenizerBase:
    tokenizer = character_tokenizer("".join(sorted({*string.printable})))
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.eos_token = "<|eot_id|>" if template.startswith("llama") else "<|im_end|>"
    tokenizer.chat_template = (PUBLISHED / f"{template}.jinja").read_text()
    return tokenizer


TOKENIZERS = {template: tokenizer_of(template) for template in TEMPLATES}


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


QUESTION, ANSWER, OTHER = said("user", "Is it warm?"), said("assistant", "Yes."), said("assistant", "No!")
PROMPTS = {
    "question": [QUESTION],
    "system": [said("system", "Be brief."), QUESTION],
    "turns": [QUESTION, ANSWER, said("user", "And in Bern?")],
}
COLUMNS: dict[str, dict[str, Any]] = {
    "none": {},
    "empty": {"tools": [], "chat_template_kwargs": {}},
    "null": {"tools": None},
    "tools": {"tools": [TOOL]},
    "tools as JSON": {"tools": json.dumps([TOOL])},
    "not thinking": {"chat_template_kwargs": {"enable_thinking": False}},
    "tools in kwargs": {"chat_template_kwargs": {"tools": [TOOL], "enable_thinking": False}},
    "both": {"tools": [TOOL], "chat_template_kwargs": {"date_string": "1 May 2025"}},
}
CALLED = [QUESTION, said("assistant", "", tool_calls=[CALL]), said("tool", "20 C"), ANSWER]


def lm_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    ends = [tokenizer.eos_token_id]
    return SimpleNamespace(
        tokenizer=tokenizer,
        eos_token_ids=ends,
        context_length=None,
        block_size=None,
        autoregressive=True,
        canvas=False,
    )


def config(kind: Any, **more: Any) -> Any:
    return kind(
        output_dir="unused", report_to="none", max_unknown=1.0, use_cpu=True, **{"max_length": 1 << 16} | more
    )


def split(row: dict[str, Any], document: int = 1) -> tuple[list[int], list[int]]:
    """Prompt and answer of a row of one answer."""
    tokens = zip(row["input_ids"], row["maskable"], row["documents"], strict=True)
    of_row = [(token, learnt) for token, learnt, number in tokens if number == document]
    return [token for token, trained in of_row if not trained], [
        token for token, trained in of_row if trained
    ]


def in_every_verb(
    tokenizer: PreTrainedTokenizerBase, prompt: Any, more: dict[str, Any]
) -> dict[str, tuple[list[int], list[int]]]:
    """Prompt and answer as each verb makes them of a row."""
    lm, row = lm_of(tokenizer), {"prompt": prompt, **more}
    pair = row | {"completion": [ANSWER]}
    preference = row | {"chosen": [ANSWER], "rejected": [OTHER]}
    whole = {"chosen": [*prompt, ANSWER], "rejected": [*prompt, OTHER], **more}
    labelled = [pair | {"label": True}, pair | {"prompt": [said("user", "b")], "label": False}]
    sft, dpo, kto = config(SFTConfig, learn="last"), config(DPOConfig), config(DPOConfig, loss_type="kto")
    made = {
        "sft": split(SFTTrainer.make_rows(lm, sft, [pair], "train")[0]),
        "sft on messages": split(
            SFTTrainer.make_rows(lm, sft, [{"messages": [*prompt, ANSWER], **more}], "train")[0]
        ),
        "dpo": split(DPOTrainer.make_rows(lm, dpo, [preference], "train")[0]),
        "dpo, implicit": split(DPOTrainer.make_rows(lm, dpo, [whole], "train")[0]),
        "kto": split(DPOTrainer.make_rows(lm, kto, labelled, "train")[0]["response"]),
    }
    answer = made["sft"][1]
    made["grpo"] = GRPOTrainer.make_rows(lm, config(GRPOConfig), [row], "train")[0].ids, answer
    made["evaluate"] = prompt_ids(lm, [row])[0], answer
    for columns in (pair, {"messages": [*prompt, ANSWER], **more}):
        made[f"likelihood of {next(iter(columns))}"] = likelihood_parts(lm, Reader(SUPERVISED).read(columns))[
            -1
        ]
    return made


def of_trl(
    trainer: Any, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """A row as a trainer of TRL tokenizes it, in a table that keeps its types."""
    off = dict.fromkeys(("assistant_only_loss", "packing", "shuffle_dataset"), False)
    args = SimpleNamespace(dataset_num_proc=None, dataset_text_field="text", max_length=None, **off)
    self = SimpleNamespace(
        _tokenizer=tokenizer, chat_template=None, completion_only_loss=True, calculate_KL=False, **more
    )
    table = datasets.IterableDataset.from_generator(lambda: iter([row]))
    rest = (False, None) if trainer is trl.SFTTrainer else ()
    return next(iter(trainer._prepare_dataset(self, table, tokenizer, args, *rest, "train")))


def without_tail(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Without the white space that a template writes after the end of a turn, which we do not learn."""
    last = max(index for index, token in enumerate(ids) if token == tokenizer.eos_token_id)
    assert not tokenizer.decode(ids[last + 1 :]).strip()
    return ids[: last + 1]


@each_once("template, columns", TEMPLATES, COLUMNS)
def test_a_row_has_the_same_ids_in_every_verb_and_in_trl(template, columns):
    tokenizer, more = TOKENIZERS[template], COLUMNS[columns]
    shows_tools = (
        template in WITH_TOOLS
        or "tools" not in json.dumps(list(more.items()))
        or columns in ("empty", "null")
    )
    for prompt in PROMPTS.values():
        if not shows_tools:
            with raises(DataError, where="train, row 0, tools"):
                in_every_verb(tokenizer, prompt, more)
            continue
        made = in_every_verb(tokenizer, prompt, more)
        assert len({json.dumps(ids) for ids in made.values()}) == 1, made
        ids, answer = made["sft"]
        row = {name: value for name, value in more.items() if value}
        theirs = of_trl(trl.SFTTrainer, tokenizer, {"prompt": prompt, "completion": [ANSWER], **row})
        assert ids + answer == without_tail(tokenizer, theirs["input_ids"])
        assert [label != -100 for label in theirs["labels"]].index(True) == len(ids)
        pair = of_trl(
            trl.DPOTrainer, tokenizer, {"prompt": prompt, "chosen": [ANSWER], "rejected": [OTHER], **row}
        )
        assert (pair["prompt_ids"], without_tail(tokenizer, pair["chosen_ids"])) == (ids, answer)
        labelled = of_trl(
            trl.KTOTrainer, tokenizer, {"prompt": prompt, "completion": [ANSWER], "label": True, **row}
        )
        assert (labelled["prompt_ids"], without_tail(tokenizer, labelled["completion_ids"])) == (ids, answer)
        tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")
        options = row.get("chat_template_kwargs", {})
        rendered = trl.apply_chat_template({"prompt": prompt}, tokenizer, **{"tools": tools, **options})[
            "prompt"
        ]
        assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]


@partly_slow("template", TEMPLATES, 0)
def test_a_call_without_words_is_learnt_as_trl_renders_it(template):
    tokenizer, lm = TOKENIZERS[template], lm_of(TOKENIZERS[template])
    for content, learn in itertools.product(["", None], ["all", "last"]):
        messages = [QUESTION, {**CALLED[1], "content": content}, *CALLED[2:]]
        rows = [{"messages": messages, "tools": [TOOL]}, {"messages": messages[:2], "tools": [TOOL]}]
        pair = {"prompt": messages[:1], "completion": messages[1:2], "tools": [TOOL]}
        if template not in WITH_TOOLS:
            for row in (*rows, {"messages": messages}, {"messages": messages[:2]}, pair):
                missing = "tools" if "tools" in row else "tool_calls"
                with raises(DataError, where=f"train, row 0, {missing}"):
                    SFTTrainer.make_rows(lm, config(SFTConfig, learn=learn), [row], "train")
            continue
        for row in rows:
            [made] = SFTTrainer.make_rows(lm, config(SFTConfig, learn=learn), [row], "train")
            assert made["input_ids"] == without_tail(
                tokenizer, of_trl(trl.SFTTrainer, tokenizer, row)["input_ids"]
            )
            learnt = tokenizer.decode(split(made)[1])
            assert ("Bern" in learnt) == (learn == "all" or len(row["messages"]) == 2)
        [made] = SFTTrainer.make_rows(lm, config(SFTConfig), [pair], "train")
        assert made["input_ids"] == without_tail(
            tokenizer, of_trl(trl.SFTTrainer, tokenizer, pair)["input_ids"]
        )


@each_once("arguments, template", ["", "{}", '{"city": "Bern"}'], WITH_TOOLS)
def test_arguments_in_json_have_the_ids_of_those_in_objects_in_every_verb(template, arguments):
    tokenizer, made = TOKENIZERS[template], []
    for given in (arguments, json.loads(arguments or "{}")):
        call = {"type": "function", "function": {"name": "weather", "arguments": given}}
        prompt = [QUESTION, said("assistant", "", tool_calls=[call]), said("tool", "20 C")]
        made.append(in_every_verb(tokenizer, prompt, {"tools": [TOOL]}))
        assert len({json.dumps(ids) for ids in made[-1].values()}) == 1
        # as `generate` has it
        assert made[-1]["sft"][0] == encode_prompt(tokenizer, prompt, options={"tools": [TOOL]})
    assert made[0] == made[1]
    assert f'": {json.dumps(json.loads(arguments or "{}"))}}}' in tokenizer.decode(made[0]["sft"][0])


@each_once(
    "template, learn, name", TEMPLATES, ["all", "last"], ["reasoning_content", "reasoning", "thinking"]
)
def test_reasoning_that_the_template_leaves_out_is_refused(template, learn, name):
    lm = lm_of(TOKENIZERS[template])
    answer = said("assistant", "Yes.", **{name: "20 C is warm."})
    rows = [
        {"messages": [QUESTION, answer]},
        {"prompt": [QUESTION], "completion": [answer]},
        {"messages": [QUESTION, answer, QUESTION, ANSWER]},
    ]
    for row in rows:
        if template == "qwen3_training":  # transformers gives the other names to it
            [made] = SFTTrainer.make_rows(lm, config(SFTConfig, learn=learn), [row], "train")
            assert "20 C is warm." in lm.tokenizer.decode(made["input_ids"])
            continue
        with raises(DataError, where=f"train, row 0, {name}"):
            SFTTrainer.make_rows(lm, config(SFTConfig, learn=learn), [row], "train")


def test_reasoning_of_earlier_turns_that_a_template_drops_on_purpose_is_context():
    tokenizer, reasoning = (
        tokenizer_of("qwen2_5"),
        "{% if loop.last and m.reasoning_content %}({{ m.reasoning_content }}){% endif %}",
    )
    message = "{{ m.role }}:" + reasoning + "{{ m.content }}<|im_end|>"
    tokenizer.chat_template = f"{{% for m in messages %}}{message}{{% endfor %}}{{% if add_generation_prompt %}}assistant:{{% endif %}}"
    row = {
        "messages": [
            QUESTION,
            said("assistant", "Yes.", reasoning_content="20 C"),
            QUESTION,
            said("assistant", "No.", reasoning_content="0 C"),
        ]
    }
    [made] = SFTTrainer.make_rows(lm_of(tokenizer), config(SFTConfig, learn="last"), [row], "train")
    text = tokenizer.decode(made["input_ids"])
    assert "(0 C)" in text and "20 C" not in text


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"system": "Be brief."}, "system"),
        ({"system_prompt": "Be brief."}, "system_prompt"),
        ({"history": [["a", "b"]]}, "history"),
        ({"images": ["a.png"]}, "images"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": [TOOL], "chat_template_kwargs": {"tools": []}}, "tools"),
        ({"tools": "no JSON"}, "tools"),
        ({"tools": {"name": "weather"}}, "tools"),
        ({"tools": ["weather"]}, "tools"),
        ({"chat_template_kwargs": ["enable_thinking"]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_a_column_that_would_change_a_prompt_and_is_not_read_is_refused_by_every_verb(more, where):
    tokenizer = TOKENIZERS["qwen3_training"]
    lm, prompt = lm_of(tokenizer), PROMPTS["question"]
    row = {
        "prompt": prompt,
        "completion": [ANSWER],
        "chosen": [ANSWER],
        "rejected": [OTHER],
        "label": True,
        **more,
    }
    for trainer, args in [
        (SFTTrainer, config(SFTConfig)),
        (DPOTrainer, config(DPOConfig)),
        (DPOTrainer, config(DPOConfig, loss_type="kto")),
        (GRPOTrainer, config(GRPOConfig)),
    ]:
        with pytest.raises(DataError) as caught:
            trainer.make_rows(lm, args, [row], "train_dataset")
        assert (caught.value.where or "").startswith("train_dataset, row 0") and where in str(caught.value)
    with pytest.raises(DataError) as caught:
        prompt_ids(lm, [row])
    assert where in str(caught.value)


@pytest.mark.parametrize("name", ["tools", "chat_template_kwargs"])
def test_texts_have_no_template_to_read_a_column(name):
    more = {
        "tools": {"tools": [TOOL]},
        "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    }[name]
    lm = lm_of(TOKENIZERS["qwen3_training"])
    for row in ({"prompt": "a", "completion": "b"}, {"text": "a"}):
        with raises(DataError, where=f"train, row 0, {name}") as caught:
            SFTTrainer.make_rows(lm, config(SFTConfig), [row | more], "train")
        assert caught.value.reason == f"with {name}"
    for prompt in ("a", [5, 6]):
        with raises(DataError, where=f"train, row 0, {name}"):
            GRPOTrainer.make_rows(lm, config(GRPOConfig), [{"prompt": prompt, **more}], "train")


def test_prompts_are_read_as_sft_reads_them():
    """Parts of content are joined, columns of a table that are null count as absent, and messages of ShareGPT
    are messages."""
    lm, expected = (
        lm_of(TOKENIZERS["qwen3_training"]),
        encode_row(TOKENIZERS["qwen3_training"], {"prompt": [QUESTION]}),
    )
    for prompt in (
        [said("user", [{"type": "text", "text": "Is it "}, {"type": "text", "text": "warm?"}])],
        [said("user", "Is it warm?", tool_calls=None, reasoning_content=None)],
        [{"from": "human", "value": "Is it warm?"}],
        {"role": "user", "content": "Is it warm?"},
    ):
        row = {"prompt": prompt, "answer": 3}
        assert encode_row(lm.tokenizer, read_prompt(row)) == expected
        made, _ = GRPOTrainer.make_rows(lm, config(GRPOConfig, num_generations=2), [row], "train")
        assert made.columns == {"prompt": [QUESTION], "answer": 3}
        assert (
            split(SFTTrainer.make_rows(lm, config(SFTConfig), [row | {"completion": [ANSWER]}], "train")[0])[
                0
            ]
            == expected
        )
