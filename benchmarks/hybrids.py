"""Cost of models with recurrent layers (Qwen3.5's shape): a conversion step compared with the causal step of
the same model and with those of a Llama of equal width, and generation with cached states compared with
reading the prefix again.

    python -m benchmarks.hybrids [--threads 1] [--rounds 5] [--block 32]

    python -m benchmarks.hybrids --learn STORIES.txt --tokenizer FOLDER

`--learn` compares the bounds of converted models instead: both shapes with about a million parameters are
pre-trained on the same stories and converted to blocks of 4 by `block-sdar`.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import unmask
from benchmarks.conversion import BATCH, LENGTH, NOISE, Diffusion, llama
from benchmarks.harness import peak_bytes, ratio, report, turns
from benchmarks.stories import SETTINGS, nats_per_token, train
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_tokenizer
from unmask.data.sources import load_rows
from unmask.diffusion.log_probs import noise_groups, view_log_probs
from unmask.diffusion.views import MaskRNG, random_views
from unmask.generation import naive, sampler
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion

VOCABULARY, WIDTH, LAYERS = 8000, 256, 4
NEW_TOKENS, PROMPT = 64, 256


def qwen(vocabulary: int = VOCABULARY, hidden: int = WIDTH, layers: int = LAYERS) -> Qwen3_5ForCausalLM:
    """Three Gated DeltaNet layers and one of attention, in the proportions of Qwen3.5-0.8B."""
    torch.manual_seed(0)
    heads = hidden // 64
    config = Qwen3_5TextConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    return Qwen3_5ForCausalLM(config).train()


class Causal:
    """A training step of transformers."""

    def __init__(self, model: Any, ids_BT: Tensor):
        self.model, self.ids_BT = model, ids_BT
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loss(self) -> Tensor:
        loss: Tensor = self.model(input_ids=self.ids_BT, labels=self.ids_BT).loss
        return loss

    def __call__(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def converted(model: PreTrainedModel, block_size: int) -> DiffusionLM:
    """The same weights under block-causal attention."""
    tokenizer = character_tokenizer("abcdefghijkl")
    lm = make_diffusion(
        copy.deepcopy(model), tokenizer, attention="block_causal", block_size=block_size, logit_shift=True
    )
    lm.model.train()
    return lm


def by_loop(lm: DiffusionLM, batch: dict[str, Tensor], views: Any) -> Tensor:
    """The log-probabilities of the hidden tokens, by a loop that reads the clean text before each block."""
    size, found = lm.block_size or 1, []
    for row, hidden_T in enumerate(views.hidden_BMT[:, 0]):
        for start in range(0, LENGTH, size):
            at = slice(0, start + size)
            hidden_1T = hidden_T[at].clone()[None]
            hidden_1T[:, :start] = False
            clean_1T = batch["input_ids"][row : row + 1, at]
            noisy_1T = clean_1T.masked_fill(hidden_1T, lm.mask_token_id)
            if hidden_1T.any():
                found.append(lm.log_probs(lm.noised_inputs(noisy_1T, None, hidden_1T), clean_1T[hidden_1T]))
    return torch.cat(found)


def check(step: Diffusion) -> None:
    """Refuse to time a step whose log-probabilities are not those of the loop."""
    lm, batch = step.lm, {name: value[:1] for name, value in step.batch.items()}
    groups = noise_groups(lm, batch["maskable"], batch["documents"])
    views = random_views(groups, MaskRNG(0, batch["sample_id"], 0), NOISE)
    with torch.no_grad():
        found_N = view_log_probs(lm, batch["input_ids"], batch["documents"], views)[views.hidden_BMT]
        torch.testing.assert_close(found_N, by_loop(lm, batch, views), rtol=0, atol=1e-3)


def learn(stories: str, tokenizer: Any, pretrain_steps: int, steps: int) -> None:
    """Print how well each shape has learned, before and after conversion."""
    texts = load_rows(stories)["text"]
    trained, held_out = texts[:-200], texts[-200:]
    rows = [{"text": text} for text in trained]
    for name, make in (("Qwen3.5", qwen), ("Llama", llama)):
        causal = make_diffusion(make(len(tokenizer), 128, LAYERS), tokenizer)
        size = sum(parameter.numel() for parameter in causal.model.parameters())
        with tempfile.TemporaryDirectory() as folder:
            sizes = {"max_steps": pretrain_steps, "per_device_train_batch_size": 16, "learning_rate": 3e-3}
            args = unmask.PretrainConfig(folder, **SETTINGS | sizes)
            unmask.PretrainTrainer(causal, args, train_dataset=rows).train()
            causal.save(folder)
            exact = nats_per_token(causal, held_out, 1)
            lm, _ = train(folder, "block-sdar", trained, steps, 16, 3e-3)
            bound = nats_per_token(lm, held_out, 8)
        figures = f"causal {exact:.3f} nats per token, converted at most {bound:.3f}, {bound / exact:.3f} x"
        print(f"{name}, {size / 1e6:.2f}M parameters: {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--learn", metavar="STORIES.txt", help="compare what is learned instead")
    parser.add_argument("--tokenizer", help="the folder of a tokenizer, for --learn")
    parser.add_argument("--pretrain-steps", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.learn:
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        return learn(options.learn, tokenizer, options.pretrain_steps, options.steps)
    ids_BT = torch.randint(4, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {
        "input_ids": ids_BT,
        "documents": torch.ones_like(ids_BT),
        "maskable": torch.ones_like(ids_BT, dtype=torch.bool),
        "sample_id": torch.arange(BATCH),
    }
    models: dict[str, Any] = {"Qwen3.5": qwen(), "Llama": llama(VOCABULARY, WIDTH, LAYERS)}
    steps: dict[str, Any] = {f"{name}, causal": Causal(model, ids_BT) for name, model in models.items()}
    for name, model in models.items():
        steps[f"{name}, converted"] = Diffusion(converted(model, options.block), batch)
        check(steps[f"{name}, converted"])
    seconds, rows = turns(steps, options.rounds), []
    for name, step in steps.items():
        memory = peak_bytes(lambda step=step: step.loss().backward()) / 2**20  # type: ignore[misc]
        rows.append((name, f"{min(seconds[name]):.2f} s, {memory:.0f} MB", ""))
    for name, goal in (("Qwen3.5", "at most 2.2"), ("Llama", "")):
        factor = ratio(seconds, f"{name}, converted", f"{name}, causal")
        rows.append((f"{name}, converted / causal", f"{factor:.2f}", goal))
    factor = ratio(seconds, "Qwen3.5, converted", "Llama, converted")
    rows.append(("converted, Qwen3.5 / Llama", f"{factor:.2f}", ""))
    report(f"a training step, {BATCH} x {LENGTH} tokens, blocks of {options.block}", rows)

    lm = steps["Qwen3.5, converted"].lm
    lm.model.eval()
    prompt = ids_BT[0, :PROMPT].tolist()
    config = SamplerConfig(max_new_tokens=NEW_TOKENS, steps=NEW_TOKENS // 4, stop_at_eos=False)
    ways = {
        "cached states": lambda: sampler.generate(lm, [prompt], config),
        "the prefix read again": lambda: naive.generate(lm, [prompt], config),
    }
    assert ways["cached states"]().tokens == ways["the prefix read again"]().tokens
    seconds = turns(ways, options.rounds, warm=True)
    rows = [(name, f"{min(values):.2f} s", "") for name, values in seconds.items()]
    rows.append(("again / cached", f"{ratio(seconds, 'the prefix read again', 'cached states'):.2f}", ""))
    report(f"{NEW_TOKENS} tokens after {PROMPT}, 4 a pass", rows)


if __name__ == "__main__":
    main()
