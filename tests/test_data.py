"""From files to losses: preparation as a run does it."""

from __future__ import annotations

import collections
import json
import shutil

import numpy as np
import pytest
import yaml

from harness import data as data_module
from harness.args import DataArguments
from harness.batches import IGNORE
from harness.data import prepare_data
from harness.findings import UserError
from harness.parsing import parse_args
from harness.preparation import resolve_block_size
from harness.step_loader import StepLoader, eval_batches, longest_step
from tests.data_tokenizers import byte_tokenizer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "five", "boxing", "wizards", "look", "on"]


def corpus(path, num_rows, seed=0, mark=""):
    """A .jsonl file of short texts that differ."""
    rng = np.random.default_rng(seed)
    lines = [json.dumps({"text": f"{mark}{number} " + " ".join(rng.choice(WORDS, rng.integers(1, 30)))}) for number in range(num_rows)]
    path.write_text("\n".join(lines))
    return path


def prepare(tmp_path, tokenizer=None, max_positions=1024, say=lambda line: None, seed=0, **options):
    options = {"data_cache_dir": str(tmp_path / "cache"), "block_size": 64, "validation_split_percentage": 0.0} | options
    options = {
        name: [str(item) for item in value] if name in ("train_file", "validation_file") else value for name, value in options.items()
    }
    args = DataArguments(**options)
    return prepare_data(args, tokenizer or byte_tokenizer(), max_positions=max_positions, seed=seed, say=say, is_local_main=True)


def texts_of(dataset, tokenizer):
    """Every document of a dataset whose documents are whole."""
    texts = []
    for index in range(len(dataset)):
        sample = dataset[index]
        for number in range(sample["document_ids"][-1] + 1):
            texts.append(tokenizer.decode(sample["input_ids"][sample["document_ids"] == number].tolist()))
    return texts


def test_from_a_file_to_samples_and_what_is_said(tmp_path):
    tokenizer = byte_tokenizer()
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "Hello"}\n{"text": ""}\n{"text": "Bye, é"}\n')
    said = []
    data = prepare(tmp_path, tokenizer, train_file=[path], packing="best_fit", say=said.append)
    assert texts_of(data.train, tokenizer) == ["Hello</s>", "Bye, é</s>"]
    assert said == [
        "training on text: column text",
        "train: 2 documents, 14 tokens (mean 7, longest 8); left out: 1 empty rows",
        "train: 1 samples of up to 64 tokens (best_fit, documents isolated), 21.9% of their places filled",
        "sample 0: 14 tokens (+ trained on, - not)",
        "  - 'H'",
        "  + 'ello</s>'",
        "  - 'B'",
        "  + 'ye, é</s>'",
    ]
    report = data.report["train"]
    assert (report.num_documents, report.num_tokens, report.dropped) == (2, 14, {"empty rows": 1})
    assert data.evaluation is None
    assert data.pad_id == tokenizer.pad_token_id


def test_it_is_made_once_and_again_only_when_something_changed(tmp_path, monkeypatch):
    tokenized = []
    original = data_module.Preparer._tokenise
    monkeypatch.setattr(data_module.Preparer, "_tokenise", lambda *a: (tokenized.append(1), original(*a))[1])
    path = corpus(tmp_path / "a.jsonl", 50)
    first = prepare(tmp_path, train_file=[path])
    again = prepare(tmp_path, train_file=[path])
    assert len(tokenized) == 1
    assert first.train.fingerprint == again.train.fingerprint
    other_blocks = prepare(tmp_path, train_file=[path], block_size=32)
    assert len(tokenized) == 1  # packing does not tokenise
    assert other_blocks.train.fingerprint != first.train.fingerprint
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes())
    assert prepare(tmp_path, train_file=[copy]).train.fingerprint == first.train.fingerprint
    assert len(tokenized) == 1  # equal contents under another name
    prepare(tmp_path, train_file=[path], add_eos=False)
    prepare(tmp_path, tokenizer=byte_tokenizer(("<more>",)), train_file=[path])
    assert len(tokenized) == 3
    prepare(tmp_path, train_file=[path], overwrite_cache=True)
    assert len(tokenized) == 4
    corpus(path, 51)
    assert prepare(tmp_path, train_file=[path]).report["train"].num_documents == 51
    assert len(tokenized) == 5


