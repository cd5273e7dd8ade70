"""Tokens per second of one process over several cards: pipelined micro-batches against accelerate's dispatch, same map, same job, one run.

    python benchmarks/device_map.py --models 1b,8b --micro_batches 8,16 --output device_map.json

For each model and number of micro-batches: accelerate's plain dispatch, our pipeline with all micro-batches in flight and with as many as
there are cards, and the pipeline with the loss in pieces as training uses it; each with the peak memory of every card. Then the peaks under
accelerate's `auto` map and under `dynamic`, and the same job on one card where it fits. A step is forward and backward of all micro-batches
(bf16 weights, activation checkpointing) and one AdamW update. The model has random weights; nothing is downloaded. Any number of cards.

`--smoke` runs a tiny model on CPU, to see that the script works; its speeds mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from harness.blocks import set_activation_checkpointing
from harness.engines.device_map import fill_placed
from harness.loss import install_loss
from harness.model_units import MapJob
from harness.modeling import EmptyModel
from harness.partition import Device, pipeline_speedup
from harness.pipeline import Pipeline
from harness.placement import USABLE_SHARE, MapChoice, Placing, choose_device_map, free_memory, meta_model, torch_device

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

    def config(self, model: str) -> Any:
        from transformers import LlamaConfig

        heads = SHAPES[model]["num_attention_heads"]
        config = LlamaConfig(**SHAPES[model], num_key_value_heads=min(8, heads), max_position_embeddings=8192, tie_word_embeddings=False)
        config.use_cache = False
        return config

    def choose(self, config: Any, strategy: str, micro_batches: int, cards: Sequence[Device] | None = None) -> MapChoice:
        job = MapJob(
            training_bytes_per_param=6.0,  # bf16 gradients and two bf16 states
            num_tokens=self.options.micro_batch_size * self.options.seq,
            in_flight=micro_batches,
            activation_checkpointing=self.options.checkpointing == "full",
        )
        free = {card: size for card, size in self.free.items() if cards is None or card in cards}
        usable = {card: int(size * USABLE_SHARE) for card, size in free.items()}
        return choose_device_map(meta_model(config, torch.bfloat16), strategy, Placing(cards=usable, free=free, job=job))

    def build(self, config: Any, device_map: dict[str, Device]) -> Any:
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        with init_empty_weights(include_buffers=False), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.tie_weights()
        places: dict[str, Device] = dict.fromkeys(device_map, "cpu") if self.smoke else device_map
        model = fill_placed(EmptyModel(model, model.config, None, torch.bfloat16, 0), places)
        set_activation_checkpointing(model, self.options.checkpointing)
        return model.train()

    def tokens(self, micro_batches: int, vocab_size: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.options.micro_batch_size, self.options.seq)
        return [torch.randint(0, vocab_size, shape, generator=generator) for _ in range(micro_batches)]

    def synchronize(self) -> None:
        for card in self.cards if not self.smoke else ():
            torch.cuda.synchronize(card)

    def measure(self, model: Any, step: Callable[[], list[torch.Tensor]]) -> dict[str, Any]:
        """Median time of a step with its update, peaks of each card, and the loss of the first step (before any update)."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not self.smoke)
        times: list[float] = []
        first = 0.0
        for repeat in range(self.options.repeats + 2):
            if repeat == 2:  # behind the first two, which allocate
                for card in self.cards if not self.smoke else ():
                    torch.cuda.reset_peak_memory_stats(card)
            self.synchronize()
            started = time.perf_counter()
            losses = step()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.synchronize()
            times.append(time.perf_counter() - started)
            if repeat == 0:
                first = sum(float(loss) for loss in losses)
        seconds = sorted(times[2:])[len(times[2:]) // 2]
        peaks = [] if self.smoke else [round(torch.cuda.max_memory_allocated(card) / 2**30, 2) for card in self.cards]
        return {"step_s": round(seconds, 4), "first_loss": first, "peak_gib": peaks}

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


def hf_loss(model: Any, ids: torch.Tensor, labels: torch.Tensor, num: int) -> torch.Tensor:
    return model(input_ids=ids, labels=labels).loss / num


def plain_row(bench: Bench, name: str, config: Any, device_map: dict[str, Device], num: int) -> None:
    """accelerate's dispatch, one micro-batch after the other."""
    model = bench.build(config, device_map)
    if not bench.smoke and len(set(device_map.values())) > 1:
        from accelerate import dispatch_model

        model = dispatch_model(model, device_map)
    first = "cpu" if bench.smoke else torch_device(min(device for device in device_map.values() if isinstance(device, int)))
    batches = [ids.to(first) for ids in bench.tokens(num, config.vocab_size)]

    def step() -> list[torch.Tensor]:
        losses = []
        for ids in batches:
            loss = hf_loss(model, ids, ids, num)
            loss.backward()
            losses.append(loss.detach())
        return losses

    kind = "one card" if len(set(device_map.values())) == 1 else "accelerate"
    bench.row(model=name, micro_batches=num, kind=kind, **bench.measure(model, step))


def piped_row(bench: Bench, name: str, config: Any, choice: MapChoice, num: int, depth: int, kind: str, *, pieces: bool = False) -> None:
    """Our pipeline on the same map; with `pieces` the loss is computed in pieces, as in training."""
    model = bench.build(config, choice.device_map)
    if pieces:
        install_loss(model, 1024)
    labels_of = {card: f"card {card}" for card in bench.cards}
    places: dict[str, Any] = {part: labels_of[place] for part, place in choice.device_map.items()} if bench.smoke else choice.device_map
    pipeline = Pipeline(model, places, recompute=bench.options.checkpointing != "none")
    start = torch.device("cpu") if bench.smoke else torch_device(pipeline.input_device)
    end = torch.device("cpu") if bench.smoke else torch_device(pipeline.head_device)
    inputs = [(ids.to(start), ids.to(end)) for ids in bench.tokens(num, config.vocab_size)]
    tokens = num * bench.options.micro_batch_size * (bench.options.seq - 1)

    def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> Callable[[], torch.Tensor]:
        if pieces:
            return lambda: model(input_ids=ids, labels=labels) / tokens
        return lambda: hf_loss(model, ids, labels, num)

    calls = [loss_of(*pair) for pair in inputs]
    bench.row(model=name, micro_batches=num, kind=kind, depth=depth or num, **bench.measure(model, lambda: pipeline.run(calls, depth)))


def run_model(bench: Bench, name: str) -> None:
    config = bench.config(name)
    numbers = [int(number) for number in bench.options.micro_batches.split(",")]
    for num in numbers:
        choice = bench.choose(config, "balanced", num)
        loads = [
            float(sum(1 for part in share.components if part.rpartition(".")[2].isdigit())) for share in choice.report.devices.values()
        ]
        bound = round(pipeline_speedup(loads, num), 2)
        print(f"{name}: layers a card {[int(load) for load in loads]}, {num} micro-batches, bound {bound}x", flush=True)
        with freed(bench):
            plain_row(bench, name, config, choice.device_map, num)
        with freed(bench):
            piped_row(bench, name, config, choice, num, 0, "pipeline")
        with freed(bench):
            piped_row(bench, name, config, choice, num, len(bench.cards), "pipeline, depth = cards")
        with freed(bench):
            piped_row(bench, name, config, choice, num, 0, "pipeline, loss in pieces", pieces=True)
    for strategy in ("auto", "dynamic"):
        with freed(bench):
            choice = bench.choose(config, strategy, numbers[0])
            piped_row(bench, name, config, choice, numbers[0], 0, f"map {strategy}")
            bench.rows[-1]["imbalance"] = round(choice.report.imbalance_ratio, 3)
            bench.rows[-1]["parts"] = {str(device): len(share.components) for device, share in choice.report.devices.items()}
    if name != "8b":
        with freed(bench):
            plain_row(bench, name, config, {"": bench.cards[0]}, numbers[0])


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
    single = {(row["model"], row["micro_batches"]): row for row in rows if row["kind"] == "one card"}
    for row in rows:
        key = (row["model"], row["micro_batches"])
        if key in plain:
            row["against_accelerate"] = round(row["tokens_per_second"] / plain[key]["tokens_per_second"], 3)
            row["loss_difference"] = abs(row["first_loss"] - plain[key]["first_loss"])
        if key in single:
            row["percent_of_one_card"] = round(100 * row["tokens_per_second"] / single[key]["tokens_per_second"], 1)


def table(rows: list[dict[str, Any]]) -> str:
    heads = ("model", "mb", "what", "tok/s", "x accelerate", "% of one card", "loss diff", "peak GiB a card")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        what = row["kind"] + (f" (imbalance {row['imbalance']})" if "imbalance" in row else "")
        loss = f"{row['loss_difference']:.1e}" if "loss_difference" in row else ""
        cells = [row["model"], row["micro_batches"], what, row["tokens_per_second"], row.get("against_accelerate", "")]
        cells += [row.get("percent_of_one_card", ""), loss, " ".join(map(str, row["peak_gib"]))]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default="1b,8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--micro_batches", default="8,16", help="micro-batches of a step")
    parser.add_argument("--micro_batch_size", type=int, default=1, help="samples of a micro-batch")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--repeats", type=int, default=4, help="measured steps; the median counts")
    parser.add_argument("--checkpointing", choices=["none", "full"], default="full", help="activation checkpointing")
    parser.add_argument("--output", default=None, help="JSON file for the results")
    parser.add_argument("--smoke", action="store_true", help="tiny model on CPU")
    options = parser.parse_args(argv)
    if options.smoke:
        options.models = "tiny"
    bench = Bench(options)
    if len(bench.cards) < 2:
        print("at least 2 GPUs are needed (or --smoke)", file=sys.stderr)
        return 2
    for name in options.models.split(","):
        run_model(bench, name)
    compare(bench.rows)
    device = "cpu" if options.smoke else f"{len(bench.cards)} x {torch.cuda.get_device_name(0)}"
    facts = {"device": device, "link": "none" if options.smoke else link(), "torch": torch.__version__, "options": vars(options)}
    if options.output:
        Path(options.output).write_text(json.dumps({**facts, "rows": bench.rows}, indent=1) + "\n", encoding="utf-8")
    print(f"\n{facts['device']}, {facts['link']}, torch {facts['torch']}, checkpointing {options.checkpointing}, {options.seq} tokens\n")
    print(table(bench.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
