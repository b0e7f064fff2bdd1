"""Options that `train` had once, and those of other trainers: what to write instead. Imports nothing heavy.

Options that are gone stand in command lines, in files of settings and in the config.toml of older runs. Written with the
value that every run has now, such an option is accepted. One that changes nothing of what is learned is accepted with any
other value too, and a line says that it has no effect. Any other value is refused with the sentence of its row.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plumbob.console import UserError
from plumbob.trainer.config.text_table import table_rows

TABLE = """
  eval_on_start | true any | held-out tasks are evaluated before the first step; --eval-examples 0: never
  report | true any | every run writes report.html at its end
  pass_threshold | 1 any | a rollout with a reward of 1 passes; `evaluate` has --pass-threshold, for other ones
  vllm_folder | any | adapters for vLLM servers on other machines are written to the run directory, so give an
      --output-dir that the machines share
  eval_accumulation_steps | any | evaluation keeps no tensors on the device
  log_on_each_node | false any | only rank 0 logs
  n_env_jobs | any | rollouts run asynchronously in the training process; --max-concurrent bounds their number
  few_shot_prob | any | no environment of plumbob puts solved examples into its prompts
  logging_steps | 1 any | each step has a row in the progress table
  per_device_eval_batch_size | any | --max-concurrent bounds the rollouts of evaluations too
  save_only_model | false any | checkpoints hold the optimizer's state, so that a run can be resumed
  data_parallel_size | any | `accelerate launch --num-processes` says how many processes train, and `vf-vllm
      --data-parallel-size` how many copies of the model sample
  max_skipped_steps | 3 any | a run ends after 3 optimizer steps in a row without a finite gradient
  ref_model_mixup_alpha | 1 any | the reference policy stays the initial policy
  ref_model_sync_steps | 0 | the reference policy stays the initial policy; to move it, start a new run from the trained
      model (--model)
  task_pools | false | --zero-signal refill samples further tasks for groups without a signal
  max_refills | 3 | --zero-signal refill samples at most 3 further rounds in a step
  overlong_penalty | 1 | --overlong penalise subtracts 1 from the reward
  multi_objective_aggregation | sum_then_normalize | rewards are summed by their weights and then normalised; give
      weights with --trained-reward
  random_rewards | false | --trained-reward random draws rewards by lot
  threads | 0 any | the variable OMP_NUM_THREADS sets the number of CPU threads; a tiny model has one
  keep_traces | auto any | a run stores all its rollouts, or as many groups of each step as fit into 10 GB together
  kl_placement | loss | the KL penalty is in the loss, where --kl-estimator k2 has the KL divergence's own gradient
  delta | - | --loss-type cispo bounds the ratio of every token
  importance_cap | 1.05 2 | weights of tokens are cut to 2 (token_truncate), and rows beyond 1.05 are left out
      (sequence_mask)
  stop_when_flat | any | a run takes all its steps, and --keep-best keeps the best checkpoint
  max_tool_seconds | 120 any | a tool call may take a fifth of --max-seconds
  parity_limit | any | a run stops if engine and trainer differ by more than 0.001 nats on average, or 0.25 with --bf16
  vllm_sync | any | a server says how it takes weights, which --sync of `vf-vllm` sets
  vllm_gpus | - | start a server on these GPUs, `CUDA_VISIBLE_DEVICES=1,2 vf-vllm --model MODEL`, and give its --vllm-url
  scale_epsilon | 0.0001 | the standard deviation by which --scale-rewards divides has 0.0001 added
  keep_control_tokens | false | a control token that a message spells stays text
  explain_unread_calls | true | the model is told the form of a call that could not be read, at most twice in a rollout
"""
"""Of each option the name with underscores; the values that mean what every run does now, and `any` if its value changes
nothing of what is learned; and what every run does now, or what to write instead, as the end of a sentence."""


OTHERS = """
TRL and its Trainer
  use_vllm | --engine vllm
  vllm_mode | --engine vllm; with --vllm-url the server is one that you started, without it the run starts one
  vllm_server_host vllm_server_port | --vllm-url http://HOST:PORT
  vllm_max_model_length vllm_max_model_len max_model_len | --max-context
  vllm_tensor_parallel_size tensor_parallel_size | `vf-vllm --tensor-parallel-size N`, and --vllm-url
  steps_per_generation | --num-minibatches, in optimizer steps
  generation_batch_size | --batch-size x --gradient-accumulation-steps x processes
  num_generations_eval | --eval-rollouts
  load_best_model_at_end metric_for_best_model | --keep-best eval/greedy
  mask_truncated_completions | --overlong mask
  sync_ref_model | a new run from the trained model (--model): the reference policy stays the initial one
  use_bias_correction_kl | --kl-estimator
  importance_sampling_level | --loss-type gspo for the sequence
  vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max | --importance-correction
  max_tool_calling_iterations | --max-turns
  reward_funcs reward_func reward_model_path | the rewards of the environment; --trained-reward weighs them, or takes
      FILE.py:FUNCTION; `hub new` makes an environment
  optim adam_epsilon optim_args | nothing: the optimizer is AdamW with epsilon 1e-8
  fp16 | --bf16, or float32 without it
  load_in_4bit load_in_8bit | nothing: base models are not quantised
  deepspeed fsdp fsdp_config | `accelerate launch --config-file configs/zero3.yaml -m plumbob.trainer ENV ...`
  dataset_config dataset_split dataset_train_split | --datasets NAME,CONFIG,SPLIT
  eval_strategy | --eval-steps
  save_strategy | --save-steps
  data_seed full_determinism | --seed
  shuffle_dataset | --task-order
  chat_template_kwargs | --chat-template KEY=VALUE
  num_completions_to_print | --log-completions
  parallelism_config accelerator_config | `accelerate launch --config-file configs/zero3.yaml -m plumbob.trainer ENV ...`
  model_init_kwargs trust_remote_code repetition_penalty generation_kwargs cache_implementation
      use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
      pad_to_multiple_of vllm_server_timeout vllm_group_port vllm_model_impl vllm_structured_outputs_regex
      vllm_importance_sampling_cap vllm_importance_sampling_clip_min off_policy_mask_threshold optim_target_modules
      lr_scheduler_kwargs top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max
      entropy_coef_delta entropy_target sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos
      vespo_k_neg vespo_lambda_neg disable_dropout gradient_checkpointing_kwargs torch_compile torch_compile_backend
      torch_compile_mode use_liger_kernel liger_kernel_config auto_find_batch_size log_unique_prompts
      log_completions_hub_repo log_multimodal tf32 cast_lm_head_to_fp32 router_aux_loss_coef ds3_gather_for_generation |
      nothing: what takes its place is in docs/guides/coming_from.md
