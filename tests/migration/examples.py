"""Configurations from documents and repositories of other projects, and what they must be migrated to."""

from __future__ import annotations

from typing import Any, NamedTuple


class Example(NamedTuple):
    verb: str
    files: dict[str, str]
    """Texts by file name, in the order in which they are given."""
    settings: dict[str, Any]
    """Some of ours, by dotted key."""
    dropped: tuple[str, ...] = ()
    """Some old keys without counterpart."""


D1_YAML = """
use_peft: true
torch_dtype: bfloat16
load_in_4bit: true
model_path: my-llada
attn_implementation: flash_attention_2
lora_r: 128
lora_alpha: 64
peft_task_type: CAUSAL_LM
dataset: gsm8k
bf16: true
sync_ref_model: True
ref_model_sync_steps: 64
adam_beta2: 0.99
use_vllm: false
warmup_ratio: 0.0001
lr_scheduler_type: constant_with_warmup
num_generations: 6
per_device_train_batch_size: 6
gradient_checkpointing: false
resume_from_checkpoint: false
output_dir: checkpoints/one
save_strategy: steps
max_prompt_length: 200
block_length: 32
diffusion_steps: 128
generation_batch_size: 6
remasking: low_confidence
random_masking: True
p_mask_prompt: 0.15
beta: 0.04
epsilon: 0.5
num_iterations: 12
"""
D1_SCRIPT = """#!/bin/bash
#SBATCH --nodes=1
export LOGDIR=checkpoints/slurm/${SLURM_JOB_ID}
DATASET="sudoku"
RUN_NAME=${DATASET}_bs12
srun --output ${LOGDIR}/out_%j.txt \\
    accelerate launch \\
        --config_file ./accelerate.yaml \\
        --main_process_port 12346 ../diffu_grpo_train.py \\
        --config ./train.yaml \\
        --num_iterations 8 \\
        --dataset $DATASET \\
        --run_name $RUN_NAME \\
        --output_dir checkpoints/$RUN_NAME
        --temperature 0.3
"""
IMPROVED = """
{"model_path": "llada", "dataset": "math", "num_iterations": 2, "num_generations": 4, "random_masking": true,
 "optimization": {"enable_mixed_precision": true, "enable_gradient_checkpointing": true, "generation_batch_size": 8,
                  "per_device_train_batch_size": 4, "cache_size": 1000},
 "masking": {"strategy_type": "adaptive", "p_mask_prompt": 0.3, "initial_p_mask": 0.2, "final_p_mask": 0.8},
 "generation": {"steps": 64, "gen_length": 256, "block_length": 64, "temperature": 0.0, "remasking": "low_confidence"},
 "loss": {"epsilon": 0.2, "beta": 0.04, "adaptive_loss": true, "initial_beta": null},
 "reward": {"reward_weights": [1.0], "use_new_rewards": true},
 "enable_performance_logging": true, "performance_log_interval": 100, "log_memory_usage": true}
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
downcast_bf16: 'no'
gpu_ids: all
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 3
"""
CONVERTER_MODEL = """
model_name: "microsoft/phi-2"
model_type: "phi"
hidden_size: 2560
num_timesteps: 1000
noise_schedule: "cosine"
use_bidirectional_attention: true
stage1_epochs: 2
stage2_epochs: 4
stage3_epochs: 2
use_gradient_checkpointing: true
use_lora: false
"""
CONVERTER_TRAINING = """
batch_size: 2
gradient_accumulation_steps: 16
learning_rate: 1e-4
use_8bit_adam: true
dataset_name: "wikitext"
dataset_config: wikitext-103-raw-v1
text_column: "content"
cache_dir: "./cache"
max_seq_length: 512
max_train_samples: 50000
use_wandb: true
save_steps: 2500
eval_steps: 1000
"""
CONVERTER_HARDWARE = """
device: "cuda:0"
max_memory_gb: 45
dtype: "bfloat16"
gradient_checkpointing: true
use_8bit_adam: true
compile_model: true
use_flash_attention: true
pin_memory: true
non_blocking: true
use_deepspeed: false
"""
DLLM_SFT = """
accelerate launch \\
    --config_file scripts/accelerate_configs/fsdp.yaml \\
    examples/llada/sft.py \\
    --model_name_or_path "my/LLaDA" --lora True --load_in_4bit True \\
    --dataset_args "tatsu-lab/alpaca[train:5_000,test:100]" \\
    --max_length 1024 \\
    --truncation filter \\
    --group_by_length True \\
    --learning_rate 2e-5 \\
    --output_dir "models/alpaca" 2>&1 | tee log.txt
"""

