"""GPUs as NVML sees them, sampled off the training path; model FLOPs; and `harness monitor`, which watches a run by reading its folder.

    harness monitor out            live table of a run: loss, tokens/s, MFU, GPUs, events, time left
    harness monitor                this machine's cards and who uses them
    harness monitor out --json     one look, for programs

Works without a GPU: there is then nothing to sample. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.findings import Finding, FindingParser, format_findings, printable
from harness.metrics import METRICS_FILE, own_row, to_json_line
from harness.user_files import file_name, open_regular, parse_json, read_text

GIB = 2**30
_EXIT_FILE = "exit.json"

# Dense half-precision peak (bf16 with fp32 accumulation, fp16 on cards without bf16), FLOP/s, from the makers' data sheets. The first
# entry whose words are all in the device's name counts.
_PEAK_FLOPS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("GB200",), 2500e12),
    (("B300",), 2250e12),
    (("B200",), 2250e12),
    (("H200", "NVL"), 835e12),
    (("H200",), 989e12),
    (("GH200",), 989e12),
    (("H100", "PCIE"), 756e12),
    (("H100", "NVL"), 835e12),
    (("H100",), 989e12),
    (("H800",), 989e12),
    (("H20",), 148e12),
    (("A100",), 312e12),
    (("A800",), 312e12),
    (("L40S",), 362e12),
    (("L40",), 181e12),
    (("L4",), 121e12),
    (("A40",), 149.7e12),
    (("A30",), 165e12),
    (("A10G",), 70e12),
    (("A10",), 125e12),
    (("A6000",), 154.8e12),
    (("6000", "ADA"), 364e12),
    (("5090",), 209.5e12),
    (("4090",), 165.2e12),
    (("3090",), 71e12),
    (("V100",), 125e12),
    (("T4",), 65e12),
    (("MI355X",), 2300e12),
    (("MI325X",), 1307e12),
    (("MI300X",), 1307e12),
    (("MI250",), 383e12),
)


def peak_flops(device_name: str) -> float | None:
    """Dense half-precision FLOP/s of a card by its name ("NVIDIA H100 80GB HBM3"); None for an unknown one."""
    words = device_name.upper().replace("-", " ").split()
    for needed, flops in _PEAK_FLOPS:
        if all(word in words for word in needed):
            return flops
    return None


def model_flops_per_token(config: Any, seq_len: int, num_parameters: int, num_trainable: int | None = None) -> float:
    """FLOPs that one training token costs, forward and backward, without recomputation.

    6 per parameter that multiplies (2 forward, 2 for the input's gradient, 2 for the weight's, which frozen weights do not need), plus
    causal attention, counted once for the half that is not masked: QK^T and PV are 2 * 2 * seq/2 * heads * head_dim forward and twice that
    backward, so 6 * layers * heads * head_dim * seq. With a sliding window no token sees more than the window; linear attention is not
    counted. An embedding is a look-up and costs nothing; a tied one multiplies once, as the head. Of a mixture of experts only those that a
    token passes through count.

    The convention is that of PaLM's appendix B (https://arxiv.org/abs/2204.02311), with causal attention halved.

    Args:
        config: a Hugging Face config.
        seq_len: tokens per sample.
        num_parameters: all parameters, tied ones once.
        num_trainable: those that are trained; None: all.
    """
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()

    def value(*names: str, default: int = 0) -> int:
        found = next((each for name in names if (each := getattr(config, name, None)) is not None), default)
        return int(max(found, default=0) if isinstance(found, (list, tuple)) else found)  # layers of several sizes

    hidden = value("hidden_size", "n_embd", "d_model")
    num_layers = value("num_hidden_layers", "n_layer", "num_layers")
    num_heads = value("num_attention_heads", "n_head", default=1)
    head_dim = value("head_dim", default=hidden // max(num_heads, 1))
    vocabulary = value("vocab_size")
    looked_up = 0 if getattr(config, "tie_word_embeddings", False) else vocabulary * hidden
    if getattr(config, "model_type", "") in ("gpt2", "gpt_neo", "opt", "bloom", "gpt_bigcode"):
        looked_up += value("n_positions", "max_position_embeddings") * hidden  # learned positions
    num_experts = value("num_local_experts", "num_experts", "n_routed_experts")
    num_active = value("num_experts_per_tok", "moe_topk", default=num_experts)
    expert_size = 3 * hidden * value("moe_intermediate_size", "intermediate_size")
    num_dense_layers = value("first_k_dense_replace")
    idle = max(num_experts - num_active, 0) * expert_size * max(num_layers - num_dense_layers, 0)
    multiplying = max(num_parameters - looked_up - idle, 0)
    share = 1.0 if num_trainable is None or not num_parameters else min(num_trainable / num_parameters, 1.0)
    window = value("sliding_window") if getattr(config, "use_sliding_window", True) else 0
    windowed = min(seq_len, 2 * window) if window else seq_len  # a window is seen whole, not half of it on average
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
    context = sum({"full_attention": seq_len, "sliding_attention": windowed}.get(kind, 0) for kind in kinds)
    return (4 + 2 * share) * multiplying + 6.0 * num_heads * head_dim * context


@dataclasses.dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory on a card. user and command: None where they cannot be seen (another container's)."""

    pid: int
    memory_gib: float | None = None
    user: str | None = None
    command: str | None = None


