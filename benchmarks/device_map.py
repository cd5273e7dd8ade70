"""Tokens per second of one process over several cards: pipelined micro-batches against accelerate's dispatch, same map, same job, one run.

    python benchmarks/device_map.py --models 1b,8b --micro_batches 8,16 --output device_map.json

For each model and number of micro-batches, on the map that `balanced` makes for training: accelerate's plain dispatch; our pipeline with
the same kernels (all micro-batches in flight, and as many as there are cards); the pipeline as `run_clm.py` trains with
`--torch_compile False`, with the loss in pieces; and as it trains by default, with compiled blocks. Then the peaks under accelerate's
`auto` map and under `dynamic`, and the same job on one card where it fits. A step is forward and backward of all micro-batches (bf16
weights, activation checkpointing) and one AdamW update (learning rate 0, so that all rows compute the same). The model has random weights;
nothing is downloaded. Any number of cards.

`--profile` says where the time of a step goes: how long each card computes, how long the host needs to give it the work.
`--smoke` runs a tiny model on CPU, to see that the script works; its speeds mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from harness.blocks import Blocks
from harness.engines.device_map import fill_placed
from harness.loss import install_loss
from harness.model_units import MapJob, device_of, find_units
from harness.modeling import EmptyModel
from harness.partition import Device, loads_of, pipeline_speedup
from harness.pipeline import Pipeline
from harness.placement import USABLE_SHARE, Placing, choose_device_map, free_memory, meta_model, step_times, torch_device

LOSS_CHUNK_SIZE = 1024  # what training has by default
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 512},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 128256},
}


class Bench:
    """One machine's cards (or, in a smoke run, labels of one CPU) and one job."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.smoke = options.smoke
        self.free = {0: 10**11, 1: 10**11} if self.smoke else free_memory()
        self.cards = list(self.free)
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def config(self, model: str) -> Any:
        from transformers import LlamaConfig

        heads = SHAPES[model]["num_attention_heads"]
        config = LlamaConfig(**SHAPES[model], num_key_value_heads=min(8, heads), max_position_embeddings=8192, tie_word_embeddings=False)
        config.use_cache = False
        return config

    def job(self, micro_batches: int) -> MapJob:
        return MapJob(
            training_bytes_per_param=6.0,  # bf16 gradients and two bf16 states
            num_tokens=self.options.micro_batch_size * self.options.seq,
            in_flight=micro_batches,
            activation_checkpointing=self.options.checkpointing == "full",
            loss_chunk_size=LOSS_CHUNK_SIZE,
        )

    def choose(self, config: Any, strategy: str, micro_batches: int) -> dict[str, Device]:
        """The map that training gets; `facts` of it go into the rows: blocks a card, and how much the schedule could win."""
        usable = {card: int(size * USABLE_SHARE) for card, size in self.free.items()}
        model, job = meta_model(config, torch.bfloat16), self.job(micro_batches)
        choice = choose_device_map(model, strategy, Placing(cards=usable, free=self.free, job=job))
        units = find_units(model, job)
        places = [self.cards.index(device_of(choice.device_map, unit.names[0])) for unit in units]
        self.facts = {
            "blocks": [int(number) for number in loads_of([float(unit.is_block) for unit in units], places, len(self.cards))],
            "bound": round(pipeline_speedup(loads_of(step_times(units, job), places, len(self.cards)), micro_batches), 2),
            "imbalance": round(choice.report.imbalance_ratio, 3),
        }
        print(f"map {strategy}, {micro_batches} micro-batches: {self.facts}", flush=True)
        return choice.device_map

    def build(self, config: Any, device_map: dict[str, Device]) -> Any:
        """The model of random weights, placed, its map in `hf_device_map`."""
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        with init_empty_weights(include_buffers=False), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.tie_weights()
        places: dict[str, Device] = dict.fromkeys(device_map, "cpu") if self.smoke else device_map
        model = fill_placed(EmptyModel(model, model.config, None, torch.bfloat16, 0), places).train()
        model.hf_device_map = dict(device_map)
        return model

    def tokens(self, micro_batches: int, vocab_size: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.options.micro_batch_size, self.options.seq)
        return [torch.randint(0, vocab_size, shape, generator=generator) for _ in range(micro_batches)]

    def synchronize(self) -> None:
        for card in self.cards if not self.smoke else ():
            torch.cuda.synchronize(card)

    def measure(self, model: Any, step: Callable[[], list[torch.Tensor]]) -> dict[str, Any]:
        """Median time of a step with its update, peaks of each card, loss and gradient norm of the first step."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=not self.smoke)
        times: list[float] = []
        first: dict[str, float] = {}
        for repeat in range(self.options.repeats + 1):
            if repeat == 1:  # behind the first, which allocates
                for card in self.cards if not self.smoke else ():
                    torch.cuda.reset_peak_memory_stats(card)
            self.synchronize()
            started = time.perf_counter()
            losses = step()
            if repeat == 0:
                norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])
                first = {"first_loss": sum(float(loss) for loss in losses), "first_grad_norm": float(norm)}
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.synchronize()
            times.append(time.perf_counter() - started)
        seconds = sorted(times[1:])[len(times[1:]) // 2]
        peaks = [] if self.smoke else [round(torch.cuda.max_memory_allocated(card) / 2**30, 2) for card in self.cards]
        seen = profile(self.cards, step) if self.options.profile and not self.smoke else {}
        model.zero_grad(set_to_none=True)
        return {"step_s": round(seconds, 4), **first, "peak_gib": peaks, **seen}

    def row(self, **facts: Any) -> None:
        tokens = facts["micro_batches"] * self.options.micro_batch_size * self.options.seq
        facts["tokens_per_second"] = round(tokens / facts["step_s"]) if "step_s" in facts else None
        self.rows.append(facts)
        print(json.dumps(facts), flush=True)


@contextlib.contextmanager
def freed(bench: Bench) -> Iterator[None]:
    """Everything made inside is gone afterwards, also after running out of memory, which becomes a row's text."""
    failed = ""
    try:
        yield
    except torch.OutOfMemoryError as error:
        failed = str(error).splitlines()[0]
    if failed:
        print(json.dumps({"out_of_memory": failed}), flush=True)
    gc.collect()
    if not bench.smoke:
        torch.cuda.empty_cache()


