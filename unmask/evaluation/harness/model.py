"""The model `unmask` of lm-eval: any DiffusionLM."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.models.utils import has_bos_prefix
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from unmask.config.sampler import SamplerConfig
from unmask.console import Phase, tracked
from unmask.data.decoding import text_after
from unmask.diffusion.rng import sequence_key
from unmask.errors import ConfigError, DataError, GenerationError, did_you_mean
from unmask.evaluation.harness.answers import AnswerText, LogLikelihood
from unmask.evaluation.likelihood import (
    LikelihoodEstimator,
    chosen_estimator,
    common_length,
    is_greedy,
    log_likelihoods,
)
from unmask.evaluation.protocols import Protocol, cut, protocol_tasks, read_protocol
from unmask.generation.requests import completion_length
from unmask.generation.sampler import generate
from unmask.models.chat_template import render_template
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import REFUSED, WITHOUT_EFFECT, load
from unmask.models.model_state import fingerprint
from unmask.training.distributed import connected_processes

Wanted = tuple[int, list[int], int, list[str]]
"""A text that is to be generated: the number of its request, the prompt, the key of its random numbers, and
the stop strings."""
DEFAULT_SAMPLES = 128
LM_EVAL_DEVICE = "cuda:0"
"""What lm-eval's command line passes unless `--device` is given. Where there is no such device its own models
choose another, too."""
Answer = TypeVar("Answer")
KEPT_OF, KEPT = "unmask", "answer "
"""The key, in lm-eval's file of answers, of the model and settings that gave them; and how the names of
answers begin."""
_read_protocol = cache(read_protocol)
DEFAULT_CONTEXT = 2048
"""Tokens, for a model whose config does not say: as lm-eval."""

LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the length of a completion, as in lm-eval."""
OWN = ("until", "do_sample", *LENGTH_NAMES)
MODEL_FIELDS = set(inspect.signature(load).parameters) - {
    "path_or_id",
    "attention",
    "block_size",
    "logit_shift",
    "device",
    "others",
}
OF_HF = {
    "peft": "Give the adapter's folder as pretrained",
    "parallelize": "Use device_map=auto",
    **{f"load_in_{bits}bit": f"Use quantization={bits}bit" for bits in (4, 8)},
    "tokenizer": "Leave it out: it is that of the model's folder",
    "add_bos_token": "Leave it out: the tokenizer decides",
}
"""Arguments of lm-eval's own model `hf`, and what to do instead."""
SAMPLER_FIELDS = set(SamplerConfig.model_fields) - {"seed", "batch_size"}
DEFAULT_LENGTH = 256
"""Tokens of a completion, as in lm-eval."""