@dataclasses.dataclass(frozen=True)
class GpuSample:
    """One look at one card. None: the card does not say.

    Attributes:
        index: NVML's number (the order of nvidia-smi), which CUDA_VISIBLE_DEVICES counts in too.
        throttled: why the clock is held down: "power cap", "hardware slowdown", "thermal", ...
        ecc_errors: uncorrected memory errors since the driver was loaded.
    """

    index: int
    name: str
    uuid: str
    memory_used_gib: float
    memory_total_gib: float
    utilization_percent: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    sm_clock_mhz: int | None = None
    throttled: tuple[str, ...] = ()
    ecc_errors: int | None = None
    processes: tuple[GpuProcess, ...] = ()


# Bits of NVML's clock event reasons that mean slower than asked for (idle, application clocks and sync boost do not).
_THROTTLE: dict[int, str] = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """pynvml, started; None where there is no driver, no card or no package."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # pynvml raises its own types, and OSError for a broken library
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _sample(library: Any, index: int, with_processes: bool) -> GpuSample:
    handle = library.nvmlDeviceGetHandleByIndex(index)

    def ask(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception:  # not supported by this card or this driver
            return None

    memory = ask(lambda: library.nvmlDeviceGetMemoryInfo(handle))
    rates = ask(lambda: library.nvmlDeviceGetUtilizationRates(handle))
    power = ask(lambda: library.nvmlDeviceGetPowerUsage(handle))
    limit = ask(lambda: library.nvmlDeviceGetEnforcedPowerLimit(handle))
    reasons = ask(lambda: library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    ecc = ask(lambda: library.nvmlDeviceGetTotalEccErrors(handle, library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC))
    return GpuSample(
        index=index,
        name=_text(library.nvmlDeviceGetName(handle)),
        uuid=_text(ask(lambda: library.nvmlDeviceGetUUID(handle)) or ""),
        memory_used_gib=round(memory.used / GIB, 3) if memory else 0.0,
        memory_total_gib=round(memory.total / GIB, 3) if memory else 0.0,
        utilization_percent=rates.gpu if rates else None,
        power_w=None if power is None else round(power / 1000, 1),
        power_limit_w=None if limit is None else round(limit / 1000, 1),
        temperature_c=ask(lambda: library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)),
        sm_clock_mhz=ask(lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)),
        throttled=tuple(name for bit, name in _THROTTLE.items() if reasons & bit),
        ecc_errors=ecc,
        processes=_processes(ask(lambda: library.nvmlDeviceGetComputeRunningProcesses(handle)) or ()) if with_processes else (),
    )


def _processes(found: Sequence[Any]) -> tuple[GpuProcess, ...]:
    import psutil

    result = []
    for entry in found:
        user = command = None
        with contextlib.suppress(psutil.Error, KeyError):
            process = psutil.Process(entry.pid)
            command = " ".join(process.cmdline())[:200] or process.name()
            user = process.username()
        used = entry.usedGpuMemory
        result.append(GpuProcess(entry.pid, None if used is None else round(used / GIB, 3), user, command))
    return tuple(result)


def sample_gpus(indices: Sequence[int] | None = None, *, with_processes: bool = False) -> list[GpuSample]:
    """One look at the cards; empty on a machine without.

    Args:
        indices: NVML's numbers; None: all. Numbers that do not exist are left out.
    """
    with nvml() as library:
        if library is None:
            return []
        count = library.nvmlDeviceGetCount()
        chosen = range(count) if indices is None else [index for index in indices if 0 <= index < count]
        return [_sample(library, index, with_processes) for index in chosen]


def visible_indices(environ: Mapping[str, str], uuids: Sequence[str]) -> list[int]:
    """NVML's numbers of the cards that CUDA sees, in CUDA's order; like CUDA it stops at the first entry that does not exist.

    Args:
        uuids: of all cards, in NVML's order.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(range(len(uuids)))
    result: list[int] = []
    for entry in (part.strip() for part in chosen.split(",")):
        matches = [index for index, uuid in enumerate(uuids) if entry and (uuid.startswith(entry) or entry == str(index))]
        if len(matches) != 1:
            break
        result.append(matches[0])
    return result


