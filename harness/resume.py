"""Going on from a checkpoint: which one, whether it continues the same run, and how this engine takes it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness import checkpoint_files, guard_line, own_checkpoints
from harness.args import Arguments
from harness.checkpoint import Checkpointer
from harness.coordination import Coordinator
from harness.findings import Finding, UserError, has_errors, user_error
from harness.metrics import last_train_step
from harness.optim import parameter_groups
from harness.snapshots import Snapshots
from harness.step_loader import StepLoader
from harness.stored_state import (
    DcpState,
    StoredState,
    TrainerState,
    UniversalState,
    ZeroWeights,
    convert_zero,
    engine_family,
    is_trainer_checkpoint,
)
from harness.streaming import StreamLoader
from harness.trainer import Trainer, TrainState

log = logging.getLogger("harness")
KEY = "--resume_from_checkpoint"

# Of a model's config: what does not change what the model computes.
_FREE_CONFIG = frozenset(
    ["transformers_version", "dtype", "torch_dtype", "use_cache", "_name_or_path", "_attn_implementation", "attn_implementation"]
)
# Of a template: what changes what an optimizer step computes. The rest is about memory, speed and communication.
_BINDING_TEMPLATE = frozenset(["optimizer", "scheduler", "gradient_clipping", "fp16", "bf16", "mixed_precision"])

_BATCH = frozenset(["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print"])


def config_facts(config: Any) -> dict[str, Any]:
    """A model's config as comparable JSON."""
    facts = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in sorted(facts.items()) if name not in _FREE_CONFIG}


def template_facts(template: Mapping[str, Any]) -> dict[str, Any]:
    """A template as comparable JSON, without the batch: that is compared by itself."""
    facts = json.loads(json.dumps(template, default=str))
    return {name: value for name, value in facts.items() if name not in _BATCH}


_OWN_FOLDER = "use the same LoRA flags, or another --output_dir; no flag can load the one into the other"


def compare(saved: Mapping[str, Any], now: Mapping[str, Any], place: str = "") -> list[Finding]:
    """Everything in which a checkpoint's run differs from this one: errors where the result would differ, else warnings.

    Args:
        saved, now: the "run" of trainer_state.json; facts that either lacks are not compared.
        place: where the run is, said of another batch.
    """
    found: list[Finding] = []

    def say(severity: Any, message: str, fix: str) -> None:
        found.append(Finding(severity, KEY, message, fix))

    force = "; --force_resume goes on all the same"
    both = {name for name in now if saved.get(name) is not None and now[name] is not None and saved[name] != now[name]}
    if "global_batch_size" in both:
        say(
            "error",
            f"the checkpoint had {saved['global_batch_size']} samples per step, this run has {now['global_batch_size']}{place}",
            f"keep micro-batch x accumulation x processes as it was: --target_batch_size {saved['global_batch_size']}{force}",
        )
    if "adapters" in both:
        say("error", f"the adapters have other shapes: {_changes(saved['adapters'], now['adapters'])}", _OWN_FOLDER)
    if "data_fingerprint" in both:
        say(
            "error",
            "the training data or its preparation has changed",
            f"resume with the same data, or train in another --output_dir{force}",
        )
    if "data_seed" in both:
        say("error", f"the order of samples has changed: seed {saved['data_seed']} -> {now['data_seed']}", f"keep the seed{force}")
    if "data_order" in both:
        say("error", f"the order of samples has changed: {saved['data_order']} -> {now['data_order']}", f"keep the data's options{force}")
    if "precision" in both:
        say("error", f"precision {saved['precision']} -> {now['precision']}", f"use --precision {saved['precision']}{force}")
    if "model_config" in both:
        changes = _changes(saved["model_config"], now["model_config"])
        say("error", f"the model's config has changed: {changes}", f"resume with the same model{force}")
    if "template" in both and saved["engine"] == now["engine"]:
        for binding in (True, False):
            old, new = (
                {key: value for key, value in side["template"].items() if (key in _BINDING_TEMPLATE) == binding} for side in (saved, now)
            )
            if old != new:
                fix = f"use the template of the checkpoint{force}" if binding else "nothing: losses stay the same"
                say("error" if binding else "warning", f"the template has changed: {_changes(old, new)}", fix)
    if "packages" in both:
        say(
            "warning",
            f"package versions have changed: {_changes(saved['packages'], now['packages'])}",
            "losses may differ in the last digits",
        )
    if "max_steps" in both:
        say(
            "warning",
            f"the run had {saved['max_steps']} steps, now {now['max_steps']}",
            "the learning rate goes on along the schedule of the new length",
        )
    return found


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> str:
    """Changed entries as "name old -> new", nested names with dots; the first six."""
    parts: list[str] = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            parts.append(_changes(before, after, f"{prefix}{name}."))
        else:
            parts.append(f"{prefix}{name} {json.dumps(before)} -> {json.dumps(after)}")
    return ", ".join(parts[:6]) + (", ..." if len(parts) > 6 else "")