EXAMPLES = {
    "d1's YAML": Example(
        "grpo",
        {"train.yaml": D1_YAML},
        {
            "model.path": "my-llada", "model.dtype": "bfloat16", "model.quantization": "4bit", "lora.r": 128, "lora.alpha": 64,
            "lora.dropout": 0.05, "data.task": "gsm8k", "data.train": "openai/gsm8k:main", "data.style": "chat",
            "rewards": ["gsm8k/published"],
            "training.sync_ref_model": True, "training.ref_model_sync_steps": 64, "training.warmup_steps": 0.0001, "training.block_size": 32, "training.steps": 128,
            "training.rollout_batch_size": 6, "training.remasking": "low_confidence", "training.prompt_mask_rate": 0.15, "training.beta": 0.04,
            "training.epsilon": 0.5, "training.num_iterations": 12, "training.adam_beta2": 0.99, "training.flash_attention": True,
            "training.activation_checkpointing": False, "training.temperature": 0.9, "training.learning_rate": 1e-6,
        },
        ("use_vllm", "max_prompt_length", "random_masking", "resume_from_checkpoint"),
    ),
    "d1's script, and the YAML that it names": Example(
        "grpo",
        {"train.yaml": D1_YAML, "sudoku.sbatch": D1_SCRIPT},
        {"model.path": "my-llada", "data.task": "sudoku", "training.num_iterations": 8, "output_dir": "checkpoints/sudoku_bs12",
         "training.run_name": "sudoku_bs12", "training.temperature": 0.9, "training.epsilon": 0.5},
        ("--temperature", "--main_process_port", "--config_file"),
    ),
    "sections as JSON": Example(
        "grpo",
        {"config.json": IMPROVED},
        {"model.path": "llada", "data.task": "math500", "training.bf16": True, "training.activation_checkpointing": True,
         "training.rollout_batch_size": 8, "training.per_device_train_batch_size": 4, "training.masking": "adaptive",
         "training.mask_rate": [0.2, 0.8], "training.adaptive_loss": True, "training.max_completion_length": 256,
         "training.temperature": 0.9, "training.performance_log_interval": 100, "training.log_memory_usage": True},
        ("masking.p_mask_prompt", "generation.temperature", "optimization.cache_size", "reward.use_new_rewards"),
    ),
    "DIFFU_* variables and a script": Example(
        "grpo",
        {"run.env": "export DIFFU_MODEL_PATH=\"/path/to/model\"\nexport DIFFU_DATASET=gsm8k\nexport DIFFU_MIXED_PRECISION=true\n"
                    "export DIFFU_BATCH_SIZE=8\n./improved_run.sh sudoku balanced\n"},
        {"model.path": "/path/to/model", "data.task": "sudoku", "training.bf16": True, "training.per_device_train_batch_size": 8},
        ("mode",),
    ),
    "config.yaml of preferences and its flags": Example(
        "dpo",
        {"config.yaml": "model_name_or_path: GSAI-ML/LLaDA-1B-Base\npreference_data_path: data/prefs.jsonl\noutput_dir: out\n"
                        "learning_rate: 5.0e-6\nbeta: 0.1\ndiffusion_steps: 16\nuse_mixed_precision: bf16\ngradient_checkpointing: true\n"
                        "num_train_epochs: 1\n",
         "train.sh": "bash scripts/run_training.sh --learning_rate 1e-6 --gradient_accumulation_steps 32\n"},
        {"model.path": "GSAI-ML/LLaDA-1B-Base", "data.train": "data/prefs.jsonl", "output_dir": "out", "training.learning_rate": 1e-6,
         "training.beta": 0.1, "training.samples": 16, "training.bf16": True, "training.fp16": False,
         "training.activation_checkpointing": True, "training.gradient_accumulation_steps": 32},
    ),
    "config.yaml in full precision, with a thousand times": Example(
        "dpo",
        {"config.yaml": "preference_data_path: p.jsonl\nuse_mixed_precision: no\ndiffusion_steps: 1000\n"},
        {"training.bf16": False, "training.fp16": False, "training.samples": 8},
        ("diffusion_steps",),
    ),
    "model, training and hardware files": Example(
        "convert",
        {"model.yaml": CONVERTER_MODEL, "training.yaml": CONVERTER_TRAINING, "hardware.yaml": CONVERTER_HARDWARE},
        {
            "model.path": "microsoft/phi-2", "model.dtype": "float32", "model.device": "cuda:0",
            "data.train": "wikitext:wikitext-103-raw-v1",
            "data.text_column": "content", "data.max_rows": 50000, "training.max_length": 512, "training.num_train_epochs": 8,
            "training.schedule": "cosine", "training.num_timesteps": 1000, "training.time_embedding": True,
            "training.attention": "bidirectional", "training.optim": "adamw_bnb_8bit", "training.torch_compile": True,
            "training.bf16": True, "training.report_to": "wandb", "training.flash_attention": True,
            "training.activation_checkpointing": True,
            "training.per_device_train_batch_size": 2, "hardware.max_memory_gb": 45.0, "hardware.name": "cuda:0", "lora": None,
        },
        ("model_type", "hidden_size", "cache_dir", "non_blocking", "use_deepspeed"),
    ),
    "training file alone, short of memory": Example(
        "convert",
        {"t.yaml": "use_8bit_adam: true\ncpu_offload: true\nmax_memory_gb: 20\nbatch_size: 1\nstage1_epochs: 0\nstage2_epochs: 3\n"},
        {"training.optim": "paged_adamw_8bit", "training.num_train_epochs": 3, "training.per_device_train_batch_size": 1},
        ("max_memory_gb",),
    ),
    "GRPO_* variables and accelerate's YAML": Example(
        "grpo",
        {"run.env": "export GRPO_USE_VLLM=true\nexport VLLM_SERVER_HOST=localhost:8000  # server\nexport GRPO_USE_TORCH_COMPILE=true\n"
                    "GRPO_BATCH_SIZE=8\nGRPO_NUM_GENERATIONS=16\nGRPO_GRAD_ACCUM_STEPS=2\n"
                    "export GRPO_LEARNING_RATE=5e-6 GRPO_MAX_PROMPT=512\n",
         "accelerate_config.yaml": ACCELERATE},
        {"training.rollout.backend": "vllm", "training.rollout.url": "http://localhost:8000", "training.torch_compile": True,
         "training.per_device_train_batch_size": 8, "training.num_generations": 16, "training.gradient_accumulation_steps": 2,
         "training.learning_rate": 5e-6, "training.bf16": True, "training.fp16": False, "training.scale_rewards": "group",
         "lora.r": 32, "training.temperature": 0.7},
        ("num_processes", "distributed_type", "GRPO_MAX_PROMPT"),
    ),
    "accelerate's YAML alone": Example("sft", {"a.yaml": ACCELERATE}, {"training.bf16": True}, ("gpu_ids",)),
    "dLLM's SFT": Example(
        "sft",
        {"train.sh": DLLM_SFT},
        {"model.path": "my/LLaDA", "model.dtype": "bfloat16", "model.quantization": "4bit", "lora.r": 16, "data.train": "tatsu-lab/alpaca",
         "data.max_rows": 5000, "data.eval_rows": 100, "training.max_length": 1024, "training.bad_rows": "skip", "training.bf16": True,
         "training.train_sampling_strategy": "group_by_length", "training.num_train_epochs": 5, "training.warmup_steps": 0.1,
         "output_dir": "models/alpaca"},
        ("--config_file",),
    ),
    "dLLM's text, from a cluster": Example(
        "convert",
        {"train.sh": 'sbatch --nodes=2 --gres=gpu:8 scripts/train.slurm.sh --accelerate_config "fsdp" \\\n'
                     '  --script_path "examples/a2d/bd3lm/pt.py" \\\n'
                     '  --model_name_or_path "m" --dataset_args "Trelis/tiny-shakespeare" --text_field "Text" --insert_eos False \\\n'
                     '  --loss_weight_type uniform --max_steps 20 --output_dir "out"\n'},
        {"model.path": "m", "data.text_column": "Text", "training.attention": "block_causal", "training.block_size": 32,
         "training.max_steps": 20, "training.weighting": "uniform", "training.per_device_train_batch_size": 16},
        ("insert_eos", "--accelerate_config", "--nodes"),
    ),
    "dLLM's GRPO": Example(
        "grpo",
        {"train.sh": "accelerate launch --config_file z.yaml examples/rl/grpo/llada/train.py --model_name_or_path my/LLaDA \\\n"
                     " --load_in_4bit True --lora_r 128 --dataset code --steps 128 --block_size 32 --p_mask_prompt 0.15 --beta 0.04 \\\n"
                     " --sync_ref_model True --ref_model_sync_steps 64 --reward_weights 1 0.5 --output_dir out\n"},
        {"model.path": "my/LLaDA", "lora.r": 128, "lora.alpha": 32, "training.steps": 128, "training.block_size": 32,
         "training.sync_ref_model": True, "training.ref_model_sync_steps": 64, "training.scale_rewards": "none", "training.reward_weights": [1, 0.5]},
        ("dataset",),
    ),
    "d1's SFT": Example(
        "sft",
        {"sft.sh": "CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 2 sft_train.py --grad_accum_steps 2 --num_epochs 3 "
                   "--train_data simplescaling/s1K-1.1 --output_dir out"},
        {"data.train": "simplescaling/s1K-1.1", "training.gradient_accumulation_steps": 2, "training.num_train_epochs": 3,
         "lora.r": 128, "training.max_length": 4096, "training.truncation_mode": "keep_start", "model.path": "GSAI-ML/LLaDA-8B-Instruct"},
    ),
    "TRL's GRPO by a script": Example(
        "grpo",
        {"grpo.yaml": "num_generations: 4\nloss_type: dr_grpo\nscale_rewards: none\ndelta: 3.0\nuse_vllm: true\nvllm_mode: server\n"
                      "vllm_server_host: gpu7\nvllm_server_timeout: 60.0\nvllm_importance_sampling_correction: false\nbeta: 0.02\n",
         "grpo.sh": "trl grpo --config grpo.yaml --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name my/data --dataset_config en \\\n"
                    "  --dataset_test_split held --eval_strategy steps --reward_funcs accuracy_reward my_lib.rewards.short --use_peft \\\n"
                    "  --lora_target_modules q_proj v_proj --no_remove_unused_columns --top_p 0.9 --output_dir out\n"},
        {"model.path": "Qwen/Qwen2.5-0.5B", "data.train": "my/data:en", "rewards": ["trl.rewards:accuracy_reward", "my_lib.rewards:short"],
         "lora.target_modules": ["q_proj", "v_proj"], "training.num_generations": 4, "training.loss_type": "dr_grpo",
         "training.scale_rewards": "none", "training.delta": 3.0, "training.top_p": 0.9, "training.rollout.url": "http://gpu7:8000",
         "training.rollout.timeout": 60.0, "training.vllm_importance_sampling_cap": None, "training.use_bias_correction_kl": True, "training.epsilon": 0.2,
         "training.max_completion_length": 512, "training.eval_strategy": "steps"},
        ("remove_unused_columns",),
    ),
    "TRL's DPO": Example(
        "dpo",
        {"dpo.json": '{"model_name_or_path": "m", "dataset_name": "trl-lib/ultrafeedback_binarized", "loss_type": ["ipo"],'
                     ' "rpo_alpha": null, "sync_ref_model": false,'
                     ' "precompute_ref_log_probs": true, "max_length": 512, "f_divergence_type": "reverse_kl", "evaluation_strategy": "no",'
                     ' "model_init_kwargs": {"torch_dtype": "bfloat16", "attn_implementation": "sdpa"}, "output_dir": "out"}'},
        {"model.path": "m", "model.dtype": "bfloat16", "data.train": "trl-lib/ultrafeedback_binarized", "training.loss_type": "ipo",
         "training.length_normalization": None, "training.reference": "stored", "training.beta": 0.1, "training.learning_rate": 1e-6,
         "training.f_divergence_type": "reverse_kl", "training.truncation_mode": "keep_start"},
        ("sync_ref_model",),
    ),
    "TRL's DPO with several losses": Example(
        "dpo",
        {"dpo.yaml": "model_name_or_path: m\ndataset_name: d\nloss_type: [sigmoid, bco_pair, sft]\nloss_weights: [0.8, 0.2, 1.0]\n"
                     "sync_ref_model: true\nref_model_sync_steps: 64\nld_alpha: 0.5\noutput_dir: out\n"},
        {"training.loss_type": ["sigmoid", "bco_pair", "sft"], "training.loss_weights": [0.8, 0.2, 1.0],
         "training.reference": "frozen", "training.sync_ref_model": True, "training.ref_model_sync_steps": 64},
        ("ld_alpha",),
    ),
}  # fmt: skip