class GpuMonitor:
    """Samples this node's cards in a thread of its own and hands each look to `write`.

    Args:
        write: takes one row, such as `lambda row: metrics.log(row, kind="gpu")`. Called from the thread.
        indices: NVML's numbers of the cards of this job; None: those that CUDA_VISIBLE_DEVICES leaves.
        interval_s: seconds between looks.
        node: put into each row on jobs of several nodes.
        step: returns the current optimizer step.
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None],
        indices: Sequence[int] | None = None,
        interval_s: float = 10.0,
        node: int | None = None,
        step: Callable[[], int] | None = None,
    ) -> None:
        if not interval_s > 0:
            raise ValueError(f"interval_s must be positive, not {interval_s}")
        self._write, self._indices, self._interval_s, self._node, self._step = write, indices, interval_s, node, step
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> bool:
        """Starts sampling; False (and no thread) on a machine without cards."""
        cards = sample_gpus()
        if not cards:
            return False
        if self._indices is None:
            self._indices = visible_indices(os.environ, [card.uuid for card in cards])
        self._thread = threading.Thread(target=self._run, name="gpu-monitor", daemon=True)
        self._thread.start()
        return True

    def _run(self) -> None:
        with nvml() as library:  # one start for all looks: it takes milliseconds, a look microseconds
            while library is not None:
                try:
                    self._write(self.row([_sample(library, index, False) for index in self._indices or ()]))
                except Exception as error:  # a card that fell off the bus must not take the training with it
                    logging.getLogger("harness").warning("GPU monitor stopped: %s", error)
                    return
                if self._stop.wait(self._interval_s):
                    return

    def row(self, samples: Sequence[GpuSample]) -> dict[str, Any]:
        """The row of one look: a short mapping for each card."""
        row: dict[str, Any] = {}
        if self._node is not None:
            row["node"] = self._node
        if self._step is not None:
            row["at_step"] = self._step()
        row["gpus"] = [_short(sample) for sample in samples]
        return row

    def stop(self) -> None:
        """Ends the thread; waits at most two seconds for it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
            self._thread = None


