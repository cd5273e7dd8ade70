"""A run against its model: can it be built and trained causally, and are there LoRA's targets, layers and a device map's modules in it.

The model is built empty from its config, before weights and data are read. Loads torch, so a run, which builds it soon anyway, asks
`names_modules` first.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch

from harness.args import Arguments, ModelArguments
from harness.argument_rules import names_in_lora
from harness.device_map_text import DEVICE_MAPS, read_device_map
from harness.findings import Finding, UserError
from harness.isolation import causal_findings, isolate_packed_documents
from harness.lora import attach_lora
from harness.model_units import check_device_map, check_devices
from harness.modeling import BYTES_TOKENIZER, fit_vocabulary, load_config, load_tokenizer, not_causal, tokenizer_name, unknown_attention
from harness.partition import normal_device
from harness.placement import meta_model


def model_findings(args: Arguments, num_gpus: int, *, with_tokenizer: bool = False) -> list[Finding]:
    """Everything that the empty model contradicts.

    Args:
        args: as parsed; not changed.
        num_gpus: cards of this machine that the caller knows of.
        with_tokenizer: also that the tokenizer does not fit the model, if it is on this machine.

    Returns:
        Errors; or one note where the model comes from the hub and is not to be had now, for the run itself says that.
    """
    num_gpus = max(num_gpus, torch.cuda.device_count())
    card = re.fullmatch(r"cuda(?::(\d+))?", args.maps.device_map or "")
    if card and not names_in_lora(args):
        return check_devices([int(card[1] or 0)], num_gpus)
    try:
        config = load_config(args.model)
        if refusal := not_causal(config):
            return [refusal]
        if with_tokenizer and args.model.model_name_or_path is None and _has_tokenizer(args.model):
            fit_vocabulary(config, load_tokenizer(args.model), args.model)
        model = meta_model(config, trust_remote_code=args.model.trust_remote_code)
    except UserError as error:
        source = args.model.config_name or args.model.model_name_or_path
        if source is None or Path(source).expanduser().exists():
            return error.findings
        found = error.findings[0]
        return [Finding("info", found.key, f"the model was not looked at: {found.message}")]
    findings = causal_findings(model, args.data.keeps_documents_apart)
    if (attention := args.model.attn_implementation) is not None:
        isolate_packed_documents()  # makes ours known
        findings += filter(None, [unknown_attention(attention)])
    if card:
        findings += check_devices([int(card[1] or 0)], num_gpus)
    elif args.maps.device_map is not None:
        findings += _map_findings(args.maps.device_map, model, num_gpus)
    if names_in_lora(args):
        try:
            attach_lora(model, copy.deepcopy(args.lora))
        except UserError as error:
            findings += error.findings
    return findings


def _has_tokenizer(args: ModelArguments) -> bool:
    """Whether one was named, and is on this machine."""
    name = tokenizer_name(args)
    return name is not None and (name == BYTES_TOKENIZER or Path(name).expanduser().exists())


def _map_findings(text: str, model: torch.nn.Module, num_gpus: int) -> list[Finding]:
    if text in DEVICE_MAPS:
        return []
    try:
        given = read_device_map(text)
    except UserError:
        return []  # said with the other arguments
    return check_device_map(model, {name: normal_device(device) for name, device in given.items()}, num_gpus)
