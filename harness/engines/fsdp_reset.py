"""Puts FSDP2 back to idle after a forward or backward that did not finish, for torch before 2.13, which has no public way to.

Works on torch's private state (2.11 and 2.12); newer versions have `FSDPModule.reset_iter_state`.
"""

from __future__ import annotations

from typing import Any

import torch


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _reset_group(group: Any) -> None:
    """Drops what one group of parameters holds of the failed iteration, and reshards it."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    result = group._all_gather_result
    if result is not None:
        # A prefetched gather that nobody waited for: its buffers are freed only after it is done.
        if result.all_gather_work is not None:
            result.all_gather_work.wait()
        group._all_gather_result = None
    group._post_reduce_event = None
    group._reshard_after_forward_event = None
    group._partial_reduce_output = None
    for parameter in group.fsdp_params:
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
    group._training_state = TrainingState.FORWARD
    group._to_sharded()
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE


def reset(model: Any) -> None:
    """As if the iteration had never begun. Call on all ranks, with the exception of the failure already dropped."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    root = model._get_fsdp_state()
    context, communication = root._state_ctx, root._comm_ctx
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for state in context.all_states:
        for group in _groups(state):
            _reset_group(group)
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    context.is_last_backward = True
    communication.all_gather_state = None
    communication.post_forward_order.clear()
    if hasattr(communication, "reduce_scatter_states"):
        communication.reduce_scatter_states.clear()
    else:
        communication.reduce_scatter_state = None