class HarnessLM(TemplateLM):
    """A DiffusionLM as a model of lm-eval.

    Scores are functions of model, request and settings: they do not depend on the batch size, the order of
    the requests, or the processes.

    Args:
        pretrained: a DiffusionLM, or the path or name of one to load.
        samples: noised views per likelihood at most (elbo); None: 128, or those of the protocol.
        estimator: elbo or exact; None: as of `default_estimator`.
        seed: of masks and samples.
        batch_size: sequences generated at once, or "auto"; likelihoods are computed one by one.
        max_batch_size: of "auto".
        device: where to load the model; None: the GPU if there is one.
        protocol: evaluate as its authors did (`unmask.evaluation.protocols`): a sampler and a number of
            samples for each task. Of a request's own options only the stop strings are then read. Examples
            and chat template are lm-eval's to set.
        max_length: the longest row, prompt and completion; None: the model's context. Longer prompts lose
            their beginning.
        enable_thinking, chat_template_args: for the chat template, as of lm-eval's model `hf`.
        think_end_token: an answer's text begins after the last such token, by id or as text, if it has one.
        settings: other arguments of `unmask.load`, and settings of `SamplerConfig` for requests that do not
            have their own; they replace those of the protocol.

    Raises:
        ConfigError: an unknown setting, or a wrong value.
    """

    progress: Phase | None = None
    """The phase of a progress display that each list of requests updates, in place of lm-eval's display."""

    def __init__(
        self,
        pretrained: str | DiffusionLM,
        *,
        samples: int | None = None,
        estimator: LikelihoodEstimator | None = None,
        seed: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        protocol: str | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        model, sampler = split_settings(settings)
        if batch_size is not None and not str(batch_size).startswith("auto"):  # auto:4 is lm-eval's, too
            sampler["batch_size"] = _whole(batch_size, "batch_size")
        elif max_batch_size is not None:
            sampler["batch_size"] = _whole(max_batch_size, "max_batch_size")
        state = _processes(device, pretrained) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
        if isinstance(pretrained, DiffusionLM):
            if model:
                raise ConfigError(
                    "the model is loaded already",
                    where=next(iter(model)),
                    remedy="Leave it out, or give a path",
                )
            self.lm = pretrained
        else:
            if device == LM_EVAL_DEVICE and not torch.cuda.is_available():
                device = None
            self.lm = load(
                str(pretrained), **model, device=device or ("auto" if state is None else str(state.device))
            )
        self.tokenizer = self.lm.tokenizer
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.chat_template_args, self.think_end_token = (chat_template_args or {}) | thinking, think_end_token
        if self.chat_template_args.get("enable_thinking") and think_end_token is None:
            what = "needs the token that ends the thoughts, which are no part of an answer"
            raise ConfigError(what, where="enable_thinking", remedy="Give think_end_token")
        self.samples = DEFAULT_SAMPLES if samples is None else _whole(samples, "samples")
        self.seed = int(seed)
        self.authors, self._asked_samples = protocol, samples is not None
        if protocol is not None:
            protocol_tasks(protocol.partition("/")[0])
        self.estimator: LikelihoodEstimator = chosen_estimator(self.lm, estimator)
        self.sampler = SamplerConfig(**sampler, seed=self.seed)
        self._max_length = None if max_length is None else _whole(max_length, "max_length")
        self._state, self._device = state, self.lm.device
        if state is not None:
            self._rank, self._world_size = state.process_index, state.num_processes

    @property
    def bounds(self) -> bool:
        """Whether log-likelihoods are lower bounds; perplexities and bits per byte are then upper bounds."""
        return self.estimator == "elbo" and not self.lm.autoregressive

    @property
    def max_length(self) -> int:
        """Tokens of the longest row."""
        context = self.lm.context_length or DEFAULT_CONTEXT
        return min(self._max_length or context, context)

    @property
    def eot_token_id(self) -> int:
        return self.lm.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """Before a text without a context: BOS, or EOS where there is none."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def protocol_of(self, task: str | None) -> Protocol | None:
        """The authors' protocol for a task. Raises ConfigError if they did not evaluate it."""
        return None if self.authors is None else _read_protocol(self.authors, str(task))

    def record_of(self, task: str) -> dict[str, Any]:
        """The authors' protocol for a task, for its result."""
        protocol = self.protocol_of(task)
        return {} if protocol is None else {"authors": protocol.record(self.lm, self._given)}

    @property
    def _given(self) -> dict[str, Any]:
        return {name: getattr(self.sampler, name) for name in self.sampler.model_fields_set}

    def samples_of(self, task: str | None) -> int:
        """The views per likelihood of a task's requests. Raises ConfigError if the authors generate its
        answers, or for guidance."""
        if self.sampler.cfg_scale:
            remedy = f"Leave it out, or evaluate without {task}"
            raise ConfigError("likelihoods are computed without guidance", where="cfg_scale", remedy=remedy)
        protocol = self.protocol_of(task)
        if protocol is None:
            return self.samples
        where = f"protocol {protocol.name}"
        if protocol.likelihood_samples is None:
            raise ConfigError(
                f"answers to {task} are generated, and it measures likelihoods",
                where=where,
                remedy="Choose another task",
            )
        if protocol.cfg_scale:
            remedy = f"Use {protocol.name}/without-guidance"
            raise ConfigError(
                f"{task} has guidance, and likelihoods are computed without it", where=where, remedy=remedy
            )
        return self.samples if self._asked_samples else protocol.likelihood_samples

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text, after BOS if the tokenizer adds one and the text does not begin with it. An end
        that the tokenizer adds is left out, as in the prompts of `unmask.generate`."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id]))
        bos = [self.tokenizer.bos_token_id]
        ids = list(self.tokenizer(string, add_special_tokens=False)["input_ids"])
        return bos + ids if add_special_tokens and self.tokenizer("")["input_ids"][:1] == bos else ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = []
        keys = _mask_keys(requests)
        with self._shown(zip(requests, keys, strict=True), len(requests), disable_tqdm) as shown:
            for (task, _), some in itertools.groupby(shown, key=lambda pair: _question(pair[0])):
                requests_of, keys_of = zip(*some, strict=True)
                asked = [task, *keys_of, *(request.args for request in requests_of)]
                answers += self._once(asked, partial(self._answer, requests_of, keys_of))
        return answers

    def _once(self, asked: Sequence[Any], answer: Callable[[], Answer]) -> Answer:
        """An answer that lm-eval's file keeps under all that it depends on beside the model and its
        settings."""
        kept = self.cache_hook.dbdict
        if kept is None:
            return answer()
        name = _kept_name(asked)
        if name not in kept:
            kept[name] = answer()
        found: Answer = kept[name]
        return found

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Keep answers in a file of lm-eval. It knows a request by its text alone, so the file notes the
        model and its settings. An answer depends on more: a likelihood on the other choices of its question,
        a text on the task's protocol. So answers have names of our own there, and those that lm-eval has kept
        by request are removed.

        Raises:
            DataError: the file has the answers of another model, or of other settings.
        """
        super().set_cache_hook(cache_hook)
        answers = cache_hook.dbdict
        if answers is None:
            return
        own = json.loads(
            json.dumps({"fingerprint": fingerprint(self.lm.model), **self.lm.settings, **self.protocol})
        )
        kept = answers.get(KEPT_OF) or {}
        if not len(answers):
            answers[KEPT_OF] = own
        # what a version does not know is unset
        elif changed := [name for name in own | kept if kept.get(name) != own.get(name)]:
            remedy = "Choose another file, or remove this one"
            raise DataError(
                f"has answers of another evaluation ({', '.join(changed)})",
                where=f"use_cache {answers.filename}",
                remedy=remedy,
            )
        for name in [name for name in answers if name != KEPT_OF and not name.startswith(KEPT)]:
            del answers[name]

    def _loglikelihood_tokens(self, requests: list, **_: Any) -> list[tuple[float, bool]]:
        return [
            self.answer_ids(context, continuation, sequence_key(context))
            for _, context, continuation in requests
        ]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        answers: list[float] = []
        with self._shown(requests, len(requests), disable_tqdm) as shown:
            for request in shown:
                (text,), samples = request.args, self.samples_of(request.task_name)
                answers.append(
                    self._once(
                        ["rolling", text, samples], partial(self.log_likelihood_of_text, text, samples)
                    )
                )
        return answers

    def log_likelihood_of_text(self, text: str, samples: int) -> LogLikelihood:
        """The log-likelihood of a whole text, in disjoint windows."""
        # A causal model does not read the last token of a window, which may therefore be one longer.
        size = self.max_length - (not self.lm.autoregressive)
        windows = map(
            make_disjoint_window,
            get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, size, context_len=1),
        )
        parts = [
            self.estimate_ids(context, ids, sequence_key([*context, *ids]), samples)
            for context, ids in windows
        ]
        return LogLikelihood(sum(parts), [difference for part in parts for difference in part.differences])

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        answers: list[str] = [""] * len(requests)
        names: list[str] = []
        kept = self.cache_hook.dbdict if self.cache_hook.dbdict is not None else {}
        repeats: Counter[int] = Counter()
        by_sampler: dict[str, tuple[SamplerConfig, list[Wanted]]] = {}
        for number, request in enumerate(requests):
            context, gen_kwargs = request.args
            sampler, until = read_gen_kwargs(
                gen_kwargs, self.sampler, random_tokens=self.lm.noise == "uniform"
            )
            if protocol := self.protocol_of(request.task_name):
                sampler = protocol.sampler(self.lm, self._given)
                context, until = protocol.prompt(context, self.lm), [] if protocol.ignore_until else until
            new = completion_length(self.lm, sampler.max_new_tokens)
            if (room := self.max_length - new) < 1:
                what = f"{new} new tokens leave no room for a prompt"
                where = "max_gen_toks"
                raise GenerationError(f"{what} in rows of {self.max_length}", where=where, remedy="Lower it")
            prompt = self.tok_encode(context)[-room:]
            # lm-eval repeats a request to get several samples, and once more so that all processes have
            # equally many.
            key = sequence_key(prompt, repeats[id(request)] % (request.repeats or 1))
            repeats[id(request)] += 1
            settings = sampler.model_dump_json(exclude={"batch_size"})
            names.append(_kept_name([settings, prompt, key, until, self.think_end_token]))
            if names[-1] in kept:
                answers[number] = kept[names[-1]]
                continue
            group = by_sampler.setdefault(sampler.model_dump_json(), (sampler, []))
            group[1].append((number, prompt, key, until))
        for sampler, wanted in by_sampler.values():
            size = sampler.batch_size
            batches = [wanted[first : first + size] for first in range(0, len(wanted), size)]
            with self._shown(batches, len(batches), disable_tqdm) as shown:
                for batch in shown:
                    numbers, prompts, keys, untils = zip(*batch, strict=True)
                    made = generate(self.lm, prompts, sampler, keys=keys)
                    for at, (number, until) in enumerate(zip(numbers, untils, strict=True)):
                        steps = max(made.steps[at], default=-1) + 1
                        text, ids = made.texts[at], made.tokens[at]
                        if self.think_end_token is not None:
                            text = text_after_thoughts(self.lm, text, ids, self.think_end_token)
                        answer = AnswerText(cut(text, until), len(ids), steps, made.forward_passes[at])
                        answers[number] = kept[names[number]] = answer
        return answers

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return render_template(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.chat_template_args,
        )

    @property
    def tokenizer_name(self) -> str:
        """For names of cached requests, which depend on the tokenizer and its chat template."""
        template = f"{self.tokenizer.chat_template}{self.chat_template_args or ''}"
        digest = hashlib.blake2b(template.encode(), digest_size=4).hexdigest()
        return f"{self.tokenizer.name_or_path.replace('/', '__')}-{digest}"

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._state is None else gather(tensor)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        if self._state is None:
            return [obj]
        found = [None] * self.world_size if self.rank == dst else None
        torch.distributed.gather_object(obj, found, dst=dst)
        return found

    def barrier(self) -> None:
        if self._state is not None:
            self._state.wait_for_everyone()

    def get_model_info(self) -> dict[str, Any]:
        """For lm-eval's result file: what scores depend on beside the model."""
        return self.protocol

    @property
    def protocol(self) -> dict[str, Any]:
        likelihood = {
            "estimator": self.estimator,
            "log_likelihoods_are_lower_bounds": self.bounds,
            "max_length": self.max_length,
        }
        masks = {"samples": self.samples} if self.bounds else {}
        sampler = self.sampler.model_dump(mode="json", exclude={"batch_size", "seed"}, exclude_unset=True)
        authors = {} if self.authors is None else {"authors": self.authors}
        return {**likelihood, **masks, **authors, "seed": self.seed, "sampler": sampler}

    def _answer(self, requests: Sequence[Instance], keys: Sequence[int]) -> list[tuple[float, bool]]:
        """The answers to the requests of a question. Masks are aligned by what its choices have in common."""
        task = requests[0].task_name
        samples, protocol = self.samples_of(task), self.protocol_of(task)
        contexts = [
            protocol.prompt(request.args[0], self.lm) if protocol else request.args[0] for request in requests
        ]
        pairs = self.encode_choices(contexts, requests)
        shared = common_length([continuation for _, continuation in pairs])
        # One without a context may be of several questions, and has one likelihood.
        common = [shared if request.args[0] else None for request in requests]
        return [
            self.answer_ids(*pair, key, samples, first)
            for pair, key, first in zip(pairs, keys, common, strict=True)
        ]

    def encode_choices(
        self, contexts: Sequence[str], requests: Sequence[Instance]
    ) -> list[tuple[list[int], list[int]]]:
        """The ids before each continuation and those to score, which together are the ids of the whole text.

        They part where the ids of the context alone end (without the spaces at its end, as in lm-eval). Where
        the text continues the last token of the context, they part before this token, for all choices of a
        question that have the same context: they are then conditioned on the same ids.
        """
        whole, parts = [], dict[Any, int]()
        names = [
            context if request.doc_id is not None else number
            for number, (context, request) in enumerate(zip(contexts, requests, strict=True))
        ]
        for name, context, request in zip(names, contexts, requests, strict=True):
            ids = self.tok_encode(context + request.args[1])
            common = common_length([ids, self.tok_encode(context.rstrip())])
            if common == len(ids) or not request.args[1]:  # else the spaces at its end would be scored
                what = (
                    f"{request.args[1]!r:.80} adds no token to its context, which ends with {context[-20:]!r}"
                )
                where = f"{request.task_name}, document {request.doc_id}"
                raise DataError(
                    what, where=where, remedy="Give a continuation with text that the tokenizer keeps"
                )
            whole.append(ids)
            parts[name] = min(common, parts.get(name, common))
        prefix = [self.prefix_token_id]
        starts = [max(parts[name], ids[:1] == prefix) for name, ids in zip(names, whole, strict=True)]
        return [(ids[:start] or prefix, ids[start:]) for ids, start in zip(whole, starts, strict=True)]

    def answer_ids(
        self,
        context: list[int],
        continuation: list[int],
        key: int,
        samples: int | None = None,
        shared: int | None = None,
    ) -> tuple[float, bool]:
        """The log-likelihood of a continuation, and whether greedy decoding gives it. The context loses its
        beginning if both are longer than a row."""
        longest = self.max_length + self.lm.autoregressive  # a causal model does not read the last token
        if len(continuation) >= longest:
            what = f"a continuation of {len(continuation)} tokens leaves no room for a context"
            remedy = "Shorten it, or use a model with a longer context"
            raise GenerationError(
                f"{what} in rows of {self.max_length}", where="loglikelihood", remedy=remedy
            )
        context = context[-(longest - len(continuation)) :]
        likelihood = self.estimate_ids(context, continuation, key, samples, shared)
        return likelihood, is_greedy(self.lm, context, continuation)

    def estimate_ids(
        self,
        context: list[int],
        continuation: list[int],
        key: int,
        samples: int | None = None,
        shared: int | None = None,
    ) -> LogLikelihood:
        """The log-likelihood of a continuation, by the estimator."""
        samples = samples or self.samples
        found = log_likelihoods(
            self.lm, [context], [continuation], self.estimator, samples, self.seed, keys=[key], shared=shared
        )
        return LogLikelihood(float(found.values[0]), found.differences[0].tolist())

    @contextlib.contextmanager
    def _shown(self, requests: Iterable[Any], total: int, disable_tqdm: bool) -> Iterator[Iterable[Any]]:
        """The requests, with a display of their progress: that of lm-eval's own command, unless there is
        another one."""
        hidden = disable_tqdm or self.rank != 0 or self.progress is not None
        with tqdm(requests, total=total, disable=hidden, desc="Running requests") as shown:
            yield tracked(shown, total, self.progress)


def _processes(device: str | None, pretrained: str | DiffusionLM) -> PartialState:
    """The processes of a launcher, connected. Accelerate connects none on a machine without a GPU, unless it
    is set to use the CPU."""
    where = pretrained.device.type if isinstance(pretrained, DiffusionLM) else device
    return connected_processes(cpu=where == "cpu" or not torch.accelerator.is_available())


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not str(value).isdecimal() or int(value) < 1:
        remedy = "Give a number from 1, or auto" if name == "batch_size" else "Give a number from 1"
        raise ConfigError(f"{value!r} is not a number from 1", where=name, remedy=remedy)
    return int(value)


def _kept_name(asked: Sequence[Any]) -> str:
    return KEPT + hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _question(request: Instance) -> tuple[str | None, int | None]:
    return request.task_name, request.doc_id


def _mask_keys(requests: Sequence[Instance]) -> list[int]:
    """A key for the masks of each request. The choices of a question have one: a hash of their context, or of
    all their contexts where these differ (Winogrande). A request without a context, which measures a choice
    by itself, has the key of the empty context in any question."""
    contexts: dict[Any, set[str]] = {}
    for request in requests:
        contexts.setdefault(_question(request), set()).add(request.args[0])
    keys = []
    for request in requests:
        own = request.args[0]
        together = (
            sorted(contexts[_question(request)] - {""}) if own and request.doc_id is not None else [own]
        )
        digest = hashlib.blake2b("\0".join(together).encode(), digest_size=8).digest()
        keys.append(int.from_bytes(digest, "little") >> 1)
    return keys


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `unmask.load`, and the sampler's settings. Raises ConfigError for any other name."""
    of_load = MODEL_FIELDS | set(REFUSED) | WITHOUT_EFFECT  # `load` gives the reasons
    for name in settings:
        if name not in of_load | SAMPLER_FIELDS:
            own = {"samples", "estimator", "seed", "batch_size", "max_length", "device"}
            remedy = OF_HF.get(name) or did_you_mean(name, MODEL_FIELDS | SAMPLER_FIELDS | own)
            raise ConfigError(f"unknown option {name!r}", where="model_args", remedy=remedy)
    model = {name: value for name, value in settings.items() if name in of_load}
    return model, {name: value for name, value in settings.items() if name in SAMPLER_FIELDS}


def text_after_thoughts(lm: DiffusionLM, text: str, ids: Sequence[int], end: str | int) -> str:
    """The text after the last token that ends thoughts, by id or as text; the whole one if there is none."""
    if isinstance(end, str):  # the text has no special tokens
        end = lm.tokenizer.get_vocab().get(end, end)
    if isinstance(end, str):
        return text.split(end)[-1].lstrip()
    if end not in ids:
        return text
    first = len(ids) - ids[::-1].index(end)
    return text_after(lm.tokenizer, ids[:first], ids[first:], lm.eos_token_ids).lstrip()


def read_gen_kwargs(
    gen_kwargs: Mapping[str, Any], defaults: SamplerConfig, *, random_tokens: bool = False
) -> tuple[SamplerConfig, list[str]]:
    """The sampler and the stop strings of a request.

    `until`, `do_sample` and the length mean what they mean in lm-eval: without `do_sample` a temperature
    decides; `do_sample: false` is greedy at any temperature; `do_sample: true` alone samples at temperature
    1. All other names are those of `SamplerConfig`.

    Args:
        random_tokens: whether the model writes on canvases of random tokens. Their steps draw at temperatures
            of their own, so that neither `do_sample` nor a temperature of 0 changes anything.

    Raises:
        ConfigError: an unknown name, a wrong value, two lengths, or sampling at temperature 0.
    """
    given = dict(gen_kwargs)
    for name in given:
        if name not in OWN and name not in SamplerConfig.model_fields:
            remedy = did_you_mean(name, {*OWN, *SamplerConfig.model_fields})
            raise ConfigError(f"{name!r} is no option of the sampler", where="gen_kwargs", remedy=remedy)
    lengths = {name: given.pop(name) for name in LENGTH_NAMES if given.get(name) is not None}
    if len(set(lengths.values())) > 1:
        what = f"{' and '.join(lengths)} contradict one another"
        raise ConfigError(what, where="gen_kwargs", remedy="Give one length")
    settings = {name: value for name, value in given.items() if name not in OWN}
    if lengths or "max_new_tokens" not in defaults.model_fields_set:
        settings["max_new_tokens"] = int(next(iter(lengths.values()), DEFAULT_LENGTH))
    sample, temperature = given.get("do_sample"), given.get("temperature")
    if random_tokens and (sample is False or temperature == 0):
        settings.pop("temperature", None)
    elif sample is False:
        settings["temperature"] = 0.0
    elif sample and temperature == 0:
        what = "do_sample with temperature 0 contradict one another"
        remedy = "Leave one out, or raise the temperature"
        raise ConfigError(what, where="gen_kwargs", remedy=remedy)
    elif sample and temperature is None and not random_tokens:
        settings["temperature"] = defaults.temperature or 1.0
    until = given.get("until") or []
    until = [until] if isinstance(until, str) else list(until)
    if not all(isinstance(stop, str) for stop in until):
        what = f"until {until!r:.80} is not a string or a list of strings"
        raise ConfigError(what, where="gen_kwargs", remedy="Give strings")
    sampler = SamplerConfig(**{**defaults.model_dump(exclude_unset=True), **settings})
    return sampler, [stop for stop in until if stop]