class Clocks:
    """Within, a thread notes what the cards' clocks and power are."""

    def __init__(self, cards: Sequence[Device]) -> None:
        self.cards, self.seen = cards, [[] for _ in cards]  # type: ignore[var-annotated]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # without NVML there is nothing to note
            import pynvml

            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(int(card)) for card in self.cards]
            while not self._ended.wait(0.05):
                for handle, seen in zip(handles, self.seen, strict=True):
                    clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
                    seen.append((clock, pynvml.nvmlDeviceGetPowerUsage(handle) / 1000))

    def __enter__(self) -> Clocks:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()

    def means(self) -> dict[str, list[int]]:
        """Mean MHz and W of each card."""
        rows = [seen or [(0, 0.0)] for seen in self.seen]
        return {name: [round(sum(one[index] for one in row) / len(row)) for row in rows] for index, name in enumerate(("mhz", "watt"))}


class Watched(Pipeline):
    """Notes how long the host needs for each kind of task."""

    def _advance(self, timeline: Any, task: Any, results: Any) -> None:
        kind = "forward" if task.position < 0 else "backward"
        started = time.perf_counter()
        super()._advance(timeline, task, results)
        host = self.__dict__.setdefault("host", {"forward": [], "backward": []})
        host[kind].append(time.perf_counter() - started)

    def means(self) -> dict[str, Any]:
        """Tasks of the steps since the last call, and the host's seconds in them."""
        host = self.__dict__.pop("host", {})
        return {kind: {"tasks": len(times), "host_s": round(sum(times), 3)} for kind, times in host.items()}


