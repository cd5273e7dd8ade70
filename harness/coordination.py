"""Processes of a job: who we are, one log for all, agreement and barriers on the host.

Everything here that talks to other ranks does so over gloo on the host, with a time limit: it needs no GPU memory at the moment when
there is none, and it does not have to be in step with the collectives of a training step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness import node_facts, whereabouts
from harness.findings import Finding, UserError, has_errors, user_error

log = logging.getLogger("harness")


class RankFilter(logging.Filter):
    """Main process: everything. Other ranks: what was logged with `all_ranks=True`, and from `level` on; both tagged with the rank."""

    def __init__(self, process_index: int, num_processes: int, level: int) -> None:
        super().__init__()
        self.process_index, self.num_processes, self.level = process_index, num_processes, level

    def filter(self, record: logging.LogRecord) -> bool:
        everywhere = getattr(record, "all_ranks", False) or (self.process_index > 0 and record.levelno >= self.level)
        record.rank_tag = f"[rank {self.process_index}] " if everywhere and self.num_processes > 1 else ""
        return self.process_index == 0 or everywhere


class LogFile(logging.FileHandler):
    """A log file that may go away, or be on a full disk: then lines are on the console only, and the job goes on."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # a file that is opened with the first line is opened outside of logging's own care
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def setup_logging(output_dir: Path | None = None, *, debug: bool = False) -> None:
    """Sends the `harness` logger to the console and, when given an output folder, to its train.log.

    Works before a process group exists (the rank is the environment's) and may be called again: handlers are replaced, not added.
    The main process writes everything; other ranks only records logged with `extra={"all_ranks": True}`, errors, and into the file their
    warnings: almost every warning is the same on all ranks, and is on the console once.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr if rank else sys.stdout)]
    if output_dir is not None:
        # Appending in small writes is atomic enough for lines of several processes; a rank that only warns creates no file of its own.
        handlers.append(LogFile(output_dir / "train.log", encoding="utf-8", delay=True))
    for handler in handlers:
        is_file = isinstance(handler, logging.FileHandler)
        handler.addFilter(RankFilter(rank, size, logging.WARNING if is_file else logging.ERROR))
        handler.setFormatter(logging.Formatter(("%(asctime)s " if is_file else "") + "%(rank_tag)s%(message)s", "%Y-%m-%d %H:%M:%S"))
        log.addHandler(handler)
    log.setLevel(logging.DEBUG if debug else logging.INFO)
    log.propagate = False


# What gloo and NCCL say when a collective fails because another process does not take part.
_SIGNS_OF_A_LOST_PEER = ("Timed out", "timed out", "Timeout", "Connection closed", "Connection reset", "Broken pipe", "NCCL")
# gloo's threads let go of the last collective's tensors a moment after its end, and need Python's lock for it; torch holds that while it
# waits for them. Seen once in some hundred ends of processes.
_RELEASE_S = 0.05
SILENCE_S = 2.0


_SIGNS_OF_A_LIMIT = re.compile(r"[Tt]imed? ?out|TIMEOUT|within \d|monitoredBarrier", re.ASCII)


def is_over_the_limit(error: BaseException) -> bool:
    """True where a wait for other ranks has come to its limit, so that somewhere a rank hangs; false where one is known to have ended."""
    return isinstance(error, RuntimeError) and _SIGNS_OF_A_LIMIT.search(str(error)) is not None


def _asker(what: str) -> str:
    """Names a wait by the function that asked for it: "gather of checkpoint.finish"."""
    frame = sys._getframe(2)
    return f"{what} of {Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


class PeerFailedError(RuntimeError):
    """Another rank did not arrive, or reported a failure."""


@dataclasses.dataclass
class Coordinator:
    """This process among the others of the job.

    Attributes:
        num_processes, process_index, local_process_index: as accelerate names them.
        num_local_processes: processes of this job on this node.
        device: where this process computes.
        backend: backend of the default process group, "gloo" or "cpu:gloo,cuda:nccl".
        timeout_s: limit of every wait on other ranks.
        waited_s: how long this rank has waited for the others on the host; the one that the others wait for has the least.
        sequence_parallel_size: consecutive processes that have the same samples, a slice of the tokens each.
    """

    num_processes: int
    process_index: int
    local_process_index: int
    num_local_processes: int
    device: torch.device
    backend: str
    timeout_s: float
    host_group: Any = None
    checkpoint_group: Any = None
    store: dist.Store | None = None
    waited_s: float = 0.0
    sequence_parallel_size: int = 1

    @property
    def num_data_parallel(self) -> int:
        """How many different parts the samples of a step are cut into."""
        return self.num_processes // self.sequence_parallel_size

    @property
    def data_parallel_index(self) -> int:
        """Which of them is this process's."""
        return self.process_index // self.sequence_parallel_size

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    def _host_all_reduce(self, tensor: torch.Tensor, op: Any, what: str) -> torch.Tensor:
        if self.num_processes == 1:
            return tensor
        with self._waiting(what):
            dist.all_reduce(tensor, op=op, group=self.host_group)
        return tensor

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Something inside waits for all ranks, at most `timeout_s`. Raises PeerFailedError where it fails."""
        started = time.monotonic()
        try:
            with whereabouts.waiting(what):
                yield
        except RuntimeError as error:
            raise PeerFailedError(f"waiting for the other ranks in '{what}' failed on rank {self.process_index}: {error}") from None
        self.waited_s += time.monotonic() - started

    def sum(self, values: Sequence[float], what: str = "sum") -> list[float]:
        """Sums over ranks, in float64 on the host."""
        return self._host_all_reduce(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.SUM, what).tolist()

    def max(self, values: Sequence[float], what: str = "max") -> list[float]:
        """Maxima over ranks, in float64 on the host."""
        return self._host_all_reduce(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MAX, what).tolist()

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on every rank (small picklable objects)."""
        if self.num_processes == 1:
            return [value]
        values: list[Any] = [None] * self.num_processes
        with self._waiting(_asker("gather")):
            dist.all_gather_object(values, value, group=self.host_group)
        return values

    def broadcast(self, value: Any) -> Any:
        """The main process's `value`, on every rank."""
        if self.num_processes == 1:
            return value
        holder = [value]
        with self._waiting(_asker("broadcast")):
            dist.broadcast_object_list(holder, src=0, group=self.host_group)
        return holder[0]

    def wait_for_everyone(self, name: str) -> None:
        """A barrier on the host with a name.

        Raises:
            PeerFailedError: after `timeout_s`, naming the ranks that did not arrive (as far as the main process can tell).
        """
        if self.num_processes == 1:
            return
        limit = timedelta(seconds=self.timeout_s)
        with self._waiting(f"barrier {name}"):
            dist.monitored_barrier(group=self.host_group, timeout=limit, wait_all_ranks=True)

    def silent_ranks(self, error: BaseException) -> str:
        """For the report of a failure that comes from another rank: which one says nothing. Costs up to two seconds.

        Every rank that fails must call this, for it is how the others learn that it is there.

        Returns:
            The end of a sentence; empty where the error is this rank's own, or all ranks have failed with a word.
        """
        if self.store is None or self.num_processes == 1:
            return ""
        try:
            self.store.set(f"failed/{self.process_index}", "")
            if not any(sign in str(error) for sign in _SIGNS_OF_A_LOST_PEER):
                return ""
            silent = _absent(self.store, "failed", range(self.num_processes), SILENCE_S)
        except RuntimeError:
            silent = ["0"]  # whose store it was
        return f" (rank {', '.join(silent)} does not answer)" if silent else ""

    def renew_checkpoint_group(self) -> None:
        """Another group for the files of checkpoints, in which a collective has failed; called on all ranks, when none is in it any more.

        gloo closes the connections of a group with the first wait that comes to its limit, and every later one fails at once.

        Raises:
            PeerFailedError: the ranks do not find together again.
        """
        if self.checkpoint_group is None or self.num_processes == 1:
            return
        broken = self.checkpoint_group
        with self._waiting("a new group for checkpoints"):
            self.checkpoint_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
            dist.barrier(group=self.checkpoint_group)
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group(broken)

    def close(self) -> None:
        """Leaves the job in step with the others: gloo may abort a process that ends while another still talks to it."""
        if not dist.is_initialized():
            return
        try:
            self.wait_for_everyone("end")
            time.sleep(_RELEASE_S)
        finally:
            dist.destroy_process_group()


