"""GPUs by name: memory, speed and links, from their makers' data sheets. Pure code."""

from __future__ import annotations

from harness.monitor import peak_flops
from harness.partition import GIB, parse_size
from harness.step_time import Hardware

# Name -> (memory as CUDA reports it, GiB; bandwidth, bytes/s; link inside a node per rank, bytes/s). Makers' data sheets; the link is
# what NCCL's ring reaches: about two thirds of NVLink's one-way figure, or PCIe where there is no NVLink.
CARDS: dict[str, tuple[float, float, float]] = {
    "B200": (178.4, 8.0e12, 600e9),
    "H200": (139.8, 4.8e12, 300e9),
    "H100": (79.1, 3.35e12, 300e9),
    "A100": (79.2, 2.0e12, 200e9),
    "A100-40GB": (39.4, 1.55e12, 200e9),
    "L40S": (44.4, 0.86e12, 20e9),
    "A6000": (47.5, 0.77e12, 20e9),
    "A10G": (22.0, 0.6e12, 12e9),
    "L4": (22.0, 0.3e12, 12e9),
    "RTX-4090": (23.5, 1.0e12, 20e9),
    "RTX-3090": (23.6, 0.94e12, 12e9),
    "V100": (31.7, 0.9e12, 100e9),
    "T4": (14.6, 0.3e12, 8e9),
}
# Compute capability before 8.0.
WITHOUT_BF16 = {"V100": "7.0", "T4": "7.5"}
# A card's label counts 2^30 bytes to the GB, of which CUDA shows a little less: 79.1 of "80GB", 139.8 of "141GB".
LABEL_SHARE = 0.985


def card_bytes(text: str) -> int:
    """Memory of a card: GiB (and MiB) are exact, GB is what stands on the card.

    Raises:
        ValueError: not a size.
    """
    size = parse_size(text)
    if text.strip().upper().endswith("IB"):
        return size
    return int(size / 1e9 * GIB * LABEL_SHARE)


def card_of_size(num_bytes: float) -> str:
    """The name of the card whose memory is nearest to a size; an H100 among equals."""
    return min(CARDS, key=lambda card: (abs(CARDS[card][0] - num_bytes / GIB), card != "H100"))


def is_size_of(name: str, num_bytes: float) -> bool:
    """Whether a known card has about this memory: what is given to its label, or what CUDA shows of it."""
    return abs(CARDS[name][0] * GIB / num_bytes - 1) < 0.1


def known_card(name: str) -> str | None:
    """The key of `CARDS` for a card as its driver calls it ("NVIDIA H100 80GB HBM3"); None for an unknown one."""
    words = set(name.upper().replace("-", " ").split())
    known = [card for card in CARDS if set(card.upper().split("-")) <= words]
    return max(known, key=len) if known else None


def hardware_of(name: str) -> Hardware:
    """Speeds of a card by name; an H100's where it is not known."""
    card = known_card(name)
    _, bandwidth, link = CARDS[card] if card else (0.0, Hardware.memory_bandwidth, Hardware.link_bandwidth)
    return Hardware(name=name, peak_flops=peak_flops(name) or Hardware.peak_flops, memory_bandwidth=bandwidth, link_bandwidth=link)
