"""Every key of DeepSpeed's configuration: who reads it here, why it has no meaning here, or why it is refused."""

from __future__ import annotations

from collections.abc import Mapping

Table = Mapping[str, "str | Table | None"]

_UNITS = "parameters move in units found from the model, with buffers of their own sizes"
_OVERLAP = "communication is always overlapped"
_ORDER = "reductions are partitioned and contiguous by design"
_AUTO = "what stays gathered depends on the room on the device"
_DISK = "the disk engine measures what suits the disk"
_PIN = "host buffers are always pinned for a GPU"
_LOGS = "the script logs its own metrics; unbounded.trace(path) records a step"
_ANY = "every optimizer that can be sharded exactly is allowed, and others are refused"
_EXACT = "weights and gradients are sent as they are, so results are those of full precision"

_LAYERS = "which layers are cut is read from the model, or from styles in the plan of unbounded.shard"
_ALL_RANKS = "weights are partitioned over all ranks of the job"

READ = ""
"""Marks a key that is honoured."""

_OFFLOAD: Table = {
    "device": READ,
    "nvme_path": READ,
    "pin_memory": _PIN,
    "buffer_count": _UNITS,
    "buffer_size": _UNITS,
    "max_in_cpu": "host_bytes of the plan bounds what the host holds",
    "fast_init": "states are written once, as they are made",
    "pipeline": _OVERLAP,
    "pipeline_read": _OVERLAP,
    "pipeline_write": _OVERLAP,
    "ratio": "which updates run on the GPU is decided by speed",
    "super_offload": _AUTO,
    "cpuadam_cores_perc": "host_threads of the plan says how many threads compute",
}
_AIO: Table = dict.fromkeys(
    ("block_size", "queue_depth", "thread_count", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"),
    _DISK,
)

KEYS: Table = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), READ),
    **dict.fromkeys(("gradient_clipping", "steps_per_print", "train_micro_batch_size_per_gpu"), READ),
    "fp16": {
        **dict.fromkeys(("enabled", "loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis"), READ),
        "min_loss_scale": READ,
        "auto_cast": "the model's inputs are always cast to its precision",
        "consecutive_hysteresis": "overflows count until the scale has grown again, which is also DeepSpeed's default",
        "fp16_master_weights_and_grads": "masters are completed by 16 bits instead of being kept twice",
    },
    "bf16": {
        "enabled": READ,
        "immediate_grad_update": _OVERLAP,
        "check_grad_overflow": READ,
        "bf16_master_weights_and_grads": "masters are completed by 16 bits instead of being kept twice",
        "bf16_optimizer_states": 'optimizer_format="compact" of the plan keeps states in 8 bits',
    },
    "bfloat16": {"enabled": READ},
    "optimizer": {"type": READ, "params": None, "legacy_fusion": "updates are fused"},
    "scheduler": {"type": READ, "params": None},
    "zero_optimization": {
        "stage": READ,
        "offload_optimizer": _OFFLOAD,
        "offload_param": _OFFLOAD,
        **dict.fromkeys(("cpu_offload", "cpu_offload_params", "cpu_offload_param"), READ),
        "cpu_offload_use_pin_memory": _PIN,
        **dict.fromkeys(("allgather_bucket_size", "reduce_bucket_size", "sub_group_size"), _UNITS),
        **dict.fromkeys(("stage3_prefetch_bucket_size", "prefetch_bucket_size"), _UNITS),
        **dict.fromkeys(("stage3_param_persistence_threshold", "param_persistence_threshold"), _AUTO),
        **dict.fromkeys(("stage3_model_persistence_threshold", "model_persistence_threshold"), _AUTO),
        **dict.fromkeys(("stage3_max_live_parameters", "max_live_parameters"), _AUTO),
        **dict.fromkeys(("stage3_max_reuse_distance", "max_reuse_distance"), _AUTO),
        **dict.fromkeys(
            ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
            "saving whole weights always works",
        ),
        "gather_16bit_weights_on_model_save": "saving whole weights always works",
        "stage3_use_all_reduce_for_fetch_params": _ORDER,
        "stage3_module_granularity_threshold": _UNITS,
        **dict.fromkeys(("allgather_partitions", "reduce_scatter", "contiguous_gradients"), _ORDER),
        **dict.fromkeys(("round_robin_gradients", "use_multi_rank_bucket_allreduce", "allgather_sequential"), _ORDER),
        "overlap_comm": _OVERLAP,
        "load_from_fp32_weights": "masters are saved and loaded with the weights",
        "elastic_checkpoint": "checkpoints load under any number of ranks",
        "ignore_unused_parameters": "unused parameters get no gradient, as in PyTorch",
        "legacy_stage1": _ORDER,
        "param_secondary_partition": _EXACT,
        "override_module_apply": "nothing is patched",
        "memory_efficient_linear": "nothing is patched",
        "use_all_reduce_for_fetch_params": _ORDER,
        "zero_hpz_partition_size": _ALL_RANKS,
        **dict.fromkeys(("zero_quantized_weights", "zero_quantized_nontrainable_weights"), _EXACT),
        "zero_quantized_gradients": _EXACT,
        **dict.fromkeys(
            ("mics_shard_size", "mics_hierarchical_params_gather"), "weights are partitioned over all ranks"
        ),
        "pipeline_loading_checkpoint": _OVERLAP,
        "log_trace_cache_warnings": _LOGS,
        "enable_sanity_checks": "checks are always on",
        "leaf_module": _UNITS,
        "aio": _AIO,
    },
    "tensor_parallel": {
        "autotp_size": READ,
        "dtype": "the model's precision is that of bf16 or fp16",
        "tp_overlap_comm": _OVERLAP,
        **dict.fromkeys(("preset_model", "use_default_specs", "partition_config"), _LAYERS),
    },
    "zero_allow_untested_optimizer": _ANY,
    "zero_force_ds_cpu_optimizer": _ANY,
    "wall_clock_breakdown": _LOGS,
    "dump_state": _LOGS,
    "memory_breakdown": _LOGS,
    "communication_data_type": "gradients are reduced in their own dtype and added up in accumulate_dtype",
    "seq_parallel_communication_data_type": "gradients are reduced in their own dtype",
    "data_types": {"grad_accum_dtype": READ},
    "aio": _AIO,
    "prescale_gradients": "gradients are averaged as they are reduced",
    "gradient_predivide_factor": "gradients are averaged as they are reduced",
    "disable_allgather": _ORDER,
    "activation_checkpointing": {
        "partition_activations": "there is no model parallelism to partition them over",
        "cpu_checkpointing": READ,
        **dict.fromkeys(
            ("contiguous_memory_optimization", "number_checkpoints", "synchronize_checkpoint_boundary", "profile"),
            "recomputation needs no buffers of its own",
        ),
    },
    "checkpoint": {
        "load_universal": "every checkpoint loads under any number of ranks",
        **dict.fromkeys(
            ("tag_validation", "parallel_write", "use_node_local_storage", "writer"), "saves are collective"
        ),
        "decoupled": "unbounded.save(wait=False) writes in the background",
    },
    **dict.fromkeys(("flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet"), _LOGS),
    "timers": _LOGS,
    "nebula": "checkpoints are folders",
    "autotuning": "the plan decides placements automatically",
    **dict.fromkeys(("compile", "graph_harvesting"), "give the plan compile=True"),
    "use_data_before_expert_parallel_": "there are no expert-parallel groups",
    "dataloader_drop_last": READ,
    "zero_optimization_stage": "give zero_optimization.stage",
    "local_rank": "the launcher's environment says it",
}

CHANGES_TRAINING: Mapping[str, str] = {
    "amp": "Use bf16.enabled or fp16.enabled.",
    "torch_autocast": "Use bf16.enabled or fp16.enabled.",
    "sparse_gradients": "Make embeddings with sparse=False.",
    "sparse_attention": "Use the model's own attention.",
    "compression_training": "Train without compression.",
    "quantize_training": "Train without quantization.",
    "progressive_layer_drop": "Drop layers in the model.",
    "curriculum_learning": "Order the data in the loader.",
    "data_efficiency": "Order the data in the loader.",
    "eigenvalue": "Leave it out.",
    "elasticity": "Choose the batch sizes; checkpoints load under any number of ranks.",
    "hybrid_engine": "Call model.generate(); weights stay gathered across a generation.",
    "pipeline": "Leave it out.",
    "sequence_parallel_size": "Leave it out.",
}
"""Keys that are refused if they are switched on, because ignoring them would change the results."""
