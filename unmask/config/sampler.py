"""How to generate: the settings of every sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from unmask.config.base import Config, OnResume
from unmask.config.constraint import ConstraintConfig
from unmask.config.revise import ReviseConfig
from unmask.errors import ConfigError

DENOISING_FIELDS = (
    *(
        "steps",
        "tokens_per_step",
        "schedule",
        "block_size",
        "sub_block_size",
        "remasking",
        "threshold",
        "factor",
        "entropy_bound",
        "remask_fraction",
    ),
    *(
        "order_temperature",
        "filtered_confidence",
        "reveal_last",
        "cfg_scale",
        "constraint",
        "cache",
        "refresh_interval",
        "early_commit",
    ),
    *("revise", "top_log_probs", "top_forbidden"),
)
"""The settings that say in which order and how many tokens are revealed, or change the predictions of hidden
tokens."""
CANVAS_FIELDS = ("max_denoising_steps", "t_min", "t_max", "stability_threshold", "confidence_threshold")
"""The settings of canvases of random tokens (`unmask.generation.canvas`), under the names of transformers."""


class SamplerConfig(Config):
    """How to generate.

    Raises:
        ConfigError: a value out of range, or two settings that contradict one another.
    """

    # evaluations use it; rollouts of reinforcement learning have settings of their own
    on_resume = OnResume.ACTS

    mode: Literal["denoise", "self-speculative"] = "denoise"
    """denoise: reveal hidden tokens step by step. self-speculative: for block-causal models with a causal
    context, the tokens of the model that reads the text from left to right, drafted by denoising and verified
    in the next forward pass (docs/generation.md)."""
    max_new_tokens: int = Field(default=128, ge=1)
    """The length of the completion, in tokens; shorter where it stops at an end token."""
    steps: int | None = Field(default=None, ge=1)
    """Denoising steps. Unset: one token per step. Else the total over the completion, shared evenly by its
    decoding blocks, each of which takes at least one (one more block if the prompt ends inside an attention
    block); within a block the tokens per step are as even as possible, the larger counts first."""
    tokens_per_step: int | None = Field(default=None, ge=1)
    """The tokens that a step reveals, instead of `steps`."""
    schedule: Literal["even", "dream", "ancestral"] = "even"
    """How the steps of a block share its tokens. even: as stated for `steps`. dream: rounded down at times
    from 1 to 0.001, as Dream does, so that early steps reveal less. ancestral: each token at a step drawn for
    it, as MDLM and Dream's `origin` do. A step that would reveal nothing is skipped."""
    block_size: int | None = Field(default=None, ge=1)
    """The decoding block, in tokens: blocks are completed from left to right (semi-autoregressive order).
    Unset: the whole completion, or the attention block of a block-causal model. Not to be confused with the
    attention block, which belongs to the model."""
    sub_block_size: int | None = Field(default=None, ge=1)
    """Block-causal models: each attention block is completed in parts of this many tokens, from left to
    right; with a logit shift its first token comes before them, alone, because the clean text before it
    predicts it (Fast-dLLM v2, Wu et al. 2025). Unset: the whole block at once."""
    remasking: Literal["low_confidence", "margin", "entropy", "random", "left_to_right"] = "low_confidence"
    """Which hidden tokens stay masked the longest, under the names of LLaDA (Nie et al. 2025): those of the
    lowest probability, of the smallest gap between the two best, of the highest entropy, any, or the last
    ones."""
    threshold: float | None = Field(default=None, gt=0, le=1)
    """Reveal in each step all tokens of at least this probability; if there is none, the most probable
    one."""
    factor: float | None = Field(default=None, gt=0)
    """Reveal in each step the n best tokens, for the largest n at which the n-th is at least 1 - factor / (n
    + 1) probable."""
    entropy_bound: float | None = Field(default=None, ge=0)
    """Reveal in each step the tokens of lowest entropy whose entropies together stay within this many nats,
    and at least one. Uniform noise: likewise keep them, without the largest entropy; unset: 0.1."""
    entropy_rule: Literal["sum", "sum-minus-max"] = "sum"
    """What `entropy_bound` bounds: the sum of the entropies, or the sum without the largest one (the EB
    sampler, Ben-Hamu et al. 2025)."""
    remask_fraction: float = Field(default=0.0, ge=0, lt=1)
    """The fraction of a block's visible tokens to hide again at every step, the least probable of earlier
    steps first. As many additional tokens are revealed, so the number of steps does not change."""
    revise: ReviseConfig | None = None
    """Revealed tokens are hidden again by what the present forward pass says of them, where
    `remask_fraction` goes by their probability when they were revealed. The number of steps does not
    change."""
    max_denoising_steps: int | None = Field(default=None, ge=1)
    """Uniform noise: the most denoising steps of a block. Unset: 48."""
    t_min: float | None = Field(default=None, ge=0)
    """Uniform noise: the temperature of the last step, to which it falls from `t_max` in equal parts. Unset:
    0.4. Not between 0 and 1e-6."""
    t_max: float | None = Field(default=None, ge=1e-6)
    """Uniform noise: the temperature before the first step. Unset: 0.8."""
    stability_threshold: int | None = Field(default=None, ge=0)
    """Uniform noise: a block is done when its most probable tokens have not changed for this many steps, and
    `confidence_threshold` is met. Unset: 1."""
    confidence_threshold: float | None = Field(default=None, gt=0)
    """Uniform noise: the mean entropy, in nats, below which a block can be done. Unset: 0.005."""
    temperature: float = Field(default=0.0, ge=0, le=1e6)
    """Divides the logits; 0: always the most probable token. Not between 0 and 1e-6."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw among the most probable tokens that together reach this probability."""
    top_k: int = Field(default=0, ge=0)
    """Draw among this many most probable tokens; 0: all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Draw among tokens of at least this fraction of the largest probability; 0: all."""
    order_temperature: float = Field(default=0.0, ge=0, le=1e6)
    """Draw which positions to reveal, without replacement, with probability proportional to exp(value /
    order_temperature), where value is what `remasking` orders by. 0: no noise."""
    filtered_confidence: bool = False
    """Whether confidence, margin and entropy are those of the distribution after penalty, bans, temperature,
    top_k, top_p and min_p, as in Dream, and not the model's own. Temperature 0 counts as 1 here, and tokens
    of `reveal_last` are left out."""
    reveal_last: list[int] | None = Field(default=None, min_length=1, fail_fast=True)
    """Token ids that are revealed last: in each block, a position that would show one of them waits until no
    other is hidden. Its confidence is -inf, thus its probability 0 for `threshold` and `factor`. Given the
    end tokens, it keeps texts from ending early (LLaDA, Nie et al. 2025)."""
    repetition_penalty: float = Field(default=1.0, ge=1e-3, le=1e3)
    """Divides the logits of tokens that are already in the sequence (multiplies negative ones); 1: none.
    Uniform noise: of those that are given, and of finished blocks."""
    cfg_scale: float = Field(default=0.0, ge=0, le=1e3)
    """Classifier-free guidance: logits + cfg_scale * (logits - logits with the prompt hidden). 0: off;
    otherwise every step takes twice the work."""
    allowed_tokens: list[int] | None = Field(default=None, min_length=1, fail_fast=True)
    """The only token ids that may be produced; unset: all."""
    forbidden_tokens: list[int] | None = Field(default=None, min_length=1, fail_fast=True)
    """Token ids that are not produced. The mask token never is."""
    constraint: ConstraintConfig | None = None
    """What the completion, or a text to fill (each gap, or the whole: `over`), has to match (`choice`,
    `regex`, `json_schema`, `json` or `grammar`)."""
    stop_at_eos: bool = True
    """Whether a completion ends with the first of the model's end tokens (`DiffusionLM.eos_token_ids`)."""
    cache: Literal["exact", "prefix", "dual"] = "exact"
    """Keys and values kept between steps. exact: only where that changes nothing. Lossy, for bidirectional
    models: prefix keeps those before the current block, dual also those after it."""
    refresh_interval: int | None = Field(default=None, ge=1)
    """Number of steps after which a lossy cache is recomputed; unset: at the start of every decoding block
    only."""
    early_commit: float | None = Field(default=None, gt=0, le=1)
    """Lossy: reveal the rest of the block once the two best tokens of every hidden position are at least this
    far apart in probability."""
    agreement_prompts: int = Field(default=2, ge=0)
    """Lossy settings: how many of the prompts are also sampled exactly, to report the fraction of tokens that
    agree; 0: none."""
    num_speculative_tokens: int = Field(default=0, ge=0, le=32)
    """Block-causal models: steps drafted ahead and verified in the same forward pass. The tokens do not
    change. Faster if memory bandwidth is the limit (few sequences, small blocks). Mode self-speculative:
    tokens drafted ahead; 0: the attention block less one, at most 7."""
    num_branches: int = Field(default=1, ge=1, le=32)
    """Mode self-speculative: candidates of a drafted token, on average. A pass verifies
    num_speculative_tokens * num_branches of them, as a tree that has more of the likelier paths; with 1 it is
    a chain. More candidates take fewer and wider passes. The distribution does not change."""
    seed: int = 0
    """The random seed: the same seed and prompt give the same tokens."""
    batch_size: int = Field(default=64, ge=1)
    """Sequences processed at once; the results do not depend on it."""
    max_batch_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens in a batch, counting padding; limits memory. Unset: only batch_size limits it."""
    deterministic: bool = False
    """Whether to compute every sequence separately, so that batching cannot change the last bits of a result;
    slow."""
    trace: bool = False
    """Whether to record the step at which each token was revealed."""
    top_log_probs: int = Field(default=0, ge=0, le=20)
    """Record this many of the most probable tokens at each position, when it was revealed and at temperature
    1, in the trace."""
    top_forbidden: int = Field(default=0, ge=0, le=20)
    """Record this many of the most probable tokens that the constraint forbids at each position, when it was
    revealed and at temperature 1, in the trace: no text that meets it has them there, given what was revealed
    before."""

    def without_effect(self) -> Iterator[ConfigError]:
        if self.self_speculative:
            for name in DENOISING_FIELDS:
                yield ConfigError(
                    f"has no effect with mode {self.mode!r}",
                    where=name,
                    remedy="Leave it out, or use mode 'denoise'",
                )
        else:
            yield ConfigError(
                f"has no effect with mode {self.mode!r}",
                where="num_branches",
                remedy="Use mode 'self-speculative'",
            )
        if self.parallel:
            yield ConfigError(
                f"has no effect with {self._rules[0]}", where="order_temperature", remedy="Leave it out"
            )
        elif self.remasking in ("random", "left_to_right"):
            what = f"has no effect with remasking {self.remasking!r}"
            yield ConfigError(what, where="order_temperature", remedy="Leave it out")
            yield ConfigError(
                what,
                where="filtered_confidence",
                remedy="Use remasking 'low_confidence', 'margin' or 'entropy'",
            )
        if self.entropy_bound is None:
            yield ConfigError(
                "has no effect without entropy_bound",
                where="entropy_rule",
                remedy="Set entropy_bound, or leave it out",
            )
        if self.constraint is None:
            yield ConfigError(
                "has no effect without a constraint", where="top_forbidden", remedy="Leave it out, or set one"
            )
        if self.lossy is None:
            what, remedy = "has no effect, as nothing is lossy", "Leave it out, or set cache or early_commit"
            yield ConfigError(what, where="agreement_prompts", remedy=remedy)

    def check(self) -> None:
        rules = self._rules
        if len(rules) > 1:
            raise ConfigError(
                f"{' and '.join(rules)} contradict one another", where=rules[1], remedy="Set one of them"
            )
        for name in ("temperature", "order_temperature", "t_min"):
            if 0 < (getattr(self, name) or 0) < 1e-6:
                raise ConfigError(
                    f"{getattr(self, name)} is not valid", where=name, remedy="Use 0, or 1e-6 and more"
                )
        if self.parallel and self.remask_fraction:
            what = f"cannot be combined with {rules[0]}, which does not fix the number of steps"
            raise ConfigError(what, where="remask_fraction", remedy="Leave one out")
        if self.revise is not None:
            self._check_revise(rules)
        # entropy_bound needs remasking 'entropy' only with masks: `unmask.generation.canvas.check_canvas`
        if self.parallel and self.entropy_bound is None and self.remasking != "low_confidence":
            what = f"cannot be combined with remasking {self.remasking!r}"
            raise ConfigError(what, where=rules[0], remedy="Use remasking 'low_confidence'")
        if self.parallel and self.schedule != "even":
            what = (
                f"{self.schedule!r} cannot be combined with {rules[0]}, which does not fix the number of "
                "steps"
            )
            raise ConfigError(what, where="schedule", remedy="Leave one out")
        if self.num_speculative_tokens and (self.remask_fraction or self.cfg_scale):
            what = f"cannot be combined with {'remask_fraction' if self.remask_fraction else 'cfg_scale'}"
            raise ConfigError(what, where="num_speculative_tokens", remedy="Leave one of them out")
        if self.num_speculative_tokens and self.constraint is not None:
            raise ConfigError(
                "cannot be combined with a constraint",
                where="num_speculative_tokens",
                remedy="Leave one of them out",
            )
        if self.early_commit is not None and self.remask_fraction:
            what = "cannot be combined with remask_fraction, which hides revealed tokens again"
            raise ConfigError(what, where="early_commit", remedy="Leave one of them out")
        if self.cache == "exact" and self.refresh_interval is not None:
            raise ConfigError(
                "an exact cache needs no refresh",
                where="refresh_interval",
                remedy="Use cache 'prefix' or 'dual'",
            )
        if self.allowed_tokens and not set(self.allowed_tokens) - set(self.forbidden_tokens or ()):
            raise ConfigError(
                "every allowed token is forbidden", where="allowed_tokens", remedy="Allow one more"
            )

    def _check_revise(self, rules: list[str]) -> None:
        """Raise ConfigError for what cannot be combined with `revise`."""
        assert self.revise is not None
        because = {
            "remask_fraction": "remask_fraction, which hides tokens by another rule",
            "num_speculative_tokens": "num_speculative_tokens, which predict steps that hide nothing",
            "early_commit": "early_commit, which ends a block",
        }
        others = [because[name] for name in because if getattr(self, name)]
        if self.parallel:
            others.insert(0, f"{rules[0]}, which does not fix the number of steps")
        if self.revise.schedule == "loop" and self.schedule != "even":
            others.append(f"schedule {self.schedule!r}: loop has counts of its own")
        if others:
            raise ConfigError(
                f"cannot be combined with {others[0]}", where="revise", remedy="Leave one of them out"
            )

    @property
    def _rules(self) -> list[str]:
        """The settings given that say how many tokens a step reveals."""
        names = ("steps", "tokens_per_step", "threshold", "factor", "entropy_bound")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def filters(self) -> bool:
        """Whether only likely tokens are drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def self_speculative(self) -> bool:
        """Whether tokens are those of the model's causal reading, drafted by denoising."""
        return self.mode == "self-speculative"

    @property
    def parallel(self) -> bool:
        """Whether the predictions decide how many tokens a step reveals."""
        return self.threshold is not None or self.factor is not None or self.entropy_bound is not None

    @property
    def of_texts(self) -> list[str]:
        """The names of the settings that differ from their defaults and are read only where text is
        generated."""
        return sorted(
            self.model_dump(
                exclude_defaults=True, exclude={"seed", "batch_size", "max_batch_tokens", "deterministic"}
            )
        )

    @property
    def lossy(self) -> str | None:
        """The setting that makes tokens differ from the exact sampler's; None: none."""
        names = [f"{self.cache} cache"] if self.cache != "exact" else []
        return " and ".join(names + (["early commit"] if self.early_commit is not None else [])) or None