def profile(cards: Sequence[Device], step: Callable[[], Any]) -> dict[str, Any]:
    """One step, once plain with clocks, once under CUPTI: seconds in which each card runs kernels, and their number."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    def run() -> tuple[float, float]:
        started = time.perf_counter()
        step()
        given = time.perf_counter() - started
        for card in cards:
            torch.cuda.synchronize(card)
        return given, time.perf_counter() - started

    with Clocks(cards) as clocks:
        given, wall = run()
    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        _, slower = run()
    spans: dict[int, list[tuple[int, int]]] = {int(card): [] for card in cards}
    longest: dict[str, int] = {}
    for event in seen.profiler.kineto_results.events():
        copies = event.name().startswith(("Memcpy", "Memset"))
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.device_index() in spans and not copies:
            spans[event.device_index()].append((event.start_ns(), event.start_ns() + event.duration_ns()))
            longest[event.name()[:60]] = longest.get(event.name()[:60], 0) + event.duration_ns()
    busy, gaps = [], []
    for intervals in spans.values():
        total, idle, end = 0, [], 0
        for start, stop in sorted(intervals):
            if end and start - end > 2_000_000:
                idle.append(start - end)
            total += max(0, stop - max(start, end))
            end = max(end, stop)
        busy.append(round(total / 1e9, 3))
        gaps.append([len(idle), round(sum(idle) / 1e9, 3)])
    top = sorted(longest.items(), key=lambda one: -one[1])[:6]
    return {
        "profile": {
            "wall_s": round(wall, 3),
            "host_s": round(given, 3),
            "wall_profiled_s": round(slower, 3),
            "busy_s": busy,
            "kernels": [len(intervals) for intervals in spans.values()],
            "gaps_over_2ms": gaps,
            **clocks.means(),
            "longest_kernels_s": {name: round(total / 1e9, 3) for name, total in top},
        }
    }


def hf_loss(model: Any, ids: torch.Tensor, labels: torch.Tensor, num: int) -> torch.Tensor:
    return model(input_ids=ids, labels=labels).loss / num


@contextlib.contextmanager
def running_as(bench: Bench, model: Any, trained: bool, compiled: bool) -> Iterator[None]:
    """Within, blocks are as they are or compiled; `trained` has the loss in pieces, as run_clm.py has it."""
    blocks = Blocks(model, "inductor" if compiled and not bench.smoke else None)
    blocks.set_checkpointing(bench.options.checkpointing)
    if trained:
        install_loss(model, LOSS_CHUNK_SIZE, compiled=blocks.is_compiled)
    try:
        yield
    finally:
        for module in (*blocks.units, model):
            module.__dict__.pop("forward", None)


def plain_row(bench: Bench, name: str, model: Any, num: int, kind: str, *, trained: bool = False, compiled: bool = False) -> None:
    """One micro-batch after the other; on several cards through accelerate's dispatch."""
    device_map = model.hf_device_map
    cards = sorted({device for device in device_map.values() if isinstance(device, int)})
    first = "cpu" if bench.smoke else torch_device(cards[0])
    batches = [ids.to(first) for ids in bench.tokens(num, model.config.vocab_size)]
    tokens = num * bench.options.micro_batch_size * (bench.options.seq - 1)

    def step() -> list[torch.Tensor]:
        losses = []
        for ids in batches:
            loss = model(input_ids=ids, labels=ids) / tokens if trained or compiled else hf_loss(model, ids, ids, num)
            loss.backward()
            losses.append(loss.detach())
        return losses

    with running_as(bench, model, trained or compiled, compiled):
        if len(cards) > 1 and not bench.smoke:
            from accelerate import dispatch_model
            from accelerate.hooks import remove_hook_from_module

            dispatch_model(model, device_map)
            facts = bench.measure(model, step)
            remove_hook_from_module(model, recurse=True)
            for module in model.modules():  # it leaves each module's forward as an attribute of the instance
                module.__dict__.pop("forward", None)
        else:
            facts = bench.measure(model, step)
    bench.row(model=name, micro_batches=num, kind=kind, **bench.facts, **facts)


