"""From files or a dataset's name to samples: tokenised once per node, cached by content, packed.

What the main process prints:

    training on text: column text
    train: 1,204 documents, 11,532,110 tokens (mean 9,578, longest 402,113); left out: 3 empty or blank files (a.py, b.py, c.py)
    train: 11,263 samples of up to 1,024 tokens (concat, documents isolated), 99.9% of their places filled; 11,262 cuts through documents

`harness tokenize` (or `python -m harness.data`) does the same as a step of its own, without GPUs.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from harness.args import Arguments, DataArguments
from harness.batches import StepBatch
from harness.findings import Finding, UserError, user_error
from harness.mixtures import Concatenation, Mixture, read_mix
from harness.parsing import parse_args
from harness.preparation import DataReport, Preparer, preview, sources_of, validation_source
from harness.step_loader import SampleList, SampleSource, StepLoader, longest_possible_step, longest_step
from harness.streaming import StreamDataset, StreamLoader

Say = Callable[[str], None]


@dataclasses.dataclass
class PreparedData:
    """What a run trains and evaluates on.

    Attributes:
        train, evaluation: samples; evaluation is None where there is none.
        report, evaluation_report: counts by source; of data that came tokenised there are none.
        findings: what the user should know.
        pad_id: token to put into padding.
        block_size: most tokens per sample.
        source_names: names of a mixture's sources by number; one name without a mixture.
    """

    train: SampleSource | StreamDataset
    evaluation: SampleSource | None
    report: dict[str, DataReport]
    evaluation_report: dict[str, DataReport]
    findings: list[Finding]
    pad_id: int
    block_size: int
    source_names: list[str]


def prepare_data(
    args: DataArguments,
    tokenizer: Any,
    *,
    max_positions: int | None,
    seed: int,
    say: Say,
    is_local_main: bool,
    train_dataset: Any = None,
) -> PreparedData:
    """Training and evaluation samples: tokenised once per node, whichever of its processes comes first; the others wait on files.

    Args:
        args: which data, and how it becomes samples.
        tokenizer: transformers' tokenizer.
        max_positions: the model's limit, if it has one.
        seed: of a mixture's order.
        say: prints a line, on the main process.
        is_local_main: this is the node's first process.
        train_dataset: a user's own rows with `input_ids`, instead of what the arguments name.

    Raises:
        UserError: everything that is wrong with the data or the arguments.
        PreparationError: another process of this node failed; the message is its reason.
    """
    if train_dataset is not None:
        return _own_rows(args, tokenizer, train_dataset, max_positions, say, is_local_main)
    if args.streaming:
        data = _stream(args, tokenizer, max_positions, seed, say, is_local_main)
    elif args.dataset_mix:
        data = _mixture(args, tokenizer, max_positions, seed, say, is_local_main)
    else:
        preparer = Preparer(args, tokenizer, max_positions, say, is_local_main)
        source = preparer.prepare()
        evaluation_report = {} if source.evaluation_report is None else {"train": source.evaluation_report}
        data = PreparedData(
            source.train,
            source.evaluation,
            {"train": source.report},
            evaluation_report,
            preparer.findings,
            preparer.special.pad,
            preparer.block_size,
            ["train"],
        )
    for line in preview(data.train, tokenizer, data.train.first_of_each() if isinstance(data.train, Mixture) else None):
        say(line)
    return data


def _mixture(args: DataArguments, tokenizer: Any, max_positions: int | None, seed: int, say: Say, is_local_main: bool) -> PreparedData:
    entries, samples_per_epoch = read_mix(args)
    preparers = [Preparer(entry.args, tokenizer, max_positions, say, is_local_main) for entry in entries]
    sources = [preparer.prepare(entry.name) for preparer, entry in zip(preparers, entries, strict=True)]
    names = [entry.name for entry in entries]
    train = Mixture([source.train for source in sources], names, [entry.weight for entry in entries], seed, samples_per_epoch)
    for line in train.describe():
        say(line)
    held_out = [source.evaluation for source in sources]
    with_evaluation = [part for part in held_out if part is not None]
    evaluation = Concatenation(with_evaluation) if len(with_evaluation) == len(held_out) else None
    findings = list(dict.fromkeys(finding for preparer in preparers for finding in preparer.findings))
    if with_evaluation and evaluation is None:
        findings.append(Finding("warning", "--dataset_mix", "not every source has an evaluation set: no evaluation"))
    return PreparedData(
        train,
        evaluation,
        {name: source.report for name, source in zip(names, sources, strict=True)},
        {name: source.evaluation_report for name, source in zip(names, sources, strict=True) if source.evaluation_report},
        findings,
        preparers[0].special.pad,
        preparers[0].block_size,
        names,
    )


def _stream(args: DataArguments, tokenizer: Any, max_positions: int | None, seed: int, say: Say, is_local_main: bool) -> PreparedData:
    """Training data that is read while training runs; evaluation data are prepared as ever."""
    problems = []
    if args.dataset_mix:
        problems.append(Finding("error", "--streaming", "does not go together with --dataset_mix", "leave one out"))
    if args.max_train_samples is not None:
        problems.append(Finding("error", "--max_train_samples", "a stream has no first samples", "use --max_steps"))
    if args.streaming_buffer_size < 1:
        problems.append(Finding("error", "--streaming_buffer_size", f"must be at least 1, not {args.streaming_buffer_size}"))
    if args.train_sampling_strategy == "group_by_length":
        problems.append(Finding("error", "--train_sampling_strategy", "a stream cannot be grouped by length", "leave it out"))
    if problems:
        raise UserError(problems)
    preparer = Preparer(args, tokenizer, max_positions, say, is_local_main)
    if args.dataloader_num_workers:
        preparer.findings.append(
            Finding("info", "--dataloader_num_workers", "a stream needs none: what comes next is tokenised in the background as it is")
        )
    source, evaluation_source = sources_of(args)
    train = StreamDataset(preparer, source, args.streaming_buffer_size, seed, args.train_sampling_strategy == "random")
    evaluation, reports = None, {}
    if evaluation_source is not None:
        evaluation, reports["train"] = preparer.samples(
            preparer.store(evaluation_source, "evaluation"), None, "evaluation", args.max_eval_samples
        )
    else:
        preparer.findings.append(Finding("info", "--streaming", "nothing is held out of a stream: evaluation needs --validation_file"))
    return PreparedData(train, evaluation, {}, reports, preparer.findings, preparer.special.pad, preparer.block_size, ["train"])


def build_loader(
    args: DataArguments,
    data: PreparedData,
    *,
    global_batch_size: int,
    num_processes: int,
    process_index: int,
    seed: int,
    pin_memory: bool = False,
) -> StepLoader | StreamLoader:
    """The loader that fits prepared data, with the run's options. Arguments as `StepLoader`'s.

    Raises:
        UserError: too little data for this many ranks.
    """
    if isinstance(data.train, StreamDataset):
        return StreamLoader(
            data.train,
            global_batch_size=global_batch_size,
            num_processes=num_processes,
            process_index=process_index,
            pad_id=data.pad_id,
            pin_memory=pin_memory,
        )
    return StepLoader(
        data.train,
        global_batch_size=global_batch_size,
        num_processes=num_processes,
        process_index=process_index,
        seed=seed,
        strategy=args.train_sampling_strategy,
        drop_last=args.dataloader_drop_last,
        num_workers=args.dataloader_num_workers,
        pad_id=data.pad_id,
        pin_memory=pin_memory,
    )


def dry_run_step(data: PreparedData, num_samples: int, *, pin_memory: bool = False) -> StepBatch:
    """A step of the longest samples the data can produce, longest first: `num_samples` for this rank."""
    if isinstance(data.train, StreamDataset):
        return longest_possible_step(num_samples, data.block_size, pad_id=data.pad_id)
    return longest_step(data.train, num_samples, pad_id=data.pad_id, pin_memory=pin_memory)


def _own_rows(args: DataArguments, tokenizer: Any, rows: Any, max_positions: int | None, say: Say, is_local_main: bool) -> PreparedData:
    """A user's own dataset, taken as it is: nothing is packed, split or cached."""
    preparer = Preparer(args, tokenizer, max_positions, say, is_local_main)
    train = SampleList(rows)
    if max_positions is not None and len(train) and train.longest > max_positions:
        raise user_error(
            "train_dataset", f"a row has {train.longest} tokens, over the model's limit of {max_positions} positions", "cut the rows"
        )
    if not len(train):
        raise user_error("train_dataset", "has no rows", "give at least one row with input_ids")
    evaluation = None
    source = validation_source(args)
    if source is not None:
        store = preparer.store(source, "evaluation")
        evaluation, _ = preparer.samples(store, None, "evaluation", args.max_eval_samples)
    return PreparedData(train, evaluation, {}, {}, preparer.findings, preparer.special.pad, train.longest, ["train"])


