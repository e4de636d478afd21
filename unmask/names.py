"""Names of settings elsewhere: earlier ones of Unmask, and those of transformers, TRL and other trainers.

The errors for unknown names, `unmask migrate` and docs/migration.md read them here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

EARLIER_NAMES = {
    "aggregation": "loss_type",
    "ratio": "importance_sampling_level",
    "advantage": "scale_rewards",
    "reference_sync_steps": "ref_model_sync_steps",
    "reference_sync_share": "ref_model_mixup_alpha",
    "dual_clip": "delta",
    "mask_truncated": "mask_truncated_completions",
    "kl_unbiased": "use_bias_correction_kl",
    "importance_cap": "vllm_importance_sampling_cap",
    "drop_equal_groups": "filter_zero_std_groups",
    "dynamic_sampling": "max_resample_rounds",
    "log_completions_rows": "num_completions_to_print",
    "beyond_eos": "after_eos",
    "reference_model": "ref_model",
    "score_chunk": "logprob_batch_size",
    "score_temperature": "logprob_temperature",
    "policy": "remasking",
    "remask": "remask_fraction",
    "guidance": "cfg_scale",
    "drafts": "num_speculative_tokens",
    "candidates": "num_branches",
}
"""The names of settings before they were those of TRL, vLLM and LLaDA."""
NAMES_ELSEWHERE = EARLIER_NAMES | {
    "use_amp": "bf16",
    "log_gpu_memory": "log_memory_usage",
    "batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "seq_len": "max_length",
    "max_seq_length": "max_length",
    "lr": "learning_rate",
    "rank": "r",
    "source": "train",
    "sources": "train",
    "no_cuda": "use_cpu",
    "tokenizer": "processing_class",
    "block_length": "block_size",
    "diffusion_steps": "steps",
    "p_mask_prompt": "prompt_mask_rate",
    "alg": "remasking",
    "grpo": "diffu-grpo",
    "masking_strategy": "masking",
    "enable_performance_logging": "performance_log_interval",
}
"""Unmask's names of settings and a method by those of other training loops (docs/switches.md), of TRL and of
d1 (docs/migration.md)."""


def _by_name(names_by_text: Mapping[str, str]) -> dict[str, str]:
    return {name: text for text, names in names_by_text.items() for name in names.split()}


INSTEAD = _by_name(
    {
        "name the column text, or set text_column (pretrain, convert)": "dataset_text_field",
        "set the tokenizer's chat_template, or data.chat_template": "chat_template_path",
        "set model.eos_token_ids, or load with eos_token_ids": "eos_token",
        "set model.trust_remote_code, in Python model_init_kwargs": "trust_remote_code",
        "set activation_checkpointing": "activation_offloading",
        "set truncation_mode (sft, dpo); max_length bounds a prompt with its completion": "max_prompt_length",
        "set reference to stored (the default), frozen or adapter": (
            "precompute_ref_log_probs force_use_ref_model model_adapter_name ref_adapter_name"
        ),
        "set per_device_train_batch_size": "precompute_ref_batch_size per_gpu_train_batch_size",
        "set loss_type to simpo, which has no reference": "reference_free",
        "set loss_type to [sigmoid, sft], and loss_weights": "rpo_alpha",
        "set rollout_batch_size: a rollout is one step": "generation_batch_size steps_per_generation",
        "set rollout to {backend: vllm, url: URL, timeout: SECONDS}": (
            "use_vllm vllm_mode vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout"
        ),
        "set vllm_importance_sampling_cap; null turns the correction off": (
            "vllm_importance_sampling_correction vllm_importance_sampling_mode "
            "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min"
        ),
        "set constraint to {regex: PATTERN}": "vllm_structured_outputs_regex vllm_guided_decoding_regex",
        "give it to the vLLM server": (
            "vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size vllm_model_impl "
            "vllm_enable_sleep_mode vllm_group_port"
        ),
        "set scale_rewards to group": "normalize_advantages",
        "clip in the reward function": "reward_clip_range",
        "write a method of your own (docs/rl.md)": (
            "sapo_temperature_neg sapo_temperature_pos vespo_k_neg vespo_k_pos vespo_lambda_neg "
            "vespo_lambda_pos off_policy_mask_threshold"
        ),
        # earlier fields of transformers.TrainingArguments
        "set eval_strategy": "evaluation_strategy evaluate_during_training",
        "set per_device_eval_batch_size": "per_gpu_eval_batch_size",
        "set warmup_steps: a value below 1 is a fraction of the steps": "warmup_ratio",
        "set train_sampling_strategy to group_by_length": "group_by_length",
        "set optim to adafactor": "adafactor",
        "set bf16 or fp16": "fp16_opt_level fp16_backend half_precision_backend",
        "set accelerator_config": "dispatch_batches split_batches",
        "set fsdp and fsdp_config": "sharded_ddp fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap",
        "set torch_compile": "torchdynamo",
        "set ddp_backend": "xpu_backend",
        "set hub_model_id": "push_to_hub_model_id push_to_hub_organization",
        "set hub_token": "push_to_hub_token",
        "give --overwrite on the command line": "overwrite_output_dir",
        "give it to the trainer": "peft_config formatting_func compute_metrics callbacks",
        "give the trainer its processing_class": "tokenizer tokenizer_name processing_class",
        "give the trainer a ref_model that is loaded": "ref_model_init_kwargs",
        "set model_init_kwargs to {dtype: bfloat16}, as unmask.load takes it": "torch_dtype dtype",
        "set model_init_kwargs to {quantization: 4bit}": "load_in_4bit load_in_8bit use_bnb_nested_quant",
        "give the trainer a peft_config (on the command line the section lora)": (
            "use_peft lora_r lora_alpha lora_dropout lora_target_modules"
        ),
        "measure answers with unmask evaluate": (
            "predict_with_generate generation_config generation_max_length generation_num_beams"
        ),
    }
)
"""What to do in place of settings of other trainers, by their names."""
NOT_NEEDED = _by_name(
    {
        "dropout is off in dpo and grpo": "disable_dropout",
        "the loss of a mixture's router is the model's own": "router_aux_loss_coef",
        "rows are always prepared, and stored": "dataset_kwargs dataset_batch_size",
        "padding is never read": "pad_token padding_value label_pad_token_id",
        "prompts and users' turns are never trained on": "completion_only_loss assistant_only_loss",
        "packing is best-fit, order random, padding that of the batch": (
            "packing_strategy eval_packing padding_free pad_to_multiple_of shuffle_dataset sortish_sampler"
        ),
        "a loss that is not built here": "ld_alpha use_weighting discopop_tau",
        "there is no entropy bonus": (
            "entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target "
            "use_adaptive_entropy"
        ),
        "rewards are weighted, added up, then compared": "multi_objective_aggregation",
        "completions.jsonl has all samples": (
            "log_completions_hub_repo log_unique_prompts wandb_log_unique_prompts log_multimodal"
        ),
        "a rollout is one turn": "max_tool_calling_iterations",
        "log-probabilities are always taken in float32": "cast_lm_head_to_fp32",
        "shards are gathered when needed": "ds3_gather_for_generation",
        "the sampler batches and caches by itself": (
            "cache_implementation transformers_continuous_batching_config "
            "use_transformers_continuous_batching use_transformers_paged"
        ),
        "reward models are not trained here": "center_rewards_coefficient",
        "weights are always saved as safetensors": "save_safetensors",
        "tokens_per_second is always logged": "include_tokens_per_second",
        "an evaluation computes losses, and no predictions": "include_inputs_for_metrics",
        "Unmask's attention is the model's": "attn_implementation",
        "transformers has removed it": (
            "_n_gpu deepspeed_plugin jit_mode_eval mp_parameters past_index ray_scope tpu_metrics_debug "
            "tpu_num_cores use_ipex use_legacy_prediction_loop use_mps_device"
        ),
    }
)
"""Why settings of other trainers are not needed, or not there, by their names."""
ASKS_WHEN_OFF = {
    *("assistant_only_loss", "completion_only_loss", "disable_dropout", "eval_packing", "save_safetensors"),
    *("shuffle_dataset", "vllm_importance_sampling_correction"),
}
"""Switches of other trainers that ask for something when they are off."""
LOADING = _by_name(
    {
        'Give quantization="4bit", or a quantization_config': (
            "load_in_4bit bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_4bit_use_double_quant"
        ),
        'Give quantization="8bit", or a quantization_config': (
            "load_in_8bit llm_int8_threshold llm_int8_skip_modules llm_int8_enable_fp32_cpu_offload"
        ),
        "Give dtype": "bf16 fp16 half precision load_in_16bit",
        "Give token": "use_auth_token api_key",
        "Leave it out: the attention is Unmask's": "use_flash_attention_2 use_sdpa",
        "Give device_map": "device_ids",
        "Set it on lm.tokenizer": "use_fast padding_side truncation_side model_max_length tokenizer_kwargs",
        "Call lm.set_chat_template": "chat_template",
        "Save the tokenizer beside the model (tokenizer.save_pretrained)": (
            "tokenizer processing_class mask_token mask_token_id pad_token eos_token bos_token"
        ),
        "Give it to the trainer": "peft_config lora_config",
        "Set it in the trainer's config": (
            "max_length max_seq_length gradient_checkpointing use_gradient_checkpointing seed"
        ),
        "Change it in config.json, to which the weights belong": (
            "architectures attention_bias attention_dropout bos_token_id hidden_act hidden_size id2label "
            "intermediate_size label2id max_position_embeddings num_attention_heads num_hidden_layers "
            "num_key_value_heads num_labels pad_token_id problem_type rope_parameters rope_scaling "
            "rope_theta sliding_window tie_word_embeddings torchscript vocab_size"
        ),
        "Give it to lm.generate": "max_new_tokens temperature do_sample",
    }
)
"""What to do in place of arguments that others load models with, by their names."""

CLASSES_ELSEWHERE = _by_name(
    {
        "use DPOTrainer and DPOConfig(loss_type='kto')": "KTOTrainer KTOConfig",
        "use DPOTrainer and DPOConfig(loss_type='bco_pair'), for pairs": "BCOTrainer BCOConfig",
        "of its losses DPOTrainer has simpo, DPOConfig(loss_type='simpo')": "CPOTrainer CPOConfig",
        "use GRPOTrainer and GRPOConfig(scale_rewards='leave-one-out'), which has its advantages": (
            "RLOOTrainer RLOOConfig"
        ),
        "train the reward model with TRL, and give GRPOTrainer its folder as reward_funcs": (
            "RewardTrainer RewardConfig"
        ),
        "use PretrainTrainer and PretrainConfig for text, or SFTTrainer and SFTConfig for answers": (
            "Trainer TrainingArguments Seq2SeqTrainer Seq2SeqTrainingArguments"
        ),
        "use unmask.load": "AutoModel AutoModelForCausalLM AutoModelForMaskedLM ModelConfig",
        "import it from peft": "LoraConfig PeftConfig PeftModel get_peft_model",
    }
)
"""What does here what classes of TRL, transformers and PEFT do elsewhere, by their names."""


METHODS_ELSEWHERE = {
    "compute_loss": "loss_on",
    "micro_loss": "loss_on",
    **_by_name(
        {
            "loss_on": (
                "_compute_loss _get_per_token_logps_and_entropies concatenated_forward dpo_loss kto_loss "
                "get_batch_loss_metrics"
            ),
            "make_rows": "_prepare_dataset tokenize_row",
            "generate_and_score": "_generate_and_score_completions _calculate_rewards",
            "sample": "_generate _generate_single_turn",
        }
    ),
}
"""Methods that subclasses of transformers' and TRL's trainers override, and those that are called in their
place here, where a trainer has these."""


def remedy_of_class(name: str, trainers: Iterable[str]) -> str | None:
    """What to do about a name that only another library has; None: no library is known to have it.
    `trainers`: the names of those that are here."""
    if name.endswith(("Trainer", "Config")):
        return CLASSES_ELSEWHERE.get(name, f"it is not built here; there are {', '.join(trainers)}")
    return CLASSES_ELSEWHERE.get(name)


VALUES_ELSEWHERE: dict[str, dict[str | None, dict[str, Any] | str]] = {
    "loss_type": {
        "bnpo": {"loss_type": "dapo"},
        "luspo": {"loss_type": "sum"},
        "chunked_nll": {"loss_type": "nll"},
        "sigmoid_norm": {"loss_type": "sigmoid", "length_normalization": True},
        **dict.fromkeys(
            (
                *("dft", "cispo", "sapo", "vespo", "exo_pair", "nca_pair", "robust", "sppo_hard", "aot"),
                *("aot_unpaired", "apo_zero", "apo_down", "discopop", "apo_zero_unpaired"),
            ),
            "a loss that is not built here",
        ),
    },
    "scale_rewards": {"batch": "rewards are scaled within their group or not at all"},
    "max_length": {None: "set the number of tokens of the longest row"},
    "max_completion_length": {None: "set the number of tokens of the canvas, all of which a rollout fills"},
}
"""Values of TRL that settings of the same name do not have here: the settings that do the same, or what else
to know of each."""


def remedy_of_value(name: str, value: Any, known: Sequence[str] = (), *, of_list: bool = False) -> str:
    """What to do about a value that a setting does not have.

    Args:
        known: the words that it has.
        of_list: whether the value is one of several, for which other settings could not do the same.
    """
    found = VALUES_ELSEWHERE.get(name, {}).get(value)
    if isinstance(found, dict) and found[name] in known and not (of_list and len(found) > 1):
        return f"Set {' and '.join(f'{key} to {other}' for key, other in found.items())}"
    words = f"se one of {', '.join(known)}"
    if isinstance(found, str):
        return found[0].upper() + found[1:] + (f": u{words}" if known else "")
    return f"U{words}"


def remedy_of_trainers(name: str) -> str | None:
    """What to do about a setting that only other trainers have; None: no trainer is known to have it."""
    if name in INSTEAD:
        return INSTEAD[name][0].upper() + INSTEAD[name][1:]
    return f"Leave it out: {NOT_NEEDED[name]}" if name in NOT_NEEDED else None