def test_a_deleted_or_damaged_store_is_made_again(tmp_path):
    import shutil

    path = corpus(tmp_path / "a.jsonl", 20)
    first = prepare(tmp_path, train_file=[path])
    folder = first.train.store.folder
    shutil.rmtree(folder)
    assert prepare(tmp_path, train_file=[path]).train.fingerprint == first.train.fingerprint
    (folder / "meta.json").write_text("{")
    again = prepare(tmp_path, train_file=[path]).train
    assert [again[i]["input_ids"].tolist() for i in range(len(again))] == [first.train[i]["input_ids"].tolist() for i in range(len(again))]


WORLDS = [
    (1, 0),
    (2, 0),
    (3, 0),
    (8, 0),
    (1, 2),
    (3, 2),
    pytest.param(2, 2, marks=pytest.mark.slow),
    pytest.param(8, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
@pytest.mark.parametrize(("num_processes", "num_workers"), WORLDS)
def test_an_epoch_trains_on_every_token_once(tmp_path, packing, num_processes, num_workers):
    """Also where it is resumed in the middle by another number of ranks."""
    tokenizer = byte_tokenizer()
    path = corpus(tmp_path / "a.jsonl", 120)
    documents = [tokenizer(json.loads(line)["text"])["input_ids"] + [tokenizer.eos_token_id] for line in path.read_text().splitlines()]
    expected = collections.Counter(token for document in documents for token in document[1:])
    train = prepare(tmp_path, tokenizer, train_file=[path], packing=packing).train
    alone = StepLoader(train, global_batch_size=24, num_processes=1, process_index=0, seed=1)
    end = alone.steps_per_epoch
    resumed_at = end // 2
    order = [sample["input_ids"].tolist() for k in range(end) for sample in alone.step(k).samples]
    seen = collections.Counter()
    parts = {}
    for world, first, last in ((num_processes, 0, resumed_at), (num_processes % 3 + 1, resumed_at, end)):
        for rank in range(world):
            options = {"global_batch_size": 24, "num_processes": world, "process_index": rank, "num_workers": num_workers}
            for k, step in enumerate(StepLoader(train, **options, seed=1).prefetching(first, last - first), first):
                parts[k, rank] = [sample["input_ids"].tolist() for sample in step.samples]
                for batch in step.micro_batches(2):
                    labels = batch.labels[:, 1:]
                    seen.update(labels[labels != IGNORE].tolist())
    assert end > 2 and seen == expected
    assert [sample for _, samples in sorted(parts.items()) for sample in samples] == order


def test_held_out_documents(tmp_path):
    tokenizer = byte_tokenizer()
    path = corpus(tmp_path / "a.jsonl", 200)
    data = prepare(tmp_path, tokenizer, train_file=[path], packing="best_fit", block_size=256, validation_split_percentage=10)
    train, held_out = texts_of(data.train, tokenizer), texts_of(data.evaluation, tokenizer)
    assert len(train) + len(held_out) == 200
    assert not set(train) & set(held_out)
    assert 0.08 < data.evaluation.num_tokens / (data.train.num_tokens + data.evaluation.num_tokens) < 0.13
    named = prepare(tmp_path, tokenizer, train_file=[path], validation_file=[corpus(tmp_path / "v.jsonl", 7, seed=3)], packing="none")
    assert len(named.evaluation) >= 7
    assert sum(batch.num_label_tokens for batch in eval_batches(named.evaluation, 2, 1, 0)) == sum(
        int((named.evaluation[i]["labels"][1:] != IGNORE).sum()) for i in range(len(named.evaluation))
    )


def test_one_saved_folder_for_training_and_evaluation(tmp_path):
    import datasets

    splits = {split: datasets.Dataset.from_dict({"text": [f"{split} {i}" for i in range(4)]}) for split in ("train", "validation")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    data = prepare(tmp_path, train_file=[tmp_path / "saved"], validation_file=[tmp_path / "saved"], packing="none")
    assert texts_of(data.train, byte_tokenizer()) == [f"train {i}</s>" for i in range(4)]
    assert texts_of(data.evaluation, byte_tokenizer()) == [f"validation {i}</s>" for i in range(4)]


def test_sample_limits(tmp_path):
    path = corpus(tmp_path / "a.jsonl", 100)
    data = prepare(tmp_path, train_file=[path], packing="none", max_train_samples=5, max_eval_samples=2, validation_split_percentage=20)
    assert (len(data.train), len(data.evaluation)) == (5, 2)
    said: list[str] = []
    options = {"train_file": [path], "block_size": 8, "validation_split_percentage": 0, "say": said.append}
    whole = prepare(tmp_path, **options).report["train"]
    prepare(tmp_path, **options, max_train_samples=5)
    line = next(line for line in said if line.startswith("train: 5 samples"))
    happened = f"the first of {whole.num_samples:,}, in which: {whole.packing['num_cuts']:,} cuts through documents"
    assert line.endswith(f"100.0% of their places filled; {happened}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--train_file: no training data was given"),
        ({"train_file": ["{dir}/none.txt"]}, "none.txt does not exist"),
        ({"train_file": ["{dir}/a.jsonl"], "dataset_name": "x"}, "and --dataset_name were both given"),
        ({"train_file": ["{dir}/a.jsonl"], "block_size": 2048}, "--block_size: 2048 is over the model's limit of 1024 positions"),
        ({"train_file": ["{dir}/short.txt"], "block_size": 512}, "has 6 tokens, fewer than one block of 512"),
        ({"train_file": ["{dir}/blank.jsonl"]}, "no usable token in the data: 2 empty rows"),
        (
            {"train_file": ["{dir}/body.jsonl"], "text_column": "text"},
            "there is no column 'text' .*body.jsonl, line 1.* -> there are body, title",
        ),
        ({"train_file": ["{dir}/broken.jsonl"]}, "broken.jsonl, line 2: no column 'text'; it has txet"),
        ({"train_file": ["{dir}/a.jsonl"], "add_bos": True}, "--add_bos: the tokenizer has no bos token"),
        ({"train_file": ["{dir}/long.jsonl"], "overlong": "drop", "packing": "none"}, "no sample is left"),
        ({"train_file": ["{dir}/chat.jsonl"]}, "the tokenizer has no chat template"),
        ({"train_file": ["{dir}/chat.jsonl"], "chat_template": "none.jinja"}, "cannot read none.jinja"),
        ({"train_file": ["{dir}/chat.jsonl"], "chat_template": "{{ eos_token }}"}, "chat.jsonl, line 1: no turn to train on"),
    ],
)
def test_wrong_input_is_named(tmp_path, options, message):
    files = {
        "a.jsonl": '{"text": "abc"}',
        "short.txt": "short",
        "blank.jsonl": '{"text": ""}\n{"text": " "}',
        "body.jsonl": '{"body": "x", "title": "y"}',
        "broken.jsonl": '{"text": "x"}\n{"txet": "y"}',
        "long.jsonl": json.dumps({"text": "x" * 100}),
        "chat.jsonl": '{"messages": [{"role": "user", "content": "x"}]}',
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    options = {key: [item.format(dir=tmp_path) for item in value] if isinstance(value, list) else value for key, value in options.items()}
    with pytest.raises(UserError, match=message):
        prepare(tmp_path, byte_tokenizer(bos_token=None), **options)


def test_bad_rows_can_be_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n{"txet": "y"}\n{"text": 3}\n{"text": "to\n["w"]\n{"text": "zz"}')
    with pytest.raises(UserError) as caught:
        prepare(tmp_path, train_file=[path], packing="none")
    assert [finding.message.removeprefix(f"{path}, ").split(":")[0] for finding in caught.value.findings] == [
        f"line {number}" for number in (2, 3, 4, 5)
    ]
    data = prepare(tmp_path, train_file=[path], bad_rows="skip", packing="none")
    assert len(data.train) == 2
    assert data.report["train"].dropped == {"bad rows": 4}


def test_a_row_without_prompt_and_completion_is_one_bad_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "x", "a": "y"}\n{"b": "y"}\n{"q": "xx", "a": "yy"}')
    data = prepare(tmp_path, train_file=[path], prompt_column="q", completion_column="a", bad_rows="skip", packing="none")
    assert data.report["train"].dropped == {"bad rows": 1}


def test_a_first_row_that_cannot_be_read_ends_the_run_in_any_case(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": \n{"text": "zz"}')
    with pytest.raises(UserError, match=r"line 1: not valid JSON.* -> mend or remove this first row"):
        prepare(tmp_path, train_file=[path], bad_rows="skip")


@pytest.mark.parametrize(
    ("flag", "value"),
    [("max_train_samples", 0), ("max_eval_samples", -1), ("preprocessing_num_workers", 0), ("dataloader_num_workers", -1)],
)
def test_numbers_that_mean_nothing_are_refused(flag, value):
    least = 0 if flag == "dataloader_num_workers" else 1
    with pytest.raises(UserError, match=f"--{flag}: must be at least {least}, not {value}"):
        parse_args(
            ["--model_type", "llama", "--tokenizer_name", "bytes", "--train_file", "a", "--output_dir", "o", f"--{flag}", str(value)]
        )


def test_default_block_size():
    assert [resolve_block_size(None, limit) for limit in (None, 1024, 131072)] == [4096, 1024, 4096]


def test_conversations_end_to_end(tmp_path):
    tokenizer = byte_tokenizer(("<|im_start|>", "<|im_end|>"))
    path = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    path.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"messages": turns[:1]}))
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    options = {"train_file": [path], "chat_template": str(template), "packing": "none"}
    with pytest.raises(UserError, match=r"chat.jsonl, line 2: no turn to train on"):
        prepare(tmp_path, tokenizer, **options)
    said = []
    data = prepare(tmp_path, tokenizer, **options, bad_rows="skip", say=said.append)
    labels = data.train[0]["labels"]
    assert tokenizer.decode(labels[labels != IGNORE].tolist()) == "4<|im_end|>"
    assert said[1].startswith("train: 1 documents, 26 tokens (mean 26, longest 26), 2 of them trained on; left out: 1 bad rows")


