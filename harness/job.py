"""Puts the parts of one training job together, in order: folder, data, model, engine, resume, loop, export."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import logging
import platform
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from harness import checkpoint_files, disk_room, isolation, modeling, monitor, run_folder, varlen_attention
from harness.args import Arguments, DataArguments
from harness.batches import MicroBatch
from harness.blocks import compile_backend
from harness.checkpoint import Checkpointer
from harness.coordination import Coordinator, StopFlag, setup_logging
from harness.data import build_loader, dry_run_step, prepare_data
from harness.end_advice import advice
from harness.engines.base import Engine, compute_dtype, materialise_optimizer
from harness.engines.build import build_engine, master_dtype, resolve_precision, spread_over_cards
from harness.evaluation import Evaluator
from harness.export import export_model, model_card, write_model_files
from harness.findings import Finding, UserError, user_error
from harness.lora import BASE_FOLDER, adapter_facts, base_weights, check_first_update, export_adapter, untrained_flags, write_r_check
from harness.metrics import METRICS_FILE, MetricsLog
from harness.profiling import StepProfiler
from harness.recovery import Recovery, record_memory_history
from harness.resume import (
    check_before_model,
    config_facts,
    find_begin,
    load_best,
    refuse_foreign,
    resume,
    state_to_resume,
    template_facts,
)
from harness.sequence_rules import model_findings
from harness.snapshots import Snapshots
from harness.source_losses import SourceLosses
from harness.starting_settings import DryRunWatch, Start, build_ahead, choose_start, job_facts
from harness.step_loader import StepLoader, eval_batches
from harness.streaming import StreamLoader
from harness.trainer import RunPlan, StepWatch, Trainer, TrainState, plan_run

log = logging.getLogger("harness")


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Logs start, end and duration of a part of the job, and what the allocator then holds of a GPU."""
    started = time.monotonic()
    log.info("%s: start", name)
    yield
    log.info("%s: done in %.1f s%s", name, time.monotonic() - started, _memory_text())