def main(argv: Sequence[str] | None = None) -> int:
    """`harness tokenize`: prepares the data of a run, with the run's own arguments, so that the run finds it in the cache.

    Returns:
        0, or 2 for wrong input.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    if any(token in ("-h", "--help") for token in tokens):
        print(_USAGE)
        return 0
    try:
        args = parse_args(_with_placeholders(tokens))
        tokenizer, max_positions = _tokenizer(args, with_model=_names_a_model(tokens))
        data = prepare_data(args.data, tokenizer, max_positions=max_positions, seed=args.train.seed, say=print, is_local_main=True)
    except UserError as error:
        for finding in error.findings:
            print(finding.line(), file=sys.stderr)
        return 2
    for finding in data.findings:
        print(finding.line())
    return 0


_USAGE = """usage: harness tokenize RUN_ARGUMENTS

Tokenises and packs the data of a run, without GPUs. Takes the arguments of the run itself (all of them, or those about model, tokenizer
and data), and the run then finds the result in the cache:

    harness tokenize --model_name_or_path gpt2 --train_file corpus.jsonl --block_size 1024
    harness tokenize --config run.yaml"""


def _with_placeholders(tokens: list[str]) -> list[str]:
    """A preparation writes no output folder, so it need not be given; nor a model, where tokenizer and length of samples are."""
    tokens = tokens if _given(tokens, "output_dir") else [*tokens, "--output_dir", "unused"]
    return tokens if _names_a_model(tokens) else [*tokens, "--model_type", "llama"]


def _given(tokens: list[str], *names: str) -> bool:
    flags = {token.partition("=")[0].replace("-", "_") for token in tokens if token.startswith("--")}
    return any(f"__{name}" in flags for name in names)


def _names_a_model(tokens: list[str]) -> bool:
    """False where a tokenizer and `--block_size` say all that a preparation needs."""
    others = _given(tokens, "model_name_or_path", "config_name", "model_type", "config")
    return others or not (_given(tokens, "tokenizer_name") and _given(tokens, "block_size"))


def _tokenizer(args: Arguments, with_model: bool) -> tuple[Any, int | None]:
    """The run's tokenizer, and its model's limit of positions where there is a model."""
    from harness import modeling  # imports torch, which wrong arguments need not wait for

    return modeling.load_tokenizer(args.model), modeling.max_positions(modeling.load_config(args.model)) if with_model else None


if __name__ == "__main__":
    sys.exit(main())