def meet(rank: int, size: int, timeout_s: float) -> dist.Store:
    """Waits until all ranks are there. torch's own rendezvous would only say how many are missing.

    Returns:
        The job's store: of the launcher where it keeps one, else of rank 0.

    Raises:
        PeerFailedError: after `timeout_s`; names the ranks that did not come.
        UserError: the ranks do not agree how many they are.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = timedelta(seconds=timeout_s)
    try:
        server = dist.TCPStore(host, port, size, rank == 0 and not of_launcher, limit, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        who = f"rank 0 cannot serve {host}:{port}" if rank == 0 else f"rank 0 was not there at {host}:{port} within {timeout_s:.0f} s"
        raise PeerFailedError(f"{who}: {str(error).splitlines()[0]}") from None
    # A launcher's store outlives its restarts of the ranks.
    store = dist.PrefixStore(f"harness/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", server)
    store.set(f"here/{rank}", str(size))
    own = f"{socket.gethostname()} {os.getpid()} {threading.get_native_id()}"
    if store.compare_set(f"claim/{rank}", "", own).decode() != own:
        store.set(_TWICE, str(rank))
        raise _twice(rank)
    if rank == 0:
        missing, odd = _missing(store, size, timeout_s)
        store.set("odd", odd)
        store.set("missing", ",".join(missing))
    try:
        store.wait(["missing", "odd", "here/0"], limit + timedelta(seconds=10))
        said = [store.get(name).decode() for name in ("missing", "odd", "here/0")]
    except RuntimeError:
        said = ["0", "", str(size)]
    absent, odd, size_of_first = said
    if size_of_first != str(size):
        odd = f"{rank} {size}"
    if absent or odd:
        with contextlib.suppress(RuntimeError):
            store.set(f"knows/{rank}", "")
            if rank == 0:  # its store ends with it
                there = [other for other in range(size) if store.check([f"here/{other}"])]
                _absent(store, "knows", there, 5.0)
    if odd:
        other, told = odd.split()
        if told == _TWICE:
            raise _twice(int(other))
        message = f"is {told} on rank {other} and {size_of_first} on rank 0"
        raise user_error("WORLD_SIZE", message, "start every rank with the same number of processes, or leave that to a launcher")
    if absent:
        raise PeerFailedError(f"rank {absent} of {size} did not arrive within {timeout_s:.0f} s (--ddp_timeout): see what it printed")
    return store


_TWICE = "twice"
_POLL_S = 0.02


def _twice(rank: int) -> UserError:
    return user_error("RANK", f"is {rank} on two processes", "start every process with a RANK of its own, or leave that to a launcher")


def _missing(store: dist.Store, size: int, timeout_s: float) -> tuple[list[str], str]:
    """Ranks that do not come within the limit; or none, and what is wrong with one, for which nobody is waited any more: "rank size" of one
    that knows another number of ranks, "rank twice" of one that there are two of.
    """
    deadline = time.monotonic() + timeout_s
    missing: list[str] = []
    for rank in range(size):
        while not store.check([f"here/{rank}"]):  # waits of a second would print a warning each
            if store.check([_TWICE]):
                return [], f"{store.get(_TWICE).decode()} {_TWICE}"
            if time.monotonic() > deadline:
                missing.append(str(rank))
                break
            time.sleep(_POLL_S)
        else:
            if (told := store.get(f"here/{rank}").decode()) != str(size):
                return [], f"{rank} {told}"
    return missing, ""


def _absent(store: dist.Store, sign: str, ranks: Iterable[int], timeout_s: float) -> list[str]:
    """Those of the ranks that have not left the sign within the limit."""
    deadline = time.monotonic() + timeout_s
    absent: list[str] = []
    for rank in ranks:
        try:
            store.wait([f"{sign}/{rank}"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except RuntimeError:
            absent.append(str(rank))
    return absent


def compare_ranks(store: dist.Store, rank: int, size: int, facts: Mapping[str, Any], timeout_s: float) -> list[Finding]:
    """What differs between the nodes and ranks of a job and is no reason to stop; the same on every rank.

    Raises:
        UserError: what is one: sizes, versions, code or arguments differ.
        PeerFailedError: a rank said nothing within the limit.
    """
    try:
        findings = node_facts.agree(store, rank, size, facts, timeout_s)
    except RuntimeError as error:
        raise PeerFailedError(f"comparing the ranks failed on rank {rank}: {str(error).splitlines()[0]}") from None
    if has_errors(findings):
        raise UserError(findings)
    return findings


def start(*, use_cpu: bool = False, timeout_s: float = 1800.0, arguments: Mapping[str, Any] | None = None) -> Coordinator:
    """Joins the job that the launcher's environment describes; alone, a job of one process.

    Args:
        use_cpu: compute on the CPU although there are GPUs.
        timeout_s: limit for collectives and barriers, seconds.
        arguments: the run's; ranks whose arguments differ are refused.

    Raises:
        UserError: more local processes than GPUs, or nodes or ranks that differ in what must be the same.
        PeerFailedError: not all ranks came; names those that did not.
    """
    environ = os.environ
    rank, size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    local_rank = int(environ.get("LOCAL_RANK", str(rank)))
    local_size = node_facts.num_local_processes(environ, size)
    use_cuda = torch.cuda.is_available() and not use_cpu
    if use_cuda and local_rank >= torch.cuda.device_count():
        raise user_error(
            "--num_processes",
            f"{local_size} processes on this node, but it has {torch.cuda.device_count()} GPUs",
            f"start at most {torch.cuda.device_count()} processes a node, or use --use_cpu",
        )
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    # Both backends in one group: gradients kept in host memory (offload) are reduced there too.
    backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
    timeout = timedelta(seconds=timeout_s)
    options: dict[str, Any] = {"backend": backend, "timeout": timeout}
    if use_cuda:
        options["device_id"] = device
    store: dist.Store | None = None
    if "MASTER_ADDR" in environ and "RANK" in environ:
        store = meet(rank, size, timeout_s)
        if size > 1:  # before the first collective, which may hang where they differ
            speaks = node_facts.of_several_nodes(environ) and local_rank == 0
            facts = (node_facts.facts_of_this_node if speaks else node_facts.facts_of_this_process)(arguments or {})
            findings = compare_ranks(store, rank, size, facts, timeout_s)
            for finding in findings if rank == 0 else []:
                log.warning("%s", finding.line())
        dist.init_process_group(store=store, rank=rank, world_size=size, **options)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
    state = Coordinator(size, rank, local_rank, local_size, device, backend, timeout_s, store=store)
    state.host_group = dist.new_group(backend="gloo", timeout=timeout)
    state.checkpoint_group = dist.new_group(backend="gloo", timeout=timeout)
    return state


class StopFlag:
    """A request to stop, made by signals; idempotent (a launcher sends the same signal several times).

    Attributes:
        outcome: "finished" or "preempted" once everything is on disk; from then on an impatient second Ctrl-C loses nothing.
        saves: training has begun, and asks whether it is to stop. Before, there is nothing to save.
    """

    def __init__(self) -> None:
        self.saves = False
        self.signal_name = ""
        self.asked_at_s = 0.0
        self.outcome = ""

    def ask(self, signal_name: str) -> None:
        if not self.signal_name:
            self.signal_name, self.asked_at_s = signal_name, time.monotonic()

    def __bool__(self) -> bool:
        return bool(self.signal_name)
