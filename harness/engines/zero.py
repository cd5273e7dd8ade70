"""DeepSpeed ZeRO, stages 1 to 3, on the user's JSON."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.cpp_extension import JIT_EXTENSION_VERSIONER

from harness import zero_adam
from harness.batches import MicroBatch, StepBatch
from harness.blocks import Blocks, compile_backend
from harness.build_locks import LockedBuildError, clear_abandoned_locks, is_compiled, limit_waits
from harness.engines import zero_reset
from harness.engines.base import Build, micro_batch_loss, place_schedule, renew_rates, trained
from harness.host_copies import HostCopies
from harness.host_threads import ask_cpu_once, take_cores
from harness.ladder import MemorySettings
from harness.loss import install_loss
from harness.modeling import fill, layer_units, num_parameters
from harness.optim import build_optimizer, build_scheduler, parameter_groups
from harness.stored_state import AVERAGES, Kind, StoredState, whole

_TAG = "zero"
_COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "reduce",
    "all_to_all_single",
)

_OPERATORS = {
    "async_io": "access to NVMe",
    "cpu_adam": "CPU Adam",
    "deepspeed_shm_comm": "communication between CPU ranks",
    "fused_adam": "fused Adam",
}

# What another process may take to compile an operator that this one waits for.
LONGEST_COMPILATION_S = 900.0
# Of another process that takes the lock before this one does, and is ended too.
MOST_COMPILATIONS_WAITED_FOR = 3

log = logging.getLogger("harness")


def announce_compilations() -> None:
    """From here on the log says when DeepSpeed begins to compile an operator: it takes a minute in which nothing else is to be seen.

    And what another process should have compiled, and did not, is compiled here.
    """
    load = OpBuilder.jit_load
    if hasattr(load, "__wrapped__"):  # it says so already
        return

    @functools.wraps(load)
    def announced(builder: Any, verbose: bool = True) -> Any:
        if not is_compiled(builder.name, [Path(torch.__file__), Path(deepspeed.__file__)]):
            log.info("compiling DeepSpeed's %s, once on this machine: about a minute", _OPERATORS.get(builder.name, builder.name))
        for _ in range(MOST_COMPILATIONS_WAITED_FOR):
            try:
                return load(builder, verbose)
            except (ImportError, LockedBuildError) as error:  # the process that compiled it, for which this one waited, was ended or failed
                log.warning("DeepSpeed's %s did not come of another process's compilation (%s): compiling it here", builder.name, error)
                JIT_EXTENSION_VERSIONER.entries.pop(builder.name, None)  # else torch takes it for built
                clear_abandoned_locks()
        return load(builder, verbose)

    OpBuilder.jit_load = announced


def unname_shared_memory(rank: int) -> None:
    """Lets go of the name of the shared memory by which DeepSpeed's processes on CPUs talk, 66 MiB a rank; they go on talking.

    DeepSpeed never removes it (csrc/cpu/comm/shm.cpp), so that each job, however it ends, would cost the machine that memory for good.
    Without a name it goes with the processes that have it open. Call it on every rank when all have opened it.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    with contextlib.suppress(OSError):  # that operator is not on every machine
        os.unlink(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}")


class BackgroundCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's writer of checkpoint files, from host copies in a thread of its own, so that training goes on meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zero-checkpoint")
        self.pending: list[Future[None]] = []
        self.copies = HostCopies()

    def save(self, state_dict: Any, path: str) -> None:
        # By file name, which is the same at every save: its memory is used again. The save before has been waited for.
        self.pending.append(self.threads.submit(torch.save, self.copies.copy(Path(path).name, state_dict), path))

    def commit(self, info: Any) -> bool:
        return True

    def take_pending(self) -> Future[None]:
        """One future for everything submitted so far."""
        jobs, self.pending = self.pending, []

        def wait() -> None:
            for job in jobs:
                job.result()

        # The single thread runs this after the jobs before it.
        return self.threads.submit(wait)