def _memory_text() -> str:
    """Memory of the current card; empty where there is none in use."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return ""
    sizes = (
        torch.cuda.memory_allocated(),
        torch.cuda.max_memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.max_memory_reserved(),
    )
    held, peak, reserved, most = (size / 2**30 for size in sizes)
    return f"; GPU memory {held:.2f} GiB, at most {peak:.2f}, with the allocator's reserve {reserved:.2f} and {most:.2f}"


def agree(coordinator: Coordinator, function: Any, *args: Any) -> Any:
    """Runs something on the main process; its result, or its UserError, on all ranks."""
    result: Any = None
    findings: list[Any] | None = None
    if coordinator.is_main_process:
        try:
            result = function(*args)
        except UserError as error:
            findings = error.findings
    result, findings = coordinator.broadcast((result, findings))
    if findings is not None:
        raise UserError(findings)
    return result


def check_shared(folder: Path, coordinator: Coordinator, limit_s: float = 60.0) -> None:
    """Every rank must see what the main process has written into the run's folder: each writes its part of a checkpoint there.

    Args:
        limit_s: how long a network file system may take to show it.

    Raises:
        UserError: on all ranks, where one does not.
    """
    mark = coordinator.broadcast(run_folder.mark_of(folder) if coordinator.is_main_process else "")
    is_blind = not run_folder.shows_mark(folder, mark, limit_s)
    told = coordinator.gather((platform.node(), str(folder.absolute())) if is_blind else None)
    blind = [f"rank {rank} ({node}: {path})" for rank, (node, path) in ((rank, each) for rank, each in enumerate(told) if each is not None)]
    if blind:
        shown = ", ".join(blind[:4]) + (f" and {len(blind) - 4} more" if len(blind) > 4 else "")
        raise user_error(
            "--output_dir",
            f"{folder} is another folder than rank 0's on {shown}",
            "a folder that all ranks share: an absolute path, on a disk that all nodes see",
        )


def check_same(coordinator: Coordinator, config: Any, tokenizer: Any, data: Any) -> None:
    """Every rank must have found the same under the names of its arguments: a node may have another copy.

    Raises:
        UserError: on all ranks, naming the first one that has not.
    """

    def digest(value: Any) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]

    own = {
        "--model_name_or_path": ("the model's config.json", digest(config.to_dict())),
        "--tokenizer_name": ("the tokenizer's vocabulary", digest(tokenizer.get_vocab())),
        "--train_file": ("the training data", str(getattr(data, "fingerprint", ""))),
    }
    told = coordinator.gather((platform.node(), own))
    wrong: list[Finding] = []
    for key, (what, first) in told[0][1].items():
        others = [f"rank {rank} ({node})" for rank, (node, each) in enumerate(told) if each[key][1] != first]
        if others:
            message = f"{what} on {', '.join(others[:4])} {'is' if len(others) == 1 else 'are'} not what rank 0 has ({told[0][0]})"
            wrong.append(Finding("error", key, message, "the same files on all nodes"))
    if wrong:
        raise UserError(wrong)


def open_folder(folder: Path, args: Arguments, coordinator: Coordinator, stack: contextlib.ExitStack) -> None:
    """Takes the run's folder: lock, refusal of other runs, log files. Errors are the same on all ranks."""

    def take() -> list[Any]:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            try:
                stack.enter_context(run_folder.locked(folder))
            except OSError as error:
                raise user_error("--output_dir", f"cannot write to {folder}: {error.strerror}", disk_room.write_fix(error)) from None
        findings = run_folder.prepare(folder, args)
        refuse_foreign(args, folder)
        (folder / "exit.json").unlink(missing_ok=True)
        return findings

    findings = agree(coordinator, take)
    if coordinator.num_processes > 1:
        check_shared(folder, coordinator)
    setup_logging(folder, debug=args.train.debug)
    for finding in findings:
        log.warning("%s", finding.line())
    changed = ", ".join(f"{name}={_short(value)}" for name, value in args.non_defaults().items())
    log.info("arguments that differ from the defaults: %s", changed)


def _run_facts(args: Arguments, plan: RunPlan, prepared: Any) -> dict[str, Any]:
    """What a checkpoint is compared by, as far as steps and data go."""
    return {
        "global_batch_size": plan.global_batch_size,
        "steps_per_epoch": plan.steps_per_epoch,
        "max_steps": plan.max_steps,
        "data_fingerprint": getattr(prepared.train, "fingerprint", ""),
        "data": _data_named(args.data),
        "data_seed": args.train.seed if args.train.data_seed is None else args.train.data_seed,
        "data_order": f"{args.data.train_sampling_strategy}{', last step dropped' if args.data.dataloader_drop_last else ''}",
    }


def _data_named(data: DataArguments) -> str:
    """The training data as the user named it, for the exported model's card; empty where a program handed rows over."""
    files = [*data.train_file[:4], *([f"... {len(data.train_file)} files in all"] if len(data.train_file) > 4 else [])]
    named = (data.dataset_name, data.dataset_config_name, data.dataset_mix, *files)
    return ", ".join(filter(None, named))


def _short(value: Any) -> str:
    """A value for one line of the log: of a long list only the beginning; config.json has all of it."""
    if isinstance(value, list) and len(value) > 4:
        return f"[{', '.join(map(repr, value[:3]))}, ... {len(value)} in all]"
    return str(value)


