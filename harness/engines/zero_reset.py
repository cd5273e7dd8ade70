"""Puts DeepSpeed back to idle after a forward or backward that did not finish: it has no public way to.

Works on the private state of DeepSpeed 0.19's optimizers, what `engine.optimizer` is under ZeRO 1, 2 and 3.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer


def reset(engine: Any) -> None:
    """As if the step had never begun. Call on all ranks, with the exception of the failure already dropped.

    `engine` is DeepSpeed's. Optimizer state that is offloaded to a disk can not be put back: gradients swapped out stay there.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        _reset_stage3(engine, optimizer)
    elif not isinstance(optimizer, BF16_Optimizer):  # stage 1 with sums in float32: `zero_grad` is all that it needs
        _reset_stage12(optimizer)
    _leave_backward(optimizer)
    for parameter in engine.module.parameters():
        parameter.grad = None
    optimizer.zero_grad(set_to_none=True)


def _leave_backward(optimizer: Any) -> None:
    """A backward that raised is still counted as running, and gradients that a forward computes would be taken for one of its phases."""
    while optimizer._backward_hook_state.backward_active_depth:
        optimizer.exit_backward()
    optimizer.clear_backward_seen_flag()


def _reset_stage3(engine: Any, optimizer: Any) -> None:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    coordinator = optimizer.parameter_offload.get_param_coordinator()
    _drop_gathers(engine.module)
    coordinator.release_backward_leftovers()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    for parameter in engine.module.parameters():
        if parameter.ds_status == ZeroParamStatus.INFLIGHT:  # marked, but its gather never began
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    engine.empty_partition_cache()
    coordinator._PartitionedParameterCoordinator__n_available_params = 0  # it counts gathers that never came to their end, too
    for bucket in optimizer.ipg_buckets.values():
        bucket.params.clear()
        bucket.elements = 0
    if optimizer.offload_optimizer:
        optimizer.norm_for_param_grads = {}
        optimizer._offload_boundary_param_ids.clear()
    optimizer.averaged_gradients = {}


def _drop_gathers(module: Any) -> None:
    """Ends what is still being gathered, without its weights.

    DeepSpeed's own way is to wait for each gather, and that copies weights out of its buffer: where memory ran out in such a copy, half
    of the buffer's weights are marked as there, which the next wait takes for an error; and it would run out again.
    """
    registry = getattr(module, "ds_inflight_param_registry", None)
    if registry is None:
        return
    for handle in {id(handle): handle for handle in registry.values()}.values():
        for each in getattr(handle, "handles", [handle]):
            work = getattr(each, "allgather_handle", None) or getattr(each, "_AllGatherHandle__handle", None)
            if work is not None:
                work.wait()
                each.complete = each._AllGatherHandle__complete = True
    registry.clear()


def _reset_stage12(optimizer: Any) -> None:
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
        bucket.index = 0
    optimizer.extra_large_param_to_reduce.clear()  # one larger than the bucket, waiting for its reduction
    optimizer._clear_previous_reduced_grads()
    optimizer.reset_partition_gradient_structures()
    for index in range(len(optimizer.params_already_reduced)):
        optimizer.params_already_reduced[index] = False
    optimizer.all_grad_tensors = {}  # sums over the micro-batches that were done
    optimizer.averaged_gradients = {}
    # The second and later backwards of a step add to gradients in host memory. They are told from the first by a count that only goes up
    # where the backward before came to its end and gave its buffers back: without that, all but the last micro-batch's would be lost.
    optimizer._release_ipg_buffers()
    optimizer.micro_step_id = -1
    if optimizer.cpu_offload:
        optimizer.accumulated_grads_in_cpu = {}
        optimizer._offload_accumulated_param_ids = set()
        optimizer.norm_for_param_grads = {}
        optimizer.local_overflow = False
