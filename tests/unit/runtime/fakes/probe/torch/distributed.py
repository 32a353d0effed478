"""Stands in for torch.distributed: ranks meet in files of a folder."""

from __future__ import annotations

import time
from datetime import timedelta

from torch import FOLDER, RANK_MODE, Tensor  # type: ignore[import-not-found,unused-ignore]

SIZE = {"world": 0, "rank": 0}


class TCPStore:
    """Keys are files."""

    def __init__(
        self, host: str, port: int, world: int, is_master: bool, timeout: timedelta, wait_for_workers: bool
    ) -> None:
        while not is_master and not (FOLDER / "here-0").exists():
            time.sleep(0.02)

    def set(self, key: str, value: str) -> None:
        (FOLDER / key).write_text(value)

    def check(self, keys: list[str]) -> bool:
        return all((FOLDER / key).exists() for key in keys)

    def add(self, key: str, count: int) -> int:
        if count:
            (FOLDER / f"{key}-{time.monotonic_ns()}").touch()
        return len(list(FOLDER.glob(f"{key}-*")))


def PrefixStore(prefix: str, store: TCPStore) -> TCPStore:
    return store


def init_process_group(backend: str, store: TCPStore, rank: int, world_size: int, timeout: timedelta) -> None:
    SIZE.update(world=world_size, rank=rank)
    if RANK_MODE == "hang":
        time.sleep(60)


def all_reduce(tensor: Tensor) -> None:
    world, rank = SIZE["world"], SIZE["rank"]
    wrong = 1 if RANK_MODE == "wrong" else 0
    tensor.value = (tensor.value - rank) * world + world * (world - 1) / 2 + wrong