def run_job(args: Arguments, engine_name: str, folder: Path, coordinator: Coordinator, stop: StopFlag, train_dataset: Any = None) -> bool:
    """Trains and exports. Returns True when the run is finished, False when it was asked to stop and has saved."""
    _seed(args, coordinator)
    coordinator.sequence_parallel_size = args.train.sequence_parallel_size
    engine_name = spread_over_cards(engine_name, args, coordinator)
    config = modeling.load_config(args.model)
    tokenizer = modeling.load_tokenizer(args.model)
    precision = resolve_precision(args.train.precision, coordinator.device)
    # Empty, and before the data: preparing them takes long, and what is wrong with the model shows without them.
    empty = modeling.build_empty(
        args.model, config, tokenizer, dtype=master_dtype(engine_name, precision, args.model.torch_dtype, config), seed=args.train.seed
    )
    _check_model(args, empty)
    _attend_by_length(args, empty, engine_name, precision, coordinator)
    with phase("data"):
        prepared = prepare_data(
            args.data,
            tokenizer,
            max_positions=modeling.max_positions(config),
            seed=args.train.seed,
            say=log.info,
            is_local_main=coordinator.is_local_main_process,
            **({} if train_dataset is None else {"train_dataset": train_dataset}),
        )
    check_same(coordinator, config, tokenizer, prepared.train)
    for finding in prepared.findings:
        log.log(logging.INFO if finding.severity == "info" else logging.WARNING, "%s", finding.line())
    saved = state_to_resume(args, coordinator)
    loader, plan = _plan(args, prepared, saved, coordinator)
    facts = _run_facts(args, plan, prepared) | {"precision": precision, "model_config": config_facts(config)}
    check_before_model(args, saved, facts, loader, plan.max_steps)
    with phase("model"):
        compiled = compile_backend(args.model, coordinator.device) is not None  # fuses what Liger's layers fuse
        if not compiled and modeling.apply_kernels(empty.model, args.model, coordinator.device):
            log.info("Liger's fused norms and feed-forward are on (--use_liger_kernel False turns them off)")
        shapes = {name: tuple(parameter.shape) for name, parameter in empty.model.named_parameters()}
        shapes |= {name: tuple(buffer.shape) for name, buffer in modeling.persistent_buffers(empty.model)}
        block_size = int(getattr(prepared.train, "longest", 0) or 0) or args.data.block_size or 4096
        samples = loader.samples_per_rank
        planned_for = job_facts(args, engine_name, coordinator, block_size=block_size, samples_per_rank=samples, precision=precision)
        num_parameters = modeling.num_parameters(empty.model)
        start = choose_start(
            args, engine_name, folder, coordinator, block_size=block_size, num_parameters=num_parameters, facts=planned_for
        )
        build_ahead(start, coordinator)
        if start.host_relief >= 2:
            args.data.dataloader_num_workers = 0
        engine, template = build_engine(start.engine, args, coordinator, empty, start.settings, precision, plan.max_steps)
        if coordinator.device.type == "cuda":
            torch.cuda.empty_cache()  # what whole blocks took before they were sharded is of no use to streams that gather them
    if coordinator.is_main_process:
        run_folder.write_facts(folder, args, engine.name, template)
        write_model_files(
            folder / checkpoint_files.MODEL_FOLDER, empty.model, tokenizer, None if engine.lora is None else engine.lora.config
        )
        if engine.lora is not None and args.lora.check_r_consistency:
            write_r_check(folder, engine.module, engine.lora)
    _keep_base(args, folder, engine, shapes, empty, tokenizer, precision, coordinator)
    # Dropout differs between ranks, and does not depend on how the model was filled.
    _seed(args, coordinator, coordinator.process_index)
    metrics = _metrics(args, folder, coordinator, plan)
    checkpointer = Checkpointer(
        folder,
        engine,
        coordinator,
        keep=args.train.save_total_limit,
        state_bytes=12 * modeling.num_parameters(engine.module, trainable_only=True),
        model_files=folder / checkpoint_files.MODEL_FOLDER,
        on_event=metrics.event,
        trust=args.train.trust_checkpoint,
    )
    facts |= {"template": template_facts(template)}
    trainer = _trainer(args, start, engine, loader, plan, coordinator, stop, checkpointer, prepared, metrics, config, facts)
    trainer.recovery.before_relaunch = trainer.keep_all
    if args.train.oom_snapshot:
        record_memory_history(folder, coordinator)
    trainer.recovery.current_step = lambda: trainer.state.step
    if planned_for is not None:
        trainer.recovery.advise = lambda settings: advice(args, planned_for, settings)
    if start.ladder and start.host_relief == 0:
        trainer.snapshots = Snapshots(engine, coordinator, args.train.snapshot_steps, f"{engine.name} on {coordinator.num_processes}")
    if args.train.profile_steps is not None:
        trainer.profiler = StepProfiler(args.train.profile_steps, folder / "profile", coordinator.process_index, coordinator.device)
    with phase("resume"):
        resume(args, trainer, checkpointer, coordinator)
    if isinstance(engine.optimizer, torch.optim.Optimizer) and not engine.name.startswith("zero"):
        materialise_optimizer(engine.module, engine.optimizer)
    _dry_run(args, start, trainer, prepared, loader, coordinator)
    watcher = _watch_gpus(args, coordinator, metrics, trainer)
    status = "failed"
    try:
        with phase("training"):
            stop.saves = True
            finished = trainer.train()
        if finished:
            load_best(args, trainer, checkpointer, coordinator)
            if args.train.save_final:
                with phase("export"):
                    _export(folder / "final", engine, shapes, empty, tokenizer, precision, coordinator, trainer.state, trainer.identity)
        trainer.check_saved()
        status = stop.outcome = "finished" if finished else "preempted"
    finally:
        if watcher is not None:
            watcher.stop()
        state = trainer.state
        counts = {"num_input_tokens": state.num_input_tokens, "num_label_tokens": state.num_label_tokens}
        metrics.close(status, state.step, counts)
        engine.close()
    if coordinator.is_main_process:
        _say_steps_down(trainer)
        _say_where(folder, args, finished)
    return finished