def piped_row(
    bench: Bench,
    name: str,
    model: Any,
    num: int,
    kind: str,
    *,
    depth: int = 0,
    trained: bool = False,
    compiled: bool = False,
    **options: Any,
) -> None:
    """Our pipeline on the model's map."""
    places: dict[str, Any] = model.hf_device_map
    if bench.smoke:
        places = {part: f"card {place}" for part, place in places.items()}
    with running_as(bench, model, trained or compiled, compiled):
        pipeline = Watched(model, places, recompute=bench.options.checkpointing != "none", **options)
        start = torch.device("cpu") if bench.smoke else torch_device(pipeline.input_device)
        end = torch.device("cpu") if bench.smoke else torch_device(pipeline.head_device)
        inputs = [(ids.to(start), ids.to(end)) for ids in bench.tokens(num, model.config.vocab_size)]
        tokens = num * bench.options.micro_batch_size * (bench.options.seq - 1)

        def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> Callable[[], torch.Tensor]:
            if trained or compiled:
                return lambda: model(input_ids=ids, labels=labels) / tokens
            return lambda: hf_loss(model, ids, labels, num)

        calls = [loss_of(*pair) for pair in inputs]

        def step() -> list[torch.Tensor]:
            pipeline.means()
            return pipeline.run(calls, depth)

        facts = bench.measure(model, step)
        if bench.options.profile:
            facts["tasks"] = pipeline.means()
        pipeline.close()
    bench.row(model=name, micro_batches=num, kind=kind, depth=depth or num, **bench.facts, **facts)


def rows_of_speed(bench: Bench, name: str, config: Any, num: int, *, first: bool) -> None:
    model = bench.build(config, bench.choose(config, "balanced", num))
    plain_row(bench, name, model, num, "accelerate")
    piped_row(bench, name, model, num, "pipeline")
    if bench.options.profile:
        piped_row(bench, name, model, num, "pipeline, whole stretches", blocks_at_once=0)
    elif first:
        piped_row(bench, name, model, num, "pipeline, depth = cards", depth=len(bench.cards))
    piped_row(bench, name, model, num, "pipeline, --torch_compile False", trained=True)
    piped_row(bench, name, model, num, "pipeline, as trained", compiled=True)


def rows_of_one_card(bench: Bench, name: str, config: Any, num: int) -> None:
    bench.facts = {}
    model = bench.build(config, {"": bench.cards[0]})
    plain_row(bench, name, model, num, "one card")
    plain_row(bench, name, model, num, "one card, --torch_compile False", trained=True)
    plain_row(bench, name, model, num, "one card, as trained", compiled=True)


def run_model(bench: Bench, name: str) -> None:
    config = bench.config(name)
    numbers = [int(number) for number in bench.options.micro_batches.split(",")]
    for num in numbers:
        with freed(bench):
            rows_of_speed(bench, name, config, num, first=num == numbers[0])
    if bench.options.profile:
        return
    auto = bench.choose(config, "auto", numbers[0])
    with freed(bench):
        piped_row(bench, name, bench.build(config, auto), numbers[0], "map auto, as trained", compiled=True)
    dynamic = bench.choose(config, "dynamic", numbers[0])
    if dynamic == auto:
        print(f"{name}: dynamic keeps auto", flush=True)
    else:
        with freed(bench):
            piped_row(bench, name, bench.build(config, dynamic), numbers[0], "map dynamic, as trained", compiled=True)
    if name != "8b":
        with freed(bench):
            rows_of_one_card(bench, name, config, numbers[0])