class FilesInMemory(TorchCheckpointEngine):
    """DeepSpeed's checkpoint files as trees of tensors by name, instead of on a disk."""

    def __init__(self, files: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.files = {} if files is None else files

    def save(self, state_dict: Any, path: str) -> None:
        self.files[Path(path).name] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        # DeepSpeed keeps what it gets where it can, and would train in the very memory that the next life may have to read.
        return tree_map_only(Tensor, torch.clone, self.files[Path(path).name])

    def commit(self, info: Any) -> bool:
        return True


class ZeroEngine:
    """A DeepSpeed engine behind the trainer's interface. `ds_config` is the JSON with every "auto" filled."""

    in_process = frozenset({"micro_batch_size", "activation_checkpointing", "activation_offload"})

    def __init__(self, build: Build, ds_config: dict[str, Any]) -> None:
        self.build, self.settings, self.ds_config, self.lora = build, build.settings, ds_config, build.lora
        self.coordinator = build.coordinator
        self.device = build.coordinator.device
        self.stage = int(ds_config["zero_optimization"]["stage"])
        self.name = f"zero{self.stage}"
        train = build.args.train
        announce_compilations()
        if ds_config["zero_optimization"].get("offload_optimizer", {}).get("device", "none") != "none":
            take_cores(self.coordinator.num_local_processes)
            ask_cpu_once()
        if not deepspeed.comm.is_initialized():
            for lock in clear_abandoned_locks():  # DeepSpeed compiles operators from here on
                log.warning("removed %s: what compiled there was killed, and every run would have waited for it", lock)
            limit_waits(min(LONGEST_COMPILATION_S, self.coordinator.timeout_s))
            # Adopts the process group that is already there; another one would not see the same ranks at the same time.
            deepspeed.init_distributed(dist_backend="nccl" if self.device.type == "cuda" else "gloo", dist_init_required=False)
            if self.device.type == "cpu":
                self.coordinator.wait_for_everyone("shared memory")  # each has opened the others'
                unname_shared_memory(self.coordinator.process_index)
        self.module: Any = fill(build.empty_model, self.device, self._partition if self.stage == 3 else None, broadcast=self._broadcast)
        whole_blocks = self._gather_whole_blocks()
        self.blocks = Blocks(self.module, compile_backend(build.args.model, self.device) if whole_blocks else None)
        install_loss(self.module, build.settings.loss_chunk_size, compiled=self.blocks.is_compiled, share=build.share)
        self.blocks.set_checkpointing(build.settings.activation_checkpointing, build.settings.activation_offload)
        optimizer = None if "optimizer" in ds_config else self._build_optimizer()
        scheduler = None
        if "scheduler" not in ds_config:

            def scheduler(made: torch.optim.Optimizer) -> Any:
                return build_scheduler(made, train, build.total_steps)

        groups = None if optimizer is not None else parameter_groups(self.module.named_parameters(), self._weight_decay())
        self.engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
            model=self.module,
            config=ds_config,
            optimizer=optimizer,
            model_parameters=groups,
            lr_scheduler=scheduler,
            dist_init_required=False,
        )
        self.writer = BackgroundCheckpointEngine()
        self.engine.checkpoint_engine = self.writer
        self.engine._copy_recovery_script = lambda path: None  # `harness export` does its work
        self.num_bad_losses = 0
        self.bad_loss = False
        self.in_step = False
        zero = ds_config["zero_optimization"]
        devices = {zero.get(part, {}).get("device", "none") for part in ("offload_optimizer", "offload_param")}
        self.resettable = devices <= {"none", "cpu"}  # gradients that were swapped out to a disk stay there
        self.engine.train()
        assert self.engine.zero_optimization_stage() == self.stage, f"ZeRO-{self.stage} was asked for, DeepSpeed runs another stage"

    def _gather_whole_blocks(self) -> bool:
        """Stage 3: the weights of a block come and go together, with hooks around the block instead of around each of its modules.

        That is less for the host to do, and what compiling needs. Weights offloaded to the host or a disk come in small pieces instead.
        False where weights still come and go inside blocks.
        """
        if self.stage < 3:
            return True
        if "offload_param" in self.ds_config["zero_optimization"]:
            return False
        deepspeed.utils.set_z3_leaf_modules(self.module, list({type(unit) for _, unit in layer_units(self.module)}))
        if self.lora is not None:
            # Under a frozen embedding the first block's input needs no gradient, and the hook that frees the block's weights after its
            # backward would run before it.
            self.module.enable_input_require_grads()
        head = self.module.get_output_embeddings()
        if head is not None and not any(head is module for _, unit in layer_units(self.module) for module in unit.modules()):
            # The loss uses the head's weight in the model's forward. Told only when that happens, DeepSpeed's trace of the first step,
            # from which it fetches ahead, would not have it.
            for parameter in head.parameters(recurse=False):
                deepspeed.zero.register_external_parameter(self.module, parameter)
        return True

    def _weight_decay(self) -> float:
        decay = self.ds_config["optimizer"].get("params", {}).get("weight_decay", self.build.args.train.weight_decay)
        return float(decay)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        train = self.build.args.train
        groups = parameter_groups(self.module.named_parameters(), train.weight_decay)
        device = self.ds_config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
        if device != "none" and train.optim.startswith("adamw"):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            adam = {"lr": train.learning_rate, "betas": (train.adam_beta1, train.adam_beta2), "eps": train.adam_epsilon}
            return DeepSpeedCPUAdam(groups, adamw_mode=True, **adam)
        return build_optimizer(groups, train)

    def _partition(self, name: str, module: nn.Module) -> None:
        """Shards a filled block over the ranks at once, so that no rank ever holds the whole model."""
        deepspeed.zero.Init(module=module, config_dict_or_path=self.ds_config)

    def _broadcast(self, tensor: Tensor) -> None:
        if self.coordinator.num_processes > 1:
            torch.distributed.broadcast(tensor, src=0)

    def install_votes(self, check: Callable[[], None]) -> None:
        """Votes before each collective that DeepSpeed launches in a step; they all go through one object of its."""
        from deepspeed.comm import comm

        if self.coordinator.num_processes == 1:
            return
        self.build.vote_on_exchanges(check)
        for name in _COLLECTIVES:
            original = getattr(comm.cdb, name, None)
            if original is not None:
                setattr(comm.cdb, name, self._voted(original, check))

    @contextlib.contextmanager
    def _voting(self) -> Iterator[None]:
        """Collectives inside are voted on; those of updates, saves and exports are not."""
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    def _voted(self, original: Callable[..., Any], check: Callable[[], None]) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if self.in_step:
                check()
            return original(*args, **kwargs)

        return collective

    def forward_backward(self, batch: StepBatch, num_label_tokens: int) -> Tensor:
        total = torch.zeros((), device=self.device)
        # DeepSpeed averages gradients over ranks; the loss is a sum over all ranks' tokens.
        scale = self.coordinator.num_processes / max(num_label_tokens, 1)
        micros = self.build.micro_batches(batch, self.settings.micro_batch_size)
        with self._voting():
            for index, micro in enumerate(micros):
                self.engine.set_gradient_accumulation_boundary(index == len(micros) - 1)
                loss = micro_batch_loss(self.engine, micro, self.device)
                self.engine.backward(loss * scale, scale_wrt_gas=False)
                total += loss.detach()
        # DeepSpeed reads the device many times a step, so one more costs nothing.
        self.bad_loss = not math.isfinite(float(total))
        return total

    def step(self) -> Tensor:
        # float32 runs of DeepSpeed do not look for non-finite gradients themselves; fp16's loss scale does.
        bad = self.coordinator.max([float(self.bad_loss)], "loss is finite")[0] and not self.engine.fp16_enabled()
        if bad:
            self.reset_step()
            self.num_bad_losses += 1
            return torch.tensor(float("nan"))
        zero_adam.follow(self.engine.optimizer)
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return torch.as_tensor(float("nan") if norm is None else float(norm))

    def reset_step(self) -> None:
        zero_reset.reset(self.engine)

    @torch.no_grad()
    def eval_loss(self, micro: MicroBatch) -> Tensor:
        self.engine.eval()
        try:
            with self._voting():
                return micro_batch_loss(self.engine, micro, self.device)
        finally:
            self.engine.train()

    def learning_rate(self) -> float:
        return float(self.engine.get_lr()[0])

    def num_skipped_steps(self) -> int:
        return int(self.engine.skipped_steps) + self.num_bad_losses

    def loss_scale(self) -> float | None:
        return float(self.engine.optimizer.loss_scale) if self.engine.fp16_enabled() else None

    def save(self, directory: Path) -> Future[None]:
        self._write(str(directory))
        return self.writer.take_pending()

    def _write(self, directory: str) -> None:
        client = {"num_bad_losses": self.num_bad_losses}
        frozen = self.lora is not None  # the base under adapters comes from the model's own files again
        with zero_adam.united(self.engine.optimizer):
            self.engine.save_checkpoint(directory, tag=_TAG, client_state=client, save_latest=False, exclude_frozen_parameters=frozen)

    def load(self, directory: Path) -> None:
        path, client = self.engine.load_checkpoint(str(directory), tag=_TAG, load_module_strict=self.lora is None)
        assert path is not None, f"DeepSpeed found nothing to load in {directory}"
        zero_adam.fit(self.engine.optimizer)
        zero_adam.divide(self.engine.optimizer)
        renew_rates(self.scheduler)
        self.num_bad_losses = int(client.get("num_bad_losses", 0))

    @contextlib.contextmanager
    def _with_files(self, files: FilesInMemory) -> Iterator[str]:
        """DeepSpeed reads and writes these files inside; yields the name of the folder it believes to use."""
        keeps = self.engine.save_non_zero_checkpoint
        self.engine.checkpoint_engine, self.engine.save_non_zero_checkpoint = files, True  # every rank has all it needs of its own
        try:
            with tempfile.TemporaryDirectory(prefix="harness-snapshot-") as folder:
                yield folder
        finally:
            self.engine.checkpoint_engine, self.engine.save_non_zero_checkpoint = self.writer, keeps

    def snapshot_state(self) -> Any:
        memory = FilesInMemory()
        with self._with_files(memory) as folder:
            self._write(folder)
        return memory.files

    def load_snapshot(self, state: Any) -> None:
        names = {name for files in self.coordinator.gather(list(state)) for name in files}
        with self._with_files(FilesInMemory(state)) as folder:
            (Path(folder) / _TAG).mkdir()
            for name in names:  # DeepSpeed looks whether they are there before it reads this rank's
                (Path(folder) / _TAG / name).touch()
            self.load(Path(folder))

    @torch.no_grad()
    def adopt(self, source: StoredState, num_updates: int) -> list[str]:
        parameters = dict(trained(self.module, True))
        missing = sorted(set(parameters) - set(source.names))
        if missing:
            raise RuntimeError(f"the checkpoint has no weights of {', '.join(missing[:4])}")
        has_averages = source.num_updates is not None and self._make_averages(source.num_updates)
        write = self._write_partition if self.stage == 3 else self._write_fragment
        for name, parameter in parameters.items():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            for kind in ("weight", *(AVERAGES if has_averages else ())):
                write(parameter, whole(source.get(name, kind), shape).to(self.device), kind)
        zero_adam.divide(self.engine.optimizer)
        place_schedule(self.scheduler, num_updates)
        self.engine.global_steps = num_updates
        return ([] if has_averages else ["the optimizer's state"]) + (["the loss scale"] if self.engine.fp16_enabled() else [])

    def _make_averages(self, num_updates: int) -> bool:
        """Gives the optimizer Adam's state before its first update. False for an optimizer that has another."""
        outer = self.engine.optimizer
        inner = outer.optimizer
        if not zero_adam.is_adam(inner):
            return False
        for flat in outer.fp32_partitioned_groups_flat if self.stage == 3 else outer.single_partition_of_fp32_groups:
            averages: dict[str, Any] = {kind: torch.zeros_like(flat.detach()) for kind in AVERAGES}
            inner.state[flat] = {"step": zero_adam.step_number(inner, num_updates, flat), **averages}
        if self.stage < 3:
            outer._lazy_init_hp_params_optimizer_state()
        return True

    def _write_fragment(self, parameter: nn.Parameter, value: Tensor, kind: Kind) -> None:
        """Stages 1 and 2: this rank's part of the float32 master or an average; the weight itself is whole on every rank."""
        if kind != "weight":
            deepspeed.utils.safe_set_full_optimizer_state(parameter, value, kind)
            return
        deepspeed.utils.safe_set_full_fp32_param(parameter, value)
        parameter.data.copy_(value)

    def _write_partition(self, parameter: Any, value: Tensor, kind: Kind) -> None:
        """Stage 3: this rank's part, with the zeros that make all parts equally long, of the master and the weight, or of an average."""
        part = parameter.ds_tensor
        start = torch.distributed.get_rank(parameter.ds_process_group) * part.numel()
        own = torch.zeros(part.numel(), dtype=torch.float32, device=value.device)
        filled = value.flatten()[start : start + part.numel()]
        own[: filled.numel()] = filled
        if kind != "weight":
            deepspeed.utils.safe_set_local_optimizer_state(parameter, own, kind)
            return
        deepspeed.utils.safe_set_local_fp32_param(parameter, own)
        part.data.copy_(own.view_as(part))
        if parameter.numel():  # small ones stay gathered between steps
            parameter.data.copy_(value)

    def full_weights(self, trainable_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in trained(self.module, trainable_only):
            if self.stage < 3:
                yield name, parameter.detach()
                continue
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().clone()

    def apply(self, settings: MemorySettings) -> bool:
        changed = self.settings.differing(settings)
        if not changed <= self.in_process:
            return False
        self.blocks.set_checkpointing(settings.activation_checkpointing, settings.activation_offload)
        self.engine.set_train_micro_batch_size(settings.micro_batch_size)
        self.settings = settings
        return True

    def describe(self) -> str:
        zero = self.ds_config["zero_optimization"]
        offload = [
            f"{key.removeprefix('offload_')} in {zero[key]['device']}" for key in ("offload_optimizer", "offload_param") if key in zero
        ]
        return (
            f"{num_parameters(self.module):,} parameters, ZeRO stage {self.stage} over {self.coordinator.num_processes} processes"
            + (", " + ", ".join(offload) if offload else "")
            + f", optimizer {type(self.engine.optimizer.optimizer).__name__}"
        )

    def close(self) -> None:
        self.writer.threads.shutdown(wait=True)
        self.writer.copies.close()
        self.engine.destroy()