def _keep_base(
    args: Arguments,
    folder: Path,
    engine: Engine,
    shapes: dict[str, tuple[int, ...]],
    empty: modeling.EmptyModel,
    tokenizer: Any,
    precision: str,
    coordinator: Coordinator,
) -> None:
    """Writes the base model of adapters that was made from scratch: without it they would be worth nothing, and nobody else has it."""
    kept = folder / BASE_FOLDER
    if engine.lora is None or args.model.model_name_or_path or coordinator.broadcast(kept.is_dir()):
        return
    with phase("base model"):
        whole = itertools.chain(engine.full_weights(), modeling.persistent_buffers(engine.module))
        weights = ((name, weight) for name, weight in base_weights(whole) if name in shapes)
        dtype, is_main = compute_dtype(precision), coordinator.is_main_process
        export_model(kept, weights, shapes, empty.config, tokenizer, dtype=dtype, is_main_process=is_main)
        coordinator.wait_for_everyone("base model")


def _seed(args: Arguments, coordinator: Coordinator, offset: int = 0) -> None:
    import numpy as np

    seed = args.train.seed + offset
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if args.train.full_determinism:
        torch.use_deterministic_algorithms(True, warn_only=True)
    if args.train.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = args.train.tf32
        torch.backends.cudnn.allow_tf32 = args.train.tf32


def _accumulation(args: Arguments, num_processes: int) -> int:
    """Micro-batches per optimizer step.

    Raises:
        UserError: `--target_batch_size` cannot be cut evenly.
    """
    train = args.train
    if train.target_batch_size is None:
        return train.gradient_accumulation_steps
    per_round = train.per_device_train_batch_size * num_processes
    if train.target_batch_size % per_round:
        near = max(1, round(train.target_batch_size / per_round)) * per_round
        raise user_error(
            "--target_batch_size",
            f"{train.target_batch_size} is not a multiple of {train.per_device_train_batch_size} samples x {num_processes} processes"
            f" = {per_round}",
            f"use {near}, or change --per_device_train_batch_size",
        )
    return train.target_batch_size // per_round