class LatestRow:
    """The newest row of a monitor, for somebody who takes one now and then."""

    def __init__(self) -> None:
        self._row: dict[str, Any] | None = None
        self._lock = threading.Lock()

    def put(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._row = row

    def take(self) -> dict[str, Any] | None:
        """The newest row that nobody has taken; None where there is none."""
        with self._lock:
            row, self._row = self._row, None
        return row


def _short(sample: GpuSample) -> dict[str, Any]:
    row = {
        "gpu": sample.index,
        "utilization_percent": sample.utilization_percent,
        "memory_used_gib": sample.memory_used_gib,
        "memory_total_gib": sample.memory_total_gib,
        "power_w": sample.power_w,
        "temperature_c": sample.temperature_c,
        "throttled": list(sample.throttled) or None,
    }
    return {name: value for name, value in row.items() if value is not None}


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15


def _with_cards(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose cards, if it has any, are what they should be: a file may be torn, or changed by hand."""
    if "gpus" not in row:
        return row
    cards = row["gpus"] if isinstance(row["gpus"], list) else []
    return {
        **row,
        "gpus": [{**card, "throttled": _words(card.get("throttled"))} for card in cards if isinstance(card, dict) and "gpu" in card],
    }


def _words(value: Any) -> list[str]:
    return list(map(str, value)) if isinstance(value, list) else []


class RunFollower:
    """Reads what a run writes, as it grows, without touching the run.

    Attributes:
        train: the newest train row; empty before the first.
        evaluation: the newest eval row.
        events: the last few events.
        gpus: node -> its newest look at its cards.
        unreadable: files that are there and cannot be read, each with the reason.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.unreadable: dict[str, str] = {}
        self._reset()

    def _reset(self) -> None:
        self.train: dict[str, Any] = {}
        self.evaluation: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.gpus: dict[int, dict[str, Any]] = {}
        self._step_times_s: list[float] = []
        self._offset = 0
        self._rest = b""

    def poll(self) -> None:
        """Reads what was added since the last call; a half-written line waits for its end."""
        path = self.folder / METRICS_FILE
        self.unreadable.pop(METRICS_FILE, None)
        try:
            size = path.stat().st_size
            if size < self._offset:  # another file under the same name
                self._reset()
            with open_regular(path) as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            self.unreadable[METRICS_FILE] = f"{path}: {error.strerror or error}"
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                self._take(own_row(line.decode("utf-8", errors="replace")))

    def _take(self, row: dict[str, Any]) -> None:
        row = _with_cards(row)
        kind = row.get("kind")
        if kind == "train":
            self.train, self.summary = row, {}
            if isinstance(row.get("step_time_s"), (int, float)):
                self._step_times_s = [*self._step_times_s[-19:], float(row["step_time_s"])]
        elif kind == "eval":
            self.evaluation = row
        elif kind == "event":
            self.events = [*self.events[-7:], row]
            self.summary = {}
        elif kind == "gpu":
            self.gpus[int(row.get("node") or 0)] = row
        elif kind == "summary":
            self.summary = row

    def exit(self) -> dict[str, Any] | None:
        """How the run ended, if it has and nothing was written after."""
        self.unreadable.pop(_EXIT_FILE, None)
        try:
            ended = parse_json(read_text(self.folder / _EXIT_FILE))
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            self.unreadable[_EXIT_FILE] = f"{self.folder / _EXIT_FILE}: {error.strerror or error}"
            return None
        newest = max((row.get("time_s", 0.0) for row in (self.train, *self.events[-1:])), default=0.0)
        if not isinstance(ended, dict):
            return None
        ended_s = ended.get("time", 0.0)
        return ended if _is_finite(ended_s) and ended_s >= newest - 1.0 else None

    def eta_s(self, now: float) -> float | None:
        """Seconds until the last step, from the median of recent step times; None where they are not known or the run has ended."""
        step, max_steps = self.train.get("step"), self.train.get("max_steps")
        if not self._step_times_s or step is None or max_steps is None or self.exit() is not None:
            return None
        left_s = (max_steps - step) * statistics.median(self._step_times_s)
        return max(0.0, left_s - max(0.0, now - self.train.get("time_s", now)))

    def status(self, now: float) -> dict[str, Any]:
        """Everything known, as one mapping."""
        rows = [self.train, self.evaluation, *self.events[-1:], *self.gpus.values()]
        newest = max((row["time_s"] for row in rows if "time_s" in row), default=None)
        ended = self.exit()
        eta_s = self.eta_s(now)
        nothing = "unknown" if self.unreadable else "waiting"
        return {
            "folder": str(self.folder),
            "state": nothing if newest is None and ended is None else "running" if ended is None else "ended",
            "seconds_since_last_row": None if newest is None else round(max(0.0, now - newest), 1),
            "eta_s": None if eta_s is None else round(eta_s, 1),
            "train": self.train,
            "evaluation": self.evaluation,
            "summary": self.summary,
            "events": self.events,
            "gpus": [dict(card, node=node) for node, row in sorted(self.gpus.items()) for card in row.get("gpus", [])],
            "exit": ended,
            "unreadable": list(self.unreadable.values()),
        }


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _number(value: Any, digits: int = 4) -> str:
    """To so many digits, with separators; whole where it is large."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def format_status(status: Mapping[str, Any]) -> list[str]:
    """A run's status as lines of text."""
    train, evaluation = status["train"], status["evaluation"]
    head = f"{status['folder']}: {status['state']}"
    if status["seconds_since_last_row"] is not None and status["state"] == "running":
        head += f", last row {_duration(status['seconds_since_last_row'])} ago"
    lines = [head]
    if train:
        total, mfu = train.get("max_steps"), train.get("mfu")
        step = train.get("step")
        share = f" ({100 * step / total:.1f}%)" if total and step is not None else ""
        figures = {
            "loss": _number(train.get("loss"), 5),
            "lr": _number(train.get("learning_rate")),
            "grad norm": _number(train.get("grad_norm")),
            "tokens/s per GPU": _number(train.get("tokens_per_second_per_gpu"), 6),
            "MFU": "-" if mfu is None else f"{100 * mfu:.1f}%",
            "peak GiB": _number(train.get("peak_memory_gib")),
            "micro-batch": f"{train.get('micro_batch_size', '-')} x {train.get('gradient_accumulation_steps', '-')}",
        }
        epoch, left = _number(train.get("epoch")), _duration(status["eta_s"])
        lines.append(f"step {_number(step)}/{total or '?'}{share}   epoch {epoch}   left {left}")
        lines.append("   ".join(f"{name} {text}" for name, text in figures.items()))
    if evaluation:
        values = "   ".join(f"{name} {_number(value, 5)}" for name, value in evaluation.items() if name.startswith("eval_"))
        lines.append(f"evaluation at step {evaluation.get('step', '?')}: {values}")
    for card in status["gpus"]:
        used, total = card.get("memory_used_gib"), card.get("memory_total_gib")
        flag = f"   throttled: {', '.join(card['throttled'])}" if card.get("throttled") else ""
        lines.append(
            f"node {card['node']} gpu {card['gpu']}   {_number(card.get('utilization_percent'))}%   {_number(used)}/{_number(total)} GiB   "
            f"{_number(card.get('power_w'))} W   {_number(card.get('temperature_c'))} C{flag}"
        )
    for event in status["events"]:
        details = ", ".join(f"{name}={value}" for name, value in event.items() if name not in ("kind", "time_s", "event", "life_began_s"))
        lines.append(f"event {event.get('event')}: {details}")
    lines += [f"cannot be read: {each}" for each in status["unreadable"]]
    if status["exit"]:
        lines.append(f"exit code {status['exit'].get('code')}: {status['exit'].get('reason', '')}")
    return [printable(line) for line in lines]


def format_gpus(samples: Sequence[GpuSample]) -> list[str]:
    """This machine's cards and their processes as lines of text."""
    if not samples:
        return ["no NVIDIA GPU found on this machine"]
    lines = []
    for card in samples:
        flag = f"  throttled: {', '.join(card.throttled)}" if card.throttled else ""
        lines.append(
            f"[{card.index}] {card.name}  {_number(card.temperature_c)} C  {_number(card.utilization_percent)}%  "
            f"{card.memory_used_gib:.1f}/{card.memory_total_gib:.1f} GiB  {_number(card.power_w)}/{_number(card.power_limit_w)} W{flag}"
        )
        for process in card.processes:
            memory = "-" if process.memory_gib is None else f"{process.memory_gib:.2f} GiB"
            lines.append(f"      {process.user or '?'}  pid {process.pid}  {memory}  {process.command or ''}".rstrip())
    return [printable(line) for line in lines]


def _parser() -> FindingParser:
    parser = FindingParser(prog="harness monitor", description="Watches a run through its folder, or this machine's GPUs.")
    parser.add_argument("run", nargs="?", type=file_name, help="the run's output folder; without it: the cards of this machine")
    parser.add_argument("--once", action="store_true", help="one look instead of a live view")
    parser.add_argument("--json", action="store_true", help="one look, as JSON")
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between looks (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The `harness monitor` command.

    Returns:
        0; 1 where one look found files that cannot be read; 2 for wrong input.
    """
    options, problems = _parser().read(argv)
    if not options.interval > 0:
        problems.append(Finding("error", "--interval", f"must be positive, not {options.interval}"))
    if options.run is not None and not Path(options.run).is_dir():
        problems.append(Finding("error", options.run, "is not a folder", "give a run's --output_dir"))
    elif options.run is not None and not os.access(options.run, os.X_OK):
        problems.append(Finding("error", options.run, f"cannot be read: {os.strerror(errno.EACCES)}", "give a folder that you may read"))
    if problems:
        print(format_findings(problems), file=sys.stderr)
        return 2
    follower = RunFollower(options.run) if options.run is not None else None

    def look() -> tuple[Any, list[str]]:
        if follower is None:
            samples = sample_gpus(with_processes=True)
            return {"gpus": [dataclasses.asdict(sample) for sample in samples]}, format_gpus(samples)
        follower.poll()
        status = follower.status(time.time())
        return status, format_status(status)

    if options.json:
        print(to_json_line(look()[0]))
        return int(follower is not None and bool(follower.unreadable))
    if options.once or not sys.stdout.isatty():
        print("\n".join(look()[1]))
        return int(follower is not None and bool(follower.unreadable))
    _live(lambda: look()[1], options.interval)
    return 0


def _live(look: Callable[[], list[str]], interval_s: float) -> None:
    """Shows `look` again and again until Ctrl-C."""
    from rich.live import Live
    from rich.text import Text

    with contextlib.suppress(KeyboardInterrupt), Live(Text("\n".join(look())), auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(Text("\n".join(look())), refresh=True)


if __name__ == "__main__":
    sys.exit(main())