def link() -> str:
    """What joins the first two cards: NVLink, PCIe with peer access, or copies through the host."""
    if torch.cuda.device_count() < 2:
        return "none"
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        lanes = 0
        for index in range(pynvml.NVML_NVLINK_MAX_LINKS):
            with contextlib.suppress(pynvml.NVMLError):
                lanes += pynvml.nvmlDeviceGetNvLinkState(handle, index) == pynvml.NVML_FEATURE_ENABLED
        if lanes:
            return f"NVLink, {lanes} links"
    return "PCIe, peer access" if torch.cuda.can_device_access_peer(0, 1) else "PCIe through the host"


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds to each row its speed against accelerate's with as many micro-batches, and against the same job on one card."""
    plain = {(row["model"], row["micro_batches"]): row for row in rows if row["kind"] == "accelerate"}
    single = {(row["model"], row["micro_batches"], row["kind"]): row for row in rows if row["kind"].startswith("one card")}
    for row in rows:
        key = (row["model"], row["micro_batches"])
        if key in plain:
            row["against_accelerate"] = round(row["tokens_per_second"] / plain[key]["tokens_per_second"], 3)
            row["loss_difference"] = abs(row["first_loss"] - plain[key]["first_loss"])
            row["grad_norm_ratio"] = round(row["first_grad_norm"] / plain[key]["first_grad_norm"], 6)
        manner = next((manner for manner in (", as trained", ", --torch_compile False") if manner in row["kind"]), "")
        alone = single.get((*key, "one card" + manner))
        if alone is not None:
            row["percent_of_one_card"] = round(100 * row["tokens_per_second"] / alone["tokens_per_second"], 1)


def table(rows: list[dict[str, Any]]) -> str:
    heads = ("model", "mb", "what", "blocks", "bound", "tok/s", "x accelerate", "% of one card", "loss diff", "peak GiB a card")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        blocks = "+".join(map(str, row.get("blocks", [])))
        loss = f"{row['loss_difference']:.1e}" if "loss_difference" in row else ""
        cells = [row["model"], row["micro_batches"], row["kind"], blocks, row.get("bound", ""), row["tokens_per_second"]]
        cells += [row.get("against_accelerate", ""), row.get("percent_of_one_card", ""), loss, " ".join(map(str, row["peak_gib"]))]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default="1b,8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--micro_batches", default="8,16", help="micro-batches of a step")
    parser.add_argument("--micro_batch_size", type=int, default=1, help="samples of a micro-batch")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps; the median counts")
    parser.add_argument("--checkpointing", choices=["none", "full"], default="full", help="activation checkpointing")
    parser.add_argument("--profile", action="store_true", help="say where the time goes, instead of the rows on other maps")
    parser.add_argument("--output", default=None, help="JSON file for the results")
    parser.add_argument("--smoke", action="store_true", help="tiny model on CPU")
    options = parser.parse_args(argv)
    if options.smoke:
        options.models = "tiny"
    bench = Bench(options)
    if len(bench.cards) < (1 if options.profile else 2):
        print("at least 2 GPUs are needed, 1 for --profile (or --smoke)", file=sys.stderr)
        return 2
    for name in options.models.split(","):
        run_model(bench, name)
    compare(bench.rows)
    device = "cpu" if options.smoke else f"{len(bench.cards)} x {torch.cuda.get_device_name(0)}"
    facts = {"device": device, "link": "none" if options.smoke else link(), "torch": torch.__version__}
    facts |= {"command": " ".join(["benchmarks/device_map.py", *(argv or sys.argv[1:])]), "options": vars(options)}
    if options.output:
        Path(options.output).write_text(json.dumps({**facts, "rows": bench.rows}, indent=1) + "\n", encoding="utf-8")
    print(f"\n{facts['device']}, {facts['link']}, torch {facts['torch']}, checkpointing {options.checkpointing}, {options.seq} tokens\n")
    print(table(bench.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