def _plan(args: Arguments, prepared: Any, saved: Any, coordinator: Coordinator) -> tuple[StepLoader | StreamLoader, RunPlan]:
    train, data = args.train, args.data
    accumulation = _accumulation(args, coordinator.num_data_parallel)
    train.gradient_accumulation_steps = accumulation
    global_batch_size = train.per_device_train_batch_size * accumulation * coordinator.num_data_parallel
    loader = build_loader(
        data,
        prepared,
        global_batch_size=global_batch_size,
        num_processes=coordinator.num_data_parallel,
        process_index=coordinator.data_parallel_index,
        seed=train.seed if train.data_seed is None else train.data_seed,
        pin_memory=coordinator.device.type == "cuda",
    )
    find_begin(args, loader, getattr(prepared.train, "fingerprint", ""), saved)
    plan = plan_run(
        train,
        num_steps=loader.num_steps(train.num_train_epochs),
        steps_per_epoch=loader.steps_per_epoch,
        global_batch_size=global_batch_size,
        has_evaluation=prepared.evaluation is not None,
    )
    log.info("%s", loader.describe())
    log.info("%d optimizer steps of %d samples", plan.max_steps, plan.global_batch_size)
    return loader, plan


def _check_model(args: Arguments, empty: modeling.EmptyModel) -> None:
    text = empty.config.get_text_config() if hasattr(empty.config, "get_text_config") else empty.config
    if problems := list(model_findings(args.train.sequence_parallel_size, lambda name: getattr(text, name, None))):
        raise UserError(problems)
    if problems := isolation.causal_findings(empty.model, args.data.keeps_documents_apart):
        raise UserError(problems)


def _attend_by_length(args: Arguments, empty: modeling.EmptyModel, engine_name: str, precision: str, coordinator: Coordinator) -> None:
    """Where the user chose no attention, packed documents are kept apart by the one that needs no mask, if card and model have it."""
    if not args.data.keeps_documents_apart or args.model.attn_implementation or args.model.no_custom_kernels or engine_name == "device_map":
        return
    if varlen_attention.is_available(coordinator.device, precision) and isolation.can_attend_by_length(empty.model):
        args.model.attn_implementation = varlen_attention.NAME
        empty.model.set_attn_implementation(varlen_attention.NAME)
        log.info("documents are kept apart by varlen attention, without a mask (--attn_implementation sdpa makes one)")


def _metrics(args: Arguments, folder: Path, coordinator: Coordinator, plan: RunPlan) -> MetricsLog:
    trackers: list[Any] = []
    if coordinator.is_main_process and any(name not in ("none", "") for name in args.train.report_to):
        from harness.trackers import start_trackers

        trackers = start_trackers(args.train.report_to, args.train.run_name, folder, args.to_dict())
    bar = None if args.train.disable_tqdm is None else not args.train.disable_tqdm
    return MetricsLog(
        folder,
        enabled=coordinator.is_main_process,
        trackers=trackers,
        max_steps=plan.max_steps,
        progress_bar=bar,
        write_line=log.info,
    )