def test_a_dataset_by_name_with_configurations(tmp_path, monkeypatch):
    """A local folder with a dataset card stands for a hub name."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "set"
    for config in ("red", "blue"):
        for split in ("train", "validation"):
            path = folder / config / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            corpus(path, 6 if split == "train" else 3, mark=f"{config} {split} ")
    configs = [
        {"config_name": config, "data_files": [{"split": s, "path": f"{config}/{s}.jsonl"} for s in ("train", "validation")]}
        for config in ("red", "blue")
    ]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    tokenizer = byte_tokenizer()
    data = prepare(tmp_path, tokenizer, dataset_name=str(folder), dataset_config_name="blue", packing="none", block_size=512)
    assert [text[:12] for text in texts_of(data.train, tokenizer)] == [f"blue train {i}" for i in range(6)]
    assert [text[:17] for text in texts_of(data.evaluation, tokenizer)] == [f"blue validation {i}" for i in range(3)]
    with pytest.raises(UserError, match="has several configurations -> choose one of red, blue"):
        prepare(tmp_path, tokenizer, dataset_name=str(folder))
    with pytest.raises(UserError, match="has no configuration green -> it has red, blue"):
        prepare(tmp_path, tokenizer, dataset_name=str(folder), dataset_config_name="green")
    with pytest.raises(UserError, match="--dataset_name: cannot load"):
        prepare(tmp_path, tokenizer, dataset_name=str(tmp_path / "nothing"))


def test_a_dataset_of_the_hub_without_a_network(tmp_path, monkeypatch):
    """What an earlier load left in the cache of `datasets` is found by name, and its configurations are listed."""
    import datasets
    import huggingface_hub

    made = tmp_path / "set"
    for config in ("red", "blue"):
        (made / config).mkdir(parents=True)
        for split, size in (("train", 4), ("validation", 2)):
            corpus(made / config / f"{split}.jsonl", size, mark=f"{config} {split} ")
    configs = [{"config_name": config, "data_dir": config} for config in ("red", "blue")]
    (made / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    for config in ("red", "blue"):
        builder = datasets.load_dataset_builder(str(made), config, cache_dir=str(tmp_path / "made"))
        builder.download_and_prepare()
        shutil.copytree(builder.cache_dir, tmp_path / "hf" / "owner___set" / config / "0.0.0" / "abc")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    options = {"packing": "none", "block_size": 512}
    data = prepare(tmp_path, dataset_name="owner/set", dataset_config_name="blue", **options)
    assert [text[:12] for text in texts_of(data.train, byte_tokenizer())] == [f"blue train {i}" for i in range(4)]
    assert [text[:17] for text in texts_of(data.evaluation, byte_tokenizer())] == [f"blue validation {i}" for i in range(2)]
    with pytest.raises(UserError, match="has several configurations -> choose one of blue, red"):
        prepare(tmp_path, dataset_name="owner/set", **options)
    with pytest.raises(UserError, match="has no configuration green -> it has blue, red"):
        prepare(tmp_path, dataset_name="owner/set", dataset_config_name="green", **options)
    with pytest.raises(UserError, match=r"cannot load owner/other: Couldn't reach .* -> check the name, the network"):
        prepare(tmp_path, dataset_name="owner/other", **options)


def write_mix(tmp_path, text):
    path = tmp_path / "mix.yaml"
    path.write_text(text.format(dir=tmp_path))
    return str(path)


MIX = "sources:\n- {{name: a, weight: 3, train_file: '{dir}/a.jsonl'}}\n- {{name: b, weight: 1, train_file: ['{dir}/b.jsonl']}}\n"


def test_a_mixture_has_its_shares_and_its_order_is_reproducible(tmp_path):
    tokenizer = byte_tokenizer()
    corpus(tmp_path / "a.jsonl", 30, mark="A")
    corpus(tmp_path / "b.jsonl", 50, mark="B")
    said = []
    options = {"dataset_mix": write_mix(tmp_path, MIX), "packing": "none", "block_size": 512}
    data = prepare(tmp_path, tokenizer, say=said.append, **options)
    assert data.source_names == ["a", "b"]
    assert "mixture: a: 60 of 80 samples per epoch (75.0%), 2.00 times its 30" in said
    assert "mixture: b: 20 of 80 samples per epoch (25.0%), 0.40 times its 50" in said
    assert [line.split(":")[0] for line in said if "+ trained on" in line] == ["a sample of a", "a sample of b"]
    assert [line[:7] for line in said if line.startswith("  - ")] == ["  - 'A'", "  - 'B'"]
    orders = []
    for num_processes in (1, 2):
        loaders = [
            StepLoader(data.train, global_batch_size=8, num_processes=num_processes, process_index=rank, seed=5)
            for rank in range(num_processes)
        ]
        steps = [[loader.step(k) for loader in loaders] for k in range(50)]
        orders.append(
            [
                (source, tokenizer.decode(sample["input_ids"].tolist()))
                for parts in steps
                for part in parts
                for source, sample in zip(part.source_ids, part.samples, strict=True)
            ]
        )
    assert orders[0] == orders[1]
    assert all(text.startswith("AB"[source]) for source, text in orders[0])
    for epoch in range(5):
        assert [source for source, _ in orders[0][epoch * 80 : (epoch + 1) * 80]].count(0) == 60
    used = collections.Counter(text for source, text in orders[0] if source == 0)
    assert set(used.values()) == {10}  # 5 epochs of 60 are 10 times 30
    assert set(collections.Counter(text for source, text in orders[0] if source == 1).values()) == {2}
    again = prepare(tmp_path, tokenizer, **options)
    assert again.train.fingerprint == data.train.fingerprint
    batch = StepLoader(again.train, global_batch_size=8, num_processes=1, process_index=0, seed=5).step(3).micro_batches(8)[0]
    assert batch.source_ids.tolist() == [source for source, _ in orders[0][24:32]]
    longest = max(len(json.loads(line)["text"]) + 1 for name in "ab" for line in (tmp_path / f"{name}.jsonl").read_text().splitlines())
    assert longest_step(data.train, 2).longest == longest
    with pytest.raises(UserError, match="a mixture of sources has only a random order, not sequential"):
        StepLoader(data.train, global_batch_size=8, num_processes=1, process_index=0, seed=5, strategy="sequential")


def test_a_mixtures_evaluation_knows_its_sources(tmp_path):
    corpus(tmp_path / "a.jsonl", 30)
    corpus(tmp_path / "b.jsonl", 50)
    options = {"dataset_mix": write_mix(tmp_path, MIX), "packing": "none", "validation_split_percentage": 20}
    data = prepare(tmp_path, **options)
    counts = collections.Counter(source for batch in eval_batches(data.evaluation, 3, 1, 0) for source in batch.source_ids.tolist())
    assert counts == {number: len(part) for number, part in enumerate(data.evaluation.parts)}


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("sources: []", ["has no list of sources"]),
        (
            "weights: 3\nsources:\n- {{train_file: x, wieght: 2}}\n- {{name: y}}",
            ["unknown key 'weights'", "did you mean weight?", "needs either"],
        ),
        ("sources:\n- {{train_file: x, weight: 0}}", ["weight must be a positive number, not 0"]),
        ("sources:\n- {{train_file: x, name: 'a | b'}}", ["'a | b' cannot be a source's name in the log -> give it a name of letters"]),
        ("sources:\n- {{train_file: x}}\n- {{train_file: x}}", ["two sources have the name x"]),
        ("samples_per_epoch: many\nsources:\n- {{train_file: x}}", ["samples_per_epoch must be a positive whole number, not 'many'"]),
        (MIX.replace("weight: 1", "weight: 0.001"), ["b gets none of the 80 samples of an epoch"]),
    ],
)
def test_wrong_mixture_files(tmp_path, text, messages):
    corpus(tmp_path / "a.jsonl", 30)
    corpus(tmp_path / "b.jsonl", 50)
    with pytest.raises(UserError) as caught:
        prepare(tmp_path, dataset_mix=write_mix(tmp_path, text), packing="none", block_size=512)
    for message in messages:
        assert message in str(caught.value)


def test_ones_own_rows(tmp_path):
    tokenizer = byte_tokenizer()
    args = DataArguments(data_cache_dir=str(tmp_path))
    options = {"max_positions": 8, "seed": 0, "say": print, "is_local_main": True}
    data = prepare_data(args, tokenizer, train_dataset=[{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], **options)
    assert (len(data.train), data.evaluation, data.block_size) == (2, None, 3)
    with pytest.raises(UserError, match="a row has 9 tokens, over the model's limit of 8"):
        prepare_data(args, tokenizer, train_dataset=[{"input_ids": list(range(9))}], **options)
    with pytest.raises(UserError, match="has no rows"):
        prepare_data(args, tokenizer, train_dataset=[], **options)


def test_tokenize_command(tmp_path, capsys):
    path = corpus(tmp_path / "a.jsonl", 40)
    command = ["--model_type", "llama", "--tokenizer_name", "bytes", "--data_cache_dir", str(tmp_path / "cache"), "--block_size", "64"]
    assert data_module.main([*command, "--train_file", str(path)]) == 0
    assert "train: 40 documents" in capsys.readouterr().out
    assert any(entry.name.startswith("tokens-") for entry in (tmp_path / "cache").iterdir())
    assert data_module.main([*command, "--train_file", str(tmp_path / "b.jsonl")]) == 2
    assert "b.jsonl does not exist -> did you mean" in capsys.readouterr().err
    assert data_module.main(["--help"]) == 0
    assert "usage: harness tokenize" in capsys.readouterr().out


def test_tokenizing_needs_a_tokenizer_and_a_length_but_no_model(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some words\n" * 2000)
    common = ["--train_file", str(tmp_path / "text.txt"), "--data_cache_dir", str(tmp_path / "cache"), "--tokenizer_name", "bytes"]
    assert data_module.main([*common, "--block_size", "8192"]) == 0  # longer than a default model's limit: there is no model
    assert data_module.main(common) == 2
    assert "--model_name_or_path" in capsys.readouterr().err
