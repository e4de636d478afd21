"""Which settings may change when a run is resumed: the fields of `transformers.TrainingArguments`, by what a
change does. Settings of Unmask's own declare it (`on_resume=`). `record.py` compares, and refuses a change
that makes another run."""

from __future__ import annotations

from unmask.config.base import OnResume

ACTS = {
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "max_steps",
    "num_train_epochs",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "bf16",
    "fp16",
    "tf32",  # precision: lowered or raised to save a run
    "logging_strategy",
    "logging_steps",
    "logging_first_step",
    "eval_strategy",
    "eval_steps",
    "eval_delay",
    "eval_on_start",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "save_only_model",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "ignore_data_skip",
}
"""These take effect from the step of the checkpoint on."""
NEUTRAL = {
    # How a step is computed.
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
    "use_liger_kernel",
    "liger_kernel_config",
    "use_cache",
    "torch_empty_cache_steps",
    "average_tokens_across_devices",
    "full_determinism",
    "use_cpu",
    "parallelism_config",
    "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers",
    "ddp_static_graph",
    "ddp_backend",
    "ddp_timeout",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context",
    # What is shown, and where.
    "logging_nan_inf_filter",
    "log_on_each_node",
    "include_num_input_tokens_seen",
    "report_to",
    "run_name",
    "project",
    "trackio_space_id",
    "trackio_bucket_id",
    "trackio_static_space_id",
    "debug",
    "skip_memory_metrics",
    # How an evaluation is computed.
    "per_device_eval_batch_size",
    "prediction_loss_only",
    "eval_do_concat_batches",
    "eval_use_gather_object",
    "eval_accumulation_steps",
    "include_for_metrics",
    "batch_eval_metrics",
    "bf16_full_eval",
    "fp16_full_eval",
    # Where copies go.
    "save_on_each_node",
    "enable_jit_checkpoint",
    "push_to_hub",
    "hub_private_repo",
    "hub_model_id",
    "hub_strategy",
    "hub_always_push",
    "hub_revision",
    # Of the launch, or without use here.
    "restore_callback_states_from_checkpoint",
    "do_train",
    "do_eval",
    "do_predict",
    "remove_unused_columns",
    "label_names",
}
"""These change nothing that is trained. All others make another run, also those that a later version of
transformers adds."""


def stock_kind(name: str) -> OnResume:
    """What changing a field does to a run that is resumed."""
    return OnResume.ACTS if name in ACTS else OnResume.NEUTRAL if name in NEUTRAL else OnResume.OTHER