def _trainer(
    args: Arguments,
    start: Start,
    engine: Engine,
    loader: StepLoader | StreamLoader,
    plan: RunPlan,
    coordinator: Coordinator,
    stop: StopFlag,
    checkpointer: Checkpointer,
    prepared: Any,
    metrics: MetricsLog,
    config: Any,
    facts: dict[str, Any],
) -> Trainer:
    flops, peak = _flops(engine, config, prepared, coordinator)
    sources = SourceLosses(prepared.source_names) if args.data.dataset_mix else None
    trainer = Trainer(
        train=args.train,
        engine=engine,
        loader=loader,
        plan=plan,
        coordinator=coordinator,
        recovery=_recovery(start, engine, coordinator, stop, checkpointer.output_dir, metrics),
        checkpointer=checkpointer,
        evaluator=None,
        metrics=metrics,
        watch=StepWatch(coordinator, flops, peak, sources),
        identity={
            "engine": engine.name,
            "num_processes": coordinator.num_processes,
            "adapters": None if engine.lora is None else adapter_facts(engine.lora),
            **facts,
            "packages": run_folder.environment()["packages"],
        },
        first_update=_adapter_check(engine, coordinator),
    )
    if prepared.evaluation is not None:
        trainer.evaluator = Evaluator(
            lambda batch_size: _evaluation_batches(batch_size, prepared, coordinator, loader),
            engine.eval_loss,
            coordinator,
            batch_size=args.train.per_device_eval_batch_size,
            every_steps=plan.eval_steps,
            on_result=trainer.note_evaluation,
            sources=SourceLosses(prepared.source_names) if args.data.dataset_mix else None,
            dtype=torch.bfloat16 if args.train.bf16_full_eval else torch.float16 if args.train.fp16_full_eval else None,
            half=torch.bfloat16 if facts["precision"] == "fp32" and not engine.name.startswith("zero") else None,
        )
        trainer.recovery.lower["evaluate"] = trainer.evaluator.lower
        trainer.evaluator.check = trainer.recovery.check
    return trainer


def _recovery(start: Start, engine: Engine, coordinator: Coordinator, stop: StopFlag, folder: Path, metrics: MetricsLog) -> Recovery:
    return Recovery(coordinator, stop, engine, start.ladder, folder=folder, on_event=metrics.event, host_relief=start.host_relief)


def _dry_run(args: Arguments, start: Start, trainer: Trainer, prepared: Any, loader: Any, coordinator: Coordinator) -> None:
    """Two micro-batches of the longest samples before step 1, with the optimizer's state in place: what does not fit shows now."""
    if args.train.no_oom_recovery:
        return
    engine = trainer.engine
    number = min(loader.samples_per_rank, 2 * engine.settings.micro_batch_size)
    batch = dry_run_step(prepared, number, pin_memory=coordinator.device.type == "cuda")
    watch = DryRunWatch(start, trainer.recovery, coordinator)
    with phase("dry run"):
        trainer.recovery.dry_run(engine.forward_backward, batch, max(1, batch.num_label_tokens * coordinator.num_data_parallel))
    watch.done()


def _watch_gpus(args: Arguments, coordinator: Coordinator, metrics: MetricsLog, trainer: Trainer) -> monitor.GpuMonitor | None:
    """Samples cards into metrics.jsonl, in a thread that has nothing to do with training; other nodes' come with each row of training."""
    if coordinator.device.type != "cuda" or not args.train.gpu_monitor_interval_s:
        return None
    latest: monitor.LatestRow | None = None
    if coordinator.num_processes > coordinator.num_local_processes:
        latest = monitor.LatestRow()
        trainer.before_row = functools.partial(_share_samples, latest, coordinator, metrics)
    if not coordinator.is_local_main_process:
        return None

    def write(row: dict[str, Any]) -> None:
        if coordinator.is_main_process:
            metrics.log(row, kind="gpu")
        elif latest is not None:
            latest.put(row)

    node = coordinator.process_index // coordinator.num_local_processes if latest is not None else None
    watcher = monitor.GpuMonitor(write, interval_s=args.train.gpu_monitor_interval_s, node=node, step=lambda: trainer.state.step)
    return watcher if watcher.start() else None


def _share_samples(latest: monitor.LatestRow, coordinator: Coordinator, metrics: MetricsLog) -> None:
    """On all ranks, before a row of training: what other nodes' threads have seen since the last one goes to the main process."""
    for row in coordinator.gather(latest.take()):
        if row is not None:
            metrics.log(row, kind="gpu")