accelerate and torchrun
  num_processes num_machines nproc_per_node nnodes machine_rank config_file | `accelerate launch --num-processes N
      -m plumbob.trainer ENV ...`, where it stands before -m
  gpu_ids gpus cuda_visible_devices | the variable CUDA_VISIBLE_DEVICES, of `train` or of `vf-vllm`
  mixed_precision | --bf16
verifiers
  rollouts_per_example | --num-generations
  micro_batch_size micro_batch_size_per_gpu ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu |
      --microbatch-tokens, in tokens
  max_seq_len max_seq_length max_response_length | --max-context for a whole rollout, --max-tokens for a turn
  env_kwargs | -a NAME=VALUE, or --NAME VALUE
  inference_gpu_ids | the variable CUDA_VISIBLE_DEVICES of `vf-vllm`, and --vllm-url
verl, OpenRLHF and slime
  rollout_n n_samples_per_prompt group_size | --num-generations
  train_batch_size rollout_batch_size global_batch_size | --batch-size, in rollouts
  ppo_mini_batch_size | --num-minibatches, their number
  ppo_epochs | --num-iterations
  clip_ratio clip_eps eps_clip cliprange | --epsilon
  clip_ratio_high clip_ratio_low eps_clip_high | --epsilon and --epsilon-high
  kl_coef kl_loss_coef init_kl_coef | --kl-beta
  kl_loss_type | --kl-estimator
  adv_estimator advantage_estimator | --baseline and --scale-rewards
  total_epochs total_training_steps | --num-epochs or --max-steps
  gpu_memory_utilization | --engine-memory
  test_freq eval_interval | --eval-steps
  save_freq save_interval | --save-steps
  logger use_wandb wandb_project | --report-to wandb; the project is the variable WANDB_PROJECT
  nproc n_gpus_per_node | `accelerate launch --num-processes N -m plumbob.trainer ENV ...`
  enable_gradient_checkpointing | --gradient-checkpointing
  critic value_model vf_coef | nothing: GRPO has no value model
"""
"""Names that other trainers have for what is here under another one: what to write instead."""


@dataclass(frozen=True)
class Removed:
    """An option that is gone."""

    name: str
    values: str
    say: str


REMOVED = {row[0]: Removed(*row) for row in table_rows(TABLE)}

INSTEAD = {name: say for names, say in table_rows(OTHERS) for name in names.split()}
"""Name of another trainer's option, with underscores -> what to write here."""

REMOVED_VALUES = {
    ("kl_estimator", value): "write k2, which has the KL divergence's own gradient in the loss"
    for value in ("reward", "k1")
}
"""(setting, a value that it does not take any more) -> what to do, as the end of a sentence."""

SWITCHES = frozenset(name for name, row in REMOVED.items() if {"true", "false"} & set(row.values.split()))
"""Names in REMOVED whose options need no value."""


def is_switch(name: str) -> bool:
    """Whether `name`, with underscores, is an option that is gone and needed no value. Example: "no_task_pools"."""
    return name in SWITCHES or name.removeprefix("no_") in SWITCHES


def accept_removed(written: str, value: Any, shown: str) -> bool:
    """Whether `written` is an option that is gone; then it is accepted, with a line on stderr if it has no effect.

    `value`: from a file, or the text of the command line, or None without a value. `shown`: how messages name it.
    Raises UserError if its value is not what every run does now.
    """
    name = written.replace("-", "_")
    bare: Any = True
    if name not in REMOVED and name.removeprefix("no_") in SWITCHES:
        name, bare = name.removeprefix("no_"), False
    if name not in REMOVED:
        return False
    option, accepted = REMOVED[name], REMOVED[name].values.split()
    if _same_text(bare if value is None else value) in accepted:
        return True
    if "any" not in accepted:
        raise UserError(f"{shown} is gone, so leave it out: {option.say}")
    print(f"{shown} has no effect: {option.say}", file=sys.stderr)
    return True


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a file without those that are gone, whatever their values: for reading what an older run has done."""
    return {key: value for key, value in values.items() if key.replace("-", "_") not in REMOVED}


def under_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an older run's file that decided what was learned and have another name now."""
    return {"trained_reward": "random"} if values.get("random_rewards") else {}


def _same_text(value: Any) -> str:
    """A value of a file or of the command line as TABLE writes it. Example: `_same_text("1.0") == _same_text(1) == "1"`."""
    try:
        return str(value).lower() if isinstance(value, bool) else f"{float(value):g}"
    except (TypeError, ValueError):
        return str(value).lower()