def check(saved: Mapping[str, Any], now: Mapping[str, Any], *, force: bool, place: str = "") -> None:
    """Says what differs, and refuses what would not continue the same run.

    Raises:
        UserError: with every difference that matters, unless `force`.
    """
    findings = compare(saved, now, place)
    if has_errors(findings) and (not force or any(finding.fix == _OWN_FOLDER for finding in findings)):
        raise UserError(findings)
    for finding in findings:
        log.warning("%s: %s%s", finding.key, finding.message, " (--force_resume: going on)" if finding.severity == "error" else "")


def _zero_layout(run: Mapping[str, Any]) -> tuple[Any, ...]:
    """What DeepSpeed needs unchanged to read its own files."""
    template = run.get("template") or {}
    return run["engine"], run["num_processes"], template.get("zero_optimization", {}).get("sub_group_size")


def loads_directly(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """True where the engine reads the other's files itself: torch's format on any number of ranks, DeepSpeed's on the same layout."""
    families = engine_family(str(saved["engine"])), engine_family(str(now["engine"]))
    return families == ("dcp", "dcp") or (families == ("zero", "zero") and _zero_layout(saved) == _zero_layout(now))


def refuse_foreign(args: Arguments, output_dir: Path) -> None:
    """Main process, before anything is loaded: refuses to go on from a checkpoint that is not this user's own.

    One that is damaged is nobody's: it is passed over later, with the reason. Its hashes are compared only where it is not known.

    Raises:
        UserError: with what to do.
    """
    wanted = Path(args.train.resume_from_checkpoint or "auto")
    complete = [path for path in checkpoint_files.list_checkpoints(output_dir) if (path / checkpoint_files.COMPLETE).exists()]
    for chosen in [wanted] if (wanted / checkpoint_files.MANIFEST).is_file() else complete:
        error = own_checkpoints.refusal(chosen, args.train.trust_checkpoint)
        if error is None:
            return
        if checkpoint_files.problem_of(chosen) is None:
            raise error


def resume(args: Arguments, trainer: Trainer, checkpointer: Checkpointer, coordinator: Coordinator) -> bool:
    """Restores the run's newest usable checkpoint, or the one that was asked for. Returns False when there is none to resume.

    Raises:
        UserError: none usable where there must be one, or one that would not continue the same run.
    """
    wanted = args.train.resume_from_checkpoint or "auto"
    if guard_line.attempt() > 0 and coordinator.broadcast(bool(checkpoint_files.list_checkpoints(checkpointer.output_dir))):
        wanted = "auto"  # what was asked for was the start of an earlier life
    if trainer.snapshots is not None and guard_line.attempt() > 0 and _from_snapshot(trainer, trainer.snapshots, checkpointer, coordinator):
        return True
    if Path(wanted).is_dir() and is_trainer_checkpoint(Path(wanted)):
        _from_trainer(Path(wanted), args, trainer, coordinator)
        found: Path | None = Path(wanted)
    else:
        found = checkpointer.find("auto" if wanted.lower() == "true" else wanted)
        if found is None:
            return False
        saved = json.loads((found / checkpoint_files.STATE_FILE).read_text(encoding="utf-8"))
        place = _place(saved, trainer.identity, trainer.loader, trainer.plan.max_steps)
        check(saved["run"], trainer.identity, force=args.train.force_resume, place=place)
        restore(found, saved, trainer, checkpointer, coordinator)
        trainer.state = TrainState.from_dict(saved["state"])
        if saved["run"].get("data_fingerprint") == trainer.identity["data_fingerprint"]:
            _begin_after(saved, trainer.loader)
            _check_length(args, trainer, found)
    trainer.metrics.event("resume", step=trainer.state.step, path=str(found), lost_steps=_lost_steps(trainer))
    log.info("resuming at step %d of %d", trainer.state.step, trainer.plan.max_steps)
    return True


def find_begin(args: Arguments, loader: StepLoader | StreamLoader, fingerprint: str, saved: Any) -> None:
    """Before the number of steps is fixed: a run that was forced to go on with another batch has steps of two sizes.

    Whatever is wrong with the checkpoint is said when it is resumed.

    Args:
        saved: of `state_to_resume`.
    """
    if args.train.max_steps > 0:
        return
    with contextlib.suppress(UserError, KeyError, TypeError, ValueError, AttributeError):
        if saved["run"]["data_fingerprint"] == fingerprint:
            _begin_after(saved, loader)


def check_before_model(args: Arguments, saved: Any, now: Mapping[str, Any], loader: StepLoader | StreamLoader, max_steps: int) -> None:
    """Refuses what `resume` would, as far as it is known before the model is loaded.

    Whatever else is wrong with the checkpoint, and what only warrants a word, is said when it is resumed.

    Args:
        saved: of `state_to_resume`.
        now: this run's facts.

    Raises:
        UserError: on all ranks.
    """
    if args.train.force_resume or guard_line.attempt() > 0:
        return
    findings: list[Finding] = []
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        findings = compare(saved["run"], now, _place(saved, now, loader, max_steps))
    if has_errors(findings):
        raise UserError(finding for finding in findings if finding.severity == "error")


def state_to_resume(args: Arguments, coordinator: Coordinator) -> Any:
    """trainer_state.json of the checkpoint that will be resumed if it is whole; None where there is none, or it is no run's of ours."""

    def read() -> Any:
        wanted = Path(args.train.resume_from_checkpoint or "auto")
        own = next(
            (
                each
                for each in checkpoint_files.list_checkpoints(Path(args.train.output_dir or "."))
                if (each / checkpoint_files.COMPLETE).exists()
            ),
            None,
        )
        found = wanted if wanted.is_dir() and not (own is not None and guard_line.attempt() > 0) else own
        if found is None or is_trainer_checkpoint(found):
            return None
        with contextlib.suppress(OSError, ValueError):
            return json.loads((found / checkpoint_files.STATE_FILE).read_text(encoding="utf-8"))

    return coordinator.broadcast(read() if coordinator.is_main_process else None)


def _begin_after(saved: Mapping[str, Any], loader: Any) -> None:
    """The loader's next step takes the samples that follow those of the checkpoint's last one.

    Raises:
        UserError: with another batch the order would be another.
    """
    batch, data = saved["run"].get("global_batch_size"), saved.get("data", {})
    if batch in (None, loader.global_batch_size):
        loader.load_state_dict(data)
    else:
        loader.go_on(int(saved["state"]["step"]), batch, data)


def _place(saved: Mapping[str, Any], now: Mapping[str, Any], loader: Any, max_steps: int) -> str:
    """Where a checkpoint with another batch stands, for the message; "" where nothing can be said."""
    run = saved["run"]
    if run.get("data_fingerprint") != now["data_fingerprint"] or run.get("global_batch_size") in (None, now["global_batch_size"]):
        return ""
    try:
        _begin_after(saved, loader)
    except UserError:
        return ""
    seen, left = loader.begin.position, max_steps - int(saved["state"]["step"])
    return f"; {seen} samples of the epoch are trained on, {left} steps are left"


def _check_length(args: Arguments, trainer: Trainer, found: Path) -> None:
    """The learning rate's schedule is as long as the run whose newest checkpoint is used."""
    if args.train.max_steps <= 0 and trainer.loader.num_steps(args.train.num_train_epochs) != trainer.plan.max_steps:
        message = f"{found.name} has another number of samples per step than the newest checkpoint, which cannot be used"
        raise user_error(KEY, message, "remove the newest checkpoint, or give --max_steps")


def _lost_steps(trainer: Trainer) -> int:
    """Updates of the life before that are made again: as its guard says, else as far as its log came."""
    cause = guard_line.cause()
    path = trainer.metrics.path
    reached = int(cause.get("step", 0)) if cause else 0 if path is None else last_train_step(path)
    return max(0, reached - trainer.state.step)


def _from_snapshot(trainer: Trainer, snapshots: Snapshots, checkpointer: Checkpointer, coordinator: Coordinator) -> bool:
    """Goes on from host memory, where that is newer than what is on disk."""
    step = snapshots.newest()
    folders = checkpoint_files.list_checkpoints(checkpointer.output_dir)
    complete = next((folder for folder in folders if (folder / checkpoint_files.COMPLETE).exists()), None)
    complete = coordinator.broadcast(complete)
    checkpointer.last_complete = complete
    if step is None or (complete is not None and checkpoint_files.step_of(complete) > step):
        return False
    content = snapshots.load(step)
    trainer.state = TrainState.from_dict(content["state"])
    trainer.loader.load_state_dict(content["data"])
    trainer.metrics.event("resume", step=step, path="snapshot in host memory", lost_steps=_lost_steps(trainer))
    log.info("going on at step %d of %d from host memory; %d steps are made again", step, trainer.plan.max_steps, _lost_steps(trainer))
    return True


def restore(folder: Path, saved: Mapping[str, Any], trainer: Trainer, checkpointer: Checkpointer, coordinator: Coordinator) -> None:
    """Reads a checkpoint of ours into this run's engine, whichever engine and number of processes wrote it."""
    run, now = saved["run"], trainer.identity
    same_ranks = run["num_processes"] == now["num_processes"]
    if loads_directly(run, now):
        checkpointer.load(folder, random_states=same_ranks)
    else:
        with _readable(folder, run, now, checkpointer, coordinator) as source:
            step = int(saved["state"]["step"])
            anew = trainer.engine.adopt(source, step if source.num_updates is None else source.num_updates)
        coordinator.wait_for_everyone("state of another layout")
        checkpointer.load(folder, random_states=same_ranks, engine=False)
        log.info("taken over from %s on %d processes", run["engine"], run["num_processes"])
        if anew:
            log.warning("these begin anew: %s", ", ".join(anew))
    if not same_ranks:
        log.info(
            "saved by %d processes, resumed by %d: same samples and learning rates; random states (dropout) begin anew, "
            "they are exact only on the same number",
            run["num_processes"],
            now["num_processes"],
        )


@contextlib.contextmanager
def _readable(
    folder: Path, run: Mapping[str, Any], now: Mapping[str, Any], checkpointer: Checkpointer, coordinator: Coordinator
) -> Iterator[StoredState]:
    """The checkpoint's state by parameter name; DeepSpeed's through its universal format, in a folder that goes afterwards."""
    state = folder / checkpoint_files.ENGINE_FOLDER
    if engine_family(str(run["engine"])) == "dcp":
        yield DcpState(state)
        return
    _refuse_nvme(run, now)
    universal = checkpointer.output_dir / f".tmp-checkpoint-universal-{folder.name}"
    try:
        problem = None
        if coordinator.is_main_process:
            shutil.rmtree(universal, ignore_errors=True)
            try:
                convert_zero(state, universal)
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        problem = coordinator.broadcast(problem)
        if problem is None:
            yield UniversalState(universal)
        elif engine_family(str(now["engine"])) == "zero":
            raise _other_layout(run, now, f"cannot be converted ({problem})")
        else:
            log.warning("only the weights of %s are taken over: its optimizer state cannot be converted (%s)", folder, problem)
            yield ZeroWeights(state)
        coordinator.wait_for_everyone("universal checkpoint read")
    finally:
        if coordinator.is_main_process:
            shutil.rmtree(universal, ignore_errors=True)


def _refuse_nvme(run: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """State that DeepSpeed keeps on NVMe is not in its checkpoint files in a form that its converter reads."""
    for side in (run, now):
        zero = (side.get("template") or {}).get("zero_optimization", {})
        if any(zero.get(part, {}).get("device") == "nvme" for part in ("offload_optimizer", "offload_param")):
            raise _other_layout(run, now, "keeps state on NVMe and loads only in the layout it was saved in")


def _other_layout(run: Mapping[str, Any], now: Mapping[str, Any], reason: str) -> UserError:
    return user_error(
        KEY,
        f"the checkpoint of {run['engine']} on {run['num_processes']} processes {reason}; this run is {now['engine']} on"
        f" {now['num_processes']}",
        f"start {run['num_processes']} processes with the same template, or train on from its weights alone:"
        " harness export CHECKPOINT DIR, then --model_name_or_path DIR in another --output_dir",
    )


# --------------------------------------------------------------------------------------------------- from transformers' Trainer


def _from_trainer(folder: Path, args: Arguments, trainer: Trainer, coordinator: Coordinator) -> None:
    """Goes on from a checkpoint of transformers' Trainer: weights, optimizer, schedule and step, as far as they are there."""
    engine = trainer.engine
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    groups = [
        [names[id(parameter)] for parameter in group["params"]]
        for group in parameter_groups(engine.module.named_parameters(), args.train.weight_decay)
    ]
    shapes = {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in engine.module.named_parameters()}
    source = TrainerState(folder, shapes, groups)
    missing = sorted(name for group in groups for name in group if name not in source.where)
    if missing:
        raise user_error(
            KEY,
            f"{folder} holds no whole weights of {', '.join(missing[:3])} (sharded checkpoints of the Trainer are not read)",
            "save with safetensors and a full state dict, or start from the final model",
        )
    check(_trainer_run(source.facts, trainer.plan.steps_per_epoch), trainer.identity, force=args.train.force_resume)
    state = _trainer_state(source.facts)
    anew = engine.adopt(source, state.step if source.num_updates is None else source.num_updates)
    trainer.state = state
    coordinator.wait_for_everyone("checkpoint of the Trainer read")
    without = next((part for part in anew if part.startswith("the optimizer")), None)
    optimizer = (
        "optimizer state, learning rate" if without is None else f"but not {without}{f': {source.problem}' if source.problem else ''}"
    )
    log.info("taken over from transformers' Trainer: weights, step %d, %s", state.step, optimizer)
    reasons = f" ({source.problem})" if source.problem else ""
    begins = [f"{part}{reasons if part.startswith('the optimizer') else ''}" for part in anew]
    log.warning(
        "these begin anew: %s", ", ".join([*begins, "random states", "the order of samples (from this step on it is this harness's own)"])
    )


def _trainer_run(facts: Mapping[str, Any], steps_per_epoch: int) -> dict[str, Any]:
    """What the Trainer's state says of its run. It does not hold the global batch; steps per epoch do, on the same data.

    Raises:
        UserError: its epochs have another number of steps than this run's.
    """
    step, epoch = int(facts["global_step"]), float(facts.get("epoch") or 0.0)
    if epoch > 0:
        theirs = step / epoch
        # The Trainer's epochs end with a shorter step where ours does not, and the other way round.
        if abs(theirs - steps_per_epoch) > 1 + 0.001 * steps_per_epoch:
            raise user_error(
                KEY,
                f"the Trainer made {theirs:.1f} steps per epoch, this run {steps_per_epoch}: the data or the samples per step differ",
                "use the same data, packing and global batch (--target_batch_size)",
            )
    return {"max_steps": facts.get("max_steps") or None}


def _trainer_state(facts: Mapping[str, Any]) -> TrainState:
    best = facts.get("best_metric")
    return TrainState(
        step=int(facts["global_step"]),
        epoch=float(facts.get("epoch") or 0.0),
        num_input_tokens=int(facts.get("num_input_tokens_seen") or 0),
        best_metric=float(best) if isinstance(best, (int, float)) and math.isfinite(best) else None,
    )


# -------------------------------------------------------------------------------------------------------------------- the best


def load_best(args: Arguments, trainer: Trainer, checkpointer: Checkpointer, coordinator: Coordinator) -> None:
    """At the end, with `--load_best_model_at_end`: brings back the step with the best metric, for final/."""
    state = trainer.state
    if not args.train.load_best_model_at_end or state.best_step < 0 or state.best_step == state.step:
        return
    folder = checkpointer.output_dir / checkpoint_files.checkpoint_name(state.best_step)
    metric = args.train.metric_for_best_model
    if not coordinator.broadcast(folder.is_dir()):
        log.warning(
            "the best model (step %d, %s %.6f) is not on disk any more: final/ is the last one", state.best_step, metric, state.best_metric
        )
        return
    log.info("loading the best model: step %d, %s %.6f", state.best_step, metric, state.best_metric or 0.0)
    try:
        checkpointer.find(str(folder))
    except UserError as error:
        log.warning("the best model (step %d) cannot be read: final/ is the last one. %s", state.best_step, error.findings[0].message)
        return
    saved = json.loads((folder / checkpoint_files.STATE_FILE).read_text(encoding="utf-8"))
    restore(folder, saved, trainer, checkpointer, coordinator)