def _adapter_check(engine: Engine, coordinator: Coordinator) -> Callable[[], bool] | None:
    """With LoRA: a check, after the first update that was made, that every adapter trains."""
    if engine.lora is None:
        return None
    skipped_before, num_calls = engine.num_skipped_steps(), 0

    def check() -> bool:
        nonlocal num_calls
        num_calls += 1
        if engine.num_skipped_steps() - skipped_before >= num_calls:  # fp16 begins with updates that overflow
            return False
        names, flags = untrained_flags(engine.module)
        check_first_update(names, coordinator.max(flags, "first update of LoRA"))
        return True

    return check


def _evaluation_batches(
    batch_size: int, prepared: Any, coordinator: Coordinator, loader: StepLoader | StreamLoader
) -> Iterator[MicroBatch]:
    return eval_batches(
        prepared.evaluation,
        batch_size,
        coordinator.num_data_parallel,
        coordinator.data_parallel_index,
        pad_id=loader.pad_id,
        multiple_of=coordinator.sequence_parallel_size,
        pin_memory=coordinator.device.type == "cuda",
    )


def _flops(engine: Engine, config: Any, prepared: Any, coordinator: Coordinator) -> tuple[float, float | None]:
    """Model FLOPs per token and this device's peak FLOP/s, for MFU."""
    sequence = int(getattr(prepared.train, "longest", 0) or 0)
    trained = modeling.num_parameters(engine.module, trainable_only=True)
    flops = monitor.model_flops_per_token(config, sequence, modeling.num_parameters(engine.module), trained)
    name = torch.cuda.get_device_name(coordinator.device) if coordinator.device.type == "cuda" else ""
    return flops, monitor.peak_flops(name)


def _export(
    folder: Path,
    engine: Engine,
    shapes: dict[str, tuple[int, ...]],
    empty: modeling.EmptyModel,
    tokenizer: Any,
    precision: str,
    coordinator: Coordinator,
    state: TrainState,
    run: dict[str, Any],
) -> None:
    card = model_card(type(empty.model).__name__, state.to_dict(), {"engine": engine.name, "precision": precision} | run)
    if engine.lora is not None:
        weights = engine.full_weights(trainable_only=True)
        export_adapter(folder, weights, engine.lora, tokenizer, is_main_process=coordinator.is_main_process, card=card)
        coordinator.wait_for_everyone("export")
        return
    buffers = dict(modeling.persistent_buffers(engine.module))
    export_model(
        folder,
        itertools.chain(engine.full_weights(), buffers.items()),
        shapes,
        empty.config,
        tokenizer,
        dtype=compute_dtype(precision),
        is_main_process=coordinator.is_main_process,
        generation_config=getattr(empty.model, "generation_config", None),
        card=card,
        kept=buffers,
    )
    coordinator.wait_for_everyone("export")


def _say_steps_down(trainer: Trainer) -> None:
    """What the run had to give up for memory, one line each."""
    steps = trainer.recovery.steps_down
    if steps:
        log.info("stepped down %d times; the next start begins there:", len(steps))
    for step in steps:
        log.info("  rank %s, %s: %s (%s, %.1f s)", step["rank"], step["phase"], step["change"], step["way"], step.get("seconds", 0.0))


def _say_where(folder: Path, args: Arguments, finished: bool) -> None:
    """Ends the log with where everything is, and draws the loss, if nobody waits for the end."""
    if finished and importlib.util.find_spec("matplotlib") is not None and (folder / METRICS_FILE).exists():
        from harness.parse_log import plot_losses

        (folder / "plots").mkdir(exist_ok=True)
        with contextlib.suppress(ValueError):  # no row to draw yet
            plot_losses(folder / METRICS_FILE, folder / "plots" / "loss.png")
    parts = [("final model", "final"), ("metrics", METRICS_FILE), ("log", "train.log"), ("loss plot", "plots/loss.png")]
    for label, name in parts:
        if (folder / name).exists():
            log.info("%-12s %s", label + ":", folder / name)
    if not finished:
        without = ", without --overwrite_output_dir" if args.train.overwrite_output_dir else ""
        log.info("run the same command again%s to go on", without)
